"""Cover the visible (query, key) pairs with few rectangles, each computed by one call of a fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from multihead.masks.base import KeyBounds

RectangleKind = Literal["full", "causal", "partial"]
IntervalRule = Literal["constant", "growing", "any"]
# Codes of how the key interval changes from a query to the next, and the rule that each code belongs to.
_INTERVAL_STAYS, _INTERVAL_GROWS, _INTERVAL_SLIDES, _INTERVAL_JUMPS = range(4)
_INTERVAL_RULE_BY_CODE: tuple[IntervalRule, ...] = ("constant", "growing", "any", "any")

# Rows per block if the interval differs in each row (a window): small blocks compute fewer hidden scores, large blocks
# need fewer calls. 128 was the fastest of 64, 128 and 256 at 8,192 keys and a window of 256.
BLOCK_ROWS = 128
# The fixed cost of a fused call (about 15 microseconds), as the number of scores of one head computed in that time.
CALL_COST_IN_CELLS = 1024
# Cost of a masked score relative to an unmasked one; a mask is built and read for it.
COST_OF_MASKED_CELL = 1.5


@dataclass(frozen=True)
class Rectangle:
    """A rectangle of queries x keys, computed by one call of a fused kernel.

    Attributes:
        sample: index of the sample, or None for all samples.
        rows: first query and one past the last.
        columns: first key and one past the last.
        kind: "full": all its keys are visible; "causal": row i sees the first i + 1 columns; "partial": it needs a
            mask.
    """

    sample: int | None
    rows: tuple[int, int]
    columns: tuple[int, int]
    kind: RectangleKind

    @property
    def num_cells(self) -> int:
        """The number of scores in the rectangle, per head and sample."""
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])


@dataclass(frozen=True)
class _RowGroup:
    """Consecutive queries whose key intervals are constant, grow by one key per query, or follow no rule ("any").

    `rows` and `columns` are as in `Rectangle`; `first_row_stop` is one past the last key that the first query sees.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    interval_rule: IntervalRule
    first_row_stop: int

    @property
    def cost(self) -> float:
        """The estimated cost of computing the group in one call, in scores of one head."""
        height, width = self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]
        if self.interval_rule == "growing":
            return CALL_COST_IN_CELLS + height * (width - height / 2)
        return CALL_COST_IN_CELLS + height * width * (COST_OF_MASKED_CELL if self.interval_rule == "any" else 1)


# Key bounds (compared by identity) -> `biased` -> rectangles.
_RECTANGLES_OF_BOUNDS: WeakKeyDictionary[KeyBounds, dict[bool, tuple[Rectangle, ...]]] = WeakKeyDictionary()


def cover_with_rectangles(bounds: KeyBounds, *, biased: bool = False) -> tuple[Rectangle, ...]:
    """Cover the key bounds with rectangles; results of rectangles with the same queries are merged by their logsumexp.

    If a bias is added to the scores (`biased`), every rectangle needs a mask.

    >>> from multihead import masks
    >>> from multihead.kernels.plan.bounds import key_bounds
    >>> for rectangle in cover_with_rectangles(key_bounds(masks.Documents((300, 200)), queries=500, keys=500)):
    ...     print(rectangle)
    Rectangle(sample=None, rows=(0, 300), columns=(0, 300), kind='full')
    Rectangle(sample=None, rows=(300, 500), columns=(300, 500), kind='full')
    """
    known = _RECTANGLES_OF_BOUNDS.setdefault(bounds, {})
    if biased not in known:
        known[biased] = _cover_bounds(bounds, biased=biased)
    return known[biased]


def _cover_bounds(bounds: KeyBounds, *, biased: bool) -> tuple[Rectangle, ...]:
    covered: list[Rectangle] = []
    for sample in range(bounds.start.shape[0]):
        owner = None if bounds.is_shared_by_samples else sample
        for group in _merge_cheap_groups(_group_rows(bounds.start[sample], bounds.stop[sample])):
            # With a remainder or a bias every score is masked: blocks of rows keep the mask small.
            if bounds.remainder is not None or biased:
                covered += _masked_blocks_of_group(group, owner)
            else:
                covered += _rectangles_of_group(group, owner)
    return tuple(covered)


