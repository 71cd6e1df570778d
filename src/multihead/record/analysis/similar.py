"""Find the heads whose attention weights are nearest to those of a given head.

`Record.changed` compares all queries by default, and the viewer as many as take a second or two, as `nearest` does.
Both run the divergence of `record/analysis/similar.py`, a tile at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.probes.similarity import entropy_of
from multihead.record.layer import LayerRecord
from multihead.record.notebook import OneLine
from multihead.record.sample import SampleRecord

CELLS = 1 << 25
"""Weights compared over all heads if the number of queries is not given: a second or two."""

TILE = 1 << 21  # limit of the weights of one layer that are in memory at once


@dataclass(frozen=True, repr=False)
class NearHead(OneLine):
    """One head and the divergence of its weights from those of the given head.

    Attributes:
        layer: the layer's number.
        head: the head's index in its layer.
        name: the layer's name.
        divergence: Jensen-Shannon divergence, nats, from 0 (the same weights) to ln 2 (no key in common), the mean
            over the queries that see a key and whose weights are finite in both heads; NaN where there is none.
        queries: how many queries were looked at.
    """

    layer: int
    head: int
    name: str
    divergence: float
    queries: int

    def __str__(self) -> str:
        """The head in a line: "L18 H6: 0.041 nats"."""
        return f"L{self.layer} H{self.head}: {self.divergence:.3f} nats"


def nearest(
    layers: Sequence[LayerRecord], layer: int, head: int, *, top: int = 5, sample: int = 0, queries: int | None = None
) -> list[NearHead]:
    """Return the heads whose weights diverge least from those of one head, the nearest first; see `Record.nearest`."""
    check_integer("top", top)
    if queries is not None:
        check_integer("queries", queries)
    known = {each.number: each for each in layers}
    if isinstance(layer, bool) or not isinstance(layer, int) or layer not in known:
        raise ArgumentError(f"There is no layer {layer!r}.", f"Give {describe_layer_numbers(list(known))}.")
    one = known[layer].sample(sample)
    if isinstance(head, bool) or not isinstance(head, int) or not 0 <= head < one.num_heads:
        raise ArgumentError(f"There is no head {head!r}.", f"Give one from 0 to {one.num_heads - 1}.")
    alike = {
        number: each.samples[sample]
        for number, each in known.items()
        if -each.num_samples <= sample < each.num_samples and have_same_texts(each.samples[sample], one)
    }
    cells = one.num_keys * sum(each.num_heads for each in alike.values())
    rows = spaced_queries(one.num_queries, affordable_queries(cells) if queries is None else queries)
    found = [
        NearHead(number, index, known[number].name, float(value), len(range(*rows.indices(one.num_queries))))
        for number, each in alike.items()
        for index, value in enumerate(divergence(one, each, rows, head=head))
        if (number, index) != (layer, head)
    ]
    # NaN has no order, so heads without finite weights are sorted last explicitly.
    return sorted(found, key=lambda each: (math.isnan(each.divergence), each.divergence))[:top]


def describe_layer_numbers(numbers: Sequence[int]) -> str:
    """Describe the layer numbers that a user can choose, for an error message.

    >>> describe_layer_numbers([0, 1, 2]), describe_layer_numbers([17, 18]), describe_layer_numbers([4])
    ('one from 0 to 2', 'one of 17, 18', '4')
    """
    if len(numbers) == 1:
        return str(numbers[0])
    if list(numbers) == list(range(len(numbers))):
        return f"one from 0 to {len(numbers) - 1}"
    return f"one of {', '.join(map(str, numbers))}"


def have_same_texts(one: SampleRecord, other: SampleRecord) -> bool:
    """Whether the queries and keys of two layers are the same texts."""
    return (one.num_queries, one.num_keys, one.query_start, one.crosses) == (
        other.num_queries,
        other.num_keys,
        other.query_start,
        other.crosses,
    )


def affordable_queries(cells_per_query: int) -> int:
    """Return how many queries can be compared in a second or two."""
    return max(16, CELLS // max(cells_per_query, 1))


def spaced_queries(length: int, most: int) -> slice:
    """Choose at most some queries: every n-th, the last among them.

    >>> spaced_queries(10, 4), spaced_queries(10, 99)
    (slice(0, None, 3), slice(0, None, 1))
    """
    step = max(math.ceil(length / most), 1)
    return slice((length - 1) % step, None, step)


def divergence(
    one: SampleRecord,
    other: SampleRecord,
    rows: slice,
    *,
    head: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Return the divergence of heads of two layers, computed tile by tile: (heads of `other`,) float64, nats.

    Args:
        one: one layer on a text.
        other: another one, or the same layer of another run, with as many queries and keys.
        rows: which queries.
        head: the head of the first layer that is compared with each of the other; None compares each with the head of
            the same index.
        progress: called with the number of queries of each tile.

    Source: Lin, "Divergence measures based on the Shannon entropy", 1991: H((p + q) / 2) - (H(p) + H(q)) / 2.
    """
    total = torch.zeros(other.num_heads, dtype=torch.float64)
    count = torch.zeros_like(total)
    intervals = [each.intervals() for each in (one, other)]
    places = range(*rows.indices(one.num_queries))
    step = max(1, TILE // max(other.num_heads * one.num_keys, 1))
    for first in range(0, len(places), step):
        part = places[first : first + step]
        chosen = slice(part.start, part.stop, part.step)
        end = max(one.num_keys if each is None else int(each[1][chosen].max()) for each in intervals)
        seen = slice(0, end)  # later keys have weight 0 for all of these queries
        p = one.weights(head, queries=chosen, keys=seen)
        p = _append_sink_weight(p if head is None else p[None])  # (heads or 1, rows, keys + 1)
        q = _append_sink_weight(other.weights(queries=chosen, keys=seen))  # (heads, rows, keys + 1)
        between = (entropy_of((p + q) / 2) - (entropy_of(p) + entropy_of(q)) / 2).clamp(min=0)
        compared = (p[..., :-1].sum(-1) > 0) & (q[..., :-1].sum(-1) > 0) & between.isfinite()
        total += between.masked_fill(~compared, 0).sum(-1)
        count += compared.sum(-1)
        if progress is not None:
            progress(len(part))
    return total / count


def _append_sink_weight(weights: Tensor) -> Tensor:
    """Append the weight on a learned sink to the weights of the keys, as one more key."""
    return torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], -1)
