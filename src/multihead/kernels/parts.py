"""The per-query and per-key statistics ("parts") that kernels measure, and from which probes are computed.

A part is a sum over a row of attention weights, one looked-up weight, or a weighted column. This module defines all
parts, as values that say what is to be known of a part: its axes, whether it numbers a token, what it needs, and how
measurements on disjoint keys combine. Kernels list the parts that they measure, `probes/streaming.py` and
`probes/lookups.py` measure the others, and each probe names the parts that it needs. Several probes share one pass over
the attention weights, and a user-defined probe is as cheap as a built-in one.

The index of a token counts from the first token of its text. A kernel returns indices into the keys of its call; the
code that slices a text out of the call converts them (`number_in_text`), before a probe reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from multihead.errors import ArgumentError

PartName: TypeAlias = "str | tuple[str, int | str]"
"""The name of a part (a statistic): a key of `PARTS`, or (key of `PART_FAMILIES`, argument): ("offset_mass", -1)."""

PartAxes = Literal["queries", "keys", "map"]
PartInput = Literal["special_keys", "ids", "sets", "places", "output_weight", "values", "sinks"]


@dataclass(frozen=True, eq=False)
class KeySubset:
    """Parts measured on a subset of the keys, (batch, heads, queries) float64 each.

    Attributes:
        parts: name -> values, in which the weights on all keys so far sum to 1.
        share: the weight of the subset, from 0 to 1.
        rounding: the relative error of the weights.
    """

    parts: Mapping[PartName, Tensor]
    share: Tensor
    rounding: Tensor


@dataclass(frozen=True)
class Combination:
    """How the values of a part on two disjoint subsets of the keys combine to its value on both.

    Attributes:
        scale: function of the values on a subset whose weights sum to 1, and of ln of its share among more keys;
            returns the values in which the weights on all these keys sum to 1.
        join: function of the part's name and of both subsets after `scale`.
        companion: name of another part that `join` reads, so that it is measured too.
    """

    scale: Callable[[Tensor, Tensor], Tensor]
    join: Callable[[PartName, KeySubset, KeySubset], Tensor]
    companion: PartName | None = None


@dataclass(frozen=True)
class Part:
    """A statistic that kernels measure.

    Attributes:
        name: key in results.
        about: definition in one line.
        axes: what there is per head: a number per query, a number per key (a sum over the queries), or a map.
        numbers_a_token: whether the values are numbers of tokens.
        is_integer: whether the values are int64, with -1 for none, instead of floating-point.
        needs: inputs besides q and k.
        uses_positions: whether the values depend on the positions of the queries among the keys.
        uses_first_key: whether the values depend on which key is the first of the text.
        combination: how measurements on disjoint keys combine; None if all keys must be measured at once.
    """

    name: PartName
    about: str
    axes: PartAxes = "queries"
    numbers_a_token: bool = False
    is_integer: bool = False
    needs: tuple[PartInput, ...] = ()
    uses_positions: bool = False
    uses_first_key: bool = False
    combination: Combination | None = None

    @property
    def compares_tokens(self) -> bool:
        """Whether tokens of keys are compared with that of the query, so that they must be of one text."""
        return "ids" in self.needs


@dataclass(frozen=True)
class PartFamily:
    """Parts that differ by an argument, such as an offset.

    Attributes:
        argument: type of the argument.
        of_any: a part whose name is that of the family; the others differ in `name` alone.
    """

    argument: type
    of_any: Part

    @property
    def name(self) -> str:
        """First item of the names of its parts."""
        return str(self.of_any.name)

    def __call__(self, argument: int | str) -> Part:
        """Return the part with an argument, whose name is (name of the family, argument)."""
        return part_named((self.name, argument))


def _scale_weights(values: Tensor, log_share: Tensor) -> Tensor:
    return values * log_share.exp()


def _scale_surprisal(values: Tensor, log_share: Tensor) -> Tensor:
    # -Σ s p ln (s p) = s (-Σ p ln p - ln s) for a share s
    return (log_share.exp() * (values - log_share)).masked_fill(log_share == -torch.inf, 0).clamp_(min=0)


def _scale_logsumexp(values: Tensor, log_share: Tensor) -> Tensor:
    return (values - log_share).masked_fill(log_share == -torch.inf, -torch.inf)


def _keep(values: Tensor, _: Tensor) -> Tensor:
    return values


def _add(name: PartName, one: KeySubset, other: KeySubset) -> Tensor:
    return one.parts[name] + other.parts[name]


def _larger(name: PartName, one: KeySubset, other: KeySubset) -> Tensor:
    return torch.maximum(one.parts[name], other.parts[name])


def _average(name: PartName, one: KeySubset, other: KeySubset) -> Tensor:
    return one.share * one.parts[name] + other.share * other.parts[name]


def _known(name: PartName, one: KeySubset, other: KeySubset) -> Tensor:
    """Return what does not depend on the keys, from the subset of which the query sees a key."""
    return torch.where(one.share > 0, one.parts[name], other.parts[name])


def _pool_spreads(name: PartName, one: KeySubset, other: KeySubset) -> Tensor:
    mean = _average(MEAN_DISTANCE.name, one, other)
    variance = torch.zeros_like(mean)
    for each in (one, other):
        variance += each.share * (each.parts[name].square() + (each.parts[MEAN_DISTANCE.name] - mean).square())
    return variance.sqrt_()


def _key_of_larger(name: PartName, one: KeySubset, other: KeySubset) -> Tensor:
    """Return the key of the larger weight, the first of two weights that differ by rounding only; -1 is no key."""
    key, other_key = one.parts[name], other.parts[name]
    weight, other_weight = one.parts[LARGEST_WEIGHT.name], other.parts[LARGEST_WEIGHT.name]
    tolerance = torch.maximum(weight, other_weight) * (one.rounding + other.rounding)
    is_first = (other_key >= 0) & ((other_key < key) | (key < 0))
    is_equal = (other_weight - weight).abs() <= tolerance
    return torch.where(torch.where(is_equal, is_first, other_weight > weight), other_key, key)


_SUM_OF_WEIGHTS = Combination(_scale_weights, _add)
_MEAN = Combination(_keep, _average)

ENTROPY = Part("entropy", "-Σ_j p_ij ln p_ij, nats", combination=Combination(_scale_surprisal, _add))
MEAN_DISTANCE = Part(
    "mean_distance",
    "mean of |position_i - j| under p_ij / Σ_j p_ij, tokens",
    uses_positions=True,
    combination=_MEAN,
)
DISTANCE_SPREAD = Part(
    "distance_spread",
    "standard deviation of that distance, tokens",
    uses_positions=True,
    combination=Combination(_keep, _pool_spreads, companion=MEAN_DISTANCE.name),
)
LARGEST_WEIGHT = Part("largest_weight", "max_j p_ij", combination=Combination(_scale_weights, _larger))
LARGEST_KEY = Part(
    "largest_key",
    "the first key with the largest weight, int64; -1 where a query sees no key",
    numbers_a_token=True,
    is_integer=True,
    combination=Combination(_keep, _key_of_larger, companion=LARGEST_WEIGHT.name),
)
NEAR_REACH = 3
"""Number of tokens before and after the query in the part "near_mass"; REACH of csrc/operator.cpp."""

NEAR_MASS = Part(
    "near_mass",
    f"Σ p_ij over the keys at most {NEAR_REACH} tokens from position_i",
    uses_positions=True,
    combination=_SUM_OF_WEIGHTS,
)
FIRST_SPECIAL_MASS = Part(
    "first_special_mass",
    "the weight on the first key of the sample if that is special, else 0",
    needs=("special_keys",),
    uses_first_key=True,
    combination=_SUM_OF_WEIGHTS,
)
SINK_MASS = Part("sink_mass", "the weight of the learned sink", needs=("sinks",))
LOGSUMEXP = Part(
    "logsumexp",
    "ln Σ_j exp(s_ij), the learned sink included, nats",
    combination=Combination(_scale_logsumexp, _known),
)
POSITION = Part(
    "position",
    "position of the query among the keys of its text, from 0",
    numbers_a_token=True,
    uses_positions=True,
    combination=Combination(_keep, _known),
)
DUPLICATE_MASS = Part(
    "duplicate_mass",
    "Σ p_ij over the earlier keys with the query's own token",
    needs=("ids",),
    combination=_SUM_OF_WEIGHTS,
)
INDUCTION_MASS = Part(
    "induction_mass", "Σ p_ij over the keys right after those", needs=("ids",), combination=_SUM_OF_WEIGHTS
)
CONTRIBUTION = Part(
    "contribution",
    "Σ_j p_ij ‖f_h(x_j)‖, f_h(x_j) = W_O^h v_j",
    needs=("values", "output_weight"),
    combination=_SUM_OF_WEIGHTS,
)
OUTPUT_NORM = Part("output_norm", "‖Σ_j p_ij f_h(x_j)‖", needs=("values", "output_weight"))
PATCH_DISTANCE = Part(
    "patch_distance",
    "mean distance between the centres of the query's patch and a key's of its view, under p_ij / Σ p_ij over these "
    "keys, patches",
    needs=("places",),
)
NEIGHBOUR_MASS = Part("neighbour_mass", "Σ p_ij over the query's patch and the eight around it", needs=("places",))
ONE_WAY_MASS = Part(
    "one_way_mass",
    "p_ij at the patch at one step in rows and columns, the one on which the head has most weight in the call; not 0",
    needs=("places",),
)
RECEIVED = Part("received", "Σ_i p_ij, (batch, heads, keys)", axes="keys")
POOLED_MAP = Part(
    "pooled_map",
    "the map in blocks, (batch, heads, row blocks, column blocks); NaN where no cell is visible",
    axes="map",
)
PARTS: dict[PartName, Part] = {
    part.name: part
    for part in (
        ENTROPY, MEAN_DISTANCE, DISTANCE_SPREAD, NEAR_MASS, FIRST_SPECIAL_MASS, LARGEST_WEIGHT, LARGEST_KEY, SINK_MASS,
        LOGSUMEXP, POSITION, DUPLICATE_MASS, INDUCTION_MASS, CONTRIBUTION, OUTPUT_NORM, PATCH_DISTANCE, NEIGHBOUR_MASS,
        ONE_WAY_MASS, RECEIVED, POOLED_MAP,
    )
}  # fmt: skip
"""Name -> part. The shape is (batch, heads, queries) unless stated; 0 where a query sees no key."""

OFFSET_MASS = PartFamily(
    int, Part("offset_mass", "p_ij at j = position_i + offset", uses_positions=True, combination=_SUM_OF_WEIGHTS)
)
FIRST_KEYS_MASS = PartFamily(
    int,
    Part(
        "first_keys_mass",
        "Σ p_ij over the first keys of the sample, this many",
        uses_first_key=True,
        combination=_SUM_OF_WEIGHTS,
    ),
)
TOKENS_MASS = PartFamily(
    str, Part("tokens_mass", "Σ p_ij over the keys of a set", needs=("sets",), combination=_SUM_OF_WEIGHTS)
)
PART_FAMILIES: dict[str, PartFamily] = {family.name: family for family in (OFFSET_MASS, FIRST_KEYS_MASS, TOKENS_MASS)}
"""Name -> family of parts with a number per query; the argument is an offset, a count, or the name of a set."""

SPECIAL_MASS = replace(TOKENS_MASS.of_any, name=(TOKENS_MASS.name, "special"), needs=("special_keys",))
"""The part of the set that `ProbeContext.special_keys` gives."""


def part_named(name: object) -> Part:
    """Return the part with a name.

    Raises:
        ArgumentError: there is no such part.

    >>> part_named("received").axes, part_named(("offset_mass", -5)).uses_positions
    ('keys', True)
    """
    if isinstance(name, str) and name in PARTS:
        return PARTS[name]
    match name:
        case (str(family), argument) if family in PART_FAMILIES:
            expected = PART_FAMILIES[family].argument
            if isinstance(argument, expected) and not isinstance(argument, bool):
                return _part_of_family(family, argument)
    families = (f"({name!r}, {family.argument.__name__})" for name, family in PART_FAMILIES.items())
    raise ArgumentError(f"There is no part {name!r}.", f"Give some of {', '.join([*map(repr, PARTS), *families])}.")


@cache
def _part_of_family(family: str, argument: Any) -> Part:
    name = (family, argument)
    return SPECIAL_MASS if name == SPECIAL_MASS.name else replace(PART_FAMILIES[family].of_any, name=name)


def number_in_text(
    parts: Mapping[PartName, Tensor], key_start: int | Tensor, logsumexp: Tensor
) -> Mapping[PartName, Tensor]:
    """Number the tokens of parts, which were numbered from the first key of a call, from the first key of their text.

    Args:
        parts: name -> (batch, heads, queries).
        key_start: number of the text's keys before the keys of the call, an int or a tensor that broadcasts to the
            parts; negative if the text begins at a later key.
        logsumexp: (batch, heads, queries), -inf for queries without visible keys, NaN for those that see NaN.
    """
    if isinstance(key_start, int) and not key_start:
        return parts
    numbered = [name for name in parts if part_named(name).numbers_a_token]
    start = key_start.to(logsumexp.device) if isinstance(key_start, Tensor) else key_start
    empty, bad = logsumexp == -torch.inf, logsumexp.isnan()
    return {**parts, **{name: set_empty_and_bad_queries(parts[name] + start, empty, bad) for name in numbered}}


def set_empty_and_bad_queries(value: Tensor, empty: Tensor, bad: Tensor) -> Tensor:
    """Set queries that see no key (`empty`) to 0, and queries that see NaN (`bad`) to NaN; in integer tensors to -1."""
    of_empty, of_bad = (0, torch.nan) if value.is_floating_point() else (-1, -1)
    return value.masked_fill(empty, of_empty).masked_fill_(bad, of_bad)
