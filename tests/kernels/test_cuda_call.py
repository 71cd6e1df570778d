"""Calls on CUDA that need no plan, on the simulated GPU: which kernel of PyTorch computes them, and what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.utils.output_capturing import _active_collector

import multihead as mh
from multihead import MultiHeadAttention, masks
from multihead.errors import ArgumentError, DtypeError, ShapeError, SlowPathWarning
from multihead.kernels import cuda_call, flex, fused_on_cuda
from multihead.kernels.call import listen
from multihead.kernels.fused_on_cuda import CUDNN, EFFICIENT, FLASH, FusedCall
from multihead.kernels.proven import UNPROVEN_VARIABLE
from tests import oracle
from tests.simulated_gpu import operators
from tests.simulated_gpu.calls import llama
from tests.simulated_gpu.device import (
    CUDA,
    Counts,
    Gpu,
    _device_guard,
    count_frames,
    simulated_gpu,
    skip_where_not_simulated,
    to_cpu,
    to_gpu,
)

skip_where_not_simulated(module=True)

HALF, SINGLE = torch.bfloat16, torch.float32
TOLERANCE = {HALF: 2e-2, torch.float16: 3e-3, SINGLE: 2e-6}
FLASH_NAME = "_scaled_dot_product_flash_attention"
EFFICIENT_NAME = "_scaled_dot_product_efficient_attention"
CUDNN_NAME = "_scaled_dot_product_cudnn_attention"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    with simulated_gpu() as found:
        yield found


def drawn(
    dtype: torch.dtype = HALF, *, queries: int = 9, keys: int = 9, kv_heads: int = 4, dim: int = 16
) -> list[Tensor]:
    """Return q, k and v on the CPU."""
    sizes = ((4, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, *size, dim).to(dtype) for size in sizes]


def exact(given: list[Tensor], mask: masks.Mask, start: int = 0, scale: float | None = None) -> oracle.Dense:
    """Return what a call gives in float64."""
    q, k, v = (each.double() for each in given)
    seen = oracle.shown(mask, (*q.shape[:3], k.shape[2]), start)
    return oracle.attend(q, k, v, seen, scale=scale)


def launches(gpu: Gpu, call: Callable[[], object]) -> dict[str, int]:
    """Return what the second call of a function launches."""
    call()
    gpu.counts = Counts()
    call()
    return dict(gpu.counts.launches)


def off(value: Tensor, right: Tensor) -> float:
    """Return the largest difference of a result on the simulated GPU."""
    return oracle.difference(to_cpu(value.detach()).double(), right)


CALLS: dict[str, tuple[masks.Mask, dict[str, Any]]] = {
    "full": (masks.Full(), {}),
    "full, fewer queries": (masks.Full(), {"queries": 5}),
    "causal": (masks.Causal(), {}),
    "causal, fewer queries": (masks.Causal(), {"queries": 5, "start": 0}),
    "grouped": (masks.Causal(), {"kv_heads": 2}),
    "one head of keys": (masks.Full(), {"kv_heads": 1}),
    "one query": (masks.Causal(), {"queries": 1, "start": 8, "kv_heads": 2}),
    "one query in the middle": (masks.Causal(), {"queries": 1, "start": 4}),
    "one query of a window": (masks.Window(3, after=1), {"queries": 1, "start": 4}),
    "a window wider than the call": (masks.Window(100, after=100), {}),
    "a causal window wider than the call": (masks.Window(9), {}),
    "the end of a sequence": (masks.Window(20, after=8), {"queries": 5, "start": 4}),
}


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_full_and_causal_calls_are_one_launch_without_a_plan_and_right(name: str, dtype: torch.dtype, gpu: Gpu) -> None:
    mask, sizes = CALLS[name]
    start = sizes.get("start")
    given = drawn(dtype, **{key: value for key, value in sizes.items() if key != "start"})
    there = to_gpu(given)
    right = exact(given, mask, start or 0, scale=0.3)
    options: dict[str, Any] = {"mask": mask, "query_start": start, "scale": 0.3}

    def call() -> Tensor:
        return mh.attention(*there, **options)

    def with_logsumexp() -> tuple[Tensor, Tensor]:
        return mh.attention_with_logsumexp(*there, **options)

    repeated = dtype == SINGLE and given[1].shape[1] < 4
    one = {EFFICIENT_NAME if dtype == SINGLE else FLASH_NAME: 1} | ({"clone": 2} if repeated else {})
    assert launches(gpu, call) == one
    # FlashAttention's logsumexp of a row with a NaN is inf, which one launch more replaces.
    assert launches(gpu, with_logsumexp) == one | ({} if dtype == SINGLE else {"nan_to_num": 1})
    assert (gpu.counts.totals["reads"], gpu.counts.totals["copies"]) == (0, 0)
    assert max(count_frames(call), count_frames(with_logsumexp)) <= 15
    output, logsumexp = with_logsumexp()
    assert max(off(call(), right.output), off(output, right.output)) < TOLERANCE[dtype]
    assert off(logsumexp, right.logsumexp) < 1e-5
    assert (output.dtype, logsumexp.dtype) == (dtype, SINGLE)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", ["causal", "grouped", "one query of a window"])
def test_the_planned_way_gives_the_same_bits_and_is_explained(name: str, dtype: torch.dtype, gpu: Gpu) -> None:
    mask, sizes = CALLS[name]
    start = sizes.get("start")
    there = to_gpu(drawn(dtype, **{key: value for key, value in sizes.items() if key != "start"}))
    options: dict[str, Any] = {"mask": mask, "query_start": start}
    assert mh.explain(*there, **options).kernel == "sdpa"
    for planned, short in zip(
        mh.attention_with_logsumexp(*there, **options, kernel="sdpa"),
        mh.attention_with_logsumexp(*there, **options),
        strict=True,
    ):
        assert torch.equal(to_cpu(planned), to_cpu(short))


def test_the_kernels_that_the_user_allows_and_the_card_has_are_those_that_run(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    causal = masks.Causal()
    equal, grouped = to_gpu(drawn(torch.float16)), to_gpu(drawn(torch.float16, kv_heads=2))
    flex = {"flex_attention", "logsumexp of flex_attention"}

    def of(given: Any) -> set[str]:
        return set(launches(gpu, lambda: mh.attention(*given, mask=causal)))

    assert (of(equal), of(grouped)) == ({FLASH_NAME}, {FLASH_NAME})
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert (of(equal), of(grouped)) == ({EFFICIENT_NAME}, {EFFICIENT_NAME, "clone"})
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        assert of(equal) == {CUDNN_NAME}
    with sdpa_kernel(SDPBackend.MATH):
        assert of(equal) == flex
        assert mh.explain(*equal, mask=causal).refusals["sdpa"] == (
            "no fused kernel of PyTorch that is switched on computes such tensors on this GPU"
        )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert of(to_gpu(drawn(SINGLE))) == flex
    assert of(equal) == {FLASH_NAME}
    monkeypatch.setattr(operators, "CAPABILITY", [7, 5])  # a T4
    assert (of(equal), of(to_gpu(drawn(HALF)))) == ({EFFICIENT_NAME}, flex)


def test_what_an_activated_flash_attention_refuses_goes_to_the_memory_efficient_kernel(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash, given = operators.OPERATORS[FLASH_NAME], drawn(kv_heads=2)

    def without_dropout(**options: Any) -> Any:
        if options.get("dropout_p"):
            raise RuntimeError("FA4 has no dropout.")
        return flash(**options)

    monkeypatch.setitem(operators.OPERATORS, FLASH_NAME, without_dropout)
    there = to_gpu(given)
    with pytest.raises(RuntimeError, match=r"^FA4 has no dropout\.$"):  # none is activated, so nothing is expected
        mh.attention(*there, dropout=0.1)
    monkeypatch.setattr(fused_on_cuda, "_current_implementation", lambda: "FA4")
    for call in (mh.attention, mh.attention_with_logsumexp):
        assert EFFICIENT_NAME in launches(gpu, partial(call, *there, dropout=0.1))
    assert set(launches(gpu, lambda: mh.attention(*there))) == {FLASH_NAME}
    assert off(mh.attention(*there), exact(given, masks.Full()).output) < TOLERANCE[HALF]
    monkeypatch.setenv(UNPROVEN_VARIABLE, "ragged")
    assert mh.explain(*there, mask=masks.Window(3)).refusals["ragged"] == (
        "another FlashAttention than PyTorch's own is activated, and the sequences were read in PyTorch's source"
    )


def test_a_plan_is_not_used_again_after_the_user_allows_other_kernels(gpu: Gpu) -> None:
    """A call with a listener is planned, and its plan is kept."""
    there = to_gpu(drawn())

    class Heard:
        requested_statistics: frozenset[str] = frozenset()

        def receive(self, call: object) -> None:
            pass

    def of() -> set[str]:
        with listen(Heard()):
            return set(launches(gpu, lambda: mh.attention(*there, mask=masks.Causal())))

    with sdpa_kernel(SDPBackend.MATH):
        assert "flex_attention" in of()
    assert FLASH_NAME in of()


@pytest.mark.parametrize("name", ["full", "causal", "lengths", "window"])
def test_after_a_warm_up_a_call_can_be_captured_in_a_graph(
    name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture forbids to wait for a value, and to copy from memory of the host."""
    lengths = to_gpu(torch.tensor([9, 4]))
    of_name = {"full": masks.Full(), "causal": masks.Causal(), "lengths": masks.Lengths(lengths)}
    given, mask = to_gpu(drawn()), of_name.get(name, masks.Window(3))
    for asked in ("", "ragged"):
        monkeypatch.setenv(UNPROVEN_VARIABLE, asked)
        expected = mh.attention(*given, mask=mask)
        gpu.counts, graph = Counts(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = mh.attention(*given, mask=mask)
        assert (gpu.counts.totals["reads"], gpu.counts.totals["copies"]) == (0, 0)
        assert torch.equal(to_cpu(found), to_cpu(expected))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "options",
    [
        {"mask": masks.Window(3)},
        {"mask": masks.Causal() & masks.Lengths((9, 4))},
        {"softcap": 2.0},
        {"scale": 0.0},
        {"query_start": torch.tensor([0, 1]), "mask": masks.Causal()},
        {"dim": 20},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_other_calls_are_planned(options: dict[str, Any]) -> None:
    sizes = {name: options.pop(name) for name in ("dim", "dtype") if name in options}
    given = drawn(sizes.pop("dtype", HALF), **sizes)
    start = options.get("query_start")
    if isinstance(start, Tensor):
        options["query_start"] = to_gpu(start)
    mask = options.get("mask", masks.Full())
    seen = oracle.shown(mask, (2, 4, 9, 9), start)
    right = oracle.attend(
        *(each.double() for each in given), seen, softcap=options.get("softcap"), scale=options.get("scale")
    )
    assert off(mh.attention(*to_gpu(given), **options), right.output) < 2e-2


@pytest.mark.usefixtures("gpu")
def test_a_call_with_an_error_says_what_a_planned_one_says() -> None:
    q, k, v = to_gpu(drawn())
    with pytest.raises(ArgumentError, match=r"^There are 9 queries and 5 keys") as told:
        mh.attention(q, k[:, :, :5], v[:, :, :5], mask=masks.Causal())
    assert "query_start" in str(told.value)
    for wrong in ((q, k[:, :3], v[:, :3]), (q, k, v[:1]), (q, k, v.float()), (q, k[..., :8], v)):
        with pytest.raises((ShapeError, DtypeError)):
            mh.attention(*wrong)


@pytest.mark.usefixtures("unplanned")
def test_strides_that_a_kernel_would_misread_are_copied(gpu: Gpu) -> None:
    q, k, v = drawn()
    wide = torch.randn(2, 4, 9, 33).to(HALF)
    layouts = {
        "features apart": [q.mT.contiguous().mT, k, v],
        "heads of stride 0": [q, k[:, :1].expand(-1, 4, -1, -1), v],
        "an odd address": [q, k, wide[..., 1:17]],
    }
    for given in layouts.values():
        call = partial(mh.attention, *to_gpu(given), mask=masks.Causal())
        assert off(call(), exact(given, masks.Causal()).output) < TOLERANCE[HALF]
        assert launches(gpu, call) == {FLASH_NAME: 1, "clone": 1}


@pytest.mark.usefixtures("unplanned")
def test_a_query_that_sees_nan_is_nan_in_output_and_logsumexp_and_no_other(gpu: Gpu) -> None:
    q, k, v = drawn()
    q[0, 1, 3, 0], k[1, 2, 8, 0] = torch.nan, torch.nan  # one query; a key that the last query alone sees
    output, logsumexp = mh.attention_with_logsumexp(*to_gpu([q, k, v]), mask=masks.Causal())
    rows = to_cpu(logsumexp).isnan()
    assert rows.nonzero().tolist() == [[0, 1, 3], [1, 2, 8]]
    assert torch.equal(to_cpu(output).isnan().all(-1), rows)
    assert torch.equal(to_cpu(output).isnan().any(-1), rows)


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, CUDNN])
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_output_and_logsumexp_are_those_of_float64(kernel: int, causal: bool, gpu: Gpu) -> None:
    """Autograd's engine needs a real device, so the backward function is called by itself."""
    grouped = kernel != EFFICIENT
    given = drawn(torch.float16, kv_heads=2 if grouped else 4)
    call = FusedCall(kernel, 1, causal, 0.0, 0.3)
    mask = masks.Causal() if causal else masks.Full()
    leaves = [each.double().requires_grad_() for each in given]
    seen = oracle.shown(mask, (2, 4, 9, 9), 0)
    dense = oracle.attend(leaves[0], leaves[1], leaves[2], seen, scale=0.3)
    of_output, of_logsumexp = torch.randn(2, 4, 9, 16).half(), torch.randn(2, 4, 9)
    found = _gradients(call, given, of_output, of_logsumexp)
    pairs = (of_output.double(), of_logsumexp.double())
    for mine, right in zip(found, torch.autograd.grad((dense.output, dense.logsumexp), leaves, pairs), strict=True):
        assert oracle.difference(mine.double(), right) < 1e-2
    alone = _gradients(call, given, None, of_logsumexp)
    dense = oracle.attend(leaves[0], leaves[1], leaves[2], seen, scale=0.3)
    of_q_and_k = torch.autograd.grad(dense.logsumexp, leaves[:2], of_logsumexp.double())
    for mine, right in zip(alone, (*of_q_and_k, torch.zeros_like(leaves[2])), strict=True):
        assert oracle.difference(mine.double(), right) < 1e-2


