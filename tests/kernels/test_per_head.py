"""Attention by head: outputs, weights and gradients of the formula, under dropout too, in tiles of any size."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.functional import request_of
from multihead.kernels import per_head
from multihead.kernels.call import AttentionCall, AttentionRequest, listen
from multihead.kernels.per_head import attend_per_head, is_computed_per_head
from multihead.masks.positions import TilePositions
from tests.kernel_names import needs_native

BATCH, HEADS, QUERIES, KEYS, DIM = 3, 4, 5, 6, 4
MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "lengths, one of them 0": masks.Lengths((6, 0, 3)),
    "by head": masks.Keep(torch.arange(BATCH * HEADS * 5 * 6).view(BATCH, HEADS, 5, 6) % 7 > 2),
}
BIASES = {"none": (), "of keys": (BATCH, 1, 1, KEYS), "of heads": (1, HEADS, 1, 1), "of cells": (BATCH, HEADS, 5, 6)}


@pytest.fixture(params=[1, 70, 1 << 18], ids=lambda cells: f"{cells} cells")
def _tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of one head, of two heads, and of everything."""
    monkeypatch.setattr(per_head, "MAX_WEIGHTS_PER_TILE", request.param)


def made(mask: masks.Mask, bias: tuple[int, ...] = (), **options: Any) -> tuple[AttentionRequest, list[Tensor]]:
    sizes = ((QUERIES, DIM), (KEYS, DIM), (KEYS, DIM + 1))
    leaves = [torch.randn(BATCH, HEADS, *size, dtype=torch.float64, requires_grad=True) for size in sizes]
    if bias:
        leaves.append(torch.randn(bias, dtype=torch.float64, requires_grad=True))
    request = request_of(*leaves[:3], mask, leaves[3] if bias else None, query_start=0, **options)
    return request, leaves


def plain(request: AttentionRequest, factor: Tensor | float) -> tuple[Tensor, Tensor]:
    """Compute output and weights by the formula, the weights multiplied by the factor of dropout."""
    scores = request.q @ request.k.mT * request.scale
    scores = scores if request.bias is None else scores + request.bias
    shown = request.mask.tile(TilePositions.from_sizes(QUERIES, KEYS))
    weights = scores.masked_fill(~shown, -1e300).softmax(-1).masked_fill(~shown, 0) * factor
    return weights @ request.v, weights


# Tiles cut masks and biases, so each of these meets each other; dropout and the mean over heads act on the weights of a
# tile, so each way to have them meets each mask.
ALL_OF_IT = [
    *product([1, 70, 1 << 18], MASKS, BIASES, [True], [0.3]),
    *product([70], MASKS, ["of cells"], [False], [0.0, 0.3, 1.0]),
    *product([70], MASKS, ["of cells"], [True], [0.0, 1.0]),
]


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(("_tiles", "mask", "bias", "average", "dropout"), ALL_OF_IT, indirect=["_tiles"])
def test_all_of_it_is_the_formula(mask: str, bias: str, *, average: bool, dropout: float) -> None:
    request, leaves = made(MASKS[mask], BIASES[bias], dropout=dropout)
    torch.manual_seed(1)
    output, weights = attend_per_head(request, need_weights=True, average=average)
    torch.manual_seed(1)
    drawn = torch.nn.functional.dropout(torch.ones(BATCH, HEADS, QUERIES, KEYS, dtype=torch.float64), dropout)
    expected, every_weight = plain(request, drawn)
    expected_weights = every_weight.mean(1) if average else every_weight
    assert weights is not None
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    losses = torch.randn(output.shape).double(), torch.randn(weights.shape).double()
    for parts in ((0,), (1,), (0, 1)):
        gradients = [
            torch.autograd.grad(sum((pair[part] * losses[part]).sum() for part in parts), leaves, **KEEP)
            for pair in ((output, weights), (expected, expected_weights))
        ]
        for mine, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


KEEP: dict[str, Any] = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_weights_that_are_not_needed_change_no_bit(*, dropout: float) -> None:
    request, _ = made(MASKS["causal"], BIASES["of cells"], dropout=dropout)
    outputs = []
    for need_weights in (False, True):
        torch.manual_seed(1)
        output, weights = attend_per_head(request, need_weights=need_weights, average=True)
        assert (weights is None) == (not need_weights)
        outputs.append(output)
    assert torch.equal(*outputs)


