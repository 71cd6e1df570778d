"""Statistics of queries whose keys lie on several ranks: measured for each part of the keys, and merged exactly.

If l is the logsumexp over a part of the keys and L that over all keys, the part has the share exp(l - L) of the weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.native.statistics import FIRST_KEY
from multihead.kernels.parts import Part
from multihead.probes.context import ProbeContext
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.statistics import measure_parts, set_empty_and_bad_queries

_KEY, _LARGEST, _MEAN, _SPREAD = "largest_key", "largest_weight", "mean_distance", "distance_spread"


@torch.no_grad()
def measure_over_keys(
    request: AttentionRequest, attended: AttentionResult, first_key: Tensor | int
) -> dict[Part, Tensor]:
    """Return the parts of statistics that a request wants, (batch, heads, queries) each.

    Those that the kernel did not return are measured now. The request is a call on some of the keys; first_key, an
    int or (batch or 1,), is counted from the first of these keys.
    """
    wanted = _add_companion_parts(request.wanted)
    known = {part: value for part, value in attended.statistics.items() if part in wanted and part != FIRST_KEY}
    with without_autocast(request.shape.device):
        context = ProbeContext(first_key=first_key)
        call = MeasuredCall.of(request, attended.logsumexp.detach(), context)
        known |= measure_parts(call, wanted - known.keys())
    empty, bad = attended.logsumexp == -torch.inf, attended.logsumexp.isnan()
    # Sorted, because all ranks need the same order, and that of a set of strings differs between processes.
    return {part: set_empty_and_bad_queries(known[part], empty, bad) for part in sorted(known, key=str)}


class MergedParts:
    """Parts of statistics of some queries, over the keys that were added so far.

    Args:
        wanted: the parts to return.
        like: a tensor (batch, heads, queries), whose sizes and device the parts get.
    """

    def __init__(self, wanted: Collection[Part], like: Tensor) -> None:
        self.wanted = frozenset(wanted)
        self.logsumexp = torch.full_like(like, -torch.inf, dtype=torch.float64)
        self.sums = {
            part: torch.zeros_like(like, dtype=torch.float64)
            for part in _add_companion_parts(self.wanted)
            if part not in (_KEY, _LARGEST, "logsumexp")
        }
        self.largest_score = torch.full_like(self.logsumexp, -torch.inf)
        self.largest_key = torch.full_like(self.logsumexp, -1, dtype=torch.int64)

    def add(self, at: slice, first_key: int, logsumexp: Tensor, parts: dict[Part, Tensor]) -> None:
        """Add what `measure_parts` returned for some keys, from `first_key` on, and for the queries at `at`."""
        before, added = self.logsumexp[:, :, at], logsumexp.double()
        total = torch.logaddexp(before, added)
        empty = total == -torch.inf
        log_old, log_new = ((each - total).masked_fill(empty, -torch.inf) for each in (before, added))
        old, new = log_old.exp(), log_new.exp()
        found = {part: value.double() for part, value in parts.items()}
        if _MEAN in self.sums:
            mean = old * self.sums[_MEAN][:, :, at] + new * found[_MEAN]
            if _SPREAD in self.sums:
                variance = sum(
                    share * (spread.square() + (own - mean).square())
                    for share, spread, own in (
                        (old, self.sums[_SPREAD][:, :, at], self.sums[_MEAN][:, :, at]),
                        (new, found[_SPREAD], found[_MEAN]),
                    )
                )
                self.sums[_SPREAD][:, :, at] = torch.as_tensor(variance).sqrt()
            self.sums[_MEAN][:, :, at] = mean
        for part, own in self.sums.items():
            if part in (_MEAN, _SPREAD):
                continue
            mixed = old * own[:, :, at] + new * found[part]
            if part == "entropy":  # add the entropy of the two shares
                mixed = mixed - _share_times_log(old, log_old) - _share_times_log(new, log_new)
            own[:, :, at] = mixed
        if _LARGEST in found:
            self._add_largest(at, first_key, added, found[_LARGEST], parts.get(_KEY))
        self.logsumexp[:, :, at] = total

    def _add_largest(self, at: slice, first_key: int, logsumexp: Tensor, weight: Tensor, key: Tensor | None) -> None:
        """Update the largest score of each query and its key; of equal scores the first key is kept."""
        score = weight.log() + logsumexp
        best = self.largest_score[:, :, at]
        if key is not None:
            moved, known = key + first_key * (key >= 0), self.largest_key[:, :, at]
            larger = (score > best) | ((score == best) & (moved < known) & (moved >= 0))
            self.largest_key[:, :, at] = torch.where(larger, moved, known)
        self.largest_score[:, :, at] = torch.maximum(score, best)

    def results(self, logsumexp: Tensor) -> dict[Part, Tensor]:
        """Return the wanted parts, (batch, heads, queries) each; the logsumexp is over all keys and the sink."""
        wide = logsumexp.double()
        empty, bad = wide == -torch.inf, wide.isnan()
        log_share = (self.logsumexp - wide).masked_fill(empty, 0)
        share = log_share.exp()
        found: dict[Part, Tensor] = {}
        for part in sorted(self.wanted, key=str):
            if part == _KEY:
                value = self.largest_key
            elif part == _LARGEST:
                value = (self.largest_score - wide).exp()
            elif part == "logsumexp":
                value = wide
            elif part == "entropy":
                value = (share * (self.sums[part] - log_share)).clamp(min=0)
            else:
                value = self.sums[part] if part in (_MEAN, _SPREAD) else share * self.sums[part]
            found[part] = set_empty_and_bad_queries(value, empty, bad)
        dtype = working_dtype(logsumexp.dtype)
        return {part: value.to(dtype) if value.is_floating_point() else value for part, value in found.items()}


def stack_parts(parts: dict[Part, Tensor]) -> Tensor:
    """Return parts as one tensor (batch, heads, queries, parts) in float64, which holds every key exactly."""
    return torch.stack([value.double() for value in parts.values()], -1)


def unstack_parts(tensor: Tensor, like: dict[Part, Tensor]) -> dict[Part, Tensor]:
    """Undo `stack_parts`, with the names and dtypes of the parts in `like`."""
    each = zip(like.items(), tensor.unbind(-1), strict=True)
    return {part: value.to(other.dtype) for (part, other), value in each}


def _add_companion_parts(wanted: Iterable[Part]) -> frozenset[Part]:
    """Add the parts without which others cannot be merged: a spread needs its mean, a key its weight."""
    found = frozenset(wanted)
    return found | {_MEAN for part in found if part == _SPREAD} | {_LARGEST for part in found if part == _KEY}


def _share_times_log(share: Tensor, log: Tensor) -> Tensor:
    """Return share * ln share, given both factors; 0 for a share of 0."""
    return share * log.masked_fill(share == 0, 0)
