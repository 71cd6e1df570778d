"""The native kernel as an operator of PyTorch's graphs: checked, differentiated, compiled and exported."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from multihead import functional, masks
from multihead.errors import ArgumentError
from multihead.kernels.native import library
from multihead.kernels.quantised import quantise
from tests import oracle
from tests.drawing import laid_out, sizes
from tests.kernel_names import needs_native

pytestmark = needs_native
operator = torch.ops.multihead.attention.default  # the overload that graphs record
NAMES = ("q", "k", "v", "start", "stop", "visible", "bias", "relative", "sinks", "scale", "softcap", "dropout", "seed")
TAUGHT = ("q", "k", "v", "bias", "relative", "sinks")


def arguments(*, batch: int = 2, grad: bool = False, **given: Any) -> tuple[Any, ...]:
    """Two heads over one, 5 queries, 7 keys, causal bounds; what is given replaces or is added."""
    rows = torch.arange(5)[None]
    made: dict[str, Any] = dict.fromkeys(NAMES) | {
        "q": torch.randn(batch, 2, 5, 8),
        "k": torch.randn(batch, 1, 7, 8),
        "v": torch.randn(batch, 1, 7, 6),
        "start": torch.zeros_like(rows),
        "stop": rows + 2,
        "scale": 0.3,
        "dropout": 0.0,
    }
    made |= given
    for name in TAUGHT:
        if grad and made[name] is not None:
            made[name] = made[name].detach().clone().requires_grad_()
    return tuple(made.values())


def everything() -> dict[str, Any]:
    return {
        "visible": torch.rand(2, 1, 5, 7) < 0.7,
        "bias": torch.randn(1, 2, 5, 1),
        "sinks": torch.randn(2),
        "softcap": 2.0,
        "dropout": 0.3,
        "seed": torch.tensor(7),
    }


def loss(output: Tensor, logsumexp: Tensor, *_: Tensor) -> Tensor:
    return output.square().sum() + logsumexp.masked_fill(logsumexp == -torch.inf, 0).square().sum()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "no gradient": {"grad": False},
    "everything": everything(),
    "bfloat16": {name: torch.randn(2, 1, n, 8).bfloat16() for name, n in (("q", 5), ("k", 7), ("v", 7))},
    "float16": {name: torch.randn(2, 1, n, 8).half() for name, n in (("q", 5), ("k", 7), ("v", 7))},
    "bounds a sample": {"start": torch.tensor([[0] * 5, [3] * 5]), "stop": torch.tensor([[7] * 5, [3, 4, 5, 6, 7]])},
    "relative": {"relative": torch.randn(1, 2, 11)},
    "relative a sample": {"relative": torch.randn(2, 1, 11), "visible": torch.rand(2, 1, 5, 7) < 0.7},
    "features outside": {"q": laid_out(torch.randn(2, 2, 5, 8), "features outside")},
}


@pytest.mark.parametrize("name", CASES)
def test_it_passes_the_checks_of_torch(name: str) -> None:
    given = {"grad": True} | CASES[name]
    torch.library.opcheck(operator, arguments(**given))


def test_its_backward_pass_passes_the_checks_of_torch() -> None:
    inputs = arguments(**everything())
    output, logsumexp, *_ = operator(*inputs)
    of_outputs = torch.randn(output.shape), torch.randn(logsumexp.shape)
    torch.library.opcheck(
        torch.ops.multihead.attention_backward, (output, logsumexp, *of_outputs, *inputs), {"bias_wanted": True}
    )
    torch.library.opcheck(
        torch.ops.multihead.attention_backward,
        (output, logsumexp, of_outputs[0], None, *inputs),
        {"bias_wanted": False},
    )


def test_statistics_and_int8_pass_the_checks_of_torch() -> None:
    q, k, v, *rest = arguments()
    measured = {
        "statistics": 511,
        "positions": torch.tensor([2, 0]),
        "target_keys": torch.tensor([0, -1]),
        "special_keys": torch.rand(2, 7) < 0.5,
    }
    torch.library.opcheck(operator, (q, k, v, *rest), measured)
    torch.library.opcheck(operator, (q, k, None, *rest), measured)
    (k, k_scales), (v, v_scales) = (quantise(each) for each in (k, v))
    scales = {"k_scales": k_scales[..., 0], "v_scales": v_scales[..., 0]}
    torch.library.opcheck(operator, (q, k, v, *rest), scales)
    band = (torch.tensor([7, 3]), -1, 0, 2, None, None)
    torch.library.opcheck(torch.ops.multihead.attention.short_call, (q, k, v, *band), scales)


def test_the_other_operators_pass_the_checks_of_torch() -> None:
    q, k, v, *rest = arguments()
    for statistics in (0, 447):
        for values in (v, None):
            band = (q, k, values, torch.tensor([7, 3]), -1, 0, 2, None, None, statistics)
            torch.library.opcheck(torch.ops.multihead.attention.short_call, band)
    logsumexp = operator(q, k, v, *rest)[1]
    for cell in ((0, 0), (2, 3)):
        torch.library.opcheck(torch.ops.multihead.key_sums, (logsumexp, *cell, q, k, None, *rest))
    torch.library.opcheck(
        torch.ops.multihead.workspace, (q, k, v, *rest), test_utils=("test_schema", "test_autograd_registration")
    )  # it returns a number, which depends on the machine, and is in no graph


def test_the_gradient_of_a_relative_bias_passes_the_checks_of_torch() -> None:
    given = {name: torch.randn(2, 1, n, 8).bfloat16() for name, n in (("q", 5), ("k", 7), ("v", 7))}
    inputs = arguments(**given, relative=torch.randn(1, 1, 11).bfloat16())
    output, logsumexp, *_ = operator(*inputs)
    found = (output, logsumexp, torch.randn_like(output), None, *inputs)
    torch.library.opcheck(torch.ops.multihead.attention_backward, found, {"bias_wanted": True})
    assert [each.dtype for each in torch.ops.multihead.attention_backward(*found, bias_wanted=True)[:4]] == 4 * [
        torch.bfloat16
    ]


def test_blocks_for_a_relative_bias_drop_the_weights_of_the_whole_call() -> None:
    """64 queries are one block of the gradient of the bias; without it all queries are computed together."""
    q, k, v = (torch.randn(2, 4, n, 4) for n in (70, 33_000, 33_000))
    start = torch.zeros(1, 70, dtype=torch.int64)
    relative = torch.randn(2, 4, 70 + 33_000 - 1)
    terms = (None, None, relative, None, 0.5, None, 0.5, torch.tensor(3))
    inputs = (q, k, v, start, start + 33_000, *terms)
    output, logsumexp, *_ = operator(*inputs)
    whole, blocks = (
        torch.ops.multihead.attention_backward(output, logsumexp, output, logsumexp, *inputs, bias_wanted=wanted)
        for wanted in (False, True)
    )
    for one, two in zip(whole[:3], blocks[:3], strict=True):
        assert oracle.difference(one, two.double()) < 1e-5


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("expanded", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_features_that_are_expanded_count_as_a_contiguous_copy(*, grad: bool, expanded: tuple[int, ...]) -> None:
    leaves = [torch.randn(2, 2, 9, 1 if place in expanded else 8).requires_grad_(grad) for place in range(3)]
    given = [leaf.expand(-1, -1, -1, 8) for leaf in leaves]
    found, expected = functional.attention(*given), functional.attention(*(each.contiguous() for each in given))
    assert torch.equal(found, expected)
    if grad:
        of_output = torch.randn(found.shape)
        for one, two in zip(*(torch.autograd.grad(each, leaves, of_output) for each in (found, expected)), strict=True):
            assert torch.allclose(one, two, atol=1e-6)


@pytest.mark.parametrize("relative", [False, True])
def test_it_gives_what_the_oracle_gives_with_every_gradient(*, relative: bool) -> None:
    given = everything() | {"dropout": 0.0, "seed": None}
    if relative:
        given |= {"bias": None, "relative": torch.randn(1, 2, 11)}
    inputs = arguments(grad=True, **given)
    leaves = {name: value for name, value in zip(NAMES, inputs, strict=True) if value is not None and name in TAUGHT}
    double = {name: value.detach().double().requires_grad_() for name, value in leaves.items()}
    keys, rows = torch.arange(7), torch.arange(5)[:, None]
    shown = given["visible"] & (keys < rows + 2)
    diagonal = torch.arange(7) - torch.arange(5)[:, None] + 4
    bias = double["relative"][:, :, diagonal] if relative else double["bias"]
    dense = oracle.attend(
        *(double[name] for name in "qkv"), shown, bias=bias, sinks=double["sinks"], softcap=2.0, scale=0.3
    )
    output, logsumexp, *_ = operator(*inputs)
    assert oracle.difference(output.detach(), dense.output.detach()) < 1e-6
    assert oracle.difference(logsumexp.detach(), dense.logsumexp.detach()) < 1e-6
    found = torch.autograd.grad(loss(output, logsumexp), list(leaves.values()))
    expected = torch.autograd.grad(loss(dense.output, dense.logsumexp), list(double.values()))
    for name, one, two in zip(double, found, expected, strict=True):
        assert one.shape == two.shape
        assert oracle.difference(one, two) < 5e-6, name


def test_a_loss_of_one_output_alone_has_its_gradient() -> None:
    for which in (0, 1):
        inputs = arguments(grad=True)
        kernel = functional.attention_with_logsumexp
        options = {"mask": masks.Keep(torch.arange(7) < torch.arange(5)[:, None] + 2, "queries keys"), "scale": 0.3}
        found = torch.autograd.grad(operator(*inputs)[which].sum(), inputs[:3], materialize_grads=True)
        expected = torch.autograd.grad(kernel(*inputs[:3], **options)[which].sum(), inputs[:3], materialize_grads=True)
        for one, two in zip(found, expected, strict=True):
            assert torch.allclose(one, two, atol=1e-6)


def test_the_seed_decides_what_is_dropped() -> None:
    given = {"dropout": 0.5, "q": torch.randn(2, 2, 5, 8), "k": torch.randn(2, 1, 7, 8), "v": torch.randn(2, 1, 7, 6)}
    outputs = [operator(*arguments(seed=torch.tensor(seed), **given))[0] for seed in (1, 1, 2)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


class Layer(nn.Module):
    """A layer as a model would have it: projections around the operator, and bounds made in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind()
        stop = torch.arange(x.shape[1])[None] + 1
        output, *_ = operator(q, k, v, torch.zeros_like(stop), stop, None, None, None, None, 0.5, None, 0.0, None)
        return self.out(output.transpose(1, 2).flatten(2))


