"""Dtypes and devices: a layer moves as any module does, and is made without memory or with another default."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn.utils import skip_init

import multihead as mh
from multihead import masks
from tests.ecosystem.ways import BATCH, EMBED, HEADS, QUERIES, WAYS, inputs, layer, results

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Let new tensors be of another dtype for a while."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_a_layer_moved_to_another_dtype_computes_in_it(way: str, dtype: torch.dtype) -> None:
    ours = layer().to(dtype)
    exact = results(copy.deepcopy(ours).double(), way, tuple(each.double() for each in inputs(way)))
    torch.manual_seed(0)
    layer()
    found = results(ours, way, tuple(each.to(dtype) for each in inputs(way)))
    assert {each.dtype for each in found.values()} == {dtype}
    terms = max(float(value.abs().max()) for value in exact.values())
    for name, value in exact.items():
        # A bias of k has the gradient 0, a sum whose terms cancel: its error is that of its terms.
        allowed = 12 * torch.finfo(dtype).eps * max(1.0, terms if "bias" in name else float(value.abs().max()))
        assert float((found[name].double() - value).abs().max()) <= allowed, name


def test_there_and_back_in_double_precision_is_the_same_layer() -> None:
    ours, (x,) = layer(), inputs("causal")
    expected = ours(x)
    assert torch.equal(ours.double().float()(x), expected)


def test_casting_methods_reach_all_parameters() -> None:
    for cast, dtype in (
        (nn.Module.double, torch.float64),
        (nn.Module.bfloat16, torch.bfloat16),
        (nn.Module.half, torch.float16),
    ):
        assert {each.dtype for each in cast(layer()).parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_another_default_dtype_changes_nothing_of_a_float32_layer(way: str, dtype: torch.dtype) -> None:
    """The native kernel once wrote float32 numbers into room made in the default dtype, and so over others' memory."""
    ours, given = layer(), inputs(way)
    expected = results(ours, way, given)
    with mh.observe(ours) as seen:
        ours(*given, **WAYS[way])
    weight = torch.linspace(-1, 1, expected["output"].numel())
    with default_dtype(dtype):
        output = ours(*given, **WAYS[way])
        grads = torch.autograd.grad((output * weight.view_as(output)).sum(), list(ours.parameters()))
        with mh.observe(ours) as seen_there:
            ours(*given, **WAYS[way])
    assert torch.equal(output, expected["output"])
    for (name, _), grad in zip(ours.named_parameters(), grads, strict=True):
        assert torch.equal(grad, expected[name])
    for sample in (0, 1):
        here, there = (each.layers[0].sample(sample).statistics for each in (seen, seen_there))
        assert {name: each.dtype for name, each in here.items()} == {name: each.dtype for name, each in there.items()}
        for name, value in here.items():
            torch.testing.assert_close(there[name], value, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_is_made_in_the_default_dtype(dtype: torch.dtype) -> None:
    with default_dtype(dtype):
        ours = mh.MultiHeadAttention(EMBED, HEADS)
        output = ours(torch.randn(2, 3, EMBED), lengths=(3, 1), mask=masks.Causal())
    assert {each.dtype for each in ours.parameters()} == {dtype}
    assert output.dtype == dtype
    assert output.isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_another_default_device_changes_nothing_of_a_layer_on_the_cpu(way: str) -> None:
    ours, given = layer(), inputs(way)
    expected = results(ours, way, given)["output"]
    weight = torch.linspace(-1, 1, expected.numel()).view_as(expected)
    with torch.device("meta"):
        output = ours(*given, **WAYS[way])
        torch.autograd.grad((output * weight).sum(), list(ours.parameters()))
    assert torch.equal(output, expected)


def test_a_layer_made_without_memory_is_given_some_and_drawn_anew() -> None:
    with torch.device("meta"):
        ours = mh.MultiHeadAttention(EMBED, HEADS, num_kv_heads=2)
    assert all(each.is_meta for each in ours.parameters())
    ours.to_empty(device="cpu")
    torch.manual_seed(3)
    ours.reset_parameters()
    expected = mh.MultiHeadAttention(EMBED, HEADS, num_kv_heads=2)
    torch.manual_seed(3)
    expected.reset_parameters()
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), expected.parameters(), strict=True))
    assert ours(torch.randn(2, 3, EMBED)).isfinite().all()


def test_a_layer_made_without_memory_takes_a_state_dict() -> None:
    with torch.device("meta"):
        made = mh.MultiHeadAttention(EMBED, HEADS)
    ours, (x,) = layer(), inputs("causal")
    made.load_state_dict(ours.state_dict(), assign=True)
    assert torch.equal(made(x), ours(x))


def test_skip_init_makes_a_layer_without_drawing_its_weights() -> None:
    before = torch.random.get_rng_state()
    ours = skip_init(mh.MultiHeadAttention, EMBED, HEADS, num_kv_heads=2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert [tuple(each.shape) for each in ours.k_proj.parameters()] == [(12, EMBED), (12,)]
    ours.reset_parameters()
    assert ours(torch.randn(2, 3, EMBED)).isfinite().all()


@pytest.mark.parametrize("way", WAYS)
def test_on_the_meta_device_the_layer_says_its_shapes_and_computes_nothing(way: str) -> None:
    ours = mh.MultiHeadAttention(EMBED, HEADS, output_dim=10).to("meta")
    output = ours(*(each.to("meta") for each in inputs(way)), **WAYS[way])
    assert output.is_meta
    assert output.shape == (BATCH, QUERIES, 10)
