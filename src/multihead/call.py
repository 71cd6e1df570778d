"""What one attention call asks for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from multihead.masks import Mask
from multihead.parts import Part
from multihead.scores.bias import Bias
from multihead.shapes import AttentionShape


class Continued(NamedTuple):
    """Where a call stands in a text that goes on from call to call.

    Fields:
        text: what identifies the text, the same object in all calls that go on from one another.
        key_start: how many keys of the text stand before the call's first one, an int or (batch,).
        lengths: (batch,), how many queries of each sample are real; None = all.
        position: where the first query stands among all queries, an int or (batch,), if the keys are those of another
            sequence; else None.
    """

    text: object
    key_start: int | Tensor = 0
    lengths: Tensor | None = None
    position: int | Tensor | None = None


@dataclass(frozen=True, eq=False)
class AttentionRequest:
    """Everything that decides an attention call's result, checked and resolved.

    scores = softcap(scale * q . k) + bias where the mask shows the key; a sink takes part in the softmax.

    Fields:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        v: (batch, kv_heads, keys, value_dim).
        shape: their sizes.
        mask: which keys each query may see.
        scale: what q . k is multiplied by.
        query_start: where the first query stands among the keys; a tensor has one a sample.
        bias: added to the scores, a tensor broadcasting to (batch, heads, queries, keys) or a Relative; or None.
        softcap: c of c * tanh(scores / c), or None.
        sinks: (heads,), a learned logit a head that takes weight and gives no value, or None.
        dropout: share of the weights dropped.
        wanted: parts of statistics that a listener wants the kernel to measure on its way.
        owner: the module that asked, or None.
        packed_lengths: (samples,), where the one row of the batch holds packed samples; else None.
        continued: where the call stands in a text that a cache keeps; else None.
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
    owner: nn.Module | None = None
    packed_lengths: Tensor | None = None
    continued: Continued | None = None


@dataclass(frozen=True, eq=False)
class Attended:
    """What a kernel gives back.

    Fields:
        output: (batch, heads, queries, value_dim), in the dtype of q.
        logsumexp: (batch, heads, queries), float32 (float64 for float64), nats; -inf where no key is seen.
        statistics: those of the wanted parts that the kernel measured.
    """

    output: Tensor
    logsumexp: Tensor
    statistics: dict[Part, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call that has run: what was asked, and what came of it."""

    request: AttentionRequest
    attended: Attended


@dataclass(frozen=True)
class Work:
    """What a kernel will do for a request.

    Fields:
        cells: scores it computes, over batch and heads.
        memory: bytes it holds at its peak beside q, k and v, gradients not counted.
    """

    cells: int
    memory: int
