"""Two buffers, of keys and of values, that are filled step by step: growing, of a capacity, or behind a window."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.cache.buffer_ops import kept, put
from multihead.cache.positions import Progress
from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.tracing import runs_backward, traced

LEAST = 64
"""Tokens that growing buffers have room for at first."""

SPARE = 64
"""Tokens that are kept beyond a window, so that as many can be taken back."""


class Held(NamedTuple):
    """What the queries of one call may look at.

    Fields:
        k: (batch, kv_heads, keys, head_dim), earlier keys and those of the new tokens.
        v: (batch, kv_heads, keys, value_dim).
        query_start: where the first new token stands among these keys; a tensor (batch,) has one a sample.
        lengths: (batch,), how many of these keys are real; None = all.
        key_start: how many keys of the sequence stand before these and are forgotten; an int, or (batch,).
    """

    k: Tensor
    v: Tensor
    query_start: int | Tensor
    lengths: Tensor | None = None
    key_start: int | Tensor = 0


class Buffers:
    """Keys and values in places one behind the other, and how many of them are in use.

    Args:
        k: the first keys, whose sizes, dtype and device all others have.
        v: the first values.
        capacity: places, where they never become more; else None.
        window: how many tokens a query looks back on, where the others are forgotten; else None.

    Raises:
        ShapeError: k and v do not fit each other.
    """

    def __init__(self, k: Tensor, v: Tensor, *, capacity: int | None, window: int | None) -> None:
        _refuse_unless_pair(k, v)
        self.capacity, self.window = capacity, window
        self.progress = Progress(len(k), k.device, in_graphs=capacity is not None)
        # (batch, kv_heads, room + 1, dim): padding goes to the last place, see places.py.
        self.k = k.new_zeros(*k.shape[:2], (capacity or 0) + 1, k.shape[3])
        self.v = v.new_zeros(*v.shape[:2], (capacity or 0) + 1, v.shape[3])

    def __deepcopy__(self, memo: dict[int, object]) -> Buffers:
        """Copy them with their gradients, as torch does not."""
        copied = Buffers.__new__(Buffers)
        copied.__dict__.update(self.__dict__, progress=deepcopy(self.progress, memo))
        copied.change(torch.clone)
        return copied

    def extend(self, k: Tensor, v: Tensor, real: Tensor | None) -> Held:
        """Append new tokens, of which the first `real` (batch,) of each sample are no padding."""
        new = k.shape[2]
        in_graph = self.capacity is not None and torch.compiler.is_compiling()
        # Where a gradient flows, or somebody traces this code, new tensors are made and none is written.
        grows = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad or self.k.requires_grad)
        follows = not in_graph and (grows or traced())
        if follows and not torch.compiler.is_compiling() and runs_backward():
            raise ArgumentError(
                "A backward pass computes this call anew, as activation checkpointing does, and a cache would take its "
                "tokens a second time.",
                "Call the layer without a cache, or outside of the checkpoint.",
            )
        if not in_graph:
            self._make_room(new, real, follows=follows)
        start = self.progress.add(new, real)
        if isinstance(start, Tensor):
            places, inside = _places(start, new, real)
            if in_graph:
                self._assert_room(places, inside)
            stop = self.capacity if in_graph and self.capacity is not None else self.progress.longest
            self.k = put(self.k, k, places, real=inside, follows=follows)
            self.v = put(self.v, v, places, real=inside, follows=follows)
            return self._handed(0, stop, start, self.progress.each)
        self.k, self.v = put(self.k, k, start, follows=follows), put(self.v, v, start, follows=follows)
        first = 0 if self.window is None else max(0, start + 1 - self.window)
        return self._handed(first, start + new, start - first, None)

    def crop(self, places: int | Tensor) -> None:
        """Keep the first places: an int for all, or (batch,).

        Later steps write where the others stand, and who was handed them may still look at them: so into new buffers.
        """
        self.progress.put(places)
        room = self.k.shape[2] - 1
        self.k, self.v = kept(self.k, 0, places, room=room), kept(self.v, 0, places, room=room)

    def change(self, changed: Callable[[Tensor], Tensor]) -> None:
        """Replace the buffers by what is made of them."""
        self.k, self.v = changed(self.k), changed(self.v)

    def _assert_room(self, places: Tensor, real: Tensor | None) -> None:
        """Refuse, when the graph runs, what no number of the graph can tell."""
        capacity = self.capacity or 0
        fits = places < capacity if real is None else (places < capacity) | ~real
        # The sentence names no number: of another capacity, a graph has a symbol.
        torch._assert_async(  # noqa: SLF001 - torch has no public word for a check inside a graph
            fits.all(), "The cache has no room for these tokens. Give it a larger capacity, or call cache.reset()."
        )

    def _handed(self, first: int, stop: int, start: int | Tensor, lengths: Tensor | None) -> Held:
        """Hand out the places from `first` to `stop`."""
        k, v = self.k[:, :, first:stop], self.v[:, :, first:stop]
        if self.window is None:
            return Held(k, v, start, lengths)
        held = Held(k, v, start, lengths, self.progress.forgotten + first)
        if self.k.shape[2] > self._usual_room() + 1 and not k.requires_grad:
            self._move(0, least=self._usual_room())  # a prompt longer than the window was held for this one call
        return held

    def _make_room(self, new: int, real: Tensor | None, *, follows: bool) -> None:
        """See to it that new tokens fit, or refuse them."""
        # What was made in inference mode can be written in inference mode only.
        locked = not follows and self.k.is_inference() and not torch.is_inference_mode_enabled()
        stop = self.progress.longest + new
        if self.capacity is not None:
            if follows:
                raise ArgumentError(
                    "A gradient is asked of a cache with a capacity, which is written in place.",
                    "Run it under torch.no_grad(), or use KeyValueCache(), which joins keys where gradients flow.",
                )
            if real is not None:
                stop = int((self.progress.each + real).max()) if len(real) else 0
            if stop > self.capacity:
                raise ArgumentError(
                    f"The cache has room for {self.capacity} tokens, and these would be {stop}.",
                    f"Make it larger, KeyValueCache(capacity={stop}), or begin anew: cache.reset().",
                )
            if locked:
                self._move(0, least=self.capacity)
        elif follows and (self.window is not None or real is not None or not self.progress.alike):
            self._move(new)
        elif not follows and (locked or stop >= self.k.shape[2]):
            self._move(new, least=self._usual_room())

    def _usual_room(self) -> int:
        """Say how many places new buffers have where no more are needed."""
        return max(LEAST, 2 * (self.k.shape[2] - 1)) if self.window is None else 2 * (self.window + SPARE)

    def _move(self, new: int, *, least: int = 0) -> None:
        """Copy what is in use to buffers with room for new tokens, without what no later query looks back on."""
        stop: int | Tensor = self.progress.start
        first: int | Tensor = 0
        if self.window is not None:
            # The next query looks back on itself and the `window - 1` tokens before it.
            before = stop - (self.window - 1 + SPARE)
            first = before.clamp(min=0) if isinstance(before, Tensor) else max(0, before)
            self.progress.forget(first)
        room = max(self.progress.longest + new, least)
        self.k, self.v = kept(self.k, first, stop, room=room), kept(self.v, first, stop, room=room)


def _places(start: Tensor, new: int, real: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Say where the tokens of each sample go, and which are no padding: (batch, new) each, None = all."""
    places = start[:, None]
    if new == 1 and real is None:
        return places, None
    token = torch.arange(new, device=start.device)
    return places + token, None if real is None else token < real[:, None]


