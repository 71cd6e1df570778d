"""The statistics of a layer's heads, their chance levels, and the kinds of the heads that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.kernels.parts import NEAR_REACH
from multihead.kinds import KINDS, MIXED, Kind
from multihead.probes.catalogue import (
    FIRST_MASS,
    MEAN_DISTANCE,
    NEAR_MASS,
    NEXT_MASS,
    PICTURE_STATISTICS,
    PREVIOUS_MASS,
    SELF_MASS,
    SEPARATOR_MASS,
    SPECIAL_MASS,
    statistic,
)
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
    if _has_bounds(samples):
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
    found = _add_later_statistics(one, one.measured(), marks)
    levels = chance_of_probes(
        one, [statistic(name, shown) for name in found], special=marks, known=known, progress=progress
    )
    if found.keys() & {each.name for each in PICTURE_STATISTICS}:
        levels |= chance_in_picture(one)
    return found, levels


# Earlier versions stored neither "near_mass" nor "separator_mass". A record that kept only statistics has no exact
# "near_mass", but a lower bound, by which heads are "local", as they were; no table shows it as the statistic.
_DEFAULT_BEFORE = {SELF_MASS.name, PREVIOUS_MASS.name, NEXT_MASS.name}  # which today are measured with "near_mass"


def _add_later_statistics(
    sample: SampleRecord, found: Mapping[str, MeasuredStatistic], special: Sequence[bool] | None
) -> dict[str, MeasuredStatistic]:
    """Add the statistics that an earlier version did not measure to those of a sample, if they can be computed.

    Args:
        sample: one text in one layer.
        found: name -> the measured statistics of the sample, (heads, queries) each.
        special: one flag per key, True for special tokens; None if unknown.
    """
    found = dict(found)
    if NEAR_MASS.name not in found and found.keys() >= _DEFAULT_BEFORE:
        try:
            near = _near_mass(sample) if sample.keeps_weights else _least_near_mass(sample, found)
        except MaskError:  # the mask's class is not defined in this process
            return found
        found[NEAR_MASS.name] = MeasuredStatistic.of_rows(near, sample.sees)
    if SEPARATOR_MASS.name not in found and SPECIAL_MASS.name in found and FIRST_MASS.name in found and special:
        values, counted, *_ = found[SPECIAL_MASS.name]
        separator = (values - found[FIRST_MASS.name].values * special[0]).clamp(min=0)
        found[SEPARATOR_MASS.name] = MeasuredStatistic(separator, counted)
    return found


def _has_bounds(samples: Iterable[SampleRecord]) -> bool:
    """Whether some sample has only a lower bound of what is near."""
    return any(NEAR_MASS.name not in one.per_query and not one.keeps_weights for one in samples)


def _near_mass(sample: SampleRecord) -> Tensor:
    """Return the weight on the keys near each query, from q and k: (heads, queries)."""
    return torch.stack([sample.at_offset(offset) for offset in range(-NEAR_REACH, NEAR_REACH + 1)]).sum(0)


def _least_near_mass(sample: SampleRecord, found: Mapping[str, MeasuredStatistic]) -> Tensor:
    """Return a lower bound of the weight on the keys near each query: (heads, queries) float64.

    It is the larger of self + previous + next and, by Markov's inequality, 1 - distance / 4, because a key that is more
    than 3 tokens away is at least 4 away.
    """
    bound = torch.stack([found[name].values.double() for name in sorted(_DEFAULT_BEFORE)]).sum(0)
    if MEAN_DISTANCE.name in found:
        by_distance = 1 - found[MEAN_DISTANCE.name].values.double() / (NEAR_REACH + 1)
        bound = bound.maximum(by_distance.masked_fill(~sample.sees, 0))  # without a key the distance is 0
    return bound.clamp(0, 1)
