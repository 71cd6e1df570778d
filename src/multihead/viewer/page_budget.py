"""Choose how much of the maps fits into a page, and encode that much."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.viewer import maps

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.record.sample import SampleRecord

MAP_SIZE = 64
"""Blocks per side of a pooled map, if they fit."""

DIRECT_SIZE = 96
"""Up to this many queries and keys, the grid of heads draws every weight; beyond, it draws pooled maps."""

STRIP_BINS = 256
"""Maximum number of bars in a margin strip."""

MAX_WEIGHTS_PER_QUERY = 512
"""Maximum number of largest weights stored per query if not all weights fit."""

MAX_CELLS = 1 << 30
"""Up to this many weights (heads x queries x keys), all are read to find each query's largest: half a minute."""

Progress = Callable[[int, int], None]


@dataclass
class StoredLayerMaps:
    """The maps of one layer in the page: the size of the pooled maps, the weights per cell, and the margin strips."""

    direct: bool = False
    rows: int = 0
    cols: int = 0
    row_block: int = 1
    col_block: int = 1
    strips: list[dict[str, float | str]] = field(default_factory=list)


@dataclass
class StoredMaps:
    """The part of the maps that a page stores.

    Attributes:
        mode: "whole" (every weight), "largest" (pooled maps and each query's largest weights), "pooled"
            (pooled maps alone) or "none".
        reason: why something is left out: "room", "statistics" (q and k were not kept), or "".
        bits: bits per weight, in mode "whole".
        number: largest weights stored per query, in mode "largest".
        rounding: the largest difference between a weight and its stored value, as a share (0 to 1).
        packs: (id of a script tag, the base64 data in it), in the order of the page.
        layers: the maps of each layer.
    """

    mode: str = "none"
    reason: str = ""
    bits: int = 16
    number: int = 0
    rounding: float = 0.0
    packs: list[tuple[str, str]] = field(default_factory=list)
    layers: list[StoredLayerMaps] = field(default_factory=list)

    @property
    def map_size(self) -> tuple[int, int]:
        """Rows and columns of the largest pooled map."""
        return max((one.rows for one in self.layers), default=0), max((one.cols for one in self.layers), default=0)


class _PageFullError(Exception):
    """The page has no more room."""


class _PageBudget:
    """The bytes left in a page."""

    def __init__(self, size: int) -> None:
        self.left = size

    def add_pack(self, packs: list[tuple[str, str]], name: str, content: str) -> None:
        """Append a pack, or raise `_PageFullError`; the script tag around a pack takes about 60 bytes."""
        self.left -= len(content) + 60
        if self.left < 0:
            raise _PageFullError
        packs.append((name, content))


def keeps_weights(record: Record, sample: int) -> bool:
    """Return whether the record kept q and k, so that single weights can be computed."""
    try:
        record.layers[0].sample(sample).weights(0, queries=slice(0, 1), keys=slice(0, 1))
    except ProbeError:
        return False
    return True


def encode_fitting_maps(record: Record, *, sample: int, room: int, progress: Progress | None = None) -> StoredMaps:
    """Encode as much of the maps of a record as fits into `room` bytes, layer by layer and head by head.

    First choice: every weight in 16 bits, then in 12. If neither fits: pooled maps of 64 x 64 (or 32, 16, 8), and in
    the remaining room each query's largest weights; for a long text with more than `MAX_CELLS` weights, only the
    single largest, from the statistics.
    """
    has_weights = keeps_weights(record, sample)
    report = progress or (lambda done, total: None)
    if has_weights:
        cells = _count_cells(record, sample)
        # No map of a model compresses below a tenth of a byte per weight, so larger ones are not tried.
        for bits in (16, 12) if cells <= min(room * 10, MAX_CELLS) else ():
            try:
                return _encode_whole_maps(record, sample, bits, room, report)
            except _PageFullError:
                continue
    size = MAP_SIZE
    while size >= 8:
        try:
            return _encode_pooled_maps(record, sample, size, room, report, has_weights=has_weights)
        except _PageFullError:
            size //= 2
    return StoredMaps(reason="room", layers=[StoredLayerMaps() for _ in record.layers])


