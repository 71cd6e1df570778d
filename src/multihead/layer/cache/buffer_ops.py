"""Write tokens into a buffer of slots, and copy slots to a new buffer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.tensors.tracing import traced

# A buffer is (batch, kv_heads, slots + 1, dim): padding is written as zeros to the last slot, which is never read.


def write(buffer: Tensor, new: Tensor, slots: Tensor, *, real: Tensor | None = None, copy: bool) -> Tensor:
    """Write new tokens to slots that differ from sample to sample, in place or into a copy.

    Args:
        buffer: (batch, kv_heads, slots + 1, dim).
        new: (batch, kv_heads, new, dim).
        slots: (batch, new), the slot of each token; (batch, 1) for one token.
        real: (batch, new) bool, False = padding; None = all are real.
        copy: whether to write into a new tensor, as gradients through the buffer need.

    Returns:
        the buffer that holds the new tokens.
    """
    if real is not None:
        new = new.masked_fill(~real[:, None, :, None], 0)
        slots = slots.where(real, buffer.shape[2] - 1)
    index = slots[:, None, :, None].expand(new.shape)
    if copy:
        return buffer.scatter(2, index, new)
    # `.data` has its own version counter: a backward pass may still read other slots.
    (buffer if torch.compiler.is_compiling() else buffer.data).scatter_(2, index, new)
    return buffer


def copy_slots(buffer: Tensor, first: int | Tensor, stop: int | Tensor, *, slots: int) -> Tensor:
    """Copy the slots [first, stop) to the beginning of a new buffer, which is 0 after them.

    Args:
        buffer: (batch, kv_heads, slots + 1, dim).
        first: the first slot to copy; a tensor (batch,) has one per sample.
        stop: one past the last slot to copy; a tensor (batch,) has one per sample.
        slots: number of slots of the new buffer, without the one for padding.

    >>> buffer = torch.arange(4.0).view(1, 1, 4, 1)
    >>> copy_slots(buffer, 1, 3, slots=3).flatten()
    tensor([1., 2., 0., 0.])
    """
    if not isinstance(first, Tensor) and not isinstance(stop, Tensor):
        rows = buffer.narrow(2, first, stop - first)
    else:
        length = torch.as_tensor(stop - first, device=buffer.device).expand(len(buffer))
        slot = torch.arange(int(length.max()) if len(buffer) else 0, device=buffer.device)
        begin = torch.as_tensor(first, device=buffer.device).expand(len(buffer))
        index = (begin[:, None] + slot).clamp(max=buffer.shape[2] - 1)  # (batch, copied)
        index = index[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
        rows = buffer.gather(2, index).masked_fill((slot >= length[:, None])[:, None, :, None], 0)
    copied = buffer.new_zeros(*buffer.shape[:2], slots + 1, buffer.shape[3])
    copied.narrow(2, 0, rows.shape[2]).copy_(rows)
    return copied


def counts_of(
    counts: Sequence[int] | Tensor, *, batch: int, limit: int, device: torch.device, name: str = "lengths"
) -> Tensor:
    """Check token counts per sample and return them as int64 (batch,).

    Args:
        counts: integers, one per sample.
        batch: number of samples.
        limit: the largest count that is allowed, tokens.
        device: device of the result.
        name: name of the argument, for the errors.

    Raises:
        ArgumentError: a count is not an integer, is negative, or exceeds the limit.
        ShapeError: there is not one count per sample.
    """
    if not isinstance(counts, (Tensor, Iterable)):
        raise ArgumentError(f"{name} is {counts!r}.", f"Give one integer per sample: {batch} of them.")
    integers = (
        not counts.is_floating_point() and counts.dtype != torch.bool
        if isinstance(counts, Tensor)
        else all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    )
    if not integers:
        raise ArgumentError(f"{name} is {counts!r}.", "Give integers, one per sample.")
    checked = torch.as_tensor(counts, dtype=torch.int64, device=device)
    if tuple(checked.shape) != (batch,):
        raise ShapeError(
            f"{name} has shape {tuple(checked.shape)}, and the batch has {batch} samples.",
            f"Give one number per sample: shape ({batch},).",
        )
    if traced() or not batch:
        return checked
    smallest, largest = (int(edge) for edge in checked.aminmax())
    if smallest < 0 or largest > limit:
        raise ArgumentError(
            f"{name} holds {smallest if smallest < 0 else largest}, and there are {limit} tokens.",
            f"Give numbers from 0 to {limit}.",
        )
    return checked
