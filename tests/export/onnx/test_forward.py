"""The output of a runtime is that of the layer, for all options, masks, inputs and sizes.

Two runtimes: onnxruntime, and the evaluator of the ONNX package, which follows the words of the standard.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")

from multihead import masks
from multihead.errors import ArgumentError
from multihead.export.onnx import to_model
from multihead.layer import MultiHeadAttention
from multihead.layer.cache import KeyValueCache
from multihead.layer.qk_norm import QKNorm
from multihead.rotary import Linear, Llama3, Rotary, Yarn
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias
from tests import drawing
from tests.export.running import all_of, assert_same, assert_within, evaluated, ran

Draw = Callable[[st.SearchStrategy[Any]], Any]


@st.composite
def rotaries(draw: Draw, head_dim: int) -> Rotary | None:
    """A rotary that fits the heads, or none."""
    if head_dim < 2 or draw(st.booleans()):
        return None
    dim = draw(st.integers(1, head_dim // 2)) * 2
    scaling = draw(st.sampled_from((None, Linear(2.0), Llama3(8.0, original_length=16), Yarn(4.0, 8))))
    return Rotary(base=100.0, dim=dim, interleaved=draw(st.booleans()), scaling=scaling)


@st.composite
def norms(draw: Draw) -> QKNorm | None:
    """A norm of queries and keys, or none."""
    kind = draw(st.sampled_from((None, None, "rms", "l2")))
    if kind is None:
        return None
    over = "head" if kind == "l2" else draw(st.sampled_from(("head", "all")))
    return QKNorm(kind, eps=draw(st.sampled_from((1e-6, 0.1))), learned=draw(st.booleans()), over=over)


def position_biases(size: drawing.Sizes) -> st.SearchStrategy[torch.nn.Module | None]:
    """A position bias that fits the heads, or none."""
    several = st.builds(T5Bias, st.just(size.heads), st.just(8), st.just(6), both_ways=st.booleans())
    table = st.just(2 * size.keys + size.queries)
    learned = st.builds(LearnedBias, st.just(size.heads), table, table)
    return st.one_of(st.none(), st.builds(ALiBi, st.just(size.heads)), several, learned)


@st.composite
def layers(draw: Draw, size: drawing.Sizes, *, crosses: bool) -> MultiHeadAttention:
    """A layer with any of its options, in eval mode."""
    embed_dim = draw(st.sampled_from((4, 10)))
    wider = draw(st.booleans()) and crosses
    projects = draw(st.booleans())
    dtype = draw(st.sampled_from((torch.float32, torch.float32, torch.float16, torch.float64)))
    position_bias = draw(position_biases(size))
    layer = MultiHeadAttention(
        embed_dim,
        size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        value_head_dim=size.value_dim,
        key_dim=embed_dim + 1 if wider else None,
        value_dim=embed_dim + 2 if wider else None,
        output_dim=5 if projects and draw(st.booleans()) else None,
        bias=draw(st.booleans()),
        scale=draw(st.sampled_from((None, 0.3, 1.0))),
        merge=draw(st.sampled_from(("concat", "mean"))),
        output_projection=projects,
        rotary=draw(rotaries(size.head_dim)) if dtype != torch.float64 else None,
        qk_norm=draw(norms()),
        position_bias=position_bias,
        softcap=draw(st.sampled_from((None, None, 1.5))),
        sinks=draw(st.booleans()),
        head_gates=draw(st.booleans()),
        add_bias_kv=position_bias is None and draw(st.booleans()),
        add_zero_attn=draw(st.booleans()),
    ).to(dtype)
    for name, parameter in layer.named_parameters():
        if "proj.weight" not in name:
            torch.nn.init.normal_(parameter)
    return layer.eval()


@st.composite
def calls(draw: Draw) -> tuple[MultiHeadAttention, dict[str, Tensor], masks.Mask, Any]:
    """A layer, the tensors of a call, its mask and its query_start."""
    torch.manual_seed(draw(st.integers(0, 999)))
    size = draw(drawing.sizes(longest=8))
    crosses = draw(st.booleans())
    size = size if crosses else drawing.replace(size, keys=size.queries)
    layer = draw(layers(size, crosses=crosses))
    dtype = layer.q_proj.weight.dtype
    separate = layer.value_dim != layer.key_dim
    given = {"x": torch.randn(size.batch, size.queries, layer.embed_dim, dtype=dtype)}
    if crosses:
        given["memory"] = torch.randn(size.batch, size.keys, layer.key_dim, dtype=dtype)
    if separate:
        given["values"] = torch.randn(size.batch, size.keys, layer.value_dim, dtype=dtype)
    for name, longest in (("lengths", size.queries), ("memory_lengths", size.keys)):
        if draw(st.integers(0, 2)) == 0 and (crosses or name == "lengths"):
            given[name] = torch.randint(0, longest + 1, (size.batch,))
    if draw(st.integers(0, 2)) == 0:
        bias = torch.randn([draw(st.sampled_from((1, n))) for n in size.cells])
        given["bias"] = bias.masked_fill(torch.rand(bias.shape) < 0.3, -torch.inf).to(dtype)
    if draw(st.integers(0, 2)) == 0:
        given["keep"] = torch.rand([draw(st.sampled_from((1, n))) for n in size.cells]) < 0.8
    if draw(st.integers(0, 3)) == 0:
        given["head_gates"] = torch.randn([draw(st.sampled_from((1, n))) for n in size.cells[:3]]).to(dtype)
    start = draw(drawing.starts(size)) if crosses or draw(st.integers(0, 3)) == 0 else None
    return layer, given, draw(drawing.trees(size, depth=2)), start


@settings(max_examples=40)
@given(calls(), st.sampled_from((23, 24, 25)), st.booleans(), st.sampled_from((ran, ran, evaluated)))
def test_a_runtime_computes_the_output_of_the_layer(
    call: tuple[MultiHeadAttention, dict[str, Tensor], masks.Mask, Any],
    opset: int,
    start_is_given: bool,
    run: Callable[..., Tensor],
) -> None:
    layer, given, mask, start = call
    if start_is_given and isinstance(start, Tensor):
        written = to_model(layer, inputs=(*given, "query_start"), mask=mask, opset=opset)
        found = run(written, **given, query_start=start)
    else:
        found = run(to_model(layer, inputs=tuple(given), mask=mask, query_start=start, opset=opset), **given)
    if "keep" in given:
        mask = mask & masks.Keep(given.pop("keep"))
    assert_same(found, layer, **given, mask=mask, query_start=start)


DECODED = [masks.Full(), masks.Causal(), masks.Causal() & masks.Window(3), masks.Causal() | masks.Prefix(4)]


@pytest.mark.parametrize("mask", DECODED, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_decoding_in_steps_equals_the_layer_with_a_cache(mask: masks.Mask, dtype: torch.dtype) -> None:
    rotary = None if dtype == torch.float64 else Rotary(dim=2)
    terms: dict[str, Any] = {"rotary": rotary, "qk_norm": QKNorm(), "position_bias": ALiBi(3), "softcap": 2.0}
    layer = MultiHeadAttention(12, 3, num_kv_heads=1, value_head_dim=5, head_gates=True, **terms)
    layer = layer.to(dtype).eval()
    wide, cache, wide_cache = deepcopy(layer).double(), KeyValueCache(), KeyValueCache()
    written = to_model(layer, inputs=("x", "past"), mask=mask)
    held = {"past_key": torch.zeros(2, 1, 0, 4, dtype=dtype), "past_value": torch.zeros(2, 1, 0, 5, dtype=dtype)}
    for length in (5, 1, 1, 3):
        x = torch.randn(2, length, 12).to(dtype)
        found = all_of(written, x=x, **held)
        held = {name: found[name.replace("past", "present")] for name in held}
        with torch.no_grad():
            plain = layer(x, mask=mask, cache=cache)
            exact = wide(x.double(), mask=mask, cache=wide_cache)
        assert_within(found["output"], plain, exact)
    assert held["past_key"].shape == (2, 1, 10, 4)


NORMS = [
    QKNorm(),
    QKNorm(learned=False, eps=0.5),
    QKNorm(over="all"),
    QKNorm("l2"),
    QKNorm("l2", learned=False, initial_scale=3.0, eps=0.5),
]


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_queries_and_keys_are_normalised_as_the_layer_does(norm: QKNorm, dtype: torch.dtype, num_heads: int) -> None:
    layer = MultiHeadAttention(16, num_heads, num_kv_heads=1, qk_norm=norm, scale=0.7, dtype=dtype).eval()
    assert layer.qk_norm is not None
    for parameter in layer.qk_norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 16).to(dtype)
    assert_same(ran(to_model(layer), x=x), layer, x=x)


def test_large_queries_of_float16_are_squared_in_float32() -> None:
    layer = MultiHeadAttention(16, 2, qk_norm=QKNorm(), dtype=torch.float16).eval()
    x = torch.randn(1, 5, 16).mul(1000).half()
    layer.v_proj.weight.data.mul_(1e-3)
    assert_same(ran(to_model(layer), x=x), layer, x=x)


def test_a_norm_that_is_not_ours_is_refused() -> None:
    layer = MultiHeadAttention(16, 2, qk_norm=QKNorm()).eval()
    layer.qk_norm = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ArgumentError) as refusal:
        to_model(layer)
    assert str(refusal.value) == (
        "qk_norm is a Identity, which cannot be exported. Give a layer constructed with qk_norm=QKNorm(...)."
    )


ROTARIES = [
    Rotary(),
    Rotary(interleaved=True),
    Rotary(dim=4),
    Rotary(dim=4, interleaved=True, scaling=Linear(2.0)),
    Rotary(base=500_000.0, scaling=Llama3(8.0, original_length=32)),
    Rotary(scaling=Yarn(4.0, 32)),
]


@pytest.mark.parametrize("rotary", ROTARIES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_and_keys_are_rotated_as_by_the_layer(rotary: Rotary, dtype: torch.dtype) -> None:
    layer = MultiHeadAttention(16, 2, num_kv_heads=1, rotary=rotary, dtype=dtype).eval()
    x = torch.randn(2, 40, 16).to(dtype)
    assert_same(ran(to_model(layer, mask=masks.Causal()), x=x), layer, x=x, mask=masks.Causal())


def test_a_hundred_thousand_tokens_from_the_start_they_are_rotated_as_exactly() -> None:
    layer = MultiHeadAttention(16, 2, rotary=Rotary()).eval()
    x, memory, start = torch.randn(2, 3, 16), torch.randn(2, 4, 16), torch.tensor([100_000, 7])
    made = to_model(layer, inputs=("x", "memory", "query_start"))
    found = ran(made, x=x, memory=memory, query_start=start)
    assert_same(found, layer, x=x, memory=memory, query_start=start)


def test_float64_is_refused() -> None:
    with pytest.raises(ArgumentError) as refusal:
        to_model(MultiHeadAttention(8, 2, rotary=Rotary(), dtype=torch.float64).eval())
    assert str(refusal.value) == (
        "The layer is float64 and has a rotary, and the operator RotaryEmbedding does not support float64. "
        "Convert it first: layer.float()."
    )
