"""Build the coarse levels of the maps of samples in view, strip by strip in the background, the visible head first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.viewer.levels import (
    FINEST_STORED_LEVEL,
    MAX_BYTES_IN_MEMORY,
    LayerMapLevels,
    MemoryBudget,
    number_of_levels,
)

if TYPE_CHECKING:
    from multihead.observation.record import Record

LayerAndHead = tuple[int, int]
"""The index of a layer, and the index of a head in that layer."""


class SampleMapLevels:
    """The levels of all heads of one sample of a record.

    Args:
        record: a record that kept q and k.
        sample: index of the text in the record.
        folder: the folder of the level files; None keeps levels in memory.
        room: budget of bytes for levels in memory; None creates a budget for this sample.
    """

    def __init__(self, record: Record, sample: int, folder: Path | None, room: MemoryBudget | None = None) -> None:
        self._record = record
        self._sample = sample
        self._folder = folder
        self._room = room or MemoryBudget(MAX_BYTES_IN_MEMORY)
        self._opened: dict[int, LayerMapLevels] = {}
        self._lock = threading.Lock()
        self._started: dict[LayerAndHead, tuple[Iterator[float], float]] = {}
        self._wanted: list[LayerAndHead] = []  # requested heads, the newest request last
        samples = [layer.sample(sample) for layer in record.layers]
        deep = [
            index
            for index, one in enumerate(samples)
            if number_of_levels(one.num_queries, one.num_keys) > FINEST_STORED_LEVEL
        ]
        self._left = {(layer, head): None for layer in deep for head in range(samples[layer].num_heads)}
        self.total = len(self._left)
        """Number of heads with coarse levels; short texts need none."""
        for layer in deep:
            if folder is not None and self._file_of_layer(layer).exists():
                for head in range(samples[layer].num_heads):
                    if self.levels_of_layer(layer).is_built(head):
                        del self._left[layer, head]

    @property
    def is_finished(self) -> bool:
        """Whether the levels of all heads are built."""
        return not self._left

    @property
    def heads_done(self) -> float:
        """Number of heads whose levels are built; a head that is being built counts by its finished share."""
        return self.total - len(self._left) + sum(share for _, share in list(self._started.values()))

    @property
    def in_memory(self) -> bool:
        """Whether some levels are in memory because there is no file for them."""
        return any(not each.is_in_file for each in list(self._opened.values()))

    def levels_of_layer(self, index: int) -> LayerMapLevels:
        """Open a layer's levels."""
        with self._lock:
            if index not in self._opened:
                file = None if self._folder is None else self._file_of_layer(index)
                of = {"record": self._record.id, "layer": str(index), "sample": str(self._sample)}
                one = self._record.layers[index].sample(self._sample)
                self._opened[index] = LayerMapLevels(one, file, of, self._room)
            return self._opened[index]

    def is_built(self, layer: int, head: int) -> bool:
        """Return whether a head's levels are built."""
        return (layer, head) not in self._left

    def move_to_front(self, *places: LayerAndHead) -> None:
        """Move heads to the front of the queue, before those requested earlier."""
        left = [place for place in places if place in self._left]
        with self._lock:
            self._wanted = [*(place for place in self._wanted[-256:] if place not in left), *reversed(left)]

    def build_strip(self) -> bool:
        """Build one strip of one head; returns whether anything is left to build."""
        place = self._next_head()
        if place is None:
            return False
        layer, head = place
        steps, _ = self._started.get(place) or (self.levels_of_layer(layer).build_head(head), 0.0)
        share = next(steps, None)
        if share is None:
            self._started.pop(place, None)
            self._left.pop(place)
        else:
            self._started[place] = steps, share
        return bool(self._left)

    def _file_of_layer(self, layer: int) -> Path:
        assert self._folder is not None
        return self._folder / f"layer-{layer}.sample-{self._sample}.safetensors"

    def _next_head(self) -> LayerAndHead | None:
        with self._lock:
            while self._wanted:
                if self._wanted[-1] in self._left:
                    return self._wanted[-1]
                self._wanted.pop()
        # Heads whose building has started are finished before other heads.
        return next(iter(self._started), None) or next(iter(self._left), None)


class LevelBuilder:
    """Builds the coarse levels of the opened samples, one strip at a time.

    Args:
        progress: called after each strip with (heads done, total heads), over all opened samples.
    """

    def __init__(self, progress: Callable[[float, int], None] = lambda done, total: None) -> None:
        self._pyramids: dict[Hashable, SampleMapLevels] = {}
        self._progress = progress
        self._failed: dict[Hashable, Exception] = {}
        self._newest: Hashable = None

    def queue_sample(self, key: Hashable, make: Callable[[], SampleMapLevels]) -> SampleMapLevels:
        """Return a sample's levels and queue them for building; the sample opened last comes first."""
        if key not in self._pyramids:
            self._pyramids[key] = make()
        self._newest = key
        return self._pyramids[key]

    def building_error(self, key: Hashable) -> Exception | None:
        """Return the error that stopped the building of a sample's levels, or None."""
        return self._failed.get(key)

    def build_strip(self) -> bool:
        """Build one strip of one sample; return whether any strip was left to build."""
        for key in [self._newest, *list(self._pyramids)]:
            pyramid = self._pyramids.get(key)
            if pyramid is None or key in self._failed or pyramid.is_finished:
                continue
            try:
                pyramid.build_strip()
            except Exception as error:  # noqa: BLE001 - the page shows it; the other samples continue
                self._failed[key] = error
            self._progress(*self.count_built_heads())
            return True
        return False

    def count_built_heads(self) -> tuple[float, int]:
        """Return (heads built, total heads) over all opened samples."""
        pyramids = list(self._pyramids.values())
        return sum(each.heads_done for each in pyramids), sum(each.total for each in pyramids)


def describe_building_progress(pyramid: SampleMapLevels | None, failure: Exception | None = None) -> dict[str, Any]:
    """Describe the progress of building a sample's levels, for the page."""
    if pyramid is None:
        return {"state": "none", "done": 0, "total": 0}
    done = round(pyramid.heads_done, 2)
    progress = {"state": "ready" if pyramid.is_finished else "building", "done": done, "total": pyramid.total}
    if failure is not None:
        progress |= {"state": "none", "error": f"The coarse levels could not be built: {failure}"}
    return progress | {"inMemory": pyramid.in_memory}
