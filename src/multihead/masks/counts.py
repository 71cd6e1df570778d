"""Check and convert token counts in masks (lengths of samples, documents and prefixes), given as ints or a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, TypeAlias, TypeGuard

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.masks.base import Mask
from multihead.masks.positions import CallSize
from multihead.tensors.shapes import MAX_POSITION
from multihead.tensors.tracing import can_read_values

IntTuples: TypeAlias = "tuple[int, ...] | tuple[tuple[int, ...], ...]"


class CountsMask(Mask):
    """The base class of masks that hold numbers of tokens.

    Attributes:
        counts: the numbers of tokens: an int, tuples of ints or an integer tensor.
        holds_documents: whether the counts of a row are the lengths of consecutive documents, which add up.
    """

    counts: Any
    holds_documents: ClassVar[bool] = False

    def check_fits(self, size: CallSize) -> None:
        """Raise a MaskError if the counts are for another batch, or exceed the number of keys.

        Values that cannot be read without waiting (in a graph, on an accelerator) are not checked; intervals are
        clamped instead.
        """
        counts, shape = self.counts, shape_of_counts(self.counts)
        has_rows = len(shape) == 2 if self.holds_documents else bool(shape)
        if has_rows and shape[0] not in (1, size.batch):
            raise MaskError(
                f"{self!r} has lengths for {shape[0]} samples, and the batch has {size.batch}.",
                "Give one row per sample.",
            )
        if size.more_keys_later or 0 in shape or (isinstance(counts, Tensor) and not can_read_values(counts.device)):
            return
        longest = _largest_count(counts, summed=self.holds_documents)
        if longest > size.keys:
            found, limit = (
                (f"documents of {longest} tokens in total", f"that add up to at most {size.keys}")
                if self.holds_documents
                else (f"a length of {longest} tokens", f"of at most {size.keys} tokens")
            )
            raise MaskError(f"{self!r} has {found}, and there are {size.keys} keys.", f"Give lengths {limit}.")

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Self:
        return self  # all heads share the counts


def check_counts(
    given: object, name: str, form: str, *, dims: tuple[int, ...] = (1, 2), ragged: bool = False
) -> IntTuples | Tensor:
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
    depth = 1 if _is_row_of_integers(given) else 2
    is_valid = depth == 1 or (_is_sequence(given) and all(map(_is_row_of_integers, given)))
    rows: Sequence[Any] = (given,) if depth == 1 else given  # type: ignore[assignment]
    if not is_valid or depth not in dims or (len(set(map(len, rows))) > 1 and not ragged):
        raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
    numbers = [number for row in rows for number in row]
    if min(numbers, default=0) < 0:
        raise MaskError(f"{name} holds a negative length, {min(numbers)}.", "Give lengths of 0 or more tokens.")
    if max(numbers, default=0) > MAX_POSITION:
        raise MaskError(f"{name} holds a length of {max(numbers)} tokens.", f"Give at most {MAX_POSITION} tokens.")
    if depth == 1:
        return tuple(numbers)
    width = max(map(len, rows))
    return tuple((*row, *(0,) * (width - len(row))) for row in rows)


def _smallest_count(counts: Tensor) -> int:
    """Return the smallest count, or 0 if there are no counts; few counts are read as a list, which is faster."""
    if counts.numel() > 64:
        return int(counts.min())
    return min(counts.flatten().tolist(), default=0)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_row_of_integers(row: object) -> bool:
    return _is_sequence(row) and all(isinstance(number, int) and not isinstance(number, bool) for number in row)


def counts_as_tensor(counts: object, device: torch.device | str) -> Tensor:
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


def _largest_count(counts: object, *, summed: bool) -> int:
    """Return the largest count, or the largest sum of a row; ints are compared without creating a tensor."""
    if isinstance(counts, Tensor):
        return int((counts.sum(-1) if summed else counts).max())
    if not isinstance(counts, tuple):
        return int(counts)  # type: ignore[call-overload, no-any-return]
    rows = counts if isinstance(counts[0], tuple) else (counts,)
    return max(sum(row) if summed else max(row) for row in rows)


def counts_after_dropping(counts: object, count: int | Tensor) -> Any:
    """Subtract the number of dropped first keys, an int or (batch,), from counts (), (batch,) or (batch, n)."""
    if isinstance(counts, int) and isinstance(count, int):
        return max(0, counts - count)
    held = counts_as_tensor(counts, device_of_counts(counts, count))
    if isinstance(count, Tensor):
        count = count[:, None] if held.dim() == 2 else count
    return (held - count).clamp(min=0)


def device_of_counts(counts: object, count: int | Tensor) -> torch.device | str:
    """Return the device of `count` if it is a tensor, else of counts; "cpu" for ints."""
    given = count if isinstance(count, Tensor) else counts
    return given.device if isinstance(given, Tensor) else "cpu"
