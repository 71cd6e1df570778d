"""What was seen: a record of layers, a layer of samples, a sample of calls that follow each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.errors import ArgumentError, ModelError, ProbeError
from multihead.kernels.tile import seen
from multihead.observation.pieces import KeyRows, Piece
from multihead.observation.table import HeadTable
from multihead.probes.pooling import PooledMap
from multihead.probes.weights import tile

_ROWS = 128  # queries a tile, where a map is pooled from the weights


@dataclass(eq=False)
class SampleRecord:
    """One sample (one text) in one layer, without its padding; calls of a decoding are joined into one.

    Fields:
        name: the layer's name.
        pieces: the calls it was seen in, in their order.
        keys: its keys, or None where only statistics were kept.
        map_size: most rows and columns of the pooled map.
    """

    name: str
    pieces: list[Piece]
    keys: KeyRows | None
    map_size: int
    _statistics: tuple[int, dict[str, Tensor]] | None = None

    @property
    def num_heads(self) -> int:
        """How many query heads the layer has."""
        return self.pieces[0].request.shape.num_heads

    @property
    def head_dim(self) -> int:
        """Width of a query and a key."""
        return self.pieces[0].request.shape.head_dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that attention was asked for in."""
        return self.pieces[0].request.shape.dtype

    @property
    def num_queries(self) -> int:
        """How many queries the sample has."""
        return sum(piece.num_queries for piece in self.pieces)

    @property
    def num_keys(self) -> int:
        """How many keys the sample has."""
        return max(piece.key_stop for piece in self.pieces)

    @property
    def query_start(self) -> int:
        """Where the first query stands among the keys."""
        return self.pieces[0].query_start

    @property
    def statistics(self) -> dict[str, Tensor]:
        """What was measured of each query: (heads, queries) each, on the CPU.

        `received` is (heads, keys), `pooled_map` (heads, rows, columns); of a decoding the latter is had only
        where q and k were kept.
        """
        if self._statistics is None or self._statistics[0] != len(self.pieces):
            self._statistics = (len(self.pieces), self._joined())
        return self._statistics[1]

    @property
    def means(self) -> dict[str, Tensor]:
        """Means over the queries that see a key: (heads,) float64 each.

        `previous_mass` and `next_mass` are means over the queries that have such a key.
        """
        return {name: total / count.clamp(min=1) for name, (total, count) in self.sums().items()}

    def sums(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Sums over the queries that see a key, and how many those are: (heads,) float64 each."""
        sees = torch.cat([(each.logsumexp[0] != -torch.inf).cpu() for each in self.pieces], 1)
        position = torch.cat([torch.arange(each.num_queries) + each.query_start for each in self.pieces])
        having = {"previous_mass": position >= 1, "next_mass": position + 1 < self.num_keys}
        found = {}
        for name, value in self.statistics.items():
            if name in ("received", "pooled_map") or not value.is_floating_point():
                continue
            rows = sees & having[name] if name in having else sees  # (heads, queries)
            found[name] = (value.double().masked_fill(~rows, 0).sum(-1), rows.sum(-1).double())
        return found

    def weights(self, head: int | None = None, *, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Compute a tile of the attention map, exactly.

        Args:
            head: which head, or None for all.
            queries: which queries.
            keys: which keys.

        Returns: (queries, keys), or (heads, queries, keys) without a head; float32 (float64 for float64).

        Raises:
            ProbeError: only statistics were kept.
            ArgumentError: there is no such head.
        """
        heads = slice(None) if head is None else head
        found = [
            tile(self._request_of(piece), piece.logsumexp, heads=heads, queries=rows, keys=self._columns(piece, keys))
            for piece, rows in self._rows(queries)
        ]
        cells = self._assembled([each[0].cpu() for each in found], queries, keys, self.num_heads if head is None else 1)
        return cells if head is None else cells[0]

    def visible(self, *, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """Tell which keys each query may see.

        Returns: (queries, keys) bool; (heads, queries, keys) where heads may see different keys.
        """
        found = [seen(piece.request, rows, self._columns(piece, keys))[0].cpu() for piece, rows in self._rows(queries)]
        heads = max((each.shape[0] for each in found), default=1)
        cells = self._assembled([each.expand(heads, -1, -1) for each in found], queries, keys, heads)
        return cells if heads > 1 else cells[0]

    def _rows(self, queries: slice) -> Iterator[tuple[Piece, slice]]:
        """Say which rows of which pieces a slice of the queries touches, steps not yet taken."""
        first, behind, _ = queries.indices(self.num_queries)
        place = 0
        for piece in self.pieces:
            low, high = max(first - place, 0), min(behind - place, piece.num_queries)
            if low < high:
                yield piece, slice(low, high)
            place += piece.num_queries

    def _columns(self, piece: Piece, keys: slice) -> slice:
        """Say which of a piece's keys a slice of the sample's keys touches, steps not yet taken."""
        first, behind, _ = keys.indices(self.num_keys)
        low = min(max(first, piece.key_start), piece.key_stop)
        return slice(low - piece.key_start, max(low, min(behind, piece.key_stop)) - piece.key_start)

    def _assembled(self, tiles: list[Tensor], queries: slice, keys: slice, heads: int) -> Tensor:
        """Put tiles (heads, rows, their piece's columns) below each other, and take the steps of the slices."""
        first, behind, step = queries.indices(self.num_queries)
        left, right, key_step = keys.indices(self.num_keys)
        whole = [torch.zeros(heads, 0, max(right - left, 0), dtype=tiles[0].dtype if tiles else torch.float32)]
        for (piece, _), each in zip(self._rows(slice(first, behind)), tiles, strict=True):
            row = each.new_zeros(heads, each.shape[1], max(right - left, 0))
            place = piece.key_start + self._columns(piece, keys).start - left
            row[:, :, place : place + each.shape[2]] = each
            whole.append(row)
        return torch.cat(whole, 1)[:, ::step, ::key_step]

    def _request_of(self, piece: Piece) -> AttentionRequest:
        if piece.q is None or self.keys is None:
            raise ProbeError(
                f'{self.name} was observed with keep="statistics", so its weights are not at hand.',
                'Observe with keep="cpu" or keep="device".',
            )
        k = self.keys.between(piece.key_start, piece.key_stop)
        return replace(piece.request, q=piece.q, k=k, v=k)

    def _joined(self) -> dict[str, Tensor]:
        alone = self.pieces[0] if len(self.pieces) == 1 else None
        if alone is not None and alone.key_start == 0:
            return dict(alone.statistics)
        names = [name for name in self.pieces[0].statistics if all(name in each.statistics for each in self.pieces)]
        found = {}
        for name in names:
            if name == "received":
                total = torch.zeros(self.num_heads, self.num_keys, dtype=self.pieces[0].statistics[name].dtype)
                for piece in self.pieces:
                    total[:, piece.key_start : piece.key_stop] += piece.statistics[name]
                found[name] = total
            elif name == "largest_key":
                shifted = [(each.statistics[name], each.key_start) for each in self.pieces]
                found[name] = torch.cat([key + start * (key >= 0) for key, start in shifted], 1)
            elif name == "pooled_map":
                if self.keys is not None:
                    found[name] = self._pooled()
            else:
                found[name] = torch.cat([each.statistics[name] for each in self.pieces], 1)
        return found

    def _pooled(self) -> Tensor:
        """Pool the map of several calls anew, tile by tile: the blocks of one call are not those of all."""
        pooled = PooledMap.zero(
            self.num_heads, self.num_queries, self.num_keys, size=self.map_size, device=torch.device("cpu")
        )
        for first in range(0, self.num_queries, _ROWS):
            rows = slice(first, min(first + _ROWS, self.num_queries))
            shown = self.visible(queries=rows)
            shown = shown if shown.dim() == 3 else shown[None]
            pooled.add(pooled.row_blocks(self.weights(queries=rows), rows), shown, rows, (0, self.num_keys))
        return pooled.means().float()


@dataclass(eq=False)
class LayerRecord:
    """One layer: its samples, in the order they ran.

    Fields:
        name: the layer's qualified name in the model; "#2" and so on where it runs again in one forward pass.
        samples: one a text, over all batches.
    """

    name: str
    samples: list[SampleRecord] = field(default_factory=list)

    @property
    def num_heads(self) -> int:
        """How many query heads the layer has."""
        return self.samples[0].num_heads

    @property
    def num_samples(self) -> int:
        """How many samples were seen."""
        return len(self.samples)

    def means(self) -> dict[str, Tensor]:
        """Means over all queries that see a key and are no padding, over all samples: (heads,) float64 each."""
        each = [sample.sums() for sample in self.samples]
        names = [name for name in each[0] if all(name in sums for sums in each)]
        found = {}
        for name in names:
            total = torch.stack([sums[name][0] for sums in each]).sum(0)
            count = torch.stack([sums[name][1] for sums in each]).sum(0)
            found[name] = total / count.clamp(min=1)
        return found

    def sample(self, index: int = 0) -> SampleRecord:
        """Return one sample.

        Raises:
            ArgumentError: there is no such sample.
        """
        if not -self.num_samples <= index < self.num_samples:
            raise ArgumentError(
                f"There is no sample {index}; {self.name} saw {self.num_samples}.",
                f"Give one from 0 to {self.num_samples - 1}.",
            )
        return self.samples[index]

    def weights(
        self,
        head: int | None = None,
        *,
        sample: int = 0,
        queries: slice = slice(None),
        keys: slice = slice(None),
    ) -> Tensor:
        """Compute a tile of one sample's attention map, see `SampleRecord.weights`."""
        return self.sample(sample).weights(head, queries=queries, keys=keys)


@dataclass(eq=False)
class Record:
    """What `observe` saw.

    Fields:
        layers: one a layer, in the order they first ran.
    """

    layers: list[LayerRecord] = field(default_factory=list)
    _calls: list[tuple[SampleRecord, int]] = field(default_factory=list)

    def __iter__(self) -> Iterator[SampleRecord]:
        """Go through the calls in the order they ran, a sample of a batch at a time."""
        for sample, index in self._calls:
            yield SampleRecord(sample.name, [sample.pieces[index]], sample.keys, sample.map_size)

    def __getitem__(self, name: str) -> LayerRecord:
        """Return the record of a layer.

        Raises:
            ModelError: no layer of that name was seen.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        known = ", ".join(layer.name for layer in self.layers) or "none"
        raise ModelError(f"There is no layer {name!r} in the record.", f"The layers seen are: {known}.")

    def table(self, *, sort: str = "layer", top: int | None = None) -> HeadTable:
        """Lay out one row a head, with its means over all queries.

        Args:
            sort: "layer", or a statistic: then the heads with the largest mean come first.
            top: how many rows to keep; None keeps all.

        Raises:
            ArgumentError: there is no such column, or top is less than 1.
        """
        rows = []
        for index, layer in enumerate(self.layers):
            means = layer.means()
            for head in range(layer.num_heads):
                values = {name: float(value[head]) for name, value in means.items()}
                rows.append({"layer": index, "head": head, "name": layer.name, **values})
        return HeadTable.of(rows, sort=sort, top=top)

    def add(self, layer: LayerRecord, sample: SampleRecord) -> None:
        """Note that a sample's newest piece has been seen."""
        if layer not in self.layers:
            self.layers.append(layer)
        self._calls.append((sample, len(sample.pieces) - 1))
