"""Keeping NaN and inf from those who may not see them."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from multihead.functional import request_of
from multihead.kernels import nonfinite
from multihead.kernels.call import AttentionResult
from multihead.kernels.nonfinite import make_rows_nan, replace_nonfinite
from multihead.kernels.plan.bounds import key_bounds
from tests import oracle


def test_finite_tensors_pass_untouched() -> None:
    q, k, v = torch.randn(3, 2, 2, 5, 4).unbind()
    request = request_of(q, k, v, bias=torch.tensor(-torch.inf).view(1, 1, 1, 1))
    cleaned, rows = replace_nonfinite(request, key_bounds(request.mask, queries=5, keys=5))
    assert cleaned is request
    assert rows is None


def test_finite_tensors_whose_norm_overflows_lose_nothing() -> None:
    q = torch.full((1, 1, 4, 64), 1e30)
    request = request_of(q, q, q)
    cleaned, rows = replace_nonfinite(request, key_bounds(request.mask, queries=4, keys=4))
    assert torch.equal(cleaned.q, q)
    assert rows is not None
    assert not bool(rows.any())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "mask", [masks.Full(), masks.Causal(), masks.Lengths((2, 9)), masks.Window(2) | masks.Prefix(1)], ids=repr
)
def test_the_named_rows_are_those_that_see_what_is_not_finite(
    mask: masks.Mask, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nonfinite, "QUERIES_PER_BLOCK", 4)  # several blocks of rows, the last one smaller
    q, k, v = torch.randn(2, 4, 9, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    k[0, 1, 5, 2], v[1, 0, 3, 0], q[1, 3, 8, 1] = torch.nan, torch.inf, -torch.inf
    bias = torch.randn(2, 4, 9, 9) if biased else None
    bad = torch.zeros(2, 4, 9, 9, dtype=torch.bool)
    bad[0, 2:, :, 5] = bad[1, :2, :, 3] = bad[1, 3, 8] = True
    seen = oracle.shown(mask, (2, 4, 9, 9))
    if bias is not None:
        bias[0, 0, 4, 4], bias[1, 1, 8, 8], bias[:, :, 6] = torch.nan, torch.inf, -torch.inf
        bad[0, 0, 4, 4] = bad[1, 1, 8, 8] = True
        seen = seen & (bias != -torch.inf)
    request = request_of(q, k, v, mask=mask, bias=bias)
    cleaned, rows = replace_nonfinite(request, key_bounds(mask, queries=9, keys=9))
    assert rows is not None
    assert torch.equal(rows, (bad & seen).any(-1))
    assert all(bool(tensor.isfinite().all()) for tensor in (cleaned.q, cleaned.k, cleaned.v))
    if cleaned.bias is not None:
        assert not bool((cleaned.bias.isnan() | (cleaned.bias == torch.inf)).any())


def test_poisoned_rows_are_nan_in_output_and_logsumexp() -> None:
    rows = torch.tensor([[[True, False]]])
    given = make_rows_nan(AttentionResult(torch.ones(1, 1, 2, 3), torch.ones(1, 1, 2)), rows)
    assert given.output.isnan().all(-1).tolist() == rows.tolist()
    assert given.logsumexp.isnan().tolist() == rows.tolist()
    assert given.output[0, 0, 1].tolist() == [1, 1, 1]