def _gradients(
    call: FusedCall, given: list[Tensor], of_output: Tensor | None, of_logsumexp: Tensor | None
) -> list[Tensor]:
    """Run the forward and the backward function of a call on the simulated GPU: the gradients of q, k and v."""
    ctx = SimpleNamespace(save_for_backward=lambda *each: setattr(ctx, "saved_tensors", each))
    ctx.set_materialize_grads = lambda _: None
    with torch.no_grad():
        fused_on_cuda._DifferentiableCall.forward(ctx, *to_gpu(given), call)
        grads = [None if each is None else to_gpu(each) for each in (of_output, of_logsumexp)]
        found = fused_on_cuda._DifferentiableCall.backward(ctx, *grads)
    assert found[3] is None
    return [to_cpu(each) for each in found[:3] if each is not None]


@pytest.mark.usefixtures("unplanned")
def test_with_gradients_a_call_is_one_launch_too(gpu: Gpu) -> None:
    q, k, v = (each.requires_grad_() for each in to_gpu(drawn(kv_heads=2)))

    def call() -> Tensor:
        return mh.attention(q, k, v, mask=masks.Causal(), dropout=0.1)

    assert launches(gpu, call) == {FLASH_NAME: 1}
    assert count_frames(call) <= 15
    output, logsumexp = mh.attention_with_logsumexp(q, k, v, mask=masks.Causal())
    assert output.requires_grad
    assert logsumexp.requires_grad


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_dropout_is_that_of_pytorch_and_repeated_by_the_seed(dtype: torch.dtype, gpu: Gpu) -> None:
    given = drawn(dtype, kv_heads=4, queries=64, keys=64)
    there = to_gpu(given)

    def call(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        output, logsumexp = mh.attention_with_logsumexp(*there, mask=masks.Causal(), dropout=0.25)
        return to_cpu(output), to_cpu(logsumexp)

    (one, logsumexp), (two, _), (other, _) = call(0), call(0), call(1)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    right = exact(given, masks.Causal())
    assert oracle.difference(logsumexp.double(), right.logsumexp) < 1e-5  # before dropout
    mean = torch.stack([call(seed)[0].double() for seed in range(60)]).mean(0)
    assert float((mean - right.output).abs().mean()) < 0.06
    assert launches(gpu, lambda: mh.attention(*there, dropout=0.25)) == {
        EFFICIENT_NAME if dtype == SINGLE else FLASH_NAME: 1
    }


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT])
def test_gradients_with_dropout_leave_out_what_the_forward_pass_dropped(kernel: int, gpu: Gpu) -> None:
    given = drawn(torch.float16)
    call = FusedCall(kernel, 1, True, 0.5, 0.25)
    grad = torch.randn(2, 4, 9, 16).half()
    torch.manual_seed(3)
    found = _gradients(call, given, grad, None)
    torch.manual_seed(3)
    kept = operators._kept_factors(torch.zeros(2, 4, 9, 9), 0.5, operators._new_seed(0.5))
    assert kept is not None
    leaves = [each.double().requires_grad_() for each in given]
    weights = oracle.attend(leaves[0], leaves[1], leaves[2], oracle.shown(masks.Causal(), (2, 4, 9, 9))).weights
    exact_grads = torch.autograd.grad((weights * kept) @ leaves[2], leaves, grad.double())
    for mine, right in zip(found, exact_grads, strict=True):
        assert oracle.difference(mine.double(), right) < 1e-2


