"""Calls that go to the operator without a plan: they give what planned calls give, and nothing else goes there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from multihead import MultiHeadAttention, functional, masks
from multihead.errors import ArgumentError, DtypeError, MaskError, ShapeError, SlowPathWarning
from multihead.kernels.call import AttentionCall, find_surroundings, listen
from multihead.kernels.native import library, short_call
from multihead.kernels.parts import PartName
from multihead.probes import DEFAULT, PROBES
from multihead.probes import statistics as measuring
from tests import oracle
from tests.drawing import laid_out
from tests.kernel_names import needs_native

pytestmark = needs_native

MASKS: dict[str, masks.Mask] = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Window(3),
    "window on both sides": masks.Window(2, after=4),
    "distant window": masks.Window(10**12, after=10**12),
    "lengths": masks.Lengths((7, 0, 3)),
    "lengths in a tensor": masks.Lengths(torch.tensor([7, 1, 3])),
    "one length": masks.Lengths((4,)),
    "causal lengths": masks.Causal() & masks.Lengths((7, 0, 3)),
    "causal window of lengths": masks.Causal() & masks.Window(4, after=2) & masks.Lengths((7, 5, 3)),
}


def drawn(dtype: torch.dtype = torch.float32, *, queries: int = 7, keys: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(3, 4, queries, 16, dtype=dtype)
    return q, torch.randn(3, 2, keys, 16, dtype=dtype), torch.randn(3, 2, keys, 16, dtype=dtype)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a call needs a plan."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the call was planned")

    monkeypatch.setattr(functional, "attend", fail)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_arithmetic_need_no_plan(name: str, dtype: torch.dtype) -> None:
    q, k, v = drawn(dtype)
    output, logsumexp = functional.attention_with_logsumexp(q, k, v, mask=MASKS[name])
    shown = oracle.shown(MASKS[name], (3, 4, 7, 7))
    expected = oracle.attend(q.double(), k.double(), v.double(), shown)
    assert oracle.difference(output, expected.output) < (1e-6 if dtype == torch.float32 else 2e-2)
    assert oracle.difference(logsumexp, expected.logsumexp) < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("start", [None, 0, 2, 5])
def test_they_give_the_bits_of_planned_calls(name: str, start: int | None) -> None:
    q, k, v = drawn(queries=7 if start is None else 2)
    for given in (q, laid_out(q, "heads inside"), q[:, :, :, :8].repeat(1, 1, 1, 2)):
        for softcap, scale in ((None, None), (3.0, 0.7)):
            terms: dict[str, Any] = {"mask": MASKS[name], "softcap": softcap, "scale": scale, "query_start": start}
            found = functional.attention_with_logsumexp(given, k, v, **terms)
            planned = functional.attention_with_logsumexp(given, k, v, kernel="native", **terms)
            for one, two in zip(found, planned, strict=True):
                assert torch.equal(one, two)
                assert one.stride() == two.stride()


@pytest.mark.parametrize("name", MASKS)
def test_their_gradients_are_those_of_the_oracle(name: str) -> None:
    leaves = [each.requires_grad_() for each in drawn()]
    double = [each.detach().double().requires_grad_() for each in leaves]
    output, logsumexp = functional.attention_with_logsumexp(*leaves, mask=MASKS[name], softcap=4.0)
    assert output.grad_fn is not None
    assert "Differentiable" in type(output.grad_fn).__name__
    shown = oracle.shown(MASKS[name], (3, 4, 7, 7))
    expected = oracle.attend(double[0], double[1], double[2], shown, softcap=4.0)
    seen = expected.logsumexp > -torch.inf
    loss = output.square().sum() + logsumexp[seen].square().sum()
    of_oracle = expected.output.square().sum() + expected.logsumexp[seen].square().sum()
    for one, two in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(of_oracle, double), strict=True):
        assert oracle.difference(one, two) < 1e-5


def test_one_output_alone_has_gradients_and_they_can_be_differentiated_again() -> None:
    leaves = [each.requires_grad_() for each in drawn()]
    for which in (0, 1):
        outputs = functional.attention_with_logsumexp(*leaves, mask=masks.Causal())
        with pytest.warns(SlowPathWarning):
            found = torch.autograd.grad(outputs[which].square().sum(), leaves[:2], create_graph=True)
        again = torch.autograd.grad(sum(each.square().sum() for each in found), leaves[:2])
        reference = functional.attention_with_logsumexp(*leaves, mask=masks.Causal(), kernel="reference")
        expected = torch.autograd.grad(reference[which].square().sum(), leaves[:2], create_graph=True)
        expected_again = torch.autograd.grad(sum(each.square().sum() for each in expected), leaves[:2])
        for one, two in zip((*found, *again), (*expected, *expected_again), strict=True):
            assert torch.allclose(one, two, atol=1e-4)


def test_lengths_that_change_after_the_call_do_not_change_its_gradients() -> None:
    lengths = torch.tensor([7, 3, 5])
    leaves = [each.requires_grad_() for each in drawn()]
    expected = torch.autograd.grad(functional.attention(*leaves, mask=masks.Lengths((7, 3, 5))).square().sum(), leaves)
    output = functional.attention(*leaves, mask=masks.Lengths(lengths))
    lengths.fill_(1)
    for one, two in zip(torch.autograd.grad(output.square().sum(), leaves), expected, strict=True):
        assert torch.equal(one, two)


@pytest.mark.usefixtures("unplanned")
def test_lengths_in_a_tensor_are_read_in_each_call() -> None:
    lengths = torch.tensor([7, 3, 5])
    mask, (q, k, v) = masks.Lengths(lengths), drawn()
    functional.attention(q, k, v, mask=mask)
    lengths.fill_(2)
    assert torch.equal(
        functional.attention(q, k, v, mask=mask), functional.attention(q, k, v, mask=masks.Lengths((2,)))
    )


class Quiet:
    requested_statistics: frozenset[PartName] = frozenset()

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.calls.append(call)


def test_an_observed_call_is_published() -> None:
    q, k, v = drawn()
    listener = Quiet()
    with listen(listener):
        functional.attention(q, k, v)
    assert len(listener.calls) == 1


PLANNED: dict[str, Callable[[Tensor], Any]] = {
    "a bias": lambda x: functional.attention(x, x, x, bias=torch.zeros(1, 1, 7, 7)),
    "sinks": lambda x: functional.attention(x, x, x, sinks=torch.zeros(4)),
    "dropout": lambda x: functional.attention(x, x, x, dropout=0.5),
    "a kernel": lambda x: functional.attention(x, x, x, kernel="native"),
    "documents": lambda x: functional.attention(x, x, x, mask=masks.Documents((3, 4))),
    "lengths per query": lambda x: functional.attention(x, x, x, mask=masks.Lengths(torch.full((3, 7), 2))),
    "lengths twice": lambda x: functional.attention(x, x, x, mask=masks.Lengths((3,)) & masks.Lengths((2,))),
    "a union": lambda x: functional.attention(x, x, x, mask=masks.Causal() | masks.Lengths((2,))),
    "a start per sample": lambda x: functional.attention(
        x, x, x, mask=masks.Causal(), query_start=torch.zeros(3).long()
    ),
    "a parameter": lambda x: functional.attention(nn.Parameter(x), x, x),
    "float64": lambda x: functional.attention(x.double(), x.double(), x.double()),
    "five dimensions": lambda x: functional.attention(x[None], x[None], x[None]),
    "vmap": lambda x: torch.func.vmap(lambda one: functional.attention(one, one, one))(x[None]),
}


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("name", PLANNED)
def test_other_calls_are_planned(name: str) -> None:
    with pytest.raises(AssertionError, match="the call was planned"):
        PLANNED[name](torch.randn(3, 4, 7, 16))


def test_a_set_that_lost_to_pytorch_is_not_used() -> None:
    q, k, v = drawn()
    with library.using_instruction_set("scalar"):
        arguments = (masks.Full(), None, None, None, None, 0.0, None)
        assert short_call.takes(q, k, v, arguments, find_surroundings()) is None


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "a length beyond the keys": ({"mask": masks.Lengths((8, 1, 1))}, MaskError),
    "lengths of another batch": ({"mask": masks.Lengths((1, 1))}, MaskError),
    "a tensor as a mask": ({"mask": torch.ones(7, 7)}, MaskError),
    "no scale": ({"scale": float("nan")}, ArgumentError),
    "a softcap of 0": ({"softcap": 0.0}, ArgumentError),
    "a dropout that is no share": ({"dropout": None}, ArgumentError),
    "an unknown argument": ({"is_causal": True}, ArgumentError),
    "values of other keys": ({"v": torch.zeros(3, 2, 6, 16)}, ShapeError),
    "keys of another dtype": ({"k": torch.zeros(3, 2, 7, 16, dtype=torch.bfloat16)}, DtypeError),
    "keys on another device": ({"k": torch.zeros(3, 2, 7, 16, device="meta")}, DtypeError),
    "positions that are not known": ({"mask": masks.Causal(), "q": torch.zeros(3, 4, 2, 16)}, ArgumentError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_has_the_error_of_a_planned_call(name: str) -> None:
    given, kind = REFUSED[name]
    named = dict(zip(("q", "k", "v"), drawn(), strict=True)) | given
    with pytest.raises(kind) as found:
        functional.attention(**named)
    assert any(word in str(found.value) for word in ("Give ", "Convert ", "Move ", "Use "))


EMPTY: list[tuple[tuple[int, int, int], masks.Mask]] = [
    *(((batch, queries, keys), masks.Full()) for batch, queries, keys in ((0, 4, 7), (3, 0, 7), (3, 4, 0))),
    ((0, 4, 7), masks.Lengths(torch.zeros(0, dtype=torch.int64))),
    ((0, 7, 7), masks.Lengths([]) & masks.Causal()),
]


@pytest.mark.parametrize(("sizes", "mask"), EMPTY, ids=str)
def test_empty_calls_give_empty_or_zero_outputs(sizes: tuple[int, int, int], mask: masks.Mask) -> None:
    batch, queries, keys = sizes
    q, k = torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, keys, 8)
    output, logsumexp = functional.attention_with_logsumexp(q, k, k, mask=mask)
    assert output.shape == q.shape
    assert not output.any() or keys
    assert logsumexp.shape == (batch, 2, queries)
    assert keys or bool((logsumexp == -torch.inf).all())


OF_Q_AND_K = tuple(name for name in DEFAULT if not PROBES[name].needs)  # what they need is not given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MASKS)
def test_statistics_of_such_calls_need_no_plan(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "run_first_pass", None)  # what a planned call would need
    q, k, _ = drawn(dtype)
    found = functional.statistics(q.requires_grad_(), k, mask=MASKS[name])
    assert tuple(found) == OF_Q_AND_K
    shown = oracle.shown(MASKS[name], (3, 4, 7, 7))
    weights = oracle.attend(q.detach().double(), k.double(), k.double(), shown).weights
    expected = oracle.statistics(weights, shown, start=[0, 0, 0])
    for each, value in found.items():
        assert not value.requires_grad
        if each == "largest_key":
            picked = weights.gather(-1, value.clamp(min=0)[..., None])[..., 0]
            assert oracle.difference(picked, expected["largest_weight"]) < 1e-6
        else:
            assert oracle.difference(value, expected[each]) < 1e-5, each


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("start", [None, 0, 2, 5])
def test_statistics_of_such_calls_are_the_bits_of_planned_ones(name: str, start: int | None) -> None:
    q, k, _ = drawn(queries=7 if start is None else 2)
    for given in (q, laid_out(q, "heads inside"), q[:, :, :, :8].repeat(1, 1, 1, 2)):
        for softcap, scale in ((None, None), (3.0, 0.7)):
            terms: dict[str, Any] = {"mask": MASKS[name], "softcap": softcap, "scale": scale, "query_start": start}
            found = functional.statistics(given, k, **terms)
            planned = functional.statistics(given, k, probes=OF_Q_AND_K, **terms)
            assert tuple(found) == tuple(planned)
            for each, value in found.items():
                assert torch.equal(value, planned[each]), each


def test_statistics_of_large_scores_are_measured_in_float64() -> None:
    q, k, _ = drawn()
    found = functional.statistics(300 * q, k)
    weights = oracle.attend(300 * q.double(), k.double(), k.double(), oracle.shown(masks.Full(), (3, 4, 7, 7))).weights
    assert oracle.difference(found["largest_weight"], weights.amax(-1)) < 1e-6


@pytest.mark.parametrize("name", [each for each in REFUSED if "dropout" not in each and "values" not in each])
def test_statistics_of_what_does_not_fit_have_the_error_of_a_planned_call(name: str) -> None:
    given, kind = REFUSED[name]
    q, k, _ = drawn()
    with pytest.raises(kind) as found:
        functional.statistics(**{"q": q, "k": k} | given)
    assert any(word in str(found.value) for word in ("Give ", "Convert ", "Move ", "Use "))


@pytest.mark.parametrize(("sizes", "mask"), EMPTY, ids=str)
def test_statistics_of_empty_calls_are_those_of_queries_without_keys(
    sizes: tuple[int, int, int], mask: masks.Mask
) -> None:
    batch, queries, keys = sizes
    found = functional.statistics(torch.randn(batch, 2, queries, 8), torch.randn(batch, 2, keys, 8), mask=mask)
    for each, value in found.items():
        expected = -1 if each == "largest_key" else 0
        assert torch.equal(value, torch.full_like(value, expected)), each
        assert value.shape == (batch, 2, queries)


class Both(nn.Module):
    """Call the function and the layer, each in a way that the short operator takes where nothing records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MultiHeadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None]
        attended, _ = functional.attention_with_logsumexp(q, q, q, mask=masks.Causal())
        return attended[:, 0] + self.layer(x, mask=masks.Causal())


