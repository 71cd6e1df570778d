"""The contract, one test per row, for every kernel: hidden values do not affect a query."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError, MaskError
from multihead.functional import attention, attention_weights, attention_with_logsumexp, statistics
from multihead.scores import RelativeBias
from tests import oracle
from tests.kernel_names import EACH, dtypes_of, exactest
from tests.oracle import shown

# A number near the largest may overflow in kernels that cannot take it, which is computed by another, with a warning.
pytestmark = [
    pytest.mark.parametrize("kernel", EACH),
    pytest.mark.filterwarnings("ignore:Entries of q, k or v are so large"),
]
BAD = (torch.nan, torch.inf, -torch.inf)
# Rows of a few masks that plan differently: intervals per sample, triangles, blocks, a dense remainder.
HIDING = {
    "lengths": (masks.Lengths((4, 9)), (0, slice(4, None))),
    "causal": (masks.Causal(), (slice(None), slice(7, None))),
    "window": (masks.Window(3, after=1), (slice(None), slice(8, None))),
    "documents": (masks.Documents((5, 4)), (slice(None), slice(5, None))),
    "dense": (masks.Keep(torch.arange(9).remainder(3) != 1, "keys"), (slice(None), slice(1, None, 3))),
}


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill tensors of torch.empty with NaN, to detect kernels that read memory they did not write."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Two samples, four heads over two key/value heads, 9 queries and keys."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run(q: Tensor, k: Tensor, v: Tensor, rows: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """Output, logsumexp and the gradients of both, or of some rows: (batch, heads, queries) bool."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (q, k, v)]
    output, logsumexp = attention_with_logsumexp(*leaves, **options)
    counted = logsumexp != -torch.inf if rows is None else rows & (logsumexp != -torch.inf)
    total = output[counted].square().sum() + logsumexp[counted].square().sum()
    grads = torch.autograd.grad(total, leaves)
    names = ("output", "logsumexp", "gradient of q", "gradient of k", "gradient of v")
    return dict(zip(names, (output.detach(), logsumexp.detach(), *grads), strict=True))


@pytest.mark.parametrize("sinks", [None, torch.randn(4)], ids=["no sinks", "sinks"])
def test_a_query_that_sees_no_key_returns_zero(kernel: str, sinks: Tensor | None) -> None:
    """Weights 0, logsumexp -inf, and gradients 0, for an empty sample and for single empty rows."""
    lengths = torch.tensor([[0] * 9, [3, 0, 9, 0, 1, 2, 3, 4, 0]])
    mask, empty = masks.Lengths(lengths), lengths == 0
    rows = empty[:, None].expand(2, 4, 9)
    for dtype in dtypes_of(kernel):
        q, k, v = inputs(dtype)
        found = run(q, k, v, mask=mask, sinks=sinks, kernel=kernel)
        assert bool((found["output"][rows] == 0).all())
        assert bool((attention(q, k, v, mask=mask, sinks=sinks, kernel=kernel)[rows] == 0).all())  # without gradients
        assert bool((found["logsumexp"][rows] == -torch.inf).all())
        assert bool((attention_weights(q, k, mask=mask, sinks=sinks)[rows] == 0).all())
        assert bool((found["gradient of q"][rows] == 0).all())
        assert bool((found["gradient of k"][0] == 0).all() & (found["gradient of v"][0] == 0).all())
        assert all(bool(value.isfinite().all()) for name, value in found.items() if name != "logsumexp")
        assert bool(found["logsumexp"][~rows].isfinite().all())