def test_a_second_derivative_is_the_reference_kernels_and_with_dropout_an_error() -> None:
    q, k, v = (each.requires_grad_() for each in drawn(SINGLE))
    ctx: Any = SimpleNamespace(saved_tensors=(q, k, v, torch.zeros(0), torch.zeros(0)))
    ctx.call = FusedCall(FLASH, 1, True, 0.0, 0.25)
    grad = torch.randn(2, 4, 9, 16)
    with torch.enable_grad(), pytest.warns(SlowPathWarning, match=r"^Kernel 'sdpa' has no second derivative"):
        found = fused_on_cuda._DifferentiableCall.backward(ctx, grad, None)
    seen = oracle.shown(masks.Causal(), (2, 4, 9, 9))
    right = torch.autograd.grad(oracle.attend(q, k, v, seen).output, (q, k, v), grad)
    for mine, exact_grad in zip(found[:3], right, strict=True):
        assert mine is not None
        assert mine.requires_grad
        assert oracle.difference(mine.detach(), exact_grad) < 1e-5
    ctx.call = FusedCall(FLASH, 1, True, 0.1, 0.25)
    with torch.enable_grad(), pytest.raises(ArgumentError) as told:
        fused_on_cuda._DifferentiableCall.backward(ctx, grad, None)
    assert str(told.value) == (
        "Kernel 'sdpa' has no second derivative with dropout, and create_graph=True requires one. "
        "Set dropout to 0, or give kernel='reference'."
    )


