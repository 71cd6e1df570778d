"""The statistics of a layer's heads, their chance levels, and the kinds of the heads that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from multihead.kinds import KINDS, MIXED, Kind
from multihead.probes.catalogue import NEAR_MASS, PICTURE_STATISTICS, statistic
from multihead.probes.probe import Statistic
from multihead.record import summaries
from multihead.record.chance import (
    ChanceCache,
    ChanceComparison,
    Progress,
    chance_of_probes,
    compare_with_chance,
    exceeds_chance,
    standard_error,
)
from multihead.record.earlier import add_later_statistics, has_bounds
from multihead.record.notebook import CHANCE_SUFFIX
from multihead.record.picture_statistics import chance_in_picture
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord
from multihead.record.text_rows import MeasuredStatistic
from multihead.record.visibility import Visibility, visibility_of


@dataclass(frozen=True, eq=False)
class LayerKinds:
    """The statistics of one layer's heads, their chance levels, and the kinds of the heads.

    Attributes:
        number: number of the layer.
        name: name of the layer.
        means: name of a statistic -> (heads,) float64, mean over the queries that count; the statistics on repeated
            random tokens are added if measured.
        chance: name of a statistic -> (heads,) float64, chance level, for the statistics that have one.
        evidence: name of a statistic -> mean, chance level and standard error, for the statistics in `chance`.
        kinds: names of each head's kinds, the most specific first.
        cross_attention: whether the keys come from another text than the queries (cross-attention).
        repeated: the attention on repeated random tokens; None if it was not measured.
    """

    number: int
    name: str
    means: dict[str, Tensor]
    chance: dict[str, Tensor]
    evidence: dict[str, ChanceComparison]
    kinds: tuple[tuple[str, ...], ...]
    cross_attention: bool
    repeated: RepeatedTokens | None = field(default=None, kw_only=True)

    @staticmethod
    def from_evidence(
        means: Mapping[str, Tensor],
        evidence: Mapping[str, ChanceComparison],
        *,
        number: int,
        name: str,
        heads: int,
        cross_attention: bool,
        among: Sequence[Kind],
        repeated: RepeatedTokens | None = None,
    ) -> LayerKinds:
        """Decide the kinds of a layer's heads.

        Args:
            means: name of a statistic -> (heads,) float64; those on repeated random tokens are added.
            evidence: name of a statistic -> its comparison with chance.
            number: number of the layer.
            name: name of the layer.
            heads: number of heads.
            cross_attention: whether this is cross-attention, for which some kinds are not defined.
            among: the kinds to choose from.
            repeated: attention of the heads on repeated random tokens; None if it was not measured.
        """
        means, evidence = dict(means), dict(evidence)
        if repeated is not None:
            means |= repeated.means()
            evidence |= {
                name: ChanceComparison(
                    means[name], repeated.chance[name], standard_error(each), torch.full_like(each[0], len(each))
                )
                for name, each in repeated.shares.items()
                if name in repeated.chance
            }
        kinds = kinds_of_heads(evidence, heads=heads, cross_attention=cross_attention, among=among)
        chances = {name: evidence[name].chance for name in means if name in evidence}
        return LayerKinds(number, name, means, chances, evidence, kinds, cross_attention, repeated=repeated)

    def decides(self, kind: Kind) -> bool:
        """Return whether it was measured which heads of the layer have a kind."""
        return kind.statistic in self.evidence and not (kind.self_attention_only and self.cross_attention)

    def row(self, head: int) -> dict[str, str | float]:
        """Return the table columns of a head besides its means: its kinds, and the chance levels of its statistics.

        `kind` is a word such as "first+local", and the chance level of `previous_mass` is `previous_mass_chance`.
        """
        chances = {f"{name}{CHANCE_SUFFIX}": float(values[head]) for name, values in self.chance.items()}
        return {"kind": "+".join(self.kinds[head]), **chances}


@dataclass(frozen=True, eq=False)
class LayerProfile(LayerKinds):
    """The statistics, kinds and mask of one layer of a record, for the report and the terminal.

    Attributes:
        visibility: the visible keys of the queries.
    """

    visibility: Visibility


def evidence_of_kind(kind: Kind, evidence: Mapping[str, ChanceComparison]) -> ChanceComparison | None:
    """Return the numbers that decide whether heads have a kind; None if the statistic of the kind was not measured.

    For a kind with `of_largest` all numbers are divided by the chance level, so `chance` is 1.
    """
    found = evidence.get(kind.statistic)
    if found is None or kind.of_largest is None:
        return found
    largest = found.chance.clamp(min=1e-12)
    return ChanceComparison(
        found.mean / largest, (found.chance > 0).double(), found.standard_error / largest, found.num_observations
    )


def heads_with_kind(kind: Kind, found: ChanceComparison) -> Tensor:
    """Return which heads have a kind: (heads,) bool."""
    named = torch.ones_like(found.mean, dtype=torch.bool)
    if kind.of_largest is not None:
        named = (found.chance > 0) & (found.mean >= kind.of_largest)
    if kind.at_least is not None:
        named = named & (found.mean >= kind.at_least)
    if kind.above_chance is not None:
        named = named & exceeds_chance(found.mean - found.chance, found.standard_error, kind.above_chance)
    return named


def kinds_of_heads(
    evidence: Mapping[str, ChanceComparison],
    *,
    heads: int,
    cross_attention: bool = False,
    among: Sequence[Kind] = KINDS,
) -> tuple[tuple[str, ...], ...]:
    """Return the names of the kinds of each head of a layer, the most specific first.

    Shares must exceed chance, so a head with even weights has only the kind "broad", however short the text is.

    Args:
        evidence: name of a statistic -> its evidence; kinds whose statistic is missing are left out.
        heads: number of heads.
        cross_attention: whether this is cross-attention, for which some kinds are not defined.
        among: the kinds to choose from.

    >>> def found(mean, chance):
    ...     return ChanceComparison(
    ...         torch.tensor(mean), torch.full((2,), chance), torch.full((2,), 0.01), torch.full((2,), 9)
    ...     )
    >>> kinds_of_heads({"entropy": found([0.2, 4.1], 4.2), "previous_mass": found([0.91, 0.02], 0.02)}, heads=2)
    (('previous',), ('broad',))
    """
    measured = {
        kind: found
        for kind in among
        if not (cross_attention and kind.self_attention_only)
        and (found := evidence_of_kind(kind, evidence)) is not None
    }
    which = {kind: heads_with_kind(kind, found) for kind, found in measured.items()}
    named = []
    for head in range(heads):
        of_head = [kind for kind, heads_reached in which.items() if heads_reached[head]]
        hidden = {name for kind in of_head for name in kind.hides}
        shown = [kind for kind in of_head if kind.name not in hidden]
        shown.sort(key=lambda kind: (kind.rank, -float(measured[kind].mean[head])))
        named.append(tuple(kind.name for kind in shown) or (MIXED.name,))
    return tuple(named)


def profile_of_samples(
    samples: Sequence[SampleRecord],
    *,
    number: int,
    name: str,
    special: Sequence[bool] | None,
    statistics: Mapping[str, Statistic],
    known: ChanceCache,
    among: Sequence[Kind],
    repeated: RepeatedTokens | None,
    progress: Progress | None,
) -> LayerProfile:
    """Compute the means, chance levels, kinds and mask of one layer from some of its samples.

    Args:
        samples: at least one sample of the layer.
        number: number of the layer.
        name: name of the layer.
        special: one flag per token, True for special tokens; None takes the flags of each text.
        statistics: name -> statistic, for the statistics that are not built in.
        known: chance levels of samples with the same visible keys, which are added.
        among: the kinds to choose from.
        repeated: attention of the heads on repeated random tokens; None if it was not measured.
        progress: called with (queries done, all queries) of a text while its chance levels are computed.
    """
    measure = partial(_statistics_and_chance, special=special, shown=statistics, known=known, progress=progress)
    cross_attention = any(one.cross_attention or one.query_start + one.num_queries != one.num_keys for one in samples)
    measured = [measure(one) for one in samples]
    means = summaries.summarise_samples([values for values, _ in measured], "mean")
    found = {
        name: compare_with_chance(
            [values[name].values for values, _ in measured],
            [levels[name] for _, levels in measured],
            [values[name].counted for values, _ in measured],
        )
        for name in means
        if all(name in levels for _, levels in measured)
    }
    if has_bounds(samples):
        means.pop(NEAR_MASS.name, None)
    whole = LayerKinds.from_evidence(
        means,
        found,
        number=number,
        name=name,
        heads=samples[0].num_heads,
        cross_attention=cross_attention,
        among=among,
        repeated=repeated,
    )
    return LayerProfile(**vars(whole), visibility=visibility_of(samples[0]))


def _statistics_and_chance(
    one: SampleRecord,
    *,
    special: Sequence[bool] | None,
    shown: Mapping[str, Statistic],
    known: ChanceCache,
    progress: Progress | None,
) -> tuple[dict[str, MeasuredStatistic], dict[str, Tensor]]:
    """Return the statistics of a sample, and the chance level of each."""
    marks = one.text.special if special is None else special
    marks = marks if marks is not None and len(marks) == one.num_keys else None
    found = add_later_statistics(one, one.measured(), marks)
    levels = chance_of_probes(
        one, [statistic(name, shown) for name in found], special=marks, known=known, progress=progress
    )
    if found.keys() & {each.name for each in PICTURE_STATISTICS}:
        levels |= chance_in_picture(one)
    return found, levels
