"""The kernel for CUDA, tested without: flex_attention's plain form, its blocks compiled for the CPU, its refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import SlowPathError, SlowPathWarning
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels import flex, reference
from multihead.kernels.call import AttentionRequest
from multihead.kernels.plan import bounds as plan_bounds
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.slow_paths import strict
from multihead.scores.bias import RelativeBias
from tests.agreeing import assert_within_budget
from tests.drawing import Drawn, calls

Q = torch.randn(1, 2, 4, 16)
MASK = masks.Causal() & masks.Lengths((3, 0))


@contextmanager
def taking_calls_on_the_cpu() -> Iterator[None]:
    """Run the kernel on the CPU with eager flex_attention, which computes gradients there once its check is removed."""
    from torch.nn.attention import flex_attention as room

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "refusal", lambda request, bounds: None)
        patch.setattr(flex, "_compiled_flex_attention", lambda: flex._call_flex_attention)
        patch.setattr(room, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(room, "_validate_device", lambda q, k, v: None)
        yield


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    with taking_calls_on_the_cpu():
        yield


def on_cuda(q: Tensor = Q, v: Tensor | None = None, **options: Any) -> AttentionRequest:
    """Return a request whose shape names a GPU as the device."""
    request = request_of(q, q, q if v is None else v, **options)
    return replace(request, shape=request.shape._replace(device=torch.device("cuda", 0)))


def refusal(request: AttentionRequest) -> str | None:
    on_cpu = replace(request, shape=request.shape._replace(device=torch.device("cpu")))
    return flex.refusal(request, bounds_of(on_cpu))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A device that has all that the kernel needs."""
    monkeypatch.setattr(flex, "_is_triton_missing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return monkeypatch


def test_it_is_for_cuda() -> None:
    request = request_of(Q, Q, Q)
    assert flex.refusal(request, bounds_of(request)) == "it needs CUDA, and the tensors are on cpu"


def test_requests_it_can_compute_are_not_refused(gpu: pytest.MonkeyPatch) -> None:
    bias = torch.zeros(1, 1, 4, 4, requires_grad=True)
    options = {"softcap": 2.0, "sinks": torch.zeros(2), "mask": masks.Keep(torch.eye(4) > 0, "queries keys")}
    assert refusal(on_cuda(**options)) is None
    assert refusal(on_cuda(Q.bfloat16(), Q[..., :1].repeat(1, 1, 1, 24).bfloat16())) is None
    with torch.no_grad():
        assert refusal(on_cuda(bias=bias)) is None


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (on_cuda(Q.double()), "it computes float32, float16 and bfloat16, and the tensors are float64"),
        (on_cuda(dropout=0.1), "flex_attention has no dropout"),
        (on_cuda(Q[:, :, :0]), "flex_attention needs at least one sample, query and key"),
        (on_cuda(Q[:0]), "flex_attention needs at least one sample, query and key"),
        (on_cuda(Q[..., :8]), "flex_attention's kernels support heads of 16 to 256 columns, and head_dim is 8"),
        (
            on_cuda(v=torch.randn(1, 2, 4, 300)),
            "flex_attention's kernels support heads of 16 to 256 columns, and value_dim is 300",
        ),
        (
            on_cuda(bias=torch.zeros(1, 1, 4, 4, requires_grad=True)),
            "flex_attention accumulates the gradient of a bias one cell at a time, which is slow",
        ),
    ],
)
def test_requests_it_cannot_compute_are_refused(
    gpu: pytest.MonkeyPatch, request_: AttentionRequest, reason: str
) -> None:
    assert refusal(request_) == reason


def test_the_refusal_names_what_the_machine_lacks(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert refusal(on_cuda()) == "Triton needs a device of compute capability 7.0"
    gpu.setattr(flex, "_is_triton_missing", lambda: True)
    assert refusal(on_cuda()) == "PyTorch compiles flex_attention with Triton, which is not installed"


def test_transforms_and_exported_programs_use_another_kernel(gpu: pytest.MonkeyPatch) -> None:
    reasons = []
    torch.func.vmap(lambda x: x + len(reasons.append(refusal(on_cuda())) or ""))(torch.zeros(2))
    gpu.setattr(torch.compiler, "is_exporting", lambda: True)
    assert [*reasons, refusal(on_cuda())] == [
        "flex_attention does not support the transforms of torch.func",
        "an exported flex_attention would hold queries x keys wherever it is not compiled",
    ]


@settings(max_examples=25)
@given(calls(longest=9))
def test_outputs_and_gradients_are_within_the_budget(case: Drawn) -> None:
    with taking_calls_on_the_cpu():
        assert_within_budget(case, "flex")


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("values", [torch.randn(1, 1, 8), torch.randn(2, 4, 8), torch.randn(1, 4, 8).double()])
def test_a_bias_of_the_distance_is_never_written_out(values: Tensor) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 6, 16)
    whole = RelativeBias(values).tile(3, 6)
    expected = mh.attention(q, k, k, bias=whole, kernel="reference")
    torch.testing.assert_close(mh.attention(q, k, k, bias=RelativeBias(values), kernel="flex"), expected)


