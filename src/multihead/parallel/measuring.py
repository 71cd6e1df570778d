"""Measure statistics of queries whose keys are on several ranks: separately for each subset of keys, merged exactly.

If l is the logsumexp over a subset of the keys and L the logsumexp over all keys, the subset has the share exp(l - L)
of the attention weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.native.statistics import FIRST_KEY_WEIGHT
from multihead.kernels.parts import PartName
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.statistics import measure_parts, set_empty_and_bad_queries

_LARGEST_KEY, _LARGEST_WEIGHT = "largest_key", "largest_weight"
_MEAN_DISTANCE, _DISTANCE_SPREAD = "mean_distance", "distance_spread"
_COMPANIONS: dict[PartName, PartName] = {_DISTANCE_SPREAD: _MEAN_DISTANCE, _LARGEST_KEY: _LARGEST_WEIGHT}


@torch.no_grad()
def measure_over_keys(
    request: AttentionRequest, attended: AttentionResult, first_key: Tensor | int
) -> dict[PartName, Tensor]:
    """Return the `requested_statistics` of a request on a subset of the keys, (batch, heads, queries) each.

    Statistics that the kernel did not return are measured here. `first_key`, an int or (batch or 1,), is the index of
    the sequence's first visible key, counted from the first key of the subset.
    """
    wanted = _add_companion_parts(request.requested_statistics)
    known = {part: value for part, value in attended.statistics.items() if part in wanted and part != FIRST_KEY_WEIGHT}
    with without_autocast(request.shape.device):
        context = ProbeContext(first_key=first_key)
        call = MeasuredCall.from_request(request, attended.logsumexp.detach(), context)
        known |= measure_parts(call, wanted - known.keys())
    empty, bad = attended.logsumexp == -torch.inf, attended.logsumexp.isnan()
    # The parts are sorted, because a set of strings has another order in each process, and all ranks need the same
    # order.
    return {part: set_empty_and_bad_queries(known[part], empty, bad) for part in sorted(known, key=str)}


class MergedStatistics:
    """Merges statistics of queries that are measured on disjoint subsets of the keys.

    Args:
        wanted: names of the statistics to return.
        like: tensor (batch, heads, queries) with the sizes and the device of the statistics.
    """

    def __init__(self, wanted: frozenset[PartName], like: Tensor) -> None:
        self.wanted = wanted
        self.logsumexp = torch.full_like(like, -torch.inf, dtype=torch.float64)
        self.sums = {
            part: torch.zeros_like(like, dtype=torch.float64)
            for part in _add_companion_parts(self.wanted)
            if part not in (_LARGEST_KEY, _LARGEST_WEIGHT, "logsumexp")
        }
        self.largest_score = torch.full_like(self.logsumexp, -torch.inf)
        self.largest_key = torch.full_like(self.logsumexp, -1, dtype=torch.int64)

    def add(self, at: slice, first_key: int, logsumexp: Tensor, parts: dict[PartName, Tensor]) -> None:
        """Merge the statistics of the queries `at` over a subset of keys, the first of which is key `first_key`."""
        before, added = self.logsumexp[:, :, at], logsumexp.double()
        total = torch.logaddexp(before, added)
        empty = total == -torch.inf
        log_old, log_new = ((each - total).masked_fill(empty, -torch.inf) for each in (before, added))
        old, new = log_old.exp(), log_new.exp()
        found = {part: value.double() for part, value in parts.items()}
        if _DISTANCE_SPREAD in self.sums:
            known, more, spread = self.sums[_MEAN_DISTANCE][:, :, at], found[_MEAN_DISTANCE], found[_DISTANCE_SPREAD]
            mean, own = old * known + new * more, self.sums[_DISTANCE_SPREAD][:, :, at]
            variance = old * (own.square() + (known - mean).square()) + new * (spread.square() + (more - mean).square())
            own.copy_(variance.sqrt())
        for part, own in self.sums.items():
            if part == _DISTANCE_SPREAD:
                continue
            mixed = old * own[:, :, at] + new * found[part]
            if part == "entropy":  # the entropy of the two shares is added
                mixed = mixed - _share_times_log(old, log_old) - _share_times_log(new, log_new)
            own[:, :, at] = mixed
        if _LARGEST_WEIGHT in found:
            self._add_largest(at, first_key, added, found[_LARGEST_WEIGHT], parts.get(_LARGEST_KEY))
        self.logsumexp[:, :, at] = total

    def _add_largest(self, at: slice, first_key: int, logsumexp: Tensor, weight: Tensor, key: Tensor | None) -> None:
        """Update the largest score of each query and its key; ties go to the first key."""
        score = weight.log() + logsumexp
        best = self.largest_score[:, :, at]
        if key is not None:
            moved, known = key + first_key * (key >= 0), self.largest_key[:, :, at]
            larger = (score > best) | ((score == best) & (moved < known) & (moved >= 0))
            self.largest_key[:, :, at] = torch.where(larger, moved, known)
        self.largest_score[:, :, at] = torch.maximum(score, best)

    def results(self, logsumexp: Tensor) -> dict[PartName, Tensor]:
        """Return the wanted statistics, (batch, heads, queries) each; `logsumexp` is over all keys and the sink."""
        wide = logsumexp.double()
        empty, bad = wide == -torch.inf, wide.isnan()
        log_share = (self.logsumexp - wide).masked_fill(empty, 0)
        share = log_share.exp()
        found: dict[PartName, Tensor] = {}
        for part in sorted(self.wanted, key=str):
            if part == _LARGEST_KEY:
                value = self.largest_key
            elif part == _LARGEST_WEIGHT:
                value = (self.largest_score - wide).exp()
            elif part == "logsumexp":
                value = wide
            elif part == "entropy":
                value = (share * (self.sums[part] - log_share)).clamp(min=0)
            else:
                value = self.sums[part] if part in (_MEAN_DISTANCE, _DISTANCE_SPREAD) else share * self.sums[part]
            found[part] = set_empty_and_bad_queries(value, empty, bad)
        dtype = working_dtype(logsumexp.dtype)
        return {part: value.to(dtype) if value.is_floating_point() else value for part, value in found.items()}


def _add_companion_parts(wanted: frozenset[PartName]) -> frozenset[PartName]:
    """Add the statistics that merging needs: the mean distance for its spread, the largest weight for its key."""
    return wanted.union(_COMPANIONS[part] for part in wanted if part in _COMPANIONS)


def _share_times_log(share: Tensor, log: Tensor) -> Tensor:
    """Return share * ln share, where `log` is ln share; 0 for a share of 0."""
    return share * log.masked_fill(share == 0, 0)