def _group_rows(start: Tensor, stop: Tensor) -> list[_RowGroup]:
    """Split the queries of one sample into groups whose intervals [start, stop), (queries,) each, follow one rule."""
    changes, lengths = torch.unique_consecutive(_changes_after_queries(start, stop), return_counts=True)
    first_keys, stops = start.tolist(), stop.tolist()
    groups: list[_RowGroup] = []
    row = 0  # the first query that is in no group yet
    for change, run_end in zip(changes.tolist(), lengths.cumsum(0).tolist(), strict=True):
        if row >= run_end:
            continue  # the last group includes the only query before this change
        end = run_end if change == _INTERVAL_JUMPS else run_end + 1  # one past the last query that follows the rule
        height = {_INTERVAL_JUMPS: 1, _INTERVAL_SLIDES: BLOCK_ROWS}.get(change, end - row)
        for first in range(row, end, height):
            last = min(first + height, end) - 1
            columns = (min(first_keys[first], first_keys[last]), max(stops[first], stops[last]))
            name: IntervalRule = "constant" if first == last else _INTERVAL_RULE_BY_CODE[change]
            if columns[0] < columns[1]:
                groups.append(_RowGroup((first, last + 1), columns, name, stops[first]))
        row = end
    return groups


def _changes_after_queries(start: Tensor, stop: Tensor) -> Tensor:
    """Return how the key interval changes after each query, as _INTERVAL_STAYS etc.: (queries,); the last one jumps."""
    changes = torch.full_like(start, _INTERVAL_JUMPS)
    start_step, stop_step, steps = start.diff(), stop.diff(), changes[:-1]
    steps[(start_step == 0) & (stop_step == 0)] = _INTERVAL_STAYS
    steps[(start_step == 0) & (stop_step == 1)] = _INTERVAL_GROWS
    steps[(start_step == 1) & ((stop_step == 0) | (stop_step == 1))] = _INTERVAL_SLIDES
    empty = start >= stop
    steps[empty[1:] != empty[:-1]] = _INTERVAL_JUMPS
    return changes


def _merge_cheap_groups(groups: list[_RowGroup]) -> list[_RowGroup]:
    """Merge adjacent groups of queries if one masked call over both costs less than two calls."""
    kept: list[_RowGroup] = []
    for group in groups:
        newest = group
        while kept and kept[-1].rows[1] == newest.rows[0]:
            last = kept[-1]
            columns = (min(last.columns[0], newest.columns[0]), max(last.columns[1], newest.columns[1]))
            both = _RowGroup((last.rows[0], newest.rows[1]), columns, "any", last.first_row_stop)
            if both.cost > last.cost + newest.cost:
                break
            kept.pop()
            newest = both
        kept.append(newest)
    return kept


def _rectangles_of_group(group: _RowGroup, sample: int | None) -> list[Rectangle]:
    """Return the rectangles that cover a group: one, or a full and a causal one if the intervals grow."""
    if group.interval_rule != "growing":
        return [
            Rectangle(sample, group.rows, group.columns, "full" if group.interval_rule == "constant" else "partial")
        ]
    # Rows that see s, s + 1, ... keys: a full rectangle of the keys before the diagonal, and a causal triangle.
    first, diagonal = group.columns[0], group.first_row_stop - 1
    parts = [Rectangle(sample, group.rows, (diagonal, group.columns[1]), "causal")]
    if diagonal > first:
        parts.append(Rectangle(sample, group.rows, (first, diagonal), "full"))
    return parts


def _masked_blocks_of_group(group: _RowGroup, sample: int | None) -> list[Rectangle]:
    """Split a group that needs a mask into blocks of rows, each with the keys that its rows may see."""
    blocks = []
    for row in range(group.rows[0], group.rows[1], BLOCK_ROWS):
        last = min(row + BLOCK_ROWS, group.rows[1])
        stop = group.columns[1]
        if group.interval_rule == "growing":
            stop = group.first_row_stop + last - 1 - group.rows[0]
        blocks.append(Rectangle(sample, (row, last), (group.columns[0], stop), "partial"))
    return blocks
