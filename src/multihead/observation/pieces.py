"""What is kept of one call in one sample, and the keys of a sample as they come."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from multihead.call import AttentionRequest


@dataclass(frozen=True, eq=False)
class Piece:
    """One call, cut to one sample and free of padding.

    Fields:
        request: what was asked, with a batch of one; its q, k and v are empty.
        key_start: where its first key stands among the keys of the sample.
        logsumexp: (1, heads, queries), nats.
        statistics: (heads, queries) each; `received` (heads, keys), `pooled_map` (heads, rows, columns).
        q: (1, heads, queries, head_dim), or None where only statistics were kept.
    """

    request: AttentionRequest
    key_start: int
    logsumexp: Tensor
    statistics: dict[str, Tensor]
    q: Tensor | None

    @property
    def num_queries(self) -> int:
        """How many queries it has."""
        return self.request.shape.query_length

    @property
    def key_stop(self) -> int:
        """The place behind its last key, among the keys of the sample."""
        return self.key_start + self.request.shape.key_length

    @property
    def query_start(self) -> int:
        """Where its first query stands among the keys of the sample."""
        return self.key_start + int(self.request.query_start)


@dataclass(eq=False)
class KeyRows:
    """The keys of one sample as they came: (1, kv_heads, keys, head_dim) once put together."""

    _chunks: list[Tensor] = field(default_factory=list)

    @property
    def length(self) -> int:
        """How many keys there are."""
        return sum(chunk.shape[2] for chunk in self._chunks)

    def grow(self, k: Tensor, *, start: int, device: torch.device) -> None:
        """Take the keys that are new out of a call's keys, whose first stands at `start`."""
        missing = start - self.length
        if missing > 0:  # keys that no query at hand may see: a cache had dropped them
            self._chunks.append(torch.zeros(*k.shape[:2], missing, k.shape[3], dtype=k.dtype, device=device))
        if start + k.shape[2] > self.length:
            self._chunks.append(k[:, :, self.length - start :].detach().to(device, copy=True))

    def between(self, start: int, stop: int) -> Tensor:
        """Return the keys from one place to another: (1, kv_heads, keys, head_dim)."""
        if len(self._chunks) > 1:
            self._chunks = [torch.cat(self._chunks, 2)]
        return self._chunks[0][:, :, start:stop]
