"""The statistics of a layer's heads, their chance levels, the kinds that follow from them, and what the heads see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType

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
    PREVIOUS_MASS,
    SELF_MASS,
    SEPARATOR_MASS,
    SPECIAL_MASS,
    statistic,
)
from multihead.probes.probe import Statistic
from multihead.record.blocks import query_blocks
from multihead.record.chance import (
    ChanceCache,
    ChanceComparison,
    Progress,
    chance_of_probes,
    compare_with_chance,
    exceeds_chance,
    standard_error,
)
from multihead.record.repeated import RepeatedTokens
from multihead.record.sample import SampleRecord
from multihead.record.table import CHANCE_SUFFIX
from multihead.record.text_rows import MeasuredStatistic, summarise_samples


@dataclass(frozen=True, eq=False)
class Visibility:
    """The visible keys of the queries of one sample in one layer.

    Attributes:
        pattern: "full", "causal", "window", "causal window", or "other".
        before: number of tokens before the query in a window; 0 without a window.
        after: number of tokens after the query in a window; 0 without a window.
        hides_keys: whether any key is hidden from any query.
        blind_queries: number of queries without visible keys, in the head with the most such queries.
        mean_keys: (heads,) float64, mean number of visible keys of the queries that see a key.
        largest_entropy: (heads,) float64, nats: mean of ln(number of visible keys) over the queries that see a key: the
            entropy of a head with even weights.
    """

    pattern: str
    before: int
    after: int
    hides_keys: bool
    blind_queries: int
    mean_keys: Tensor
    largest_entropy: Tensor


def visibility_of(sample: SampleRecord) -> Visibility:
    """Describe the visible keys of a sample's queries, from intervals if possible, else from tiles of its mask."""
    try:
        count, start, stop = _count_seen_keys(sample)
    except MaskError:  # the mask's class is not defined in this process
        blind, unknown = _count_blind_queries(sample.sees), torch.full((sample.num_heads,), torch.nan).double()
        return Visibility(
            "other", 0, 0, hides_keys=True, blind_queries=blind, mean_keys=unknown, largest_entropy=unknown
        )
    pattern, before, after = _name_of_pattern(count, start, stop, sample.query_start, sample.num_keys)
    if pattern == "full" and all(segment.request.mask.sees_no_later_key for segment in sample.segments):
        pattern = "causal"  # the only queries are at the last key: one token, or a step of cached decoding
    count = count.expand(sample.num_heads, -1).double()
    sees = count > 0
    seeing = sees.sum(-1).double()
    per_query = torch.where(sees, count.clamp(min=1).log(), 0.0)
    return Visibility(
        pattern=pattern,
        before=before,
        after=after,
        hides_keys=bool((count < sample.num_keys).any()),
        blind_queries=_count_blind_queries(sees),
        mean_keys=count.sum(-1) / seeing.clamp(min=1),
        largest_entropy=per_query.sum(-1) / seeing.clamp(min=1),
    )


def _count_blind_queries(sees: Tensor) -> int:
    """Return the number of queries without visible keys in the head with most, given (heads, queries) bool."""
    return int((~sees).sum(-1).max()) if sees.numel() else 0


def _count_seen_keys(sample: SampleRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Return per query the number of visible keys, the first, and the index after the last: (heads or 1, queries)."""
    intervals = sample.intervals()
    if intervals is not None:
        start, stop = (each[None] for each in intervals)
        return stop - start, start, stop
    starts, stops, counts = [], [], []
    for block in query_blocks(sample.num_queries, sample.num_heads * sample.num_keys):
        seen = sample.visible(queries=block)
        seen = seen[None] if seen.dim() == 2 else seen  # (heads or 1, rows, keys)
        counts.append(seen.sum(-1))
        starts.append(seen.int().argmax(-1))
        stops.append(sample.num_keys - seen.flip(-1).int().argmax(-1))
    return torch.cat(counts, -1), torch.cat(starts, -1), torch.cat(stops, -1)


def _name_of_pattern(count: Tensor, start: Tensor, stop: Tensor, query_start: int, keys: int) -> tuple[str, int, int]:
    """Return `pattern`, `before` and `after` of a mask, given the keys [start, stop) of each query that sees a key."""
    seen = count > 0
    if not bool(seen.any()) or not bool((count == stop - start)[seen].all()):
        return "other", 0, 0
    position = (torch.arange(count.shape[-1]) + query_start).expand_as(count)[seen]
    start, stop = start[seen], stop[seen]
    if bool(((start == 0) & (stop == keys)).all()):
        return "full", 0, 0
    after, before = int((stop - 1 - position).max()), int((position - start).max())
    ends_as_window = after >= 0 and before >= 0 and bool((stop == (position + after + 1).clamp(max=keys)).all())
    starts_at_first_key = bool((start == 0).all())
    if not ends_as_window or not (starts_at_first_key or bool((start == (position - before).clamp(min=0)).all())):
        return "other", 0, 0
    if after > 0:
        return "window", before, after
    return ("causal", 0, 0) if starts_at_first_key else ("causal window", before, 0)


@dataclass(frozen=True, eq=False)
class LayerKinds:
    """The statistics of one layer's heads, their chance levels, and the kinds of the heads.

    Attributes:
        number: number of the layer.
        name: name of the layer.
        means: name of a statistic -> (heads,) float64, mean over the queries that count; the statistics on other texts,
            such as repeated random tokens, are added if measured.
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
        numbers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> LayerKinds:
        """Decide the kinds of a layer's heads.

        Args:
            means: name of a statistic -> (heads,) float64; those on other texts are added.
            evidence: name of a statistic -> its comparison with chance.
            number: number of the layer.
            name: name of the layer.
            heads: number of heads.
            cross_attention: whether this is cross-attention, for which some kinds are not defined.
            among: the kinds to choose from.
            repeated: attention of the heads on repeated random tokens; None if it was not measured.
            numbers: name of a statistic -> (texts, heads) float64, further numbers on other texts.
        """
        means = {**means, **{name: values.mean(0) for name, values in numbers.items()}}
        evidence = dict(evidence)
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
    numbers: Mapping[str, Tensor],
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
        numbers: name of a statistic -> (texts, heads) float64, further numbers on other texts.
        progress: called with (queries done, all queries) of a text while its chance levels are computed.
    """
    measure = partial(_statistics_and_chance, special=special, shown=statistics, known=known, progress=progress)
    cross_attention = any(one.cross_attention or one.query_start + one.num_queries != one.num_keys for one in samples)
    measured = [measure(one) for one in samples]
    means = summarise_samples([values for values, _ in measured], "mean")
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
        numbers=numbers,
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
