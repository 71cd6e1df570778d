"""The weights that drop-ins return are exact at any size of the scores, with gradients and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from multihead.compat import annotated, d2l
from multihead.compat.torch_nn import MultiheadAttention
from tests.exactness import SIZES

WIDTH, HEADS = 32, 4
Weigh = Callable[[Tensor, Tensor], Tensor]


def passing_on(*projections: nn.Linear) -> None:
    """Make projections return their inputs, so that q and k are the inputs of the layer."""
    for projection in projections:
        nn.init.eye_(projection.weight)
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)


def of_torch_nn(average: bool) -> tuple[nn.Module, Weigh]:
    layer = MultiheadAttention(WIDTH, HEADS, batch_first=True)
    with torch.no_grad():
        layer.in_proj_weight.copy_(torch.eye(WIDTH).repeat(3, 1))
    return layer, lambda q, k: layer(q, k, k, average_attn_weights=average)[1]


def of_tutorials() -> tuple[nn.Module, Weigh]:
    layer = annotated.MultiHeadAttention(WIDTH, HEADS, dropout=0.0)
    passing_on(layer.W_q, layer.W_k)
    return layer, lambda q, k: layer(q, k, k)[1]


def of_harvard() -> tuple[nn.Module, Weigh]:
    layer = annotated.MultiHeadedAttention(HEADS, WIDTH, dropout=0.0)
    passing_on(*layer.linears[:2])

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        layer(q, k, k)
        assert layer.attn is not None
        return layer.attn

    return layer, weigh


def of_d2l() -> tuple[nn.Module, Weigh]:
    layer = d2l.MultiHeadAttention(WIDTH, WIDTH, WIDTH, WIDTH, HEADS, 0.0)
    passing_on(layer.W_q, layer.W_k)

    def weigh(q: Tensor, k: Tensor) -> Tensor:
        layer(q, k, k)
        assert layer.attention_weights is not None
        return layer.attention_weights

    return layer, weigh


DROP_INS: dict[str, Callable[[], tuple[nn.Module, Weigh]]] = {
    "torch_nn": lambda: of_torch_nn(average=False),
    "torch_nn, averaged": lambda: of_torch_nn(average=True),
    "tutorials": of_tutorials,
    "harvard": of_harvard,
    "d2l": of_d2l,
}


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (batch, heads, length, head_dim)


def softmax(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    q, k = heads_of(q).to(dtype), heads_of(k).to(dtype)
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def drawn(size: float) -> tuple[Tensor, Tensor]:
    return torch.randn(1, 60, WIDTH) * size, torch.randn(1, 80, WIDTH)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", DROP_INS)
def test_returned_weights_are_exact_with_gradients_and_without(name: str, size: float) -> None:
    layer, weigh = DROP_INS[name]()
    q, k = drawn(size)
    exact, of_torch = softmax(q, k, torch.float64), softmax(q, k, torch.float32).double()
    if name == "torch_nn, averaged":
        exact, of_torch = exact.mean(1), of_torch.mean(1)
    limit = max(4 * float((of_torch - exact).abs().max()), 2.0**-24)
    found = []
    for train, grad in ((True, True), (True, False), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            layer.train(train)
            found.append(weigh(q.clone().requires_grad_(grad), k.clone().requires_grad_(grad)))
        weights = found[-1].detach().double().reshape(exact.shape)
        assert found[-1].requires_grad == grad
        assert (weights.sum(-1) - 1).abs().max() <= 1e-5
        assert (weights - exact).abs().max() <= limit
    for weights in found[1:]:
        torch.testing.assert_close(weights.detach(), found[0].detach(), rtol=0, atol=limit)


@pytest.mark.parametrize("size", [1.0, 30.0, 400.0])
@pytest.mark.parametrize("name", DROP_INS)
def test_gradients_of_returned_weights_are_those_of_the_softmax(name: str, size: float) -> None:
    _, weigh = DROP_INS[name]()
    q, k = drawn(size)
    gradients = {}
    for kind in (torch.float64, torch.float32, None):
        leaves = [x.to(kind or torch.float32).requires_grad_() for x in (q, k)]
        weights = weigh(*leaves) if kind is None else softmax(*leaves, kind)
        weights = weights.mean(1) if kind is not None and name == "torch_nn, averaged" else weights
        weights = weights.reshape(-1, 60, 80)
        cotangent = torch.sin(torch.arange(weights.numel()).view(weights.shape)).to(weights.dtype)
        gradients[kind] = torch.autograd.grad((weights * cotangent).sum(), leaves)
    for mine, of_torch, exact in zip(gradients[None], gradients[torch.float32], gradients[torch.float64], strict=True):
        limit = 4 * float((of_torch - exact).abs().max())
        assert (mine - exact).abs().max() <= limit
