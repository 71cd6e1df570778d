"""What everything means, written a second time in plain float64, with no call of multihead's own code."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from math import ceil
from operator import and_, or_
from typing import Any

import torch
from torch import Tensor

from multihead import masks
from multihead.masks.base import And, Or
from multihead.masks.leading_keys import LeadingKeys

AXES = ("batch", "heads", "queries", "keys")


def shown(mask: masks.Mask, sizes: tuple[int, int, int, int], query_start: int | Tensor | str | None = None) -> Tensor:
    """(batch, heads, queries, keys) bool: which keys each query may see."""
    batch, _, queries, keys = sizes
    cells = [torch.arange(n).reshape([n if axis == at else 1 for axis in range(4)]) for at, n in enumerate(sizes)]
    start = positions_of_first(query_start, batch, queries, keys)
    position = torch.tensor(start, dtype=torch.int64).reshape(batch, 1, 1, 1) + cells[2]
    return _seen(mask, cells, position, cells[3]).expand(sizes)


def _seen(mask: masks.Mask, cells: list[Tensor], position: Tensor, key: Tensor) -> Tensor:
    """Whether a query that stands at `position` may see `key`; all of it broadcasts to the cells of a map."""
    if isinstance(mask, (And, Or)):
        parts = [_seen(part, cells, position, key) for part in mask.parts]
        return reduce(and_ if isinstance(mask, And) else or_, parts)
    if isinstance(mask, LeadingKeys):
        return (key < mask.count) | _seen(mask.mask, cells, position - mask.count, key - mask.count)
    if isinstance(mask, masks.Causal):
        return key <= position
    if isinstance(mask, masks.Window):
        return (key > position - mask.size) & (key <= position + mask.after)
    if isinstance(mask, (masks.Lengths, masks.Prefix)):
        counts = torch.as_tensor(mask.lengths if isinstance(mask, masks.Lengths) else mask.length)
        counts = counts.reshape(1) if counts.dim() == 0 else counts
        return key < counts.reshape(counts.shape[0], 1, *(counts.shape[1:] or (1,)), 1)
    if isinstance(mask, masks.Documents):
        return _in_one_document(mask.lengths, cells[0], position, key)
    if isinstance(mask, (masks.Keep, masks.Drop)):
        # A key before the first is one of `LeadingKeys`, which shows it anyway.
        place = dict(zip(AXES, (*cells[:3], key.clamp(min=0)), strict=True))
        named = list(zip(mask.axes.split(), mask.tensor.shape, strict=True))
        index = tuple(place[axis] if size > 1 else torch.zeros_like(place[axis]) for axis, size in named)
        value = mask.tensor[index] if index else mask.tensor
        return value if isinstance(mask, masks.Keep) else ~value
    if type(mask) is not masks.Full:
        return mask.visible(position, key)  # defined in the tests
    return torch.ones(1, 1, 1, 1, dtype=torch.bool)


def _in_one_document(lengths: Any, sample: Tensor, position: Tensor, key: Tensor) -> Tensor:
    rows = lengths.tolist() if isinstance(lengths, Tensor) else lengths
    if not rows or isinstance(rows[0], int):
        rows = [rows]
    found = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    for b, row in enumerate(rows):
        edges = [sum(row[:n]) for n in range(len(row) + 1)]
        for low, high in pairwise(edges):
            both = (low <= position) & (position < high) & (low <= key) & (key < high)
            found = found | (both & ((sample == b) | (len(rows) == 1)))
    return found


def texts_of_queries(mask: masks.Mask, start: list[int], queries: int) -> list[list[tuple[int, ...]]]:
    """What tells the texts of a row apart, for each query of each sample: the documents of the mask that it is in."""
    parts = mask.parts if isinstance(mask, And) else (mask,)
    rows = [
        [torch.as_tensor(row).tolist() for row in part.lengths] for part in parts if isinstance(part, masks.Documents)
    ]
    found = []
    for sample, first in enumerate(start):
        lengths = [each if not each or isinstance(each[0], int) else each[sample % len(each)] for each in rows]
        ends = [[sum(each[: n + 1]) for n in range(len(each))] for each in lengths]
        found.append([tuple(sum(first + row >= end for end in each) for each in ends) for row in range(queries)])
    return found


def first_keys(seen: Tensor, texts: list[list[tuple[int, ...]]] | None) -> Tensor:
    """(batch, queries): the first key that any query of the same text sees; the number of keys if none does."""
    cells = seen.any(1)
    keys = cells.shape[2]
    first = (
        torch.where(cells.any(-1), cells.int().argmax(-1), keys) if keys else cells.new_zeros(cells.shape[:2]).long()
    )
    found = torch.empty_like(first)
    for sample, row in enumerate(first.tolist()):
        of = [()] * len(row) if texts is None else texts[sample]
        for query, text in enumerate(of):
            found[sample, query] = min(place for place, other in zip(row, of, strict=True) if other == text)
    return found


def positions_of_first(query_start: int | Tensor | str | None, batch: int, queries: int, keys: int) -> list[int]:
    if query_start == "end" and isinstance(query_start, str):
        return [keys - queries] * batch
    if isinstance(query_start, Tensor):
        return [int(start) for start in query_start]
    assert not isinstance(query_start, str)
    return [query_start or 0] * batch


@dataclass
class Dense:
    """A whole attention, every tensor written down."""

    output: Tensor
    logsumexp: Tensor
    weights: Tensor
    scores: Tensor  # those of hidden keys are -inf


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Dense:
    """Attention by the book, in the dtype of q, k and v; rows that see no key are 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        seen = seen & (bias != -torch.inf)
        scores = scores + torch.where(bias == -torch.inf, 0, bias)
    columns = scores = torch.where(seen, scores, -torch.inf)
    some = seen.any(-1, keepdim=True)
    columns = torch.where(some, columns, 0)  # an empty row is made up here and thrown away below
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*columns.shape[:-1], 1)
        columns = torch.cat([columns, sink], -1)
    logsumexp = torch.where(some[..., 0], torch.logsumexp(columns, -1), -torch.inf)
    weights = torch.softmax(columns, -1)[..., : k.shape[2]]
    weights = torch.where(seen, weights, 0)
    return Dense(weights @ v, logsumexp, weights, scores)


