"""Tracers and modes of PyTorch: torch.jit.trace, make_fx, FakeTensorMode, modes of users, AOTInductor."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from multihead import masks
from multihead.compat.torch_nn import MultiheadAttention
from multihead.errors import ArgumentError
from multihead.kernels.choose import KERNELS
from multihead.kernels.plan.bounds import key_bounds
from tests.ecosystem.test_every_option import OPTIONS, made
from tests.ecosystem.ways import BATCH, EMBED, HEADS, QUERIES, layer
from tests.kernel_names import needs_native

# PyTorch advises against torch.jit, and warns of each size that is compared while it traces.
jit = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")

MASKS: dict[str, Callable[[Tensor], masks.Mask]] = {
    "full": lambda _: masks.Full(),
    "causal": lambda _: masks.Causal(),
    "window": lambda _: masks.Causal() & masks.Window(3),
    "lengths": masks.Lengths,
    "prefix": lambda lengths: masks.Causal() | masks.Prefix(lengths),
    "documents": lambda lengths: masks.Documents(torch.stack([lengths, lengths + 1], 1)),
    "cells": lambda lengths: masks.Keep(torch.arange(4) != lengths[:, None] % 4, "batch heads"),
}
each_mask = pytest.mark.parametrize("name", MASKS)


class Attending(nn.Module):
    """`mh.attention` under a mask that may hold lengths."""

    def __init__(self, mask: Callable[[Tensor], masks.Mask] = MASKS["causal"], **options: Any) -> None:
        super().__init__()
        self.mask, self.options = mask, options

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = (mh.split_heads(part, HEADS) for part in (x, x * 0.5, x + 1))
        return mh.attention(q, k, v, mask=self.mask(lengths), **self.options)


class Layered(nn.Module):
    """A layer, called with options that may be made of lengths."""

    def __init__(self, attend: nn.Module, call: Callable[[Tensor], dict[str, Any]]) -> None:
        super().__init__()
        self.attend, self.call = attend, call

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.attend(x, **self.call(lengths))  # type: ignore[no-any-return]


class Dropped(nn.Module):
    """The drop-in, with the padding of `nn.MultiheadAttention`: its output and its weights."""

    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.attend = MultiheadAttention(EMBED, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        padding = torch.arange(x.shape[1]) >= lengths[:, None].clamp(min=1)
        found = self.attend(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)
        return tuple(each for each in found if each is not None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attending,
    "layer": lambda: Layered(layer(num_kv_heads=2), lambda _: {"mask": masks.Causal()}),
    "layer, padded": lambda: Layered(layer(), lambda lengths: {"lengths": lengths, "mask": masks.Causal()}),
    "layer in float64": lambda: Layered(layer().double(), lambda _: {"mask": masks.Causal()}),
    "drop-in": lambda: Dropped(need_weights=False),
    "drop-in with weights": lambda: Dropped(need_weights=True),
}
each_model = pytest.mark.parametrize("name", MODELS)


def given(batch: int = BATCH, length: int = QUERIES, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, length, EMBED, dtype=dtype), torch.randint(0, length // 2, (batch,))


def dtype_of(model: nn.Module) -> torch.dtype:
    return next((each.dtype for each in model.parameters()), torch.float32)


def made_by(model: nn.Module, way: str) -> torch.fx.GraphModule:
    mode = "real" if way == "before dispatch" else way
    maker = make_fx(model, tracing_mode=mode, pre_dispatch=way == "before dispatch", _allow_non_fake_inputs=True)
    return maker(*given(dtype=dtype_of(model)))


class Recording(TorchDispatchMode):
    """A user's mode that notes the operations it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    @property
    def ours(self) -> list[str]:
        return [name for name in self.seen if name.startswith("multihead")]


@jit
@each_mask
def test_jit_trace_records_a_mask_for_other_numbers_and_lengths(name: str) -> None:
    model = Attending(MASKS[name])
    traced = torch.jit.trace(model, given())
    for size in ((BATCH, QUERIES), (BATCH, QUERIES), (2, 12)):
        inputs = given(*size)
        torch.testing.assert_close(traced(*inputs), model(*inputs))


@jit
@each_model
def test_jit_trace_records_each_way_to_attend(name: str) -> None:
    model = MODELS[name]().eval()
    traced = torch.jit.trace(model, given(dtype=dtype_of(model)))
    for size in ((BATCH, QUERIES), (2, 12)):
        inputs = given(*size, dtype=dtype_of(model))
        torch.testing.assert_close(traced(*inputs), model(*inputs))


