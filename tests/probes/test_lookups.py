"""A few weights of each query are those of the whole map."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead.functional import attention_with_logsumexp, request_of
from multihead.probes.context import ProbeContext
from multihead.probes.lookups import is_small_set, weight_at_offset, weight_on_first_keys, weight_on_set
from multihead.probes.measured_call import MeasuredCall
from tests import oracle
from tests.drawing import Drawn, calls


@settings(max_examples=60)
@given(case=calls(), offset=st.integers(-4, 4), count=st.integers(1, 14), data=st.data())
def test_offsets_and_first_keys_are_cells_of_the_dense_map(
    case: Drawn, offset: int, count: int, data: st.DataObject
) -> None:
    q, k, size = case.q.double(), case.k.double(), case.size
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.options.items()}
    request = request_of(q, k, k, case.mask, query_start=case.query_start, **options)
    terms = {"mask": case.mask, "query_start": case.query_start, **options}
    _, logsumexp = attention_with_logsumexp(q, k, k, kernel="reference", **terms)
    seen = oracle.shown(case.mask, size.cells, case.query_start)
    p = oracle.attend(q, k, k, seen, **options).weights
    start = torch.tensor(oracle.positions_of_first(case.query_start, size.batch, size.queries, size.keys))
    key = torch.arange(size.keys)
    positions = (start[:, None] + torch.arange(size.queries))[:, None, :, None]
    first = torch.tensor(data.draw(st.lists(st.integers(-3, size.keys), min_size=size.batch, max_size=size.batch)))
    subject = MeasuredCall.from_request(request, logsumexp, ProbeContext(first_key=first))
    empty = logsumexp == -torch.inf
    found = weight_at_offset(subject, offset).masked_fill(empty, 0)
    assert oracle.difference(found, torch.where(key == positions + offset, p, 0).sum(-1)) <= 1e-12
    inside = (key >= first[:, None]) & (key < first[:, None] + count)
    found = weight_on_first_keys(subject, count).masked_fill(empty, 0)
    assert oracle.difference(found, torch.where(inside[:, None, None], p, 0).sum(-1)) <= 1e-12
    flags = torch.tensor(data.draw(st.lists(st.booleans(), min_size=size.keys, max_size=size.keys)))
    flags = flags & (torch.arange(size.batch)[:, None] != 1)  # the second sample has none
    found = weight_on_set(subject, flags).masked_fill(empty, 0)
    assert oracle.difference(found, (p * flags[:, None, None]).sum(-1)) <= 1e-12


def test_many_keys_are_looked_up_a_few_at_a_time() -> None:
    q = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    k = torch.randn(1, 1, 200, 4, dtype=torch.float64)
    _, logsumexp = attention_with_logsumexp(q, k, k)
    subject = MeasuredCall.from_request(request_of(q, k, k), logsumexp, ProbeContext())
    p = (q @ k.mT / 2).softmax(-1)
    assert oracle.difference(weight_on_first_keys(subject, 150), p[..., :150].sum(-1)) <= 1e-12
    flags = torch.rand(1, 200) < 0.5
    assert oracle.difference(weight_on_set(subject, flags), (p * flags).sum(-1)) <= 1e-12


def test_a_set_of_one_key_in_sixteen_is_small() -> None:
    flags = torch.zeros(2, 64, dtype=torch.bool)
    flags[1, :4] = True
    assert is_small_set(flags)
    flags[1, 9] = True
    assert not is_small_set(flags)
    assert is_small_set(flags[:0])