def _encode_whole_maps(record: Record, sample: int, bits: int, size: int, report: Progress) -> StoredMaps:
    room, rounding = _PageBudget(size), maps.LargestRoundingError()
    store = StoredMaps(mode="whole", bits=bits)
    total, done = sum(layer.num_heads for layer in record.layers), 0
    for index, one in enumerate(_sample_of_each_layer(record, sample)):
        kept = StoredLayerMaps(direct=max(one.num_queries, one.num_keys) <= DIRECT_SIZE)
        if not kept.direct:
            _add_pooled_maps(
                store, room, kept, index, _pooled_maps_of_layer(one, MAP_SIZE), one, maps.LargestRoundingError()
            )
        _add_margin_strips(store, room, kept, index, one)
        for head in range(one.num_heads):
            room.add_pack(
                store.packs, f"w{index}.{head}", maps.encode_all_weights(one, head, bits=bits, rounding=rounding)
            )
            done += 1
            report(done, total)
        store.layers.append(kept)
    store.rounding = rounding.largest
    return store


def _encode_pooled_maps(
    record: Record, sample: int, map_size: int, size: int, report: Progress, *, has_weights: bool
) -> StoredMaps:
    room, rounding = _PageBudget(size), maps.LargestRoundingError()
    store = StoredMaps(mode="pooled", reason="room" if has_weights else "statistics")
    any_map = False
    for index, one in enumerate(_sample_of_each_layer(record, sample)):
        kept = StoredLayerMaps()
        small = _pooled_maps_of_layer(one, map_size)
        if small is not None:
            any_map = True
            _add_pooled_maps(store, room, kept, index, small, one, rounding)
        store.layers.append(kept)
    if not any_map:
        return StoredMaps(reason="statistics", layers=store.layers)
    for index, one in enumerate(_sample_of_each_layer(record, sample)):
        try:
            _add_margin_strips(store, room, store.layers[index], index, one)
        except _PageFullError:
            return store
    if has_weights:
        _add_largest_weights(record, sample, store, room, rounding, report)
    store.rounding = rounding.largest
    return store


def _add_largest_weights(
    record: Record,
    sample: int,
    store: StoredMaps,
    room: _PageBudget,
    rounding: maps.LargestRoundingError,
    report: Progress,
) -> None:
    """Add each query's largest weights, as many per query as fit; none if not even one per query fits."""
    if _count_cells(record, sample) > MAX_CELLS:
        _add_single_largest_weights(record, sample, store, room, rounding, report)
        return
    queries = sum(one.num_heads * one.num_queries for one in _sample_of_each_layer(record, sample))
    total = sum(layer.num_heads for layer in record.layers)
    number = int(room.left / (queries * 3))  # about three bytes each, fewer if many are stored per query
    for _ in range(2):
        each = _bytes_per_stored_weight(record, sample, max(1, min(number, MAX_WEIGHTS_PER_QUERY)))
        number = min(int(0.97 * room.left / (queries * each)), MAX_WEIGHTS_PER_QUERY)
    while number >= 1:
        packs: list[tuple[str, str]] = []
        trial, done = _PageBudget(room.left), 0
        try:
            for index, one in enumerate(_sample_of_each_layer(record, sample)):
                for head, content in enumerate(maps.encode_largest_weights(one, number=number, rounding=rounding)):
                    trial.add_pack(packs, f"k{index}.{head}", content)
                done += one.num_heads
                report(done, total)
        except _PageFullError:
            number = int(number * 0.85)  # the estimate was too low: its heads compress better than the others
            continue
        store.mode, store.number = "largest", number
        store.packs += packs
        return