def statistics(
    weights: Tensor,
    seen: Tensor,
    *,
    start: list[int],
    special_keys: Tensor | None = None,
    map_size: int = 64,
    mask: masks.Mask | None = None,
) -> dict[str, Tensor]:
    """Every statistic from the dense weights (batch, heads, queries, keys), in float64; `mask` tells texts apart."""
    p = weights.double()
    queries, keys = p.shape[-2:]
    at = torch.tensor(start).view(-1, 1, 1, 1) + torch.arange(queries).view(1, 1, -1, 1)
    offset = (torch.arange(keys) - at).expand_as(p)  # key - position
    distance = offset.abs().double()
    mass = p.sum(-1)
    share = p / torch.where(mass == 0, 1, mass)[..., None]
    mean = (share * distance).sum(-1)
    some = seen.any(-1)
    found = {
        "entropy": -torch.xlogy(p, p).sum(-1),
        "effective_keys": torch.where(some, (-torch.xlogy(p, p).sum(-1)).exp(), 0),
        "mean_distance": mean,
        "distance_spread": (share * (distance - mean[..., None]) ** 2).sum(-1).sqrt(),
        "self_mass": torch.where(offset == 0, p, 0).sum(-1),
        "previous_mass": torch.where(offset == -1, p, 0).sum(-1),
        "next_mass": torch.where(offset == 1, p, 0).sum(-1),
        "near_mass": torch.where(offset.abs() <= 3, p, 0).sum(-1),
        "largest_weight": p.amax(-1),
        "largest_key": torch.where(some, p.argmax(-1), -1),
        "received": p.sum(-2),
        "pooled_map": pooled(p, seen.expand_as(p), map_size),
    }
    texts = None if mask is None else texts_of_queries(mask, start, queries)
    first = first_keys(seen.expand_as(p), texts)[:, None, :, None]
    found["first_mass"] = torch.where(torch.arange(keys) == first, p, 0).sum(-1)
    if special_keys is not None:
        found["special_mass"] = (p * special_keys[:, None, None]).sum(-1)
    return found


def pooled(p: Tensor, seen: Tensor, size: int) -> Tensor:
    """Block means over the cells that may be seen, block by block."""
    high, wide = max(1, ceil(p.shape[2] / size)), max(1, ceil(p.shape[3] / size))
    rows = []
    for top in range(0, p.shape[2], high):
        row = []
        for left in range(0, p.shape[3], wide):
            block = (slice(None), slice(None), slice(top, top + high), slice(left, left + wide))
            row.append(p[block].sum((-1, -2)) / seen[block].double().sum((-1, -2)))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)


def budget(exact: Tensor, plain: Tensor) -> float:
    """How far a result may be from the exact one: 2 * (error of the plain computation + rounding band).

    The band is one rounding at each of four steps (score, exponential, sum, product) of the largest value, or of 1:
    what cancels to almost nothing was rounded while it was of the inputs' size, and the inputs are drawn around 1.
    Float64 has nothing exacter to measure the plain computation by, so 64 roundings stand for its long sums.
    """
    finite = exact.isfinite() & plain.isfinite()
    if not bool(finite.any()):
        return 0.0
    error = (plain.double() - exact)[finite].abs().max()
    roundings = 64 if plain.dtype == torch.float64 else 4
    band = roundings * torch.finfo(plain.dtype).eps * exact[finite].abs().max().clamp(min=1)
    return 2 * float(error + band)


def difference(given: Tensor, exact: Tensor) -> float:
    """The largest difference; inf where one is finite and the other is not, or two infinities differ."""
    same = (given == exact) | (given.isnan() & exact.isnan())
    if not given.numel() or bool(same.all()):
        return 0.0
    apart = (given.double() - exact)[~same].abs()
    return float(torch.where(apart.isnan(), torch.inf, apart).max())
