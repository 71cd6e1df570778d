"""Choose how much of the attention maps fits into a page, and encode that part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.probes.catalogue import POOLED_MAP
from multihead.probes.choices import MARGINS_OF_MAP
from multihead.viewer import maps
from multihead.viewer.offline import PackedArrays, PageFullError
from multihead.viewer.page_types import LayerDescription, PictureText
from multihead.viewer.payload import MAX_UNPOOLED_SIZE, margin_of_map
from multihead.viewer.pictures import add_rows

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.record.sample import SampleRecord

MAX_BLOCKS_PER_SIDE = 64
"""Number of blocks per side of a pooled map, if the map fits into the page."""

MAX_BARS_PER_STRIP = 256
"""Maximum number of bars in the strip of numbers at a margin of a map."""

MAX_WEIGHTS_PER_QUERY = 512
"""Maximum number of largest weights stored per query if not all weights fit."""

MIN_WEIGHTS_OF_16_BITS = 16
"""If fewer than this many weights per query fit with 16 bits each, they are stored with 8 bits each."""

MAX_READ_WEIGHTS = 1 << 31
"""Largest number of weights (heads x queries x keys) that are read to find each query's largest: takes some minutes."""

Progress = Callable[[int, int], None]

_SampleOfLayer = Mapping[int, "SampleRecord"]
"""Number of a layer -> the layer's record of the text of the page."""


@dataclass
class StoredMaps:
    """The part of a record's attention maps that a page stores.

    Attributes:
        mode: "whole" (every weight), "largest" (pooled maps and each query's largest weights), "pooled"
            (pooled maps alone) or "none".
        why_incomplete: why something is left out: "room", "time" (reading every weight takes too long), "statistics"
            (q and k were not kept), or "".
        bits_per_weight: bits per stored weight, in mode "whole" and "largest"; else 0.
        weights_per_query: number of weights stored per query, in mode "largest"; else 0.
        largest_rounding_error: the largest difference between a weight and its stored value, as a share (0 to 1).
        arrays: the stored arrays.
        place: index of the text among those of the page.
        weights_per_cell: per layer, the rows and columns of weights per cell of its pooled maps; None for a layer
            without stored pooled maps.
        map_size: rows and columns of the largest pooled map.
        rows_in_pictures: index of a text with pictures -> the queries whose rows are stored; not in mode "whole".
    """

    mode: str = "none"
    why_incomplete: str = ""
    bits_per_weight: int = 0
    weights_per_query: int = 0
    largest_rounding_error: float = 0.0
    arrays: PackedArrays = field(default_factory=PackedArrays)
    place: int = 0
    weights_per_cell: list[tuple[int, int] | None] = field(default_factory=list)
    map_size: tuple[int, int] = (0, 0)
    rows_in_pictures: dict[int, list[int]] = field(default_factory=dict)

    def limit_layer_to_stored_maps(self, index: int, layer: LayerDescription) -> LayerDescription:
        """Return the description of a layer for the page's script, reduced to the maps that the page stores."""
        margins = [
            name for name in layer["margins"] if f"0/{self.place}/{layer['number']} {name}" in self.arrays.descriptions
        ]
        if self.mode == "whole":
            return layer | {"margins": margins}
        block = self.weights_per_cell[index] if self.mode != "none" else None
        return layer | {
            "maps": block is not None,
            "blocks": [] if block is None else [block],
            "rows": "largest" if self.mode == "largest" else "",
            "margins": margins,
        }


def encode_maps_of_texts(
    record: Record,
    samples: Sequence[int],
    *,
    room: int,
    progress: Progress | None = None,
    pictures: Sequence[Sequence[PictureText]] = (),
) -> list[StoredMaps]:
    """Encode as much of the maps of texts as fits into `room` bytes: an equal share each, and what others leave.

    `pictures` describes the texts with pictures of each of the `samples`.
    """
    sizes = [_count_weights(_samples_of_layers(record, sample)) for sample in samples]
    heads = sum(layer.num_heads for layer in record.layers)
    found: dict[int, StoredMaps] = {}
    for done, place in enumerate(sorted(range(len(samples)), key=lambda place: sizes[place])):  # small ones leave room

        def report(heads_done: int, _: int, before: int = done * heads) -> None:
            if progress is not None:
                progress(before + heads_done, heads * len(samples))

        share = room // (len(samples) - done)
        found[place] = encode_fitting_maps(
            record,
            sample=samples[place],
            place=place,
            room=share,
            progress=report,
            pictures=pictures[place] if pictures else (),
        )
        room -= int(found[place].arrays.num_bytes)
    return [found[place] for place in range(len(samples))]


