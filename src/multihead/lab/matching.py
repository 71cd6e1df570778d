"""Match vectors: does one long row find its partner worse than several short ones? Measured, not asserted."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from multihead.errors import ArgumentError

__all__ = ["CONTENTS", "Content", "Length", "Match", "Spread", "Vectors", "vectors"]

Content = Literal["even", "uneven", "groups", "part", "two"]
CONTENTS: tuple[Content, ...] = ("even", "uneven", "groups", "part", "two")


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation between them."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Sum up one value a seed; with one seed alone the deviation is 0."""
        each = torch.tensor(values, dtype=torch.float64)
        return cls(float(each.mean()), float(each.std()) if len(values) > 1 else 0.0)

    def apart(self, other: Spread) -> bool:
        """Tell whether the means differ by more than both deviations together."""
        return abs(self.mean - other.mean) > self.deviation + other.deviation


@dataclass(frozen=True)
class Match:
    """One kind of content at one strength of noise; all shares are of trials, 0 to 1.

    Attributes:
        content: "even" (all columns carry as much), "uneven" (few directions carry most), "groups" (candidates
            resemble each other in groups), "part" (query and partner agree in one short row only, the rest is
            about other things), "two" (one half asks for one partner, the other half for another).
        noise: standard deviation of what is added to the query, where the content's is 1.
        long: found by one long row.
        short: found by the mean weight of all short rows.
        own: found by those short rows alone that carry it; for "two" each half must find its own partner.
    """

    content: Content
    noise: float
    long: Spread
    short: Spread
    own: Spread


@dataclass(frozen=True)
class Length:
    """Rows of one length against even content.

    Attributes:
        columns: the length.
        found: share of trials in which the largest weight is the partner's.
        scaled_keys, plain_keys: effective number of keys, exp(entropy), of queries that have no partner, with the
            scores divided by sqrt(columns) and without.
        scaled_slope, plain_slope: mean of p (1 - p) of the largest weight: what softmax lets through of a gradient.
    """

    columns: int
    found: Spread
    scaled_keys: Spread
    plain_keys: Spread
    scaled_slope: Spread
    plain_slope: Spread


@dataclass(frozen=True)
class Vectors:
    """What was measured, and with what.

    Attributes:
        columns, parts: a long row, and how many short ones it is cut into.
        candidates: keys that each query has to choose from.
        trials: queries a seed.
        seeds: how often all was drawn anew.
        matches: one a content and noise.
        lengths: one a length of row.
        length_noise: the noise at which the lengths were compared.
    """

    columns: int
    parts: int
    candidates: int
    trials: int
    seeds: int
    matches: tuple[Match, ...]
    lengths: tuple[Length, ...]
    length_noise: float


def vectors(
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
) -> Vectors:
    """Let noisy queries look for their partner among candidates, as one long row and as several short ones.

    A long row compares by softmax(q . k / sqrt(columns)). The short ones are the same numbers, cut as heads are
    cut: each has a softmax of its own, over scores divided by the root of its own length. The sum of the short
    rows' scores *is* the long row's score, so what differs is the softmax alone.

    Args:
        columns: length of a long row.
        parts: short rows it is cut into; they must divide `columns`, and be even in number.
        candidates: keys that each query has to choose from, at least 2 a group of the content "groups".
        trials: queries a seed.
        seeds: how often all is drawn anew.
        noises: strengths of the noise that is added to the query.
        lengths: lengths of row to compare.
        length_noise: the noise for these.
        seed: the first seed.

    Raises:
        ArgumentError: parts that do not divide the columns.

    >>> found = vectors(trials=50, seeds=2, noises=(1.0,), lengths=(8,))
    >>> [match.content for match in found.matches]
    ['even', 'uneven', 'groups', 'part', 'two']
    """
    if parts < 2 or parts % 2 or columns % parts:
        raise ArgumentError(
            f"parts is {parts}, and columns is {columns}.",
            "Give an even number of parts that divides the columns, such as 8 of 64.",
        )
    if candidates < 2 or trials < 1 or seeds < 1:
        raise ArgumentError(
            f"There are {candidates} candidates, {trials} trials and {seeds} seeds.",
            "Give at least 2 candidates, 1 trial and 1 seed.",
        )
    matches = []
    for content in CONTENTS:
        for noise in noises:
            shares = [
                _matched(content, noise, columns, parts, candidates, trials, seed + index) for index in range(seeds)
            ]
            long, short, own = (Spread.of([share[column] for share in shares]) for column in range(3))
            matches.append(Match(content, noise, long, short, own))
    measured = []
    for length in lengths:
        rows = [_of_length(length, length_noise, candidates, trials, seed + index) for index in range(seeds)]
        measured.append(Length(length, *(Spread.of([row[column] for row in rows]) for column in range(5))))
    return Vectors(columns, parts, candidates, trials, seeds, tuple(matches), tuple(measured), length_noise)


