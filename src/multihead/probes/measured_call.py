"""An attention call that probes measure, with its logsumexp and the other inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.dense_tile import first_key_of_samples, first_key_of_texts, positions_of_queries, visible_cells
from multihead.kernels.nonfinite import replace_nonfinite
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.base import KeyBounds
from multihead.probes.context import ProbeContext
from multihead.probes.pooling import PooledMap
from multihead.probes.tile import RowLogsumexps, has_large_logsumexp, logsumexp_of_rows, score_base, widen_request
from multihead.scores.bias import RelativeBias, index_bias
from multihead.tensors.shapes import consecutive_slices

ROWS_PER_STEP = 256  # queries per step if visibility is evaluated cell by cell


@dataclass(frozen=True, eq=False)
class MeasuredCall:
    """An attention call that probes measure, with its key bounds, logsumexp and other inputs of probes.

    Attributes:
        request: the call.
        bounds: interval of visible keys of each query.
        logsumexp: (batch, heads, queries), nats, minus `base`; -inf without visible keys, or NaN.
        context: inputs of the probes besides q and k.
        result: the result of the call; None if unknown.
        base: (batch, heads, queries), subtracted from huge scores, see `tile.score_base`; or None.
    """

    request: AttentionRequest
    bounds: KeyBounds
    logsumexp: Tensor
    context: ProbeContext
    result: AttentionResult | None = None
    base: Tensor | None = None

    @staticmethod
    def from_request(
        request: AttentionRequest, logsumexp: Tensor, context: ProbeContext, *, result: AttentionResult | None = None
    ) -> MeasuredCall:
        """Prepare a call for measuring; with a large logsumexp, its tensors are converted to float64."""
        bounds = bounds_of(request)
        base = score_base(request, logsumexp)
        if base is not None or (logsumexp.dtype != torch.float64 and has_large_logsumexp(logsumexp)):
            heads = torch.arange(request.shape.num_heads, device=request.shape.device)
            logsumexp = logsumexp_of_rows(request, logsumexp, RowLogsumexps(), heads, slice(None), base)
            request = widen_request(request)
        return MeasuredCall(request, bounds, logsumexp, context, result, base)

    @property
    def logsumexp_of_full_scores(self) -> Tensor:
        """Logsumexp of the scores before `base` was subtracted from them: (batch, heads, queries), nats."""
        return self.logsumexp if self.base is None else self.logsumexp + self.base

    @cached_property
    def request_without_nonfinite(self) -> AttentionRequest:
        """The request with NaN and inf replaced; queries that see such values have a logsumexp of NaN."""
        return replace_nonfinite(self.request, self.bounds)[0]

    @cached_property
    def finite_logsumexp(self) -> Tensor:
        """The logsumexp, with a huge number for queries without visible keys or with NaN.

        The weights exp(s - huge) of these queries are 0; infinity would give 0 * inf in their entropy.
        """
        left_out = self.logsumexp.isnan() | (self.logsumexp == -torch.inf)
        return self.logsumexp.masked_fill(left_out, torch.finfo(self.logsumexp.dtype).max / 4)

    def log_weights(self, scores: Tensor, rows: Any = ...) -> Tensor:
        """Return ln p = s - L for scores (..., keys), whose `rows` is an index into (batch, heads, queries)."""
        if self.base is not None:
            scores = scores - self.base[rows][..., None]
        return self.clamp_log_weights(scores.to(self.finite_logsumexp.dtype) - self.finite_logsumexp[rows][..., None])

    def clamp_log_weights(self, logs: Tensor) -> Tensor:
        """Clamp ln p = s - L in place to finite numbers of at most 0, if L is so large that rounding matters."""
        return logs.clamp_(min=torch.finfo(logs.dtype).min, max=0) if self._has_large_logsumexp else logs

    @cached_property
    def _has_large_logsumexp(self) -> bool:
        return has_large_logsumexp(self.logsumexp)

    def empty_map(self, heads: int) -> PooledMap:
        """Return a map of some heads of one sample, without weights."""
        shape, size = self.request.shape, self.context.map_size
        return PooledMap.zero(heads, shape.query_length, shape.key_length, size=size, device=shape.device)

    @cached_property
    def positions(self) -> Tensor:
        """Position of each query among the keys: (batch, queries) int64."""
        return positions_of_queries(self.request).expand(self.request.shape.batch, -1)

    @cached_property
    def first_keys(self) -> Tensor:
        """Index of the first key of each sample: (batch,) int64; -1 if no query sees a key."""
        shape, first_key = self.request.shape, self.context.first_key
        if first_key is not None:
            return torch.as_tensor(first_key, device=shape.device).expand(shape.batch)
        return first_key_of_samples(self.request, self.bounds).expand(shape.batch)

    @property
    def first_keys_of_queries(self) -> Tensor:
        """Index of the first key of each query's text: (batch, 1 or queries) int64; no key if none is seen."""
        if self.request.mask.row_texts is None or self.context.first_key is not None:
            return self.first_keys[:, None]
        return first_key_of_texts(self.request, self.bounds).expand(self.request.shape.batch, -1)

    def visible_at_keys(self, keys: Tensor) -> Tensor:
        """Return which of n keys per query are visible.

        Args:
            keys: (batch, queries, n), int64; indices outside the call's keys are hidden.

        Returns:
            (batch, heads or 1, queries, n) bool.
        """
        inside = (keys >= self.bounds.start[..., None]) & (keys < self.bounds.stop[..., None])  # (batch, queries, n)
        if self.bounds.remainder is None and self.request.bias is None:
            return inside[:, None]
        shape = self.request.shape
        clamped = keys.clamp(0, max(shape.key_length - 1, 0))
        found = []
        for rows in consecutive_slices(shape.query_length, ROWS_PER_STEP):
            shown = visible_cells(self.request, rows)  # (batch or 1, heads or 1, rows or 1, keys or 1)
            shown = shown.expand(shape.batch, -1, rows.stop - rows.start, shape.key_length)
            found.append(shown.gather(-1, clamped[:, None, rows].expand(-1, shown.shape[1], -1, -1)))
        cells = torch.cat(found, 2) if found else inside[:, None]
        return cells & inside[:, None]

    def bias_at(self, keys: Tensor) -> Tensor | None:
        """Return the bias of n keys per query, (batch, queries, n): (batch, heads, queries, n); None without a bias."""
        bias, shape = self.request_without_nonfinite.bias, self.request.shape
        if bias is None:
            return None
        keys = keys[:, None].expand(-1, shape.num_heads, -1, -1)
        if isinstance(bias, RelativeBias):
            row = torch.arange(shape.query_length, device=shape.device)[:, None]
            diagonal = keys - row + shape.query_length - 1
            values = bias.values.detach().expand(shape.batch, shape.num_heads, -1)
            return values.gather(-1, diagonal.flatten(2)).view(keys.shape)
        sizes = (shape.batch, shape.num_heads, shape.query_length, shape.key_length)
        return bias.detach().expand(sizes).gather(-1, keys)

    def request_of_sample(self, index: int) -> AttentionRequest:
        """Slice q, k, v and bias of one sample from `request_without_nonfinite`; the mask is not sliced."""
        request = self.request_without_nonfinite
        one = slice(index, index + 1)
        bias = index_bias(request.bias, {0: one})
        return replace(request, q=request.q[one], k=request.k[one], v=request.v[one], bias=bias)