@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("which", ["k", "v"])
def test_what_is_not_finite_in_a_hidden_key_or_value_changes_no_bit(
    kernel: str, name: str, bad: float, which: str
) -> None:
    """Rows that may not see it are as if it were 0, in output, logsumexp and gradients; the others are NaN."""
    mask, (samples, keys) = HIDING[name]
    q, k, v = inputs()
    bad_ones, zeroed = (k.clone(), v.clone()), (k.clone(), v.clone())
    place = 0 if which == "k" else 1
    bad_ones[place][samples, :, keys] = bad
    zeroed[place][samples, :, keys] = 0
    hit = torch.zeros(2, 9, dtype=torch.bool)
    hit[samples, keys] = True
    sees_it = (shown(mask, (2, 1, 9, 9)) & hit[:, None, None]).any(-1)  # (batch, 1, queries)
    blind = ~sees_it.expand(2, 4, 9)
    given = run(q, *bad_ones, rows=blind, mask=mask, kernel=kernel)
    expected = run(q, *zeroed, rows=blind, mask=mask, kernel=kernel)
    assert torch.equal(given["output"][blind], expected["output"][blind])
    assert torch.equal(given["logsumexp"][blind], expected["logsumexp"][blind])
    assert bool(given["output"][~blind].isnan().all())
    assert bool(given["logsumexp"][~blind].isnan().all())
    for each in "qkv":
        assert torch.allclose(given[f"gradient of {each}"], expected[f"gradient of {each}"], atol=1e-6), each


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("name", HIDING)
def test_a_hidden_number_near_the_largest_affects_nothing(kernel: str, name: str, which: str) -> None:
    """Its score, or the gradient of its weight, overflows: inf - inf and 0 * inf are NaN."""
    mask, (samples, keys) = HIDING[name]
    for dtype in dtypes_of(kernel)[:2]:
        q, k, v = inputs(dtype)
        large = {"k": k.clone(), "v": v.clone()}
        large[which][samples, :, keys] = 0.9 * torch.finfo(dtype).max
        hit = torch.zeros(2, 9, dtype=torch.bool)
        hit[samples, keys] = True
        blind = ~(shown(mask, (2, 4, 9, 9)) & hit[:, None, None]).any(-1)  # (batch, heads, queries)
        exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
        dense = oracle.attend(*exact, shown(mask, (2, 4, 9, 9)))
        counted = blind & (dense.logsumexp != -torch.inf)
        total = dense.output[counted].square().sum() + dense.logsumexp[counted].square().sum()
        expected = [dense.output.detach(), dense.logsumexp.detach(), *torch.autograd.grad(total, exact)]
        found = run(q, large["k"], large["v"], rows=blind, mask=mask, kernel=kernel)
        measured = statistics(q, large["k"], v=large["v"], mask=mask)
        limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
        # A row that sees it may be NaN, and so may the gradients of the keys that this row sees.
        clean = ~(shown(mask, (2, 4, 9, 9)) & ~blind[..., None]).any(2)[:, ::2]  # (batch, kv_heads, keys)
        for value, known, part in zip(found.values(), expected, (blind, blind, blind, clean, clean), strict=True):
            assert oracle.difference(value[part], known[part]) < limit
        of_oracle = oracle.statistics(dense.weights.detach(), shown(mask, (2, 4, 9, 9)), start=[0, 0], mask=mask)
        for each, value in measured.items():
            if each in of_oracle and each != "largest_key":
                assert oracle.difference(value[blind], of_oracle[each][blind]) < max(limit, 1e-5), each


