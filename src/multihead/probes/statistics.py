"""Measure the statistics of a call: as the native kernel has them, by few weights, or tile by tile."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from multihead.call import Attended, AttentionCall, AttentionRequest
from multihead.errors import ProbeError
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.probes import lookups, repeats, weighted_values
from multihead.probes.catalogue import PROBES
from multihead.probes.context import ProbeContext, check_context_fits, refuse_unless_output_weight_fits
from multihead.probes.from_native import asked, given, takes
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import Need, Part, Probe
from multihead.probes.streaming import STREAMED, streamed

Wanted: TypeAlias = "str | Probe"
OF_POSITIONS = frozenset({"mean_distance", "distance_spread", "self_mass", "previous_mass", "next_mass"})
NOTHING = ProbeContext()

_MISSING: dict[Need, tuple[str, str]] = {
    "special_keys": ("nothing says which keys are special", "Give special_keys."),
    "ids": ("nothing says which token each key is", "Give ids."),
    "sets": ("nothing says which keys belong to the set", "Give sets, or ids to tokens_mass."),
    "output_weight": ("nothing says what the heads' outputs are multiplied by", "Give output_weight."),
    "values": ("there are no values", "Give v."),
    "sinks": ("the heads have no learned sinks", "Give sinks, or leave it out."),
}


def resolved(wanted: Wanted | Iterable[Wanted]) -> tuple[Probe, ...]:
    """Turn names into their probes, each once.

    Raises:
        ProbeError: a name is unknown, or two probes that are not the same have one name.

    >>> [probe.name for probe in resolved(("entropy", PROBES["received"], "entropy"))]
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
            raise ProbeError(f"There is no statistic {each!r}.", f"Give some of {', '.join(PROBES)}.")
        probe = each if isinstance(each, Probe) else PROBES[each]
        if found.setdefault(probe.name, probe) != probe:
            raise ProbeError(f"Two statistics are called {probe.name!r}.", "Give one of them another name.")
    return tuple(found.values())


