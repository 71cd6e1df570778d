"""Find where the patches of a model's pixel input come from in the pictures, by pictures of coordinates.

A processor resizes, crops, cuts, pads and normalises pictures in ways that differ between models. Pictures whose grey
level is the column, the row or the number of the picture go the same way: (v - black) / (white - black) undoes the
normalising, and black equal to white is padding. A grey level is 1/255 of the picture, so a line is fitted through the
levels of all columns, which is exact to a fraction of a pixel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from multihead.errors import ArgumentError
from multihead.errors.given import PIXELS, is_array, name_given
from multihead.errors.optional import require
from multihead.probes.places import NO_PICTURE, PlaceTable
from multihead.record.grey_copies import LONGEST_SIDE, Picture

_PIXELS_PER_RAMP = 1024  # a longer side is read from several pictures, so that neighbouring patches differ in level
_SAME_LEVEL = 0.05  # levels of one column differ by rounding errors only
_MOST_SHARED = 0.05  # part of a frame that rounding lets it share with its neighbour

GreyPicture = Callable[[int, int, int], Tensor]
"""(number, width, height) -> grey levels of a picture, broadcasting to (height, width), from 0 to 255."""


@dataclass(frozen=True, eq=False)
class PictureUnits:
    """The units of a pixel input, patches of frames or rows of flattened patches, and where they come from.

    Attributes:
        name: name of the input.
        pixels: its values: (..., channels, height, width) of frames, or (..., units, values) of flattened patches.
        lines: row of units of each row of pixels, and column of units of each column, int64; () for flattened patches.
        axes: (3, units) int64, the frame, row and column of each unit.
        is_picture: which values are picture and not padding, bool, broadcasting to `pixels`.
        places: the table of the units, (units,); padding is `NO_PICTURE`.
    """

    name: str
    pixels: Tensor
    lines: tuple[Tensor, ...]
    axes: Tensor
    is_picture: Tensor
    places: PlaceTable

    @property
    def live(self) -> Tensor:
        """Which units are part of a picture, (units,) bool."""
        return self.places.picture >= 0

    def change(self, units: Tensor, seed: int) -> Tensor:
        """Return the pixels with noise added to some units, (units,) bool; each seed has its own noise.

        All rows of pixels get the same noise, and all flattened patches, so that the result alone takes memory.
        """
        # Noise of one draw could be a multiple of the picture, which a normalisation after the patches would undo.
        shape, mask = self.pixels.shape, units & self.live
        if self.lines:
            mask = mask.view(*shape[:-3], 1, *(int(line[-1]) + 1 for line in self.lines))
            for axis, line in zip((-2, -1), self.lines, strict=True):
                mask = mask.index_select(axis, line)
        else:
            mask = mask.view(*shape[:-1], 1)
        same = (shape[-3], 1, shape[-1]) if self.lines else shape[-1:]
        noise = torch.rand(same, generator=torch.Generator().manual_seed(0x9E3779B9 + seed))
        noise = noise.sub_(0.5).mul_(self._size_of_noise).to(self.pixels)
        return (noise * (mask.to(noise.device) & self.is_picture)).add_(self.pixels)

    @cached_property
    def _size_of_noise(self) -> float:
        """Three standard deviations of the pixels of pictures."""
        pixels = self.pixels.detach()
        if not bool(self.is_picture.all()):
            pixels = pixels[self.is_picture.expand(pixels.shape)]
        return 3 * float(pixels.float().std()) or 1.0


def find_units(model: nn.Module, inputs: Mapping[str, Any], processor: Any, images: Any) -> list[PictureUnits]:
    """Return the units of the pixel input of a call, one candidate for each patch size that the model may have.

    Args:
        model: the model.
        inputs: the arguments of the call.
        processor: the processor that made the inputs, or None.
        images: the pictures that it made them from; None without a processor.

    Raises:
        ArgumentError: the call has no pictures, or the processor does not make its pixels from `images`.
        MissingPackageError: Pillow is not installed.
    """
    pixels = inputs.get(PIXELS)
    if not isinstance(pixels, Tensor):
        raise ArgumentError(
            f"inputs has no {PIXELS}; it has {', '.join(inputs) or 'nothing'}.",
            "Give the inputs of a call with pictures, as the model's processor returns them.",
        )
    if not pixels.is_floating_point() or pixels.dim() < 2:
        raise ArgumentError(
            f"{PIXELS} is a tensor of {pixels.dtype} with {pixels.dim()} dimensions.",
            "Give floating-point pixels: (pictures, channels, height, width), or (patches, values).",
        )
    coordinates = None if processor is None else _read_coordinates(pixels, processor, images)
    if pixels.dim() < 4:
        return [_units_of_rows(pixels, coordinates)]
    return [_units_of_frames(pixels, patch, coordinates) for patch in _patch_sizes(model, pixels.shape[-3])]


@dataclass(frozen=True, eq=False)
class _Coordinates:
    """What pictures of coordinates become in the pixel input.

    Attributes:
        level: makes pictures, and returns the grey level of each value, from 0 to 1, of the shape of the pixel input.
        inside: whether a value is picture and not padding, bool, of this shape.
        sizes: (pictures, 2) float64, width and height of each picture.
    """

    level: Callable[[GreyPicture], Tensor]
    inside: Tensor
    sizes: Tensor

    def mean(self, axis: int, shape: tuple[int, ...], over: tuple[int, ...]) -> Tensor:
        """Return the mean column (`axis` 0) or row (1) in their picture of the values that are picture, float64.

        A column or row is from 0 to 1, between the centres of pixels.

        Args:
            axis: 0 or 1.
            shape: a shape of the pixel input.
            over: the axes of this shape over which the mean is taken.
        """
        parts = -(-int(self.sizes[:, axis].amax()) // _PIXELS_PER_RAMP)

        def ramp(part: int, _: int, *size: int) -> Tensor:
            line = (torch.arange(size[axis]) / max(size[axis] - 1, 1) * parts - part).clamp(0, 1) * 255
            return line if axis == 0 else line[:, None]

        total = self.inside.new_zeros((), dtype=torch.float64)
        for part in range(parts):
            total = total + self.level(partial(ramp, part)).view(shape).sum(over, dtype=torch.float64)
        return total / parts / self.inside.view(shape).sum(over).clamp(min=1)

    def pictures(self, rows: int) -> Tensor:
        """Return the number of the picture that most values of each row show, of `rows` rows; 0 for padding."""
        steps = len(self.sizes) + 1
        level = self.level(lambda n, *_: torch.tensor(255 * (n + 1) / steps)).view(rows, -1)
        level = level.mul_(steps).round_()  # 0 where it is padding
        return torch.stack([(level == number).sum(1) for number in range(1, steps)]).argmax(0)


def _read_coordinates(pixels: Tensor, processor: Any, images: Any) -> _Coordinates:
    """Send pictures of coordinates through a processor."""
    require("PIL", purpose="mh.places with a processor", extra="image")
    flat, nesting = tree_flatten(images)
    if images is None or not flat:
        raise ArgumentError(
            "processor was given without images.", "Give the pictures that the processor made the inputs from: images=."
        )
    sizes = [_size_of(image) for image in flat]
    process = getattr(processor, "image_processor", processor)  # that of a processor of texts and pictures

    def send(pictures: list[Any]) -> Tensor:
        made = process(images=tree_unflatten(pictures, nesting), return_tensors="pt")[PIXELS]
        if made.shape != pixels.shape:
            raise _other_pixels_error(f"{tuple(made.shape)}", f"{tuple(pixels.shape)}")
        found: Tensor = made.detach().cpu().float()
        return found

    def send_grey(picture: GreyPicture) -> Tensor:
        return send([_grey_image(picture(n, *size), size, flat[n]) for n, size in enumerate(sizes)])

    given = pixels.detach().cpu().float()
    furthest = max(map(abs, map(float, given.aminmax()))) * max(torch.finfo(pixels.dtype).eps * 4, 1e-4)
    if not bool((send(flat).sub(given).abs_() <= furthest).all()):
        raise _other_pixels_error("other values", "those of the inputs")
    black = send_grey(lambda *_: torch.tensor(0))
    spread = send_grey(lambda *_: torch.tensor(255)) - black
    inside = spread.abs() > spread.abs().amax() / 2
    if not bool(spread.isfinite().all()) or not bool(inside.any()):
        raise _other_pixels_error("NaN, or equal values, of a white and a black picture", "different ones")

    def level(picture: GreyPicture) -> Tensor:
        return (send_grey(picture) - black).div_(spread).masked_fill_(~inside, 0)

    return _Coordinates(level, inside, torch.tensor(sizes, dtype=torch.float64))


def _other_pixels_error(made: str, expected: str) -> ArgumentError:
    return ArgumentError(
        f"The processor makes {PIXELS} with {made} from images, and not with {expected}.",
        "Give the pictures nested as the processor got them, and a processor with all options of that call: "
        "functools.partial(processor.image_processor, crop_to_patches=True).",
    )


def _size_of(image: Any) -> tuple[int, int]:
    """Return the width and height of a picture of Pillow, or an array of (height, width) with or without channels."""
    if is_array(image):
        shape = tuple(image.shape)
        if len(shape) == 3:
            shape = shape[:2] if shape[2] <= 4 else shape[1:]
        if len(shape) == 2:
            return int(shape[1]), int(shape[0])
    elif isinstance(size := getattr(image, "size", None), tuple) and len(size) == 2:
        return size
    raise ArgumentError(
        f"images holds {name_given(image)}.", "Give pictures of Pillow, or arrays of (height, width, channels)."
    )


def copy_pictures(pixels: Tensor, images: Any) -> tuple[Picture, ...]:
    """Return small grey copies of the pictures of a call, in the order of their numbers.

    Args:
        pixels: the pixel input of the call.
        images: the pictures that a processor made it from; None takes the frames of `pixels`, if it has frames.
    """
    if images is not None:
        return tuple(map(_copy_picture, tree_flatten(images)[0]))
    if pixels.dim() < 4:
        return ()
    height, width = pixels.shape[-2:]
    levels = pixels.detach().mean(-3, dtype=torch.float32).flatten(0, -3).cpu()
    return tuple(Picture.from_levels(each, width, height) for each in levels)


def _copy_picture(image: Any) -> Picture:
    """Return a small grey copy of a picture of Pillow or an array."""
    width, height = _size_of(image)
    in_bytes = "uint8" in str(getattr(image, "dtype", ""))
    if hasattr(image, "convert") and image.mode not in ("I", "F", "I;16"):  # these have no fixed level of white
        from PIL import Image

        scale, in_bytes = LONGEST_SIDE / max(width, height, LONGEST_SIDE), True
        size = max(round(width * scale), 1), max(round(height * scale), 1)
        image = image.convert("L").resize(size, Image.Resampling.BOX)
    values = image.detach().cpu() if isinstance(image, Tensor) else np.array(image, dtype=np.float32)
    levels = torch.as_tensor(values).float()
    if levels.dim() == 3:
        levels = levels.mean(2 if levels.shape[2] <= 4 else 0)
    return Picture.from_levels(levels, width, height, span=(0, 255) if in_bytes else None)


def _grey_image(levels: Tensor, size: tuple[int, int], original: Any) -> Any:
    """Return a picture with grey levels broadcasting to (height, width), in RGB unless the original is grey."""
    from PIL import Image

    rounded = levels.round().to(torch.uint8).expand(size[1], size[0])
    picture = Image.fromarray(rounded.contiguous().numpy())
    is_grey = (
        getattr(original, "mode", "RGB") in ("1", "L", "I", "F", "I;16") or len(getattr(original, "shape", ())) == 2
    )
    return picture if is_grey else picture.convert("RGB")


def _units_of_frames(pixels: Tensor, patch: tuple[int, int], coordinates: _Coordinates | None) -> PictureUnits:
    """Cut frames, (..., channels, height, width), into patches."""
    *lead, channels, height, width = pixels.shape
    frames, (rows, columns) = int(torch.tensor(lead).prod()), (-(-height // patch[0]), -(-width // patch[1]))
    frame, row, column = torch.meshgrid(*map(torch.arange, (frames, rows, columns)), indexing="ij")
    axes = torch.stack([frame, row, column]).flatten(1)  # (3, units)
    top, left = (torch.arange(size) // each for size, each in zip((height, width), patch, strict=True))
    edges = [
        torch.arange(n + 1).mul(size).clamp(max=most)
        for n, size, most in zip((columns, rows), patch[::-1], (width, height), strict=True)
    ]
    if coordinates is None:
        picture, live = axes[0], torch.ones(axes.shape[1], dtype=torch.bool)
        if pixels.dim() > 4:  # of tiles, those of one value are padding
            flat = pixels.detach().reshape(frames, -1)
            live = (flat.amax(1) != flat.amin(1)).cpu()[axes[0]]
        ends = [each.double().expand(frames, -1) for each in edges]
        view = torch.zeros_like(picture)
        is_picture = torch.ones(1, dtype=torch.bool, device=pixels.device)
    else:
        shape = (frames, channels, height, width)
        inside, of_frame = coordinates.inside.view(shape).any(1), coordinates.pictures(frames)
        ends = []
        for axis, found in enumerate(edges):
            means = coordinates.mean(axis, shape, (1, 2 + axis))  # (frames, columns or rows of pixels)
            ends.append(_fitted_edges(means, inside.any(1 + axis), found - 0.5, coordinates.sizes[of_frame, axis]))
        of_rows = torch.zeros(frames, rows, width).index_add_(1, top, inside.float())
        live = torch.zeros(frames, rows, columns).index_add_(2, left, of_rows).flatten() > 0
        picture = of_frame[axes[0]]
        view = _views(of_frame, ends, live.view(frames, -1).any(1))[axes[0]]
        is_picture = coordinates.inside.to(pixels.device)
    box = torch.stack(
        [ends[0][frame, column], ends[1][frame, row], ends[0][frame, column + 1], ends[1][frame, row + 1]], 3
    ).view(-1, 4)
    return PictureUnits(PIXELS, pixels, (top, left), axes, is_picture, _table(picture, view, box, live))


def _units_of_rows(pixels: Tensor, coordinates: _Coordinates | None) -> PictureUnits:
    """Take each row of flattened patches, (..., units, values), as a unit."""
    count = pixels.shape[:-1].numel()
    if coordinates is None:
        live = (pixels.detach() != 0).any(-1).flatten().cpu()
        picture = torch.arange(count) // pixels.shape[-2]
        axes = torch.stack([torch.zeros_like(picture), torch.zeros_like(picture), torch.arange(count)])
        box = torch.full((count, 4), torch.nan, dtype=torch.float64)
        table = _table(picture, torch.zeros_like(picture), box, live)
        return PictureUnits(PIXELS, pixels, (), axes, torch.ones(1, dtype=torch.bool, device=pixels.device), table)
    weights = coordinates.inside.view(count, -1).sum(1)
    live = weights > 0
    picture = coordinates.pictures(count)
    whole = weights == weights.amax()  # patches that reach into the padding have their centre elsewhere
    ranks, box = [], torch.zeros(count, 4, dtype=torch.float64)
    for axis in (0, 1):
        centre = coordinates.mean(axis, (count, pixels.shape[-1]), (1,))
        rank = torch.zeros(count, dtype=torch.int64)
        for number, size in enumerate(coordinates.sizes[:, axis]):
            own = live & (picture == number)
            if not bool(own.any()):
                continue
            rank[own] = _ranks(centre[own], _SAME_LEVEL / 255)
            steps = int(rank[own].amax()) + 1
            fitted = own & whole if bool((own & whole).any()) else own
            counted = rank[fitted].bincount(minlength=steps)
            means = rank[fitted].bincount(centre[fitted], minlength=steps) / counted.clamp(min=1)
            ends = _fitted_edges(means[None], counted[None], torch.arange(steps + 1) - 0.5, size[None])[0]
            box[own, axis], box[own, axis + 2] = ends[rank[own]], ends[rank[own] + 1]
        ranks.append(rank)
    axes = torch.stack([picture.masked_fill(~live, 0), ranks[1], ranks[0]])
    table = _table(picture, torch.zeros_like(picture), box, live)
    return PictureUnits(PIXELS, pixels, (), axes, coordinates.inside.to(pixels.device), table)


def _fitted_edges(means: Tensor, weights: Tensor, edges: Tensor, size: Tensor) -> Tensor:
    """Fit a line through coordinates, and return it at the edges of units, in pixels of the picture.

    Args:
        means: (frames, n), coordinate of step i, from 0 to 1 between the centres of the first and the last pixel.
        weights: (frames, n) or bool, 0 where the coordinate is unknown.
        edges: (units + 1,), places of the edges among the steps, whose centres are whole numbers.
        size: (frames,), pixels of the picture.

    Returns:
        (frames, units + 1) float64.
    """
    weights = (weights > 0).double()
    steps, total = torch.arange(means.shape[1]).double(), weights.sum(1, keepdim=True).clamp(min=1)
    centre, mean = (weights * steps).sum(1, keepdim=True) / total, (weights * means).sum(1, keepdim=True) / total
    spread = (weights * (steps - centre) ** 2).sum(1, keepdim=True)
    slope = (weights * (steps - centre) * (means - mean)).sum(1, keepdim=True) / spread.clamp(min=1e-12)
    last = (size - 1)[:, None]
    found = (mean + slope * (edges - centre)) * last + 0.5
    found = torch.where(slope * last == 0, (edges > 0).double() * size[:, None], found)  # one step is the whole side
    return found.clamp(min=0).minimum(size[:, None])


def _ranks(values: Tensor, apart: float) -> Tensor:
    """Number values, (n,), from the smallest on; neighbours that are not `apart` share a number."""
    ordered, order = values.sort()
    rank = torch.zeros(len(values), dtype=torch.int64)
    rank[order[1:]] = (ordered.diff() > apart).cumsum(0)
    return rank


def _views(picture: Tensor, ends: list[Tensor], live: Tensor) -> Tensor:
    """Number the views of each picture: frames that do not overlap are one view, and that of the fewest frames is 0.

    Args:
        picture: (frames,), the picture of each frame.
        ends: edges of the patches of each frame: x of (frames, columns + 1), y of (frames, rows + 1).
        live: (frames,) bool, False for padding.
    """
    view = torch.zeros_like(picture)
    spans = [
        tuple((float(each[frame].amin()), float(each[frame].amax())) for each in ends) for frame in range(len(picture))
    ]
    for number in picture[live].unique().tolist():
        groups: list[list[int]] = []
        for frame in ((picture == number) & live).nonzero()[:, 0].tolist():
            fits = (group for group in groups if not any(_overlap(spans[frame], spans[other]) for other in group))
            group = next(fits, None)
            if group is None:
                groups.append(group := [])
            group.append(frame)
        for index, group in enumerate(sorted(groups, key=len)):
            view[group] = index
    return view


def _overlap(one: tuple[tuple[float, float], ...], other: tuple[tuple[float, float], ...]) -> bool:
    """Whether two rectangles, (x, y) spans each, share more than rounding lets neighbours share."""
    shared = area = 1.0
    for (a, b), (c, d) in zip(one, other, strict=True):
        shared *= max(min(b, d) - max(a, c), 0.0)
        area *= max(min(b - a, d - c), 1e-9)
    return shared > _MOST_SHARED * area


def _table(picture: Tensor, view: Tensor, box: Tensor, live: Tensor) -> PlaceTable:
    """Return the table of units, (units,) each; units that are not `live` are padding."""
    patch, cell = torch.zeros_like(picture), torch.full((len(picture), 4), -1)
    for number in picture[live].unique().tolist():
        own = live & (picture == number)
        patch[own] = torch.arange(int(own.sum()))
        for each in view[own].unique().tolist() if not bool(box[own].isnan().any()) else []:
            part = own & (view == each)
            ranks = []
            for axis in (1, 0):
                least = (box[part, axis + 2] - box[part, axis]).median() / 2
                ranks.append(_ranks((box[part, axis] + box[part, axis + 2]) / 2, float(least)))
            cell[part] = torch.stack([*ranks, *(rank.amax().add(1).expand(len(rank)) for rank in ranks)], 1)
    return PlaceTable(picture, view, patch, box.float(), cell).where(live, NO_PICTURE)


def _patch_sizes(model: nn.Module, channels: int) -> list[tuple[int, int]]:
    """Return the possible heights and widths of patches: those of the configuration, and the first convolution's."""
    found: list[tuple[int, int]] = []
    for module in model.modules():
        match getattr(getattr(module, "config", None), "patch_size", None):
            case int(size) | [int(size)]:
                found.append((size, size))
            case [int(height), int(width)]:
                found.append((height, width))
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.in_channels == channels and min(module.stride) > 1:
            found.append((module.stride[0], module.stride[1]))
            break
    found = list(dict.fromkeys(each for each in found if min(each) > 0))
    if not found:
        raise ArgumentError(
            "The size of the model's patches is unknown: no configuration in it has patch_size, and it has no "
            f"convolution of {channels} channels with a stride.",
            "Set model.config.patch_size to the height and width of a patch in pixels.",
        )
    return found