@pytest.mark.usefixtures("gpu")
def test_the_layer_gives_what_it_gives_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = MultiHeadAttention(64, 4, num_kv_heads=2).eval()
    x = torch.randn(2, 9, 64)
    with torch.no_grad():
        expected = layer(x, mask=masks.Causal())
        for name, parameter in list(layer.named_parameters()):
            owner, last = layer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            owner._parameters[last] = torch.nn.Parameter(to_gpu(parameter.detach()), requires_grad=False)
        monkeypatch.setattr("multihead.layer.attention.attend", None)  # a planned call would be an error
        assert off(layer(to_gpu(x), mask=masks.Causal()), expected.double()) < 1e-5


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["full", "causal", "grouped", "float32, grouped", "one query"])
def test_in_a_graph_a_call_is_sdpa(kind: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are described, without memory, on a GPU that is described too."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        fused_on_cuda, "_choose", lambda q, k, v, mask, dropout, causal, **_: operators.fused_sdp_choice(q, k, v)
    )
    monkeypatch.setattr(cuda_call, "_usual_tensor", lambda _, dtype, heads: torch.zeros(1, heads, 8, 64, dtype=dtype))
    torch.compiler.reset()
    dtype = SINGLE if "float32" in kind else HALF
    with _device_guard(CUDA), FakeTensorMode(allow_non_fake_inputs=True):
        sizes = ((4, 1 if kind == "one query" else 16), (2 if "grouped" in kind else 4, 16))
        q, k = (torch.empty(2, *size, 64, dtype=dtype, device="cuda", requires_grad=training) for size in sizes)
        mask = masks.Full() if kind == "full" else masks.Causal()
        start = 15 if kind == "one query" else None
        run = torch.compile(
            lambda q, k: mh.attention(q, k, k, mask=mask, query_start=start), backend=backend, fullgraph=True
        )
        output = run(q, k)
    assert (output.shape, output.device.type, output.dtype) == (q.shape, "cuda", dtype)
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    assert called[-1] is torch.nn.functional.scaled_dot_product_attention
    others = {str(each).removeprefix("<built-in function ").removesuffix(">") for each in called[:-1]}
    repeats = {"getitem", "expand", "flatten", "contiguous"} if kind == "float32, grouped" else set()
    assert others <= repeats


