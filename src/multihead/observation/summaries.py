"""Sum up what was measured of each query: mean, median and 95th percentile over the queries that see a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from multihead.errors import ArgumentError

if TYPE_CHECKING:
    from multihead.observation.sample import SampleRecord

Of = Literal["mean", "median", "p95"]
SHARES = {"median": 0.5, "p95": 0.95}


def refuse_unless_summary(of: object) -> None:
    """Refuse what is no way to sum up."""
    if of != "mean" and of not in SHARES:
        raise ArgumentError(f"of is {of!r}.", 'Give "mean", "median" or "p95".')


def summed_up(samples: Sequence[SampleRecord], of: Of) -> dict[str, Tensor]:
    """Sum up each statistic of a layer over the queries of some samples.

    `previous_mass` counts the queries that have a key before their own, `next_mass` those that have one behind it,
    `duplicate_mass` and `induction_mass` those whose token has occurred before, all others the queries that see a key.

    Args:
        samples: of one layer.
        of: "mean", "median" or "p95"; between two queries the two are weighed (as torch.quantile does).

    Returns: statistic -> (heads,) float64; 0 where no query counts.
    """
    refuse_unless_summary(of)
    if of == "mean":
        return {name: total / count.clamp(min=1) for name, (total, count) in sums(samples).items()}
    found = {}
    for name in _names(samples):
        pairs = [(each.per_query[name], counted(each, name)) for each in samples]
        value = torch.cat([value for value, _ in pairs], 1)  # (heads, queries)
        rows = torch.cat([rows for _, rows in pairs], 1)
        found[name] = torch.stack([_quantile(*each, share=SHARES[of]) for each in zip(value, rows, strict=True)])
    return found


def sums(samples: Sequence[SampleRecord]) -> dict[str, tuple[Tensor, Tensor]]:
    """Add up each statistic over the queries that count, and say how many those are: (heads,) float64 each."""
    found = {}
    for name in _names(samples):
        rows = [counted(each, name) for each in samples]
        totals = [
            each.per_query[name].double().masked_fill(~counts, 0).sum(-1)
            for each, counts in zip(samples, rows, strict=True)
        ]
        found[name] = (torch.stack(totals).sum(0), torch.stack([each.sum(-1) for each in rows]).sum(0).double())
    return found


def counted(sample: SampleRecord, name: str) -> Tensor:
    """Tell which queries count in the summary of a statistic: (heads, queries) bool."""
    sees = (sample.logsumexp.whole()[0] != -torch.inf).cpu()
    if name not in _HAVING:
        return sees
    position = torch.cat([torch.arange(each.num_queries) + each.query_start for each in sample.pieces])
    return sees & _HAVING[name](position, sample)


def _was_before(position: Tensor, sample: SampleRecord) -> Tensor:
    """Tell which queries' tokens have occurred before them: (queries,) bool."""
    ids = sample.text.ids
    if ids is None:
        return torch.ones_like(position, dtype=torch.bool)
    _, token = ids.unique(return_inverse=True)
    place = torch.arange(len(ids))
    first = torch.full((int(token.max()) + 1,), len(ids)).scatter_reduce(0, token, place, "amin")
    inside = (position >= 0) & (position < len(ids))
    return inside & (place > first[token])[position.clamp(0, len(ids) - 1)]


_HAVING: dict[str, Callable[[Tensor, SampleRecord], Tensor]] = {
    "previous_mass": lambda position, sample: position >= 1,
    "next_mass": lambda position, sample: position + 1 < sample.num_keys,
    "duplicate_mass": _was_before,
    "induction_mass": _was_before,
}


def added(total: Tensor, more: Tensor, start: int) -> Tensor:
    """Add what the keys of a later call receive: (heads, keys so far) and (heads, its keys)."""
    longer = torch.nn.functional.pad(total, (0, max(start + more.shape[1] - total.shape[1], 0)))
    longer[:, start : start + more.shape[1]] += more
    return longer


def _names(samples: Sequence[SampleRecord]) -> Iterator[str]:
    """Name the statistics that all samples have, and that are one number a query."""
    for name, value in samples[0].per_query.items():
        if value.is_floating_point() and all(name in each.per_query for each in samples):
            yield name


def _quantile(values: Tensor, rows: Tensor, *, share: float) -> Tensor:
    """Return the value below which a share of some rows lies; 0 of none, NaN where one of them is."""
    ordered = values[rows].double().sort().values
    if not ordered.numel() or bool(ordered[-1].isnan()):  # NaN is sorted behind all numbers
        return ordered[-1] if ordered.numel() else torch.zeros((), dtype=torch.float64)
    place = share * (ordered.numel() - 1)
    below = int(place)
    above = min(below + 1, ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)
