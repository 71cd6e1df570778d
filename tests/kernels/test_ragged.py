"""FlashAttention on sequences of different lengths, on the simulated GPU: against float64, and the launches."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead as mh
from multihead import MultiHeadAttention, masks
from multihead.kernels import ragged
from multihead.kernels.proven import UNPROVEN_VARIABLE
from multihead.masks.base import Sequences
from multihead.models.mask_functions import padding_mask
from tests import oracle
from tests.simulated_gpu.device import (
    Counts,
    Gpu,
    count_frames,
    simulated_gpu,
    skip_where_not_simulated,
    to_cpu,
    to_gpu,
)

skip_where_not_simulated(module=True)

TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
FORWARD = "_flash_attention_forward"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """The simulated GPU, with the kernel in use, which is asked for until it has run on a card."""
    monkeypatch.setenv(UNPROVEN_VARIABLE, "ragged")
    with simulated_gpu() as found:
        yield found


def drawn(
    dtype: torch.dtype = torch.bfloat16, *, batch: int = 3, queries: int = 8, keys: int = 8, kv_heads: int = 2
) -> list[Tensor]:
    """Return q, k and v on the CPU, with the layout of projections: tokens before heads."""
    sizes = ((queries, 4), (keys, kv_heads), (keys, kv_heads))
    return [torch.randn(batch, *size, 16).to(dtype).transpose(1, 2) for size in sizes]


def as_cache(given: list[Tensor]) -> list[Tensor]:
    """Return q, k and v with k and v as a cache holds them: heads before tokens."""
    return [given[0], *(each.contiguous() for each in given[1:])]


def padded_left(counts: list[int], keys: int) -> masks.Mask:
    """Return the mask of a padded batch of a Hugging Face model with `counts` tokens of padding before each text."""
    shown = torch.arange(keys)[None] >= torch.tensor(counts)[:, None]
    return padding_mask(to_gpu(shown))


def on_cpu(mask: masks.Mask) -> masks.Mask:
    """Return a mask whose tensors are on the CPU, for the definition."""
    if isinstance(mask, masks.base.And):
        return masks.base.And(tuple(map(on_cpu, mask.parts)))
    if isinstance(mask, masks.Keep):
        return masks.Keep(to_cpu(mask.tensor), mask.axes)
    return type(mask)(to_cpu(mask.lengths)) if isinstance(mask, (masks.Lengths, masks.Documents)) else mask


def exact(given: list[Tensor], mask: masks.Mask, start: int = 0) -> oracle.Dense:
    """Return what a call gives in float64."""
    q, k, v = (each.double() for each in given)
    return oracle.attend(q, k, v, oracle.shown(on_cpu(mask), (*q.shape[:3], k.shape[2]), start))


CAUSAL = masks.Causal()
# Name -> the mask, made inside of the simulation, and the launches of a call with tokens before heads.
MASKS: dict[str, Any] = {
    "lengths": (lambda: masks.Lengths((8, 3, 5)), 1),
    "lengths with 0": (lambda: masks.Lengths((8, 0, 5)), 1),
    "lengths in a tensor": (lambda: masks.Lengths(to_gpu(torch.tensor([8, 0, 5]))), 1),
    "one length": (lambda: masks.Lengths((4,)), 1),
    "lengths, causal": (lambda: masks.Lengths((8, 0, 5)) & CAUSAL, 3),
    "padding on the left": (lambda: padded_left([0, 8, 3], 8), 1),
    "padding on the left, causal": (lambda: padded_left([0, 8, 3], 8) & CAUSAL, 1),
    "padding on the left, window": (lambda: padded_left([0, 8, 3], 8) & masks.Window(3), 1),
    "documents": (lambda: masks.Documents((3, 4, 1)), 1),
    "documents of each sample": (lambda: masks.Documents(((3, 5), (8,), (1, 2))) & CAUSAL, 1),
    "documents that end early": (lambda: masks.Documents((3, 2)) & CAUSAL, 1),
    "documents in a tensor": (lambda: masks.Documents(to_gpu(torch.tensor([3, 0, 2]))) & masks.Window(2), 1),
    "window": (lambda: masks.Window(3), 1),
    "window on both sides": (lambda: masks.Window(2, after=3), 1),
}


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_sequences_is_one_launch_without_a_plan_and_right(name: str, dtype: torch.dtype, gpu: Gpu) -> None:
    make, launches = MASKS[name]
    mask, given = make(), drawn(dtype)
    right = exact(given, mask)
    for tensors, copies in ((given, 0), (as_cache(given), 2)):
        call = partial(mh.attention, *to_gpu(tensors), mask=mask)
        call()
        gpu.counts = Counts()
        output = call()
        assert gpu.counts.launches[FORWARD] == (2 if launches == 3 else 1)
        assert gpu.counts.totals == {"launches": launches + copies, "reads": 0, "copies": 0}
        assert count_frames(call) <= 25
        assert oracle.difference(to_cpu(output).double(), right.output) < TOLERANCE[dtype]
    output, logsumexp = mh.attention_with_logsumexp(*to_gpu(given), mask=mask)
    assert oracle.difference(to_cpu(output).double(), right.output) < TOLERANCE[dtype]
    assert oracle.difference(to_cpu(logsumexp).double(), right.logsumexp) < 1e-5


@pytest.mark.parametrize("name", MASKS)
def test_the_planned_way_gives_the_same_bits_and_is_explained(name: str, gpu: Gpu) -> None:
    mask, given = MASKS[name][0](), to_gpu(drawn())
    assert mh.explain(*given, mask=mask).kernel == "ragged"
    planned = mh.attention_with_logsumexp(*given, mask=mask, kernel="ragged")
    for one, other in zip(planned, mh.attention_with_logsumexp(*given, mask=mask), strict=True):
        assert torch.equal(to_cpu(one), to_cpu(other))


def test_100_drawn_calls_are_right_with_nan_in_any_key(gpu: Gpu) -> None:
    """A NaN reaches the queries that see it, and no query of another sequence; within one a band may not stop it.

    As in a causal call on CUDA, a value that is NaN may leave the logsumexp as it is.
    """
    draw = random.Random(7)
    for _ in range(100):
        dtype = draw.choice(list(TOLERANCE))
        keys = draw.randint(1, 12)
        queries = draw.choice([keys, keys, draw.randint(1, 12)])
        batch, start = draw.randint(1, 3), draw.choice([None, max(keys - queries, 0), draw.randint(0, 4)])
        kind = draw.choice(["none", "lengths", "left", "documents"])
        counts = [draw.randint(0, keys) for _ in range(batch)]
        mask: masks.Mask = masks.Full()
        if kind == "lengths":
            mask = masks.Lengths(tuple(counts) if draw.random() < 0.5 else to_gpu(torch.tensor(counts)))
        elif kind == "left":
            mask = padded_left(counts, keys)
        elif kind == "documents":
            cuts = sorted(draw.randint(0, keys) for _ in range(2))
            mask = masks.Documents((cuts[0], cuts[1] - cuts[0]))
        mask = mask & draw.choice([masks.Full(), CAUSAL, masks.Window(draw.randint(1, 5), draw.choice([0, 2]))])
        if start is None and queries != keys and mask.uses_positions:
            start = 0
        given = drawn(dtype, batch=batch, queries=queries, keys=keys, kv_heads=draw.choice([1, 2, 4]))
        given = as_cache(given) if draw.random() < 0.5 else given
        sample, key = draw.randrange(batch), draw.randrange(keys)
        near = _in_sequence(mask, (batch, 4, queries, keys), start or 0)[sample, 0, :, key]
        number = torch.nan if near.any() else torch.inf  # what is in padding, or in no document
        given[draw.choice([1, 2])][sample, 0, key] = number
        output, logsumexp = mh.attention_with_logsumexp(*to_gpu(given), mask=mask, query_start=start)
        _check_with_nan(given, mask, start or 0, (to_cpu(output), to_cpu(logsumexp)), TOLERANCE[dtype])


def _in_sequence(mask: masks.Mask, sizes: tuple[int, int, int, int], start: int) -> Tensor:
    """Return which keys are in the sequence of each query: (batch, heads, queries, keys) bool."""
    found = torch.ones(sizes, dtype=torch.bool)
    for part in mask.parts if isinstance(mask, masks.base.And) else (mask,):
        if not isinstance(part, (masks.Causal, masks.Window, masks.Full)):
            found = found & oracle.shown(on_cpu(part), sizes, start)
    return found


def _check_with_nan(
    given: list[Tensor], mask: masks.Mask, start: int, found: tuple[Tensor, Tensor], tolerance: float
) -> None:
    """Compare a call with the definition; a query is free if a NaN in its sequence is hidden from it by the band."""
    q, k, v = given
    sizes = (*q.shape[:3], k.shape[2])
    seen = oracle.shown(on_cpu(mask), sizes, start)
    bad = ~(k.isfinite().all(-1) & v.isfinite().all(-1)).repeat_interleave(4 // k.shape[1], 1)  # (batch, heads, keys)
    near = _in_sequence(mask, sizes, start)
    poisoned = (seen & bad[:, :, None]).any(-1)
    free = (near & bad[:, :, None]).any(-1) & ~poisoned
    right = oracle.attend(*(each.double().nan_to_num(0, 0, 0) for each in given), seen)
    output, logsumexp = (each.double() for each in found)
    of_output = right.output.masked_fill(poisoned[..., None], torch.nan)
    of_rows = right.logsumexp.masked_fill(poisoned, torch.nan)
    free_rows = free | (poisoned & bool(v.isnan().any()))
    kept = output.where(~free[..., None], 0), logsumexp.where(~free_rows, 0)
    assert oracle.difference(kept[0], of_output.where(~free[..., None], 0)) < tolerance, (mask, start, sizes)
    assert oracle.difference(kept[1], of_rows.where(~free_rows, 0)) < 1e-5, (mask, start, sizes)


@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_float64_and_0_where_nothing_is_seen(name: str, gpu: Gpu) -> None:
    """The emulated operator leaves NaN in what the real one leaves unwritten."""
    mask, given = MASKS[name][0](), drawn(torch.float16)
    for each in given[1:]:  # keys that no query sees
        each.masked_fill_(~oracle.shown(on_cpu(mask), (3, 4, 8, 8)).any(1).any(1)[:, None, :, None], torch.nan)
    of_output, of_logsumexp = torch.randn(3, 4, 8, 16).half(), torch.randn(3, 4, 8)
    leaves = [each.double().nan_to_num(0).requires_grad_() for each in given]
    dense = oracle.attend(leaves[0], leaves[1], leaves[2], oracle.shown(on_cpu(mask), (3, 4, 8, 8)))
    finite = dense.logsumexp.isfinite()
    of_logsumexp = of_logsumexp.masked_fill(~finite, 0)
    exact_results = (dense.output, dense.logsumexp.masked_fill(~finite, 0))
    right = torch.autograd.grad(exact_results, leaves, (of_output.double(), of_logsumexp.double()), retain_graph=True)
    for mine, expected in zip(_gradients(mask, given, of_output, of_logsumexp), right, strict=True):
        assert oracle.difference(mine.double(), expected) < 2e-2
    right = torch.autograd.grad(exact_results[0], leaves, of_output.double())
    for mine, expected in zip(_gradients(mask, given, of_output, None), right, strict=True):
        assert oracle.difference(mine.double(), expected) < 2e-2


def _gradients(
    mask: masks.Mask, given: list[Tensor], of_output: Tensor | None, of_logsumexp: Tensor | None
) -> list[Tensor]:
    """Run the forward and the backward function on the simulated GPU: the gradients of q, k and v."""
    ctx = SimpleNamespace(save_for_backward=lambda *each: setattr(ctx, "saved_tensors", each))
    ctx.set_materialize_grads = lambda _: None
    with torch.no_grad():
        table = ragged.table_of(mask, 3, 8, 8, 0, torch.device("cuda", 0))
        ragged._DifferentiableCall.forward(ctx, *to_gpu(given), table, mask, 0, 0.25, 0.0)
        grads = [None if each is None else to_gpu(each) for each in (of_output, of_logsumexp)]
        found = ragged._DifferentiableCall.backward(ctx, *grads)
    assert found[3:] == (None,) * 5
    return [to_cpu(each) for each in found[:3] if each is not None]


@pytest.mark.usefixtures("unplanned", "gpu")
def test_with_gradients_a_call_takes_the_same_way() -> None:
    q, k, v = (each.requires_grad_() for each in to_gpu(drawn()))
    output, logsumexp = mh.attention_with_logsumexp(q, k, v, mask=masks.Lengths((8, 3, 5)))
    assert (output.requires_grad, logsumexp.requires_grad) == (True, True)


def test_dropout_is_repeated_by_the_seed_and_in_the_gradient(gpu: Gpu) -> None:
    given, mask = to_gpu(drawn()), masks.Documents((3, 5)) & CAUSAL

    def call() -> Tensor:
        torch.manual_seed(0)
        return to_cpu(mh.attention(*given, mask=mask, dropout=0.5))

    assert torch.equal(call(), call())
    assert not torch.equal(call(), to_cpu(mh.attention(*given, mask=mask)))


class TestTables:
    def test_a_table_is_made_once_for_a_mask_and_again_after_its_tensor_changed(self, gpu: Gpu) -> None:
        lengths, given = to_gpu(torch.tensor([8, 3, 5])), to_gpu(drawn())
        mask = masks.Lengths(lengths)
        made, make = [], ragged._make_table
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ragged, "_make_table", lambda *each: made.append(each) or make(*each))
            for _ in range(2):
                mh.attention(*given, mask=mask)
            assert len(made) == 1
            lengths[1] = 7
            output = mh.attention(*given, mask=mask)
            assert len(made) == 2
            for _ in range(2):  # equal masks of ints
                mh.attention(*given, mask=masks.Lengths((8, 3, 5)) & CAUSAL)
            assert len(made) == 3
        right = exact(to_cpu(given), masks.Lengths((8, 7, 5)))
        assert oracle.difference(to_cpu(output).double(), right.output) < 2e-2

    def test_tables_are_limited_in_number(self, gpu: Gpu) -> None:
        given = to_gpu(drawn())
        kept = [masks.Lengths((8, 3, 1 + n % 8)) & masks.Lengths((8,)) for n in range(2)]
        for n in range(ragged.MOST_TABLES + 5):
            kept.append(masks.Documents((n % 8, 1)))
            mh.attention(*given, mask=kept[-1])
        assert len(ragged._TABLES) == ragged.MOST_TABLES
        assert len(ragged._TABLES_OF_EQUAL_MASKS) <= ragged.MOST_TABLES

    def test_a_mask_made_of_two_kinds_of_sequences_has_none(self) -> None:
        assert (masks.Lengths((3,)) & masks.Documents((2, 1))).sequences is None
        assert (masks.Window(5, after=3) & masks.Window(3, after=9) & masks.Lengths((3,))).sequences == Sequences(
            lengths=(3,), keys_before=2, keys_after=3
        )
        assert masks.Lengths(((1, 2),)).sequences is None
        assert masks.Prefix(3).sequences is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 2.0}, "FlashAttention has no bias, softcap and sinks, and needs a scale above 0"),
        ({"scale": -1.0}, "FlashAttention has no bias, softcap and sinks, and needs a scale above 0"),
        (
            {"dtype": torch.float32},
            "FlashAttention needs half precision and heads of equal widths, a multiple of 8 and at most 256",
        ),
        (
            {"mask": masks.Window(3) & masks.Lengths((8, 3, 5))},
            "the mask is not made of sequences, or a band in them that ends with the last key",
        ),
        (
            {"mask": masks.Window(2), "queries": 4},
            "the mask is not made of sequences, or a band in them that ends with the last key",
        ),
    ],
    ids=str,
)
def test_its_refusals_are_one_sentence(options: dict[str, Any], reason: str, gpu: Gpu) -> None:
    given = drawn(options.pop("dtype", torch.bfloat16), queries=options.pop("queries", 8))
    options = {"mask": masks.Lengths((8, 3, 5)), "query_start": 0, **options}
    explained = mh.explain(*to_gpu(given), **options)
    assert (explained.refusals["ragged"], explained.kernel) == (reason, "flex")


def test_it_waits_to_be_proven_and_obeys_what_the_user_allows(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    given, mask = to_gpu(drawn()), masks.Lengths((8, 3, 5))
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        explained = mh.explain(*given, mask=mask)
        assert explained.refusals["ragged"] == (
            "PyTorch would not choose FlashAttention, which is switched off or not made for this GPU"
        )
    assert mh.explain(*given, mask=mask).unproven == (
        "ragged has not yet run on hardware; multihead doctor --gpu checks it on your card"
    )
    monkeypatch.delenv(UNPROVEN_VARIABLE)
    explained = mh.explain(*given, mask=mask)
    assert explained.kernel == "flex"
    assert explained.refusals["ragged"] == (
        "it has not yet run on hardware; MULTIHEAD_UNPROVEN=ragged uses it, multihead doctor --gpu checks it"
    )
    gpu.counts = Counts()
    mh.attention(*given, mask=mask)
    assert gpu.counts.launches[FORWARD] == 0


def test_an_operator_with_other_arguments_is_not_called(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ragged._reason_of_other_schema() is None
    monkeypatch.setitem(ragged.SCHEMAS, FORWARD, "query key value lengths")
    reason = f"torch {torch.__version__} has another aten.{FORWARD} than the one that this kernel calls"
    assert ragged._reason_of_other_schema() == reason
    monkeypatch.setattr(ragged, "_OTHER_SCHEMA", reason)
    given = to_gpu(drawn())
    assert mh.explain(*given, mask=masks.Lengths((8, 3, 5))).refusals["ragged"] == reason
    gpu.counts = Counts()
    mh.attention(*given, mask=masks.Lengths((8, 3, 5)))
    assert gpu.counts.launches[FORWARD] == 0


@pytest.mark.usefixtures("gpu")
def test_a_mask_that_does_not_fit_is_the_error_of_a_planned_call() -> None:
    given = to_gpu(drawn())
    with pytest.raises(mh.errors.MaskError, match=r"^Lengths\(\(8, 3, 9\)\)"):
        mh.attention(*given, mask=masks.Lengths((8, 3, 9)))


def test_equal_masks_with_the_same_tensors_share_a_table(gpu: Gpu) -> None:
    lengths, given = to_gpu(torch.tensor([8, 3, 5])), to_gpu(drawn())
    mh.attention(*given, mask=masks.Lengths(lengths))
    gpu.counts = Counts()
    mh.attention(*given, mask=masks.Lengths(lengths))
    assert gpu.counts.totals["launches"] == 1


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_layer_gives_for_a_padded_batch_what_it_gives_on_the_cpu(side: Any) -> None:
    layer = MultiHeadAttention(64, 4, num_kv_heads=2).eval().bfloat16()
    x, options = torch.randn(3, 9, 64).bfloat16(), {"mask": CAUSAL, "lengths": (9, 0, 4), "padding_side": side}
    with torch.no_grad():
        expected = layer(x, **options)
        for module in layer.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(to_gpu(parameter.detach()), requires_grad=False)
        assert layer.explain(to_gpu(x), **options).kernel == "ragged"
        assert oracle.difference(to_cpu(layer(to_gpu(x), **options)).double(), expected.double()) < 2e-2
