"""Statistics of drawn numbers, as rows of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from multihead.record.running_summary import RunningSummary
from multihead.record.text_rows import MeasuredRows, TextRows

NO_LEVELS: Mapping[str, Tensor] = MappingProxyType({})


@dataclass(frozen=True, eq=False)
class DrawnRows(MeasuredRows):
    """Rows of which it is given which count, where a record finds it by the rule of each statistic."""

    drawn: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def of_queries(self) -> dict[str, tuple[Tensor, Tensor]]:  # type: ignore[override]
        return {name: (self.values[name], counted) for name, counted in self.drawn.items()}


def drawn_rows(
    drawn: Mapping[str, tuple[Tensor, Tensor]],
    lengths: Sequence[int] | None = None,
    chance: Mapping[str, Tensor] = NO_LEVELS,
    others: Mapping[str, Tensor] = NO_LEVELS,
) -> MeasuredRows:
    """Rows of texts with these numbers of queries, by default one text.

    A statistic has its values and which of them count, (heads, rows) each; `others` are values without a mean.
    """
    (first, _), *_ = drawn.values()
    sizes = torch.tensor([first.shape[1]] if lengths is None else lengths, dtype=torch.int64)
    ends = torch.cat([torch.tensor([0]), sizes.cumsum(0)])
    positions = torch.cat([torch.arange(0), *map(torch.arange, sizes.tolist())])
    rows = TextRows(ends, positions, sizes.repeat_interleave(sizes))
    values = {name: each for name, (each, _) in drawn.items()} | dict(others)
    sees = torch.ones_like(first, dtype=torch.bool)
    counts = {name: counted for name, (_, counted) in drawn.items()}
    return DrawnRows(rows, sees, values, chance, {}, counts)


def add_to_summary(
    summary: RunningSummary, drawn: Mapping[str, tuple[Tensor, Tensor]], lengths: Sequence[int] | None = None
) -> None:
    """Add such rows to a summary, and to no others that wait in it, which would count by the rule of the statistic."""
    measured = drawn_rows(drawn, lengths)
    summary.add(measured, summary.begin_texts(measured.rows.num_texts))
    assert set(summary.names) >= set(drawn)