@pytest.mark.parametrize("values", ["lowest", "3e38", "-3e38 and lowest", "-3e38 to 3e38", "some of -inf"])
@pytest.mark.parametrize("sinks", [None, 2e38, -2e38])
def test_a_finite_bias_hides_no_key(kernel: str, values: str, sinks: float | None) -> None:
    """A row of the lowest number, as additive masks have for padding, is the mean of the values, as in float64."""
    for dtype in dtypes_of(kernel)[:2]:
        q, k, v = inputs(dtype)
        bias = torch.zeros(2, 1, 9, 9, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        lowest = torch.finfo(bias.dtype).min
        if values == "some of -inf":
            bias[:, :, 3:, ::2], bias[:, :, 3:, 1::2] = -torch.inf, lowest
        else:
            first, second = {
                "lowest": (lowest, lowest),
                "3e38": (3e38, 3e38),
                "-3e38 and lowest": (-3e38, lowest),
                "-3e38 to 3e38": (-3e38, 3e38),
            }[values]
            bias[:, :, 3:, :5], bias[:, :, 3:, 5:] = first, second
        of_heads = None if sinks is None else torch.tensor([sinks, 0.5, -0.5, 2.0], dtype=bias.dtype)
        seen = torch.ones(2, 4, 9, 9, dtype=torch.bool)
        exact_sinks = None if of_heads is None else of_heads.double()
        exact = oracle.attend(q.double(), k.double(), v.double(), seen, bias=bias.double(), sinks=exact_sinks)
        options: dict[str, Any] = {"bias": bias, "sinks": of_heads}
        output, logsumexp = attention_with_logsumexp(q, k, v, kernel=kernel, **options)
        limit = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
        assert oracle.difference(output, exact.output) < limit
        apart = (logsumexp.double() - exact.logsumexp).abs()
        assert bool((apart <= max(limit, 1e-6) * exact.logsumexp.abs().clamp(min=1)).all())
        assert oracle.difference(attention_weights(q, k, **options), exact.weights) < max(limit, 1e-6)
        found = statistics(q, k, probes=("entropy", "largest_weight", "first_mass"), **options)
        expected = {
            "entropy": torch.special.entr(exact.weights).sum(-1),
            "largest_weight": exact.weights.amax(-1),
            "first_mass": exact.weights[..., 0],
        }
        for name, value in expected.items():
            assert oracle.difference(found[name], value) < max(limit, 1e-5), name


def test_negated_views_are_read_as_they_are_meant(kernel: str) -> None:
    """The imaginary part of a conjugate stores its numbers with the other sign; here every tensor of a call does."""

    def negated(tensor: Tensor) -> Tensor:
        return torch.complex(torch.zeros_like(tensor), -tensor).conj().imag

    def found(tensors: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        q, k, v, bias, sinks = tensors
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        outputs = attention_with_logsumexp(*leaves, bias=bias, sinks=sinks, kernel=kernel)
        measured = statistics(*leaves[:2], bias=bias, sinks=sinks, logsumexp=grads[1])
        weights = attention_weights(*leaves[:2], bias=bias, sinks=sinks)
        return [*outputs, *torch.autograd.grad(outputs, leaves, grads), weights, *measured.values()]

    tensors = [*inputs(exactest(kernel)), torch.randn(2, 4, 9, 9), torch.randn(4)]
    tensors[3:] = (each.to(tensors[0].dtype) for each in tensors[3:])
    tensors[1] = tensors[1][:, :, :1].expand(-1, -1, 9, -1)  # an axis of stride 0 once confused a fallback of PyTorch
    grads = [torch.randn(2, 4, 9, 8, dtype=tensors[0].dtype), torch.randn(2, 4, 9, dtype=tensors[0].dtype)]
    views = [negated(each) for each in tensors]
    views[1] = negated(tensors[1][:, :, :1]).expand(-1, -1, 9, -1)
    assert all(each.is_neg() for each in views)
    expected = found(tensors, grads)
    for one, two in zip(found(views, [negated(each) for each in grads]), expected, strict=True):
        assert torch.allclose(one, two, atol=1e-6)  # a copy of an expanded axis may be multiplied in another order


CHANGED: dict[str, tuple[Any, Any]] = {  # what makes the options of a call from a tensor, and this tensor
    "keep": (lambda t: {"mask": masks.Keep(t, "queries keys")}, torch.ones(9, 9).tril() > 0),
    "drop, in a tree": (
        lambda t: {"mask": masks.Causal() & masks.Drop(t, "queries keys") | masks.Prefix(2)},
        torch.eye(9) > 0,
    ),
    "prefix": (lambda t: {"mask": masks.Window(2) | masks.Prefix(t)}, torch.tensor([3, 4])),
    "documents": (lambda t: {"mask": masks.Documents(t) | masks.Prefix(1)}, torch.tensor([3, 5])),
    "lengths": (lambda t: {"mask": masks.Lengths(t)}, torch.tensor([5, 4])),
    "start": (lambda t: {"mask": masks.Window(2) | masks.Prefix(1), "query_start": t}, torch.tensor([0, 1])),
    "bias": (lambda t: {"bias": t}, torch.ones(1, 4, 9, 9)),
    "relative bias": (lambda t: {"bias": RelativeBias(t)}, torch.ones(1, 4, 17)),
    "sinks": (lambda t: {"sinks": t}, torch.ones(4)),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_tensor_changed_before_the_backward_pass_raises_or_changes_no_gradient(kernel: str, name: str) -> None:
    options_of, tensor = CHANGED[name]
    tensor = tensor.clone()
    leaves = [each.requires_grad_() for each in inputs(exactest(kernel))]
    output = attention(*leaves, kernel=kernel, **options_of(tensor))
    expected = torch.autograd.grad(output.square().sum(), leaves, retain_graph=True)
    tensor.logical_not_() if tensor.dtype == torch.bool else tensor.add_(1)
    try:
        found = torch.autograd.grad(output.square().sum(), leaves)
    except RuntimeError as error:
        found, raised = (), "modified by an inplace operation" in str(error)
    else:
        raised = False
    assert raised or all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)])
