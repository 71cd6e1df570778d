"""Choose how much of the attention maps fits into a page, and encode that part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.viewer import maps
from multihead.viewer.payload import MARGIN_STATISTICS, MAX_UNPOOLED_SIZE, margin_of_map

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.record.sample import SampleRecord

MAX_BLOCKS_PER_SIDE = 64
"""Number of blocks per side of a pooled map, if the map fits into the page."""

MAX_BARS_PER_STRIP = 256
"""Maximum number of bars in the strip of numbers at a margin of a map."""

MAX_WEIGHTS_PER_QUERY = 512
"""Maximum number of largest weights stored per query if not all weights fit."""

FINE_WEIGHTS_PER_QUERY = 16
"""If fewer than this many weights per query fit with 16 bits each, they are stored with 8 bits each."""

MAX_CELLS = 1 << 31
"""Largest number of weights (heads x queries x keys) that are read to find each query's largest: takes some minutes."""

Progress = Callable[[int, int], None]


@dataclass
class StoredMaps:
    """The part of a record's attention maps that a page stores.

    Attributes:
        mode: "whole" (every weight), "largest" (pooled maps and each query's largest weights), "pooled"
            (pooled maps alone) or "none".
        reason: why something is left out: "room", "time" (reading every weight takes too long), "statistics" (q and k
            were not kept), or "".
        bits: bits per stored weight, in mode "whole" and "largest"; else 0.
        weights_per_query: number of weights stored per query, in mode "largest"; else 0.
        largest_rounding_error: the largest difference between a weight and its stored value, as a share (0 to 1).
        array_descriptions: name of a stored array -> its shape, coding and other properties for the page's script.
        packed_arrays: name of a stored array -> its numbers, deflated, in base64.
        weights_per_cell: per layer, the rows and columns of weights per cell of its pooled maps; None for a layer
            without stored pooled maps.
        map_size: rows and columns of the largest pooled map.
    """

    mode: str = "none"
    reason: str = ""
    bits: int = 0
    weights_per_query: int = 0
    largest_rounding_error: float = 0.0
    array_descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    packed_arrays: dict[str, str] = field(default_factory=dict)
    weights_per_cell: list[tuple[int, int] | None] = field(default_factory=list)
    map_size: tuple[int, int] = (0, 0)

    def limit_layer_to_stored_maps(self, index: int, layer: dict[str, Any]) -> dict[str, Any]:
        """Return the description of a layer for the page's script, reduced to the maps that the page stores."""
        margins = [name for name in layer["margins"] if f"0/{layer['number']} {name}" in self.array_descriptions]
        if self.mode == "whole":
            return layer | {"margins": margins}
        block = self.weights_per_cell[index] if self.mode != "none" else None
        return layer | {
            "maps": block is not None,
            "blocks": [] if block is None else [block],
            "rows": "largest" if self.mode == "largest" else "",
            "margins": margins,
        }


class _PageFullError(Exception):
    """The page has no more room."""