def test_a_compiled_layer_is_one_graph_and_gives_what_it_gives_uncompiled() -> None:
    torch.compiler.reset()
    layer, x = Layer(), torch.randn(2, 6, 8)
    compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
    given, expected = compiled(x), layer(x)
    assert torch.allclose(given, expected, atol=1e-6)
    parameters = list(layer.parameters())
    found = torch.autograd.grad(given.square().sum(), parameters)
    for one, two in zip(found, torch.autograd.grad(expected.square().sum(), parameters), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


def test_batches_and_lengths_of_any_size_are_compiled_once() -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = Layer()
    compiled: Any = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for batch, length in ((2, 6), (3, 6), (5, 9), (7, 130)):
        x = torch.randn(batch, length, 8)
        assert torch.allclose(compiled(x), layer(x), atol=1e-6)
    assert counter.frame_count == 1


def test_a_compiled_dropout_is_drawn_anew_in_each_call() -> None:
    def dropped(q: Tensor, k: Tensor, v: Tensor, start: Tensor, stop: Tensor) -> Tensor:
        seed = torch.randint(1 << 62, ())
        output: Tensor = operator(q, k, v, start, stop, None, None, None, None, 0.3, None, 0.5, seed)[0]
        return output

    torch.compiler.reset()
    compiled: Any = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    inputs = arguments()[:5]
    assert not torch.equal(compiled(*inputs), compiled(*inputs))


def test_an_exported_layer_holds_the_operator_and_takes_other_batches() -> None:
    layer, x = Layer(), torch.randn(2, 6, 8)
    dynamic = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length")},)
    exported = torch.export.export(layer, (x,), dynamic_shapes=dynamic)
    assert "multihead.attention.default" in exported.graph_module.code
    for shape in ((2, 6, 8), (4, 11, 8)):
        x = torch.randn(shape)
        assert torch.equal(exported.module()(x), layer(x))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a bound of another dtype": (
        {"start": torch.zeros(1, 5)},
        "start has shape (1, 5). Give (batch or 1, queries) = (2 or 1, 5) int64.",
    ),
    "a bound of another length": (
        {"stop": torch.zeros(3, 5, dtype=torch.int64)},
        "stop has shape (3, 5). Give (batch or 1, queries) = (2 or 1, 5) int64.",
    ),
    "a bound beyond the keys": (
        {"stop": torch.full((1, 5), 8)},
        "The bounds of some query lie outside the 7 keys. Give bounds from 0 to 7.",
    ),
    "a visible of other keys": (
        {"visible": torch.ones(1, 1, 1, 6, dtype=torch.bool)},
        (
            "visible has shape (1, 1, 1, 6). Give a tensor that broadcasts to (batch, heads, queries, keys) = "
            "(2, 2, 5, 7)."
        ),
    ),
    "a visible that is no bool": (
        {"visible": torch.ones(1, 1, 1, 7)},
        "visible is no bool tensor. Give True where a key is visible.",
    ),
    "dropout without a seed": ({"dropout": 0.5}, "dropout is 0.5 and seed is no int64 tensor of one integer."),
    "a dropout beyond 1": ({"dropout": 1.5}, "dropout is 1.5. Give a number from 0 to 1."),
    "a softcap of 0": ({"softcap": 0.0}, "softcap is 0. Give a positive number, or None."),
    "an infinite scale": ({"scale": float("inf")}, "scale is inf. Give a finite number."),
    "another dtype": (
        {name: torch.zeros(2, 1, n, 8, dtype=torch.float64) for name, n in (("q", 5), ("k", 7), ("v", 7))},
        "q, k and v are not float32, bfloat16 or float16. Convert them, or call multihead.attention.",
    ),
    "two dtypes": (
        {"k": torch.zeros(2, 1, 7, 8, dtype=torch.bfloat16)},
        "q and k have different dtypes. Convert them to one.",
    ),
    "three dimensions": (
        {"v": torch.zeros(1, 7, 8)},
        "v has shape (1, 7, 8). Give (batch, heads, queries or keys, features).",
    ),
    "other keys": (
        {"v": torch.zeros(2, 1, 6, 8)},
        (
            "q has shape (2, 2, 5, 8), k (2, 1, 7, 8) and v (2, 1, 6, 8). Give (batch, heads, queries, head_dim), "
            "(batch, kv_heads, keys, head_dim) and (batch, kv_heads, keys, value_dim), with heads a multiple of "
            "kv_heads."
        ),
    ),
    "sinks of other heads": ({"sinks": torch.zeros(3)}, "sinks has shape (3,). Give (heads,) = (2,)."),
    "a relative bias of other lengths": (
        {"relative": torch.zeros(1, 2, 10)},
        ("relative has shape (1, 2, 10). Give (batch or 1, heads or 1, queries + keys - 1) = (2 or 1, 2 or 1, 11)."),
    ),
    "two biases": (
        {"bias": torch.zeros(1, 1, 5, 7), "relative": torch.zeros(1, 1, 11)},
        "Both `bias` and `relative` are given. Pass one of them, or their sum.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_memory_is_read(name: str) -> None:
    given, sentence = REFUSED[name]
    with pytest.raises(RuntimeError) as refusal:
        operator(*arguments(**given))
    assert str(refusal.value) == sentence


@pytest.mark.parametrize("grad", [False, True])
def test_the_parts_of_a_call_drop_what_the_whole_call_drops(*, grad: bool) -> None:
    """Samples, heads, queries and keys may be split; the parts of a row merge by their logsumexp."""
    q, k, v = torch.randn(3, 4, 6, 20, 8).unbind()
    leaves = [each.clone().requires_grad_(grad) for each in (q, k, v)]
    seed = torch.tensor(3)

    def part(samples: slice, heads: slice, queries: slice, keys: slice) -> tuple[Tensor, Tensor]:
        given = [each[samples, heads] for each in leaves]
        given[0], given[1], given[2] = given[0][:, :, queries], given[1][:, :, keys], given[2][:, :, keys]
        start = torch.zeros(1, given[0].shape[2], dtype=torch.int64)
        place = (samples.start, heads.start, 6, queries.start, keys.start)
        output, logsumexp, *_ = operator(
            *given, start, start + given[1].shape[2], None, None, None, None, 0.3, None, 0.4, seed, *place
        )
        return output, logsumexp

    whole, _ = part(slice(0, 4), slice(0, 6), slice(0, 20), slice(0, 20))
    for samples in (slice(0, 1), slice(1, 4)):
        for heads in (slice(0, 2), slice(2, 6)):
            for queries in (slice(0, 7), slice(7, 20)):
                parts = [part(samples, heads, queries, keys) for keys in (slice(0, 13), slice(13, 20))]
                weights = torch.stack([each[1] for each in parts]).softmax(0)[..., None]
                merged = (torch.stack([each[0] for each in parts]) * weights).sum(0)
                assert torch.allclose(merged, whole[samples, heads, queries], atol=1e-5)
                if grad:
                    expected = torch.autograd.grad(
                        whole[samples, heads, queries].square().sum(), leaves, retain_graph=True
                    )
                    found = torch.autograd.grad(merged.square().sum(), leaves)
                    for one, two in zip(found, expected, strict=True):
                        assert torch.allclose(one, two, atol=1e-4)


def test_its_backward_pass_refuses_what_attention_cannot_have_given() -> None:
    inputs = arguments()
    output, logsumexp, *_ = operator(*inputs)
    with pytest.raises(RuntimeError) as refusal:
        torch.ops.multihead.attention_backward(output, logsumexp, output[..., :5], None, *inputs, bias_wanted=False)
    assert str(refusal.value) == (
        "grad_output has shape (2, 2, 5, 5). "
        "Give (2, 2, 5, 6), in the dtype of q, on the CPU, as torch.ops.multihead.attention returns."
    )


def test_a_second_derivative_is_refused_and_not_silently_a_constant() -> None:
    inputs = arguments(grad=True)
    (first,) = torch.autograd.grad(operator(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(ArgumentError) as refusal:
        first.sum().backward()
    assert str(refusal.value) == (
        "torch.ops.multihead.attention has no second derivative. Call multihead.attention(..., kernel='reference')."
    )


def test_the_schemas_are_those_of_the_text_that_programs_were_exported_with() -> None:
    """A change of it makes exported programs unreadable, unless it adds arguments with defaults at the end."""
    lines = Path(library.__file__).with_name("schemas.txt").read_text(encoding="utf-8").splitlines()
    names = [line.split("(")[0] for line in lines]
    assert names == ["attention", "attention.short_call", "attention_backward", "key_sums", "workspace"]
    for name, line in zip(names, lines, strict=True):
        packet, _, overload = name.partition(".")
        found = getattr(getattr(torch.ops.multihead, packet), overload or "default")
        assert str(found._schema) == f"multihead::{line}"


BANDS = st.sampled_from([(-1, -1), (-1, 0), (2, 0), (3, 1), (0, 0), (-1, 2)])
LAYOUTS = ("contiguous", "heads inside", "features outside", "every second", "negative")


@st.composite
def schema_calls(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[dict[str, Any], tuple[Any, ...], bool]:
    """Draw q, k, v in any layout, the arguments of the short overload after them, and whether the values are read."""
    size = draw(sizes())
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    torch.manual_seed(draw(st.integers(0, 9)))
    shapes = {
        "q": (size.batch, size.heads, size.queries, size.head_dim),
        "k": (size.batch, size.kv_heads, size.keys, size.head_dim),
        "v": (size.batch, size.kv_heads, size.keys, size.value_dim),
    }
    given = {
        name: laid_out(torch.randn(shape).to(dtype), draw(st.sampled_from(LAYOUTS))) for name, shape in shapes.items()
    }
    lengths = draw(st.one_of(st.none(), st.lists(st.integers(0, size.keys), min_size=size.batch, max_size=size.batch)))
    before, after = draw(BANDS)
    scale, softcap = draw(st.sampled_from([None, 0.4])), draw(st.sampled_from([None, 3.0]))
    band = (None if lengths is None else torch.tensor(lengths), before, after, draw(st.integers(0, 4)), scale, softcap)
    return given, (*band, draw(st.sampled_from([0, 1, 191]))), draw(st.booleans())


@hypothesis.settings(max_examples=80)
@hypothesis.given(call=schema_calls())
def test_both_schemas_of_the_forward_pass_give_the_same_bits(
    call: tuple[dict[str, Any], tuple[Any, ...], bool],
) -> None:
    (q, k, v), band, values = call[0].values(), call[1], call[2]
    v = v if values else None
    short = torch.ops.multihead.attention.short_call(q, k, v, *band)
    lengths, before, after, query_start, scale, softcap, statistics = band
    (batch, _, queries, head_dim), keys = q.shape, k.shape[2]
    limit = torch.full((batch, 1), keys) if lengths is None else lengths[:, None]
    position = torch.arange(queries)[None] + query_start
    start = (position - before).clamp(min=0).minimum(limit) if before >= 0 else torch.zeros(batch, queries).long()
    stop = (position + after + 1).minimum(limit) if after >= 0 else limit.expand(batch, queries)
    seen = start.masked_fill(start >= stop, keys).amin(1)
    terms = (None, None, None, None, head_dim**-0.5 if scale is None else scale, softcap, 0.0, None)
    full = operator(
        *(q, k, v, start, stop, *terms),
        statistics=statistics,
        positions=torch.full((batch,), query_start),
        target_keys=seen.masked_fill(seen == keys, -1),
    )
    assert (short[2] is None) == (statistics == 0)
    for one, two in zip(short, full, strict=True):
        if one is not None:
            assert one.stride() == two.stride()
            assert one.equal(two) or torch.equal(one.nan_to_num(7), two.nan_to_num(7))


@pytest.mark.parametrize("softcap", [-5.0, 0.0, float("nan"), float("inf")])
def test_the_short_overload_rejects_a_softcap_that_is_not_positive(softcap: float) -> None:
    q = torch.randn(1, 1, 2, 4)
    with pytest.raises(RuntimeError, match=r"softcap is (-5|0|-?nan|inf)\. Give a positive number, or None\."):
        torch.ops.multihead.attention.short_call(q, q, q, None, -1, -1, 0, None, softcap)


REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "statistics that do not exist": ({"statistics": 512}, "statistics is 512. Give a sum of powers of 2 below 512."),
    "no target key": ({"statistics": 32}, "statistics is 32, which needs target_keys (32) or special_keys (64)."),
    "target keys of other samples": (
        {"statistics": 32, "target_keys": torch.zeros(3, dtype=torch.int64)},
        "target_keys has shape (3,). Give (batch,) = (2,) integers.",
    ),
    "special keys of other keys": (
        {"statistics": 64, "special_keys": torch.zeros(2, 6, dtype=torch.bool)},
        "special_keys has shape (2, 6). Give (batch, keys) = (2, 7) bool.",
    ),
    "one of two scales": (
        {"k_scales": torch.ones(2, 1, 7)},
        "v_scales has shape None. Give k_scales and v_scales, (batch, kv_heads, keys) = (2, 1, 7) float32.",
    ),
    "scales of keys that are not int8": (
        {"k_scales": torch.ones(2, 1, 7), "v_scales": torch.ones(2, 1, 7)},
        "k is not int8, and its scales are given.",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_statistics_and_scales_that_do_not_fit_are_rejected(name: str) -> None:
    given, sentence = REJECTED[name]
    with pytest.raises(RuntimeError) as refusal:
        operator(*arguments(), **given)
    assert str(refusal.value).startswith(sentence)


def test_rows_that_overlap_in_memory_have_an_output_of_their_own() -> None:
    """The strides of empty_like would put the features of the output apart."""
    q = torch.randn(40).as_strided((1, 1, 3, 16), (40, 40, 1, 1))
    k = torch.randn(1, 1, 5, 16)
    found = torch.ops.multihead.attention.short_call(q, k, k, None, -1, -1, 0, None, None)[0]
    assert oracle.difference(found, (q.double() @ k.double().mT / 4).softmax(-1) @ k.double()) < 1e-6


@pytest.mark.parametrize("axes", list(itertools.permutations(range(4))))
def test_the_output_has_the_strides_of_empty_like(axes: tuple[int, ...]) -> None:
    """The strides of the fake output must be those of the real one; those of the heads of a projection stay."""
    sizes = [2, 3, 5, 8]
    base = torch.randn([sizes[axis] for axis in axes])
    dense = base.permute([axes.index(axis) for axis in range(4)])
    wide = torch.randn([sizes[axis] + 1 for axis in axes]).permute([axes.index(axis) for axis in range(4)])
    for q in (dense, wide[:2, :3, :5, :8], dense[:1].expand(2, -1, -1, -1), dense[:, :1]):
        k = torch.randn(q.shape)
        rows = torch.arange(5)[None]
        output, *_ = operator(q, k, k, torch.zeros_like(rows), rows + 1, None, None, None, None, 1.0, None, 0.0, None)
        like = torch.empty_like(q if q.stride(-1) == 1 else q.contiguous())
        significant = [axis for axis in range(4) if q.shape[axis] > 1]
        assert [output.stride(axis) for axis in significant] == [like.stride(axis) for axis in significant]
