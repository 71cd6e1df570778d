"""Build the coarse levels of the maps of samples in view, strip by strip in the background, the visible head first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from multihead.viewer.levels import (
    FINEST_STORED_LEVEL,
    MAX_LEVEL_BYTES_IN_MEMORY,
    LayerMapLevels,
    MemoryBudget,
    number_of_levels,
)
from multihead.viewer.page_types import LevelsProgress

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
        memory_budget: budget of bytes for levels in memory; None creates a budget for this sample.
    """

    def __init__(
        self, record: Record, sample: int, folder: Path | None, memory_budget: MemoryBudget | None = None
    ) -> None:
        self._record = record
        self._sample = sample
        self._folder = folder
        self._memory_budget = memory_budget or MemoryBudget(MAX_LEVEL_BYTES_IN_MEMORY)
        self._levels_by_layer: dict[int, LayerMapLevels] = {}
        self._lock = threading.Lock()
        self._heads_being_built: dict[LayerAndHead, tuple[Iterator[float], float]] = {}
        self.failure: Exception | None = None
        """The error that stopped the building of the levels, or None."""
        samples = [layer.sample(sample) for layer in record.layers]
        deep = [
            index
            for index, one in enumerate(samples)
            if number_of_levels(one.num_queries, one.num_keys) > FINEST_STORED_LEVEL
        ]
        # In the order in which they are built; the values are not used.
        self._heads_left = {(layer, head): None for layer in deep for head in range(samples[layer].num_heads)}
        self.num_heads = len(self._heads_left)
        """Number of heads with coarse levels; short texts need none."""
        for layer in deep:
            if (file := self._file_of_layer(layer)) and file.exists():
                for head in range(samples[layer].num_heads):
                    if self.levels_of_layer(layer).is_built(head):
                        del self._heads_left[layer, head]

    @property
    def is_finished(self) -> bool:
        """Whether the levels of all heads are built."""
        return not self._heads_left

    @property
    def num_built_heads(self) -> float:
        """Number of heads whose levels are built; a head that is being built counts by its finished share."""
        shares = [share for _, share in list(self._heads_being_built.values())]
        return self.num_heads - len(self._heads_left) + sum(shares)

    @property
    def has_levels_in_memory(self) -> bool:
        """Whether some levels are in memory because there is no file for them."""
        return any(not each.is_in_file for each in list(self._levels_by_layer.values()))

    def levels_of_layer(self, index: int) -> LayerMapLevels:
        """Open a layer's levels."""
        with self._lock:
            if index not in self._levels_by_layer:
                metadata = {"record": self._record.id, "layer": str(index), "sample": str(self._sample)}
                one = self._record.layers[index].sample(self._sample)
                self._levels_by_layer[index] = LayerMapLevels(
                    one, self._file_of_layer(index), metadata, self._memory_budget
                )
            return self._levels_by_layer[index]

    def is_built(self, layer: int, head: int) -> bool:
        """Return whether a head's levels are built."""
        return (layer, head) not in self._heads_left

    def move_heads_to_front(self, *heads: LayerAndHead) -> None:
        """Move heads, each a layer's index and a head's index, to the front of the queue."""
        with self._lock:
            left = [place for place in heads if place in self._heads_left]
            self._heads_left = dict.fromkeys([*left, *self._heads_left])

    def build_strip(self) -> bool:
        """Build one strip of one head; returns whether anything is left to build."""
        place = next(iter(self._heads_left), None)
        if place is None:
            return False
        layer, head = place
        steps, _ = self._heads_being_built.get(place) or (self.levels_of_layer(layer).build_head(head), 0.0)
        share = next(steps, None)
        if share is None:
            self._heads_being_built.pop(place, None)
            with self._lock:
                self._heads_left.pop(place)
        else:
            self._heads_being_built[place] = steps, share
        return bool(self._heads_left)

    def _file_of_layer(self, layer: int) -> Path | None:
        return self._folder and self._folder / f"layer-{layer}.sample-{self._sample}.safetensors"


class LevelBuilder:
    """Builds the coarse levels of the opened samples, one strip at a time.

    Args:
        progress: called after each strip with (heads done, total heads), over all opened samples.
    """

    def __init__(self, progress: Callable[[float, int], None] = lambda done, total: None) -> None:
        self._levels_by_sample: dict[Hashable, SampleMapLevels] = {}  # the sample opened last is the first
        self._progress = progress

    def queue_sample(self, key: Hashable, make: Callable[[], SampleMapLevels]) -> SampleMapLevels:
        """Return a sample's levels and queue them for building; the sample opened last comes first."""
        levels = self._levels_by_sample[key] if key in self._levels_by_sample else make()
        self._levels_by_sample = {key: levels} | self._levels_by_sample  # a new dict: the old one may be being read
        return levels

    def build_strip(self) -> bool:
        """Build one strip of one sample; return whether any strip was left to build."""
        pyramids = self._levels_by_sample.values()
        for pyramid in pyramids:
            if pyramid.failure is not None or pyramid.is_finished:
                continue
            try:
                pyramid.build_strip()
            except Exception as error:  # noqa: BLE001 - the page shows it; the other samples continue
                pyramid.failure = error
            self._progress(sum(each.num_built_heads for each in pyramids), sum(each.num_heads for each in pyramids))
            return True
        return False


def describe_building_progress(pyramid: SampleMapLevels | None) -> LevelsProgress:
    """Describe the progress of building a sample's levels, for the page; None for a sample without q and k."""
    if pyramid is None:
        return {"state": "none", "done": 0, "total": 0}
    done = round(pyramid.num_built_heads, 2)
    progress: LevelsProgress = {
        "state": "ready" if pyramid.is_finished else "building",
        "done": done,
        "total": pyramid.num_heads,
        "inMemory": pyramid.has_levels_in_memory,
    }
    if pyramid.failure is not None:
        progress |= {"state": "none", "error": f"The coarse levels could not be built: {pyramid.failure}"}
    return progress