def of_graph(graph: torch.fx.Graph) -> list[str]:
    return [str(node.target) for node in graph.nodes]


def compiled(model: nn.Module, x: Tensor) -> list[str]:
    found: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        found.extend(of_graph(graph.graph))
        return graph

    torch.compile(model, backend=backend, fullgraph=True)(x)
    return found


def dispatched(model: nn.Module, x: Tensor) -> list[str]:
    found: list[str] = []

    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(str(function))
            return function(*args, **(kwargs or {}))

    with Recording():
        model(x)
    return found


RECORDED: dict[str, Callable[[nn.Module, Tensor], list[str]]] = {
    "torch.export": lambda model, x: of_graph(torch.export.export(model, (x,), strict=False).graph),
    "torch.export, strict": lambda model, x: of_graph(torch.export.export(model, (x,), strict=True).graph),
    "make_fx": lambda model, x: of_graph(make_fx(model)(x).graph),
    "make_fx before dispatch": lambda model, x: of_graph(make_fx(model, pre_dispatch=True)(x).graph),
    "torch.jit.trace": lambda model, x: str(torch.jit.trace(model, x, check_trace=False).inlined_graph).split(),
    "torch.compile": compiled,
    "a dispatch mode": dispatched,
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", RECORDED)
def test_no_program_that_records_a_call_contains_the_short_operator(name: str) -> None:
    """So its schema, unlike those of the other operators, is in no file."""
    model, x = Both().eval(), torch.randn(2, 5, 16)
    with torch.no_grad():
        found = RECORDED[name](model, x)
    ours = [each for each in found if "multihead" in each]
    assert any("attention" in each for each in ours)
    assert [each for each in ours if "short_call" in each] == []


def test_a_profiler_names_the_operator_and_a_counter_counts_it() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = drawn()
    with torch.profiler.profile(acc_events=True) as profile:
        functional.attention(q, k, v)
    assert "multihead::attention" in [event.key for event in profile.key_averages()]
    with FlopCounterMode(display=False) as counter:
        functional.attention(q, k, v, mask=masks.Causal())
    assert counter.get_total_flops() == 2 * 3 * 4 * 28 * 32
