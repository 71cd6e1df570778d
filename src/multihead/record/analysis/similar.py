"""Find the heads whose attention weights are most similar to the weights of a given head.

`Record.changed` compares all queries by default; `nearest` and the viewer compare as many queries as take a second or
two. `Record.changed` and `nearest` compute the same divergence, a tile at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.errors.arguments import check_integer
from multihead.probes.similarity import entropy_of
from multihead.record.layer import LayerRecord
from multihead.record.sample import SampleRecord
from multihead.record.table import HeadList, HeadOfLayer

DEFAULT_COMPARED_WEIGHTS = 1 << 25
"""Number of weights of all heads that are compared by default, which takes 1 to 2 seconds."""

MAX_WEIGHTS_PER_TILE = 1 << 21  # largest number of attention weights of one layer in memory


@dataclass(frozen=True, repr=False)
class NearHead(HeadOfLayer):
    """A head, and the divergence between its weights and the weights of a given head.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
        divergence: Jensen-Shannon divergence, nats, from 0 (equal weights) to ln 2 (no key in common), averaged over
            the queries that see a key and have finite weights in both heads; NaN if there are no such queries.
        queries: number of queries that were compared.
    """

    divergence: float
    queries: int

    def __str__(self) -> str:
        """Return one line, such as "L18 H6: 0.041 nats"."""
        return f"L{self.layer} H{self.head}: {self.divergence:.3f} nats"

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table: heading -> text."""
        return self.place_cells() | {"divergence (nats)": f"{self.divergence:.3f}"}


def nearest(
    layers: Sequence[LayerRecord], layer: int, head: int, *, top: int = 5, sample: int = 0, queries: int | None = None
) -> HeadList[NearHead]:
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
    rows = evenly_spaced_queries(one.num_queries, affordable_queries(cells) if queries is None else queries)
    found = [
        NearHead(number, index, known[number].name, float(value), len(range(*rows.indices(one.num_queries))))
        for number, each in alike.items()
        for index, value in enumerate(divergence(one, each, rows, head=head))
        if (number, index) != (layer, head)
    ]
    # NaN has no order, so heads without finite weights are sorted last explicitly.
    return HeadList(sorted(found, key=lambda each: (math.isnan(each.divergence), each.divergence))[:top])


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
    """Whether two samples have equal numbers and positions of queries and keys, and both or neither cross-attention."""
    compared = attrgetter("num_queries", "num_keys", "query_start", "cross_attention")
    return bool(compared(one) == compared(other))


def affordable_queries(cells_per_query: int) -> int:
    """Return how many queries can be compared in 1 to 2 seconds."""
    return max(16, DEFAULT_COMPARED_WEIGHTS // max(cells_per_query, 1))


def evenly_spaced_queries(length: int, most: int) -> slice:
    """Return a slice of at most `most` evenly spaced queries, which includes the last one.

    >>> evenly_spaced_queries(10, 4), evenly_spaced_queries(10, 99)
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
    """Compute the Jensen-Shannon divergence of heads of two layers in tiles: (heads of `other`,) float64, nats.

    Args:
        one: a sample of one layer.
        other: a sample of another layer or another run, with as many queries and keys.
        rows: which queries.
        head: head of `one` that is compared with every head of `other`; None compares heads of equal index.
        progress: called with the number of queries of each tile.

    Source: Lin, "Divergence measures based on the Shannon entropy", 1991: H((p + q) / 2) - (H(p) + H(q)) / 2.
    """
    total = torch.zeros(other.num_heads, dtype=torch.float64)
    count = torch.zeros_like(total)
    intervals = [each.intervals() for each in (one, other)]
    places = range(*rows.indices(one.num_queries))
    step = max(1, MAX_WEIGHTS_PER_TILE // max(other.num_heads * one.num_keys, 1))
    for first in range(0, len(places), step):
        part = places[first : first + step]
        chosen = slice(part.start, part.stop, part.step)
        end = max(one.num_keys if each is None else int(each[1][chosen].max()) for each in intervals)
        seen = slice(0, end)  # keys from `end` on are hidden from all queries of the tile
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
    """Append the weight on a learned sink, 1 - sum of the weights, as the weight of one more key."""
    return torch.cat([weights, (1 - weights.sum(-1, keepdim=True)).clamp(min=0)], -1)
