"""Compute the mean, median, 95th percentile or maximum of statistics over the queries that count."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.record.text_rows import MeasuredStatistic

SummaryName = Literal["mean", "median", "p95", "max"]
QUANTILE_OF_SUMMARY = {"median": 0.5, "p95": 0.95, "max": 1.0}


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
        statistic -> (heads,) float64; 0 where no query counts, NaN where all that would count are NaN or infinite.
    """
    check_summary_name(of)
    common = set(samples[0]).intersection(*samples)
    found = {}
    for name in [name for name in samples[0] if name in common and (names is None or name in names)]:
        measured = [each[name] for each in samples]
        counts = torch.stack([each.counted.sum(-1) for each in measured]).sum(0)
        if of == "mean":
            totals = torch.stack([each.values.double().masked_fill(~each.counted, 0).sum(-1) for each in measured])
            summary = totals.sum(0) / counts.clamp(min=1)
        else:
            values = torch.cat([each.values for each in measured], 1)  # (heads, queries of all samples)
            counted = torch.cat([each.counted for each in measured], 1)
            heads = zip(values, counted, strict=True)
            summary = torch.stack([_quantile_of_counted(*each, share=QUANTILE_OF_SUMMARY[of]) for each in heads])
        left_out = [each.nonfinite.any(-1) for each in measured if each.nonfinite is not None]
        if left_out:
            summary = nan_where_nothing_is_finite(summary, counts, torch.stack(left_out).any(0))
        found[name] = summary
    return found


def count_nonfinite(samples: Sequence[Mapping[str, MeasuredStatistic]]) -> Tensor:
    """Return how many queries of each head are NaN or infinite in a statistic; of several the most: (heads,) int64."""
    heads = max((len(each.values) for each in samples[0].values()), default=0)
    by_name: dict[str, Tensor] = {"": torch.zeros(heads, dtype=torch.int64)}
    for one in samples:
        for name, each in one.items():
            if each.nonfinite is not None:
                by_name[name] = by_name.get(name, by_name[""]) + each.nonfinite.sum(-1)
    return torch.stack(list(by_name.values())).amax(0)


def nan_where_nothing_is_finite(summary: Tensor, counts: Tensor, nonfinite: Tensor) -> Tensor:
    """Replace the summaries of heads without a finite value, but with others, by NaN; (heads,) each."""
    return summary.masked_fill((counts == 0) & (nonfinite > 0), torch.nan)


def _quantile_of_counted(values: Tensor, counted: Tensor, *, share: float) -> Tensor:
    """Return a quantile of the values that count, all finite; 0 if none counts."""
    ordered = values[counted].double().sort().values
    if not ordered.numel():
        return torch.zeros((), dtype=torch.float64)
    place = share * (ordered.numel() - 1)
    below = int(place)
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