def encode_fitting_maps(
    record: Record,
    *,
    sample: int,
    room: int,
    place: int = 0,
    progress: Progress | None = None,
    pictures: Sequence[PictureText] = (),
) -> StoredMaps:
    """Encode as much of the maps of a text as fits into `room` bytes, layer by layer and head by head.

    First choice: every weight in 16 bits, then in 12. If neither fits: pooled maps of 64 x 64 (or 32, 16, 8), and in
    the remaining bytes each query's largest weights, with 16 bits or, if these are few, with 8 bits each; for a long
    text with more than `MAX_READ_WEIGHTS` weights, only the single largest weight per query, from the statistics. Of a
    text with pictures, the rows of some queries come before the largest weights.
    """
    samples = _samples_of_layers(record, sample)
    has_weights = all(one.keeps_weights for one in samples.values())
    report = progress or (lambda done, total: None)
    # No measured map compresses below a tenth of a byte per weight, so maps with more weights are not tried.
    if has_weights and _count_weights(samples) <= min(room * 10, MAX_READ_WEIGHTS):
        for bits in (16, 12):
            with suppress(PageFullError):
                return _encode_whole_maps(samples, bits, PackedArrays(room), place, report)
    for map_size in (MAX_BLOCKS_PER_SIDE, 32, 16, 8):
        with suppress(PageFullError):
            return _encode_pooled_maps(
                samples, map_size, PackedArrays(room), place, report, pictures, has_weights=has_weights
            )
    return StoredMaps(why_incomplete="room", place=place)


def _samples_of_layers(record: Record, sample: int) -> _SampleOfLayer:
    return {layer.number: layer.sample(sample) for layer in record.layers}


def _encode_whole_maps(
    samples: _SampleOfLayer, bits: int, arrays: PackedArrays, place: int, report: Progress
) -> StoredMaps:
    rounding = maps.LargestRoundingError()
    total, done = _count_heads(samples), 0
    for number, one in samples.items():
        if max(one.num_queries, one.num_keys) > MAX_UNPOOLED_SIZE:
            small = _pooled_maps_of_layer(one, MAX_BLOCKS_PER_SIDE)
            _add_pooled_maps(arrays, place, number, small, one, maps.LargestRoundingError())
        _add_margins(arrays, place, number, one)
        for head in range(one.num_heads):
            content = maps.encode_all_weights(one, head, bits=bits, rounding=rounding)
            arrays.add(
                f"0/{place}/{number}/{head}", content, shape=[one.num_queries, one.num_keys], coding=f"root{bits}"
            )
            done += 1
            report(done, total)
    return StoredMaps(
        "whole", bits_per_weight=bits, largest_rounding_error=rounding.largest, arrays=arrays, place=place
    )


def _encode_pooled_maps(
    samples: _SampleOfLayer,
    map_size: int,
    arrays: PackedArrays,
    place: int,
    report: Progress,
    pictures: Sequence[PictureText],
    *,
    has_weights: bool,
) -> StoredMaps:
    rounding = maps.LargestRoundingError()
    found = {number: _pooled_maps_of_layer(one, map_size) for number, one in samples.items()}
    sides = [small.shape[-2:] for small in found.values() if small is not None]
    if not sides:
        return StoredMaps(why_incomplete="statistics", place=place)
    store = StoredMaps("pooled", "room" if has_weights else "statistics", arrays=arrays, place=place)
    store.map_size = max(rows for rows, _ in sides), max(columns for _, columns in sides)
    store.weights_per_cell = [
        _add_pooled_maps(arrays, place, number, small, samples[number], rounding) for number, small in found.items()
    ]
    with suppress(PageFullError):
        with arrays.adding_all_or_none() as margins:
            for number, one in samples.items():
                _add_margins(margins, place, number, one)
        for index, part in enumerate(pictures):
            ones = [samples[number] for number in part["layers"]]
            store.rows_in_pictures[index] = add_rows(arrays, ones, part, f"0/{place} pictures {index}")
        if has_weights:
            _add_largest_weights(samples, store, rounding, report)
    store.largest_rounding_error = rounding.largest
    return store


def _add_largest_weights(
    samples: _SampleOfLayer, store: StoredMaps, rounding: maps.LargestRoundingError, report: Progress
) -> None:
    """Add each query's largest weights, as many per query as fit into the page; none if not one per query fits."""
    if _count_weights(samples) > MAX_READ_WEIGHTS:
        store.why_incomplete = "time"
        encode = partial(maps.encode_recorded_largest_weights, rounding=rounding)
        with suppress(PageFullError, ProbeError):
            _add_weights_of_queries(samples, store, report, encode, number=1, bits=16)
        return
    left = store.arrays.max_bytes - store.arrays.num_bytes
    numbers = {bits: _estimate_weights_per_query(samples, left, bits) for bits in (16, 8)}
    bits = 16 if numbers[16] >= min(MIN_WEIGHTS_OF_16_BITS, numbers[8]) else 8
    number = numbers[bits]
    while number >= 1:
        encode = partial(maps.encode_largest_weights, number=number, bits=bits, rounding=rounding)
        with suppress(PageFullError):
            _add_weights_of_queries(samples, store, report, encode, number=number, bits=bits)
            return
        # the bytes per weight were underestimated: the sampled heads compress better than others
        number = int(number * 0.85)


