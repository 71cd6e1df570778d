"""The key/value cache of one attention layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, DtypeError, MaskError, ShapeError
from multihead.errors.arguments import check_integer
from multihead.kernels import head_changes
from multihead.kernels.call import CachedSequence, PositionInSequence
from multihead.kernels.quantised import Int8Scales, quantise
from multihead.layer.cache.buffers import (
    SPARE_SLOTS,
    CachedKeyValues,
    KeyValueBuffers,
    check_token_counts,
    reject_int8_gradient,
)
from multihead.layer.cache.positions import CountsSnapshot, SlotCounts
from multihead.masks import Mask
from multihead.tensors.tracing import can_read_values, is_traced

_NEW_KEYS_AXES = "(batch, kv_heads, new tokens, head_dim)"


class ProjectedMemory(NamedTuple):
    """Projected keys and values of the memory, reused in all steps of a cross-attention.

    Attributes:
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        lengths: (batch,), number of keys per sample that are not padding; None = all.
        scales: the dequantisation factors of int8 k and v; None = k and v have the dtype of the projections.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None = None
    scales: Int8Scales | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> ProjectedMemory:
        """Return a copy in which a function is applied to each tensor."""
        scales = None if self.scales is None else Int8Scales(*map(function, self.scales))
        lengths = None if self.lengths is None else function(self.lengths)
        return ProjectedMemory(function(self.k), function(self.v), lengths, scales)

    def __deepcopy__(self, memo: dict[int, object]) -> ProjectedMemory:
        """Copy the tensors by clone, because deepcopy rejects tensors with an autograd graph."""
        return self.map(torch.clone)


_CacheState: TypeAlias = tuple[
    ProjectedMemory | None,
    PositionInSequence | None,
    SlotCounts | None,
    CountsSnapshot | None,
    KeyValueBuffers | None,
    tuple[Tensor, ...] | None,
]


