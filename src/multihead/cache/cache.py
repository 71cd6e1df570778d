"""The keys and values of one attention layer, kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.cache.buffer_ops import counts_of
from multihead.cache.buffers import SPARE, Buffers, Held, refuse_unless_alike
from multihead.cache.positions import Progress
from multihead.call import Continued
from multihead.errors import ArgumentError, DtypeError, MaskError, ShapeError, refuse_unless_integer
from multihead.masks import Mask
from multihead.tracing import readable, traced

_HEADS = "(batch, kv_heads, new tokens, head_dim)"


class Memory(NamedTuple):
    """The keys and values of another sequence, projected once.

    Fields:
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        lengths: (batch,), how many of these keys are real; None = all.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> Memory:
        """Return what is made of each tensor."""
        return Memory(change(self.k), change(self.v), None if self.lengths is None else change(self.lengths))

    def __deepcopy__(self, memo: dict[int, object]) -> Memory:
        """Copy it with its gradients, as torch does not."""
        return self.changed(torch.clone)


class KeyValueCache:
    """The keys and values of one attention layer, as they come.

    Without options it grows, doubling its room when it is full. Keys that were handed out never change: later
    tokens are written behind them, and what would be overwritten is copied first. Where gradients are followed,
    keys are joined in new tensors instead, so that gradients are exact through all steps.

    Args:
        capacity: tokens it has room for, allocated once; more are refused. Under `torch.compile` a step of such
            a cache compiles once: keys are handed out whole, with a tensor of lengths.
        window: how many tokens a query looks back on at most, its own counted, as in `masks.Window`; what stands
            further back is forgotten.

    Raises:
        ArgumentError: both are given, or one is no positive integer.

    >>> cache = KeyValueCache()
    >>> held = cache.extend(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))  # a prompt of five tokens
    >>> held = cache.extend(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))  # and one token more
    >>> held.k.shape, held.query_start
    (torch.Size([1, 2, 6, 8]), 5)
    >>> cache
    KeyValueCache(): 6 tokens, 1 sample, 8,320 bytes
    """

    def __init__(self, *, capacity: int | None = None, window: int | None = None) -> None:
        if capacity is not None and window is not None:
            raise ArgumentError(
                f"capacity is {capacity!r} and window is {window!r}.",
                "Give one of them: a cache with a window takes the memory of about two windows.",
            )
        for name, value in (("capacity", capacity), ("window", window)):
            if value is not None:
                refuse_unless_integer(name, value)
        self.capacity, self.window = capacity, window
        self.reset()

    def reset(self) -> None:
        """Forget everything, the memory too; the next call begins anew."""
        self.memory: Memory | None = None
        self._buffers: Buffers | None = None
        self._progress: Progress | None = None  # that of the buffers, or of the queries of a cross-attention
        self._begin_text()

    def _begin_text(self) -> None:
        """Let what comes be another text: it does not go on from all that came."""
        self._text = object()
        self._continued: Continued | None = None

    @property
    def query_start(self) -> int | Tensor:
        """The position of the next token; a tensor (batch,) where samples differ, and in a compiled graph."""
        return 0 if self._progress is None else self._progress.position

    @property
    def length(self) -> int:
        """How many tokens have come, of the longest sample, those forgotten included."""
        start = self.query_start
        return int(start.max()) if isinstance(start, Tensor) else start

    @property
    def lengths(self) -> Tensor:
        """(batch,), int64: how many tokens of each sample have come, those forgotten included."""
        progress = self._progress
        return torch.zeros(0, dtype=torch.int64) if progress is None else progress.each + progress.forgotten

    @property
    def continued(self) -> Continued | None:
        """Where the last call stands in the text, for those who listen; None before it, and in a compiled graph."""
        return None if torch.compiler.is_compiling() else self._continued

    @property
    def nbytes(self) -> int:
        """The memory it holds, bytes."""
        held = () if self._buffers is None else (self._buffers.k, self._buffers.v)
        remembered = () if self.memory is None else (self.memory.k, self.memory.v)
        return sum(tensor.nbytes for tensor in (*held, *remembered))

    def __repr__(self) -> str:
        option = f"window={self.window}" if self.window is not None else ""
        option = f"capacity={self.capacity}" if self.capacity is not None else option
        if self._progress is None:
            return f"KeyValueCache({option}): empty"
        tokens = sorted(set(self.lengths.tolist())) or [0]
        said = f"{tokens[0]} tokens" if len(tokens) == 1 else f"{tokens[0]} to {tokens[-1]} tokens"
        said += "" if self.memory is None else f", a memory of {self.memory.k.shape[2]}"
        batch = self._progress.batch
        return f"KeyValueCache({option}): {said}, {batch} sample{'s' if batch != 1 else ''}, {self.nbytes:,} bytes"

    def extend(self, k: Tensor, v: Tensor, *, lengths: Sequence[int] | Tensor | None = None) -> Held:
        """Append the keys and values of new tokens, and hand out all that their queries may look at.

        Args:
            k: (batch, kv_heads, new tokens, head_dim).
            v: (batch, kv_heads, new tokens, value_dim).
            lengths: (batch,), how many of the new tokens of each sample are real; what lies behind is padding and
                is not kept, whatever it holds. None = all.

        Raises:
            ShapeError, DtypeError: they do not fit each other, or what is held.
            ArgumentError: there is no room left, or a gradient is asked of a cache that is written in place.
        """
        if self.memory is not None:
            raise ArgumentError(
                "The cache remembers another sequence, and was given keys of the text itself.",
                "Give each attention a cache of its own.",
            )
        for name, given in (("k", k), ("v", v)):
            if not isinstance(given, Tensor):
                raise DtypeError(f"{name} is a {type(given).__name__}, and must be a tensor.", f"Give {_HEADS}.")
        buffers = self._buffers
        if buffers is None:
            buffers = self._buffers = Buffers(k, v, capacity=self.capacity, window=self.window)
            self._progress = buffers.progress
        refuse_unless_alike("k", k, buffers.k)
        refuse_unless_alike("v", v, buffers.v)
        if v.shape[2] != k.shape[2]:
            raise ShapeError(f"k has {k.shape[2]} new tokens and v has {v.shape[2]}.", "Give every key its one value.")
        real = None if lengths is None else counts_of(lengths, batch=len(k), most=k.shape[2], device=k.device)
        if real is not None and not traced() and bool((real == k.shape[2]).all()):
            real = None  # no padding after all: samples that were alike stay so
        held = buffers.extend(k, v, real)
        if not torch.compiler.is_compiling():
            self._continued = Continued(self._text, held.key_start, real)
        return held

    def rollback_on_error(self) -> AbstractContextManager[object]:
        """Take back what is appended in this context where it ends in an error, so that a call can be made again."""
        if torch.compiler.is_compiling():
            return nullcontext()
        memory, continued, progress, buffers = self.memory, self._continued, self._progress, self._buffers
        counted = None if progress is None else progress.counted
        held = None if buffers is None else (buffers.k, buffers.v)

        def take_back() -> None:
            self.memory, self._continued, self._progress, self._buffers = memory, continued, progress, buffers
            if progress is not None and counted is not None:
                progress.counted = counted
            if buffers is not None and held is not None:
                buffers.k, buffers.v = held
                buffers.crop(buffers.progress.start)  # what was appended may stand in their last places

        return _IfRefused(take_back)

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Keep the first tokens and take the others back, as speculative decoding does with what it rejects.

        Args:
            length: how many tokens are kept; integers (batch,) say it for each sample. A sample that has fewer
                keeps them all.

        Raises:
            ArgumentError: a length is negative or more than there are, or tokens are forgotten that the next query
                would look back on.
        """
        progress, most = self._progress_or_refusal("Crop"), self.length
        if isinstance(length, int):
            refuse_unless_integer("length", length, least=0)
            if length > most:
                raise ArgumentError(f"length is {length}, and there are {most} tokens.", f"Give at most {most}.")
        else:
            length = counts_of(length, batch=progress.batch, most=most, device=progress.device, name="length")
        places = length - progress.forgotten
        if isinstance(places, Tensor) or not progress.alike:
            places = torch.minimum(progress.each, torch.as_tensor(places, device=progress.device))
        back = 0 if self.window is None else self.window - 1
        needed = torch.as_tensor(places + progress.forgotten).clamp(max=back)
        if bool((torch.as_tensor(places) < needed).any()):
            raise ArgumentError(
                "Tokens are forgotten that the next query would look back on: of a cache with a window the last "
                f"{SPARE} can be taken back.",
                "Take back fewer, or keep all tokens: KeyValueCache().",
            )
        if not isinstance(places, Tensor) and places == progress.longest:
            return
        self._begin_text()
        if self._buffers is None:
            progress.put(places)
        else:
            self._buffers.crop(places)

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Choose samples anew, as beam search does: new sample i goes on from old sample `index[i]`.

        Args:
            index: integers (new batch,), from 0 to the old batch - 1; one may come several times or not at all.

        Raises:
            ArgumentError: there is no such sample, or the cache is empty.
        """
        progress = self._progress_or_refusal("Reorder")
        if isinstance(index, str):
            raise ArgumentError(f"index is {index!r}.", "Give integers, the old sample of each new one.")
        batch, chosen = progress.batch, torch.as_tensor(index, device=progress.device)
        if chosen.dim() != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool:
            raise ArgumentError(f"index is {index!r}.", "Give integers, the old sample of each new one.")
        if readable(progress.device) and not bool(((chosen >= 0) & (chosen < batch)).all()):
            raise ArgumentError(
                f"index is {chosen.tolist()}, and there are {batch} samples.", f"Give numbers from 0 to {batch - 1}."
            )
        self._begin_text()
        progress.choose(chosen)
        if self._buffers is not None:
            self._buffers.change(lambda tensor: tensor.index_select(0, chosen))
        if self.memory is not None:
            self.memory = self.memory.changed(lambda tensor: tensor.index_select(0, chosen))

    def to(self, device: torch.device | str) -> KeyValueCache:
        """Move what is held to a device, in place; returns the cache itself."""
        if self._progress is not None:
            self._progress.move(device)
        if self._buffers is not None:
            self._buffers.change(lambda tensor: tensor.to(device))
        if self.memory is not None:
            self.memory = self.memory.changed(lambda tensor: tensor.to(device))
        return self

    def remember(self, k: Tensor, v: Tensor, lengths: Tensor | None = None) -> Memory:
        """Keep the projected keys and values of another sequence for all steps of a cross-attention.

        Args:
            k: (batch, kv_heads, keys, head_dim).
            v: (batch, kv_heads, keys, value_dim).
            lengths: (batch,), how many of these keys are real; None = all.

        Raises:
            ArgumentError: the cache is in use.
        """
        if self._progress is not None:
            raise ArgumentError("The cache is in use.", "Give each attention a cache of its own, or reset it.")
        self._progress = Progress(len(k), k.device, in_graphs=self.capacity is not None)
        self.memory = Memory(k.contiguous(), v.contiguous(), lengths)
        return self.memory

    def advance(self, queries: int, *, lengths: Sequence[int] | Tensor | None = None) -> int | Tensor:
        """Count queries that bring no keys, as those of cross-attention do, and return the position of the first.

        Args:
            queries: how many queries each sample has.
            lengths: (batch,), how many of them are real; None = all.

        Raises:
            ArgumentError: nothing is remembered.
        """
        progress = self._progress_or_refusal("Advance")
        real = None
        if lengths is not None:
            real = counts_of(lengths, batch=progress.batch, most=queries, device=progress.device)
        start = progress.add(queries, real)
        if not torch.compiler.is_compiling():
            self._continued = Continued(self._text, 0, real, start)
        return start

    def refuse_unless_same_memory(self, memory: Tensor) -> None:
        """Refuse another memory than the one that is remembered: (batch, keys, features)."""
        if self.memory is None or memory.shape[:2] == (len(self.memory.k), self.memory.k.shape[2]):
            return
        raise ShapeError(
            f"memory has {memory.shape[0]} samples of {memory.shape[1]} keys, and the cache remembers "
            f"{len(self.memory.k)} of {self.memory.k.shape[2]}.",
            "Give the same memory at each step, or begin anew: cache.reset().",
        )

    def refuse_unless_remembered(self, mask: Mask) -> None:
        """Refuse a mask that looks back on keys which a cache with a window forgets.

        Raises:
            MaskError: nothing bounds how far it looks back, it looks further than the window, or it is a tensor with
                a column for each key.

        >>> from multihead import masks
        >>> KeyValueCache(window=8).refuse_unless_remembered(masks.Causal() & masks.Window(8))
        """
        if self.window is None:
            return
        reach = mask.lookback
        if reach is None or reach > self.window:
            how_far = "over all keys" if reach is None else f"on {reach} keys"
            raise MaskError(
                f"{mask!r} looks back {how_far}, and the cache keeps a window of {self.window}.",
                f"Join it with masks.Window({self.window}), or keep all keys: KeyValueCache().",
            )
        if mask.has_key_axis:
            raise MaskError(
                f"{mask!r} has a column for each key, and a cache with a window forgets keys.",
                "Keep all keys: KeyValueCache().",
            )

    def _progress_or_refusal(self, verb: str) -> Progress:
        if self._progress is None:
            raise ArgumentError("The cache is empty.", f"{verb} it after the first call.")
        return self._progress


class _IfRefused:
    """Do something where a context ends in an error."""

    # A class, and no generator: each step of a decoding goes through it.
    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.done()