@jit
@pytest.mark.parametrize("option", OPTIONS)
def test_jit_trace_records_every_option_of_the_layer(option: str) -> None:
    model = Layered(made(option).eval(), lambda _: {"mask": masks.Causal()})
    traced = torch.jit.trace(model, given())
    inputs = given(2, 9)
    torch.testing.assert_close(traced(*inputs), model(*inputs))


@jit
def test_a_trace_reads_where_the_last_query_stands_off_its_own_inputs() -> None:
    class Ending(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return mh.attention(q, k, k, mask=masks.Causal(), query_start="end")

    traced = torch.jit.trace(Ending(), (torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8)))
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 9, 8)
    torch.testing.assert_close(traced(q, k), Ending()(q, k))


@jit
def test_a_trace_is_saved_and_loaded_with_its_gradients() -> None:
    model, kept = MODELS["layer"]().eval(), io.BytesIO()
    torch.jit.save(torch.jit.trace(model, given()), kept)
    kept.seek(0)
    again, (x, lengths) = torch.jit.load(kept), given()
    found = torch.autograd.grad(again(x, lengths).square().sum(), list(again.parameters()))
    torch.testing.assert_close(found, torch.autograd.grad(model(x, lengths).square().sum(), list(model.parameters())))


@needs_native
@jit
def test_a_trace_holds_the_operator() -> None:
    assert "multihead::attention" in str(torch.jit.trace(Attending(), given()).graph)


# Every mask is recorded with symbols for sizes, where its tensors are fake, too. How operations are recorded in another
# way does not depend on the mask that it is part of, so the mask with the most operations stands for all.
@pytest.mark.parametrize(
    ("name", "way"),
    [*((name, "symbolic") for name in MASKS), *(("documents", way) for way in ("real", "fake", "before dispatch"))],
)
def test_make_fx_records_a_mask(name: str, way: str) -> None:
    model = Attending(MASKS[name])
    graph, inputs = made_by(model, way), given()
    torch.testing.assert_close(graph(*inputs), model(*inputs))


# As above: the model with the most operations of a layer is recorded in every way, and that of the drop-in in the one
# that is most unlike the others.
@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "symbolic") for name in MODELS),
        *product(("layer, padded",), ("real", "fake", "before dispatch")),
        ("drop-in with weights", "before dispatch"),
    ],
)
def test_make_fx_records_each_way_to_attend(name: str, way: str) -> None:
    if way == "fake" and name == "layer, padded" and TorchVersion(torch.__version__) < "2.12":
        pytest.skip("broadcast_tensors of torch 2.11 must know whether a size is 1")
    model = MODELS[name]().eval()
    graph, inputs = made_by(model, way), given(dtype=dtype_of(model))
    torch.testing.assert_close(graph(*inputs), model(*inputs))


def test_symbolic_sizes_serve_other_lengths() -> None:
    model = MODELS["layer, padded"]().eval()
    graph, inputs = made_by(model, "symbolic"), given(5, 11)
    torch.testing.assert_close(graph(*inputs), model(*inputs))


