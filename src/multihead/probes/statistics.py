"""Measure the statistics of an attention call: in the native kernel, from single weights, or tile by tile.

`mh.statistics` runs the native kernel once, without values. At 2,048 queries this takes 0.6 of the time of a forward
pass with values, and 0.9 at 128. Statistics that are computed from others, such as effective keys, are masked only if
some query sees no key or NaN, which the minimum and maximum of the logsumexp show. Attention received and maps need the
logsumexp, so they are computed in a second pass. The weights on a few special tokens are computed one by one, which at
2,048 keys takes a tenth of the time of a pass over all keys.
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
from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.native.statistics import FIRST_KEY_WEIGHT
from multihead.kernels.parts import (
    FIRST_SPECIAL_MASS,
    LOGSUMEXP,
    NEAR_REACH,
    OFFSET_MASS,
    SINK_MASS,
    SPECIAL_MASS,
    PartInput,
    PartName,
    number_in_text,
    part_named,
    set_empty_and_bad_queries,
)
from multihead.kernels.plan.bounds import bounds_of
from multihead.probes import from_kernels, lookups, pictures, repeats, weighted_values
from multihead.probes.catalogue import DEFAULT, PROBES
from multihead.probes.context import ProbeContext, check_context_fits, check_output_weight_fits, keys_of_set
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.probe import PartValues, Probe
from multihead.probes.streaming import STREAMED_PARTS, measure_in_tiles
from multihead.probes.tile import has_large_logsumexp, is_finite_and_small

ProbeOrName: TypeAlias = "str | Probe"
NO_CONTEXT = ProbeContext()

_INPUT_ERRORS: dict[PartInput, tuple[str, str]] = {
    "special_keys": ("to know which keys are special", "Give special_keys."),
    "ids": ("the token of each key", "Give ids."),
    "sets": ("to know which keys belong to the set", "Give sets, or ids to tokens_mass."),
    "places": ("the places of the keys in pictures", "Give places."),
    "output_weight": ("the output projection of the heads", "Give output_weight."),
    "values": ("the values", "Give v."),
    "sinks": ("the learned sinks of the heads", "Give sinks, or leave it out."),
}
_TOKEN_PARTS = {part.name for part in (SPECIAL_MASS, FIRST_SPECIAL_MASS, SINK_MASS, LOGSUMEXP)}


def resolve_probes(wanted: ProbeOrName | Iterable[ProbeOrName]) -> tuple[Probe, ...]:
    """Look up probes that are given by name, and remove duplicates.

    Raises:
        ProbeError: a name is unknown, or two different probes have the same name.

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
        # Identity is checked first, because comparing two probes takes microseconds.
        if built_in is not probe and built_in != probe:
            raise ProbeError(f"{probe.name} is the name of a built-in statistic.", "Give your probe another name.")
        if same_name is not probe and same_name != probe:
            raise ProbeError(f"Two statistics are called {probe.name!r}.", "Give one of them another name.")
    return tuple(found.values())


