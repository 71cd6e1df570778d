"""Check and convert token counts in masks (lengths of samples, documents and prefixes), given as ints or a tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.masks.positions import CallSize
from multihead.tensors.shapes import MAX_POSITION
from multihead.tensors.tracing import can_read_values

IntOrInts: TypeAlias = "tuple[int, ...] | tuple[tuple[int, ...], ...]"


def check_counts(
    given: object, name: str, form: str, *, dims: tuple[int, ...] = (1, 2), ragged: bool = False
) -> IntOrInts | Tensor:
    """Check the lengths of a new mask: non-negative integers with `dims` dimensions; return ints or a tensor.

    `name` and `form` are the mask and the expected shape, for errors; `ragged` rows are padded with 0.
    """
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dtype == torch.bool or given.dim() not in dims:
            raise MaskError(
                f"{name} was given a {given.dtype} tensor of shape {tuple(given.shape)}.",
                f"Give integers of shape {form}.",
            )
        # Reading a tensor on an accelerator would make the host wait, and a compiler cannot read one.
        if can_read_values(given.device) and _smallest_count(given) < 0:
            raise MaskError(f"{name} holds a negative length, {int(given.min())}.", "Give lengths of 0 or more tokens.")
        return given
    rows = _counts_as_rows(given, name, form)
    depth = 2 if rows and isinstance(rows[0], tuple) else 1
    widths = {len(row) if isinstance(row, tuple) else -1 for row in rows}
    if depth not in dims or (len(widths) > 1 and not (ragged and -1 not in widths)):
        raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
    if ragged and depth == 2:
        width = max(widths)
        rows = tuple(row + (0,) * (width - len(row)) for row in rows if isinstance(row, tuple))
    numbers = [number for row in rows for number in (row if isinstance(row, tuple) else (row,))]
    if min(numbers, default=0) < 0:
        raise MaskError(f"{name} holds a negative length, {min(numbers)}.", "Give lengths of 0 or more tokens.")
    if max(numbers, default=0) > MAX_POSITION:
        raise MaskError(f"{name} holds a length of {max(numbers)} tokens.", f"Give at most {MAX_POSITION} tokens.")
    return rows  # type: ignore[return-value]


def _smallest_count(counts: Tensor) -> int:
    """Return the smallest count, or 0 if there are no counts; few counts are read as a list, which is faster."""
    if counts.numel() > 64:
        return int(counts.min())
    return min(counts.flatten().tolist(), default=0)


def _counts_as_rows(given: object, name: str, form: str) -> tuple[int | tuple[int, ...], ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
    rows: list[int | tuple[int, ...]] = []
    for row in given:
        numbers = row if isinstance(row, Sequence) and not isinstance(row, str) else (row,)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
        rows.append(tuple(numbers) if numbers is row or isinstance(row, Sequence) else row)
    return tuple(rows)


def as_tensor(counts: object, device: torch.device | str) -> Tensor:
    """Return counts as an int64 tensor on a device; an int64 tensor on that device is returned unchanged."""
    if isinstance(counts, Tensor) and counts.is_meta and torch.device(device).type != "meta":
        raise MaskError(
            f"The mask holds counts on the meta device, where they have no values, and they are needed on {device}.",
            "Give ints, or a tensor on any other device.",
        )
    return torch.as_tensor(counts, dtype=torch.int64, device=device)


def shape_of_counts(counts: object) -> tuple[int, ...]:
    """Return the shape of counts given as an int, nested sequences or a tensor."""
    if isinstance(counts, Tensor):
        return tuple(counts.shape)
    if not isinstance(counts, tuple):
        return ()
    return (len(counts), len(counts[0])) if counts and isinstance(counts[0], tuple) else (len(counts),)


def check_rows_per_sample(mask: object, shape: tuple[int, ...], size: CallSize) -> None:
    """Raise a MaskError unless counts of shape `shape` have one row per sample, or one row for all samples."""
    if shape[0] not in (1, size.batch):
        raise MaskError(
            f"{mask!r} has lengths for {shape[0]} samples, and the batch has {size.batch}.", "Give one row per sample."
        )


def check_counts_within_keys(mask: object, counts: object, size: CallSize, *, summed: bool = False) -> None:
    """Raise a MaskError if a count, or with `summed` the sum of a row, exceeds the number of keys.

    Values that cannot be read without waiting (in a graph, on an accelerator) are not checked; intervals are clamped
    instead.
    """
    if (
        size.more_keys_later
        or 0 in shape_of_counts(counts)
        or (isinstance(counts, Tensor) and not can_read_values(counts.device))
    ):
        return
    longest = _largest_count(counts, summed=summed)
    if longest > size.keys:
        what = f"documents of {longest} tokens in total" if summed else f"a length of {longest} tokens"
        raise MaskError(
            f"{mask!r} has {what}, and there are {size.keys} keys.",
            f"Give lengths that add up to at most {size.keys}."
            if summed
            else f"Give lengths of at most {size.keys} tokens.",
        )


def _largest_count(counts: object, *, summed: bool) -> int:
    """Return the largest count, or the largest sum of a row; ints are compared without creating a tensor."""
    if isinstance(counts, Tensor):
        return int((counts.sum(-1) if summed else counts).max())
    if not isinstance(counts, tuple):
        return int(counts)  # type: ignore[call-overload, no-any-return]
    rows = counts if isinstance(counts[0], tuple) else (counts,)
    return max(sum(row) if summed else max(row) for row in rows)


def counts_after_dropping(counts: object, count: int | Tensor) -> Tensor:
    """Subtract the number of dropped first keys, an int or (batch,), from counts (), (batch,) or (batch, n)."""
    held = as_tensor(counts, device_of_counts(counts, count))
    if isinstance(count, Tensor):
        count = count[:, None] if held.dim() == 2 else count
    return (held - count).clamp(min=0)


def device_of_counts(counts: object, count: int | Tensor) -> torch.device | str:
    """Return the device of `count` if it is a tensor, else of counts; "cpu" for ints."""
    given = count if isinstance(count, Tensor) else counts
    return given.device if isinstance(given, Tensor) else "cpu"


def repr_of_value(value: object) -> str:
    """Return the repr of a value; a tensor is shortened to its dtype and shape."""
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}>"
    return repr(value)
