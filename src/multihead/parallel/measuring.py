"""Statistics of queries whose keys lie on several ranks: measured for each part of the keys, and merged exactly.

With l the logsumexp of a part and L that of all keys, the part has the share exp(l - L) of a query's weight.
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
from multihead.probes.statistics import measure_parts

_KEY, _LARGEST, _MEAN, _SPREAD = "largest_key", "largest_weight", "mean_distance", "distance_spread"


@torch.no_grad()
def measured(request: AttentionRequest, attended: AttentionResult, first_key: Tensor | int) -> dict[Part, Tensor]:
    """Return the parts that a request wants, (batch, heads, queries) each: those of its kernel, others measured now.

    The request is a call on some of the keys. first_key is (batch or 1,), or one for all, counted from the first of
    these keys.
    """
    wanted = _with_companions(request.wanted)
    known = {part: value for part, value in attended.statistics.items() if part in wanted and part != FIRST_KEY}
    with without_autocast(request.shape.device):
        context = ProbeContext(first_key=first_key)
        call = MeasuredCall.of(request, attended.logsumexp.detach(), context)
        known |= measure_parts(call, wanted - known.keys())
    empty, bad = attended.logsumexp == -torch.inf, attended.logsumexp.isnan()
    # In an order that is the same on all ranks, which that of a set of strings is not.
    return {part: _fill_empty_and_bad(known[part], empty, bad) for part in sorted(known, key=str)}


class MergedParts:
    """Parts of statistics of some queries, over the keys that were added so far.

    Args:
        wanted: the parts to return.
        like: (batch, heads, queries), for the sizes and the device.
    """

    def __init__(self, wanted: Collection[Part], like: Tensor) -> None:
        self.wanted = frozenset(wanted)
        self.logsumexp = torch.full_like(like, -torch.inf, dtype=torch.float64)
        self.sums = {
            part: torch.zeros_like(like, dtype=torch.float64)
            for part in _with_companions(self.wanted)
            if part not in (_KEY, _LARGEST, "logsumexp")
        }
        self.largest_score = torch.full_like(self.logsumexp, -torch.inf)
        self.largest_key = torch.full_like(self.logsumexp, -1, dtype=torch.int64)

    def add(self, at: slice, first_key: int, logsumexp: Tensor, parts: dict[Part, Tensor]) -> None:
        """Add what `measured` returned of a part of the keys, with the queries, first key and logsumexp of the part."""
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
            if part == "entropy":  # of the shares of the two parts
                mixed = mixed - _share_times_log(old, log_old) - _share_times_log(new, log_new)
            own[:, :, at] = mixed
        if _LARGEST in found:
            self._add_largest(at, first_key, added, found[_LARGEST], parts.get(_KEY))
        self.logsumexp[:, :, at] = total

    def _add_largest(self, at: slice, first_key: int, logsumexp: Tensor, weight: Tensor, key: Tensor | None) -> None:
        """Keep the largest score, and of equal ones the first key."""
        score = weight.log() + logsumexp
        best = self.largest_score[:, :, at]
        if key is not None:
            moved, known = key + first_key * (key >= 0), self.largest_key[:, :, at]
            larger = (score > best) | ((score == best) & (moved < known) & (moved >= 0))
            self.largest_key[:, :, at] = torch.where(larger, moved, known)
        self.largest_score[:, :, at] = torch.maximum(score, best)

    def results(self, logsumexp: Tensor) -> dict[Part, Tensor]:
        """Return the wanted parts, (batch, heads, queries) each, given the logsumexp over all keys and the sink."""
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
            found[part] = _fill_empty_and_bad(value, empty, bad)
        dtype = working_dtype(logsumexp.dtype)
        return {part: value.to(dtype) if value.is_floating_point() else value for part, value in found.items()}


def stack_parts(parts: dict[Part, Tensor]) -> Tensor:
    """Return parts as one tensor (batch, heads, queries, parts) in float64, which holds every key exactly."""
    return torch.stack([value.double() for value in parts.values()], -1)


def unstack_parts(tensor: Tensor, like: dict[Part, Tensor]) -> dict[Part, Tensor]:
    """Undo `stack_parts`: parts in the dtypes of others."""
    each = zip(like.items(), tensor.unbind(-1), strict=True)
    return {part: value.to(other.dtype) for (part, other), value in each}


def _with_companions(wanted: Iterable[Part]) -> frozenset[Part]:
    """Add the parts without which others cannot be merged: a spread needs its mean, a key its weight."""
    found = frozenset(wanted)
    return found | {_MEAN for part in found if part == _SPREAD} | {_LARGEST for part in found if part == _KEY}


def _share_times_log(share: Tensor, log: Tensor) -> Tensor:
    """Return share * ln share, 0 for no share."""
    return share * log.masked_fill(share == 0, 0)


def _fill_empty_and_bad(value: Tensor, empty: Tensor, bad: Tensor) -> Tensor:
    """Set queries that see no key to 0 and those that see NaN to NaN; both to -1 among keys."""
    of_empty, of_bad = (0, torch.nan) if value.is_floating_point() else (-1, -1)
    return value.masked_fill(empty, of_empty).masked_fill(bad, of_bad)
