"""Measure statistics of queries whose keys are on several ranks: separately for each subset of keys, merged exactly.

If l is the logsumexp over a subset of the keys and L the logsumexp over all keys, the subset has the share exp(l - L)
of the attention weight. How the values of a part on two subsets combine is said by the part (`Part.combination`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.parts import (
    Combination,
    KeySubset,
    PartName,
    number_in_text,
    part_named,
    set_empty_and_bad_queries,
)
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.statistics import measure_parts

ROUNDING_STEPS = 4
"""How many steps of its dtype, relative to its size, a logsumexp may be off."""


@torch.no_grad()
def measure_over_keys(
    request: AttentionRequest, attended: AttentionResult, key_start: int, first_key: Tensor | int
) -> dict[PartName, Tensor]:
    """Return the `requested_statistics` of a request on a subset of the keys, (batch, heads, queries) each.

    Statistics that the kernel did not return are measured here, and parts that do not combine are left out.

    Args:
        request: the call on the subset.
        attended: its result.
        key_start: number of keys before the subset.
        first_key: index of the sequence's first visible key, counted from the first key of the subset, an int or
            (batch or 1,).
    """
    wanted = frozenset(_combinations(request.requested_statistics))
    known = {
        part: value
        for part, value in attended.statistics.items()
        if part in wanted and not part_named(part).uses_first_key
    }
    logsumexp = attended.logsumexp.detach()
    found = dict(number_in_text(known, key_start, logsumexp))
    with without_autocast(request.shape.device):
        call = MeasuredCall.from_request(request, logsumexp, ProbeContext(first_key=first_key, key_start=key_start))
        found |= measure_parts(call, wanted - found.keys())
    empty, bad = logsumexp == -torch.inf, logsumexp.isnan()
    # The parts are sorted, because a set of strings has another order in each process, and all ranks need the same
    # order.
    return {part: set_empty_and_bad_queries(found[part], empty, bad) for part in sorted(found, key=str)}


class MergedStatistics:
    """Merges statistics of queries that are measured on disjoint subsets of the keys.

    Args:
        wanted: names of the statistics to return, of which those that do not combine are left out.
        like: tensor (batch, heads, queries) with the sizes and the device of the statistics.
    """

    def __init__(self, wanted: frozenset[PartName], like: Tensor) -> None:
        self.wanted = wanted
        self.combinations = _combinations(wanted)
        self.logsumexp = torch.full_like(like, -torch.inf, dtype=torch.float64)
        self.parts = {
            part: torch.full_like(self.logsumexp, -1 if part_named(part).is_integer else 0)
            for part in self.combinations
        }

    def add(self, at: slice, logsumexp: Tensor, parts: Mapping[PartName, Tensor]) -> None:
        """Merge the statistics of the queries `at` over a subset of keys, whose parts number tokens in the text."""
        known = {part: value[:, :, at] for part, value in self.parts.items()}
        before, added = self.logsumexp[:, :, at], logsumexp.double()
        total = torch.logaddexp(before, added)
        error = ROUNDING_STEPS * torch.finfo(logsumexp.dtype).eps * (1 + total.abs())
        one, other = (
            self._subset_of(values, (each - total).masked_fill(total == -torch.inf, -torch.inf), error)
            for values, each in ((known, before), (parts, added))
        )
        joined = {part: each.join(part, one, other) for part, each in self.combinations.items()}
        for part, value in joined.items():
            self.parts[part][:, :, at] = value
        self.logsumexp[:, :, at] = total

    def _subset_of(self, values: Mapping[PartName, Tensor], log_share: Tensor, rounding: Tensor) -> KeySubset:
        scaled = {part: each.scale(values[part].double(), log_share) for part, each in self.combinations.items()}
        return KeySubset(scaled, log_share.exp(), rounding)

    def results(self, logsumexp: Tensor) -> dict[PartName, Tensor]:
        """Return the wanted statistics, (batch, heads, queries) each; `logsumexp` is over all keys and the sink."""
        wide = logsumexp.double()
        empty, bad = wide == -torch.inf, wide.isnan()
        log_share, dtype = (self.logsumexp - wide).masked_fill(empty, 0), working_dtype(logsumexp.dtype)
        found: dict[PartName, Tensor] = {}
        for part in sorted(self.wanted & self.combinations.keys(), key=str):
            value = self.combinations[part].scale(self.parts[part], log_share)
            value = value.to(torch.int64 if part_named(part).is_integer else dtype)
            found[part] = set_empty_and_bad_queries(value, empty, bad)
        return found


def _combinations(wanted: frozenset[PartName]) -> dict[PartName, Combination]:
    """Return how the wanted parts combine, with their companions, and without those that do not combine."""
    found = {part: each for part in wanted if (each := part_named(part).combination) is not None}
    for each in list(found.values()):
        more = None if each.companion is None else part_named(each.companion).combination
        if each.companion is not None and more is not None:
            found[each.companion] = more
    return found