@pytest.mark.usefixtures("on_the_cpu")
def test_blocks_that_are_kept_are_those_of_a_call_with_as_many_keys() -> None:
    """One query that sees one key has equal bounds for any number of keys."""
    for keys in (1, 2, 300):
        q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 2, keys, 16)
        found = mh.attention(q, k, k, mask=mh.masks.Causal(), query_start=0, kernel="flex")
        torch.testing.assert_close(found, k[:, :, :1])


@pytest.mark.usefixtures("on_the_cpu")
def test_a_query_that_sees_no_key_is_0_and_has_no_gradient() -> None:
    q, k, v = (torch.randn(2, 2, 4, 16, requires_grad=True) for _ in range(3))
    bias = torch.zeros(1, 1, 4, 1)
    bias[:, :, 2] = -torch.inf
    output, logsumexp = attention_with_logsumexp(q, k, v, mask=MASK, bias=bias, kernel="flex")
    for empty in (output[1], output[0, :, 2]):
        assert torch.equal(empty, torch.zeros_like(empty))
    assert bool((logsumexp[1] == -torch.inf).all())
    assert bool((logsumexp[0, :, 2] == -torch.inf).all())
    (output.sum() + logsumexp[0, :, :2].sum()).backward()  # type: ignore[no-untyped-call]
    assert all(tensor.grad is not None and bool((tensor.grad[1] == 0).all()) for tensor in (q, k, v))
    assert q.grad is not None
    assert bool((q.grad[0, :, 2] == 0).all())


@pytest.mark.usefixtures("on_the_cpu")
def test_nan_that_a_query_may_not_see_does_not_reach_it() -> None:
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)
    expected = mh.attention(q, k, k, mask=masks.Lengths((2,)), kernel="flex")
    k[:, :, 2:] = torch.nan
    assert torch.equal(mh.attention(q, k, k, mask=masks.Lengths((2,)), kernel="flex"), expected)


@pytest.mark.usefixtures("on_the_cpu")
def test_the_output_is_laid_out_as_q_is() -> None:
    q = torch.randn(2, 5, 4 * 16).view(2, 5, 4, 16).transpose(1, 2)  # as heads are split from a projection
    output = mh.attention(q, q, q, kernel="flex")
    assert output.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("on_the_cpu")
def test_the_output_may_be_written_in_place_and_a_gradient_that_needs_it_raises() -> None:
    q = torch.randn(1, 2, 4, 16, requires_grad=True)
    output = mh.attention(q, q, q, kernel="flex")
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()  # type: ignore[no-untyped-call]


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_one_gradient_alone_can_be_computed(wanted: str) -> None:
    torch.manual_seed(0)
    given_ = dict(zip("qkv", torch.randn(3, 1, 2, 4, 16).unbind(), strict=True))
    given_[wanted].requires_grad_()
    found = [
        torch.autograd.grad(mh.attention(**given_, mask=masks.Causal(), kernel=kernel).sin().sum(), given_[wanted])[0]
        for kernel in ("flex", "reference")
    ]
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gradient_of_the_logsumexp_alone_can_be_computed() -> None:
    q = torch.randn(1, 2, 4, 16, requires_grad=True)
    found = [
        torch.autograd.grad(attention_with_logsumexp(q, q.detach(), q.detach(), kernel=kernel)[1].sum(), q)[0]
        for kernel in ("flex", "reference")
    ]
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler's own look at q
def test_a_second_derivative_is_led_around_it_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, backend: str | None
) -> None:
    """As on CUDA, where the compiled backward raises in double backward, and in eager mode."""
    torch.compiler.reset()
    if backend is not None:
        compiled = torch.compile(flex._call_flex_attention, backend=backend, fullgraph=True)
        monkeypatch.setattr(flex, "_compiled_flex_attention", lambda: compiled)
    found = []
    for kernel in ("flex", "reference"):
        torch.manual_seed(0)
        q, k, v, sinks = (torch.randn(2, 2, 4, 16, dtype=torch.float64, requires_grad=True) for _ in range(4))
        sinks = sinks[0, :, 0, 0].detach().requires_grad_()
        output, logsumexp = attention_with_logsumexp(q, k, v, mask=MASK, sinks=sinks, kernel=kernel)
        loss = output.square().sum() + logsumexp.masked_fill(logsumexp == -torch.inf, 0).sin().sum()
        if kernel == "flex":
            with pytest.warns(SlowPathWarning) as warned:
                first = torch.autograd.grad(loss, [q, k, v, sinks], create_graph=True)
            assert str(warned[0].message) == (
                "Kernel 'flex' has no second derivative, and create_graph=True requires one: the reference kernel "
                "computes the call again, and holds queries x keys. Give kernel='reference' to compute the call only "
                "once."
            )
        else:
            first = torch.autograd.grad(loss, [q, k, v, sinks], create_graph=True)
        square = sum(each.square().sum() for each in first)
        assert isinstance(square, Tensor)
        found.append([*first, *torch.autograd.grad(square, [q, k, v, sinks])])
    for given_, expected in zip(*found, strict=True):
        torch.testing.assert_close(given_, expected)


