"""Attention as functions: what is checked, chosen and explained."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import multihead as mh
from multihead import functional, masks
from multihead.errors import ArgumentError, MaskError, ShapeError
from multihead.functional import attention, attention_weights, attention_with_logsumexp, explain, request_of, statistics
from multihead.kernels.plan.bounds import key_bounds
from multihead.kernels.plan.rectangles import cover_with_rectangles
from tests import oracle
from tests.kernel_names import EACH, needs_native

Q = torch.randn(2, 4, 100, 16)
K = torch.randn(2, 2, 100, 16)
V = torch.randn(2, 2, 100, 8)


def test_a_flag_never_changes_what_is_returned() -> None:
    output = attention(Q, K, V)
    pair = attention_with_logsumexp(Q, K, V)
    assert isinstance(output, torch.Tensor)
    assert torch.equal(pair[0], output)
    assert output.shape == (2, 4, 100, 8)
    assert pair[1].shape == (2, 4, 100)


def test_every_option_is_given_by_name() -> None:
    for function in (attention, attention_with_logsumexp, explain, attention_weights, statistics):
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        positional = 2 if function in (attention_weights, statistics) else 3
        by_name = {inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD}  # the latter to reject unknown names
        assert set(kinds[positional:]) == by_name


def test_the_face_exports_these_functions() -> None:
    for name in ("attention", "attention_with_logsumexp", "explain", "attention_weights", "statistics"):
        assert getattr(mh, name) is getattr(functional, name)


@pytest.mark.parametrize("kernel", EACH)
def test_the_weights_times_the_values_are_the_output(kernel: str) -> None:
    mask = masks.Causal() & masks.Lengths((100, 30))
    whole = attention_weights(Q, K, mask=mask) @ V.repeat_interleave(2, 1)
    assert torch.allclose(attention(Q, K, V, mask=mask, kernel=kernel), whole, atol=1e-6)


def test_decoding_a_token_at_a_time_is_the_whole_causal_call() -> None:
    whole = attention(Q, K, V, mask=masks.Causal())
    for step in (0, 1, 50, 99):
        seen = slice(0, step + 1)
        row = attention(Q[:, :, step : step + 1], K[:, :, seen], V[:, :, seen], mask=masks.Causal(), query_start="end")
        assert torch.allclose(row, whole[:, :, step : step + 1], atol=1e-6)


def test_a_start_for_each_sample_is_that_of_each_sample_alone() -> None:
    start = torch.tensor([10, 90])
    both = attention(Q[:, :, :10], K, V, mask=masks.Window(7), query_start=start)
    for sample, first in enumerate(start.tolist()):
        one = slice(sample, sample + 1)
        alone = attention(Q[one, :, :10], K[one], V[one], mask=masks.Window(7), query_start=first)
        assert torch.allclose(both[one], alone, atol=1e-6)


def test_where_the_first_query_stands_must_be_said_where_it_matters() -> None:
    with pytest.raises(ArgumentError) as refusal:
        attention(Q[:, :, :3], K, V, mask=masks.Lengths((5, 5)) & masks.Window(3))
    assert str(refusal.value) == (
        "There are 3 queries and 100 keys, and the mask depends on positions. "
        'Give the position of the first query: query_start=0 (as torch\'s is_causal) or query_start="end" (decoding).'
    )
    attention(Q[:, :, :3], K, V, mask=masks.Lengths((5, 5)))


@pytest.mark.parametrize("dropout", [-0.1, 1.1, float("nan"), True, "0.1", None])
def test_a_dropout_that_is_no_share_is_refused(dropout: Any) -> None:
    with pytest.raises(ArgumentError) as refusal:
        attention(Q, K, V, dropout=dropout)
    assert str(refusal.value) == f"dropout is {dropout!r}. Give a number from 0 to 1."


@pytest.mark.parametrize("scale", [True, "1", float("inf"), float("nan")])
def test_a_scale_that_is_no_number_is_refused(scale: Any) -> None:
    with pytest.raises(ArgumentError) as refusal:
        attention(Q, K, V, scale=scale)
    assert str(refusal.value) == f"scale is {scale!r}. Give a finite number, or None for 1 / sqrt(head_dim)."


@pytest.mark.parametrize("function", [attention, attention_with_logsumexp, explain])
def test_every_function_refuses_what_does_not_fit(function: Any) -> None:
    with pytest.raises(ShapeError) as refusal:
        function(Q, K, V[:, :, 1:])
    assert str(refusal.value) == "k has 100 keys and v has 99. Give one value per key."


@pytest.mark.parametrize("function", [attention_weights, statistics])
def test_looking_refuses_what_does_not_fit(function: Any) -> None:
    with pytest.raises(ShapeError) as refusal:
        function(Q, K[..., 1:])
    assert str(refusal.value) == "q has head_dim 16 and k has head_dim 15. Project both to the same head_dim."


LAYER = mh.MultiHeadAttention(8, 2)
UNUSABLE = {
    "query_start": (
        {"query_start": torch.zeros(2, dtype=torch.int64, device="meta"), "mask": masks.Causal()},
        (
            "query_start is on the meta device, where it has no values, and q is on cpu. "
            "Give one int per sample, on any other device."
        ),
    ),
    "lengths": (
        {"mask": masks.Lengths(torch.ones(2, dtype=torch.int64, device="meta"))},
        (
            "The mask holds counts on the meta device, where they have no values, and they are needed on cpu. "
            "Give ints, or a tensor on any other device."
        ),
    ),
    **{
        f"start {start}": (
            {"query_start": start, "mask": masks.Causal()},
            f"query_start is {start}. Give at most 1099511627776.",
        )
        for start in (2**63 - 1, 2**63, 10**30)
    },
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.parametrize(
    "function",
    [
        lambda **call: attention(Q, K, V, **call),
        lambda **call: attention_weights(Q, K, **call),
        lambda **call: statistics(Q, K, **call),
        lambda **call: LAYER(torch.randn(2, 4, 8), **call),
    ],
    ids=["attention", "attention_weights", "statistics", "layer"],
)
def test_positions_and_lengths_without_a_usable_value_are_refused_in_words(function: Any, name: str) -> None:
    call, sentence = UNUSABLE[name]
    with pytest.raises((ArgumentError, MaskError)) as refusal:
        function(**call)
    assert str(refusal.value) == sentence


def test_an_explanation_names_the_kernel_its_skipped_share_and_its_memory() -> None:
    explained = explain(Q, K, V, mask=masks.Lengths((50, 10)), kernel="sdpa")
    assert (explained.kernel, explained.refusals, explained.dense_remainder) == ("sdpa", {}, False)
    assert explained.hidden_share == pytest.approx(0.7)
    assert explained.skipped_share == pytest.approx(0.7)
    assert str(explained).splitlines()[:2] == [
        "kernel   sdpa",
        "skipped  70.0% of the score matrix; its intervals hide 70.0%",
    ]
    assert str(explained).splitlines()[2].startswith("memory   about ")


@needs_native
def test_an_explanation_says_why_a_faster_kernel_refused() -> None:
    lines = str(explain(Q.double(), K.double(), V.double(), softcap=5.0, dropout=0.1)).splitlines()
    assert lines[:5] == [
        "kernel   reference",
        "refused  native: it computes float32, bfloat16 and float16, and the tensors are float64",
        "refused  ragged: it needs CUDA, and the tensors are on cpu",
        "refused  sdpa: PyTorch's fused kernels are called without dropout",
        "refused  flex: it needs CUDA, and the tensors are on cpu",
    ]
    insisted = explain(Q, K, V, kernel="reference", dropout=0.1)
    assert (insisted.kernel, insisted.refusals, insisted.skipped_share) == ("reference", {}, 0.0)
    with pytest.raises(ArgumentError) as refusal:
        explain(Q, K, V, kernel="sdpa", dropout=0.1)
    assert str(refusal.value) == (
        "Kernel 'sdpa' refuses: PyTorch's fused kernels are called without dropout. Leave kernel out to use "
        "the fastest kernel that supports the call."
    )


def test_an_explanation_says_where_a_mask_is_read_cell_by_cell() -> None:
    explained = explain(Q, K, V, mask=masks.Keep(torch.arange(100) % 2 == 0, "keys"))
    assert explained.dense_remainder
    assert ", and part of the mask is no interval: it is read cell by cell" in str(explained)


@pytest.mark.parametrize(
    "mask",
    [
        masks.Causal(),
        masks.Window(9),
        masks.Lengths((70, 0)),
        masks.Documents((40, 60)),
        masks.Window(3) | masks.Prefix(2),
    ],
    ids=repr,
)
def test_the_skipped_share_is_that_of_the_cells_of_the_rectangles(mask: masks.Mask) -> None:
    explained = explain(Q, K, V, mask=mask, kernel="sdpa")
    bounds = key_bounds(mask, queries=100, keys=100)
    computed = sum(piece.num_cells * (2 if piece.sample is None else 1) for piece in cover_with_rectangles(bounds))
    assert explained.skipped_share == pytest.approx(1 - computed / (2 * 100 * 100))
    seen = oracle.shown(mask, (2, 1, 100, 100), 0)
    if not explained.dense_remainder:
        assert explained.hidden_share == pytest.approx(1 - float(seen.float().mean()))
    assert explained.skipped_share <= explained.hidden_share + 1e-9


def test_explaining_computes_nothing_and_takes_empty_calls() -> None:
    empty = explain(Q[:0], K[:0], V[:0])
    assert (empty.skipped_share, empty.hidden_share) == (0, 0)
    assert "memory   about 0 bytes" in str(explain(Q[:0], K[:0], V[:0], kernel="sdpa"))


def test_a_request_is_resolved_once() -> None:
    request = request_of(Q, K, V, query_start="end")
    assert request.query_start == 0
    assert request.scale == 0.25
    assert request_of(Q, K, V, scale=2).scale == 2