def refuse_unless_alike(name: str, new: Tensor, held: Tensor) -> None:
    """Refuse keys or values of another size, dtype or device than those that are held.

    Raises:
        ShapeError, DtypeError: in words.
    """
    shape, size = new.shape, held.shape
    if len(shape) != 4 or shape[0] != size[0] or shape[1] != size[1] or shape[3] != size[3]:
        raise ShapeError(
            f"{name} has shape {tuple(shape)}, and the cache holds {size[0]} samples of {size[1]} heads with {size[3]} "
            "features.",
            f"Give ({size[0]}, {size[1]}, new tokens, {size[3]}), or begin anew: cache.reset().",
        )
    if new.dtype != held.dtype or new.device != held.device:
        raise DtypeError(
            f"{name} is {new.dtype} on {new.device}, and the cache holds {held.dtype} on {held.device}.",
            "Convert it, move the cache with cache.to(device), or begin anew: cache.reset().",
        )


def _refuse_unless_pair(k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}, and a cache takes (batch, kv_heads, new tokens, dim).",
                "Split the heads first: mh.split_heads(x, num_heads).",
            )
    if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype or k.device != v.device:
        raise ShapeError(
            f"k is {_described(k)}, and v is {_described(v)}.", "Give both the same batch, heads, dtype and device."
        )


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
