"""Chance: what a head that spreads its attention evenly over its visible keys scores, and how sure a difference is.

Chance is computed exactly from the mask and the positions, per query, so that a mean over queries compares like with
like: under a causal mask the second query puts 50 % on the previous token by chance, and the hundredth 1 %.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from multihead.analysis.visibility import LOCAL_REACH, query_blocks
from multihead.errors import MaskError
from multihead.record.sample import SampleRecord

BLOCKS = 8
"""Blocks of consecutive queries into which one text is divided to estimate a standard error."""

ERRORS = 3
"""How many standard errors a difference from chance must exceed to count."""

FEWEST = 4
"""Fewer texts, or fewer blocks, give no standard error: it would be infinite."""

NEAR = "near_mass"
"""The share of attention within `visibility.LOCAL_REACH` tokens of the query; it is no statistic of a record."""

_OFFSETS = {"self_mass": 0, "previous_mass": -1, "next_mass": 1}
_SHIFTS = {"duplicate_mass": 0, "induction_mass": 1}
_OFFSET = re.compile(r"offset_(minus|plus)_([0-9]{1,9})_mass", re.ASCII)
_FIRST = re.compile(r"first_([0-9]{1,9})_mass", re.ASCII)


@dataclass(frozen=True, eq=False)
class Evidence:
    """How a statistic of some heads compares with chance.

    Attributes:
        mean: (heads,) float64, the mean over the queries that count.
        chance: (heads,) float64, what an even spread over the visible keys gives, the mean over the same queries.
        error: (heads,) float64, the standard error of mean - chance; inf where there is too little to estimate it.
    """

    mean: Tensor
    chance: Tensor
    error: Tensor


def chance(sample: SampleRecord, names: Iterable[str], *, special: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """Compute what an even spread over the visible keys gives, for the statistics that have such a number.

    Args:
        sample: one text in one layer.
        names: statistics; those without a level of chance, such as norms, are left out.
        special: one flag per key, True for special tokens; without it "special_mass" is left out.

    Returns:
        statistic -> (heads or 1, queries) float64; 0 where a query sees no key. Nothing if the mask is unknown.
    """
    try:
        return _chance(sample, tuple(names), special)
    except MaskError:  # the class of the mask is not defined here
        return {}


def evidence(values: Sequence[Tensor], expected: Sequence[Tensor], counted: Sequence[Tensor]) -> Evidence:
    """Compare a statistic with chance, over one text or several.

    The standard error is that of the mean over texts if there are at least `FEWEST`. Otherwise each text is divided
    into `BLOCKS` blocks of consecutive queries, because neighbouring queries resemble each other and are no
    independent observations, and it is that of the mean over blocks.

    Args:
        values: the statistic per query, (heads, queries), one tensor per text.
        expected: the chance of each, (heads or 1, queries).
        counted: which queries count, (heads, queries) bool.
    """
    blocks = 1 if len(values) >= FEWEST else BLOCKS
    totals, levels, numbers, units, full = [], [], [], [], []
    for value, even, counts in zip(values, expected, counted, strict=True):
        level = even.double().expand_as(value).masked_fill(~counts, 0)
        known = value.double().masked_fill(~counts, 0)
        totals.append(known.sum(-1))
        levels.append(level.sum(-1))
        numbers.append(counts.sum(-1))
        # Each head's counted queries are numbered, and every block gets the same number of them, or one more.
        number = numbers[-1][:, None]
        place = ((counts.cumsum(-1) - 1).clamp(min=0) * number.clamp(max=blocks)) // number.clamp(min=1)
        sums = known.new_zeros(len(value), blocks).scatter_add_(1, place, known - level)
        sizes = known.new_zeros(len(value), blocks).scatter_add_(1, place, counts.double())
        units.append(sums / sizes.clamp(min=1))
        full.append(sizes > 0)
    number = torch.stack(numbers).sum(0).clamp(min=1)
    mean, level = torch.stack(totals).sum(0) / number, torch.stack(levels).sum(0) / number
    return Evidence(mean, level, _standard_error(torch.cat(units, 1), torch.cat(full, 1)))


def standard_error(units: Tensor) -> Tensor:
    """Return the standard error of the mean of some independent numbers: (heads,) of (numbers, heads).

    >>> standard_error(torch.tensor([[1.0], [2.0], [3.0], [2.0]])), standard_error(torch.zeros(3, 1))
    (tensor([0.4082]), tensor([inf]))
    """
    return _standard_error(units.mT, torch.ones_like(units.mT, dtype=torch.bool))


def stands_out(excess: Tensor, error: Tensor, least: float) -> Tensor:
    """Return where a difference from chance is at least `least` and more than `ERRORS` standard errors: bool.

    >>> stands_out(torch.tensor([0.5, 0.5, 0.1]), torch.tensor([0.1, 0.2, 0.01]), 0.35)
    tensor([ True, False, False])
    """
    return (excess >= least) & (excess > ERRORS * error)


def _standard_error(units: Tensor, full: Tensor) -> Tensor:
    """Return the standard error of the mean of the units that are full, (heads, units) each."""
    count = full.sum(-1)
    mean = units.masked_fill(~full, 0).sum(-1) / count.clamp(min=1)
    squares = (units - mean[:, None]).square().masked_fill(~full, 0).sum(-1)
    error = (squares / ((count - 1) * count).clamp(min=1)).sqrt()
    return error.masked_fill(count < FEWEST, torch.inf)


def _chance(sample: SampleRecord, names: tuple[str, ...], special: Sequence[bool] | None) -> dict[str, Tensor]:
    intervals = sample.intervals()
    ids = sample.text.ids
    flags = None if special is None or len(special) != sample.num_keys else torch.tensor(list(special))
    if intervals is not None:
        start, stop = intervals
        return _of_part(_Intervals(sample.positions, start, stop, ids, flags), _first_key(start, stop), names)
    parts = []
    heads = sample.num_heads
    blocks = list(query_blocks(sample.num_queries, heads * sample.num_keys))
    shown = (_cells(sample.visible(queries=block)).any(-2).any(0) for block in blocks)
    first = torch.stack(list(shown)).any(0).int().argmax() if blocks else torch.zeros((), dtype=torch.int64)
    for block in blocks:
        seen = _cells(sample.visible(queries=block))
        parts.append(_of_part(_Cells(sample.positions[block], seen, ids, flags), first, names))
    return {name: torch.cat([part[name] for part in parts], -1) for name in (parts[0] if parts else ())}


def _cells(seen: Tensor) -> Tensor:
    return seen[None] if seen.dim() == 2 else seen  # (heads or 1, rows, keys)


def _first_key(start: Tensor, stop: Tensor) -> Tensor:
    """Return the first key that any query may see, see `probes.catalogue.first_keys_mass`."""
    seeing = start[stop > start]
    return seeing.min() if seeing.numel() else torch.zeros((), dtype=torch.int64)


class _Keys(Protocol):
    """What some queries see: how many keys in all, (heads or 1, rows), and how many of each sort."""

    positions: Tensor
    total: Tensor

    def within(self, begin: Tensor, end: Tensor) -> Tensor:
        """Count the keys from `begin` up to `end`, (rows,) each."""

    def special(self) -> Tensor | None:
        """Count the special ones; None if they are not known."""

    def copies(self, shift: int) -> Tensor | None:
        """Count those `shift` places after an earlier copy of the query's token; None without token ids."""

    def distance(self) -> Tensor:
        """Sum the distances between the query and its keys."""


