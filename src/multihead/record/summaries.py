"""Compute the mean, median, 95th percentile or maximum of statistics over the queries that count."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.probes.probe import Statistic

SummaryName = Literal["mean", "median", "p95", "max"]
QUANTILE_OF_SUMMARY = {"median": 0.5, "p95": 0.95, "max": 1.0}


class MeasuredStatistic(NamedTuple):
    """The values of one statistic for one sample.

    Attributes:
        values: (heads, queries).
        counted: (heads, queries) bool, True for queries that count in a summary.
        chance: (heads or 1, queries), chance level (even weights over the visible keys); None if it was not measured.
    """

    values: Tensor
    counted: Tensor
    chance: Tensor | None = None


def check_summary_name(of: object) -> None:
    """Raise ArgumentError unless `of` is "mean", "median", "p95" or "max"."""
    if of != "mean" and of not in QUANTILE_OF_SUMMARY:
        raise ArgumentError(f"of is {of!r}.", 'Give "mean", "median", "p95" or "max".')


def summarise_samples(
    samples: Sequence[Mapping[str, MeasuredStatistic]], of: SummaryName, names: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Summarise each statistic over the counted queries of all samples.

    Args:
        samples: statistics of each sample of one layer; statistics that a sample lacks are left out.
        of: "mean", "median", "p95" or "max"; quantiles are interpolated as in torch.quantile.
        names: the statistics to summarise; None takes all.

    Returns:
        statistic -> (heads,) float64; 0 where no query counts.
    """
    check_summary_name(of)
    common = set(samples[0]).intersection(*samples)
    found = {}
    for name in [name for name in samples[0] if name in common and (names is None or name in names)]:
        measured = [each[name] for each in samples]
        if of == "mean":
            totals = torch.stack([each.values.double().masked_fill(~each.counted, 0).sum(-1) for each in measured])
            counts = torch.stack([each.counted.sum(-1) for each in measured])
            found[name] = totals.sum(0) / counts.sum(0).clamp(min=1)
        else:
            values = torch.cat([each.values for each in measured], 1)  # (heads, queries of all samples)
            counted = torch.cat([each.counted for each in measured], 1)
            heads = zip(values, counted, strict=True)
            found[name] = torch.stack([_quantile_of_counted(*each, share=QUANTILE_OF_SUMMARY[of]) for each in heads])
    return found


def join_windows(windows: Sequence[Mapping[str, MeasuredStatistic]]) -> dict[str, MeasuredStatistic]:
    """Concatenate the statistics of the windows of a sample along the queries."""
    found = {}
    for name in windows[0]:
        values = torch.cat([one[name].values for one in windows], 1)
        found[name] = MeasuredStatistic(values, torch.cat([one[name].counted for one in windows], 1))
    return found


def queries_that_count(
    statistic: Statistic, sees: Tensor, positions: Tensor, num_keys: int | Tensor, occurred: Callable[[], Tensor] | None
) -> Tensor:
    """Return which queries count in the summary of a statistic.

    Args:
        statistic: the statistic, whose `counted` is the rule.
        sees: ([batch,] heads, queries) bool, True for queries that see a key.
        positions: (queries,) or (batch, 1, queries) int64, position of each query among the keys.
        num_keys: number of keys, one number or a tensor like `positions`.
        occurred: returns whether each query's token occurs earlier in the text, bool like `positions`; None if unknown.

    Returns:
        ([batch,] heads, queries) bool.
    """
    if statistic.counted == "repeated":
        return sees if occurred is None else sees & occurred()
    if statistic.counted_offset is not None:
        keys = positions + statistic.counted_offset
        return sees & (keys >= 0) & (keys < num_keys)
    return sees


def occurred_before(positions: Tensor, ids: Tensor) -> Tensor:
    """Return whether each query's token occurs earlier in the text: (queries,) bool; `ids` are those of the keys."""
    _, token = ids.unique(return_inverse=True)
    place = torch.arange(len(ids))
    first = torch.full((int(token.max()) + 1,), len(ids)).scatter_reduce(0, token, place, "amin")
    inside = (positions >= 0) & (positions < len(ids))
    return inside & (place > first[token])[positions.clamp(0, len(ids) - 1)]


def _quantile_of_counted(values: Tensor, counted: Tensor, *, share: float) -> Tensor:
    """Return a quantile of the values that count; 0 if none counts, NaN if a counted value is NaN."""
    ordered = values[counted].double().sort().values
    if not ordered.numel() or bool(ordered[-1].isnan()):  # NaN is sorted last
        return ordered[-1] if ordered.numel() else torch.zeros((), dtype=torch.float64)
    place = share * (ordered.numel() - 1)
    below = int(place)
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