def test_a_sink_of_nan_or_inf_makes_nan_of_the_rows_of_its_head_alone(kernel: str, bad: float) -> None:
    """Every query that sees a key sees the sink of its head. The others stay empty. A NaN may have any bits."""
    lengths = torch.tensor([[0, 3, 9] * 3, [9] * 9])
    sees_it = torch.zeros(2, 4, 9, dtype=torch.bool)
    sees_it[:, 2] = lengths > 0
    q, k, v = inputs(exactest(kernel))
    options: dict[str, Any] = {"mask": masks.Lengths(lengths), "sinks": torch.tensor([0.5, -1, bad, 2], dtype=q.dtype)}
    given = run(q, k, v, rows=~sees_it, kernel=kernel, **options)
    weights, entropy = attention_weights(q, k, **options), statistics(q, k, probes="entropy", **options)["entropy"]
    options["sinks"] = options["sinks"].nan_to_num(0, posinf=0)
    expected = run(q, k, v, rows=~sees_it, kernel=kernel, **options)
    for name in ("output", "logsumexp"):
        assert bool(given[name][sees_it].isnan().all())
        assert torch.equal(given[name][~sees_it], expected[name][~sees_it])
    for each in "qkv":
        assert torch.allclose(given[f"gradient of {each}"], expected[f"gradient of {each}"], atol=1e-6), each
    assert torch.equal(weights.isnan().any(-1), sees_it)
    assert torch.equal(entropy.isnan(), sees_it)


@pytest.mark.parametrize("bad", BAD)
def test_gradients_are_those_of_zeros_where_no_query_sees_what_is_not_finite(kernel: str, bad: float) -> None:
    q, k, v = inputs()
    poisoned_k, poisoned_v, zero_k, zero_v = k.clone(), v.clone(), k.clone(), v.clone()
    for tensor, value in ((poisoned_k, bad), (poisoned_v, bad), (zero_k, 0.0), (zero_v, 0.0)):
        tensor[0, :, 4:] = value
    mask = masks.Lengths((4, 9))
    given = run(q, poisoned_k, poisoned_v, mask=mask, kernel=kernel)
    expected = run(q, zero_k, zero_v, mask=mask, kernel=kernel)
    assert all(torch.equal(given[name], expected[name]) for name in given)
    assert bool((given["gradient of k"][0, :, 4:] == 0).all() & (given["gradient of v"][0, :, 4:] == 0).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(2, 4, 9, 9), (1, 1, 9, 9), (1, 1, 1, 9)])
