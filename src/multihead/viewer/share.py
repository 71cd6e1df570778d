"""Write a view as one file that opens without a server: the heads, their maps down to a level, and the part in view.

A shared view stores float32 exactly, as deflated planes of bytes: the single weights in view, and whole maps down to
the finest level that fits. A view that does not fit raises an error with its size, instead of writing a less exact
file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import torch

from multihead.errors import ArgumentError
from multihead.locale.texts import text
from multihead.viewer.facts import readable_size
from multihead.viewer.levels import TILE_SIDE, number_of_levels
from multihead.viewer.maps import compress_planes
from multihead.viewer.offline import offline_page
from multihead.viewer.page import STYLE_SHEETS, json_in_script, read_package_file
from multihead.viewer.payload import describe_view
from multihead.viewer.tiles import tiles_per_side, weights_of_queries

if TYPE_CHECKING:
    from multihead.record.sample import SampleRecord
    from multihead.viewer.levels import Array

MAX_BYTES = 20_000_000
"""Maximum size of a shared file in bytes."""

NUM_NEAR_QUERIES = 64
"""Number of queries around the chosen query whose single weights are always in the file."""

MAX_TILES_IN_VIEW = 16  # largest number of tiles in view per level and head
_NUMBERS_IN_ADDRESS = ("x", "y", "n", "q")


@dataclass(frozen=True, eq=False)
class SharedHead:
    """A head whose map is in the shared file.

    Attributes:
        run: index of the head's record in the file: 0, or 1 for a second record.
        layer: number of the head's layer.
        head: index of the head in the layer.
        sample: the layer's record of the text.
        tile: returns a tile of the head's map, given level, row, column, and sink=: whether the first key is included.
    """

    run: int
    layer: int
    head: int
    sample: SampleRecord
    tile: Callable[..., Array]

    @property
    def name(self) -> str:
        """Name of the head in the file, as in the addresses of the page's requests."""
        return f"{self.run}/{self.layer}/{self.head}"


@dataclass(frozen=True)
class PlaceInView:
    """The part of a map in view: keys from x, queries from y, n keys across (0: the whole map), and the query q."""

    first_key: float = 0
    first_query: float = 0
    num_keys: float = 0
    chosen_query: int = -1


_PackedArrays = Mapping[str, tuple[str, dict[str, Any]]]
"""Name of an array -> its numbers, deflated and in base64, and its description for the page's script."""


@dataclass(eq=False)
class _ArraysOfFile:
    """The packed arrays of a shared file, by name, and their total size in bytes."""

    arrays: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, packed: _PackedArrays) -> None:
        self.arrays |= packed
        self.num_bytes += _size_of_packed_arrays(packed)


def shared_page(
    heads: Sequence[SharedHead],
    *,
    runs: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    small: Callable[[int, int], tuple[Array, tuple[int, int]] | None],
    place: str,
    lang: str,
    max_bytes: int = MAX_BYTES,
) -> bytes:
    """Write a view as one HTML file.

    The file has the statistics of all heads, and of the heads in view the whole map down to the finest level that fits,
    the tiles in view down to single weights, and the weights of the queries near the chosen query. All values equal
    those that the viewer shows, bit for bit.

    Args:
        heads: the head in view, and the head with which it is compared, if any.
        runs: the description of each record, see `payload.describe_run`.
        samples: the description of each record's text, see `payload.describe_sample`.
        small: returns the small maps of a layer of a record (heads, rows, columns), and the rows and columns of weights
            per cell; None if the maps are not computed yet.
        place: the part of the page's address after "#", which the file opens with.
        lang: the language of the page.
        max_bytes: maximum size of the file.

    Raises:
        ArgumentError: the view does not fit into max_bytes, even without any finer level.
    """
    place, view = _renumbered_place(place, second_run=len(runs) > 1)
    held = _ArraysOfFile()
    plain: dict[str, Any] = {"view": describe_view(runs, lang, similar=False, looking=False)}
    for run, described in enumerate(samples):
        plain[f"runs/{run}/samples/0"] = described
        plain[f"runs/{run}/samples/0/levels"] = {"state": "ready", "done": 1, "total": 1, "inMemory": False}
    bare = (
        len(json_in_script(plain))
        + sum(len(read_package_file(f"viewer/static/{name}")) for name in STYLE_SHEETS)
        + 200_000
    )
    room = max_bytes - bare
    for one in heads:
        held.add(_pack_rows_near_query(one, view.chosen_query))
        for level in range(number_of_levels(one.sample.num_queries, one.sample.num_keys)):
            held.add(_pack_tiles(one, level, _tiles_in_view(one.sample, level, view)))
    if held.num_bytes > room:
        raise ArgumentError(
            f"This view needs {readable_size(held.num_bytes + bare, 'en')}, and a shared file holds at most "
            f"{readable_size(max_bytes, 'en')}.",
            "Zoom in, or share one head at a time.",
        )
    for run, layer, maps in _small_maps(heads, samples, small):
        packed = {f"runs/{run}/samples/0/layers/{layer}/maps": maps}
        if held.num_bytes + _size_of_packed_arrays(packed) < room / 2:
            held.add(packed)
    level = _add_whole_levels(heads, held, room)
    names = [f"L{one.layer} H{one.head}" for one in heads]
    depth = text("viewer.share level all" if level == 0 else "viewer.share level", lang, n=1 << level)
    note = text("viewer.share file", lang, heads=text("common.join.comma", lang).join(names), level=depth)
    return offline_page(
        plain,
        {name: described for name, (_, described) in held.arrays.items()},
        ((name, content) for name, (content, _) in held.arrays.items()),
        title=str(runs[0]["title"] or runs[0]["name"]),
        lang=lang,
        place=place,
        note=note,
    )


