"""Measure the parts of statistics with the native kernel, for calls that it supports."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

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
from multihead.kernels.parts import SPECIAL_MASS, PartName
from multihead.masks.base import KeyBounds
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.tensors.tracing import is_traced


def supports_call(request: AttentionRequest, bounds: KeyBounds) -> bool:
    """Whether the native kernel can measure a call: not in a traced graph, and with supported masks and options."""
    return not is_traced() and kernel.refusal(request, bounds) is None


def measurable_parts(context: ProbeContext, parts: Collection[PartName]) -> frozenset[PartName]:
    """Return the subset of `parts` that the native kernel can measure with this context."""
    known = (PARTS_OF_ONE_PASS | PARTS_OF_SECOND_PASS).intersection(parts)
    if context.map_pool != "mean":
        known -= {"pooled_map"}
    if context.first_key is not None:
        known -= {FIRST_KEY_WEIGHT}  # the kernel assumes that the first key is in the call
    return known if context.special_keys is not None else known - {SPECIAL_MASS.name}


def run_first_pass(
    request: AttentionRequest, bounds: KeyBounds, parts: Collection[PartName], context: ProbeContext
) -> tuple[Tensor, dict[PartName, Tensor]]:
    """Measure the logsumexp of a call, and in the same pass all of `parts` that the native kernel supports.

    Returns:
        the logsumexp and the parts, (batch, heads, queries) each.
    """
    return measure_in_one_pass(
        request, bounds, PARTS_OF_ONE_PASS & measurable_parts(context, parts), context.special_keys
    )


def measure(call: MeasuredCall, parts: Collection[PartName]) -> dict[PartName, Tensor]:
    """Measure the parts per query of a call in one pass, and the parts that sum over queries in a second pass.

    Args:
        call: the call; no gradients are computed.
        parts: a subset of `measurable_parts`.

    Returns:
        the parts, without the weight on the first key where a row has several texts and special keys are measured too.
    """
    found: dict[PartName, Tensor] = {}
    if not PARTS_OF_ONE_PASS.isdisjoint(parts):
        found |= run_first_pass(call.request, call.bounds, parts, call.context)[1]
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
        found["pooled_map"] = sums.double()
        for sample in range(shape.batch):
            pooled = replace(call.empty_map(shape.num_heads), sums=found["pooled_map"][sample])
            pooled.count_visible_cells(call.request, call.bounds, sample)
            found["pooled_map"][sample] = pooled.means()
    return found