def test_what_is_not_finite_in_a_hidden_cell_of_a_bias_changes_no_bit(
    kernel: str, bad: float, shape: tuple[int, ...]
) -> None:
    q, k, v = inputs()
    bias = torch.randn(shape)
    restore_nan, zeroed = bias.clone(), bias.clone()
    restore_nan[..., 6:], zeroed[..., 6:] = bad, 0
    mask = masks.Lengths((6, 6))
    given = run(q, k, v, bias=restore_nan, mask=mask, kernel=kernel)
    expected = run(q, k, v, bias=zeroed, mask=mask, kernel=kernel)
    assert all(torch.equal(given[name], expected[name]) for name in given)


def test_the_gradient_of_a_bias_is_zero_in_its_hidden_nan_cells(kernel: str) -> None:
    q, k, v = inputs()
    bias = torch.randn(1, 1, 9, 9)
    bias[..., 6:] = torch.nan
    bias.requires_grad_()
    if kernel == "sdpa":
        with torch.no_grad():
            output = attention(q, k, v, bias=bias, mask=masks.Lengths((6, 6)), kernel=kernel)
        assert bool(output.isfinite().all())
        return
    attention(q, k, v, bias=bias, mask=masks.Lengths((6, 6)), kernel=kernel).sum().backward()
    assert bias.grad is not None
    assert bool(bias.grad.isfinite().all())
    assert bool((bias.grad[..., 6:] == 0).all())


def test_a_nan_in_a_seen_bias_makes_that_row_nan_alone(kernel: str) -> None:
    q, k, v = inputs()
    bias = torch.zeros(2, 4, 9, 9)
    expected = run(q, k, v, bias=bias, kernel=kernel)
    bias[1, 2, 3, 4] = torch.nan
    given = run(q, k, v, bias=bias, kernel=kernel)
    row = torch.zeros(2, 4, 9, dtype=torch.bool)
    row[1, 2, 3] = True
    assert bool(given["output"][row].isnan().all() & given["logsumexp"][row].isnan().all())
    assert torch.equal(given["output"][~row], expected["output"][~row])


@pytest.mark.parametrize("keys", [3, 9, 40])
@pytest.mark.parametrize("bad", BAD)
def test_a_nan_in_the_query_makes_that_row_nan_alone(kernel: str, bad: float, keys: int) -> None:
    """With fewer than 8 keys PyTorch's fused kernel returns zeros for such a query."""
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, keys, 8), torch.randn(2, 4, keys, 8)
    expected = run(q, k, v, kernel=kernel)
    q[1, 2, 3, 0] = bad
    given = run(q, k, v, kernel=kernel)
    row = torch.zeros(2, 4, 5, dtype=torch.bool)
    row[1, 2, 3] = True
    assert bool(given["output"][row].isnan().all() & given["logsumexp"][row].isnan().all())
    assert torch.equal(given["output"][~row], expected["output"][~row])
    assert torch.equal(given["logsumexp"][~row], expected["logsumexp"][~row])


def test_a_nan_query_that_sees_no_key_returns_zero(kernel: str) -> None:
    q, k, v = inputs()
    q[0] = torch.nan
    no_key = masks.Keep(torch.tensor([[False] * 9, [True] * 9]), "batch keys")
    for mask in (masks.Lengths((0, 9)), masks.Window(2) & no_key | masks.Lengths((0, 3)) & masks.Prefix(2)):
        found = run(q, k, v, mask=mask, kernel=kernel)
        assert bool((found["output"][0] == 0).all() & (found["logsumexp"][0] == -torch.inf).all())
        assert all(bool(found[f"gradient of {name}"].isfinite().all()) for name in "qkv")


