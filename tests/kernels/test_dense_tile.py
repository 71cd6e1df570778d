"""The scores of one tile, and which of its cells may be seen."""

from __future__ import annotations

import torch

from multihead import masks
from multihead.functional import request_of
from multihead.kernels.dense_tile import of_heads, scores, seen, without_autocast, working_dtype
from tests import oracle


def test_the_working_dtype_is_float32_and_float64_for_float64() -> None:
    assert working_dtype(torch.float64) == torch.float64
    assert {working_dtype(dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)} == {torch.float32}


def test_scores_are_capped_and_then_biased() -> None:
    q, k = torch.randn(2, 6, 5, 4, dtype=torch.float64), torch.randn(2, 2, 7, 4, dtype=torch.float64)
    bias = torch.randn(1, 6, 1, 7, dtype=torch.float64)
    request = request_of(q, k, k, bias=bias, softcap=0.7, scale=0.3)
    expected = 0.7 * torch.tanh(0.3 * q @ k.repeat_interleave(3, 1).mT / 0.7) + bias
    assert torch.allclose(scores(request), expected, atol=1e-14)
    tile = scores(request, slice(1, 3), slice(2, 7))
    assert torch.allclose(tile, expected[:, :, 1:3, 2:7], atol=1e-14)


def test_a_tile_sees_what_the_whole_sees() -> None:
    q = torch.zeros(2, 3, 6, 4)
    bias = torch.where(torch.rand(2, 1, 6, 6) < 0.3, -torch.inf, 1.0)
    mask = masks.Causal() | masks.Lengths((2, 4)) & masks.Keep(torch.rand(1, 3, 6, 1) < 0.5)
    request = request_of(q, q, q, mask=mask, bias=bias)
    expected = oracle.shown(mask, (2, 3, 6, 6)) & (bias != -torch.inf)
    tile = seen(request, slice(2, 5), slice(1, 6)).expand(2, 3, 3, 5)
    assert torch.equal(tile, expected[:, :, 2:5, 1:6])


def test_chosen_heads_keep_their_own_keys_bias_and_sinks() -> None:
    q, k = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)
    bias, sinks = torch.randn(2, 6, 5, 5), torch.randn(6)
    narrow = of_heads(request_of(q, k, k, bias=bias, sinks=sinks), torch.tensor([4, 1]))
    assert torch.equal(narrow.q, q[:, [4, 1]])
    assert torch.equal(narrow.k, k[:, [1, 0]])
    assert narrow.bias is not None
    assert torch.equal(narrow.bias, bias[:, [4, 1]])
    assert narrow.sinks is not None
    assert torch.equal(narrow.sinks, sinks[[4, 1]])
    assert (narrow.shape.num_heads, narrow.shape.num_kv_heads) == (2, 2)


def test_autocast_is_kept_out_of_a_block() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
        with without_autocast(x.device):
            assert (x @ x).dtype == torch.float32
    with without_autocast(x.device):
        assert (x @ x).dtype == torch.float32
