"""Chance is what an even spread over the visible keys gives, and its error is that of independent observations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.layer.cache import KeyValueCache
from multihead.masks.base import UnknownMask
from multihead.probes import PROBES, Probe, first_keys_mass, offset_mass, tokens_mass
from multihead.record import chance as module
from multihead.record.chance import (
    ChanceCache,
    ChanceComparison,
    chance_of_probes,
    compare_with_chance,
    exceeds_chance,
    standard_error,
)
from multihead.record.sample import SampleRecord
from multihead.scores import ALiBi
from tests.dense_record import record_of

LENGTH, HEADS, WORDS, SPECIAL = 23, 4, 6, 3
SPARSE = 40  # words, where few tokens are repeated


def before(parts: Any) -> Tensor:
    """The weight on the three keys before the query, without the first key."""
    position = parts["position"]
    return sum(torch.where(position + each > 0, parts["offset_mass", each], 0) for each in (-1, -2, -3))  # type: ignore[return-value]


THREE_BEFORE = Probe("three_mass", before, {"position", *(("offset_mass", -each) for each in (1, 2, 3))})
MEASURED = (
    *(PROBES[name] for name in ("self_mass", "previous_mass", "next_mass", "first_mass", "special_mass", "entropy")),
    *(PROBES[name] for name in ("duplicate_mass", "induction_mass", "largest_weight", "effective_keys")),
    *(PROBES[name] for name in ("mean_distance", "distance_spread", "near_mass", "separator_mass")),
    *(offset_mass(-5), first_keys_mass(4), tokens_mass("even", (0, 2, 4)), THREE_BEFORE),
)


def some(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4


@dataclass(frozen=True)
class Strided(masks.Mask):
    """A mask of one's own."""

    n: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries - keys) % self.n == 0


@dataclass(frozen=True)
class Reaching(masks.Mask):
    """A mask of one's own whose heads see different keys."""

    heads: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        reach = torch.arange(1, self.heads + 1, device=keys.device)[:, None, None]
        return (queries - keys).abs() <= reach


