"""Measure the statistics of a call: in the native kernel, by few single weights, or tile by tile.

It takes 0.6 of a forward pass at 2,048 queries, and 0.9 at 128. Statistics that are computed from others, such as
effective keys, are masked only if some row sees no key or NaN, which one search for the extremes of the logsumexp
finds. Attention received and maps need the logsumexp, so they are a second pass. The weight on few special tokens is
looked up, which at 2,048 keys takes a tenth of a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.kernels.call import AttentionArguments, AttentionCall, AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.native import eager
from multihead.kernels.native.statistics import FIRST_KEY, SPECIAL_KEYS
from multihead.kernels.parts import Part
from multihead.kernels.plan.bounds import bounds_of
from multihead.probes import from_native, lookups, repeats, weighted_values
from multihead.probes.catalogue import DEFAULT, PROBES
from multihead.probes.context import ProbeContext, check_context_fits, check_output_weight_fits
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import Need, Parts, Probe
from multihead.probes.streaming import STREAMED, measure_in_tiles
from multihead.probes.tile import has_large_logsumexp, is_finite_and_small

Wanted: TypeAlias = "str | Probe"
OF_POSITIONS: frozenset[Part] = frozenset(
    {"mean_distance", "distance_spread", *(("offset_mass", offset) for offset in (0, -1, 1))}
)
"""The parts of the native kernel that depend on the positions of the queries among the keys."""

NOTHING = ProbeContext()

_ONE_PART: dict[str, Part] = {name: probe.only_part for name, probe in PROBES.items() if probe.only_part is not None}
"""Name of each built-in statistic that is a part as it is -> that part."""

_MISSING: dict[Need, tuple[str, str]] = {
    "special_keys": ("to know which keys are special", "Give special_keys."),
    "ids": ("the token of each key", "Give ids."),
    "sets": ("to know which keys belong to the set", "Give sets, or ids to tokens_mass."),
    "output_weight": ("the output projection of the heads", "Give output_weight."),
    "values": ("the values", "Give v."),
    "sinks": ("the learned sinks of the heads", "Give sinks, or leave it out."),
}


def resolve_probes(wanted: Wanted | Iterable[Wanted]) -> tuple[Probe, ...]:
    """Return the probes of some names and probes, each once.

    Raises:
        ProbeError: a name is unknown, or two different probes have one name.

    >>> [probe.name for probe in resolve_probes(("entropy", PROBES["received"], "entropy"))]
    ['entropy', 'received']
    """
    found: dict[str, Probe] = {}
    if isinstance(wanted, (str, Probe)):
        wanted = (wanted,)
    if not isinstance(wanted, Iterable):
        raise ProbeError(
            f"probes is {wanted!r}.", 'Give names of statistics, for example probes=("entropy", "received").'
        )
    for each in wanted:
        if not isinstance(each, (Probe, str)) or (isinstance(each, str) and each not in PROBES):
            raise ProbeError(
                f"There is no statistic {each!r}.", f"Give some of {', '.join(PROBES)}, or a Probe of your own."
            )
        probe = each if isinstance(each, Probe) else PROBES[each]
        built_in, same_name = PROBES.get(probe.name, probe), found.setdefault(probe.name, probe)
        # Identity first, because a comparison of two probes takes microseconds.
        if built_in is not probe and built_in != probe:
            raise ProbeError(f"{probe.name} is the name of a built-in statistic.", "Give your probe another name.")
        if same_name is not probe and same_name != probe:
            raise ProbeError(f"Two statistics are called {probe.name!r}.", "Give one of them another name.")
    return tuple(found.values())


def missing_inputs(
    probe: Probe, request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> tuple[Need, ...]:
    """Return what a probe needs and the call does not have."""
    if not probe.needs:
        return ()
    given = _inputs_given(request, context, has_values=has_values)
    if all(name in context.sets for name in _set_names(probe)):
        given |= {"sets"}
    return tuple(need for need in _MISSING if need in probe.needs - given)


def _inputs_given(request: AttentionRequest, context: ProbeContext, *, has_values: bool) -> frozenset[Need]:
    """Return which inputs of probes are known, except for sets, which have names."""
    inputs: dict[Need, bool] = {
        "special_keys": context.special_keys is not None,
        "ids": context.ids is not None,
        "output_weight": context.output_weight is not None,
        "values": has_values,
        "sinks": request.sinks is not None,
    }
    return frozenset(need for need, known in inputs.items() if known)


@cache
def default_probes() -> tuple[Probe, ...]:
    """Return the probes of DEFAULT."""
    return tuple(PROBES[name] for name in DEFAULT)


@cache
def _default_for_inputs(given: frozenset[Need]) -> tuple[Probe, ...]:
    """Return the probes of DEFAULT that need nothing but some inputs."""
    return tuple(probe for probe in default_probes() if probe.needs <= given)


def possible_probes(
    wanted: Iterable[Wanted], request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> tuple[Probe, ...]:
    """Return the probes that have all they need."""
    return tuple(
        probe for probe in resolve_probes(wanted) if not missing_inputs(probe, request, context, has_values=has_values)
    )


def check_inputs_given(
    probes: Iterable[Probe], request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> None:
    """Reject a probe that needs what the call does not have.

    Raises:
        ProbeError: the error names what is missing and where to pass it.
    """
    for probe in probes:
        for need in missing_inputs(probe, request, context, has_values=has_values):
            absent, mend = _MISSING[need]
            raise ProbeError(f"{probe.name} needs {absent}.", mend)


def choose_probes(
    wanted: Wanted | Iterable[Wanted] | None,
    request: AttentionRequest,
    context: ProbeContext,
    *,
    has_values: bool = True,
) -> tuple[Probe, ...]:
    """Return the wanted probes, or those of DEFAULT that have all they need, and check the context.

    Raises:
        ProbeError: a statistic is unknown, or needs what is missing; the context does not fit the call.
    """
    if wanted is None:
        probes = _default_for_inputs(_inputs_given(request, context, has_values=has_values))
    else:
        probes = resolve_probes(wanted)
        check_inputs_given(probes, request, context, has_values=has_values)
    if context is not NOTHING:
        check_context_fits(context, request.shape)
        if context.output_weight is not None and any("output_weight" in probe.needs for probe in probes):
            check_output_weight_fits(context.output_weight, request.shape)
    return probes


def parts_of_probes(probes: Iterable[Probe]) -> frozenset[Part]:
    """Return the parts of some probes."""
    return frozenset[Part]().union(*[probe.parts for probe in probes])


class FirstPass(NamedTuple):
    """What one pass over the keys measures without values.

    Attributes:
        logsumexp: (batch, heads, queries), nats.
        parts: the measured parts; none where the scores are so large that they must be measured in float64.
        usual: whether every row sees a key and no NaN, and no row is large.
    """

    logsumexp: Tensor
    parts: Parts
    usual: bool


def first_pass(
    request: AttentionRequest,
    probes: Iterable[Probe] = (),
    context: ProbeContext = NOTHING,
    *,
    has_values: bool = False,
) -> FirstPass | None:
    """Compute the logsumexp of a call, and the parts of probes that the native kernel measures in the same pass.

    It does not multiply values, so it takes less time than a call. The other parts need the logsumexp.

    Args:
        request: the call; gradients are not followed.
        probes: as returned by `choose_probes`.
        context: further inputs of the probes.
        has_values: whether the request holds values, and not keys in their place.

    Returns:
        What it measured. None where the native kernel does not support the call, and where a value is not finite, since
        queries that see its key are NaN.
    """
    bounds = bounds_of(request)
    if not from_native.supports_call(request, bounds) or (has_values and not bool(request.v.detach().sum().isfinite())):
        return None
    logsumexp, parts = from_native.first_pass(request, bounds, parts_of_probes(probes), context)
    if not parts or is_finite_and_small(logsumexp):
        return FirstPass(logsumexp, parts, usual=bool(parts))
    return FirstPass(logsumexp, {} if has_large_logsumexp(logsumexp) else parts, usual=False)


def measured_without_plan(q: Tensor, k: Tensor, terms: AttentionArguments) -> dict[str, Tensor] | None:
    """Measure the probes of DEFAULT that need nothing but q and k, where the call needs no plan.

    The arguments are those of `functional.statistics`, and nothing about them has been checked.

    Returns:
        a dict from name to tensor (batch, heads, queries). None where the call needs a plan or an error, and where
        the scores are so large that they must be measured in float64.
    """
    first = eager.statistics(q, k, terms)
    if first is None:
        return None
    logsumexp, parts = first
    usual = is_finite_and_small(logsumexp)
    if not usual and has_large_logsumexp(logsumexp):
        return None
    return {
        probe.name: statistic_from_parts(probe, parts, logsumexp, usual=usual)
        for probe in _default_for_inputs(frozenset())
    }


def complete_statistics(
    request: AttentionRequest,
    logsumexp: Tensor,
    probes: Sequence[Probe],
    context: ProbeContext = NOTHING,
    *,
    parts: Parts,
    usual: bool = False,
    output: Tensor | None = None,
    has_values: bool = True,
) -> dict[str, Tensor]:
    """Compute statistics from parts that a kernel measured, and measure those that need more.

    Arguments and results are those of `measure_statistics`, in the order of `probes`; `usual` is as in
    `statistic_from_parts`.
    """
    ready: dict[str, Tensor] = {}
    for probe in probes:
        part = _ONE_PART.get(probe.name)
        if part is None:
            if probe.parts <= parts.keys():
                ready[probe.name] = statistic_from_parts(probe, parts, logsumexp, usual=usual)
        elif part in parts:
            ready[probe.name] = parts[part]
    if len(ready) == len(probes):
        return ready
    left = [probe for probe in probes if probe.name not in ready]
    ready |= measure_statistics(request, logsumexp, left, context, parts=parts, output=output, has_values=has_values)
    return {probe.name: ready[probe.name] for probe in probes}


def measure_statistics(
    request: AttentionRequest,
    logsumexp: Tensor,
    wanted: Iterable[Wanted],
    context: ProbeContext = NOTHING,
    *,
    parts: Parts = MappingProxyType({}),
    output: Tensor | None = None,
    has_values: bool = True,
) -> dict[str, Tensor]:
    """Compute statistics without ever holding queries x keys, in the native kernel if it supports the call.

    Args:
        request: the call; gradients are not followed.
        logsumexp: (batch, heads, queries), nats, in float32 or float64.
        wanted: names of statistics, or probes.
        context: further inputs of the probes.
        parts: parts that are known.
        output: (batch, heads, queries, value_dim) of the call without dropout, if it is known.
        has_values: whether the request holds values, and not keys in their place.

    Returns:
        a dict from name to tensor, each with the batch in front; a row of NaN is NaN (-1 for `largest_key`),
        and counts as 0 in what keys receive and in a map.

    Raises:
        ProbeError: a statistic is unknown, or needs what is missing; the context does not fit the call.
    """
    probes = choose_probes(wanted, request, context, has_values=has_values)
    with torch.no_grad(), without_autocast(request.shape.device):
        call = MeasuredCall.of(request, logsumexp, context, output=output)
        wanted_parts = parts_of_probes(probes)
        all_parts = {part: parts[part] for part in wanted_parts & parts.keys()}
        all_parts |= measure_parts(call, wanted_parts - all_parts.keys(), _key_sets(call, probes))
        empty, bad = logsumexp == -torch.inf, logsumexp.isnan()
        found = {}
        for probe in probes:
            value = _apply_probe(probe, all_parts)
            if value.is_floating_point():
                value = value.to(working_dtype(request.shape.dtype))
            found[probe.name] = set_empty_and_bad_queries(value, empty, bad) if probe.axes == "queries" else value
    return found


def statistic_from_parts(probe: Probe, parts: Parts, logsumexp: Tensor, *, usual: bool = False) -> Tensor:
    """Compute a statistic with a number per query from parts that the kernel measured: (batch, heads, queries).

    A statistic that is one part costs nothing: the kernel has already filled empty rows and rows of NaN.

    Args:
        probe: the statistic.
        parts: the measured parts.
        logsumexp: (batch, heads, queries).
        usual: whether every row is known to see a key and no NaN.
    """
    part = _ONE_PART.get(probe.name)
    if part is not None:
        return parts[part]
    value = _apply_probe(probe, parts)
    if usual or (len(probe.parts) == 1 and value is parts[next(iter(probe.parts))]):
        return value
    return set_empty_and_bad_queries(value, logsumexp == -torch.inf, logsumexp.isnan())


def _apply_probe(probe: Probe, parts: Parts) -> Tensor:
    """Apply the function of a probe.

    Raises:
        ProbeError: it returns something other than a tensor of the shape of its parts.
    """
    try:
        value = probe.of(parts)
    except KeyError as error:
        raise ProbeError(
            f"The function of {probe.name} reads {error.args[0]!r}, which is not among its parts.",
            "Add it to the `parts` of the probe.",
        ) from error
    expected = parts[next(iter(probe.parts))].shape
    if not isinstance(value, Tensor) or value.shape != expected:
        returned = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"an object of type {type(value).__name__}"
        )
        raise ProbeError(
            f"The function of {probe.name} returned {returned}.",
            f"Return a tensor of the shape of its parts, {tuple(expected)}: one number for each of theirs.",
        )
    return value.float() if value.dtype == torch.bool else value


def set_empty_and_bad_queries(value: Tensor, empty: Tensor, bad: Tensor) -> Tensor:
    """Set queries that see no key (`empty`) to 0, and those that see NaN (`bad`) to NaN; key indices of both to -1."""
    of_empty, of_bad = (0, torch.nan) if value.is_floating_point() else (-1, -1)
    return value.masked_fill(empty, of_empty).masked_fill_(bad, of_bad)


def measure_parts(
    call: MeasuredCall, parts: frozenset[Part], key_sets: Mapping[Part, Tensor] = MappingProxyType({})
) -> dict[Part, Tensor]:
    """Measure parts, each in the way that takes the least work.

    Args:
        call: the call; gradients are not followed.
        parts: the parts.
        key_sets: (batch, keys) bool for each part that counts a set of keys.
    """
    sets = {part: keys for part, keys in key_sets.items() if part in parts}
    found: dict[Part, Tensor] = {
        part: lookups.weight_on_set(call, keys) for part, keys in sets.items() if lookups.is_small_set(keys)
    }
    if from_native.supports_call(call.request, call.bounds):
        found |= from_native.measure(call, from_native.measurable_parts(call.context, parts - found.keys()))
    for part in parts - found.keys():
        match part:
            case ("offset_mass", int(offset)):
                found[part] = lookups.weight_at_offset(call, offset)
            case ("first_keys_mass", int(count)):
                found[part] = lookups.weight_on_first_keys(call, count)
    if "sink_mass" in parts and call.request.sinks is not None:
        found["sink_mass"] = sink_mass(call.whole_logsumexp, call.request.sinks)
    if "logsumexp" in parts:
        found["logsumexp"] = call.whole_logsumexp
    if "position" in parts:
        found["position"] = (
            (call.positions[:, None] + call.context.key_start).to(call.logsumexp).expand_as(call.logsumexp)
        )
    if "output_norm" in parts and call.context.output_weight is not None:
        found["output_norm"] = weighted_values.output_norms(call, call.context.output_weight)
    repeated = parts & {"duplicate_mass", "induction_mass"}
    if repeated and repeats.supports_call(call):
        found |= repeats.measure_repeats(call, repeated)
    found |= _measure_over_all_keys(call, parts - found.keys(), sets)
    if "induction_mass" in found and call.context.id_before is not None:
        found["induction_mass"] = found["induction_mass"] + lookups.weight_after_dropped_key(
            call, call.context.id_before
        )
    return found


def sink_mass(logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Compute the weight of the learned sinks (heads,): (batch, heads, queries), 0 for queries that see no key."""
    weights = (sinks.detach().to(logsumexp.dtype)[:, None] - logsumexp).exp()
    return weights.masked_fill_(logsumexp == -torch.inf, 0)


