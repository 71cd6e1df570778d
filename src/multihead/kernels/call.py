"""The request of an attention call, its result, and the listeners that receive both.

What only listeners need is one field of the request, `origin: CallOrigin` (the layer, packed lengths, the position in a
cached sequence), which is not built without listeners.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from multihead.kernels.parts import Part
from multihead.kernels.quantised import Scales, dequantise
from multihead.masks import Mask
from multihead.scores.bias import Bias, values_of
from multihead.tensors.shapes import AttentionShape
from multihead.tensors.tracing import is_in_backward_pass
from multihead.tensors.undo import Undo

# A bare tuple, because a NamedTuple takes 0.5 microseconds to make, a twentieth of a small call.
AttentionArguments: TypeAlias = (
    "tuple[Mask, Bias | None, float | None, Tensor | None, float | None, float, int | Tensor | str | None]"
)
"""mask, bias, softcap, sinks, scale, dropout and query_start of `functional.attention`, as they were given."""


class PositionInSequence(NamedTuple):
    """Position of this call in a sequence that spans several calls.

    Attributes:
        text: identifies the sequence: the same object in all calls that continue one another.
        key_start: number of keys of the sequence before the first one of this call, an int or (batch,).
        lengths: (batch,), number of queries of each sample that are no padding; None = all.
        position: index of the first query among all queries, an int or (batch,), where the keys are those of another
            sequence; else None.
    """

    text: object
    key_start: int | Tensor = 0
    lengths: Tensor | None = None
    position: int | Tensor | None = None


@dataclass(frozen=True, eq=False)
class CallOrigin:
    """Where a call comes from: listeners read it, and kernels read it only for statistics.

    Attributes:
        layer: the module that made the call.
        packed_lengths: (samples,), tokens per sample, where the one row of the batch holds packed samples; else None.
        continued: where the call stands in the sequence that a cache holds; None without a cache.
        crosses: whether the keys come from another sequence than the queries; None if the layer cannot know.
        fresh: whether the layer computed q and k for this call alone, so that nothing writes to them afterwards.
        real: (batch, queries) bool, False for queries that are padding; None if the layer does not know.
    """

    layer: nn.Module
    packed_lengths: Tensor | None = None
    continued: PositionInSequence | None = None
    crosses: bool | None = None
    fresh: bool = False
    real: Tensor | None = None


class DropoutPlace(NamedTuple):
    """Where a part of a call starts in the whole call, so that the part drops the same weights as the whole call.

    `total_heads` is the number of heads of the whole call; 0 means the number of heads of the part.
    """

    batch_start: int = 0
    head_start: int = 0
    total_heads: int = 0
    query_start: int = 0
    key_start: int = 0


class DropoutPart(NamedTuple):
    """The seed of the whole call and the place of a part in it, which decide the weights that the part drops.

    Only the native kernel computes parts with dropout.
    """

    seed: int
    place: DropoutPlace


@dataclass(frozen=True, eq=False)
class AttentionRequest:
    """Everything that decides the result of an attention call, checked and resolved.

    scores = softcap(scale * q . k) + bias where the mask shows the key; a sink takes part in the softmax.

    Attributes:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        shape: the sizes of q, k and v.
        mask: which keys each query may see.
        scale: factor of q . k.
        query_start: position of the first query among the keys; a tensor has one per sample.
        bias: added to the scores, a tensor broadcasting to (batch, heads, queries, keys) or a RelativeBias; or None.
        softcap: c of c * tanh(scores / c), or None.
        sinks: (heads,), a learned logit per head that takes weight and has no value, or None.
        dropout: share of the weights dropped.
        wanted: the quantities (`parts.PARTS`) that the kernel should measure, because listeners want them.
        origin: where the call comes from, where a layer made it and somebody listens; else None.
        scales: the factors of k and v where these are int8, from a quantised cache; else None.
        part: the place of this call in a larger call whose dropout it repeats; None for a call of its own.
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
    wanted: frozenset[Part] = frozenset()
    origin: CallOrigin | None = None
    scales: Scales | None = None
    part: DropoutPart | None = None

    def with_dequantised_keys(self) -> AttentionRequest:
        """Return the request with int8 k and v converted to the dtype of q."""
        if self.scales is None:
            return self
        dtype = self.shape.dtype
        k, v = dequantise(self.k, self.scales.k, dtype), dequantise(self.v, self.scales.v, dtype)
        return replace(self, k=k, v=v, scales=None)

    @property
    def requires_grad(self) -> bool:
        """Whether some input requires a gradient."""
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        bias = None if self.bias is None else values_of(self.bias)
        return any(tensor is not None and tensor.requires_grad for tensor in (bias, self.sinks))

    @property
    def packed_lengths(self) -> Tensor | None:
        """(samples,), tokens per sample, where the one row of the batch is known to hold packed samples; else None."""
        return None if self.origin is None else self.origin.packed_lengths

    @property
    def continued(self) -> PositionInSequence | None:
        """Position of the call in a sequence that a cache keeps, where it is known; else None."""
        return None if self.origin is None else self.origin.continued


@dataclass(frozen=True, eq=False)
class AttentionResult:
    """The result of a kernel.

    Attributes:
        output: (batch, heads, queries, value_dim), in the dtype of q.
        logsumexp: (batch, heads, queries), float32 (float64 for float64), nats; -inf where no key is seen.
        statistics: the wanted quantities that the kernel measured together with the output.
    """

    output: Tensor
    logsumexp: Tensor
    statistics: dict[Part, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call that has run: its request and its result."""

    request: AttentionRequest
    attended: AttentionResult


@dataclass(frozen=True)
class WorkEstimate:
    """The number of scores that a kernel computes for a request, over batch and heads, and its peak memory in bytes.

    The memory excludes q, k and v, and gradients.
    """

    cells: int
    memory: int


class Listener(Protocol):
    """An object that receives every attention call while it is active."""

    @property
    def wanted(self) -> frozenset[Part]:
        """The quantities (`parts.PARTS`) that a kernel should measure together with the output if it can."""
        ...

    def hear(self, call: AttentionCall) -> None:
        """Receive one call that has run."""
        ...


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
active = _listeners.get  # the listeners, faster than `listeners()`, where no compiler traces the call


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Publish every call in this context, and in no other thread, to a listener."""
    with Undo() as undo:  # a ContextVar's token could not undo it, because contexts that overlap may end in any order
        undo.callback(lambda: _listeners.set(tuple(each for each in _listeners.get() if each is not listener)))
        _listeners.set((*_listeners.get(), listener))
        yield


def listeners() -> tuple[Listener, ...]:
    """Return the active listeners; none inside a compiled graph, which a ContextVar would break."""
    return () if torch.compiler.is_compiling() else _listeners.get()


def wanted_parts() -> frozenset[Part]:
    """Return the union of the quantities (`parts.PARTS`) that the active listeners want."""
    found = frozenset[Part]()
    for listener in listeners():
        found |= listener.wanted
    return found


def publish(call: AttentionCall) -> None:
    """Pass a call to every listener; not again where a backward pass recomputes a checkpointed call."""
    if is_in_backward_pass():
        return
    for listener in listeners():
        listener.hear(call)