def _of_part(keys: _Keys, first: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the chance of each statistic, for some queries: (heads or 1, rows)."""
    found: dict[str, Tensor] = {}
    for name in names:
        count = _counted(keys, first, name)
        if count is not None:
            found[name] = count.double() / keys.total.clamp(min=1)
    total = keys.total.double()
    of_all = {"effective_keys": total, "entropy": total.clamp(min=1).log()}
    return found | {name: level for name, level in of_all.items() if name in names}


def _counted(keys: _Keys, first: Tensor, name: str) -> Tensor | None:
    """Return how many of the visible keys a share counts: (heads or 1, rows); None if it has no level of chance."""
    here = keys.positions
    offset, first_keys = _offset_of(name), _first_keys_of(name)
    if offset is not None:
        return keys.within(here + offset, here + offset + 1)
    if first_keys is not None:
        begin = first.expand_as(here)
        return keys.within(begin, begin + first_keys)
    if name == NEAR:
        return keys.within(here - LOCAL_REACH, here + LOCAL_REACH + 1)
    if name == "special_mass":
        return keys.special()
    if name in _SHIFTS:
        return keys.copies(_SHIFTS[name])
    if name == "largest_weight":
        return keys.total.clamp(max=1)
    if name == "mean_distance":
        return keys.distance()
    return None


def _offset_of(name: str) -> int | None:
    """Return the offset whose weight a statistic measures, see `probes.catalogue.offset_mass`."""
    made = _OFFSET.fullmatch(name)
    if made is None:
        return _OFFSETS.get(name)
    return int(made[2]) if made[1] == "plus" else -int(made[2])


def _first_keys_of(name: str) -> int | None:
    """Return how many first keys a statistic counts, see `probes.catalogue.first_keys_mass`."""
    made = _FIRST.fullmatch(name)
    if made is None:
        return 1 if name == "first_mass" else None
    return int(made[1])


class _Intervals:
    """Queries that see one interval of keys each: counted without looking at the cells."""

    def __init__(
        self, positions: Tensor, start: Tensor, stop: Tensor, ids: Tensor | None, special: Tensor | None
    ) -> None:
        self.positions, self.start, self.stop = positions, start, torch.maximum(start, stop)
        self.total = (self.stop - self.start)[None]
        self.ids, self.flags = ids, special

    def within(self, begin: Tensor, end: Tensor) -> Tensor:
        return (torch.minimum(end, self.stop) - torch.maximum(begin, self.start)).clamp(min=0)[None]

    def special(self) -> Tensor | None:
        if self.flags is None:
            return None
        sums = torch.nn.functional.pad(self.flags.long().cumsum(0), (1, 0))
        return (sums[self.stop] - sums[self.start])[None]

    def copies(self, shift: int) -> Tensor | None:
        if self.ids is None:
            return None
        length = len(self.ids)
        inside = (self.positions >= 0) & (self.positions < length)
        _, token = self.ids.unique(return_inverse=True)
        # Token t at position p is the number t * length + p: its copies in a range of keys lie between two of them.
        places = (token * length + torch.arange(length)).sort().values
        base = token[self.positions.clamp(0, max(length - 1, 0))] * length if length else self.positions
        begin = (self.start - shift).clamp(0, length)
        end = torch.minimum(self.stop - shift, self.positions).clamp(0, length)
        count = torch.searchsorted(places, base + torch.maximum(begin, end)) - torch.searchsorted(places, base + begin)
        return count.masked_fill(~inside, 0)[None]

    def distance(self) -> Tensor:
        def up_to(end: Tensor) -> Tensor:  # 1 + 2 + ... + end
            return end * (end + 1) // 2

        before = up_to((self.positions - self.start).clamp(min=0)) - up_to((self.positions - self.stop).clamp(min=0))
        # Keys from the query's own position on: their distances are 0, 1, 2, ...
        after = up_to((self.stop - 1 - self.positions).clamp(min=0)) - up_to(
            (self.start - 1 - self.positions).clamp(min=0)
        )
        return (before + after)[None]


class _Cells:
    """Queries that see any keys: (heads or 1, rows, keys) bool."""

    def __init__(self, positions: Tensor, seen: Tensor, ids: Tensor | None, special: Tensor | None) -> None:
        self.positions, self.seen, self.ids, self.flags = positions, seen, ids, special
        self.total = seen.sum(-1)
        self.keys = torch.arange(seen.shape[-1])

    def within(self, begin: Tensor, end: Tensor) -> Tensor:
        chosen = (self.keys >= begin[:, None]) & (self.keys < end[:, None])
        return (self.seen & chosen).sum(-1)

    def special(self) -> Tensor | None:
        return None if self.flags is None else (self.seen & self.flags).sum(-1)

    def copies(self, shift: int) -> Tensor | None:
        if self.ids is None:
            return None
        inside = (self.positions >= 0) & (self.positions < len(self.ids))
        own = self.ids[self.positions.clamp(0, max(len(self.ids) - 1, 0))]
        alike = (self.ids == own[:, None]) & (self.keys < self.positions[:, None]) & inside[:, None]
        moved = torch.nn.functional.pad(alike, (shift, 0))[:, : len(self.keys)]
        return (self.seen & moved).sum(-1)

    def distance(self) -> Tensor:
        return (self.seen * (self.keys - self.positions[:, None]).abs()).sum(-1)