class Gradient(nn.Module):
    """The gradient of an attention."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        return torch.autograd.grad(Attending()(leaf, lengths).square().sum(), leaf)[0]


@needs_native
@pytest.mark.parametrize("way", ["real", "fake", "symbolic"])
def test_make_fx_records_forward_and_backward_as_operators(way: str) -> None:
    graph, inputs = made_by(Gradient(), way), given()
    assert [name in graph.code for name in ("multihead.attention", "multihead.attention_backward")] == [True, True]
    torch.testing.assert_close(graph(*inputs), Gradient()(*inputs))


@needs_native
def test_a_backward_pass_that_is_recorded_before_dispatch_is_rejected() -> None:
    with pytest.raises(ArgumentError) as refused:
        made_by(Gradient(), "before dispatch")
    assert str(refused.value) == (
        "The backward pass of torch.ops.multihead.attention is recorded before dispatch, where PyTorch turns the "
        "tensors saved by the forward pass into constants. Leave out pre_dispatch=True of make_fx, or the gradient in "
        "the function that torch.export records."
    )


# How many tokens are left of padding depends on values, which fake tensors do not have.
@pytest.mark.parametrize("name", [name for name in MODELS if "padded" not in name])
def test_fake_tensors_have_the_shape_of_the_output_and_leave_nothing_behind(name: str) -> None:
    model = MODELS[name]().eval()
    inputs = given(length=31, dtype=dtype_of(model))  # a length whose plan no other test makes
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = model(*(mode.from_tensor(each) for each in inputs))
    bounds = key_bounds(masks.Causal(), queries=31, keys=31)
    assert type(bounds.start) is type(bounds.stop) is Tensor
    found, again = model(*inputs), model(*inputs)
    torch.testing.assert_close(found, again)
    for fake, real in zip(*((each,) if isinstance(each, Tensor) else each for each in (fakes, found)), strict=True):
        assert isinstance(fake, FakeTensor)
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_a_plan_that_was_made_before_the_mode_is_not_used_in_it() -> None:
    model, inputs = Attending(), given(length=33)
    before = model(*inputs)
    with FakeTensorMode() as mode:
        assert isinstance(model(*(mode.from_tensor(each) for each in inputs)), FakeTensor)
    assert torch.equal(model(*inputs), before)


@pytest.mark.parametrize("queries", [1, 29])
def test_no_cache_keeps_a_tensor_that_is_made_under_a_mode(queries: int) -> None:
    x = torch.randn(1, HEADS, queries, 8)
    rotary = mh.Rotary(base=123.0)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        q = torch.empty(1, HEADS, queries, 8)
        mh.attention(rotary.rotate(q, 0), q, q, mask=masks.Causal() & masks.Window(28))
    turned = rotary.rotate(x, 0)
    assert type(turned) is Tensor
    mask = masks.Causal() & masks.Window(28)
    expected = mh.attention(turned.double(), x.double(), x.double(), mask=mask, kernel="reference")
    torch.testing.assert_close(mh.attention(turned, x, x, mask=mask).double(), expected, atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("term", ["bias", "sinks", "query_start"])
def test_fake_terms_outside_of_their_mode_do_not_reach_the_kernel(term: str) -> None:
    sizes = {"bias": (1, 1, 5, 5), "sinks": (2,), "query_start": (1,)}
    with FakeTensorMode():
        fake = torch.zeros(sizes[term], dtype=torch.int64 if term == "query_start" else torch.float32)
    q = torch.randn(1, 2, 5, 8)
    request = mh.functional.request_of(q, q, q, **{term: fake})
    bounds = key_bounds(masks.Full(), queries=5, keys=5)
    reason = "it reads plain tensors, and one is a FakeTensor"
    assert KERNELS["native"].refusal(request, bounds) == reason


@needs_native
def test_a_mode_of_a_user_sees_the_operator_and_changes_no_number() -> None:
    q = torch.randn(2, 4, 6, 8, requires_grad=True)
    plain = mh.attention(q, q, q, mask=masks.Causal())
    (of_plain,) = torch.autograd.grad(plain.square().sum(), q)
    with Recording() as mode:
        seen = mh.attention(q, q, q, mask=masks.Causal())
        (of_seen,) = torch.autograd.grad(seen.square().sum(), q)
    assert mode.ours == ["multihead.attention.default", "multihead.attention_backward.default"]
    assert torch.equal(seen, plain)
    assert torch.equal(of_seen, of_plain)


@needs_native
@pytest.mark.parametrize("bias", ["none", "cells", "distance"])
def test_a_mode_of_a_user_has_a_mask_of_cells_written_down_block_by_block(bias: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("multihead.kernels.native.call.DENSE_BLOCK_BYTES", 1)  # blocks of 96 queries
    q, k = torch.randn(2, 2, 2, 200, 8).requires_grad_().unbind()
    given = {
        "none": None,
        "cells": torch.randn(1, 2, 200, 200),
        "distance": mh.scores.RelativeBias(torch.randn(1, 2, 399)),
    }[bias]
    mask = masks.Window(9) | masks.Prefix(torch.tensor((3, 50)))
    plain = mh.attention(q, k, k, mask=mask, bias=given, kernel="native")
    of_plain = torch.autograd.grad(plain.square().sum(), (q, k))
    with Recording() as mode:
        seen = mh.attention(q, k, k, mask=mask, bias=given, kernel="native")
        of_seen = torch.autograd.grad(seen.square().sum(), (q, k))
    assert len(mode.ours) == 2 * 3
    torch.testing.assert_close((seen, *of_seen), (plain, *of_plain), atol=1e-5, rtol=1e-5)


@needs_native
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mode_that_begins_with_the_backward_pass_sees_the_operator(dropout: float) -> None:
    q, sinks = torch.randn(2, 4, 6, 8, requires_grad=True), torch.zeros(4, requires_grad=True)
    bias = torch.randn(1, 4, 6, 6, requires_grad=True)
    gradients = []
    for mode in (None, Recording()):
        torch.manual_seed(0)
        total = mh.attention(q, q, q, bias=bias, sinks=sinks, dropout=dropout).square().sum()
        if mode is None:
            gradients.append(torch.autograd.grad(total, (q, bias, sinks)))
        else:
            with mode:
                gradients.append(torch.autograd.grad(total, (q, bias, sinks)))
            assert mode.ours == ["multihead.attention_backward.default"]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@jit
def test_statistics_and_counted_caches_are_rejected_where_values_cannot_be_read() -> None:
    q = torch.randn(1, 2, 5, 8)
    sentence = (
        "mh.statistics reads values, and torch.jit.trace, make_fx or FakeTensorMode runs this code, where they cannot "
        "be read. Call it outside of them, on the tensors themselves."
    )
    with pytest.raises(ArgumentError) as refused:
        make_fx(lambda q: mh.statistics(q, q, probes=["entropy"]))(q)
    assert str(refused.value) == sentence
    with FakeTensorMode() as mode, pytest.raises(ArgumentError) as refused:
        mh.statistics(mode.from_tensor(q), mode.from_tensor(q))
    assert str(refused.value) == sentence
    with pytest.raises(ArgumentError) as refused:
        torch.jit.trace(Layered(layer(), lambda n: {"lengths": n, "cache": mh.KeyValueCache()}), given())
    assert str(refused.value) == (
        "The cache counts the tokens of each sample, and torch.jit.trace, make_fx or FakeTensorMode runs this code, "
        "where counts cannot be read. Leave lengths out there, or use torch.compile with KeyValueCache(capacity=...)."
    )


def test_statistics_and_weights_under_a_mode_of_a_user_are_those_without_it() -> None:
    q, k = torch.randn(2, 1, 2, 6, 8).unbind()
    expected = mh.statistics(q, k, mask=masks.Causal()), mh.attention_weights(q, k, mask=masks.Causal())
    with Recording() as mode:
        found = mh.statistics(q, k, mask=masks.Causal()), mh.attention_weights(q, k, mask=masks.Causal())
    assert "aten.bmm.default" in mode.seen
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_weights_are_recorded() -> None:
    def tile(q: Tensor, k: Tensor) -> Tensor:
        return mh.attention_weights(q, k, mask=masks.Causal(), heads=slice(1, 3))

    q, k, other_q, other_k = torch.randn(4, 1, 4, 6, 8).unbind()
    graph = make_fx(tile, tracing_mode="symbolic")(q, k)
    torch.testing.assert_close(graph(other_q, other_k), tile(other_q, other_k))


@needs_native
def test_the_profiler_names_the_attention_and_its_backward_pass() -> None:
    q = torch.randn(1, 2, 5, 8, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        mh.attention(q, q, q).sum().backward()
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts["multihead::attention"] == counts["multihead::attention_backward"] == 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor compiles C++, and there is no g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_aot_inductor_compiles_an_exported_layer_for_other_sizes(tmp_path: Path) -> None:
    model = Layered(layer(), lambda lengths: {"mask": masks.Causal() & masks.Lengths(lengths)}).eval()
    batch, length = Dim("batch", min=2, max=64), Dim("length", min=2, max=64)
    with torch.no_grad():
        program = torch.export.export(
            model, given(), dynamic_shapes={"x": {0: batch, 1: length}, "lengths": {0: batch}}
        )
        # One file of each kind is compiled: no other would use precompiled headers, which take half of the time.
        options = {"cpp_cache_precompile_headers": False, "aot_inductor.precompile_headers": False}
        options |= {"aot_inductor.compile_wrapper_opt_level": "O0", "cpp.vec_isa_ok": True}
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2"), inductor_configs=options
        )
        inputs = given(2, 9)
        found = torch._inductor.aoti_load_package(path)(*inputs)
        torch.testing.assert_close(found, model(*inputs), atol=1e-5, rtol=1e-5)
