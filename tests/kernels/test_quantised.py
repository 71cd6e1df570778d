"""Keys and values in int8: the rounding error, zeros, and rows that are not finite."""

from __future__ import annotations

import pytest
import torch

from multihead.kernels.quantised import MAX_INT8, dequantise, quantise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_rounding_error_is_at_most_half_a_scale(dtype: torch.dtype) -> None:
    rows = (torch.randn(2, 3, 50, 64) * torch.logspace(-6, 6, 50)[:, None]).to(dtype)
    integers, scale = quantise(rows)
    assert (integers.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (2, 3, 50, 1))
    error = (dequantise(integers, scale[..., 0], torch.float64) - rows.double()).abs()
    assert bool((error <= scale.double() * 0.5001).all())
    assert torch.equal(integers.abs().amax(-1), torch.full((2, 3, 50), MAX_INT8, dtype=torch.int8))


def test_rows_of_zeros_stay_zeros() -> None:
    integers, scale = quantise(torch.zeros(3, 8))
    assert not integers.any()
    assert not dequantise(integers, scale[:, 0], torch.float32).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_as_a_whole_and_others_are_not(bad: float) -> None:
    rows = torch.randn(4, 8)
    rows[2, 5] = bad
    integers, scale = quantise(rows)
    found = dequantise(integers, scale[:, 0], torch.float32)
    assert found.isnan().all(1).tolist() == [False, False, True, False]
    assert found.isfinite().all(1).tolist() == [True, True, False, True]