class KeyValueCache:
    """The keys and values of the tokens that one attention layer has processed (KV cache).

    Without options the buffers grow, doubling when they are full. Keys that a call has returned never change: later
    tokens are written to other slots, or to a new buffer. If gradients are required, keys are concatenated to new
    tensors instead, so that gradients are exact through all steps.

    Args:
        capacity: maximum number of tokens, allocated at once; further tokens raise an error. Under `torch.compile` a
            step with such a cache compiles once: it returns all slots, with a tensor of lengths.
        window: maximum number of keys that a query sees, its own included, as in `masks.Window`; older keys are
            dropped.
        dtype: "int8" stores keys and values in int8, with one scale per token and head: half the memory of bfloat16.
            The rounding error is at most 1/254 of the largest element of the token and head. Gradients are rejected.
            None keeps the dtype.

    Raises:
        ArgumentError: capacity and window are both given, one of them is not a positive integer, or dtype is invalid.

    >>> cache = KeyValueCache()
    >>> held = cache.extend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))  # a prompt of five tokens
    >>> held = cache.extend(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))  # and one more token
    >>> held.k.shape, held.query_start
    (torch.Size([1, 2, 6, 8]), 5)
    >>> cache
    KeyValueCache(): 6 tokens, 1 sample, 8,320 bytes
    """

    def __init__(
        self, *, capacity: int | None = None, window: int | None = None, dtype: Literal["int8"] | None = None
    ) -> None:
        if capacity is not None and window is not None:
            raise ArgumentError(
                f"capacity is {capacity!r} and window is {window!r}.",
                "Give one of them: a cache with a window already has bounded memory, about two windows.",
            )
        for name, value in (("capacity", capacity), ("window", window)):
            if value is not None:
                check_integer(name, value)
        if dtype not in (None, "int8"):
            raise ArgumentError(
                f"dtype is {dtype!r}.", 'Give "int8", or leave it out to store keys and values as they are.'
            )
        self.capacity, self.window, self.dtype = capacity, window, dtype
        self.reset()

    def reset(self) -> None:
        """Empty the cache, including the memory of a cross-attention; the next call starts a new sequence."""
        self.memory: ProjectedMemory | None = None
        self._buffers: KeyValueBuffers | None = None
        self._slot_counts: SlotCounts | None = None  # counts cached tokens, or in cross-attention queries
        self._changes_when_filled: frozenset[object] = (
            frozenset()
        )  # the changes of heads under which the cache was filled
        self._begin_sequence()

    def _begin_sequence(self) -> None:
        """Start a new sequence, so that listeners do not treat later calls as a continuation of earlier calls."""
        self._sequence = CachedSequence()
        self._last_position: PositionInSequence | None = None

    @property
    def query_start(self) -> int | Tensor:
        """The position of the next token: an int, or (batch,) if samples differ or in a compiled graph."""
        return 0 if self._slot_counts is None else self._slot_counts.next_position

    @property
    def length(self) -> int:
        """Number of tokens of the longest sample, including dropped tokens."""
        start = self.query_start
        return int(start.max()) if isinstance(start, Tensor) else start

    @property
    def lengths(self) -> Tensor:
        """(batch,), int64: number of tokens of each sample, including dropped tokens."""
        slot_counts = self._slot_counts
        return torch.zeros(0, dtype=torch.int64) if slot_counts is None else slot_counts.counts + slot_counts.dropped

    @property
    def last_call_position(self) -> PositionInSequence | None:
        """Position of the last call in its sequence, for listeners; None before a call and in a compiled graph."""
        return None if torch.compiler.is_compiling() else self._last_position

    @property
    def nbytes(self) -> int:
        """Allocated memory, bytes."""
        held = () if self._buffers is None else self._buffers.tensors
        remembered = () if self.memory is None else (self.memory.k, self.memory.v, *(self.memory.scales or ()))
        return sum(tensor.nbytes for tensor in (*held, *remembered))

    def __repr__(self) -> str:
        options = {"capacity": self.capacity, "window": self.window, "dtype": self.dtype}
        option = ", ".join(f"{name}={value!r}" for name, value in options.items() if value is not None)
        if self._slot_counts is None:
            return f"KeyValueCache({option}): empty"
        tokens = sorted(set(self.lengths.tolist())) or [0]
        content = f"{tokens[0]} tokens" if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]} tokens"
        content += "" if self.memory is None else f", a memory of {self.memory.k.shape[2]}"
        batch = self._slot_counts.batch
        return f"KeyValueCache({option}): {content}, {batch} sample{'s' if batch != 1 else ''}, {self.nbytes:,} bytes"

    def extend(self, k: Tensor, v: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> CachedKeyValues:
        """Append the keys and values of new tokens, and return all keys and values that the new queries may attend to.

        Args:
            k: (batch, kv_heads, new tokens, head_dim).
            v: (batch, kv_heads, new tokens, value_dim).
            lengths: (batch,), number of new tokens of each sample; further entries are padding, which is not stored.
                None = all.

        Returns:
            `CachedKeyValues`, with the keys and values, and the position of the new tokens among them.

        Raises:
            ShapeError: the sizes of k and v do not match, or differ from those of the cached keys and values.
            DtypeError: the dtype or device differs from that of the cached keys and values.
            ArgumentError: the capacity is exceeded, or a gradient would flow through a cache with a capacity or
                with int8.
        """
        if self.memory is not None:
            raise ArgumentError(
                "The cache holds the memory of a cross-attention, and extend() adds keys of a self-attention.",
                "Use a separate cache for each attention.",
            )
        if not (isinstance(k, Tensor) and isinstance(v, Tensor)):
            name, given = ("v", v) if isinstance(k, Tensor) else ("k", k)
            raise DtypeError(f"{name} is a {type(given).__name__}, and must be a tensor.", f"Give {_NEW_KEYS_AXES}.")
        buffers = self._buffers
        if buffers is None:
            buffers = self._buffers = KeyValueBuffers(
                k, v, capacity=self.capacity, window=self.window, int8=self.dtype == "int8"
            )
            self._slot_counts = buffers.slot_counts
        buffers.check_new_tokens(k, v)
        counts = (
            None if lengths is None else check_token_counts(lengths, batch=len(k), limit=k.shape[2], device=k.device)
        )
        if counts is not None and not is_traced() and bool((counts == k.shape[2]).all()):
            counts = None  # without padding one int suffices for all samples
        held = buffers.extend(k, v, counts)
        if not torch.compiler.is_compiling():
            self._last_position = PositionInSequence(self._sequence, held.key_start, counts)
        return held

    def rollback_on_error(self) -> AbstractContextManager[object]:
        """Remove tokens appended in this context if it raises an error, so that the call can be repeated."""
        if torch.compiler.is_compiling():
            return nullcontext()
        return _RestoreOnError(self)

    def _snapshot(self) -> _CacheState:
        """Return the state of the cache, for `_restore`."""
        slot_counts, buffers = self._slot_counts, self._buffers
        counted = None if slot_counts is None else slot_counts.snapshot
        stored = None if buffers is None else buffers.tensors
        return self.memory, self._last_position, slot_counts, counted, buffers, stored

    def _restore(self, state: _CacheState) -> None:
        self.memory, self._last_position, slot_counts, counted, buffers, stored = state
        self._slot_counts, self._buffers = slot_counts, buffers
        if slot_counts is not None and counted is not None:
            slot_counts.snapshot = counted
        if buffers is not None and stored is not None:
            buffers.tensors = stored
            buffers.crop(buffers.slot_counts.next_slot)  # removes tokens that were written in place

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first `length` tokens and remove later tokens, for example tokens that speculative decoding rejects.

        Args:
            length: number of tokens to keep, an int or (batch,); a sample with fewer tokens keeps all.

        Raises:
            ArgumentError: a length is negative or larger than the number of tokens, or the next query would see keys
                that were dropped by the window.
        """
        slot_counts, total = self._slot_counts_or_raise("Crop"), self.length
        if isinstance(length, int):
            check_integer("length", length, least=0)
            if length > total:
                raise ArgumentError(f"length is {length}, and there are {total} tokens.", f"Give at most {total}.")
        else:
            length = check_token_counts(
                length, batch=slot_counts.batch, limit=total, device=slot_counts.device, name="length"
            )
        slots = length - slot_counts.dropped
        if isinstance(slots, Tensor) or not slot_counts.is_uniform:
            slots = torch.minimum(slot_counts.counts, torch.as_tensor(slots, device=slot_counts.device))
        lookback = 0 if self.window is None else self.window - 1
        needed = torch.as_tensor(slots + slot_counts.dropped).clamp(max=lookback)
        if bool((torch.as_tensor(slots) < needed).any()):
            raise ArgumentError(
                "The next query would see keys that the cache has dropped: with a window, only the last "
                f"{SPARE_SLOTS} tokens can be removed.",
                "Remove fewer tokens, or use KeyValueCache(), which keeps all of them.",
            )
        if not isinstance(slots, Tensor) and slots == slot_counts.largest_count:
            return
        self._begin_sequence()
        if self._buffers is None:
            slot_counts.set_counts(slots)
        else:
            self._buffers.crop(slots)

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Select samples, as beam search does: new sample i continues old sample `index[i]`.

        Args:
            index: integers (new batch,), from 0 to the old batch - 1; samples may be repeated or omitted.

        Raises:
            ArgumentError: an index is out of range or not an integer, or the cache is empty.
        """
        slot_counts = self._slot_counts_or_raise("Reorder")
        if isinstance(index, str):
            raise ArgumentError(
                f"index is {index!r}.", "Give integers: for each new sample, the index of the old sample."
            )
        batch, chosen = slot_counts.batch, torch.as_tensor(index, device=slot_counts.device)
        if chosen.dim() != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise ArgumentError(
                f"index is {index!r}.", "Give integers: for each new sample, the index of the old sample."
            )
        if can_read_values(slot_counts.device) and not bool(((chosen >= 0) & (chosen < batch)).all()):
            raise ArgumentError(
                f"index is {chosen.tolist()}, and there are {batch} samples.", f"Give numbers from 0 to {batch - 1}."
            )
        self._begin_sequence()
        slot_counts.select_samples(chosen)
        if self._buffers is not None:
            self._buffers.map_tensors(lambda tensor: tensor.index_select(0, chosen))
        if self.memory is not None:
            self.memory = self.memory.map(lambda tensor: tensor.index_select(0, chosen))

    def to(self, device: torch.device | str) -> KeyValueCache:
        """Move the cache to a device, in place, and return it."""
        if self._slot_counts is not None:
            self._slot_counts.move_to(device)
        if self._buffers is not None:
            self._buffers.map_tensors(lambda tensor: tensor.to(device))
        if self.memory is not None:
            self.memory = self.memory.map(lambda tensor: tensor.to(device))
        return self

    def store_memory(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> ProjectedMemory:
        """Store the projected keys and values of the memory for all steps of a cross-attention.

        Args:
            k: (batch, kv_heads, keys, head_dim).
            v: (batch, kv_heads, keys, value_dim).
            lengths: (batch,), number of keys per sample that are not padding; None = all.

        Raises:
            ArgumentError: the cache is not empty, or a gradient would flow through int8.
        """
        if self._slot_counts is not None:
            raise ArgumentError(
                "The cache is in use.", "Use a separate cache for each attention, or call cache.reset() to start over."
            )
        self._slot_counts = SlotCounts(len(k), k.device, in_graphs=self.capacity is not None)
        if self.dtype == "int8":
            reject_int8_gradient(k, v)
            (k, k_scales), (v, v_scales) = quantise(k.contiguous()), quantise(v.contiguous())
            self.memory = ProjectedMemory(k, v, lengths, Int8Scales(k_scales[..., 0], v_scales[..., 0]))
        else:
            self.memory = ProjectedMemory(k.contiguous(), v.contiguous(), lengths)
        return self.memory

    def advance(self, queries: int, *, lengths: Sequence[int] | Tensor | None = None) -> int | Tensor:
        """Count the queries of a cross-attention call, and return the position of its first query.

        Args:
            queries: number of queries of each sample.
            lengths: (batch,), number of queries of each sample that are not padding; None = all.

        Raises:
            ArgumentError: the cache is empty.
        """
        slot_counts = self._slot_counts_or_raise("Advance")
        counts = None
        if lengths is not None:
            counts = check_token_counts(lengths, batch=slot_counts.batch, limit=queries, device=slot_counts.device)
        start = slot_counts.add_tokens(queries, counts)
        if not torch.compiler.is_compiling():
            self._last_position = PositionInSequence(self._sequence, 0, counts, start)
        return start

    def check_same_memory(self, memory: Tensor) -> None:
        """Reject a memory (batch, keys, features) whose batch or number of keys differs from the stored memory."""
        if self.memory is None or memory.shape[:2] == (len(self.memory.k), self.memory.k.shape[2]):
            return
        raise ShapeError(
            f"memory has {memory.shape[0]} samples of {memory.shape[1]} keys, and the cache holds a memory of "
            f"{len(self.memory.k)} samples of {self.memory.k.shape[2]} keys.",
            "Give the same memory at each step, or call cache.reset() to start over.",
        )

    def check_same_heads(self, layer: nn.Module) -> None:
        """Reject a call of a layer with other heads switched off than in the calls that filled the cache.

        Raises:
            ModelError: other heads are switched off.
        """
        if not head_changes.active_changes and not self._changes_when_filled:
            return
        states = head_changes.change_states_of(layer)
        if self._slot_counts is None and self.memory is None:
            self._changes_when_filled = states or frozenset()
        else:
            head_changes.check_cache_states(self._changes_when_filled, states)

    def check_window_fits_mask(self, mask: Mask) -> None:
        """Reject a mask that shows keys outside the window of the cache, because the cache drops these keys.

        Raises:
            MaskError: the mask has no bounded lookback, its lookback exceeds the window, or it is a tensor with a
                column per key.

        >>> from multihead import masks
        >>> KeyValueCache(window=8).check_window_fits_mask(masks.Causal() & masks.Window(8))
        """
        if self.window is None:
            return
        lookback = mask.lookback
        if lookback is None or lookback > self.window:
            seen = "all earlier keys" if lookback is None else f"the last {lookback} keys"
            raise MaskError(
                f"{mask!r} shows {seen}, and the cache keeps a window of {self.window} keys.",
                f"Combine it with & masks.Window({self.window}), or use KeyValueCache(), which keeps all keys.",
            )
        if mask.has_key_axis:
            raise MaskError(
                f"{mask!r} has a column per key, and a cache with a window drops keys.",
                "Use KeyValueCache(), which keeps all keys.",
            )

    def _slot_counts_or_raise(self, verb: str) -> SlotCounts:
        if self._slot_counts is None:
            raise ArgumentError("The cache is empty.", f"{verb} it after the first call.")
        return self._slot_counts


class _RestoreOnError:
    """Context manager that restores a cache if an exception leaves the context."""

    # This is a class, because it is faster than @contextmanager, and every decoding step enters this context.
    def __init__(self, cache: KeyValueCache) -> None:
        self.cache, self.state = cache, cache._snapshot()  # noqa: SLF001 - a part of the cache

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.cache._restore(self.state)  # noqa: SLF001 - a part of the cache
