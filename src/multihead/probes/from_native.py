"""Ask the native kernel for statistics, where it takes the call."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels.native import kernel
from multihead.kernels.native.call import bias_as_read
from multihead.kernels.native.statistics import ONE_PASS, one_pass, second_pass
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.pooling import PooledMap
from multihead.probes.probe import Part
from multihead.tracing import traced

# What the kernel's statistics are called here.
_OF_ONE_PASS: dict[Part, str] = {
    "surprisal": "entropy",
    "mean_distance": "mean_distance",
    "distance_spread": "distance_spread",
    "largest": "largest_weight",
    "largest_key": "largest_key",
    ("at", 0): "self_mass",
    ("at", -1): "previous_mass",
    ("at", 1): "next_mass",
    ("first", 1): "first_mass",
    ("on", "special"): "special_mass",
}
assert set(_OF_ONE_PASS.values()) | {"effective_keys"} == ONE_PASS


def takes(subject: MeasuredCall) -> bool:
    """Whether the native kernel can measure a call: what is traced would not hold it."""
    return not traced() and kernel.refusal(subject.request, subject.bounds) is None


def given(subject: MeasuredCall, parts: Collection[Part]) -> frozenset[Part]:
    """Tell which parts the kernel gives: a set's name is its own, the first key that of the call."""
    known = set(_OF_ONE_PASS) | {"received"}
    if subject.context.map_pool == "mean":
        known.add("pooled")
    if subject.context.first_key is not None:
        known.remove(("first", 1))
    if subject.context.special_keys is None:
        known.remove(("on", "special"))
    return frozenset(parts) & known


def asked(subject: MeasuredCall, parts: Collection[Part]) -> dict[Part, Tensor]:
    """Measure a call in one pass over its keys, and what each key receives in a second one.

    Args:
        subject: the call; gradients are not followed.
        parts: some of those that are `given`.
    """
    request = subject.request
    if request.bias is not None:
        request = replace(request, bias=bias_as_read(request.bias))
    found: dict[Part, Tensor] = {}
    names = {part: _OF_ONE_PASS[part] for part in parts if part in _OF_ONE_PASS}
    if names:
        measured = one_pass(request, subject.bounds, names.values(), subject.context.special_keys)
        found |= {part: measured[name] for part, name in names.items()}
    if "received" in parts or "pooled" in parts:
        found |= _second(subject, request, mapped="pooled" in parts)
    return {part: found[part] for part in parts}


def _second(subject: MeasuredCall, request: AttentionRequest, *, mapped: bool) -> dict[Part, Tensor]:
    """Sum what each key receives, and pool the map where it is wanted."""
    shape = request.shape

    def blank() -> PooledMap:
        sizes = (shape.num_heads, shape.query_length, shape.key_length)
        return PooledMap.zero(*sizes, size=subject.context.map_size, device=torch.device("cpu"))

    cell = (blank().row_block, blank().column_block) if mapped else None
    received, sums = second_pass(request, subject.bounds, subject.logsumexp.float(), cell=cell)
    found: dict[Part, Tensor] = {"received": received}
    if sums is not None:
        means = [blank().sums]  # what an empty batch takes its shape from
        for sample in range(shape.batch):
            pooled = blank()
            pooled.sums.copy_(sums[sample])
            pooled.count(request, subject.bounds, sample)
            means.append(pooled.means())
        found["pooled"] = torch.stack(means)[1:]
    return found
