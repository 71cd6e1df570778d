"""torch.func and second derivatives: what no fused kernel can do is done by the reference kernel, in the open."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import multihead as mh
from multihead import masks
from multihead.errors import SlowPathError, SlowPathWarning
from multihead.kernels.native import library
from tests import oracle
from tests.ecosystem.ways import EMBED, HEADS, LENGTHS, QUERIES, WAYS, inputs, layer, results

SIZE = (2, 4, 5, 6)  # (batch, heads, queries, head_dim)
MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(2),
    "lengths": masks.Lengths((5, 3)),
    "cells": masks.Keep(torch.arange(5) % 2 == 0, "keys"),
}
each_mask = pytest.mark.parametrize("name", MASKS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def qkv(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, *SIZE, dtype=dtype).unbind()
    return q, k, v


def truth(q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    """The oracle in float64, which is made of plain operations."""
    seen = oracle.shown(MASKS[name], (SIZE[0], SIZE[1], SIZE[2], SIZE[2]))
    return oracle.attend(q.double(), k.double(), v.double(), seen).output


def near(found: Tensor, exact: Tensor) -> None:
    """Compare with float64, within what the dtype loses in some sums of numbers of that size."""
    size = max(1.0, float(exact.detach().abs().max()))
    torch.testing.assert_close(
        found.detach().double() / size, exact.detach() / size, rtol=0, atol=200 * torch.finfo(found.dtype).eps
    )


@each_dtype
@each_mask
def test_a_gradient_by_torch_func_is_that_of_autograd(name: str, dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype)
    found = grad(lambda *qkv: mh.attention(*qkv, mask=MASKS[name]).square().sum(), argnums=(0, 1, 2))(q, k, v)
    exact = grad(lambda *qkv: truth(*qkv, name).square().sum(), argnums=(0, 1, 2))(q, k, v)
    for each, expected in zip(found, exact, strict=True):
        near(each, expected.double())


@each_mask
def test_vmap_over_a_new_axis_is_a_loop_over_it(name: str) -> None:
    q, k, v = torch.randn(3, 3, *SIZE, dtype=torch.float64).unbind()
    found = vmap(lambda *qkv: mh.attention(*qkv, mask=MASKS[name]))(q, k, v)
    expected = torch.stack([truth(*qkv, name) for qkv in zip(q, k, v, strict=True)])
    near(found, expected)


def test_vmap_over_the_queries_alone_shares_the_keys() -> None:
    many = torch.randn(3, *SIZE)
    _, k, v = qkv()
    found = vmap(lambda q: mh.attention(q, k, v, mask=masks.Causal()))(many)
    near(found, torch.stack([truth(q, k, v, "causal") for q in many]))


@pytest.mark.filterwarnings("ignore::multihead.errors.SlowPathWarning")
@pytest.mark.parametrize("way", ["vmap", "make_fx"])
@pytest.mark.parametrize(
    "mask",
    [masks.Keep(torch.ones(5, 0).bool(), "queries keys"), masks.Drop(torch.tensor([[True], [False]]), "batch keys")],
    ids=repr,
)
def test_a_mask_of_cells_without_keys_gives_0(mask: masks.Mask, way: str) -> None:
    q, none = torch.randn(SIZE), torch.randn(SIZE)[:, :, :0]

    def attend(q: Tensor) -> tuple[Tensor, Tensor]:
        return mh.attention_with_logsumexp(q, none, none, mask=mask, query_start=0)

    output, logsumexp = vmap(attend)(q[None]) if way == "vmap" else make_fx(attend)(q)(q)
    assert bool((output == 0).all())
    assert bool((logsumexp == -torch.inf).all())


@each_mask
def test_a_jacobian_is_that_of_the_truth(name: str) -> None:
    q, k, v = (each[:1, :1] for each in qkv(torch.float64))
    mask = masks.Lengths((3,)) if name == "lengths" else MASKS[name]
    found = jacrev(lambda k: mh.attention(q, k, v, mask=mask))(k)
    seen = oracle.shown(mask, (1, 1, 5, 5))
    near(found, jacrev(lambda k: oracle.attend(q, k, v, seen).output)(k))


def test_a_derivative_forward_is_that_of_the_truth() -> None:
    q, k, v = qkv(torch.float64)
    found, along = jvp(lambda q: mh.attention(q, k, v, mask=masks.Causal()), (q,), (v,))
    expected, expected_along = jvp(lambda q: truth(q, k, v, "causal"), (q,), (v,))
    near(found, expected)
    near(along, expected_along)


def test_a_hessian_is_that_of_the_truth() -> None:
    q, k, v = (each[:1, :1, :3, :2] for each in qkv(torch.float64))
    seen = oracle.shown(masks.Causal(), (1, 1, 3, 3))
    found = hessian(lambda q: mh.attention(q, k, v, mask=masks.Causal()).square().sum())(q)
    near(found, hessian(lambda q: oracle.attend(q, k, v, seen).output.square().sum())(q))


@pytest.mark.parametrize("way", WAYS)
def test_functional_call_takes_parameters_of_the_callers(way: str) -> None:
    ours, given = layer(), inputs(way)
    others = {name: torch.randn_like(each) for name, each in ours.named_parameters()}
    found = functional_call(ours, others, given, WAYS[way])
    ours.load_state_dict(others)
    assert torch.equal(found, ours(*given, **WAYS[way]))


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_gradients_a_sample_are_those_of_a_loop_over_the_samples(name: str) -> None:
    ours = layer(dtype=torch.float64)
    (x,) = inputs("self-attention", torch.float64)
    parameters = {name: each.detach() for name, each in ours.named_parameters()}

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(ours, parameters, (sample[None],), {"mask": MASKS[name]}).square().sum()  # type: ignore[no-any-return]

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for index, sample in enumerate(x):
        expected = torch.autograd.grad(ours(sample[None], mask=MASKS[name]).square().sum(), list(ours.parameters()))
        for parameter, each in zip(parameters, expected, strict=True):
            near(found[parameter][index], each)


def test_an_ensemble_of_layers_is_each_of_them() -> None:
    layers = [layer(dtype=torch.float64) for _ in range(3)]
    (x,) = inputs("self-attention", torch.float64)
    stacked, _ = torch.func.stack_module_state(layers)  # type: ignore[arg-type]
    empty = mh.MultiHeadAttention(EMBED, HEADS, device="meta")
    found = vmap(lambda state: functional_call(empty, state, (x,), {"mask": masks.Causal()}))(stacked)
    for each, ours in zip(found, layers, strict=True):
        near(each, ours(x, mask=masks.Causal()))


def test_explain_says_inside_a_transform_that_the_reference_kernel_runs() -> None:
    told = []

    def explained(q: Tensor) -> Tensor:
        told.append(mh.explain(q, q, q, mask=masks.Causal()))
        return mh.attention(q, q, q, mask=masks.Causal())

    vmap(explained)(torch.randn(3, *SIZE))
    assert told[0].kernel == "reference"
    assert set(told[0].refusals) >= {"native", "sdpa"}


def test_a_strict_context_refuses_a_transform() -> None:
    q, _, _ = qkv()
    with (
        mh.strict(),
        pytest.raises(SlowPathError, match=r"^The reference kernel would run, which holds queries x keys"),
    ):
        vmap(lambda q: mh.attention(q, q, q))(q[None])


def second_derivative(attend: Any, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Run a gradient penalty backwards: the derivatives of the squared first derivatives."""
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    first = torch.autograd.grad(attend(*leaves).square().sum(), leaves, create_graph=True)
    penalty = sum((each.square().sum() for each in first), start=torch.zeros((), dtype=first[0].dtype))
    return torch.autograd.grad(penalty, leaves)


