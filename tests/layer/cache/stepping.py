"""Decode step by step with a cache, as a layer does, with `attend` only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_

import torch
from torch import Tensor

from multihead import masks
from multihead.functional import attend, attention, request_of
from multihead.layer.cache import KeyValueCache
from multihead.layer.cache.buffers import CachedKeyValues
from multihead.masks.base import And, Or


@dataclass
class Text:
    """Queries, keys and values of a whole sequence: (batch, heads or kv_heads, length, dim)."""

    q: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def drawn(
        batch: int = 2, heads: int = 4, kv_heads: int = 2, length: int = 20, *, dtype: torch.dtype = torch.float64
    ) -> Text:
        def random(count: int, dim: int) -> Tensor:
            return torch.randn(batch, count, length, dim, dtype=dtype)

        return Text(random(heads, 4), random(kv_heads, 4), random(kv_heads, 5))

    def part(self, rows: slice) -> Text:
        return Text(self.q[:, :, rows], self.k[:, :, rows], self.v[:, :, rows])

    def apart(self, starts: Sequence[int], counts: Sequence[int]) -> Text:
        """Slice the next tokens of each sample, padded with NaN to the longest."""
        width = max(counts, default=0)

        def cut(tensor: Tensor) -> Tensor:
            part = tensor.new_full((tensor.shape[0], tensor.shape[1], width, tensor.shape[3]), torch.nan)
            for sample, (start, count) in enumerate(zip(starts, counts, strict=True)):
                part[sample, :, :count] = tensor[sample, :, start : start + count]
            return part

        return Text(cut(self.q), cut(self.k), cut(self.v))

    def whole(self, mask: masks.Mask) -> Tensor:
        return attention(self.q, self.k, self.v, mask=mask, query_start=0)


def of_rows(mask: masks.Mask, rows: slice, keys: int) -> masks.Mask:
    """Restrict the mask of a whole sequence to some queries and the first keys."""
    if isinstance(mask, (And, Or)):
        return reduce(and_ if isinstance(mask, And) else or_, [of_rows(part, rows, keys) for part in mask.parts])
    if isinstance(mask, (masks.Keep, masks.Drop)):
        tensor = mask.four_dimensional()
        tensor = tensor[:, :, rows] if tensor.shape[2] > 1 else tensor
        return type(mask)(tensor[..., :keys] if tensor.shape[3] > 1 else tensor)
    return mask


def looked(q: Tensor, held: CachedKeyValues, mask: masks.Mask) -> Tensor:
    """Attend to the keys that a cache returned; the mask may also cover later keys."""
    mask = mask.after_dropping_keys(held.key_start)
    if held.lengths is not None:
        mask = mask & masks.Lengths(held.lengths)
    request = request_of(q, held.k, held.v, query_start=held.query_start, scales=held.scales)
    return attend(replace(request, mask=mask)).output


def stepwise(text: Text, cache: KeyValueCache, mask: masks.Mask, chunks: Sequence[int]) -> Tensor:
    """Return the output of a sequence processed with a cache in chunks of these numbers of tokens."""
    outputs, first = [], 0
    for count in chunks:
        rows = slice(first, first + count)
        part, first = text.part(rows), first + count
        cache.check_window_fits_mask(mask)
        held = cache.extend(part.k, part.v)
        outputs.append(looked(part.q, held, of_rows(mask, rows, first)))
    return torch.cat(outputs, 2)


def stepwise_apart(
    text: Text, cache: KeyValueCache, mask: masks.Mask, chunks: Sequence[Sequence[int]]
) -> tuple[Tensor, list[int]]:
    """Return the output where samples have different numbers of tokens per step, and their lengths."""
    done = [0] * len(text.q)
    output = torch.zeros(*text.q.shape[:3], text.v.shape[3], dtype=text.q.dtype)
    for counts in chunks:
        part = text.apart(done, counts)
        alike = len(set(counts)) == 1
        held = cache.extend(part.k, part.v, lengths=None if alike else torch.tensor(counts))
        found = looked(part.q.nan_to_num(0), held, mask)
        for sample, count in enumerate(counts):
            output[sample, :, done[sample] : done[sample] + count] = found[sample, :, :count]
            done[sample] += count
    return output, done
