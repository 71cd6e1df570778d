"""What is measured, and which of its cells may be seen."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.functional import request_of
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.scores import RelativeBias
from tests import oracle
from tests.drawing import Drawn, calls


def subject_of(case: Drawn, context: ProbeContext | None = None) -> MeasuredCall:
    request = request_of(case.q, case.k, case.v, case.mask, query_start=case.query_start, **case.options)
    logsumexp = torch.zeros(case.size.cells[:3])
    return MeasuredCall.from_request(request, logsumexp, ProbeContext() if context is None else context)


@settings(max_examples=60)
@given(case=calls(), data=st.data())
def test_single_cells_are_those_of_the_whole_mask_and_bias(case: Drawn, data: st.DataObject) -> None:
    size = case.size
    keys = torch.tensor(data.draw(st.lists(st.integers(-3, size.keys + 2), min_size=3, max_size=3)))
    keys = (keys + torch.arange(size.queries)[:, None]).expand(size.batch, -1, -1)
    inside = (keys >= 0) & (keys < size.keys)
    clamped = keys.clamp(0, size.keys - 1)[:, None].expand(-1, size.heads, -1, -1)
    seen = oracle.shown(case.mask, size.cells, case.query_start)
    bias = case.options.get("bias")
    if bias is not None:
        seen = seen & (bias != -torch.inf)
    subject = subject_of(case)
    found = subject.visible_at_keys(keys).expand(-1, size.heads, -1, -1)
    assert torch.equal(found, seen.gather(-1, clamped) & inside[:, None])
    if bias is not None:
        added = subject.bias_at(clamped[:, 0])
        assert added is not None
        assert torch.equal(added, bias.expand(size.cells).gather(-1, clamped))


def test_a_bias_along_diagonals_is_read_there() -> None:
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    bias = RelativeBias(torch.randn(1, 2, 7))
    subject = MeasuredCall.from_request(request_of(q, k, k, bias=bias), torch.zeros(1, 2, 3), ProbeContext())
    keys = torch.tensor([[[0, 4], [3, 1], [2, 2]]])
    added = subject.bias_at(keys)
    assert added is not None
    assert torch.equal(added, bias.tile(3, 5).gather(-1, keys[:, None].expand(-1, 2, -1, -1)))


@pytest.mark.parametrize(
    ("mask", "given_", "expected"),
    [
        (masks.Full(), None, [0, 0]),
        (masks.Drop(torch.tensor([[True, True, False], [True, True, True]]), "batch keys"), None, [2, -1]),
        (masks.Full(), -4, [-4, -4]),
        (masks.Full(), torch.tensor([1, 2]), [1, 2]),
    ],
    ids=str,
)
def test_the_first_key_is_told_or_the_first_that_is_seen(
    mask: masks.Mask, given_: int | Tensor | None, expected: list[int]
) -> None:
    q = torch.zeros(2, 1, 3, 4)
    subject = MeasuredCall.from_request(request_of(q, q, q, mask), torch.zeros(2, 1, 3), ProbeContext(first_key=given_))
    assert subject.first_keys.tolist() == expected


def test_rows_that_see_nothing_or_nan_are_left_out_by_a_huge_divisor() -> None:
    q = torch.zeros(1, 1, 3, 4)
    subject = MeasuredCall.from_request(
        request_of(q, q, q), torch.tensor([[[-torch.inf, torch.nan, 2.0]]]), ProbeContext()
    )
    assert subject.finite_logsumexp[0, 0, 2] == 2
    assert torch.equal((3.0 - subject.finite_logsumexp).exp(), torch.tensor([[[0, 0, torch.e]]]))
