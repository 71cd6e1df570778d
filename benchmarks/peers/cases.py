"""The cases that our layer, or our attention alone, and the peers compute, and the inputs of a case."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from benchmarks.native.contenders import DOCUMENTS, DTYPES

EMBED, HEADS = 512, 8
# The largest difference from float64 that is rounding, relative to the largest value.
TOLERANCE = {"fp32": 2e-5, "bf16": 3e-2}
LONG = 2048  # queries
STEPS = 127  # tokens that a cache can store after the keys it starts with

Kind = Literal["full", "ragged", "documents", "window", "cross", "decoding", "causal"]


@dataclass(frozen=True)
class Case:
    """One call of an attention layer, or of attention alone.

    Attributes:
        name: what is computed.
        kind: which keys each query sees, and where they come from.
        batch: number of samples.
        queries: tokens per sample, with padding.
        keys: in cross-attention, tokens per sample of the memory; in decoding, keys that the cache starts with.
        parts: tokens of each sample or document, or the width of the window.
        training: whether the backward pass is included.
        alone: whether attention is computed without the four projections.
        dtypes: the dtypes in which it is compared.
        least: the smallest median ratio to the best peer that is the target; 0 for the target of most cases.
        rivals: the peers that take part; all if it is empty.
        calls: how many calls are timed together.
        overhead: the unit of the result if the case measures our overhead over its rival: "%" or "microseconds".
    """

    name: str
    kind: Kind
    batch: int
    queries: int
    keys: int = 0
    parts: tuple[int, ...] = ()
    training: bool = False
    alone: bool = False
    dtypes: tuple[str, ...] = tuple(DTYPES)
    least: float = 0.0
    rivals: tuple[str, ...] = ()
    calls: int = 1
    overhead: Literal["", "%", "microseconds"] = ""

    @property
    def hides(self) -> bool:
        """Whether the mask hides keys, so that work can be skipped."""
        return self.kind in ("ragged", "documents", "window", "causal")


class Linear(NamedTuple):
    """A projection, as torch.nn.functional.linear takes it: weight (features out, features in), bias (features out)."""

    weight: Tensor
    bias: Tensor


class Weights(NamedTuple):
    """The four projections, which every contender loads."""

    q: Linear
    k: Linear
    v: Linear
    out: Linear


@dataclass(frozen=True, eq=False)
class Trial:
    """A case with its inputs, which are the same for every contender.

    Attributes:
        case: what is computed.
        heads: number of heads.
        weights: the four projections.
        x: (batch, queries, features).
        memory: (batch, keys, features), in cross-attention.
        held: keys and values that a cache starts with, (batch, heads, keys, head_dim) each.
        alone: k and v of attention without projections, (batch, queries, features) each; then q is x.
        of_output: (batch, queries, features), the gradient of the output, in training.
    """

    case: Case
    heads: int
    weights: Weights
    x: Tensor
    memory: Tensor | None = None
    held: tuple[Tensor, Tensor] | None = None
    alone: tuple[Tensor, Tensor] | None = None
    of_output: Tensor | None = None

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens per sample or document, (parts,)."""
        return torch.tensor(self.case.parts, dtype=torch.int64)

    @cached_property
    def shown(self) -> Tensor | None:
        """The mask, True = visible: (batch or 1, 1, queries or 1, keys), or None if every query sees all keys."""
        query, key = torch.arange(self.case.queries)[:, None], torch.arange(self.case.queries)
        if self.case.kind == "ragged":
            return (key < self.lengths[:, None])[:, None, None]
        if self.case.kind == "documents":
            document = torch.arange(len(self.lengths)).repeat_interleave(self.lengths)
            return (document[:, None] == document)[None, None]
        if self.case.kind == "window":
            return ((key <= query) & (query - key < self.case.parts[0]))[None, None]
        return (key <= query)[None, None] if self.case.kind == "causal" else None

    @property
    def rows(self) -> slice:
        """The queries that are compared with float64: all, or every eighth of a long sequence."""
        return slice(None, None, 8 if self.case.queries > LONG else 1)

    def compared(self, output: Tensor) -> Tensor:
        """Return the tokens without padding, (tokens, features), because the outputs of padding are undefined."""
        if self.case.kind != "ragged":
            return output.flatten(0, 1)
        return output[torch.arange(self.case.queries) < self.lengths[:, None]]


def trial(case: Case, dtype: str, *, embed: int = EMBED, heads: int = HEADS) -> Trial:
    """Draw the inputs of a case, such that scores have a standard deviation of about 1."""
    torch.manual_seed(0)

    def drawn(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size) * scale).to(DTYPES[dtype])

    weights = Weights(*(Linear(drawn(embed, embed, scale=embed**-0.5), drawn(embed, scale=0.1)) for _ in range(4)))
    shape = (case.batch, case.queries, embed)
    held = None
    if case.kind == "decoding":
        k, v = (drawn(case.batch, heads, case.keys, embed // heads) for _ in range(2))
        held = k, v
    return Trial(
        case,
        heads,
        weights,
        drawn(*shape),
        memory=drawn(case.batch, case.keys, embed) if case.kind == "cross" else None,
        held=held,
        alone=(drawn(*shape), drawn(*shape)) if case.alone else None,
        of_output=drawn(*shape) if case.training else None,
    )


HAND_WRITTEN = "hand-written + SDPA"
RAGGED = tuple(torch.linspace(0.1 * 512, 0.9 * 512, 8).long().tolist())

CASES = [
    Case("4 x 128", "full", 4, 128),
    Case("4 x 512", "full", 4, 512),
    Case("1 x 2,048", "full", 1, 2048),
    Case("1 x 8,192", "full", 1, 8192),
    Case("padded, 8 x 512, lengths 10 to 90 %", "ragged", 8, 512, parts=RAGGED),
    Case("8 documents in a row of 2,048", "documents", 1, 2048, parts=DOCUMENTS),
    Case("causal window of 256, 1 x 8,192", "window", 1, 8192, parts=(256,)),
    Case("cross-attention, 4 x 512 queries, 1,024 keys", "cross", 4, 512, keys=1024),
    Case("decoding, one token, a cache of 4,096", "decoding", 1, 1, keys=4096),
    Case("training step, causal, 4 x 512", "causal", 4, 512, training=True),
    Case("attention alone, 1 x 512", "full", 1, 512, alone=True, dtypes=("fp32",), least=1.05, calls=8),
    Case("attention alone, 1 x 2,048", "full", 1, 2048, alone=True, dtypes=("fp32",), least=1.05),
    Case("attention alone, 1 x 4,096", "full", 1, 4096, alone=True, dtypes=("fp32",), least=1.05),
    Case("causal attention alone, 1 x 512", "causal", 1, 512, alone=True, dtypes=("fp32",), least=2.0, calls=8),
    Case("causal attention alone, 1 x 2,048", "causal", 1, 2048, alone=True, dtypes=("fp32",), least=2.0),
    Case("causal attention alone, 1 x 4,096", "causal", 1, 4096, alone=True, dtypes=("fp32",), least=2.0),
    Case("overhead, 4 x 128", "full", 4, 128, rivals=(HAND_WRITTEN,), overhead="%"),
    Case("overhead, one token", "full", 1, 1, rivals=(HAND_WRITTEN,), calls=20, overhead="microseconds"),
]