def _keys(content: Content, columns: int, candidates: int, trials: int, generator: torch.Generator) -> Tensor:
    """Draw the candidates of every trial: (trials, candidates, columns), of variance 1."""
    keys = torch.randn(trials, candidates, columns, generator=generator)
    if content == "uneven":
        # A few directions carry most of the variance, as in trained embeddings; turned, so that no column is theirs.
        strength = 1 / torch.arange(1, columns + 1)
        turn, _ = torch.linalg.qr(torch.randn(columns, columns, generator=generator))
        keys = keys * (strength / strength.square().mean().sqrt()) @ turn
    if content == "groups":
        groups = max(candidates // 8, 1)
        centres = torch.randn(trials, groups, columns, generator=generator)
        member = torch.arange(candidates) % groups
        keys = math.sqrt(0.75) * centres[:, member] + 0.5 * keys
    return keys


def _matched(
    content: Content, noise: float, columns: int, parts: int, candidates: int, trials: int, seed: int
) -> tuple[float, float, float]:
    """Share of trials in which the long row, the mean of the short ones, and the short ones that know find it."""
    generator = torch.Generator().manual_seed(seed)
    keys = _keys(content, columns, candidates, trials, generator)
    width = columns // parts
    # The partners are candidates 0 and 1: drawn alike, all places are the same.
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
        own = (halves.argmax(-1) == torch.arange(2)).all(1)
        both = [each.topk(2, -1).indices.sort(-1).values for each in (long, short.mean(1))]
        found = [(each == torch.arange(2)).all(1) for each in both]
    else:
        knowing = short[:, :1] if content == "part" else short
        own = knowing.mean(1).argmax(-1) == 0
        found = [long.argmax(-1) == 0, short.mean(1).argmax(-1) == 0]
    return tuple(float(each.double().mean()) for each in (*found, own))  # type: ignore[return-value]


def _of_length(columns: int, noise: float, candidates: int, trials: int, seed: int) -> tuple[float, ...]:
    """Measure one length: what is found, and how sharp softmax is on vectors that have nothing in common."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(trials, candidates, columns, generator=generator)
    asked = keys[:, 0] + noise * torch.randn(trials, columns, generator=generator)
    found = torch.einsum("tw,tcw->tc", asked, keys).argmax(-1) == 0
    stranger = torch.randn(trials, columns, generator=generator)
    plain = torch.einsum("tw,tcw->tc", stranger, keys)
    measured = {}
    for name, scores in (("scaled", plain / math.sqrt(columns)), ("plain", plain)):
        shares = scores.softmax(-1)
        entropy = torch.special.entr(shares).sum(-1)
        largest = shares.amax(-1)
        measured[name] = (float(entropy.exp().mean()), float((largest * (1 - largest)).mean()))
    return (
        float(found.double().mean()),
        measured["scaled"][0],
        measured["plain"][0],
        measured["scaled"][1],
        measured["plain"][1],
    )