class Reader(nn.Module):
    """One layer that reads tokens in the way that a case says."""

    def __init__(self, run: Callable[[mh.MultiHeadAttention, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(SPARSE, 8), mh.MultiHeadAttention(8, HEADS, **options)
        self.run = run

    def forward(self, input_ids: Tensor) -> Any:
        return self.run(self.layer, self.embed(input_ids))


def ids(length: int = LENGTH, *, batch: int = 1, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, (batch, length), generator=torch.Generator().manual_seed(2))


def read(
    run: Callable[[mh.MultiHeadAttention, Tensor], Any], *calls: Tensor, keep: Any = "cpu", **options: Any
) -> list[SampleRecord]:
    """The samples of a layer that was observed."""
    model = Reader(run, **options).eval()
    with torch.no_grad(), mh.observe(model, probes=MEASURED, special_ids=[SPECIAL], keep=keep) as seen:
        for each in calls or (ids(),):
            model(input_ids=each)
    return seen.layers[0].samples


def masked(mask: masks.Mask, **options: Any) -> list[SampleRecord]:
    return read(lambda layer, x: layer(x, mask=mask), **options)


def decoded(mask: masks.Mask, chunks: tuple[int, ...], **cache_options: Any) -> list[SampleRecord]:
    cache = KeyValueCache(**cache_options)
    calls = ids(sum(chunks), words=SPARSE).split(list(chunks), 1)
    return read(lambda layer, x: layer(x, mask=mask, cache=cache), *calls)


def hiding(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).masked_fill(~some(*shape), -torch.inf)


def crossing() -> list[SampleRecord]:
    memory = torch.randn(1, 9, 8)
    return read(lambda layer, x: layer(x, memory))


def biased(*shape: int) -> list[SampleRecord]:
    return read(lambda layer, x: layer(x, bias=hiding(*shape)))


CAUSAL = masks.Causal()
CASES: dict[str, Callable[[], list[SampleRecord]]] = {
    "full": lambda: masked(masks.Full()),
    "causal": lambda: masked(CAUSAL),
    "causal window": lambda: masked(CAUSAL & masks.Window(5)),
    "window": lambda: masked(masks.Window(4)),
    "documents": lambda: masked(CAUSAL & masks.Documents((10, 13))),
    "prefix": lambda: masked(CAUSAL | masks.Prefix(4)),
    "empty rows": lambda: masked(masks.Lengths((5,)) & masks.Window(3)),
    "no key": lambda: masked(masks.Lengths((0,))),
    "cells": lambda: masked(masks.Keep(some(LENGTH, LENGTH), "queries keys")),
    "cells of heads": lambda: masked(masks.Keep(some(HEADS, LENGTH, LENGTH), "heads queries keys")),
    "one's own": lambda: masked(Strided(3) & CAUSAL),
    "one's own of heads": lambda: masked(Reaching(HEADS)),
    "sinks": lambda: masked(CAUSAL, sinks=True),
    "learned key": lambda: masked(CAUSAL, add_bias_kv=True, add_zero_attn=True),
    "alibi": lambda: masked(CAUSAL, position_bias=ALiBi(HEADS)),
    "softcap": lambda: masked(CAUSAL, softcap=2.0),
    "grouped heads": lambda: masked(CAUSAL, num_kv_heads=2),
    "bias that hides": lambda: biased(1, 1, LENGTH, LENGTH),
    "bias that hides in heads": lambda: biased(1, HEADS, LENGTH, LENGTH),
    "cross-attention": crossing,
    "packed rows": lambda: read(lambda layer, x: layer(x, mask=CAUSAL, lengths=(7, 5, 0)), ids(7, batch=3)),
    "padded rows": lambda: read(lambda layer, x: layer(x, mask=Strided(1), lengths=(7, 5, 1)), ids(7, batch=3)),
    "decoding": lambda: decoded(CAUSAL, (5, 1, 1, 3)),
    "decoding in a window": lambda: decoded(CAUSAL & masks.Window(4), (5, 1, 1, 3, 1, 1), window=4),
    "decoding in a window of one's own": lambda: decoded(Strided(1) & CAUSAL & masks.Window(4), (5, 2, 2, 3), window=4),
    "only statistics": lambda: masked(CAUSAL & masks.Window(5), keep="statistics"),
}


@pytest.fixture(scope="module")
def known() -> ChanceCache:
    """What is shared by the samples of all cases, as by those of a record."""
    return {}


@pytest.mark.parametrize("name", list(CASES))
def test_chance_agrees_with_a_count_of_single_cells(name: str, known: ChanceCache) -> None:
    for sample in CASES[name]():
        found = chance_of_probes(sample, MEASURED, special=sample.text.special, known=known)
        expected = counted_cells(sample)
        assert set(found) == set(expected) or not sample.num_queries
        for each, values in found.items():
            assert values.dtype == torch.float64
            assert values.shape[1] == sample.num_queries
            wanted = expected.get(each, values)
            assert float((values.expand_as(wanted) - wanted).abs().max()) < 1e-12 if wanted.numel() else True, each


def counted_cells(sample: SampleRecord) -> dict[str, Tensor]:
    """What an even spread gives, counted query by query: (heads, queries) float64 of each statistic."""
    seen = sample.visible()
    seen = (seen if seen.dim() == 3 else seen[None]).expand(HEADS, -1, -1)
    tokens, special = sample.text.ids, sample.text.special
    shown = [key for key in range(sample.num_keys) if bool(seen[..., key].any())]
    first = shown[0] if shown else 0
    found: dict[str, Tensor] = {}
    for head in range(HEADS):
        for query, position in enumerate(sample.positions.tolist()):
            keys = [key for key in range(sample.num_keys) if seen[head, query, key]]
            even = spread(keys, position, first, None if tokens is None else tokens.tolist(), special)
            for name, number in even.items():
                rows = found.setdefault(name, torch.zeros(HEADS, sample.num_queries, dtype=torch.float64))
                rows[head, query] = number if keys else 0
    return found


def spread(
    keys: list[int], position: int, first: int, tokens: list[int] | None, special: list[bool] | None
) -> dict[str, float]:
    """What one query that sees some keys gives, if it spreads evenly over them."""
    number = max(len(keys), 1)

    def share(on: Callable[[int], bool]) -> float:
        return sum(map(on, keys)) / number

    distances = [abs(key - position) for key in keys]
    mean = sum(distances) / number
    found = {
        "self_mass": share(lambda key: key == position),
        "previous_mass": share(lambda key: key == position - 1),
        "next_mass": share(lambda key: key == position + 1),
        "offset_minus_5_mass": share(lambda key: key == position - 5),
        "first_mass": share(lambda key: key == first),
        "first_4_mass": share(lambda key: first <= key < first + 4),
        "near_mass": share(lambda key: abs(key - position) <= 3),
        "three_mass": share(lambda key: 0 < position - key <= 3 and key > 0),
        "largest_weight": 1 / number,
        "effective_keys": float(len(keys)),
        "entropy": math.log(number),
        "mean_distance": mean,
        "distance_spread": math.sqrt(sum((each - mean) ** 2 for each in distances) / number),
    }
    if special is not None:
        found["special_mass"] = share(lambda key: special[key])
        found["separator_mass"] = share(lambda key: special[key] and key != first)
    if tokens is not None:
        own = tokens[position] if 0 <= position < len(tokens) else None
        copies = {key for key in range(min(position, len(tokens))) if tokens[key] == own}
        found["even_mass"] = share(lambda key: tokens[key] in (0, 2, 4))
        found["duplicate_mass"] = share(lambda key: key in copies)
        found["induction_mass"] = share(lambda key: key - 1 in copies)
    return found


@pytest.mark.parametrize("name", ["full", "causal window", "cells of heads", "grouped heads", "decoding in a window"])
def test_chance_is_what_a_head_with_equal_scores_measures(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.init, "xavier_uniform_", nn.init.zeros_)  # queries and keys of 0
    (sample,) = CASES[name]()
    found = chance_of_probes(sample, MEASURED, special=sample.text.special)
    assert set(found) == set(sample.per_query)
    for each, values in sample.per_query.items():
        level = found[each].float().expand_as(values)
        torch.testing.assert_close(level, values, rtol=1e-5, atol=1e-5, msg=lambda text: f"{each}: {text}")  # noqa: B023


def test_long_texts_are_measured_in_blocks_of_queries_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = {
        name: [chance_of_probes(one, MEASURED, special=one.text.special) for one in CASES[name]()] for name in CASES
    }
    monkeypatch.setattr(module, "MIN_FLOAT32_KEYS", 0)
    monkeypatch.setattr(module, "QUERIES_PER_BLOCK", 4)
    for name, found in exact.items():
        for sample, wanted in zip(CASES[name](), found, strict=True):
            done: list[tuple[int, int]] = []
            rounded = chance_of_probes(
                sample,
                MEASURED,
                special=sample.text.special,
                progress=lambda *each: done.append(each),  # noqa: B023
            )
            assert done[-1] == (sample.num_queries, sample.num_queries) or not sample.num_queries
            assert [one for one, _ in done] == sorted(one for one, _ in done)
            for each, values in rounded.items():
                torch.testing.assert_close(values, wanted[each], rtol=2e-6, atol=2e-6)


def test_samples_that_see_the_same_keys_share_what_was_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, ...]] = []
    measured = module._measure_chance_levels_of_sample

    def noted(sample: SampleRecord, probes: Any, *rest: Any) -> dict[str, Tensor]:
        calls.append(tuple(each.name for each in probes))
        return measured(sample, probes, *rest)

    monkeypatch.setattr(module, "_measure_chance_levels_of_sample", noted)
    wanted, known = (PROBES["previous_mass"], PROBES["duplicate_mass"]), ChanceCache()
    first, again = (masked(masks.Keep(some(LENGTH, LENGTH), "queries keys"))[0] for _ in range(2))
    other = masked(CAUSAL)[0]
    (same_mask,) = read(lambda layer, x: layer(x, mask=CAUSAL), ids(words=SPARSE))
    for sample in (first, again, other, same_mask):
        chance_of_probes(sample, wanted, known=known)
    names = ("previous_mass", "duplicate_mass")
    assert calls == [names, names, ("duplicate_mass",)]


def test_what_has_no_level_of_chance_has_none() -> None:
    names = ("largest_key", "largest_score", "sink_mass", "contribution", "output_norm", "received", "pooled_map")
    assert chance_of_probes(masked(CAUSAL)[0], [PROBES[name] for name in names]) == {}


def test_without_marks_ids_or_a_known_mask_there_is_no_such_chance() -> None:
    (sample,) = masked(CAUSAL)
    assert "special_mass" not in chance_of_probes(sample, MEASURED)
    bare: Any = record_of(torch.full((1, 4, 4), 0.25)).layers[0].sample()
    named = [PROBES[each] for each in ("duplicate_mass", "induction_mass", "self_mass")]
    assert set(chance_of_probes(bare, named)) == {"self_mass"}
    assert chance_of_probes(bare, [THREE_BEFORE.without_function()]) == {}  # of another process, without its function
    (unknown,) = masked(masks.Keep(torch.ones(LENGTH, LENGTH, dtype=torch.bool), "queries keys"), keep="statistics")
    (segment,) = unknown.segments
    object.__setattr__(segment.request, "mask", UnknownMask("Mine", {}))
    assert chance_of_probes(unknown, MEASURED) == {}


def one_text(values: Tensor, level: float = 0.0) -> ChanceComparison:
    return compare_with_chance(
        [values], [torch.full((1, values.shape[1]), level)], [torch.ones_like(values, dtype=torch.bool)]
    )


def test_the_error_of_one_text_is_that_of_the_mean_over_blocks_of_its_queries() -> None:
    values = torch.rand(3, 800, generator=torch.Generator().manual_seed(0)).double()
    found = one_text(values, 0.5)
    blocks = values.unflatten(1, (8, 100)).mean(-1)
    torch.testing.assert_close(found.mean, values.mean(-1))
    torch.testing.assert_close(found.chance, torch.full((3,), 0.5, dtype=torch.float64))
    torch.testing.assert_close(found.standard_error, blocks.std(-1) / math.sqrt(8))


def test_queries_that_resemble_their_neighbours_do_not_make_a_mean_sure() -> None:
    values = torch.zeros(1, 800)
    values[:, :100] = 1  # one long passage of eight
    found = one_text(values)
    assert float(found.standard_error) == pytest.approx(1 / 8)
    assert float(values.std() / math.sqrt(800)) < 0.012  # as if each query were independent


def test_what_differs_from_query_to_query_by_chance_alone_is_no_error() -> None:
    level = 1 / torch.arange(1, 101).double()[None]
    found = compare_with_chance([level + 0.3], [level], [torch.ones(1, 100, dtype=torch.bool)])
    assert float(found.standard_error) == pytest.approx(0, abs=1e-12)
    assert float(found.mean - found.chance) == pytest.approx(0.3)


def test_queries_that_do_not_count_are_left_out_and_few_give_no_error() -> None:
    values = torch.tensor([[9.0, 1.0, 1.0, 2.0, 2.0, 9.0], [9.0, 9.0, 9.0, 1.0, 2.0, 3.0]]).double()
    counted = torch.tensor([[False, True, True, True, True, False], [False, False, False, True, True, True]])
    found = compare_with_chance([values], [torch.zeros(1, 6)], [counted])
    assert found.mean.tolist() == [1.5, 2.0]
    assert float(found.standard_error[0]) == pytest.approx(1 / math.sqrt(12))
    assert float(found.standard_error[1]) == math.inf


def test_the_error_of_four_texts_is_that_of_the_mean_over_texts() -> None:
    texts = [torch.full((1, 10 * (1 + index)), float(index)) for index in range(4)]
    levels = [torch.zeros(1, each.shape[1]) for each in texts]
    counted = [torch.ones_like(each, dtype=torch.bool) for each in texts]
    found = compare_with_chance(texts, levels, counted)
    assert float(found.mean) == pytest.approx((0 * 10 + 1 * 20 + 2 * 30 + 3 * 40) / 100)
    assert float(found.standard_error) == pytest.approx(math.sqrt(5 / 12))
    assert float(standard_error(torch.tensor([[0.0], [1.0], [2.0], [3.0]]))) == pytest.approx(math.sqrt(5 / 12))


def test_numbers_that_are_none_stand_out_from_nothing() -> None:
    excess = torch.tensor([math.nan, 0.9, 0.9, 0.9])
    assert exceeds_chance(excess, torch.tensor([0.0, math.nan, math.inf, 0.0]), 0.35).tolist() == [
        False,
        False,
        False,
        True,
    ]