class _SpaceInPage:
    """The number of bytes left in a page, and the encoded arrays that are stored in it."""

    def __init__(self, size: int) -> None:
        self.left = size
        self.arrays: dict[str, dict[str, Any]] = {}
        self.packs: dict[str, str] = {}

    def add(self, name: str, content: str, **described: Any) -> None:
        """Add an encoded array, or raise `_PageFullError`; an array's script tag and description take 140 bytes."""
        self.left -= len(content) + 140
        if self.left < 0:
            raise _PageFullError
        self.packs[name] = content
        self.arrays[name] = described

    def start_part(self) -> _SpaceInPage:
        """Return an empty space with the bytes left here, for arrays that may not all fit; `add_part` adds them."""
        return _SpaceInPage(self.left)

    def add_part(self, part: _SpaceInPage) -> None:
        """Add the arrays of a space that `start_part` returned."""
        self.left = part.left
        self.arrays |= part.arrays
        self.packs |= part.packs


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
    the remaining bytes each query's largest weights, with 16 bits or, if these are few, with 8 bits each; for a long
    text with more than `MAX_CELLS` weights, only the single largest weight per query, from the statistics.
    """
    has_weights = keeps_weights(record, sample)
    report = progress or (lambda done, total: None)
    if has_weights:
        cells = _count_cells(record, sample)
        # No measured map compresses below a tenth of a byte per weight, so maps with more weights are not tried.
        for bits in (16, 12) if cells <= min(room * 10, MAX_CELLS) else ():
            try:
                return _encode_whole_maps(record, sample, bits, room, report)
            except _PageFullError:
                continue
    size = MAX_BLOCKS_PER_SIDE
    while size >= 8:
        try:
            return _encode_pooled_maps(record, sample, size, room, report, has_weights=has_weights)
        except _PageFullError:
            size //= 2
    return StoredMaps(reason="room")


def _encode_whole_maps(record: Record, sample: int, bits: int, size: int, report: Progress) -> StoredMaps:
    room, rounding = _SpaceInPage(size), maps.LargestRoundingError()
    total, done = sum(layer.num_heads for layer in record.layers), 0
    for number, one in _numbered_samples(record, sample):
        if (
            max(one.num_queries, one.num_keys) > MAX_UNPOOLED_SIZE
            and (small := _pooled_maps_of_layer(one, MAX_BLOCKS_PER_SIDE)) is not None
        ):
            _add_pooled_maps(room, number, small, one, maps.LargestRoundingError())
        _add_margins(room, number, one)
        for head in range(one.num_heads):
            content = maps.encode_all_weights(one, head, bits=bits, rounding=rounding)
            room.add(f"0/{number}/{head}", content, shape=[one.num_queries, one.num_keys], coding=f"root{bits}")
            done += 1
            report(done, total)
    return StoredMaps(
        "whole",
        bits=bits,
        largest_rounding_error=rounding.largest,
        array_descriptions=room.arrays,
        packed_arrays=room.packs,
    )


def _encode_pooled_maps(
    record: Record, sample: int, map_size: int, size: int, report: Progress, *, has_weights: bool
) -> StoredMaps:
    room, rounding = _SpaceInPage(size), maps.LargestRoundingError()
    found = [(number, one, _pooled_maps_of_layer(one, map_size)) for number, one in _numbered_samples(record, sample)]
    reason = "room" if has_weights else "statistics"
    if all(small is None for _, _, small in found):
        return StoredMaps(reason="statistics")
    store = StoredMaps("pooled", reason, array_descriptions=room.arrays, packed_arrays=room.packs)
    for number, one, small in found:
        store.weights_per_cell.append(None if small is None else _add_pooled_maps(room, number, small, one, rounding))
    sides = [small.shape[-2:] for _, _, small in found if small is not None]
    store.map_size = max(rows for rows, _ in sides), max(columns for _, columns in sides)
    with suppress(_PageFullError):
        margins = room.start_part()
        for number, one, _ in found:
            _add_margins(margins, number, one)
        room.add_part(margins)
        if has_weights:
            _add_largest_weights(record, sample, store, room, rounding, report)
    store.largest_rounding_error = rounding.largest
    return store


def _add_largest_weights(
    record: Record,
    sample: int,
    store: StoredMaps,
    room: _SpaceInPage,
    rounding: maps.LargestRoundingError,
    report: Progress,
) -> None:
    """Add each query's largest weights, as many per query as fit into the page; none if not one per query fits."""
    if _count_cells(record, sample) > MAX_CELLS:
        store.reason = "time"
        encode = partial(maps.encode_recorded_largest_weights, rounding=rounding)
        with suppress(_PageFullError, ProbeError):
            _add_encoded(record, sample, store, room, report, encode, number=1, bits=16)
        return
    queries = sum(one.num_heads * one.num_queries for _, one in _numbered_samples(record, sample))
    numbers = {bits: _largest_that_fit(record, sample, room.left, queries, bits) for bits in (16, 8)}
    bits = 16 if numbers[16] >= min(FINE_WEIGHTS_PER_QUERY, numbers[8]) else 8
    number = numbers[bits]
    while number >= 1:
        encode = partial(maps.encode_largest_weights, number=number, bits=bits, rounding=rounding)
        try:
            _add_encoded(record, sample, store, room, report, encode, number=number, bits=bits)
        except _PageFullError:
            # the bytes per weight were underestimated: the sampled heads compress better than others
            number = int(number * 0.85)
        else:
            return


