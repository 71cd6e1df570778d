"""The key and value buffers of a cache, filled step by step: growing, with a fixed capacity, or with a window.

Tokens are appended with PyTorch's operations. A native operator that writes the new keys into the buffers and attends
in one call was tried. At 8 heads of 64 and 512 cached keys this operator saves 32 microseconds per decoding step, which
then takes 0.90 of the time in float32 and 0.92 in bfloat16; at 4,096 keys it takes 0.95 (AMD EPYC, AVX2, one thread).
An operator that only writes saves 12 microseconds. With the combined operator, nothing is written before the attention
runs, and a call that needs a plan, a listener or another kernel would need a second implementation of writing.

A cache with a window keeps its keys in order in a buffer of about two windows; when the buffer is full, the keys of the
last window move to a new buffer. Masks keep referring to positions, views that were returned stay valid, and each key
is copied once per window. A ring buffer would save the memory of the second window, but its keys would be out of order.

A cache returns views of its buffers. Later tokens are written after these views, so a record of an earlier call stays
unchanged; a write that would overwrite a token of a view goes to a new buffer.

In most decoding steps a token is appended by a short path (`KeyValueBuffers._append`): two slices written and two read,
the operations of a hand-written cache. Sizes, dtypes and devices are compared with those of the step before, and
checked one by one only if they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.kernels.quantised import Int8Scales, quantise
from multihead.layer.cache.positions import SlotCounts
from multihead.tensors.shapes import numbers_per_sample
from multihead.tensors.tracing import is_in_backward_pass, is_traced

# A buffer is (batch, kv_heads, slots + 1, dim), with one slot per token; padding is written as zeros to the last slot,
# which is never read.


def write_slots(buffer: Tensor, new: Tensor, slots: Tensor, *, is_token: Tensor | None = None, copy: bool) -> Tensor:
    """Write new tokens (batch, kv_heads, new, dim) to slots (batch, new) of a buffer (batch, kv_heads, slots + 1, dim).

    The buffer is written in place; with `copy` a new tensor is returned, so that gradients flow through the buffer.
    Tokens where `is_token`, (batch, new) bool, is False are padding; None = no padding.
    """
    if is_token is not None:
        new = new.masked_fill(~is_token[:, None, :, None], 0)
        slots = slots.where(is_token, buffer.shape[2] - 1)
    index = slots[:, None, :, None].expand(new.shape)
    if copy:
        return buffer.scatter(2, index, new)
    # A write through `.data` is unknown to autograd: a backward pass may still read other slots.
    (buffer if torch.compiler.is_compiling() else buffer.data).scatter_(2, index, new)
    return buffer


def copy_slots(buffer: Tensor, first: int | Tensor, stop: int | Tensor, *, slots: int) -> Tensor:
    """Copy the tokens in the slots [first, stop) of a buffer to the first slots of a new buffer; other slots are 0.

    `first` and `stop` are ints, or (batch,). `buffer` and the result are (batch, kv_heads, slots + 1, dim), each with
    its own number of slots; the last slot is for padding.

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


def check_token_counts(
    counts: Sequence[int] | Tensor, *, batch: int, limit: int, device: torch.device, name: str = "lengths"
) -> Tensor:
    """Check that token counts per sample are from 0 to `limit`, and return them as int64 (batch,).

    `name` is the argument's name in the ArgumentError or ShapeError.
    """
    checked = numbers_per_sample(name, counts, batch).to(device)
    if is_traced() or not batch:
        return checked
    smallest, largest = (int(edge) for edge in checked.aminmax())
    if smallest < 0 or largest > limit:
        raise ArgumentError(
            f"{name} holds {smallest if smallest < 0 else largest}, and there are {limit} tokens.",
            f"Give numbers from 0 to {limit}.",
        )
    return checked


INITIAL_SLOTS = 64
"""Initial number of slots of a growing buffer."""

SPARE_SLOTS = 64
"""Number of tokens that are kept besides those in the window, so that `crop` can remove up to that many."""


class CachedKeyValues(NamedTuple):
    """The keys and values that a cache returns for the queries of one call.

    Attributes:
        k: (batch, kv_heads, keys, head_dim), the cached keys and then the new keys.
        v: (batch, kv_heads, keys, value_dim).
        query_start: position of the first new token among these keys, an int or (batch,).
        lengths: (batch,), number of keys per sample that are not padding; None = all.
        key_start: number of earlier keys of the sequence that were dropped, an int or (batch,).
        scales: the dequantisation factors of int8 k and v; None = k and v have the dtype of the new tokens.
    """

    k: Tensor
    v: Tensor
    query_start: int | Tensor
    lengths: Tensor | None = None
    key_start: int | Tensor = 0
    scales: Int8Scales | None = None


