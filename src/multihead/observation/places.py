"""Measure which place of a picture each token of a model comes from, with no code per family of models.

Three steps. The processor shows where each patch of the pixel input comes from (`picture_units.py`). Group testing
shows which patches each key of a layer depends on: the model runs without attention, so that tokens do not mix, with
the patches changed whose row, column or frame has bit b = 0, then those with 1. A bit that both change is free: the key
is computed from a block of patches. Then random halves of the patches are changed, and a key that changes otherwise
than predicted has no place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ModelError
from multihead.errors.given import check_module, is_batch, reject_given
from multihead.kernels.call import without_listeners
from multihead.models.pretrained import without_tracking
from multihead.observation.picture_units import PictureUnits, find_units
from multihead.observation.unmixed import (
    FIRST_CALL,
    LayerKeys,
    TokenNoise,
    UnmixedModel,
    check_repeatable,
    unlike_layers,
    without_attention,
)
from multihead.probes.places import NO_PICTURE, PlaceTable

Progress = Callable[[int, int], None]
"""Function that is called with the number of runs that are done, and of those that are expected."""

_CHECKS = 4
_MOST_CHANGED = 0.9  # part of the keys of single patches that change with half of the patches, at most
_CELLS_AT_ONCE = 1 << 18  # bounds the memory of keys x units
_OWN_TOKENS = {"cls": "CLS", "class": "CLS", "register": "REG", "distillation": "DIST", "detection": "DET"}
_LEAST_COVERED = 0.75  # part of the rectangle around the patches of a key that these cover, but for padding


def places(
    model: nn.Module,
    inputs: Mapping[str, Any],
    processor: Any = None,
    images: Any = None,
    *,
    progress: Progress = lambda done, total: None,
) -> dict[str, PlaceTable]:
    """Measure the place in a picture that each key of each attention layer comes from.

    The model runs about 30 times without attention, most times up to its first layer only. A key has a place if it
    depends on one patch, or on a block of them, and on nothing else; this is checked, and never guessed. Class tokens,
    registers and words have none.

    Args:
        model: a Hugging Face model, or a module with attention layers of this library.
        inputs: the arguments of its call, with `pixel_values`.
        processor: the processor or image processor that made the inputs, or a function that is called like one. Boxes
            are in pixels of `images`; without it in those of `pixel_values`.
        images: the pictures that the processor made the inputs from, nested as it got them.
        progress: called with (runs done, runs expected) before each run; of a language model six take a forward pass.

    Returns:
        name of a layer -> its table, of (batch, keys). Windows of one call follow each other.

    Raises:
        ArgumentError: `inputs` has no pictures, or continues a cache, or the processor does not make it from `images`.
        ModelError: the model does not run alike each time, or its keys are not finite, or it has no attention layer.
        MissingPackageError: a processor is given, and Pillow is not installed.

    >>> import torch, multihead as mh
    >>> from transformers import ViTConfig, ViTModel
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> model = ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4))
    >>> (table,) = mh.places(model, {"pixel_values": torch.rand(1, 3, 8, 8)}).values()
    >>> table[0, 0], table[0, 2].box
    (None, Box(left=4.0, top=0.0, right=8.0, bottom=4.0))
    """
    check_module(model)
    if not isinstance(inputs, Mapping) and not is_batch(inputs):
        reject_given("inputs", inputs, "the arguments of the model's call by name", "Give what the processor returns.")
    if processor is None and images is not None:
        raise ArgumentError("images was given without processor.", "Give the processor that made the inputs from them.")
    found = measure_places(model, inputs, processor, images, progress=progress)
    return {name: layer.table for name, layer in found.items()}


class LayerPlaces(NamedTuple):
    """The places of the keys of a layer, and what is known about the others.

    Attributes:
        table: (batch, keys).
        unpadded: (batch, keys) bool, False for padding; None where padding is unknown.
        own_names: key -> name of a token of the model's own, such as "[CLS]".
    """

    table: PlaceTable
    unpadded: Tensor | None
    own_names: dict[int, str]


def measure_places(
    model: nn.Module,
    inputs: Mapping[str, Any],
    processor: Any,
    images: Any,
    random_state: Tensor | None = None,
    *,
    gives_up: bool = False,
    progress: Progress = lambda done, total: None,
) -> dict[str, LayerPlaces]:
    """Do what `places` does.

    Args:
        model: the model.
        inputs: the arguments of its call.
        processor: the processor, or None.
        images: the pictures, or None.
        random_state: the state of torch's random numbers when the call began; None takes the current.
        gives_up: whether two runs decide that the first keys depend on more than one patch each, as those of a
            convolutional network do; then the result is {}.
        progress: called with (runs done, runs expected) before each run.
    """
    candidates = find_units(model, inputs, processor, images)
    if processor is None and candidates[0].pixels.dim() < 4:
        warnings.warn(
            "pixel_values is rows of patches, which do not show where in the picture they are, so tokens are named by "
            "the numbers of their patches. Give processor= and images=.",
            stacklevel=3,
        )
    found: dict[str, LayerPlaces] = {}
    with (  # the model may be observed while this is measured
        without_listeners(),
        without_tracking(),
        without_attention(model, inputs, random_state, progress) as runs,
    ):
        for units in candidates:  # one for each size that patches may have
            finder = _PlaceFinder(runs, units)
            # The unchanged runs, the checks, two per bit of the first layer, and the names of own tokens.
            runs.expected += 2 + _CHECKS + 2 * finder.bits + 3
            if gives_up and not finder.sees_patches():
                continue
            found = finder.find()
            if any(layer.table.has_places for layer in found.values()):
                break
    return found


@dataclass(frozen=True, eq=False)
class _MeasuredLayer:
    """The patches that the keys of a layer depend on.

    Attributes:
        allowed: per axis of the units, (batch * keys, size of the axis) bool: a key depends on the units that are
            allowed on all axes.
        changes: (batch * keys,) bool, whether a key depends on any unit.
        predicted: (halves, batch * keys) bool, whether a key changes with each half of the checks.
        placed: (batch * keys,) bool, whether the checks confirm this.
        table: the places, (batch, keys).
    """

    allowed: list[Tensor]
    changes: Tensor
    predicted: Tensor
    placed: Tensor
    table: PlaceTable


@dataclass(eq=False)
class _PlaceFinder:
    """Finds the places of the keys of all layers in one call of a model."""

    runs: UnmixedModel
    units: PictureUnits
    _seed: int = 0
    _has_measured: bool = False
    _base: dict[str, LayerKeys] = field(default_factory=dict)
    _placed_layers: dict[str, _MeasuredLayer] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """How many bits the frames, rows and columns of the units have together."""
        return sum(int(axis.amax()).bit_length() for axis in self.units.axes)

    def sees_patches(self) -> bool:
        """Whether the keys of the first attention call do not all change with half of the patches."""
        self.runs.expected += 2
        count = self.units.axes.shape[1]
        half = torch.rand(count, generator=torch.Generator().manual_seed(count)) < 1 / 2
        before = self.runs.keys({}, FIRST_CALL)
        after = self.runs.keys({self.units.name: self.units.change(half, 0)}, FIRST_CALL)
        if unlike_layers(before, after):
            return False
        changed = torch.cat([(keys.difference(after[name]) > 0).flatten() for name, keys in before.items()])
        return bool(changed.double().mean() < _MOST_CHANGED)

    def find(self) -> dict[str, LayerPlaces]:
        """Return the places of each layer by name."""
        live, count = self.units.live, self.units.axes.shape[1]
        self._base = self.runs.keys({})
        last = next(reversed(self._base), "")
        check_repeatable(self._base, self.runs.keys({}, self._end(last)))
        random = torch.Generator().manual_seed(count)
        halves = [live & (torch.rand(count, generator=random) < 0.5) for _ in range(_CHECKS)] if count > 1 else [live]
        checks = [self._differences(half, last) for half in halves]
        measured: list[_MeasuredLayer] = []
        found: dict[str, LayerPlaces] = {}
        names: dict[int, dict[int, str]] = {}
        for name, base in self._base.items():
            layer = self._layer_of(name, torch.stack([each[name].flatten() for each in checks]), halves, measured)
            table = layer.table.reshape(*base.sketch.shape[:2])
            if table.has_places:
                self._placed_layers[name] = layer
            if not names and table.has_places:  # later layers depend on tokens in more ways
                names[id(layer)] = self._own_names(name, table)
            found[name] = LayerPlaces(table, base.unpadded, names.get(id(layer), {}))
        return found

    def _own_names(self, name: str, table: PlaceTable) -> dict[int, str]:
        """Name the keys of a layer that are parameters of the model: key -> "[CLS]" or "[REG 1]"."""
        if not bool((table.picture == NO_PICTURE).any()):
            return {}
        found = {}
        for parameter, keys in self.runs.own_tokens((name, self._base[name].calls), table.picture >= 0).items():
            columns = keys.nonzero()[:, 0].tolist()
            words = parameter.lower().split("_")
            word = next((_OWN_TOKENS[each] for each in words if each in _OWN_TOKENS), words[0].upper())
            for number, key in enumerate(columns, 1):
                found[key] = f"[{word}]" if len(columns) == 1 else f"[{word} {number}]"
        return found

    def _layer_of(
        self, name: str, differences: Tensor, halves: list[Tensor], measured: list[_MeasuredLayer]
    ) -> _MeasuredLayer:
        """Return the one of the layers `measured` that explains a layer's keys, or measure it and append it.

        Args:
            name: the layer.
            differences: how much its keys differ where the halves are changed, (halves, batch * keys).
            halves: the units that are changed, (units,) bool each.
            measured: the layers so far.
        """

        def find(tolerance: float) -> _MeasuredLayer:
            changed = differences > tolerance
            for layer in measured:
                if self._explains(layer, changed):
                    return layer
            measured.append(self._measure(name, tolerance, halves, changed))
            return measured[-1]

        layer, tolerance = find(0.0), self._base[name].tolerance
        # Keys that did not change are equal bit by bit, except where the number of changed tokens decides how a layer
        # rounds, as in a mixture of experts.
        rounds = bool(((differences > tolerance) != (differences > 0)).any())
        return find(tolerance) if rounds and not bool((layer.placed | ~layer.changes).all()) else layer

    def _end(self, layer: str) -> tuple[str, int] | None:
        """Return the call with which runs end that are needed up to a layer."""
        return (layer, self._base[layer].calls) if layer in self._base else None

    def _differences(self, units: Tensor, last: str) -> dict[str, Tensor]:
        """Change some units, and return how much each key of the layers up to `last` differs: name -> (batch, keys)."""
        self._seed += 1
        pixels = self.units.change(units, self._seed)
        keys = self.runs.keys({self.units.name: pixels}, self._end(last))
        names = list(self._base)
        expected = {name: self._base[name] for name in names[: names.index(last) + 1]}
        if unlike := unlike_layers(expected, {name: keys[name] for name in expected if name in keys}):
            raise ModelError(
                f"The tokens have no places in pictures: the number of keys of {unlike} depends on the pixels.",
                "Observe the model without processor=.",
            )
        return {name: base.difference(keys[name]) for name, base in expected.items()}

    def _measure(self, name: str, tolerance: float, halves: list[Tensor], changed: Tensor) -> _MeasuredLayer:
        """Find the units that each key of a layer depends on, and check them with what the halves have `changed`."""
        axes, live = self.units.axes, self.units.live
        shape = self._base[name].sketch.shape[:2]
        self.runs.expected += 2 * self.bits if self._has_measured else 0
        self._has_measured = True
        changes, silent = changed.any(0), torch.zeros(shape.numel(), dtype=torch.bool)
        allowed = []
        with self._cheapest_change(name, tolerance) as differ:
            for axis in axes:
                size = int(axis.amax()) + 1
                possible = torch.ones(shape.numel(), size, dtype=torch.bool)
                for bit in range((size - 1).bit_length()):
                    ones = (torch.arange(size) >> bit & 1).bool()
                    zero, one = ((differ(live & half[axis]) > tolerance).flatten() for half in (~ones, ones))
                    changes, silent = changes | zero | one, silent | ~(zero | one)
                    possible &= ones | ~(one & ~zero)[:, None]
                    possible &= ~ones | ~(zero & ~one)[:, None]
                allowed.append(possible)
        layer = _MeasuredLayer(allowed, changes, changed, changes & ~silent, PlaceTable.without_places(*shape))
        layer = replace(layer, predicted=self._predict(layer, halves))
        return self._placed(layer, changed)

    @contextmanager
    def _cheapest_change(self, name: str, tolerance: float) -> Iterator[Callable[[Tensor], Tensor]]:
        """Return a function of units, (units,) bool, that returns how much the keys of a layer differ, (batch, keys).

        It changes the pixels of the units; or their tokens in the last layer before, with the outputs of the blocks
        before that layer, where all keys that depend on the pixels change with its tokens: those of a language model,
        whose image encoder then runs from its last block in use on.
        """
        base, live, last = self._base[name], self.units.live, (name, self._base[name].calls)

        def change_pixels(units: Tensor) -> Tensor:
            return self._differences(units, name)[name]

        if not self._placed_layers:
            yield change_pixels
            return
        self.runs.expected += 1
        expected = change_pixels(live) > tolerance
        for before in list(self._placed_layers)[-1:-3:-1]:
            layer, shape = self._placed_layers[before], self._base[before].sketch.shape[:2]

            def change_tokens(units: Tensor, before: str = before, layer: _MeasuredLayer = layer) -> Tensor:
                self._seed += 1
                tokens = (self._predict(layer, [units])[0] & layer.placed).view(shape)  # noqa: B023
                keys = self.runs.keys({}, last, TokenNoise(before, tokens, self._seed)).get(name)
                if keys is None or keys.sketch.shape != base.sketch.shape:
                    return torch.full_like(base.sketch[:, :, 0], torch.nan)
                return base.difference(keys)

            self.runs.expected += 3
            with self.runs.stored_blocks(before, last):
                if torch.equal(change_tokens(live) > tolerance, expected) and not change_tokens(~live & False).any():
                    yield change_tokens
                    return
        yield change_pixels

    def _explains(self, layer: _MeasuredLayer, changed: Tensor) -> bool:
        """Whether a layer whose keys `changed` in the checks, (checks, batch * keys), has the places of another one."""
        if len(layer.changes) != changed.shape[1]:
            return False
        settled = layer.placed | ~layer.changes
        return bool((layer.predicted == changed)[:, settled].all())

    @cached_property
    def _unit_at(self) -> Tensor:
        """The unit at each frame, row and column that is part of a picture, int64; -1 where none is."""
        axes, live = self.units.axes, self.units.live
        found = torch.full(tuple((axes.amax(1) + 1).tolist()), -1)
        found[tuple(axes[:, live])] = live.nonzero()[:, 0]
        return found

    def _units_of_keys(self, layer: _MeasuredLayer, start: int, stop: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield slices of the keys [start, stop), and pairs of a key in the slice and a unit that it may depend on."""
        size = max(_CELLS_AT_ONCE // self._unit_at.numel(), 1)
        for first in range(start, stop, size):
            keys = slice(first, min(first + size, stop))
            frames, rows, columns = (allowed[keys] for allowed in layer.allowed)
            frames = frames & layer.changes[keys, None]
            cells = frames[:, :, None, None] & rows[:, None, :, None] & columns[:, None, None]
            key, *cell = cells.nonzero().unbind(1)
            unit = self._unit_at[tuple(cell)]
            yield keys, key[unit >= 0], unit[unit >= 0]

    def _predict(self, layer: _MeasuredLayer, halves: list[Tensor]) -> Tensor:
        """Return which keys change with each half: (halves, batch * keys) bool."""
        found = torch.zeros(len(halves), len(layer.changes), dtype=torch.bool)
        for keys, key, unit in self._units_of_keys(layer, 0, len(layer.changes)):
            for half, changes in zip(halves, found[:, keys], strict=True):
                changes[key[half[unit]]] = True
        return found

    def _placed(self, layer: _MeasuredLayer, changed: Tensor) -> _MeasuredLayer:
        """Return a layer with its table, from the keys that the checks confirm."""
        rows, keys = layer.table.picture.shape
        placed = layer.placed & (layer.predicted == changed).all(0)
        tables, blocks = [], []
        for row in range(rows):
            pairs = []
            for some, key, unit in self._units_of_keys(layer, row * keys, (row + 1) * keys):
                table, block = _join_units(self.units.places, key, unit, some.stop - some.start)
                placed[some] &= table.picture >= 0
                kept = placed[some][key]
                pairs.append(torch.stack([key[kept] + some.start, unit[kept]]))
                tables.append(table)
                blocks.append(block)
            key, unit = torch.cat(pairs, 1)
            placed[key[unit.bincount()[unit] > 1]] = False  # a patch of several keys is the place of none
        table = _number_cells(PlaceTable.join(tables).where(placed), torch.cat(blocks))
        outside = ~layer.changes & ~placed
        table.picture[outside] = NO_PICTURE
        return replace(layer, placed=placed, table=table.reshape(rows, keys))


def _join_units(of_units: PlaceTable, key: Tensor, unit: Tensor, keys: int) -> tuple[PlaceTable, Tensor]:
    """Find the places of keys, each a block of units of one view.

    Args:
        of_units: the places of the units, (units,).
        key: (pairs,) int64, from 0.
        unit: (pairs,) int64, a unit of each key.
        keys: number of keys.

    Returns:
        the table of the keys, `NO_PLACE` where the units are no block, with the cell of the first unit; and the numbers
        of rows and columns of each block, (keys, 2) int64.
    """

    def least(values: Tensor) -> Tensor:
        most = torch.finfo(values.dtype).max if values.is_floating_point() else torch.iinfo(values.dtype).max
        return values.new_full((keys,), most).scatter_reduce_(0, key, values[unit], "amin")

    picture, view, patch = (least(each) for each in (of_units.picture, of_units.view, of_units.patch))
    placed = torch.zeros(keys, dtype=torch.bool)
    placed[key] = True
    placed &= (picture == -least(-of_units.picture)) & (view == -least(-of_units.view))
    left, top, right, bottom = of_units.box.unbind(1)
    box = torch.stack([least(left), least(top), -least(-right), -least(-bottom)], 1)
    if not bool(of_units.box[unit].isnan().any()):
        area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1])
        covered = area.new_zeros(keys).index_add_(0, key, ((right - left) * (bottom - top))[unit])
        placed &= covered >= _LEAST_COVERED * area
    else:
        box = torch.full_like(box, torch.nan)
    first = torch.stack([least(each) for each in of_units.cell.unbind(1)], 1)
    last = torch.stack([-least(-each) for each in of_units.cell[:, :2].unbind(1)], 1)
    return PlaceTable(picture, view, patch, box, first).where(placed), last - first[:, :2] + 1


def _number_cells(table: PlaceTable, blocks: Tensor) -> PlaceTable:
    """Number the cells of the grid that the keys of each view form, from the cells and `blocks` of their units.

    Args:
        table: the places of the keys, (keys,), with the cells of their first units.
        blocks: (keys, 2) int64, rows and columns of units of each key; at the lower and right edge they may be fewer.
    """
    cell = torch.full_like(table.cell, -1)
    for picture, view in torch.stack([table.picture, table.view], 1)[table.picture >= 0].unique(dim=0).tolist():
        own = (table.picture == picture) & (table.view == view)
        units, block = table.cell[own], blocks[own].amax(0)
        found = torch.cat([units[:, :2] // block, (units[:, 2:] + block - 1) // block], 1)
        if bool((units >= 0).all()) and bool((units[:, :2] % block == 0).all()):
            cell[own] = found
    return replace(table, cell=cell)