def test_weights_and_statistics_of_a_nan_row_are_nan_and_those_of_others_are_not(kernel: str) -> None:
    q, k, _ = inputs()
    clean_weights, clean = attention_weights(q, k, mask=masks.Causal()), statistics(q, k, mask=masks.Causal())
    q[0, 1, 2] = torch.nan
    tile, found = attention_weights(q, k, mask=masks.Causal()), statistics(q, k, mask=masks.Causal())
    assert bool(tile[0, 1, 2, :3].isnan().all())
    assert tile[0, 1, 2, 3:].tolist() == [0] * 6  # what a query may not see stays 0
    row = torch.zeros(2, 4, 9, dtype=torch.bool)
    row[0, 1, 2] = True
    assert torch.equal(tile[~row], clean_weights[~row])
    for name, value in found.items():
        if name == "received":
            assert bool(value.isfinite().all())
        elif name == "largest_key":
            assert value[0, 1, 2] == -1
            assert torch.equal(value[~row], clean[name][~row])
        else:
            assert bool(value[0, 1, 2].isnan()), name
            assert torch.equal(value[~row], clean[name][~row]), name


def test_the_logsumexp_is_float32_and_float64_for_float64(kernel: str) -> None:
    for dtype in dtypes_of(kernel):
        q, k, v = inputs(dtype)
        for mask in (masks.Full(), masks.Causal(), masks.Lengths((3, 0)), masks.Window(2) | masks.Prefix(1)):
            output, logsumexp = attention_with_logsumexp(q, k, v, mask=mask, sinks=torch.zeros(4), kernel=kernel)
            assert output.dtype == dtype
            assert logsumexp.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize(
    "mask", [masks.Full(), masks.Causal(), masks.Lengths((2, 0)), masks.Window(2) | masks.Prefix(1)], ids=repr
)
def test_output_and_logsumexp_have_the_gradients_of_finite_differences(kernel: str, mask: masks.Mask) -> None:
    """A kernel without float64 is held to the gradients that autograd finds for the oracle in float64."""
    q = torch.randn(2, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 1, 4, n, dtype=torch.float64, requires_grad=True) for n in (2, 3))

    def outputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, logsumexp = attention_with_logsumexp(q, k, v, mask=mask, query_start=1, kernel=kernel)
        return output, torch.where(logsumexp == -torch.inf, 0, logsumexp)

    if exactest(kernel) == torch.float64:
        assert torch.autograd.gradcheck(outputs, (q, k, v))
        return
    dense = oracle.attend(q, k, v, shown(mask, (2, 2, 3, 4), 1))
    exact_pair = dense.output, torch.where(dense.logsumexp == -torch.inf, 0, dense.logsumexp)
    single = [tensor.detach().to(exactest(kernel)).requires_grad_() for tensor in (q, k, v)]
    given_pair = outputs(*single)
    for given, exact in zip(given_pair, exact_pair, strict=True):
        cotangent = torch.randn(exact.shape, dtype=torch.float64)
        expected = torch.autograd.grad(exact, (q, k, v), cotangent, retain_graph=True, materialize_grads=True)
        found = torch.autograd.grad(given, single, cotangent.to(given.dtype), retain_graph=True)
        for one, two in zip(found, expected, strict=True):
            assert oracle.difference(one, two) < 2e-6


def test_lengths_are_checked_when_made_and_against_the_keys(kernel: str) -> None:
    q, k, v = inputs()
    with pytest.raises(MaskError) as refusal:
        masks.Lengths((3, -1))
    assert str(refusal.value) == "Lengths holds a negative length, -1. Give lengths of 0 or more tokens."
    for lengths in ((9, 10), torch.tensor([9, 10])):
        mask = masks.Lengths(lengths)
        with pytest.raises(MaskError) as refusal:
            attention(q, k, v, mask=mask, kernel=kernel)
        assert str(refusal.value) == (
            f"{mask!r} has a length of 10 tokens, and there are 9 keys. Give lengths of at most 9 tokens."
        )


