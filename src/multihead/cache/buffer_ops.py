"""Put new tokens into a buffer of places, and move those that are kept into a new one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.tracing import traced

# A buffer is (batch, kv_heads, room + 1, dim): padding is written to the place behind the room, as zeros.


def put(buffer: Tensor, new: Tensor, places: int | Tensor, *, real: Tensor | None = None, follows: bool) -> Tensor:
    """Write new tokens into a buffer; where gradients are followed, into a copy of it.

    Args:
        buffer: (batch, kv_heads, room + 1, dim).
        new: (batch, kv_heads, new, dim).
        places: where the first one goes, the others behind it; or (batch, new).
        real: (batch, new) bool, False = padding; None = all are real.
        follows: whether gradients flow through the buffer; then what stands from `places` on is left out, if that
            is an int.

    Returns: the buffer that holds them.
    """
    if not isinstance(places, Tensor):
        if follows:
            return torch.cat([buffer.narrow(2, 0, places), new], 2)
        # `.data` has a version counter of its own: a backward pass may still read the places before these.
        buffer.data[:, :, places : places + new.shape[2]] = new
        return buffer
    if real is not None:
        new = new.masked_fill(~real[:, None, :, None], 0)
        places = places.where(real, buffer.shape[2] - 1)
    index = places[:, None, :, None].expand(new.shape)
    if follows:
        return buffer.scatter(2, index, new)
    (buffer if torch.compiler.is_compiling() else buffer.data).scatter_(2, index, new)
    return buffer


def kept(buffer: Tensor, first: int | Tensor, stop: int | Tensor, *, room: int) -> Tensor:
    """Move the places from `first` to `stop` to the beginning of a new buffer; what lies behind them is 0.

    Args:
        buffer: (batch, kv_heads, places, dim).
        first: the first place that is kept; a tensor (batch,) has one a sample.
        stop: the place behind the last one that is kept.
        room: places of the new buffer, beside that of padding.

    >>> buffer = torch.arange(4.0).view(1, 1, 4, 1)
    >>> kept(buffer, 1, 3, room=3).flatten()
    tensor([1., 2., 0., 0.])
    """
    if not isinstance(first, Tensor) and not isinstance(stop, Tensor):
        rows = buffer.narrow(2, first, stop - first)
    else:
        length = torch.as_tensor(stop - first, device=buffer.device).expand(len(buffer))
        place = torch.arange(int(length.max()) if len(buffer) else 0, device=buffer.device)
        begin = torch.as_tensor(first, device=buffer.device).expand(len(buffer))
        index = (begin[:, None] + place).clamp(max=buffer.shape[2] - 1)  # (batch, kept)
        index = index[:, None, :, None].expand(-1, buffer.shape[1], -1, buffer.shape[3])
        rows = buffer.gather(2, index).masked_fill((place >= length[:, None])[:, None, :, None], 0)
    moved = buffer.new_zeros(*buffer.shape[:2], room + 1, buffer.shape[3])
    moved.narrow(2, 0, rows.shape[2]).copy_(rows)
    return moved


def counts_of(
    given: Sequence[int] | Tensor, *, batch: int, most: int, device: torch.device, name: str = "lengths"
) -> Tensor:
    """Check a number of tokens of each sample: (batch,), int64.

    Args:
        given: integers, one a sample.
        batch: number of samples.
        most: the most tokens that a sample can have.
        device: where they are needed.
        name: what the caller calls them, for the errors.

    Raises:
        ArgumentError: one is no integer, negative, or more than there can be.
        ShapeError: there is not one a sample.
    """
    if not isinstance(given, (Tensor, Iterable)):
        raise ArgumentError(f"{name} is {given!r}.", f"Give one integer per sample: {batch} of them.")
    whole = (
        not given.is_floating_point() and given.dtype != torch.bool
        if isinstance(given, Tensor)
        else all(isinstance(number, int) and not isinstance(number, bool) for number in given)
    )
    if not whole:
        raise ArgumentError(f"{name} is {given!r}.", "Give integers, one a sample.")
    counts = torch.as_tensor(given, dtype=torch.int64, device=device)
    if tuple(counts.shape) != (batch,):
        raise ShapeError(
            f"{name} has shape {tuple(counts.shape)}, and the batch has {batch} samples.",
            f"Give one number a sample: shape ({batch},).",
        )
    if traced() or not batch:
        return counts
    least, largest = (int(edge) for edge in counts.aminmax())
    if least < 0 or largest > most:
        raise ArgumentError(
            f"{name} holds {least if least < 0 else largest}, and there are {most} tokens.",
            f"Give numbers from 0 to {most}.",
        )
    return counts
