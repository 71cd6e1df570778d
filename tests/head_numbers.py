"""A small model with the effects of its heads, and other numbers of heads that `Record.add` takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.interventions.importance import Importance
from multihead.observation.record import Record
from multihead.probes.head_statistic import HeadStatistic, HeadsTogether
from multihead.record.head_numbers import HeadColumn
from multihead.record.texts import Text
from tests.families import family

TOGETHER = HeadsTogether(((1, 3), (0, 2)), (0.5, 0.7, 0.6), (0.25, 0.35, 0.3), (0.1, 0.3))


@cache
def found(method: Any = "exact", *, texts: int = 12, more_is_better: bool | None = False) -> Importance:
    """The effect of each head of a model of two layers with four heads on a measure of its own."""
    ids = torch.randint(3, 100, (texts, 8), generator=torch.Generator().manual_seed(0))

    def surprise(output: Any, batch: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(output.logits[:, :-1].mT, batch[:, 1:], reduction="none").mean(1)

    return mh.importance(
        family("llama"), [ids], mh.Measure(surprise, "surprise", "nats", more_is_better), method=method
    )


def record() -> Record:
    """The same model on one text."""
    with torch.no_grad(), mh.observe(model := family("llama")) as seen:
        model(torch.arange(3, 11)[None])
    seen.set_text(Text(None, [f"w{place}" for place in range(8)], [False] * 8))
    return seen


def add_together(seen: Record, effects: Importance) -> None:
    """Add what two heads do together."""
    seen.statistics[effects.statistic.name] = replace(effects.statistic, together=TOGETHER)


@dataclass(frozen=True)
class Numbers:
    """A number of each head of some layers, (texts, heads) each."""

    statistic: HeadStatistic
    of_layers: Mapping[str, Tensor]

    def columns(self) -> list[HeadColumn]:
        return [HeadColumn(self.statistic, self.of_layers)]