def _add_weights_of_queries(
    samples: _SampleOfLayer,
    store: StoredMaps,
    report: Progress,
    encode: Callable[[SampleRecord], list[str]],
    *,
    number: int,
    bits: int,
) -> None:
    """Add each query's `number` largest weights as `encode` returns them for a layer, one string per head."""
    done, total = 0, _count_heads(samples)
    with store.arrays.adding_all_or_none() as group:
        for layer, one in samples.items():
            shape = [one.num_queries, min(number, one.num_keys)]
            for head, content in enumerate(encode(one)):
                group.add(
                    f"0/{store.place}/{layer}/{head} largest",
                    content,
                    shape=shape,
                    coding=f"root{bits}",
                    keys=one.num_keys,
                )
            done += one.num_heads
            report(done, total)
    store.mode, store.weights_per_query, store.bits_per_weight = "largest", number, bits


def _estimate_weights_per_query(samples: _SampleOfLayer, left: float, bits: int) -> int:
    """Estimate how many weights per query fit into `left` bytes."""
    queries = sum(one.num_heads * one.num_queries for one in samples.values())
    number = int(left / (queries * 3))  # about three bytes each, fewer if many are stored per query
    for _ in range(2):
        each = _bytes_per_stored_weight(samples, max(1, min(number, MAX_WEIGHTS_PER_QUERY)), bits)
        number = min(int(0.97 * left / (queries * each)), MAX_WEIGHTS_PER_QUERY)
    return number


def _bytes_per_stored_weight(samples: _SampleOfLayer, number: int, bits: int) -> float:
    """Estimate the bytes of one stored weight and its key from at most eight heads spread over the record."""
    heads = [(one, head) for one in samples.values() for head in range(one.num_heads)]
    size, entries = 0, 0
    for one, head in heads[len(heads) // 16 :: max(1, len(heads) // 8)]:
        unused = maps.LargestRoundingError()
        (content,) = maps.encode_largest_weights(one, number=number, bits=bits, rounding=unused, head=head)
        size += len(content) + 140
        entries += one.num_queries * min(number, one.num_keys)
    return size / max(1, entries)


def _pooled_maps_of_layer(sample: SampleRecord, size: int) -> Tensor | None:
    """Return the pooled maps of a layer, (heads, rows, columns): stored ones if their size fits, else from q and k."""
    found = sample.statistics.get(POOLED_MAP.name)
    # A record pools a padded batch in blocks for the longest sample, which are too wide for a shorter sample.
    wanted = tuple(-(-length // max(1, -(-length // size))) for length in (sample.num_queries, sample.num_keys))
    if found is not None and tuple(found.shape[-2:]) == wanted:
        return found
    try:
        return sample.map(bins=size)
    except ProbeError:
        return found if size == MAX_BLOCKS_PER_SIDE else None


def _add_pooled_maps(
    arrays: PackedArrays,
    place: int,
    number: int,
    small: Tensor | None,
    sample: SampleRecord,
    rounding: maps.LargestRoundingError,
) -> tuple[int, int] | None:
    """Add the pooled maps of a layer, if it has any; returns the rows and columns of weights per cell."""
    if small is None:
        return None
    rows, columns = small.shape[-2:]
    block = -(-sample.num_queries // max(1, rows)), -(-sample.num_keys // max(1, columns))
    name = f"runs/0/samples/{place}/layers/{number}/maps"
    arrays.add(name, maps.pack_maps(small, rounding), shape=list(small.shape), coding="root16", block=block)
    return block


def _add_margins(arrays: PackedArrays, place: int, number: int, sample: SampleRecord) -> None:
    """Add the strips at the margins of a layer's maps: the mean weight on each key, and each query's entropy."""
    for name in MARGINS_OF_MAP:
        if name in sample.statistics:
            every = torch.stack([margin_of_map(sample, head, name) for head in range(sample.num_heads)])
            values = maps.average_bins(every, MAX_BARS_PER_STRIP)
            top = float(values.nan_to_num(nan=0.0).max())
            content = maps.pack_margins(values, top)
            arrays.add(f"0/{place}/{number} {name}", content, shape=list(values.shape), coding="linear16", top=top)


def _count_heads(samples: _SampleOfLayer) -> int:
    return sum(one.num_heads for one in samples.values())


def _count_weights(samples: _SampleOfLayer) -> int:
    """Count heads x queries x keys over all layers."""
    return sum(one.num_heads * one.num_queries * one.num_keys for one in samples.values())