@pytest.mark.parametrize("kernel", [None, "native", "sdpa", "reference"])
@each_mask
def test_a_second_derivative_is_that_of_the_truth_and_says_what_it_costs(name: str, kernel: str | None) -> None:
    tensors = tuple(0.3 * each for each in qkv())
    if kernel == "native" and library.reason_of_absence() is not None:
        pytest.skip("there is no native library here")

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return mh.attention(q, k, v, mask=MASKS[name], kernel=kernel)

    if kernel == "reference":
        found = second_derivative(ours, tensors)
    else:
        with pytest.warns(SlowPathWarning, match=r"^Kernel '\w+' has no second derivative, and create_graph=True"):
            found = second_derivative(ours, tensors)
    exact = second_derivative(lambda *qkv: truth(*qkv, name), tuple(each.double() for each in tensors))
    for each, expected in zip(found, exact, strict=True):
        size = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(each.double() / size, expected / size, rtol=0, atol=1e-5)


def test_a_strict_context_refuses_a_second_derivative() -> None:
    with mh.strict(), pytest.raises(SlowPathError, match=r"^Kernel '\w+' has no second derivative"):
        second_derivative(mh.attention, qkv())


@pytest.mark.filterwarnings("ignore::multihead.errors.SlowPathWarning")
@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_penalty_through_the_layer_is_that_of_the_layer_in_double_precision(way: str) -> None:
    ours, given = layer(), inputs(way)
    exact_layer = layer(dtype=torch.float64)
    exact_layer.load_state_dict(ours.state_dict())
    found = []
    for model, tensors in ((ours, given), (exact_layer, tuple(each.double() for each in given))):
        leaves = [each.detach().clone().requires_grad_() for each in tensors]
        (of_x,) = torch.autograd.grad(model(*leaves, **WAYS[way]).square().sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad(of_x.square().sum(), list(model.parameters()), materialize_grads=True))
    size = max(float(each.abs().max()) for each in found[1])
    for each, expected in zip(*found, strict=True):
        torch.testing.assert_close(each.double() / size, expected / size, rtol=0, atol=2e-5)


def test_a_first_derivative_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowPathWarning)
        results(layer(), "padded", inputs("padded"))


def test_a_padded_batch_in_a_transform_gives_what_it_gives_outside() -> None:
    ours = layer(dtype=torch.float64)
    (x,) = inputs("padded", torch.float64)
    mask = masks.Lengths(torch.tensor(LENGTHS))
    found = grad(lambda x: ours(x, mask=mask).square().sum())(x)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(ours(leaf, mask=mask).square().sum(), leaf)
    near(found, expected)
    assert found.shape == (len(LENGTHS), QUERIES, EMBED)


def test_a_module_with_the_layer_inside_is_called_functionally() -> None:
    model = nn.Sequential(layer(), nn.LayerNorm(EMBED))
    (x,) = inputs("self-attention")
    state = {name: each.detach() for name, each in model.named_parameters()}
    found = grad(lambda state: functional_call(model, state, (x,)).sum())(state)
    assert found.keys() == state.keys()