class KeyValueBuffers:
    """Buffers of keys and values, one slot per token, and the number of slots in use (`slot_counts`).

    Args:
        k: the first keys, (batch, kv_heads, new tokens, head_dim); later keys must have the same sizes, dtype and
            device.
        v: the first values, (batch, kv_heads, new tokens, value_dim).
        capacity: fixed number of slots; None = growing.
        window: maximum number of keys that a query sees; older keys are dropped. None = keep all keys.
        int8: whether keys and values are stored in int8, with a scale per token and head.

    Attributes:
        tensors: keys, values, and with int8 their scales: (batch, kv_heads, slots + 1, dim) each. Padding is written to
            the last slot, see `write_slots`.
        dtype: the dtype of new tokens.

    Raises:
        ShapeError: k and v do not match.
    """

    def __init__(self, k: Tensor, v: Tensor, *, capacity: int | None, window: int | None, int8: bool = False) -> None:
        _check_keys_fit_values(k, v)
        self.dtype, self.int8 = k.dtype, int8
        self.capacity, self.window = capacity, window
        self.slot_counts = SlotCounts(len(k), k.device, in_graphs=capacity is not None)
        self._last_checked: tuple[object, ...] | None = (
            None  # shapes, dtypes and devices of the last k and v that `check` accepted
        )
        self.tensors = tuple(
            each.new_zeros(*each.shape[:2], (capacity or 0) + 1, each.shape[3])
            for each in self._to_stored_dtype(k[:, :, :0], v[:, :, :0])
        )

    def _to_stored_dtype(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors to store: k and v; with int8, the quantised k and v and their scales."""
        if not self.int8:
            return k, v
        (k, k_scales), (v, v_scales) = quantise(k), quantise(v)
        return k, v, k_scales, v_scales

    def __deepcopy__(self, memo: dict[int, object]) -> KeyValueBuffers:
        """Copy the buffers by clone, because deepcopy rejects tensors with an autograd graph."""
        copied = KeyValueBuffers.__new__(KeyValueBuffers)
        copied.__dict__.update(self.__dict__, slot_counts=deepcopy(self.slot_counts, memo))
        copied.map_tensors(torch.clone)
        return copied

    def check_new_tokens(self, k: Tensor, v: Tensor) -> None:
        """Reject new keys and values that do not fit each other, or the buffers in sizes, dtype and device."""
        form = None
        if not torch.compiler.is_compiling():  # in a graph, the previous shapes would be constants
            form = k.shape, v.shape, k.dtype, v.dtype, k.device, v.device
            if form == self._last_checked:  # usually true: decoding steps have equal shapes
                return
        check_fits_cached("k", k, self.tensors[0], self.dtype)
        check_fits_cached("v", v, self.tensors[1], self.dtype)
        if v.shape[2] != k.shape[2]:
            raise ShapeError(f"k has {k.shape[2]} new tokens and v has {v.shape[2]}.", "Give one value per key.")
        self._last_checked = form

    def extend(self, k: Tensor, v: Tensor, lengths: Tensor | None) -> CachedKeyValues:
        """Append keys and values of new tokens, and return those that the new queries may attend to.

        Args:
            k: (batch, kv_heads, new tokens, head_dim).
            v: (batch, kv_heads, new tokens, value_dim).
            lengths: (batch,), number of new tokens of each sample that are not padding; None = all.

        Raises:
            ArgumentError: the capacity is exceeded, a gradient would flow through a cache with a capacity, or the call
                is recomputed in a backward pass.
        """
        compiling = torch.compiler.is_compiling()
        in_graph = compiling and self.capacity is not None
        # If gradients are needed or this code is traced, buffers are replaced by new tensors, not written in place.
        needs_grad = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad or self.tensors[0].requires_grad)
        if self.int8:
            reject_int8_gradient(k, v)
        copy = not in_graph and (needs_grad or is_traced())
        if lengths is None and self.slot_counts.is_uniform and not (copy or in_graph):
            return self._append(k, v)
        if copy and not compiling and is_in_backward_pass():
            raise ArgumentError(
                "A backward pass recomputes this call, as activation checkpointing does, and the cache would append "
                "its tokens a second time.",
                "Call the layer without a cache, or outside of the checkpoint.",
            )
        new, stored = k.shape[2], self._to_stored_dtype(k, v)
        if not in_graph:
            self._ensure_slots(new, lengths, copy=copy)
        start = self.slot_counts.add_tokens(new, lengths)
        if not isinstance(start, Tensor):
            kept = (tensor.narrow(2, 0, start) for tensor in self.tensors)
            self.tensors = tuple(torch.cat(pair, 2) for pair in zip(kept, stored, strict=True))
            return self._slots_attended_to(start, start + new)
        slots, inside = _slots_of_tokens(start, new, lengths)
        if in_graph:
            self._assert_capacity(slots, inside)
        stop = self.capacity if in_graph and self.capacity is not None else self.slot_counts.largest_count
        self.tensors = tuple(
            write_slots(tensor, each, slots, is_token=inside, copy=copy)
            for tensor, each in zip(self.tensors, stored, strict=True)
        )
        return self._slots_attended_to(start, stop, self.slot_counts.counts)

    def _append(self, k: Tensor, v: Tensor) -> CachedKeyValues:
        """Write new tokens in place, the same number for each sample: the fast path of a decoding step."""
        tensors, new, start = self.tensors, k.shape[2], self.slot_counts.largest_count
        if tensors[0].is_inference() or start + new >= tensors[0].shape[2]:
            self._ensure_slots(new, None, copy=False)
            tensors, start = self.tensors, self.slot_counts.largest_count
        self.slot_counts.add_tokens(new)
        stop = start + new
        for tensor, each in zip(tensors, self._to_stored_dtype(k, v) if self.int8 else (k, v), strict=True):
            # A write through `.data` is unknown to autograd: a backward pass may still read earlier slots.
            tensor.data[:, :, start:stop] = each
        if self.int8 or self.window is not None:
            return self._slots_attended_to(start, stop)
        return CachedKeyValues(tensors[0][:, :, :stop], tensors[1][:, :, :stop], start)

    def crop(self, count: int | Tensor) -> None:
        """Keep the first `count` slots, an int or (batch,).

        The slots are copied to new buffers, because callers may still hold views of slots that later steps overwrite.
        """
        self.slot_counts.set_counts(count)
        slots = self.tensors[0].shape[2] - 1
        self.map_tensors(lambda tensor: copy_slots(tensor, 0, count, slots=slots))

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> None:
        """Replace each buffer by the result of a function of the buffer."""
        self._last_checked = None
        self.tensors = tuple(function(tensor) for tensor in self.tensors)

    def _assert_capacity(self, slots: Tensor, is_token: Tensor | None) -> None:
        """Add an assertion to a compiled graph: `slots` of tokens, (batch, new), are below the capacity."""
        capacity = self.capacity or 0
        fits = slots < capacity if is_token is None else (slots < capacity) | ~is_token
        # The message contains no number, because the capacity may be symbolic in the graph.
        torch._assert_async(  # noqa: SLF001 - torch has no public function for a check inside a graph
            fits.all(), "The cache has no room for these tokens. Give it a larger capacity, or call cache.reset()."
        )

    def _slots_attended_to(self, start: int | Tensor, stop: int, lengths: Tensor | None = None) -> CachedKeyValues:
        """Return views of the slots up to `stop` that queries at `start` and later may attend to."""
        first = 0 if self.window is None or isinstance(start, Tensor) else max(0, start + 1 - self.window)
        k, v = self.tensors[0][:, :, first:stop], self.tensors[1][:, :, first:stop]
        factors = None
        if self.int8:
            factors = Int8Scales(self.tensors[2][:, :, first:stop, 0], self.tensors[3][:, :, first:stop, 0])
        if self.window is None:
            return CachedKeyValues(k, v, start, lengths, 0, factors)
        cached = CachedKeyValues(k, v, start - first, lengths, self.slot_counts.dropped + first, factors)
        if self.tensors[0].shape[2] > self._initial_slot_count() + 1 and not k.requires_grad:
            self._reallocate(
                0, at_least=self._initial_slot_count()
            )  # frees the memory of a prompt longer than the window
        return cached

    def _ensure_slots(self, new: int, lengths: Tensor | None, *, copy: bool) -> None:
        """Reallocate the buffers if new tokens do not fit; raise an ArgumentError if they exceed the capacity."""
        # Tensors created in inference mode cannot be written outside of it.
        locked = not copy and self.tensors[0].is_inference() and not torch.is_inference_mode_enabled()
        stop = self.slot_counts.largest_count + new
        if self.capacity is not None:
            if copy:
                raise ArgumentError(
                    "A gradient flows through a cache with a capacity, which is written in place.",
                    "Run it under torch.no_grad(), or use KeyValueCache(), which concatenates keys where gradients "
                    "flow.",
                )
            if lengths is not None:
                stop = int((self.slot_counts.counts + lengths).max()) if len(lengths) else 0
            if stop > self.capacity:
                raise ArgumentError(
                    f"The cache has a capacity of {self.capacity} tokens, and this call needs {stop}.",
                    f"Use KeyValueCache(capacity={stop}), or call cache.reset() to start over.",
                )
            if locked:
                self._reallocate(0, at_least=self.capacity)
        elif copy and (self.window is not None or lengths is not None or not self.slot_counts.is_uniform):
            self._reallocate(new)
        elif not copy and (locked or stop >= self.tensors[0].shape[2]):
            self._reallocate(new, at_least=self._initial_slot_count())

    def _initial_slot_count(self) -> int:
        """Return the number of slots to allocate: twice the current number, or twice (window + SPARE_SLOTS)."""
        return (
            max(INITIAL_SLOTS, 2 * (self.tensors[0].shape[2] - 1))
            if self.window is None
            else 2 * (self.window + SPARE_SLOTS)
        )

    def _reallocate(self, new: int, *, at_least: int = 0) -> None:
        """Copy the slots in use to larger buffers, without keys outside the window of later queries."""
        stop: int | Tensor = self.slot_counts.next_slot
        first: int | Tensor = 0
        if self.window is not None:
            # The next query sees its own key and the `window - 1` keys before it.
            before = stop - (self.window - 1 + SPARE_SLOTS)
            first = before.clamp(min=0) if isinstance(before, Tensor) else max(0, before)
            self.slot_counts.drop_slots(first)
        slots = max(self.slot_counts.largest_count + new, at_least)
        self.map_tensors(lambda tensor: copy_slots(tensor, first, stop, slots=slots))


def _slots_of_tokens(start: Tensor, new: int, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the slot of each new token, and where tokens are not padding (None = everywhere): (batch, new) each."""
    slots = start[:, None]
    if new == 1 and lengths is None:
        return slots, None
    token = torch.arange(new, device=start.device)
    return slots + token, None if lengths is None else token < lengths[:, None]


def check_fits_cached(name: str, new: Tensor, cached: Tensor, dtype: torch.dtype) -> None:
    """Reject new keys or values whose sizes, dtype or device differ from the cached tensor `cached`."""
    shape, size = new.shape, cached.shape
    if len(shape) != 4 or shape[0] != size[0] or shape[1] != size[1] or shape[3] != size[3]:
        raise ShapeError(
            f"{name} has shape {tuple(shape)}, and the cache holds {size[0]} samples of {size[1]} heads with {size[3]} "
            "features.",
            f"Give ({size[0]}, {size[1]}, new tokens, {size[3]}), or call cache.reset() to start over.",
        )
    if new.dtype != dtype or new.device != cached.device:
        raise DtypeError(
            f"{name} is {new.dtype} on {new.device}, and the cache holds {dtype} on {cached.device}.",
            "Convert it, move the cache with cache.to(device), or call cache.reset() to start over.",
        )


def reject_int8_gradient(k: Tensor, v: Tensor) -> None:
    """Raise an ArgumentError if k or v requires a gradient, which int8 storage cannot pass on."""
    if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
        raise ArgumentError(
            'A gradient flows through a cache with dtype="int8", which rounds keys and values.',
            "Run it under torch.no_grad(), or use KeyValueCache(), which keeps them as they are.",
        )


def _check_keys_fit_values(k: Tensor, v: Tensor) -> None:
    for name, tensor in (("k", k), ("v", v)):
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}, and must be (batch, kv_heads, new tokens, dim).",
                "Split the heads first: mh.split_heads(x, num_heads).",
            )
    if k.shape[:2] != v.shape[:2] or k.dtype != v.dtype or k.device != v.device:
        raise ShapeError(
            f"k is {_shape_and_dtype(k)}, and v is {_shape_and_dtype(v)}.",
            "Give both the same batch, heads, dtype and device.",
        )


def _shape_and_dtype(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} in {tensor.dtype} on {tensor.device}"
