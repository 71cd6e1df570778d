"""The request of an attention call, its result, what surrounds it, and the listeners that receive both.

Whether values may be read and who listens is found once per call, by `find_surroundings`, and passed on as one value,
which becomes an attribute of the request. The data that only listeners need (the layer, the position in a cached
sequence) is one field of the request, `origin: CallOrigin`, which is not built without listeners.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from multihead.kernels.parts import PartName
from multihead.kernels.quantised import Int8Scales, dequantise
from multihead.masks import Mask
from multihead.scores.bias import Bias, dense_bias, values_of
from multihead.tensors.shapes import AttentionShape
from multihead.tensors.tracing import (
    has_tracer_or_mode,
    is_in_backward_pass,
    is_intercepted,
    is_traced,
    is_transformed,
)
from multihead.tensors.undo import Undo

# Not a NamedTuple: creating one takes 0.5 microseconds, a twentieth of the time of a small attention call.
AttentionArguments: TypeAlias = (
    "tuple[Mask, Bias | None, float | None, Tensor | None, float | None, float, int | Tensor | str | None]"
)
"""The arguments mask, bias, softcap, sinks, scale, dropout and query_start of `functional.attention`, unchecked."""


class CachedSequence:
    """The identity of the sequences in a cache, the same in all calls that continue them."""


class PositionInSequence(NamedTuple):
    """Position of a call in a sequence that spans several calls (decoding with a cache).

    Attributes:
        sequence: the identity of the sequence.
        key_start: number of keys of the sequence before the first key of this call, an int or (batch,).
        lengths: (batch,), number of queries per sample that are not padding; None = all.
        first_query: in cross-attention, index of this call's first query among all queries of the sequence, an int or
            (batch,); else None.
    """

    sequence: CachedSequence
    key_start: int | Tensor = 0
    lengths: Tensor | None = None
    first_query: int | Tensor | None = None


@dataclass(frozen=True, eq=False)
class KeyPlaces:
    """Position and padding of the keys of an attention call of a Hugging Face model, read from its mask.

    Attributes:
        offset: position of the first key in the sequence, tokens; more than 0 where a cache dropped keys.
        padding: (batch, keys) bool, True = no padding; None where padding is unknown.
    """

    offset: int = 0
    padding: Tensor | None = None


@dataclass(frozen=True, eq=False)
class InputPlaces:
    """Where the tokens of a call are in the padded input of its layer, which left padding out or moved it to the end.

    Attributes:
        index: (tokens,) int64, index of each token in the flattened (batch, length) of the input.
        shape: batch and length of the input.
        padded_left: whether padding comes before the tokens in the input.
    """

    index: Tensor
    shape: tuple[int, int]
    padded_left: bool = False


@dataclass(frozen=True, eq=False)
class CallOrigin:
    """The origin of a call, which listeners read.

    Attributes:
        layer: the module that made the call.
        position_in_sequence: position of the call in the sequence of a cache; None without a cache.
        is_cross_attention: whether keys and queries come from different sequences (cross-attention); None if unknown.
        qk_computed_for_call: whether the layer computed q and k for this call alone, so that nothing writes to them
            afterwards.
        unpadded_queries: (batch, queries) bool, False for queries that are padding; None if unknown.
        input_places: where the tokens are in the input of the layer, if it left padding out or moved it to the end.
        key_places: position and padding of the keys if a Hugging Face model makes the call; else None.
    """

    layer: nn.Module
    position_in_sequence: PositionInSequence | None = None
    is_cross_attention: bool | None = None
    qk_computed_for_call: bool = False
    unpadded_queries: Tensor | None = None
    input_places: InputPlaces | None = None
    key_places: KeyPlaces | None = None


class Listener(Protocol):
    """An object that receives every attention call while it is active."""

    @property
    def requested_statistics(self) -> frozenset[PartName]:
        """The statistics (see `parts.PARTS`) that a kernel should measure with the output, if it can."""
        ...

    def receive(self, call: AttentionCall) -> None:
        """Receive a finished call."""
        ...


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
active_listeners = _listeners.get  # faster than `listeners()`; not for code that a compiler traces


class Surroundings(NamedTuple):
    """What runs around an attention call: tracers, modes and transforms of PyTorch, and listeners.

    Attributes:
        intercepted: whether PyTorch intercepts operations at all; False if the next three are False.
        traced: whether values of tensors must not be read, see `tracing.is_traced`.
        recorded: whether operations are recorded, so that a kernel must run as an operator, see
            `tracing.has_tracer_or_mode`.
        transformed: whether a transform of torch.func runs the call, see `tracing.is_transformed`.
        listeners: the active listeners; none for a traced call, whose tensors have no values for them.
    """

    intercepted: bool = False
    traced: bool = False
    recorded: bool = False
    transformed: bool = False
    listeners: tuple[Listener, ...] = ()


NOTHING_AROUND = Surroundings()


def find_surroundings() -> Surroundings:
    """Return what runs around an attention call that begins now."""
    intercepted = is_intercepted()
    if intercepted:
        traced = is_traced()
        heard_by = () if traced else listeners()
        return Surroundings(intercepted, traced, has_tracer_or_mode(), is_transformed(), heard_by)
    active = active_listeners()
    return Surroundings(listeners=active) if active else NOTHING_AROUND


class DropoutOffset(NamedTuple):
    """Start of a slice of a call within the whole call, so that the slice drops the same weights as the whole call.

    `total_heads` is the number of heads of the whole call; 0 = as many as in the slice.
    """

    batch_start: int = 0
    head_start: int = 0
    total_heads: int = 0
    query_start: int = 0
    key_start: int = 0


class DropoutSlice(NamedTuple):
    """The seed of the whole call and the start of a slice in it, which determine the weights that the slice drops."""

    seed: int
    offset: DropoutOffset


@dataclass(frozen=True, eq=False)
class AttentionRequest:
    """Checked arguments of an attention call, with defaults filled in.

    scores = softcap(scale * q . k) + bias for visible keys; a sink takes part in the softmax.

    Attributes:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        shape: the sizes of q, k and v.
        mask: which keys each query may see.
        scale: factor of q . k.
        query_start: position of the first query among the keys, an int or (batch,).
        bias: added to the scores, a tensor broadcasting to (batch, heads, queries, keys) or a RelativeBias; or None.
        softcap: c of c * tanh(scores / c), or None.
        sinks: (heads,), a logit per head that takes part in the softmax and has no value, or None.
        dropout: fraction of the attention weights dropped.
        requested_statistics: the statistics (see `parts.PARTS`) that listeners need and the kernel should measure.
        origin: the layer that made the call and its context, if there are listeners; else None.
        scales: the dequantisation factors of int8 k and v from a quantised cache; else None.
        dropout_slice: if this call is a slice of a larger call with dropout, its seed and start; else None.
        surroundings: what runs around the call, found once, before the request is made. Code that reads a stored
            request after its call, as a backward pass does, must find it anew.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    shape: AttentionShape
    mask: Mask
    scale: float
    query_start: int | Tensor = 0
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    requested_statistics: frozenset[PartName] = frozenset()
    origin: CallOrigin | None = None
    scales: Int8Scales | None = None
    dropout_slice: DropoutSlice | None = None
    surroundings: Surroundings = field(default_factory=find_surroundings)

    def with_tensors(self, q: Tensor, k: Tensor, v: Tensor, **changes: Any) -> AttentionRequest:
        """Return the request with other q, k and v, their shape, and other changed attributes."""
        return replace(self, q=q, k=k, v=v, shape=AttentionShape.from_tensors(q, k, v), **changes)

    def as_listeners_receive_it(self) -> AttentionRequest:
        """Return the request with the statistics that its listeners want, and without the listeners.

        Listeners store requests, and a stored request would keep them alive.
        """
        around = self.surroundings
        wanted = frozenset[PartName]().union(*(listener.requested_statistics for listener in around.listeners))
        return replace(self, requested_statistics=wanted, surroundings=around._replace(listeners=()))

    def with_dequantised_keys(self) -> AttentionRequest:
        """Return the request with int8 k and v converted to the dtype of q."""
        if self.scales is None:
            return self
        dtype = self.shape.dtype
        k, v = dequantise(self.k, self.scales.k, dtype), dequantise(self.v, self.scales.v, dtype)
        return replace(self, k=k, v=v, scales=None)

    @property
    def bias_values(self) -> Tensor | None:
        """The tensor of the bias: the values of a RelativeBias, or the dense bias itself; None without a bias."""
        return None if self.bias is None else values_of(self.bias)

    @property
    def dense_bias(self) -> Tensor | None:
        """The bias as a tensor broadcasting to (batch, heads, queries, keys); None without a bias."""
        return None if self.bias is None else dense_bias(self.bias, self.shape.query_length, self.shape.key_length)

    @property
    def qkv_need_gradient(self) -> bool:
        """Whether gradients are enabled, and q, k or v requires one."""
        return torch.is_grad_enabled() and (self.q.requires_grad or self.k.requires_grad or self.v.requires_grad)

    @property
    def needs_gradient(self) -> bool:
        """Whether gradients are enabled, and q, k, v, bias or sinks require one."""
        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        return any(term is not None and term.requires_grad for term in (self.bias_values, self.sinks))

    @property
    def known_origin(self) -> CallOrigin:
        """The origin of the call, which every call that a listener or a change of heads receives from a layer has."""
        assert self.origin is not None
        return self.origin

    @property
    def position_in_sequence(self) -> PositionInSequence | None:
        """Position of the call in the sequence of a cache; None without a cache or if unknown."""
        return None if self.origin is None else self.origin.position_in_sequence