@pytest.mark.parametrize("padded", [False, True])
def test_the_graph_of_a_whole_model_waits_for_no_value_and_copies_nothing(
    padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So `mode="reduce-overhead"` can capture it: all of a pass is one graph, in which each tensor is on the GPU."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(
        fused_on_cuda, "_choose", lambda q, k, v, mask, dropout, causal, **_: operators.fused_sdp_choice(q, k, v)
    )
    monkeypatch.setattr(cuda_call, "_usual_tensor", lambda _, dtype, heads: torch.zeros(1, heads, 8, 64, dtype=dtype))
    monkeypatch.setattr(flex, "_missing_flex_requirement", lambda _: None)
    # Of an attribute that is written before and after flex_attention in a graph, PyTorch 2.13 keeps the first value, so
    # this variable of transformers would stay set after the test.
    for name in ("compiling", "global_var"):
        monkeypatch.setattr(_active_collector, name, getattr(_active_collector, name))
    torch.compiler.reset()
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def described(tensor: Tensor) -> Tensor:
        with mode:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")

    with _device_guard(CUDA), torch.no_grad():
        model = llama(1, described)
        mh.use(model)
    with _device_guard(CUDA), mode, torch.no_grad():
        ids = torch.zeros(2, 60, dtype=torch.int64, device="cuda")
        options = {"attention_mask": torch.ones_like(ids), "use_cache": False} if padded else {}
        torch.compile(model, backend=backend, fullgraph=True)(ids, **options)
    (graph,) = graphs
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    assert {each.device.type for each in values if isinstance(each, Tensor)} == {"cuda"}
    called = [node.target for node in graph.graph.nodes]
    assert not {"item", "tolist", "cpu", "numpy"}.intersection(map(str, called))
    assert (torch.nn.functional.scaled_dot_product_attention in called) is not padded


def test_the_operators_that_are_called_have_the_arguments_that_were_read() -> None:
    """They are private, so PyTorch may change them; most arguments are given by position."""
    forward = "query key value dropout_p is_causal return_debug_mask scale"
    with_bias = forward.replace("value", "value attn_bias compute_log_sumexp")
    sizes = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    backward = "grad_out query key value out logsumexp"
    expected = {
        "flash_attention": forward,
        "cudnn_attention": with_bias,
        "efficient_attention": with_bias.replace("return_debug_mask ", ""),
        "flash_attention_backward": f"{backward} {sizes} philox_seed philox_offset scale",
        "cudnn_attention_backward": f"{backward} philox_seed philox_offset attn_bias {sizes} scale",
        "efficient_attention_backward": (
            "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
            "is_causal scale"
        ),
    }
    for name, arguments in expected.items():
        schema = getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default._schema
        assert [each.name for each in schema.arguments] == arguments.split()
