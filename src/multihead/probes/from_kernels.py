"""Measure the parts of statistics with the kernels that measure them: the native one, and those of Triton on a GPU.

The kernels on a GPU read no value, so a call that they measure completely does not wait for the device. Nothing is
known there of a logsumexp that is too large for float32, for which statistics are measured in float64 elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.native import kernel
from multihead.kernels.native.statistics import (
    FIRST_KEY_WEIGHT,
    PARTS_OF_ONE_PASS,
    PARTS_OF_SECOND_PASS,
    measure_in_one_pass,
    sum_weights_per_key,
)
from multihead.kernels.parts import FIRST_SPECIAL_MASS, POOLED_MAP, RECEIVED, SPECIAL_MASS, PartName, part_named
from multihead.kernels.triton import statistics as triton_kernels
from multihead.masks.base import KeyBounds
from multihead.probes.catalogue import EFFECTIVE_KEYS, LARGEST_SCORE, SEPARATOR_MASS
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.pooling import cell_of_map
from multihead.probes.probe import Probe
from multihead.tensors.precision import widen
from multihead.tensors.tracing import is_traced


def native_supports(request: AttentionRequest, bounds: KeyBounds) -> bool:
    """Whether the native kernel can measure a call: not in a traced graph, and with supported masks and options."""
    return not is_traced() and kernel.refusal(request, bounds) is None


def native_parts(context: ProbeContext, parts: Collection[PartName]) -> frozenset[PartName]:
    """Return the subset of `parts` that the native kernel can measure with this context."""
    known = (PARTS_OF_ONE_PASS | PARTS_OF_SECOND_PASS).intersection(parts)
    if context.map_pool != "mean":
        known -= {"pooled_map"}
    if context.first_key is not None:
        known -= {FIRST_KEY_WEIGHT}  # the kernel assumes that the first key is in the call
    return known if context.special_keys is not None else known - {SPECIAL_MASS.name}


def run_native_first_pass(
    request: AttentionRequest, bounds: KeyBounds, parts: Collection[PartName], context: ProbeContext
) -> tuple[Tensor, dict[PartName, Tensor]]:
    """Measure the logsumexp of a call, and in the same pass all of `parts` that the native kernel supports.

    Returns:
        the logsumexp and the parts, (batch, heads, queries) each.
    """
    return measure_in_one_pass(request, bounds, PARTS_OF_ONE_PASS & native_parts(context, parts), context.special_keys)


def measure_natively(call: MeasuredCall, parts: Collection[PartName]) -> dict[PartName, Tensor]:
    """Measure the parts per query of a call in one pass, and the parts that sum over queries in a second pass.

    Args:
        call: the call; no gradients are computed.
        parts: a subset of `native_parts`.

    Returns:
        the parts, without the weight on the first key where a row has several texts and special keys are measured too.
    """
    found: dict[PartName, Tensor] = {}
    if not PARTS_OF_ONE_PASS.isdisjoint(parts):
        found |= run_native_first_pass(call.request, call.bounds, parts, call.context)[1]
    if not PARTS_OF_SECOND_PASS.isdisjoint(parts):
        found |= _measure_received_and_map(call, mapped="pooled_map" in parts)
    return {part: found[part] for part in parts if part in found}


def _measure_received_and_map(call: MeasuredCall, *, mapped: bool) -> dict[PartName, Tensor]:
    """Measure "received", the sum of the weights on each key, and "pooled_map" if `mapped`."""
    shape = call.request.shape
    empty = call.empty_map(shape.num_heads)
    cell = (empty.row_block, empty.column_block) if mapped else None
    received, sums = sum_weights_per_key(call.request, call.bounds, call.logsumexp.float(), cell=cell)
    found: dict[PartName, Tensor] = {"received": received}
    if sums is not None:
        found["pooled_map"] = widen(sums)
        for sample in range(shape.batch):
            pooled = replace(call.empty_map(shape.num_heads), sums=found["pooled_map"][sample])
            pooled.count_visible_cells(call.request, call.bounds, sample)
            found["pooled_map"][sample] = pooled.means()
    return found


# Statistics that the kernel itself computes from its sums, and their rows.
_STATISTICS_OF_KERNEL: dict[str, int] = {
    EFFECTIVE_KEYS.name: triton_kernels.EXP_ENTROPY,
    LARGEST_SCORE.name: triton_kernels.LARGEST_SCORE,
}


class MeasuredOnGpu(NamedTuple):
    """What was measured of a call on a GPU.

    Attributes:
        logsumexp: (batch, heads, queries), nats.
        parts: name of a part -> its values.
        statistics: name of a probe -> its values, (batch, heads, queries), of probes that are no parts.
    """

    logsumexp: Tensor
    parts: Mapping[PartName, Tensor]
    statistics: Mapping[str, Tensor] = MappingProxyType({})


def gpu_supports(request: AttentionRequest) -> bool:
    """Whether the Triton kernels measure a call."""
    return request.shape.device.type == "cuda" and triton_kernels.refusal(request) is None


@torch.no_grad()
def measure_on_gpu(
    request: AttentionRequest,
    bounds: KeyBounds,
    parts: Set[PartName],
    context: ProbeContext,
    *,
    probes: Sequence[Probe] = (),
    logsumexp: Tensor | None = None,
    key_sets: Mapping[PartName, Tensor] = MappingProxyType({}),
) -> MeasuredOnGpu | None:
    """Measure parts of a call on its GPU, without waiting for it.

    Args:
        request: the call, which `gpu_supports`.
        bounds: its key bounds.
        parts: the parts; those that the kernels do not measure are left out.
        context: inputs of the probes besides q and k.
        probes: probes whose statistics are computed with the parts, if the kernels compute them.
        logsumexp: (batch, heads, queries), as any kernel wrote it, if parts per query are measured; None computes it in
            the same launch.
        key_sets: part -> (batch, keys) bool, the keys of its set.

    Returns:
        what was measured; None if a kernel does not run on this device.
    """
    sums = {RECEIVED.name, POOLED_MAP.name}.intersection(parts)
    statistics: dict[str, Tensor] = {}
    found: dict[PartName, Tensor] = {}
    known = logsumexp
    if logsumexp is None or parts - sums:
        first_keys = None
        if context.first_key is not None and any(part_named(part).uses_first_key for part in parts):
            first_keys = torch.as_tensor(context.first_key, device=request.shape.device).expand(request.shape.batch)
        if FIRST_SPECIAL_MASS.name in parts and context.special_keys is not None:
            key_sets = {SPECIAL_MASS.name: context.special_keys.to(request.shape.device), **key_sets}
        measured = triton_kernels.measure_in_one_pass(
            request, bounds, parts, logsumexp=logsumexp, key_sets=key_sets, first_keys=first_keys
        )
        if measured is None:
            return None
        found = measured.parts(parts)
        known = measured.logsumexp
        rows = {**_STATISTICS_OF_KERNEL, SEPARATOR_MASS.name: measured.rows.after_first_special}
        wanted = {probe.name: rows.get(probe.name) for probe in probes}
        statistics = {name: measured.numbers[row] for name, row in wanted.items() if row is not None}
    assert known is not None
    if sums:
        shape = request.shape
        cell = cell_of_map(shape.query_length, shape.key_length, context.map_size) if POOLED_MAP.name in sums else None
        summed = triton_kernels.sum_weights_per_key(request, bounds, known, cell=cell, pool=context.map_pool)
        if summed is None:
            return None
        found[RECEIVED.name] = summed[0]
        if summed[1] is not None:
            found[POOLED_MAP.name] = summed[1]
    return MeasuredOnGpu(known, {part: found[part] for part in parts if part in found}, statistics)