@dataclass(frozen=True, eq=False)
class AttentionResult:
    """The output and the logsumexp of an attention call, and measured statistics.

    Attributes:
        output: (batch, heads, queries, value_dim), in the dtype of q.
        kernel_logsumexp: the logsumexp as the kernel wrote it.
        statistics: the statistics of `request.requested_statistics` that the kernel measured with the output.
        head_factors: (batch, heads, queries), the factor by which each head's own output was changed, NaN where another
            vector replaced it; None if nothing changed it (`kernels/head_changes.py`).
        finish: returns the logsumexp from that of a kernel that writes inf for a query that sees a NaN, or anything for
            one that sees no key; None if the kernel writes NaN and -inf.

    >>> AttentionResult(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3)).statistics
    {}
    """

    output: Tensor
    kernel_logsumexp: Tensor
    statistics: dict[PartName, Tensor] = field(default_factory=dict)
    head_factors: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def logsumexp(self) -> Tensor:
        """(batch, heads, queries), float32 (float64 for float64), nats; -inf for a query that sees no key."""
        return self.kernel_logsumexp if self.finish is None else self._finished

    @cached_property
    def _finished(self) -> Tensor:
        """The logsumexp, made when it is read: most callers read the output alone."""
        assert self.finish is not None
        with torch.set_grad_enabled(self.kernel_logsumexp.requires_grad):
            return self.finish(self.kernel_logsumexp)