def _key_sets(call: MeasuredCall, probes: Sequence[Probe]) -> dict[Part, Tensor]:
    """Return the sets of keys that the probes count: (batch, keys) bool each.

    Raises:
        ProbeError: two probes have different sets of one name.
    """
    found: dict[Part, Tensor] = {}
    tokens: dict[str, frozenset[int] | None] = {}
    for probe in probes:
        for part in probe.parts:
            match part:
                case ("tokens_mass", str(name)):
                    if name != "special" and tokens.setdefault(name, probe.tokens) != probe.tokens:
                        raise ProbeError(f"Two sets of tokens are called {name!r}.", "Give one of them another name.")
                    if part not in found:
                        found[part] = call.keys_of_set(name, probe.tokens)
    return found


def _set_names(probe: Probe) -> list[str]:
    """Return the names of the sets of keys that the context must hold for a probe."""
    return [str(part[1]) for part in probe.parts if part[0] == "tokens_mass" and part[1] != "special"]


def _measure_over_all_keys(
    call: MeasuredCall, parts: Collection[Part], sets: Mapping[Part, Tensor]
) -> dict[Part, Tensor]:
    """Measure what needs every weight of a query: in one walk over the tiles, or by one call with other values."""
    left = [part for part in sets if part in parts]
    numbers = [weighted_values.column_of_set(call, sets[part]) for part in left]
    weight = call.context.output_weight
    if "contribution" in parts and weight is not None:
        numbers.append(weighted_values.value_norm_columns(call, weight))  # (batch, kv_heads, keys, group)
    stacked = torch.cat(numbers, -1) if numbers else None
    walk = [part for part in parts if part in STREAMED]
    found: dict[Part, Tensor] = {}
    weighed = None
    if walk:
        found, weighed = measure_in_tiles(call, walk, stacked)
    elif stacked is not None:
        weighed = weighted_values.weigh_values(call, stacked)
    if weighed is not None:
        found |= {part: weighed[..., index] for index, part in enumerate(left)}
        if "contribution" in parts:
            found["contribution"] = weighted_values.own_column_of_heads(call, weighed[..., len(left) :])
    return found