def name_shared_file(title: str, heads: Sequence[SharedHead]) -> str:
    """Name a shared file after its record and its heads.

    >>> name_shared_file("a model/of mine", [])
    'a-model-of-mine'
    """
    plain = re.sub(r"[^\w.-]+", "-", title, flags=re.ASCII).strip("-.")[:60] or "view"
    return "-".join([plain, *(f"L{one.layer}H{one.head}" for one in heads)])


def _renumbered_place(given: str, *, second_run: bool) -> tuple[str, PlaceInView]:
    """Return the part in view, and its address in the file, where records and texts are numbered from 0."""
    kept = {name: value for name, value in parse_qsl(given.removeprefix("#")) if name in {"a", "b", "v", "c", "s"}}
    numbers: dict[str, float] = {}
    for name, value in parse_qsl(given.removeprefix("#")):
        if name in _NUMBERS_IN_ADDRESS and re.fullmatch(r"-?\d{1,12}(\.\d{1,9})?", value):
            numbers[name] = float(value)
    address = kept | {name: f"{value:.0f}" for name, value in numbers.items()} | ({"rb": "1"} if second_run else {})
    view = PlaceInView(numbers.get("x", 0), numbers.get("y", 0), numbers.get("n", 0), int(numbers.get("q", -1)))
    return f"#{urlencode(address)}", view


def _tiles_in_view(one: SampleRecord, level: int, view: PlaceInView) -> list[tuple[int, int]]:
    """List the (row, column) of a level's tiles in view; none if there are more than `MAX_TILES_IN_VIEW`."""
    width = TILE_SIDE << level
    rows, columns = tiles_per_side(one.num_queries, level), tiles_per_side(one.num_keys, level)
    n = view.num_keys or max(one.num_keys, one.num_queries)

    def tiles_across(start: float, tiles: int) -> range:
        return range(max(0, int(start // width)), min(tiles, int((start + n) // width) + 1))

    found = [
        (row, column)
        for row in tiles_across(view.first_query, rows)
        for column in tiles_across(view.first_key, columns)
    ]
    return found if len(found) <= MAX_TILES_IN_VIEW else []


def _pack_tiles(one: SharedHead, level: int, places: Sequence[tuple[int, int]]) -> _PackedArrays:
    """Pack tiles of a head; tiles in the first column also without the first key, if their cells are means."""
    return {
        f"{one.name} {level} {row} {column} {int(sink)}": _pack_float32(one.tile(level, row, column, sink=sink))
        for row, column in places
        for sink in ((True, False) if column == 0 and level > 0 else (True,))
    }


def _pack_rows_near_query(one: SharedHead, query: int) -> _PackedArrays:
    """Pack the weights of the queries around the chosen query, and the index of the first one, as `{head} rows`."""
    chosen = query if 0 <= query < one.sample.num_queries else int(0.6 * one.sample.num_queries)
    first = max(0, chosen - NUM_NEAR_QUERIES // 2)
    queries = slice(first, min(first + NUM_NEAR_QUERIES, one.sample.num_queries))
    return {f"{one.name} rows": _pack_float32(weights_of_queries(one.sample, one.head, queries), first=first)}


def _small_maps(
    heads: Sequence[SharedHead],
    samples: Sequence[Mapping[str, Any]],
    small: Callable[[int, int], tuple[Array, tuple[int, int]] | None],
) -> Iterator[tuple[int, int, tuple[str, dict[str, Any]]]]:
    """Yield (record, layer, packed small maps) of all layers that have small maps, the layers in view first."""
    chosen = [(one.run, one.layer) for one in heads]
    every = [(run, layer["number"]) for run, one in enumerate(samples) for layer in one["layers"] if layer["maps"]]
    for run, layer in dict.fromkeys([*chosen, *every]):
        found = small(run, layer)
        if found is not None:
            maps, block = found
            yield run, layer, _pack_float32(maps, block=list(block))


def _add_whole_levels(heads: Sequence[SharedHead], held: _ArraysOfFile, room: int) -> int:
    """Add complete levels of all heads, the coarsest first, as long as they fit; return the finest level added."""
    deepest = [number_of_levels(one.sample.num_queries, one.sample.num_keys) for one in heads]
    for level in reversed(range(max(deepest))):
        added: dict[str, tuple[str, dict[str, Any]]] = {}
        for place, one in enumerate(heads):
            if level >= deepest[place]:
                continue
            # A float32 takes about three bytes as base64 of deflated planes; a level estimated to be too large is not
            # computed.
            if 3 * (one.sample.num_queries >> level) * (one.sample.num_keys >> level) > 2 * room:
                return level + 1
            rows, columns = (tiles_per_side(length, level) for length in (one.sample.num_queries, one.sample.num_keys))
            places = [(row, column) for row in range(rows) for column in range(columns)]
            added |= _pack_tiles(
                one, level, [at for at in places if f"{one.name} {level} {at[0]} {at[1]} 1" not in held.arrays]
            )
        if held.num_bytes + _size_of_packed_arrays(added) > room:
            return level + 1
        held.add(added)
    return 0


def _pack_float32(values: Array, **described: Any) -> tuple[str, dict[str, Any]]:
    """Pack an array of float32 exactly: four planes of bytes, the byte with the exponent first, deflated."""
    octets = torch.from_numpy(np.ascontiguousarray(values, "<f4").view(np.uint8).reshape(-1, 4))
    content = compress_planes(*(octets[:, place] for place in (3, 2, 1, 0)))
    return content, {"shape": list(values.shape), "coding": "float32"} | described


def _size_of_packed_arrays(packed: _PackedArrays) -> int:
    return sum(2 * len(name) + len(content) + 120 for name, (content, _) in packed.items())
