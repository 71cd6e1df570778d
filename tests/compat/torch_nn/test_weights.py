"""The returned weights are softmax(scores), their gradient is the softmax's, and no graph holds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.call import AttentionRequest
from multihead.compat.torch_nn.weights import random_state, returned_weights
from multihead.functional import attend, request_of
from multihead.masks.place import Place

MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "lengths": masks.Lengths((6, 3)),
    "by head": masks.Keep(torch.arange(2 * 3 * 5 * 6).view(2, 3, 5, 6) % 7 > 2),
}
BIASES = {"none": (), "of keys": (2, 1, 1, 6), "of heads": (1, 3, 1, 1), "of cells": (2, 3, 5, 6)}


def made(mask: masks.Mask, bias: tuple[int, ...], **options: float) -> tuple[AttentionRequest, list[Tensor]]:
    q, k = (torch.randn(2, 3, length, 4, dtype=torch.float64, requires_grad=True) for length in (5, 6))
    leaves = [q, k]
    if bias:
        leaves.append(torch.randn(bias, dtype=torch.float64, requires_grad=True))
    added = leaves[2] if bias else None
    return request_of(q, k, k.detach(), mask, added, query_start=0, **options), leaves  # type: ignore[arg-type]


def plain(request: AttentionRequest) -> Tensor:
    """Compute the weights as the formula says."""
    scores = request.q @ request.k.mT / 2
    scores = scores if request.bias is None else scores + request.bias
    return scores.masked_fill(~request.mask.tile(Place.of(5, 6)), -torch.inf).softmax(-1)


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", MASKS)
def test_weights_and_gradients_are_those_of_the_softmax(mask: str, bias: str, *, average: bool) -> None:
    request, leaves = made(MASKS[mask], BIASES[bias])
    actual = returned_weights(request, attend(request), average=average, random_state=None)
    expected = plain(request).mean(1) if average else plain(request)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    loss = torch.randn(actual.shape, dtype=torch.float64)
    gradients = (torch.autograd.grad((weights * loss).sum(), leaves) for weights in (actual, expected))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


def test_a_graph_of_weights_keeps_no_tensor_of_queries_by_keys() -> None:
    request, _ = made(masks.Full(), ())
    weights = returned_weights(request, attend(request), average=True, random_state=None)
    kept: list[torch.Size] = []
    node = weights.grad_fn
    assert node is not None
    kept += [tensor.shape for tensor in node.saved_tensors if tensor is not None]  # type: ignore[attr-defined]
    assert kept == [(2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 5)]


def test_dropout_is_drawn_as_the_call_drew_it_and_the_generator_stays() -> None:
    request, _ = made(masks.Causal(), (), dropout=0.5)
    request = replace(request, v=torch.eye(6, 4, dtype=torch.float64).expand(2, 3, 6, 4))
    state = random_state(request.q.device)
    attended = attend(request)
    behind = torch.get_rng_state()
    weights = returned_weights(request, attended, average=False, random_state=state)
    assert torch.equal(torch.get_rng_state(), behind)
    torch.testing.assert_close(weights[..., :4], attended.output, rtol=0, atol=1e-12)  # the values are unit vectors
    share = (weights == 0).double().mean()
    assert 0.3 < share < 0.9


def test_a_query_that_sees_no_key_has_weights_of_zero_and_a_row_of_nan_is_nan_where_it_sees() -> None:
    request, _ = made(masks.Lengths((0, 4)), ())
    q = request.q.detach().clone()
    q[1, 0, 2] = torch.nan
    request = replace(request, q=q)
    weights = returned_weights(request, attend(request), average=False, random_state=None)
    assert (weights[0] == 0).all()
    assert weights[1, 0, 2, :4].isnan().all()
    assert (weights[1, 0, 2, 4:] == 0).all()
    assert weights[1, 1].isfinite().all()
