"""Every statistic from its definition, by plain PyTorch on whole weights: no code of the library takes part."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from multihead import masks
from tests import oracle


@dataclass
class Known:
    """What is known beside the weights.

    Fields:
        start: for each sample, where the first query stands among the keys.
        special, commas, given: (batch, keys) bool, three sets of keys.
        ids: (batch, keys), the keys' tokens.
        v: (batch, kv_heads, keys, value_dim).
        output_weight: (embed_dim, heads * value_dim).
        sinks: (heads,) or None.
        map_size: the most blocks a side.
        mask: the mask, whose documents are texts of their own; None if a row is one text.
    """

    start: list[int]
    special: Tensor
    commas: Tensor
    given: Tensor
    ids: Tensor
    v: Tensor
    output_weight: Tensor
    sinks: Tensor | None
    map_size: int
    mask: masks.Mask | None = None


def every(dense: oracle.Dense, seen: Tensor, known: Known) -> dict[str, Tensor]:
    """Compute all of them from dense weights (batch, heads, queries, keys), in their dtype."""
    p, sees = dense.weights, seen.any(-1)
    batch, heads, queries, keys = p.shape
    position = (torch.tensor(known.start)[:, None] + torch.arange(queries))[:, None, :, None]
    key = torch.arange(keys)
    found = {}

    found["entropy"] = -torch.xlogy(p, p).sum(-1)
    found["effective_keys"] = torch.where(sees, found["entropy"].exp(), 0)
    distance = (position - key).abs().to(p.dtype)
    share = p / p.sum(-1, keepdim=True).clamp(min=1e-300 if p.dtype == torch.float64 else 1e-37)
    found["mean_distance"] = (share * distance).sum(-1)
    apart = distance - found["mean_distance"][..., None]
    found["distance_spread"] = (share * apart.square()).sum(-1).sqrt()
    for name, offset in {
        "self_mass": 0,
        "previous_mass": -1,
        "next_mass": 1,
        "offset_minus_2_mass": -2,
        "offset_minus_5_mass": -5,
        "offset_plus_3_mass": 3,
    }.items():
        found[name] = torch.where(key == position + offset, p, 0).sum(-1)

    found["near_mass"] = torch.where((position - key).abs() <= 3, p, 0).sum(-1)

    texts = None if known.mask is None else oracle.texts_of_queries(known.mask, known.start, queries)
    first = oracle.first_keys(seen.expand_as(p), texts)[:, None, :, None]
    found["first_mass"] = torch.where(key == first, p, 0).sum(-1)
    found["first_4_mass"] = torch.where((key >= first) & (key < first + 4), p, 0).sum(-1)
    for name in ("special", "commas", "given"):
        found[f"{name}_mass"] = (p * getattr(known, name)[:, None, None]).sum(-1)
    found["separator_mass"] = torch.where((key != first) & known.special[:, None, None], p, 0).sum(-1)
    found["first_special_mass"] = torch.where((key == first) & known.special[:, None, None], p, 0).sum(-1)

    found["largest_weight"] = p.amax(-1)
    found["largest_key"] = torch.where(sees, torch.where(seen, p, -1).argmax(-1), -1)

    found["largest_score"] = torch.where(sees, dense.scores.amax(-1), 0)

    alike = torch.zeros(batch, 1, queries, keys, dtype=torch.bool)  # an earlier key of the query's token
    for b in range(batch):
        for i in range(queries):
            at = known.start[b] + i
            if 0 <= at < keys:
                alike[b, 0, i, :at] = known.ids[b, :at] == known.ids[b, at]
    found["duplicate_mass"] = torch.where(alike, p, 0).sum(-1)
    behind = torch.nn.functional.pad(alike, (1, 0))[..., :keys]  # the key right after one
    found["induction_mass"] = torch.where(behind, p, 0).sum(-1)

    width = known.v.shape[-1]
    values = known.v.repeat_interleave(heads // known.v.shape[1], 1)
    parts = [values[:, h] @ known.output_weight[:, h * width : (h + 1) * width].mT for h in range(heads)]
    transformed = torch.stack(parts, 1)  # f_h(x_j): (batch, heads, keys, embed_dim)
    found["contribution"] = (p * transformed.norm(dim=-1)[:, :, None]).sum(-1)
    found["output_norm"] = (p @ transformed).norm(dim=-1)
    if known.sinks is not None:
        found["sink_mass"] = torch.where(sees, (known.sinks[:, None] - dense.logsumexp).exp(), 0)

    found["received"] = p.sum(-2)
    found["coverage"] = found["received"].clamp(max=1)
    found["pooled_map"] = oracle.pooled(p, seen.expand_as(p), known.map_size).to(p.dtype)
    return found


def largest_of_blocks(p: Tensor, seen: Tensor, size: int) -> Tensor:
    """The largest weight of each block that may be seen, NaN where none may."""
    high, wide = (max(1, -(-length // size)) for length in p.shape[2:])
    rows = []
    for top in range(0, p.shape[2], high):
        row = []
        for left in range(0, p.shape[3], wide):
            block = (slice(None), slice(None), slice(top, top + high), slice(left, left + wide))
            largest = torch.where(seen, p, -1)[block].amax((-1, -2))
            row.append(torch.where(largest < 0, torch.nan, largest))
        rows.append(torch.stack(row, -1))
    return torch.stack(rows, -2)