def concatenate_queries(results: Sequence[AttentionResult]) -> AttentionResult:
    """Concatenate the outputs and logsumexps of consecutive blocks of queries; a single result is returned as it is."""
    if len(results) == 1:
        return results[0]
    outputs, logsumexps = zip(*((result.output, result.logsumexp) for result in results), strict=True)
    return AttentionResult(torch.cat(outputs, 2), torch.cat(logsumexps, 2))


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """A finished attention call: its request and its result."""

    request: AttentionRequest
    result: AttentionResult


@dataclass(frozen=True)
class WorkEstimate:
    """Work of a kernel in one call.

    Attributes:
        computed_cells: number of scores (query, key) that the kernel computes, over batch and heads.
        extra_memory_bytes: peak memory of the kernel, bytes.

    >>> WorkEstimate(computed_cells=2 * 8 * 100 * 100, extra_memory_bytes=4096).computed_cells
    160000
    """

    computed_cells: int
    extra_memory_bytes: int


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Pass every attention call of this thread to a listener while in this context."""
    with Undo() as undo:  # not a ContextVar token, because overlapping contexts may end in any order
        undo.add_step(lambda: _listeners.set(tuple(each for each in _listeners.get() if each is not listener)))
        _listeners.set((*_listeners.get(), listener))
        yield


@contextmanager
def without_listeners() -> Iterator[None]:
    """Pass no attention call of this thread to the listeners that are active now, while in this context."""
    with Undo() as undo:
        undo.set_variable(_listeners, ())
        yield


def listeners() -> tuple[Listener, ...]:
    """Return the active listeners; none while torch.compile traces, because a ContextVar would break the graph."""
    return () if torch.compiler.is_compiling() else active_listeners()


def publish(call: AttentionCall, receivers: tuple[Listener, ...]) -> None:
    """Pass a call to the listeners of its request, unless a backward pass recomputes it (checkpointing)."""
    if is_in_backward_pass():
        return
    for listener in receivers:
        listener.receive(call)