@pytest.mark.usefixtures("on_the_cpu")
def test_where_pytorch_cannot_compile_the_reference_kernel_runs_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def failing(*_: object, **__: object) -> None:
        raise TorchDynamoException("no tile")

    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda: failing)
    with pytest.warns(SlowPathWarning) as warned:
        output = mh.attention(Q, Q, Q, kernel="flex")
    assert str(warned[0].message) == (
        "PyTorch could not compile flex_attention for this call (TorchDynamoException): the reference kernel computes "
        'it, and holds queries x keys. Report it with the call; kernel="reference" computes it without this warning.'
    )
    request = request_of(Q, Q, Q)
    assert torch.equal(output, reference.attend(request, bounds_of(request)).output)
    with strict(), pytest.raises(SlowPathError, match=r"^PyTorch could not compile flex_attention for this call"):
        mh.attention(Q, Q, Q, kernel="flex")


@pytest.mark.usefixtures("on_the_cpu")
def test_more_kinds_of_calls_are_compiled_than_pytorch_recompiles_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    compiled = torch.compile(flex._call_flex_attention, backend="eager", fullgraph=True)
    monkeypatch.setattr(flex, "_compiled_flex_attention", lambda: compiled)
    with torch._dynamo.config.patch(recompile_limit=1):
        for dim in (16, 24, 32):
            q = torch.randn(1, 2, 4, dim)
            output = mh.attention(q, q, q, mask=MASK.parts[0], kernel="flex")
            torch.testing.assert_close(output, mh.attention(q, q, q, mask=MASK.parts[0], kernel="reference"))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_block_mask_is_made_once_for_calls_with_equal_masks_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], flex.block_mask
    monkeypatch.setattr(flex, "block_mask", lambda *given, **options: made.append(make(*given, **options)) or made[-1])
    for keys in (6, 6, 7):
        mh.attention(Q, torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16), mask=masks.Prefix(3), kernel="flex")
    assert len(made) == 2


@pytest.mark.usefixtures("on_the_cpu")
def test_what_a_cuda_graph_captures_is_not_kept_for_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (flex, plan_bounds):
        monkeypatch.setattr(module, "is_captured", lambda device: True)
    before = len(plan_bounds.BOUNDS_CACHE.entries)
    k = torch.randn(1, 2, 9, 16)
    mh.attention(Q, k, k, mask=masks.Prefix(5), kernel="flex")
    assert len(plan_bounds.BOUNDS_CACHE.entries) == before
    bounds = plan_bounds.key_bounds(masks.Prefix(5), queries=4, keys=9)
    request = request_of(Q, k, k, masks.Prefix(5))
    one, other = (flex._cached_block_mask(request, bounds, backward=False) for _ in range(2))
    assert one is not other


