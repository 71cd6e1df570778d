"""Write a view as one file that opens without a server: the heads, their maps down to a level, and the part in view.

A shared view stores float32 exactly, as deflated planes of bytes: the single weights in view, and whole maps down to
the finest level that fits. A view that does not fit raises an error with its size, instead of writing a less exact
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import torch

from multihead.errors import ArgumentError
from multihead.locale.texts import text
from multihead.viewer.facts import readable_size
from multihead.viewer.levels import TILE_SIDE, number_of_levels
from multihead.viewer.maps import compress_planes
from multihead.viewer.offline import PackedArrays, PageFullError, answers_in_file, offline_page
from multihead.viewer.page import json_in_script, viewer_style
from multihead.viewer.page_types import RunDescription, SampleDescription
from multihead.viewer.payload import describe_view
from multihead.viewer.tiles import tiles_per_side, weights_of_queries

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord
    from multihead.viewer.levels import Array

MAX_SHARED_BYTES = 20_000_000
"""Maximum size of a shared file in bytes."""

NUM_QUERIES_NEAR_CHOSEN = 64
"""Number of queries around the chosen query whose single weights are always in the file."""

MAX_TILES_IN_VIEW = 16  # largest number of tiles in view per level and head
_NUMBERS_IN_ADDRESS = ("x", "y", "n", "q")


@dataclass(frozen=True, eq=False)
class SharedHead:
    """A head whose map is in the shared file.

    Attributes:
        record_index: index of the head's record in the file: 0, or 1 for a second record.
        layer_number: number of the head's layer.
        head: index of the head in the layer.
        sample: the layer's record of the text.
        read_tile: returns a tile of the head's map, given level, row, column and sink=: whether it includes the first
            key.
    """

    record_index: int
    layer_number: int
    head: int
    sample: SampleRecord
    read_tile: Callable[..., Array]

    @property
    def name(self) -> str:
        """Name of the head in the file, as in the addresses of the page's requests."""
        return f"{self.record_index}/0/{self.layer_number}/{self.head}"


@dataclass(frozen=True)
class PlaceInView:
    """The part of a map in view.

    Attributes:
        first_key: the key at the left edge.
        first_query: the query at the top edge.
        num_keys: number of keys across; 0 for the whole map.
        chosen_query: the query whose weights the text shows; -1 for none.
    """

    first_key: float = 0
    first_query: float = 0
    num_keys: float = 0
    chosen_query: int = -1


def shared_page(
    heads: Sequence[SharedHead],
    *,
    runs: Sequence[RunDescription],
    samples: Sequence[SampleDescription],
    small_maps_of_layer: Callable[[int, int], tuple[Array, tuple[int, int]] | None],
    fragment: str,
    lang: str,
    max_bytes: int = MAX_SHARED_BYTES,
) -> bytes:
    """Write a view as one HTML file.

    The file has the statistics of all heads, and of the heads in view the whole map down to the finest level that fits,
    the tiles in view down to single weights, and the weights of the queries near the chosen query. All values equal
    those that the viewer shows, bit for bit.

    Args:
        heads: the head in view, and the head with which it is compared, if any.
        runs: the description of each record, see `payload.describe_run`.
        samples: the description of each record's text, see `payload.describe_sample`.
        small_maps_of_layer: given the index of a record and the number of a layer, returns the layer's small maps
            (heads, rows, columns), and the rows and columns of weights per cell; None if the maps are not computed yet.
        fragment: the part of the page's address after "#", which the file opens with.
        lang: the language of the page.
        max_bytes: maximum size of the file.

    Raises:
        ArgumentError: the view does not fit into max_bytes, even without any finer level.
    """
    fragment, view = _renumber_address(fragment, second_run=len(runs) > 1)
    answers = answers_in_file(describe_view(runs, lang, similar=False, looking=False), [[each] for each in samples])
    bare = len(json_in_script(answers)) + len(viewer_style()) + 200_000
    arrays, room = PackedArrays(), max_bytes - bare
    for one in heads:
        _add_rows_near_query(arrays, one, view.chosen_query)
        for level in range(number_of_levels(one.sample.num_queries, one.sample.num_keys)):
            _add_tiles(arrays, one, level, _tiles_in_view(one.sample, level, view))
    if arrays.num_bytes > room:
        raise ArgumentError(
            f"This view needs {readable_size(arrays.num_bytes + bare, 'en')}, and a shared file holds at most "
            f"{readable_size(max_bytes, 'en')}.",
            "Zoom in, or share one head at a time.",
        )
    arrays.max_bytes = room / 2  # so that at most half of the file is small maps
    _add_small_maps(arrays, heads, samples, small_maps_of_layer)
    arrays.max_bytes = room
    level = _add_whole_levels(arrays, heads)
    names = [f"L{one.layer_number} H{one.head}" for one in heads]
    depth = text("viewer.share level all" if level == 0 else "viewer.share level", lang, n=1 << level)
    note = text("viewer.share file", lang, heads=text("common.join.comma", lang).join(names), level=depth)
    return offline_page(answers, arrays, fragment=fragment, note=note)