def test_the_graph_keeps_no_weights_but_a_bit_each_of_dropout() -> None:
    request, _ = made(masks.Full(), dropout=0.5)
    output, _ = attend_per_head(request, need_weights=True, average=False)
    node = output.grad_fn
    assert node is not None
    saved = [tensor for tensor in node.saved_tensors if tensor is not None]  # type: ignore[attr-defined]
    assert [tensor.dtype for tensor in saved if tensor.shape[2:] == (QUERIES, KEYS)] == [torch.bool]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_listener_hears_the_call_with_the_logsumexp_before_dropout(*, dropout: float) -> None:
    heard: list[AttentionCall] = []

    class Ear:
        requested_statistics = frozenset({"entropy"})

        def receive(self, call: AttentionCall) -> None:
            heard.append(call)

    with listen(Ear()):
        request, _ = made(MASKS["lengths, one of them 0"], dropout=dropout)
        output, _ = attend_per_head(request, need_weights=False, average=True)
    (call,) = heard
    assert call.result.output is output
    assert call.request.requested_statistics == {"entropy"}
    scores = (request.q @ request.k.mT * request.scale).detach()
    scores = scores.masked_fill(~request.mask.tile(TilePositions.from_sizes(QUERIES, KEYS)), -torch.inf)
    torch.testing.assert_close(call.result.logsumexp, scores.logsumexp(-1), rtol=0, atol=1e-12)


def still(request: AttentionRequest, **changed: Tensor) -> AttentionRequest:
    """Leave the gradients out of a request."""
    given = {name: getattr(request, name).detach() for name in ("q", "k", "v")}
    return replace(request, **{**given, **changed})


def test_it_accepts_dropout_and_plain_calls_without_gradients_only() -> None:
    full, _ = made(masks.Full())
    causal, _ = made(masks.Causal())
    dropped, _ = made(masks.Causal(), dropout=0.5)
    assert is_computed_per_head(dropped, need_weights=True)
    assert is_computed_per_head(still(full), need_weights=True)
    with torch.no_grad():
        assert is_computed_per_head(full, need_weights=True)
    assert not is_computed_per_head(full, need_weights=True)  # the fused kernel has the faster gradient
    assert not is_computed_per_head(still(causal), need_weights=True)  # and skips what a mask hides
    many = torch.zeros(1, 1, 1025, 2)
    assert not is_computed_per_head(request_of(many, many, many), need_weights=True)
    assert not is_computed_per_head(
        request_of(*(torch.zeros(1, 1, 3, 2, dtype=torch.bfloat16),) * 3), need_weights=True
    )
    assert not is_computed_per_head(
        request_of(torch.zeros(1, 1, 0, 2), *(torch.zeros(1, 1, 3, 2),) * 2), need_weights=True
    )


@needs_native
def test_without_weights_it_leaves_plain_calls_to_the_native_kernel_and_keeps_dropout() -> None:
    q = torch.zeros(1, 2, 3, 4)
    assert not is_computed_per_head(request_of(q, q, q), need_weights=False)
    assert is_computed_per_head(request_of(q, q, q, dropout=0.5), need_weights=False)
    assert is_computed_per_head(request_of(*(q.double(),) * 3), need_weights=False)  # which that kernel refuses


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_are_left_to_the_kernels(name: str, bad: float) -> None:
    request, _ = made(masks.Full(), dropout=0.5)
    restore_nan = getattr(request, name).detach().clone()
    restore_nan[1, 2, 3, 0] = bad
    assert not is_computed_per_head(still(request, **{name: restore_nan}), need_weights=True)


def test_a_bias_of_minus_infinity_hides_and_any_other_that_is_not_finite_is_left() -> None:
    request, _ = made(masks.Full())
    hiding = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.float64)
    hiding[..., 2, :] = -torch.inf
    calm = still(request, bias=hiding)
    assert is_computed_per_head(calm, need_weights=True)
    output, weights = attend_per_head(calm, need_weights=True, average=False)
    assert weights is not None
    assert (weights[:, :, 2] == 0).all()
    assert (output[:, :, 2] == 0).all()
    assert not is_computed_per_head(
        still(request, bias=hiding.masked_fill(hiding == -torch.inf, torch.inf)), need_weights=True
    )