@pytest.mark.usefixtures("on_the_cpu")
def test_in_a_graph_of_the_caller_it_is_part_of_the_graph() -> None:
    torch.compiler.reset()
    q, k = (torch.randn(2, heads, 6, 16, requires_grad=True) for heads in (4, 2))
    mask = masks.Causal() & masks.Lengths(torch.tensor([6, 3]))

    def run(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        options: dict[str, Any] = {"mask": masks.Causal() & masks.Lengths(lengths), "kernel": "flex"}
        return mh.attention(q, k, k, softcap=2.0, **options)

    graph = torch.compile(run, backend="eager", fullgraph=True)
    output = graph(q, k, torch.tensor([6, 3]))
    expected = mh.attention(q, k, k, mask=mask, softcap=2.0, kernel="reference")
    torch.testing.assert_close(output, expected)
    for found, right in zip(
        torch.autograd.grad(output.sin().sum(), (q, k)), torch.autograd.grad(expected.sin().sum(), (q, k)), strict=True
    ):
        torch.testing.assert_close(found, right)


def test_a_graph_asks_it_whether_it_refuses(gpu: pytest.MonkeyPatch) -> None:
    torch.compiler.reset()
    request = on_cuda()
    bounds = bounds_of(request_of(Q, Q, Q))

    def reasons(x: Tensor) -> tuple[Tensor, list[str | None]]:
        found = [flex.refusal(request, bounds)]

        def transformed(y: Tensor) -> Tensor:
            found.append(flex.refusal(request, bounds))
            return y + 1

        return torch.func.vmap(transformed)(x), found

    _, found = torch.compile(reasons, backend="eager", fullgraph=True)(torch.zeros(2))
    assert found == [None, "flex_attention does not support the transforms of torch.func"]


@pytest.mark.parametrize("strict", [False, True])
def test_an_export_is_distinguished_from_a_graph(gpu: pytest.MonkeyPatch, strict: bool) -> None:
    """In torch 2.11 a compiler that traces `torch.compiler.is_exporting` evaluates it to True in every graph."""
    request = on_cuda()
    bounds = bounds_of(request_of(Q, Q, Q))

    class Asking(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            reason = flex.refusal(request, bounds)
            return x if reason is None else x + len(reason)

    torch.compiler.reset()
    x = torch.zeros(1)
    compiled = torch.compile(Asking(), backend="eager", fullgraph=True)
    exported = torch.export.export(Asking(), (x,), strict=strict).module()
    reason = "an exported flex_attention would hold queries x keys wherever it is not compiled"
    assert (compiled(x).item(), exported(x).item()) == (0, len(reason))


@pytest.mark.parametrize("mask", [masks.Causal() & masks.Window(100), masks.Documents((200, 100, 50))])
def test_compiled_it_computes_the_blocks_of_the_plan(mask: masks.Mask) -> None:
    """The compiled form on the CPU returns no logsumexp, so flex_attention is called directly."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    q, k, v = (torch.randn(2, heads, 400, 32) for heads in (4, 2, 2))
    bias = RelativeBias(torch.randn(1, 4, 799))
    request = request_of(q, k, v, mask=mask, bias=bias, softcap=3.0)
    bounds = bounds_of(request)
    blocks = flex.block_mask(request, bounds, backward=False)
    assert blocks.sparsity() > 10
    assert blocks.full_kv_num_blocks is not None
    if isinstance(mask, masks.Documents):
        assert int(blocks.full_kv_num_blocks.sum()) == 1
    with torch.no_grad():
        output = torch.compile(flex_attention, fullgraph=True)(
            q, k, v, score_mod=flex.score_mod(request), block_mask=blocks, enable_gqa=True
        )
    assert isinstance(output, Tensor)
    torch.testing.assert_close(output, mh.attention(q, k, v, mask=mask, bias=bias, softcap=3.0, kernel="reference"))


def test_scales_and_softcaps_are_compiled_as_constants() -> None:
    """A float argument would become an input of the kernel, which Triton's templates do not support."""
    torch.compiler.reset()
    scales = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (call,) = (node for node in graph.graph.nodes if "flex_attention" in str(node.target))
        scales.append(call.args[5])
        assert all(isinstance(given, Tensor) for given in inputs)
        return graph.forward

    compiled = torch.compile(flex._call_flex_attention, backend=backend, fullgraph=True)
    for scale, softcap in ((0.25, 2.0), (0.5, 3.0), (0.75, 4.0)):
        request = request_of(Q, Q, Q, scale=scale, softcap=softcap)
        output, _ = flex._compute_output_and_logsumexp(request, bounds_of(request), compiled)
        expected = mh.attention(Q, Q, Q, scale=scale, softcap=softcap, kernel="reference")
        torch.testing.assert_close(output, expected)
    assert scales == [0.25, 0.5, 0.75]


def test_compiled_on_the_cpu_it_has_no_logsumexp_so_the_reference_kernel_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.compiler.reset()
    monkeypatch.setattr(flex, "refusal", lambda request, bounds: None)
    with torch.no_grad(), pytest.warns(SlowPathWarning, match=r"\(InductorError\)"):
        output = mh.attention(Q, Q, Q, kernel="flex")
    assert torch.equal(output, mh.attention(Q, Q, Q, kernel="reference"))