def name_shared_file(title: str, heads: Sequence[SharedHead]) -> str:
    """Name a shared file after its record and its heads.

    >>> name_shared_file("a model/of mine", [])
    'a-model-of-mine'
    """
    plain = re.sub(r"[^\w.-]+", "-", title, flags=re.ASCII).strip("-.")[:60] or "view"
    return "-".join([plain, *(f"L{one.layer_number}H{one.head}" for one in heads)])


def _renumber_address(given: str, *, second_run: bool) -> tuple[str, PlaceInView]:
    """Return the part in view, and its address in the file, where records and texts are numbered from 0."""
    values = dict(parse_qsl(given.removeprefix("#")))
    kept = {name: value for name, value in values.items() if name in {"a", "b", "v", "c", "s"}}
    numbers = {
        name: float(value)
        for name, value in values.items()
        if name in _NUMBERS_IN_ADDRESS and re.fullmatch(r"-?\d{1,12}(\.\d{1,9})?", value)
    }
    address = kept | {name: f"{value:.0f}" for name, value in numbers.items()} | ({"rb": "1"} if second_run else {})
    view = PlaceInView(numbers.get("x", 0), numbers.get("y", 0), numbers.get("n", 0), int(numbers.get("q", -1)))
    return f"#{urlencode(address)}", view


def _tiles_in_view(sample: SampleRecord, level: int, view: PlaceInView) -> list[tuple[int, int]]:
    """List the (row, column) of a level's tiles in view; none if there are more than `MAX_TILES_IN_VIEW`."""
    width, n = TILE_SIDE << level, view.num_keys or max(sample.num_keys, sample.num_queries)

    def tiles_across(start: float, length: int) -> range:
        return range(max(0, int(start // width)), min(tiles_per_side(length, level), int((start + n) // width) + 1))

    rows, columns = tiles_across(view.first_query, sample.num_queries), tiles_across(view.first_key, sample.num_keys)
    found = list(product(rows, columns))
    return found if len(found) <= MAX_TILES_IN_VIEW else []


def _add_tiles(arrays: PackedArrays, head: SharedHead, level: int, places: Iterable[tuple[int, int]]) -> None:
    """Add tiles of a head; tiles in the first column also without the first key, if their cells are means."""
    for row, column in places:
        for sink in (True, False) if column == 0 and level > 0 else (True,):
            name = f"{head.name} {level} {row} {column} {int(sink)}"
            _add_float32(arrays, name, head.read_tile(level, row, column, sink=sink))


def _add_rows_near_query(arrays: PackedArrays, head: SharedHead, query: int) -> None:
    """Add the weights of the queries around the chosen query, and the index of the first of them, as `{head} rows`."""
    chosen = query if 0 <= query < head.sample.num_queries else int(0.6 * head.sample.num_queries)
    first = max(0, chosen - NUM_QUERIES_NEAR_CHOSEN // 2)
    queries = slice(first, min(first + NUM_QUERIES_NEAR_CHOSEN, head.sample.num_queries))
    _add_float32(arrays, f"{head.name} rows", weights_of_queries(head.sample, head.head, queries), first=first)


def _add_small_maps(
    arrays: PackedArrays,
    heads: Sequence[SharedHead],
    samples: Sequence[SampleDescription],
    small_maps_of_layer: Callable[[int, int], tuple[Array, tuple[int, int]] | None],
) -> None:
    """Add the small maps of all layers that have small maps and fit, the layers in view first."""
    chosen = [(one.record_index, one.layer_number) for one in heads]
    every = [(run, layer["number"]) for run, one in enumerate(samples) for layer in one["layers"] if layer["maps"]]
    for run, layer in dict.fromkeys([*chosen, *every]):
        found = small_maps_of_layer(run, layer)
        if found is not None:
            maps, block = found
            with suppress(PageFullError):
                _add_float32(arrays, f"runs/{run}/samples/0/layers/{layer}/maps", maps, block=list(block))


def _add_whole_levels(arrays: PackedArrays, heads: Sequence[SharedHead]) -> int:
    """Add complete levels of all heads, the coarsest first, as long as they fit; return the finest level added."""
    deepest = [number_of_levels(one.sample.num_queries, one.sample.num_keys) for one in heads]
    for level in reversed(range(max(deepest))):
        try:
            with arrays.adding_all_or_none() as added:
                for depth, one in zip(deepest, heads, strict=True):
                    if level >= depth:
                        continue
                    # A float32 takes about three bytes as base64 of deflated planes; a level estimated to be too large
                    # is not computed.
                    queries, keys = one.sample.num_queries, one.sample.num_keys
                    if 3 * (queries >> level) * (keys >> level) > 2 * arrays.max_bytes:
                        raise PageFullError
                    places = product(range(tiles_per_side(queries, level)), range(tiles_per_side(keys, level)))
                    missing = (at for at in places if f"{one.name} {level} {at[0]} {at[1]} 1" not in arrays.contents)
                    _add_tiles(added, one, level, missing)
        except PageFullError:
            return level + 1
    return 0


def _add_float32(arrays: PackedArrays, name: str, values: Array, **description: Any) -> None:
    """Add an array of float32 exactly: four planes of bytes, the byte with the exponent first, deflated."""
    octets = torch.from_numpy(np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1, 4))
    content = compress_planes(*(octets[:, place] for place in (3, 2, 1, 0)))
    arrays.add(name, content, shape=list(values.shape), coding="float32", **description)