def _add_encoded(
    record: Record,
    sample: int,
    store: StoredMaps,
    room: _SpaceInPage,
    report: Progress,
    encode: Callable[[SampleRecord], list[str]],
    *,
    number: int,
    bits: int,
) -> None:
    """Add each query's `number` largest weights as `encode` returns them for a layer, one string per head."""
    trial, done, total = room.start_part(), 0, sum(layer.num_heads for layer in record.layers)
    for layer, one in _numbered_samples(record, sample):
        shape = [one.num_queries, min(number, one.num_keys)]
        for head, content in enumerate(encode(one)):
            trial.add(f"0/{layer}/{head} largest", content, shape=shape, coding=f"root{bits}", keys=one.num_keys)
        done += one.num_heads
        report(done, total)
    room.add_part(trial)
    store.mode, store.weights_per_query, store.bits = "largest", number, bits


def _largest_that_fit(record: Record, sample: int, left: int, queries: int, bits: int) -> int:
    """Estimate how many weights per query fit into `left` bytes."""
    number = int(left / (queries * 3))  # about three bytes each, fewer if many are stored per query
    for _ in range(2):
        each = _bytes_per_stored_weight(record, sample, max(1, min(number, MAX_WEIGHTS_PER_QUERY)), bits)
        number = min(int(0.97 * left / (queries * each)), MAX_WEIGHTS_PER_QUERY)
    return number


def _bytes_per_stored_weight(record: Record, sample: int, number: int, bits: int) -> float:
    """Estimate the bytes of one stored weight and its key from at most eight heads spread over the record."""
    places = [(index, head) for index, layer in enumerate(record.layers) for head in range(layer.num_heads)]
    size, entries = 0, 0
    for index, head in places[len(places) // 16 :: max(1, len(places) // 8)]:
        one = record.layers[index].sample(sample)
        unused = maps.LargestRoundingError()
        (content,) = maps.encode_largest_weights(one, number=number, bits=bits, rounding=unused, head=head)
        size += len(content) + 140
        entries += one.num_queries * min(number, one.num_keys)
    return size / max(1, entries)


def _pooled_maps_of_layer(one: SampleRecord, size: int) -> Tensor | None:
    """Return the pooled maps of a layer, (heads, rows, columns): stored ones if their size fits, else from q and k."""
    found = one.statistics.get("pooled_map")
    # A record pools a padded batch in blocks for the longest sample, which are too wide for a shorter sample.
    wanted = tuple(-(-length // max(1, -(-length // size))) for length in (one.num_queries, one.num_keys))
    if found is not None and tuple(found.shape[-2:]) == wanted:
        return found
    try:
        return one.map(bins=size)
    except ProbeError:
        return found if size == MAX_BLOCKS_PER_SIDE else None


def _add_pooled_maps(
    room: _SpaceInPage, number: int, small: Tensor, one: SampleRecord, rounding: maps.LargestRoundingError
) -> tuple[int, int]:
    """Add the pooled maps of a layer; returns the rows and columns of weights per cell."""
    rows, columns = small.shape[-2:]
    block = -(-one.num_queries // max(1, rows)), -(-one.num_keys // max(1, columns))
    name = f"runs/0/samples/0/layers/{number}/maps"
    room.add(name, maps.pack_maps(small, rounding), shape=list(small.shape), coding="root16", block=block)
    return block


def _add_margins(room: _SpaceInPage, number: int, one: SampleRecord) -> None:
    """Add the strips at the margins of a layer's maps: the mean weight on each key, and each query's entropy."""
    for name in MARGIN_STATISTICS:
        if name in one.statistics:
            every = torch.stack([margin_of_map(one, head, name) for head in range(one.num_heads)])
            values = maps.average_bins(every, MAX_BARS_PER_STRIP)
            top = float(values.nan_to_num(nan=0.0).max())
            content = maps.pack_margins(values, top)
            room.add(f"0/{number} {name}", content, shape=list(values.shape), coding="linear16", top=top)


def _count_cells(record: Record, sample: int) -> int:
    """Count heads x queries x keys over all layers."""
    return sum(one.num_heads * one.num_queries * one.num_keys for _, one in _numbered_samples(record, sample))


def _numbered_samples(record: Record, sample: int) -> Iterator[tuple[int, SampleRecord]]:
    """Yield the number of each layer, and the layer's record of the text `sample`."""
    for layer in record.layers:
        yield layer.number, layer.sample(sample)
