"""Build the coarse levels of the samples that somebody looks at, the head in view first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multihead.viewer.levels import BASE, IN_MEMORY, LayerLevels, Room, count

if TYPE_CHECKING:
    from multihead.observation.record import Record

Place = tuple[int, int]
"""A layer and a head in it."""


class Pyramid:
    """The levels of all heads of one sample of a record.

    Args:
        record: what was observed; q and k were kept.
        sample: which text of it.
        folder: where levels are kept; None keeps them in memory.
        room: what is left for levels in memory; None is for this sample alone.
    """

    def __init__(self, record: Record, sample: int, folder: Path | None, room: Room | None = None) -> None:
        self._record = record
        self._sample = sample
        self._folder = folder
        self._room = room or Room(IN_MEMORY)
        self._opened: dict[int, LayerLevels] = {}
        self._lock = threading.Lock()
        self._under_way: dict[Place, tuple[Iterator[float], float]] = {}
        self._wanted: list[Place] = []  # the newest last
        samples = [layer.sample(sample) for layer in record.layers]
        deep = [index for index, one in enumerate(samples) if count(one.num_queries, one.num_keys) > BASE]
        self._left = {(layer, head): None for layer in deep for head in range(samples[layer].num_heads)}
        self.total = len(self._left)
        """How many heads have coarse levels; short texts need none."""
        for layer in deep:
            if folder is not None and self._file(layer).exists():
                for head in range(samples[layer].num_heads):
                    if self.layer(layer).has(head):
                        del self._left[layer, head]

    @property
    def finished(self) -> bool:
        """Whether all heads are built."""
        return not self._left

    @property
    def done(self) -> float:
        """How many heads are built, those under way in parts."""
        return self.total - len(self._left) + sum(share for _, share in list(self._under_way.values()))

    @property
    def in_memory(self) -> bool:
        """Whether levels are in memory because they could not be kept in a file."""
        return any(not each.kept for each in list(self._opened.values()))

    def layer(self, index: int) -> LayerLevels:
        """Open a layer's levels."""
        with self._lock:
            if index not in self._opened:
                file = None if self._folder is None else self._file(index)
                of = {"record": self._record.id, "layer": str(index), "sample": str(self._sample)}
                one = self._record.layers[index].sample(self._sample)
                self._opened[index] = LayerLevels(one, file, of, self._room)
            return self._opened[index]

    def has(self, layer: int, head: int) -> bool:
        """Whether a head's levels are built."""
        return (layer, head) not in self._left

    def want(self, *places: Place) -> None:
        """Have some heads built next, before those wanted earlier."""
        left = [place for place in places if place in self._left]
        with self._lock:
            self._wanted = [*(place for place in self._wanted[-256:] if place not in left), *reversed(left)]

    def step(self) -> bool:
        """Build one strip; says whether anything is left to build."""
        place = self._next()
        if place is None:
            return False
        layer, head = place
        steps, _ = self._under_way.get(place) or (self.layer(layer).build(head), 0.0)
        share = next(steps, None)
        if share is None:
            self._under_way.pop(place, None)
            self._left.pop(place)
        else:
            self._under_way[place] = steps, share
        return bool(self._left)

    def _file(self, layer: int) -> Path:
        assert self._folder is not None
        return self._folder / f"layer-{layer}.sample-{self._sample}.safetensors"

    def _next(self) -> Place | None:
        with self._lock:
            while self._wanted:
                if self._wanted[-1] in self._left:
                    return self._wanted[-1]
                self._wanted.pop()
        # What was begun comes before what was not.
        return next(iter(self._under_way), None) or next(iter(self._left), None)


class Builder:
    """Builds the levels of samples once somebody looks at them, a strip at a time.

    Args:
        told: called after each strip with (heads done, heads in all), over all samples looked at.
    """

    def __init__(self, told: Callable[[float, int], None] = lambda done, total: None) -> None:
        self._pyramids: dict[Hashable, Pyramid] = {}
        self._told = told
        self._failed: dict[Hashable, Exception] = {}
        self._newest: Hashable = None

    def look(self, key: Hashable, make: Callable[[], Pyramid]) -> Pyramid:
        """Return a sample's levels, and build them from now on; the sample looked at last comes first."""
        if key not in self._pyramids:
            self._pyramids[key] = make()
        self._newest = key
        return self._pyramids[key]

    def failure(self, key: Hashable) -> Exception | None:
        """What ended the building of a sample's levels, if anything did."""
        return self._failed.get(key)

    def step(self) -> bool:
        """Build one strip of one sample; says whether anything is left to build."""
        for key in [self._newest, *list(self._pyramids)]:
            pyramid = self._pyramids.get(key)
            if pyramid is None or key in self._failed or pyramid.finished:
                continue
            try:
                pyramid.step()
            except Exception as error:  # noqa: BLE001 - the page says it; the other samples go on
                self._failed[key] = error
            self._told(*self.share())
            return True
        return False

    def share(self) -> tuple[float, int]:
        """How many heads are built, and of how many, over all samples looked at."""
        pyramids = list(self._pyramids.values())
        return sum(each.done for each in pyramids), sum(each.total for each in pyramids)


def state(pyramid: Pyramid | None, failure: Exception | None = None) -> dict[str, Any]:
    """Say how far a sample's levels are, as the page reads it."""
    if pyramid is None:
        return {"state": "none", "done": 0, "total": 0}
    done = round(pyramid.done, 2)
    said = {"state": "ready" if pyramid.finished else "building", "done": done, "total": pyramid.total}
    if failure is not None:
        said |= {"state": "none", "error": f"The coarse levels could not be built: {failure}"}
    return said | {"inMemory": pyramid.in_memory}