def drop_position_parts(attended: AttentionResult) -> AttentionResult:
    """Leave out the parts that depend on the positions of the queries among the keys."""
    kept = {part: value for part, value in attended.statistics.items() if part not in OF_POSITIONS}
    return replace(attended, statistics=kept)


def measure_token_parts(call: AttentionCall, parts: frozenset[Part], special_keys: Tensor | None) -> Parts | None:
    """Measure the weight on special tokens and on sinks, and the logsumexp, of a whole call that has run.

    Args:
        call: the call.
        parts: the parts that are missing.
        special_keys: (batch, keys) bool, or None.

    Returns:
        the parts, (batch, heads, queries) each; None if another part is missing, or the native kernel does not
        support the call.
    """
    request, logsumexp = call.request, call.attended.logsumexp.detach()
    if parts - {SPECIAL_KEYS, "sink_mass", "logsumexp"} or (SPECIAL_KEYS in parts and special_keys is None):
        return None
    measured = MeasuredCall.of(request, logsumexp, ProbeContext(special_keys=special_keys))
    if not from_native.supports_call(measured.request, measured.bounds):
        return None
    found: dict[Part, Tensor] = {}
    if SPECIAL_KEYS in parts and special_keys is not None:
        if lookups.is_small_set(special_keys):  # usually; another pass over all keys takes many times as long
            found[SPECIAL_KEYS] = lookups.weight_on_set(measured, special_keys)
        else:
            found |= from_native.measure(measured, [SPECIAL_KEYS])
    if "sink_mass" in parts and request.sinks is not None:
        found["sink_mass"] = sink_mass(measured.whole_logsumexp, request.sinks)
    if "logsumexp" in parts:
        found["logsumexp"] = measured.whole_logsumexp.to(logsumexp.dtype)
    # The kernel fills its parts like this; here parts measured by other means need it.
    empty, bad = logsumexp == -torch.inf, logsumexp.isnan()
    return {part: set_empty_and_bad_queries(value, empty, bad) for part, value in found.items()}


def statistics_of_call(
    call: AttentionCall, wanted: Iterable[Wanted], context: ProbeContext = NOTHING
) -> dict[str, Tensor]:
    """Return statistics of a call that has run: from the parts that its kernel measured, or measured now.

    Arguments and results are those of `measure_statistics`, in the order of `wanted`.
    """
    request, attended = call.request, call.attended
    # The kernel takes the first key that some query may see; the context may know of an earlier one.
    parts = {
        part: value for part, value in attended.statistics.items() if context.first_key is None or part != FIRST_KEY
    }
    output = None if request.dropout else attended.output
    probes = choose_probes(wanted, request, context)
    return complete_statistics(request, attended.logsumexp.detach(), probes, context, parts=parts, output=output)
