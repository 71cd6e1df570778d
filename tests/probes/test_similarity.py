"""How alike heads look, against the divergence of their dense weights."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels.call import AttentionRequest
from multihead.probes import similarity
from multihead.probes.similarity import divergence
from tests import oracle
from tests.kernels.test_sdpa import LargestTensor

SINKS = torch.tensor([1.0, -2.0, 0.5, 4.0], dtype=torch.float64)
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Window(4)},
    "rows that see nothing": {"mask": masks.Lengths(torch.arange(20)[None] % 7)},
    "capped": {"softcap": 0.9},
    "sinks": {"sinks": SINKS},
}


def call_of(terms: dict[str, Any], seed: int) -> tuple[AttentionRequest, Tensor, Tensor, Tensor]:
    """Make a call of four heads over two: itself, its logsumexp, its dense weights, a sink's behind, who sees a key."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(1, heads, 20, 8, dtype=torch.float64, generator=generator) for heads in (4, 2))
    _, logsumexp = attention_with_logsumexp(q, k, k, kernel="reference", **terms)
    seen = oracle.shown(terms.get("mask", masks.Full()), (1, 4, 20, 20), 0)
    dense = oracle.attend(q, k, k, seen, **{name: value for name, value in terms.items() if name != "mask"})
    sink = (1 - dense.weights.sum(-1, keepdim=True)) * seen.any(-1, keepdim=True) * ("sinks" in terms)
    return request_of(q, k, k, **terms), logsumexp, torch.cat([dense.weights, sink], -1)[0], seen.any(-1)[0]


def expected(p: Tensor, r: Tensor, both: Tensor) -> float:
    """The definition by Kullback and Leibler's divergence from the middle, a mean over queries."""
    middle = (p + r) / 2
    apart = (torch.xlogy(p, p / middle).nansum(-1) + torch.xlogy(r, r / middle).nansum(-1)) / 2
    return float(apart[both].mean())


@pytest.mark.parametrize("cells", [1, 1 << 21], ids=["row by row", "at once"])
@pytest.mark.parametrize("first", CASES)
@pytest.mark.parametrize("second", ["causal", "sinks"])
def test_it_is_the_divergence_of_the_dense_weights(
    first: str, second: str, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(similarity, "MAX_WEIGHTS_AT_ONCE", cells)
    request, logsumexp, p, sees = call_of(CASES[first], 1)
    other, other_logsumexp, r, also = call_of(CASES[second], 2)
    found = divergence(request, logsumexp, other, other_logsumexp, heads=[0, 3], other_heads=slice(1, 4))
    assert found.shape == (2, 3)
    for row, head in enumerate((0, 3)):
        for column, another in enumerate((1, 2, 3)):
            both = sees.expand(4, -1)[head] & also.expand(4, -1)[another]
            assert float(found[row, column]) == pytest.approx(expected(p[head], r[another], both), abs=1e-10)


@pytest.mark.parametrize("queries", [slice(1, None, 3), slice(19, 20), slice(None)], ids=str)
def test_every_nth_query_may_speak_for_all(queries: slice) -> None:
    request, logsumexp, p, _ = call_of(CASES["causal"], 1)
    found = divergence(request, logsumexp, queries=queries)
    every = torch.ones(len(range(*queries.indices(20))), dtype=torch.bool)
    for head in range(4):
        for another in range(4):
            value = expected(p[head, queries], p[another, queries], every)
            assert float(found[head, another]) == pytest.approx(value, abs=1e-10)


def test_a_head_is_nothing_from_itself_and_ln_2_from_one_that_sees_other_keys() -> None:
    q, k = torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4)
    left = request_of(q, k, k, masks.Keep(torch.tensor([True, True, False, False]), "keys"))
    right = request_of(q, k, k, masks.Keep(torch.tensor([False, False, True, True]), "keys"))
    logsumexp = torch.full((1, 1, 4), 2.0).log()
    assert divergence(left, logsumexp).item() == 0
    assert divergence(left, logsumexp, right, logsumexp).item() == pytest.approx(log(2))


def test_where_no_query_sees_a_key_in_both_there_is_no_number() -> None:
    q = torch.zeros(1, 1, 2, 4)
    blind = request_of(q, q, q, masks.Lengths((0,)))
    assert divergence(blind, torch.full((1, 1, 2), -torch.inf)).isnan().item()


def test_no_tensor_of_queries_by_keys_is_made() -> None:
    q = torch.randn(1, 4, 4096, 8)
    with LargestTensor() as largest:
        divergence(request_of(q, q, q), torch.full((1, 4, 4096), 9.0), queries=slice(None, None, 8))
    assert 0 < largest.elements <= 2 * similarity.MAX_WEIGHTS_AT_ONCE


def test_calls_over_other_texts_are_refused() -> None:
    short, long = (torch.zeros(1, 1, length, 4) for length in (2, 3))
    with pytest.raises(ShapeError) as refusal:
        divergence(
            request_of(short, short, short), torch.zeros(1, 1, 2), request_of(long, long, long), torch.zeros(1, 1, 3)
        )
    assert str(refusal.value) == (
        "The calls have 2 and 3 queries, and 2 and 3 keys. Give two calls over the same text."
    )


@pytest.mark.parametrize(
    ("batch", "queries", "said"),
    [
        (2, slice(None), "A call of 2 samples was given. Give a call of one sample."),
        (1, slice(5, 5), "queries is slice(5, 5, None), which selects no query. Give a slice that selects some."),
        (1, slice(None, None, -2), "queries runs backwards by 2. Give a slice whose step is positive."),
    ],
    ids=["batch", "no query", "backwards"],
)
def test_what_cannot_be_compared_is_refused(batch: int, queries: slice, said: str) -> None:
    q = torch.zeros(batch, 1, 6, 4)
    with pytest.raises(ArgumentError) as refusal:
        divergence(request_of(q, q, q), torch.zeros(batch, 1, 6), queries=queries)
    assert str(refusal.value) == said