def _add_single_largest_weights(
    record: Record,
    sample: int,
    store: StoredMaps,
    room: _PageBudget,
    rounding: maps.LargestRoundingError,
    report: Progress,
) -> None:
    """Add each query's largest weight from the statistics; none if they do not all fit or were not recorded."""
    total, done = sum(layer.num_heads for layer in record.layers), 0
    packs: list[tuple[str, str]] = []
    trial = _PageBudget(room.left)
    try:
        for index, one in enumerate(_sample_of_each_layer(record, sample)):
            for head, content in enumerate(maps.encode_recorded_largest_weights(one, rounding=rounding)):
                trial.add_pack(packs, f"k{index}.{head}", content)
            done += one.num_heads
            report(done, total)
    except (_PageFullError, ProbeError):
        return
    store.mode, store.number = "largest", 1
    store.packs += packs


def _bytes_per_stored_weight(record: Record, sample: int, number: int) -> float:
    """Estimate the bytes of one stored weight and its key from at most eight heads spread over the record."""
    places = [(index, head) for index, layer in enumerate(record.layers) for head in range(layer.num_heads)]
    size, entries = 0, 0
    for index, head in places[len(places) // 16 :: max(1, len(places) // 8)]:
        one = record.layers[index].sample(sample)
        (content,) = maps.encode_largest_weights(one, number=number, rounding=maps.LargestRoundingError(), head=head)
        size += len(content) + 60
        entries += one.num_queries * min(number, one.num_keys)
    return size / max(1, entries)


def _pooled_maps_of_layer(one: SampleRecord, size: int) -> Tensor | None:
    """Return the pooled maps of a layer, (heads, rows, columns), of the record if the size fits, else from q and k."""
    found = one.statistics.get("pooled_map")
    # A record pools a padded batch in blocks of the longest sample, which are too wide for a shorter one.
    wanted = tuple(-(-length // max(1, -(-length // size))) for length in (one.num_queries, one.num_keys))
    if found is not None and tuple(found.shape[-2:]) == wanted:
        return found
    try:
        return one.map(bins=size)
    except ProbeError:
        return found if size == MAP_SIZE else None


def _add_pooled_maps(
    store: StoredMaps,
    room: _PageBudget,
    kept: StoredLayerMaps,
    index: int,
    small: Tensor | None,
    one: SampleRecord,
    rounding: maps.LargestRoundingError,
) -> None:
    if small is None:
        return
    kept.rows, kept.cols = small.shape[-2:]
    kept.row_block, kept.col_block = -(-one.num_queries // max(1, kept.rows)), -(-one.num_keys // max(1, kept.cols))
    room.add_pack(store.packs, f"m{index}", maps.pack_maps(small, rounding))


def _add_margin_strips(
    store: StoredMaps, room: _PageBudget, kept: StoredLayerMaps, index: int, one: SampleRecord
) -> None:
    """Add the strips at the margins of a map: the mean weight on each key, and each query's entropy."""
    found: list[tuple[str, Tensor, float]] = []
    if "received" in one.statistics:
        share = maps.average_bins(one.statistics["received"].double() / max(1, one.num_queries), STRIP_BINS)
        found.append(("received", share, float(share.nan_to_num(nan=0.0).max())))
    if "entropy" in one.statistics:
        entropy = maps.average_bins(one.statistics["entropy"].double(), STRIP_BINS)
        found.append(("entropy", entropy, math.log(max(2, one.num_keys))))
    if not found:
        return
    codes = torch.cat([maps.encode_margin_strips(values, top) for _, values, top in found])
    room.add_pack(store.packs, f"s{index}", maps.compress_planes(codes >> 8, codes & 255))
    kept.strips = [{"id": name, "bins": values.shape[-1], "top": top} for name, values, top in found]


def _count_cells(record: Record, sample: int) -> int:
    """Count heads x queries x keys over all layers."""
    return sum(one.num_heads * one.num_queries * one.num_keys for one in _sample_of_each_layer(record, sample))


def _sample_of_each_layer(record: Record, sample: int) -> Iterator[SampleRecord]:
    for layer in record.layers:
        yield layer.sample(sample)