def test_dropout_is_reproducible_for_a_seed_and_comes_after_the_weights(kernel: str) -> None:
    q, k, v = inputs(exactest(kernel))
    if kernel == "sdpa":
        with pytest.raises(ArgumentError, match="PyTorch's fused kernels are called without dropout"):
            attention(q, k, v, dropout=0.5, kernel=kernel)
        return
    options: dict[str, Any] = {"dropout": 0.5, "kernel": kernel}
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(attention_with_logsumexp(q, k, v, **options))
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][0], outputs[2][0])
    plain = attention_with_logsumexp(q, k, v, kernel=kernel)
    assert torch.equal(outputs[0][1], plain[1])  # the logsumexp, and so the weights, know no dropout
    many = torch.stack([attention(q, k, v, **options) for _ in range(1500)]).mean(0)
    assert float((many - plain[0]).abs().max()) < 0.15
    assert bool((attention(q, k, v, dropout=1.0, kernel=kernel) == 0).all())


def test_train_eval_and_no_grad_give_the_same_bits(kernel: str) -> None:
    q, k, v = inputs()
    mask = masks.Causal() & masks.Lengths((4, 9))
    with torch.no_grad():
        quiet = attention_with_logsumexp(q, k, v, mask=mask, kernel=kernel)
    with torch.inference_mode():
        inferred = attention_with_logsumexp(q, k, v, mask=mask, kernel=kernel)
    loud = attention_with_logsumexp(q.clone().requires_grad_(), k, v, mask=mask, kernel=kernel)
    for first, second, third in zip(quiet, inferred, loud, strict=True):
        assert torch.equal(first, second)
        assert torch.equal(first, third.detach())


def test_a_plan_made_in_inference_mode_serves_training(kernel: str) -> None:
    """Plans are cached: tensors created in inference mode must not break a later backward pass."""
    q, k, v = torch.randn(3, 1, 1, 7, 8).unbind()
    with torch.inference_mode():
        inferred = attention(q, k, v, mask=masks.Window(3, after=1), kernel=kernel)
    assert torch.equal(run(q, k, v, mask=masks.Window(3, after=1), kernel=kernel)["output"].detach(), inferred)
    k[:, :, 6] = torch.nan
    run(q, k, v, mask=masks.Window(3, after=1), kernel=kernel)


@pytest.mark.parametrize("size", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0), (2, 2, 0, 0), (0, 2, 0, 0)])
def test_empty_batches_queries_and_keys_are_no_special_case(kernel: str, size: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = size
    some = (
        masks.Full(),
        masks.Causal(),
        masks.Lengths((0,) * batch),
        masks.Keep(torch.ones(batch, keys, dtype=torch.bool), "batch keys"),
        masks.Documents(()),
        masks.Documents(torch.zeros(batch, 1, dtype=torch.int64)),
        masks.Keep(torch.ones(batch, keys, dtype=torch.bool), "batch keys")
        & (masks.Causal() | masks.Documents(torch.zeros(batch, 2, dtype=torch.int64))),
    )
    for mask in some:
        q, k = torch.randn(batch, heads, queries, 8), torch.randn(batch, heads, keys, 8)
        found = run(q, k, k, mask=mask, query_start=0, kernel=kernel)
        assert found["output"].shape == (batch, heads, queries, 8)
        if not keys:
            assert bool((found["output"] == 0).all() & (found["logsumexp"] == -torch.inf).all())
        assert attention_weights(q, k, mask=mask, query_start=0).shape == (batch, heads, queries, keys)
        for bias in (None, torch.zeros(batch, heads, queries, keys)):
            assert statistics(q, k, mask=mask, bias=bias, query_start=0)["entropy"].shape == (batch, heads, queries)
        assert statistics(q, k, mask=mask, query_start=0)["entropy"].shape == (batch, heads, queries)


def test_autocast_leaves_the_tensors_as_they_are(kernel: str) -> None:
    """Under autocast the reference kernel multiplied float32 tensors in bfloat16, and so did the statistics."""
    q, k, v = inputs()
    expected = attention_with_logsumexp(q, k, v, kernel=kernel)
    measured, tile = statistics(q, k), attention_weights(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = attention_with_logsumexp(q, k, v, kernel=kernel)
        assert all(torch.equal(one, two) for one, two in zip(given, expected, strict=True))
        assert torch.equal(attention_weights(q, k), tile)
        assert all(torch.equal(value, measured[name]) for name, value in statistics(q, k).items())