def missing(
    probe: Probe, request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> tuple[Need, ...]:
    """Tell what a probe needs of a call and does not have."""
    there: dict[Need, bool] = {
        "special_keys": context.special_keys is not None,
        "ids": context.ids is not None,
        "sets": probe.name.removesuffix("_mass") in context.sets,
        "output_weight": context.output_weight is not None,
        "values": has_values,
        "sinks": request.sinks is not None,
    }
    return tuple(need for need in there if need in probe.needs and not there[need])


def possible(
    wanted: Iterable[Wanted], request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> tuple[Probe, ...]:
    """Keep the probes of which nothing is missing."""
    return tuple(probe for probe in resolved(wanted) if not missing(probe, request, context, has_values=has_values))


def refuse_unless_possible(
    probes: Iterable[Probe], request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> None:
    """Refuse a probe of which something is missing.

    Raises:
        ProbeError: in words.
    """
    for probe in probes:
        for need in missing(probe, request, context, has_values=has_values):
            finding, mend = _MISSING[need]
            raise ProbeError(f"{probe.name} was asked for, and {finding}.", mend)


def measured(
    request: AttentionRequest,
    logsumexp: Tensor,
    wanted: Iterable[Wanted],
    context: ProbeContext = NOTHING,
    *,
    output: Tensor | None = None,
    has_values: bool = True,
) -> dict[str, Tensor]:
    """Compute statistics without ever holding queries x keys: by the native kernel if it takes the call, else by tiles.

    Args:
        request: the call; gradients are not followed.
        logsumexp: (batch, heads, queries), nats, in float32 or float64.
        wanted: names of statistics, or probes.
        context: what is known beside q and k.
        output: (batch, heads, queries, value_dim) of the call without dropout, if it is at hand.
        has_values: whether the request holds values, and not keys in their place.

    Returns: a dict from name to tensor, each with the batch in front; a row of NaN is NaN (-1 for `largest_key`),
        and counts as 0 in what keys receive and in a map.

    Raises:
        ProbeError: a statistic is unknown, or needs what is not there; what is beside does not fit the call.
    """
    probes = resolved(wanted)
    check_context_fits(context, request.shape)
    refuse_unless_possible(probes, request, context, has_values=has_values)
    if context.output_weight is not None and any("output_weight" in probe.needs for probe in probes):
        refuse_unless_output_weight_fits(context.output_weight, request.shape)
    with torch.no_grad(), without_autocast(request.shape.device):
        subject = MeasuredCall.of(request, logsumexp, context, output=output)
        parts = _measured(subject, probes)
        bad, empty = logsumexp.isnan(), logsumexp == -torch.inf
        found = {}
        for probe in probes:
            value = probe.of(parts)
            if value.is_floating_point():
                value = value.to(working_dtype(request.shape.dtype))
            if probe.axes == "queries":
                of_empty, of_bad = (0, torch.nan) if value.is_floating_point() else (-1, -1)
                value = value.masked_fill(empty, of_empty).masked_fill(bad, of_bad)
            found[probe.name] = value
    return found


def _measured(subject: MeasuredCall, probes: Sequence[Probe]) -> dict[Part, Tensor]:
    """Measure what the probes are made of, each part by what gives it with the least work."""
    parts = frozenset[Part]().union(*(probe.parts for probe in probes))
    sets = _sets(subject, probes)
    found: dict[Part, Tensor] = {
        part: lookups.on_set(subject, sets[part]) for part in sets if lookups.is_small(sets[part])
    }
    if takes(subject):
        found |= asked(subject, given(subject, parts - found.keys()))
    for part in parts - found.keys():
        if isinstance(part, tuple) and part[0] == "at":
            found[part] = lookups.at_offset(subject, int(part[1]))
        elif isinstance(part, tuple) and part[0] == "first":
            found[part] = lookups.on_first(subject, int(part[1]))
    if "sink" in parts and subject.request.sinks is not None:
        sinks = subject.request.sinks.detach().to(subject.divisor.dtype)
        found["sink"] = (sinks[:, None] - subject.divisor).exp()
    if "output_norm" in parts and subject.context.output_weight is not None:
        found["output_norm"] = weighted_values.output_norms(subject, subject.context.output_weight)
    repeated = parts & {"duplicate", "induction"}
    if repeated and repeats.takes(subject):
        found |= repeats.repeated(subject, repeated)
    return found | _over_all_keys(subject, parts - found.keys(), sets)


def _sets(subject: MeasuredCall, probes: Sequence[Probe]) -> dict[Part, Tensor]:
    """Find the sets of keys that are asked for: (batch, keys) bool each."""
    return {
        part: subject.keys_of_set(str(part[1]), probe.tokens)
        for probe in probes
        for part in probe.parts
        if isinstance(part, tuple) and part[0] == "on"
    }


def _over_all_keys(subject: MeasuredCall, parts: Collection[Part], sets: Mapping[Part, Tensor]) -> dict[Part, Tensor]:
    """Measure what takes every weight of a query: in one walk over the tiles, or by one call with other values."""
    left = [part for part in sets if part in parts]
    numbers = [weighted_values.of_set(subject, sets[part]) for part in left]
    weight = subject.context.output_weight
    if "contribution" in parts and weight is not None:
        numbers.append(weighted_values.norms(subject, weight))  # (batch, kv_heads, keys, group)
    stacked = torch.cat(numbers, -1) if numbers else None
    walk = [part for part in parts if part in STREAMED]
    found: dict[Part, Tensor] = {}
    weighed = None
    if walk:
        found, weighed = streamed(subject, walk, stacked)
    elif stacked is not None:
        weighed = weighted_values.weighed(subject, stacked)
    if weighed is not None:
        found |= {part: weighed[..., index] for index, part in enumerate(left)}
        if "contribution" in parts:
            found["contribution"] = weighted_values.own_of_group(subject, weighed[..., len(left) :])
    return found


def without_positions(attended: Attended) -> Attended:
    """Leave out the statistics that depend on where the queries stand among the keys."""
    kept = {name: value for name, value in attended.statistics.items() if name not in OF_POSITIONS}
    return replace(attended, statistics=kept)


def of_call(call: AttentionCall, wanted: Iterable[Wanted], context: ProbeContext = NOTHING) -> dict[str, Tensor]:
    """Give statistics of a call that has run: those its kernel had at hand, the others measured now.

    Takes what `measured` takes, and gives what it gives, in the order of the statistics asked for.
    """
    probes = resolved(wanted)
    refuse_unless_possible(probes, call.request, context)
    at_hand = call.attended.statistics
    own_first_key = context.first_key is not None  # the kernel's is the first that some query may see
    ready = {
        probe.name: at_hand[probe.name]
        for probe in probes
        if probe.name in at_hand and not (own_first_key and probe.name == "first_mass")
    }
    left = [probe for probe in probes if probe.name not in ready]
    if left:
        output = None if call.request.dropout else call.attended.output
        ready |= measured(call.request, call.attended.logsumexp.detach(), left, context, output=output)
    return {probe.name: ready[probe.name] for probe in probes}
