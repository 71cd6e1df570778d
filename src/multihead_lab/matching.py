"""Match vectors: measure whether one long row finds its partner worse than several short ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from multihead.errors import ArgumentError

__all__ = [
    "KEY_CONTENTS",
    "KeyContent",
    "MatchRates",
    "MeanOverSeeds",
    "RowLengthResult",
    "VectorMatching",
    "match_vectors",
]

KeyContent = Literal["even", "uneven", "groups", "part", "two"]
KEY_CONTENTS: tuple[KeyContent, ...] = ("even", "uneven", "groups", "part", "two")


@dataclass(frozen=True)
class MeanOverSeeds:
    """A mean over seeds and the standard deviation between them, None with a single seed.

    `binomial_error` is the binomial standard error of the value of one seed, where the value is a share of a number of
    questions; else 0.
    """

    mean: float
    deviation: float | None
    binomial_error: float = 0.0

    @classmethod
    def from_values(cls, values: Sequence[float], *, questions: int = 0) -> MeanOverSeeds:
        """Summarise one value per seed, each a share of `questions` questions, or no share if `questions` is 0."""
        each = torch.tensor(values, dtype=torch.float64)
        mean, error = float(each.mean()), 0.0
        if questions:
            share = (mean * questions + 1) / (questions + 2)  # rule of succession: 500 of 500 have an error, too
            error = math.sqrt(share * (1 - share) / questions)
        return cls(mean, float(each.std()) if len(values) > 1 else None, error)

    def differs_from(self, other: MeanOverSeeds) -> bool:
        """Return whether two means differ by more than the sum of their deviations, each at least the binomial error.

        Means of a single seed, whose deviation is unknown, never differ.
        """
        if self.deviation is None or other.deviation is None:
            return False
        spread = max(self.deviation, self.binomial_error) + max(other.deviation, other.binomial_error)
        return abs(self.mean - other.mean) > spread

    def exceeds(self, other: MeanOverSeeds) -> bool:
        """Return whether this mean is the larger one and differs from the other, see `differs_from`."""
        return self.mean > other.mean and self.differs_from(other)


@dataclass(frozen=True)
class MatchRates:
    """How often long and short rows find their partner, for one kind of content and one strength of noise.

    All shares are shares of trials, 0 to 1.

    Attributes:
        content: "even" (all columns have equal variance), "uneven" (few directions have most of the variance),
            "groups" (candidates resemble each other in groups), "part" (query and partner agree in one short row
            only), "two" (one half matches one partner, the other half another).
        query_noise: standard deviation of the noise added to the query; the content has a standard deviation of 1.
        by_long_row: share found by one long row.
        by_all_short_rows: share found by the mean weight of all short rows.
        by_short_rows_with_content: share found by only the short rows that carry the content; for "two" each half must
            find its own partner.
    """

    content: KeyContent
    query_noise: float
    by_long_row: MeanOverSeeds
    by_all_short_rows: MeanOverSeeds
    by_short_rows_with_content: MeanOverSeeds


@dataclass(frozen=True)
class RowLengthResult:
    """What was measured on rows of one length with "even" content.

    Attributes:
        columns: the length of a row.
        match_rate: share of trials in which the largest weight is the partner's.
        scaled_effective_keys, unscaled_effective_keys: effective number of keys, exp(entropy), of queries that have no
            partner, with the scores divided by sqrt(columns) and without.
        scaled_softmax_slope, unscaled_softmax_slope: mean of p (1 - p) of the largest weight p, the derivative of
            softmax.
    """

    columns: int
    match_rate: MeanOverSeeds
    scaled_effective_keys: MeanOverSeeds
    unscaled_effective_keys: MeanOverSeeds
    scaled_softmax_slope: MeanOverSeeds
    unscaled_softmax_slope: MeanOverSeeds


@dataclass(frozen=True)
class VectorMatching:
    """The settings and the results of `match_vectors`.

    Attributes:
        columns, short_rows: the length of a long row, and the number of short rows that it is split into.
        candidates: number of keys per query.
        trials: queries per seed.
        seeds: number of seeds.
        matches: one result per content and noise.
        lengths: one result per length of row.
        length_noise: the noise at which the lengths were compared.
    """

    columns: int
    short_rows: int
    candidates: int
    trials: int
    seeds: int
    matches: tuple[MatchRates, ...]
    lengths: tuple[RowLengthResult, ...]
    length_noise: float


def match_vectors(
    *,
    columns: int = 64,
    parts: int = 8,
    candidates: int = 64,
    trials: int = 400,
    seeds: int = 5,
    noises: tuple[float, ...] = (0.5, 1.0, 2.0),
    lengths: tuple[int, ...] = (4, 8, 16, 32, 64, 128, 256, 512),
    length_noise: float = 2.0,
    seed: int = 0,
) -> VectorMatching:
    """Match noisy queries with their partners among candidates, as one long row and as several short ones.

    A long row compares by softmax(q . k / sqrt(columns)). The short rows are the same numbers, split as heads are: each
    has its own softmax, over scores divided by the square root of its own length. The sum of the short rows' dot
    products is the long row's dot product, so they differ only in the softmax.

    Args:
        columns: length of a long row.
        parts: number of short rows that it is split into; even, and a divisor of `columns`.
        candidates: number of keys per query, at least 2.
        trials: queries per seed.
        seeds: number of seeds.
        noises: standard deviations of the noise added to the query.
        lengths: lengths of row to compare.
        length_noise: the noise for the comparison of lengths.
        seed: the first seed.

    >>> found = match_vectors(trials=50, seeds=2, noises=(1.0,), lengths=(8,))
    >>> [match.content for match in found.matches]
    ['even', 'uneven', 'groups', 'part', 'two']
    """
    if parts < 2 or parts % 2 or columns % parts:
        raise ArgumentError(
            f"parts is {parts}, and columns is {columns}.",
            "Give an even number of parts that divides the columns, such as 8 for 64.",
        )
    if candidates < 2 or trials < 1 or seeds < 1:
        raise ArgumentError(
            f"There are {candidates} candidates, {trials} trials and {seeds} seeds.",
            "Give at least 2 candidates, 1 trial and 1 seed.",
        )
    each_seed = range(seed, seed + seeds)
    matches = []
    for content in KEY_CONTENTS:
        for noise in noises:
            rates = [_match_rates(content, noise, columns, parts, candidates, trials, each) for each in each_seed]
            means = (MeanOverSeeds.from_values(values, questions=trials) for values in zip(*rates, strict=True))
            matches.append(MatchRates(content, noise, *means))
    results = []
    for length in lengths:
        measured = [_measure_length(length, length_noise, candidates, trials, each) for each in each_seed]
        found, *others = zip(*measured, strict=True)
        match_rate = MeanOverSeeds.from_values(found, questions=trials)
        results.append(RowLengthResult(length, match_rate, *map(MeanOverSeeds.from_values, others)))
    return VectorMatching(columns, parts, candidates, trials, seeds, tuple(matches), tuple(results), length_noise)


def _draw_candidates(
    content: KeyContent, columns: int, candidates: int, trials: int, generator: torch.Generator
) -> Tensor:
    """Draw the candidates of every trial: (trials, candidates, columns), with variance 1."""
    keys = torch.randn(trials, candidates, columns, generator=generator)
    if content == "uneven":
        # A few directions have most of the variance, as in trained embeddings; a random rotation mixes the columns.
        strength = 1 / torch.arange(1, columns + 1)
        turn, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator))
        keys = keys * (strength / strength.square().mean().sqrt()) @ turn
    if content == "groups":
        groups = max(candidates // 8, 1)
        centres = torch.randn(trials, groups, columns, generator=generator)
        member = torch.arange(candidates) % groups
        keys = math.sqrt(0.75) * centres[:, member] + 0.5 * keys
    return keys


def _match_rates(
    content: KeyContent, noise: float, columns: int, parts: int, candidates: int, trials: int, seed: int
) -> tuple[float, ...]:
    """Return how often a vector finds its partner as one row, as several short rows, and by those with content."""
    generator = torch.Generator().manual_seed(seed)
    keys = _draw_candidates(content, columns, candidates, trials, generator)
    width = columns // parts
    # The partners are candidates 0 and 1: all candidates have the same distribution, so their index does not matter.
    query = keys[:, 0].clone()
    if content == "part":
        query[:, width:] = torch.randn(trials, columns - width, generator=generator)
    if content == "two":
        query[:, columns // 2 :] = keys[:, 1, columns // 2 :]
    query = query + noise * torch.randn(query.shape, generator=generator)

    scores = torch.einsum(
        "tpw,tcpw->tpc", query.view(trials, parts, width), keys.view(trials, candidates, parts, width)
    )
    long = (scores.sum(1) / math.sqrt(columns)).softmax(-1)  # (trials, candidates)
    short = (scores / math.sqrt(width)).softmax(-1)  # (trials, parts, candidates)
    if content == "two":
        halves = short.unflatten(1, (2, parts // 2)).mean(2)  # (trials, 2, candidates)
        by_content = (halves.argmax(-1) == torch.arange(2)).all(1)
        both = [each.topk(2, -1).indices.sort(-1).values for each in (long, short.mean(1))]
        found = [(each == torch.arange(2)).all(1) for each in both]
    else:
        relevant = short[:, :1] if content == "part" else short
        by_content = relevant.mean(1).argmax(-1) == 0
        found = [long.argmax(-1) == 0, short.mean(1).argmax(-1) == 0]
    return tuple(float(each.double().mean()) for each in (*found, by_content))


def _measure_length(columns: int, noise: float, candidates: int, trials: int, seed: int) -> tuple[float, ...]:
    """Measure rows of one length, in the order of the attributes of `RowLengthResult`.

    The effective keys and the slopes are those of softmax on queries that have no partner.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(trials, candidates, columns, generator=generator)
    query = keys[:, 0] + noise * torch.randn(trials, columns, generator=generator)
    found = torch.einsum("tw,tcw->tc", query, keys).argmax(-1) == 0
    unrelated = torch.randn(trials, columns, generator=generator)
    unscaled = torch.einsum("tw,tcw->tc", unrelated, keys)
    weights = [scores.softmax(-1) for scores in (unscaled / math.sqrt(columns), unscaled)]
    effective_keys = [float(torch.special.entr(each).sum(-1).exp().mean()) for each in weights]
    largest = [each.amax(-1) for each in weights]
    slopes = [float((each * (1 - each)).mean()) for each in largest]
    return float(found.double().mean()), *effective_keys, *slopes
