"""A small record in memory, computed from dense weights: what the page and the findings are tested on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.kernels.call import AttentionRequest
from multihead.kinds import KINDS
from multihead.masks import Keep, Mask
from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic
from multihead.record.layer import layer_profiles
from multihead.record.profiles import LayerProfile
from multihead.record.repeated import RepeatedTokens
from multihead.record.segments import Segment
from multihead.record.text_rows import MeasuredRows, MeasuredStatistic, TextRows
from multihead.record.texts import Text
from multihead.tensors.shapes import AttentionShape


@dataclass
class DenseSample:
    """One text in one layer, from weights (heads, queries, keys) and what may be seen (queries, keys)."""

    name: str
    dense: Tensor
    seen: Tensor
    query_start: int = 0
    special: Sequence[bool] | None = None
    keep: str = "cpu"
    statistics: dict[str, Tensor] = field(default_factory=dict)
    tiles: list[int] = field(default_factory=list)
    text: Text = field(default_factory=Text)

    def __post_init__(self) -> None:
        w = self.dense.double()
        position = torch.arange(self.num_queries) + self.query_start
        distance = (torch.arange(self.num_keys)[None] - position[:, None]).abs().double()
        offset = torch.arange(self.num_keys)[None] - position[:, None]
        entropy = -torch.xlogy(w, w).sum(-1)
        mean = (w * distance).sum(-1)
        self.statistics = {
            "entropy": entropy,
            "effective_keys": entropy.exp() * (w.sum(-1) > 0),
            "mean_distance": mean,
            "distance_spread": ((w * distance**2).sum(-1) - mean**2).clamp(min=0).sqrt(),
            "self_mass": (w * (offset == 0)).sum(-1),
            "previous_mass": (w * (offset == -1)).sum(-1),
            "next_mass": (w * (offset == 1)).sum(-1),
            "near_mass": (w * (offset.abs() <= 3)).sum(-1),
            "first_mass": w[..., 0],
            "largest_weight": w.max(-1).values,
            "largest_key": w.argmax(-1).masked_fill(w.sum(-1) == 0, -1),
            "received": w.sum(-2),
        }
        if self.special is not None and len(self.special) == self.num_keys:
            special = torch.tensor(self.special)
            self.statistics["special_mass"] = (w * special).sum(-1)
            self.statistics["separator_mass"] = (w * special)[..., 1:].sum(-1)

    num_heads = property(lambda self: self.dense.shape[0])
    num_queries = property(lambda self: self.dense.shape[1])
    num_keys = property(lambda self: self.dense.shape[2])
    keeps_weights = property(lambda self: self.keep != "statistics")
    query_text = Text()
    cross_attention = False
    map_size = 64

    @property
    def mask(self) -> Mask:
        return Keep(self.seen, "queries keys")

    @property
    def segments(self) -> list[Segment]:
        sizes = (1, self.num_heads, self.num_heads, self.num_queries, self.num_keys, 1, 1)
        shape = AttentionShape(*sizes, torch.float32, torch.device("cpu"))
        nothing = torch.empty(0)
        return [Segment(AttentionRequest(nothing, nothing, nothing, shape, self.mask, 1.0, self.query_start))]

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.num_queries) + self.query_start

    @property
    def sees(self) -> Tensor:
        return self.seen.any(-1).expand(self.num_heads, -1)

    @property
    def means(self) -> dict[str, Tensor]:
        return {name: each.values[:, each.counted[0]].mean(-1) for name, each in self.measured().items()}

    def measured(self) -> dict[str, MeasuredStatistic]:
        rows = TextRows.of_text(self.positions, self.num_keys, self.text.ids)
        return MeasuredRows(rows, self.sees, self.per_query).statistics

    @property
    def per_query(self) -> dict[str, Tensor]:
        return {name: each for name, each in self.statistics.items() if name != "received"}

    def weights(self, head: int | None = None, *, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        if self.keep == "statistics":
            raise ProbeError("q and k were not kept.", 'Observe with keep="cpu".')
        tile = self.dense[slice(None) if head is None else head][..., queries, keys]
        self.tiles.append(tile.numel())
        return tile

    def map(self, head: int | None = None, *, bins: int = 256) -> Tensor:
        self.weights(0, queries=slice(0, 1))  # refuses where only statistics were kept
        cells = self.dense[slice(None) if head is None else head].masked_fill(~self.seen, torch.nan)
        block = [-(-length // bins) for length in cells.shape[-2:]]
        whole = torch.nn.functional.pad(
            cells, (0, -cells.shape[-1] % block[1], 0, -cells.shape[-2] % block[0]), value=torch.nan
        )
        return whole.unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0])).nanmean((-3, -1))

    def at_offset(self, offset: int) -> Tensor:
        self.weights(queries=slice(0, 0))  # it refuses where only statistics were kept
        position = torch.arange(self.num_queries) + self.query_start + offset
        there = (position >= 0) & (position < self.num_keys)
        picked = position.clamp(0, self.num_keys - 1)[:, None].expand(self.num_heads, -1, 1)
        return self.dense.gather(-1, picked)[..., 0] * there

    def intervals(self) -> None:
        """Its cells are looked at one by one."""

    def visible(self, *, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        return self.seen[queries, keys]


@dataclass
class DenseLayer:
    name: str
    samples: list[DenseSample]
    number: int = 0
    alignment_heads: tuple[int, ...] = ()
    repeated: RepeatedTokens | None = None
    numbers: dict[str, Tensor] = field(default_factory=dict)

    running_summary: None = None
    has_kinds: bool = True

    num_heads = property(lambda self: self.samples[0].num_heads)
    num_samples = property(lambda self: len(self.samples))

    def sample(self, index: int = 0) -> DenseSample:
        return self.samples[index]


@dataclass
class DenseRecord:
    layers: list[DenseLayer]

    all_kinds = KINDS
    title = ""

    def profiles(self, **options: Any) -> list[LayerProfile]:
        return layer_profiles(self.layers, **options)

    def statistic(self, name: str) -> Statistic:
        return statistic(name)


def record_of(
    *layers: Tensor,
    seen: Tensor | None = None,
    special: Sequence[bool] | None = None,
    keep: str = "cpu",
    query_start: int = 0,
) -> DenseRecord:
    """A record of one text from weights (heads, queries, keys), one a layer."""
    made = []
    for index, dense in enumerate(layers):
        shown = torch.ones(dense.shape[1:], dtype=torch.bool) if seen is None else seen
        name = f"encoder.layer.{index}.attention.self"
        made.append(DenseLayer(name, [DenseSample(name, dense, shown, query_start, special, keep)], index))
    return DenseRecord(made)


def random_weights(
    heads: int, queries: int, keys: int, *, seen: Tensor | None = None, sharpness: float = 2.0
) -> Tensor:
    """Softmax of random scores, (heads, queries, keys), 0 where a key may not be seen."""
    scores = torch.randn(heads, queries, keys) * sharpness
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1).nan_to_num(nan=0.0)