def missing_inputs(
    probe: Probe, request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> tuple[PartInput, ...]:
    """Return the inputs that a probe needs and a call lacks."""
    given = _inputs_given(request, context, has_values=has_values)
    if all(part[1] in context.sets for part in probe.parts if part[0] == "tokens_mass" and part[1] != "special"):
        given |= {"sets"}
    return tuple(need for need in _INPUT_ERRORS if need in probe.needs - given)


def _inputs_given(request: AttentionRequest, context: ProbeContext, *, has_values: bool) -> frozenset[PartInput]:
    """Return the names of the inputs of probes that a call has, except "sets", because sets differ by name."""
    inputs: dict[PartInput, bool] = {
        "special_keys": context.special_keys is not None,
        "ids": context.ids is not None,
        "places": context.places is not None,
        "output_weight": context.output_weight is not None,
        "values": has_values,
        "sinks": request.sinks is not None,
    }
    return frozenset(need for need, known in inputs.items() if known)


@cache
def _default_for_inputs(given: frozenset[PartInput]) -> tuple[Probe, ...]:
    """Return the default probes that need only the inputs `given`."""
    return tuple(PROBES[name] for name in DEFAULT if PROBES[name].needs <= given)


def possible_probes(
    probes: Iterable[Probe], request: AttentionRequest, context: ProbeContext, *, has_values: bool = True
) -> tuple[Probe, ...]:
    """Return the probes for which a call has all inputs."""
    return tuple(
        probe
        for probe in probes
        if not probe.needs or not missing_inputs(probe, request, context, has_values=has_values)
    )


def choose_probes(
    wanted: ProbeOrName | Iterable[ProbeOrName] | None,
    request: AttentionRequest,
    context: ProbeContext,
    *,
    has_values: bool = True,
) -> tuple[Probe, ...]:
    """Return the wanted probes, or the default probes for which the call has all inputs, and check the context.

    Raises:
        ProbeError: a statistic is unknown, an input of a probe is missing, or the context does not fit the call.
    """
    if wanted is None:
        probes = _default_for_inputs(_inputs_given(request, context, has_values=has_values))
    else:
        probes = resolve_probes(wanted)
        for probe in probes:
            for need in missing_inputs(probe, request, context, has_values=has_values) if probe.needs else ():
                absent, mend = _INPUT_ERRORS[need]
                raise ProbeError(f"{probe.name} needs {absent}.", mend)
    if context is not NO_CONTEXT:
        check_context_fits(context, request.shape)
        if context.output_weight is not None and any("output_weight" in probe.needs for probe in probes):
            check_output_weight_fits(context.output_weight, request.shape)
    return probes


def parts_of_probes(probes: Iterable[Probe]) -> frozenset[PartName]:
    """Return the union of the parts of some probes."""
    return frozenset[PartName]().union(*[probe.parts for probe in probes])


class FirstPassResult(NamedTuple):
    """Results of one pass over the keys that does not read the values.

    Attributes:
        logsumexp: (batch, heads, queries), nats.
        parts: the measured parts; empty if the scores are so large that parts must be measured in float64.
        all_rows_regular: True only if every query is known to see a key and no NaN, and every logsumexp is small.
        statistics: name of a probe -> its values, where the kernel itself computed the statistic.
    """

    logsumexp: Tensor
    parts: PartValues
    all_rows_regular: bool
    statistics: Mapping[str, Tensor] = MappingProxyType({})


def run_first_pass(
    request: AttentionRequest,
    probes: Iterable[Probe] = (),
    context: ProbeContext = NO_CONTEXT,
    *,
    has_values: bool = False,
) -> FirstPassResult | None:
    """Compute the logsumexp of a call, and the parts of probes that a kernel measures in the same pass.

    The pass does not multiply values, so it is faster than the call. The parts that the kernel does not measure need
    the logsumexp, and are measured in a later pass.

    Args:
        request: the call; no gradients are computed.
        probes: probes returned by `choose_probes`.
        context: inputs of the probes besides q and k.
        has_values: whether `request.v` has values; False if it has the keys instead.

    Returns:
        the results; None if no kernel supports the call, or a value is not finite, because queries that see it are NaN.
    """
    bounds = bounds_of(request)
    if not has_values and from_kernels.gpu_supports(request):
        probes = tuple(probes)
        per_query = parts_of_probes(probe for probe in probes if probe.axes == "queries")
        sets = _key_sets_of_parts(request, context, probes)
        measured = from_kernels.measure_on_gpu(request, bounds, per_query, context, probes=probes, key_sets=sets)
        return (
            None
            if measured is None
            else FirstPassResult(*measured[:2], all_rows_regular=False, statistics=measured.statistics)
        )
    if not from_kernels.native_supports(request, bounds) or (
        has_values and not bool(request.v.detach().sum().isfinite())
    ):
        return None
    logsumexp, parts = from_kernels.run_native_first_pass(request, bounds, parts_of_probes(probes), context)
    if not parts or is_finite_and_small(logsumexp):
        return FirstPassResult(logsumexp, parts, all_rows_regular=bool(parts))
    return FirstPassResult(logsumexp, {} if has_large_logsumexp(logsumexp) else parts, all_rows_regular=False)


def default_statistics(logsumexp: Tensor, parts: PartValues) -> dict[str, Tensor] | None:
    """Compute the default statistics that need only q and k from the parts that the native kernel measured.

    Returns:
        name -> (batch, heads, queries). None if the scores are so large that they must be measured in float64.
    """
    all_rows_regular = is_finite_and_small(logsumexp)
    if not all_rows_regular and has_large_logsumexp(logsumexp):
        return None
    return {
        probe.name: statistic_from_parts(probe, parts, logsumexp, all_rows_regular=all_rows_regular)
        for probe in _default_for_inputs(frozenset())
    }


def complete_statistics(
    request: AttentionRequest,
    logsumexp: Tensor,
    probes: Sequence[Probe],
    context: ProbeContext = NO_CONTEXT,
    *,
    parts: PartValues = MappingProxyType({}),
    all_rows_regular: bool = False,
    result: AttentionResult | None = None,
    statistics: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Compute statistics from the parts that a kernel measured; measure missing parts without storing queries x keys.

    Args:
        request: the call; no gradients are computed.
        logsumexp: (batch, heads, queries), nats, in float32 or float64.
        probes: probes for which the call has all inputs.
        context: inputs of the probes besides q and k.
        parts: parts that a kernel has measured, whose tokens are numbered from the first key of the call.
        all_rows_regular: as in `statistic_from_parts`.
        result: the result of the call; None if unknown.
        statistics: name of a probe -> its values, where a kernel has computed the statistic itself.

    Returns:
        name -> tensor (batch, heads, ...). A query with NaN has the statistic NaN (-1 for `largest_key`), and adds 0 to
        `received` and to the map.
    """
    parts = number_in_text(parts, context.key_start, logsumexp)
    ready: dict[str, Tensor] = {}
    for probe in probes:
        part = probe.only_part
        if probe.name in statistics:
            ready[probe.name] = statistics[probe.name]
        elif part is None:
            if probe.parts <= parts.keys():
                ready[probe.name] = statistic_from_parts(probe, parts, logsumexp, all_rows_regular=all_rows_regular)
        elif part in parts:
            ready[probe.name] = parts[part]
    if len(ready) == len(probes):
        return ready
    left = [probe for probe in probes if probe.name not in ready]
    with torch.no_grad(), without_autocast(request.shape.device):
        requested_parts = parts_of_probes(left)
        all_parts = {part: parts[part] for part in requested_parts & parts.keys()}
        sets = _key_sets_of_parts(request, context, left)
        missing = requested_parts - all_parts.keys()
        if from_kernels.gpu_supports(request):
            measured = from_kernels.measure_on_gpu(
                request, bounds_of(request), missing, context, logsumexp=logsumexp, key_sets=sets
            )
            if measured is not None:
                all_parts |= number_in_text(measured.parts, context.key_start, logsumexp)
                missing -= all_parts.keys()
        if missing:
            call = MeasuredCall.from_request(request, logsumexp, context, result=result)
            all_parts |= measure_parts(call, missing, sets, known={**parts, **all_parts})
        empty, bad = logsumexp == -torch.inf, logsumexp.isnan()
        for probe in left:
            value = _apply_probe(probe, all_parts)
            if value.is_floating_point():
                value = value.to(working_dtype(request.shape.dtype))
            ready[probe.name] = set_empty_and_bad_queries(value, empty, bad) if probe.axes == "queries" else value
    return {probe.name: ready[probe.name] for probe in probes}


def statistic_from_parts(
    probe: Probe, parts: PartValues, logsumexp: Tensor, *, all_rows_regular: bool = False
) -> Tensor:
    """Compute a statistic per query from the parts that the kernel measured: (batch, heads, queries).

    A statistic that equals one part is not copied, because the kernel has already set queries without keys or with NaN.

    Args:
        probe: the statistic.
        parts: the measured parts.
        logsumexp: (batch, heads, queries).
        all_rows_regular: True if every query is known to see a key and no NaN.
    """
    part = probe.only_part
    if part is not None:
        return parts[part]
    value = _apply_probe(probe, parts)
    if all_rows_regular or (len(probe.parts) == 1 and value is parts[next(iter(probe.parts))]):
        return value
    return set_empty_and_bad_queries(value, logsumexp == -torch.inf, logsumexp.isnan())


def _apply_probe(probe: Probe, parts: PartValues) -> Tensor:
    """Call the function of a probe.

    Raises:
        ProbeError: the function reads another part, or does not return a tensor with the shape of its parts.
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
            f"Return a tensor with the shape of its parts, {tuple(expected)}.",
        )
    return value.float() if value.dtype == torch.bool else value


def measure_parts(
    call: MeasuredCall,
    parts: frozenset[PartName],
    key_sets: Mapping[PartName, Tensor] = MappingProxyType({}),
    *,
    known: PartValues = MappingProxyType({}),
) -> Mapping[PartName, Tensor]:
    """Measure parts, each in the fastest way; tokens are numbered from the first key of the text.

    Args:
        call: the call; no gradients are computed.
        parts: the parts to measure.
        key_sets: part -> (batch, keys) bool, for the parts that sum the weights on a set of keys.
        known: parts that have already been measured.
    """
    sets = {part: keys for part, keys in key_sets.items() if part in parts}
    found: dict[PartName, Tensor] = {
        part: lookups.weight_on_set(call, keys) for part, keys in sets.items() if lookups.is_small_set(keys)
    }
    if from_kernels.native_supports(call.request, call.bounds):
        found |= from_kernels.measure_natively(call, from_kernels.native_parts(call.context, parts - found.keys()))
    found |= _look_up_parts(call, parts - found.keys(), {**known, **found})
    repeated = parts & repeats.KEY_SHIFTS.keys()
    if repeated and call.bounds.remainder is None:
        found |= repeats.measure_repeats(call, repeated)
    if in_pictures := parts & pictures.PICTURE_PARTS:
        found |= pictures.measure_in_pictures(call, in_pictures)
    found |= _measure_over_all_keys(call, parts - found.keys(), sets)
    if call.result is not None and call.result.head_factors is not None and call.context.output_weight is not None:
        weight = call.context.output_weight
        norms = parts & {"contribution", "output_norm"}
        found |= {part: weighted_values.norms_of_changed_heads(call, found[part], weight) for part in norms}
    if "induction_mass" in found and call.context.id_before is not None:
        found["induction_mass"] = found["induction_mass"] + lookups.weight_after_dropped_key(
            call, call.context.id_before
        )
    return number_in_text(found, call.context.key_start, call.logsumexp)


def _look_up_parts(call: MeasuredCall, parts: Collection[PartName], known: PartValues) -> dict[PartName, Tensor]:
    """Measure the parts that need a few weights per query, or none; parts that need all weights are left out.

    Args:
        call: the call.
        parts: the parts to measure.
        known: parts that have already been measured.
    """
    found: dict[PartName, Tensor] = {}
    near = [OFFSET_MASS(offset).name for offset in range(-NEAR_REACH, NEAR_REACH + 1)]
    at_offsets = [part for part in parts if part[0] == OFFSET_MASS.name]
    if "near_mass" in parts:
        at_offsets += [part for part in near if part not in known and part not in parts]
    if at_offsets:
        weights = lookups.weights_at_offsets(call, [int(part[1]) for part in at_offsets])
        found |= dict(zip(at_offsets, weights.unbind(), strict=True))
    if "near_mass" in parts:
        found["near_mass"] = torch.stack([known[part] if part in known else found[part] for part in near]).sum(0)
    for part in parts:
        match part:
            case ("first_keys_mass", int(count)):
                found[part] = lookups.weight_on_first_keys(call, count)
            case "first_special_mass":
                first = known.get(FIRST_KEY_WEIGHT)
                found[part] = lookups.weight_on_first_key_in_set(
                    call, keys_of_set(call.context, "special", None, call.logsumexp.device), first
                )
            case "sink_mass" if call.request.sinks is not None:
                found[part] = sink_mass(call.logsumexp_of_full_scores, call.request.sinks)
            case "logsumexp":
                found[part] = call.logsumexp_of_full_scores
            case "position":
                found[part] = call.positions[:, None].to(call.logsumexp).expand_as(call.logsumexp)
            case "output_norm" if call.context.output_weight is not None:
                found[part] = weighted_values.output_norms(call, call.context.output_weight)
    return {part: found[part] for part in parts if part in found}


def sink_mass(logsumexp: Tensor, sinks: Tensor) -> Tensor:
    """Compute the weight on the learned sinks (heads,): (batch, heads, queries), 0 for queries without keys."""
    weights = (sinks.detach().to(logsumexp.dtype)[:, None] - logsumexp).exp()
    return weights.masked_fill_(logsumexp == -torch.inf, 0)


def _key_sets_of_parts(
    request: AttentionRequest, context: ProbeContext, probes: Sequence[Probe]
) -> dict[PartName, Tensor]:
    """Return the set of keys of each `tokens_mass` part: part -> (batch, keys) bool.

    Raises:
        ProbeError: two probes have different sets of the same name.
    """
    found: dict[PartName, Tensor] = {}
    tokens: dict[str, frozenset[int] | None] = {}
    for probe in probes:
        for part in probe.parts:
            match part:
                case ("tokens_mass", str(name)):
                    if name != "special" and tokens.setdefault(name, probe.tokens) != probe.tokens:
                        raise ProbeError(f"Two sets of tokens are called {name!r}.", "Give one of them another name.")
                    if part not in found:
                        found[part] = keys_of_set(context, name, probe.tokens, request.shape.device)
    return found


def _measure_over_all_keys(
    call: MeasuredCall, parts: Collection[PartName], sets: Mapping[PartName, Tensor]
) -> dict[PartName, Tensor]:
    """Measure parts that need all weights of a query: in tiles, or by an attention call with other values."""
    left = [part for part in sets if part in parts]
    numbers = [weighted_values.key_set_as_values(call, sets[part]) for part in left]
    weight = call.context.output_weight
    if "contribution" in parts and weight is not None:
        numbers.append(weighted_values.projected_value_norms(call, weight))  # (batch, kv_heads, keys, group)
    stacked = torch.cat(numbers, -1) if numbers else None
    walk = [part for part in parts if part in STREAMED_PARTS]
    found: dict[PartName, Tensor] = {}
    weighed = None
    if walk:
        found, weighed = measure_in_tiles(call, walk, stacked)
    elif stacked is not None:
        weighed = weighted_values.attention_weighted_sums(call, stacked)
    if weighed is not None:
        found |= {part: weighed[..., index] for index, part in enumerate(left)}
        if "contribution" in parts:
            found["contribution"] = weighted_values.select_own_columns(call, weighed[..., len(left) :])
    return found


def drop_position_parts(attended: AttentionResult) -> AttentionResult:
    """Remove the statistics that depend on the positions of the queries from a result."""
    kept = {part: value for part, value in attended.statistics.items() if not part_named(part).uses_positions}
    return replace(attended, statistics=kept)


def measure_token_parts(
    call: AttentionCall, parts: frozenset[PartName], special_keys: Tensor | None
) -> tuple[PartValues, Tensor] | None:
    """Measure parts of the batch of a call that has run: those that need special tokens or sinks, and the logsumexp.

    Args:
        call: the call.
        parts: the parts to measure.
        special_keys: (batch, keys) bool, True = special; None if unknown.

    Returns:
        the parts and the logsumexp, (batch, heads, queries) each; None if no kernel measures them for the call. That of
        the CPU measures no others here, those of a GPU all others but those of values and equal tokens.
    """
    request, named = call.request, [part_named(part) for part in parts]
    if special_keys is None and any("special_keys" in part.needs for part in named):
        return None
    context = ProbeContext(special_keys=special_keys)
    if from_kernels.gpu_supports(request):
        return measure_parts_on_gpu(call, parts, context)
    if parts - _TOKEN_PARTS:
        return None
    logsumexp = call.result.logsumexp.detach()
    measured = MeasuredCall.from_request(request, logsumexp, context)
    if not from_kernels.native_supports(measured.request, measured.bounds):
        return None
    sets = {} if special_keys is None else {SPECIAL_MASS.name: special_keys.to(request.shape.device)}
    found = measure_parts(measured, parts, sets, known=call.result.statistics)
    # Queries without keys or with NaN are set as the kernel sets them in the parts that it measures.
    empty, bad = logsumexp == -torch.inf, logsumexp.isnan()
    more = {part: set_empty_and_bad_queries(each.to(logsumexp.dtype), empty, bad) for part, each in found.items()}
    return more, logsumexp


def measure_parts_on_gpu(
    call: AttentionCall, parts: frozenset[PartName], context: ProbeContext
) -> tuple[PartValues, Tensor] | None:
    """Measure parts of a call that has run on a GPU, in one launch and without waiting for it.

    Returns:
        the parts and the logsumexp, (batch, heads, queries) each, in one storage; None if the kernels do not measure
        one of them, or the call.
    """
    request = call.request
    if not from_kernels.gpu_supports(request) or any(part_named(part).axes != "queries" for part in parts):
        return None
    sets = {} if context.special_keys is None else {SPECIAL_MASS.name: context.special_keys}
    known = call.result.kernel_logsumexp.detach()
    found = from_kernels.measure_on_gpu(request, bounds_of(request), parts, context, logsumexp=known, key_sets=sets)
    return None if found is None or parts - found.parts.keys() else (found.parts, found.logsumexp)


def statistics_of_call(
    call: AttentionCall, probes: Iterable[Probe], context: ProbeContext = NO_CONTEXT
) -> dict[str, Tensor]:
    """Return statistics of a call that has run, from the parts that its kernel measured; measure the other parts.

    Probes for which the call lacks an input are left out; the other arguments and results are as in
    `complete_statistics`.
    """
    request, attended = call.request, call.result
    # The kernel used the first key that any query sees; the context may have an earlier first key.
    parts = {
        part: value
        for part, value in attended.statistics.items()
        if context.first_key is None or not part_named(part).uses_first_key
    }
    possible = possible_probes(probes, request, context)
    return complete_statistics(request, attended.logsumexp.detach(), possible, context, parts=parts, result=attended)
