"""Judge places of tokens by what changes with one pixel of a picture, in a model's own code without attention.

Nothing here uses the library's attention: transformers calls a function that returns zeros, so that tokens do not mix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from multihead.observation.picture_units import PictureUnits, find_units
from multihead.probes.places import PlaceTable
from tests.picture_families import Family, Pictures, random_pictures


class Score(NamedTuple):
    """How many changed pixels were right in all layers, of how many, and what was wrong."""

    right: int
    of: int
    wrong: list[str]


def keys_without_attention(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the keys of each layer, (batch, keys, numbers), of a model whose attention returns zeros."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    names, found = {id(module): name for name, module in model.named_modules()}, {}

    def zeros(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        keys, name = key.transpose(1, 2).flatten(2), names[id(module)]
        found[name] = torch.cat([found[name], keys], 1) if name in found else keys
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register("zeros", zeros)
    AttentionMaskInterface.register("zeros", sdpa_mask)
    before = [(each.config, each.config._attn_implementation) for each in model.modules() if hasattr(each, "config")]
    try:
        model.set_attn_implementation("zeros")
        torch.manual_seed(0)
        with torch.no_grad():
            model(**inputs)
    finally:
        for config, name in before:
            config._attn_implementation = name
    return found


def judge_places(family: Family, tables: Mapping[str, PlaceTable], pixels: int = 20) -> Score:
    """Change single pixels of a family's pictures, and compare the keys that change with tables of places.

    A pixel is right if in all layers the keys that change are those of the patches that the processor changed, and if
    these patches include one whose box contains the centre of the pixel, where any does.
    """
    images = random_pictures(family.sizes)
    before = family.process(images)
    units = find_units(family.model, before, family.processor, family.nest(images))[0]
    keys = keys_without_attention(family.model, before)
    assert keys.keys() <= tables.keys()  # a layer of torch, such as the head of SigLIP, is replaced by the library only
    random, wrong, right = np.random.default_rng(0), [], 0
    for number in range(pixels):
        picture = number % len(images)
        x, y = (int(random.integers(size)) for size in images[picture].size)
        after = family.process(_with_pixel(images, picture, x, y))
        touched = _changed_units(units, after)
        inside = (units.places.picture == picture) & _contain(units.places.box, x + 0.5, y + 0.5)
        errors = [] if bool((touched & inside).any()) or not bool(inside.any()) else ["no patch around it changes"]
        for name, expected in keys_without_attention(family.model, after).items():
            changed = (expected != keys[name]).any(-1)
            predicted = _keys_of_units(tables[name], units, touched)
            if not torch.equal(changed, predicted):
                more, less = (int(each.sum()) for each in (changed & ~predicted, predicted & ~changed))
                errors.append(f"{name}: {more} more keys change, {less} of those predicted do not")
        right += not errors
        wrong += [f"picture {picture}, pixel ({x}, {y}): {each}" for each in errors]
    return Score(right, pixels, wrong)


def _with_pixel(images: Pictures, picture: int, x: int, y: int) -> Pictures:
    changed = np.array(images[picture])
    changed[y, x] = 255 * (changed[y, x] < 128)
    return [Image.fromarray(changed) if number == picture else each for number, each in enumerate(images)]


def _changed_units(units: PictureUnits, after: Mapping[str, Any]) -> Tensor:
    """Return which units the processor changed, (units,) bool."""
    differs = after[units.name] != units.pixels
    if not units.lines:
        return differs.any(-1).flatten()
    frame, y, x = differs.any(-3).flatten(0, -3).nonzero().unbind(1)
    cells = torch.stack([frame, units.lines[0][y], units.lines[1][x]])
    return (units.axes[:, :, None] == cells[:, None]).all(0).any(1)


def _contain(boxes: Tensor, x: float | Tensor, y: float | Tensor) -> Tensor:
    """Return which boxes, (..., 4), contain a point."""
    left, top, right, bottom = boxes.unbind(-1)
    return (left <= x) & (x < right) & (top <= y) & (y < bottom)


def _keys_of_units(table: PlaceTable, units: PictureUnits, touched: Tensor) -> Tensor:
    """Return which keys have a place that contains the centre of a touched unit: (batch, keys) bool."""
    found = torch.zeros(table.picture.shape, dtype=torch.bool)
    for unit in touched.nonzero()[:, 0].tolist():
        place = units.places[unit]
        assert place is not None, "padding changed"
        left, top, right, bottom = units.places.box[unit]
        same = (table.picture == place.picture) & (table.view == place.view)
        found |= same & _contain(table.box, (left + right) / 2, (top + bottom) / 2)
    return found
