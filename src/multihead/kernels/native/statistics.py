"""The parts of statistics that the native kernel measures while it computes, or in a second pass over q and k."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import first_keys, first_seen
from multihead.kernels.native.call import Job, arguments_of_job, below_autograd, blocks_of_queries, forward, key_sums
from multihead.kernels.parts import Part
from multihead.masks.base import KeyBounds
from multihead.tensors.tracing import is_intercepted

FIRST_KEY: Part = ("first_keys_mass", 1)
SPECIAL_KEYS: Part = ("tokens_mass", "special")
OFFSETS: dict[Part, int] = {("offset_mass", offset): offset for offset in (0, -1, 1)}
# The statistics in the order of STATISTICS in csrc/operator.cpp, the largest key last, each with the parts of its rows.
_ROWS: dict[str, tuple[Part, ...]] = {
    **{name: (name,) for name in ("entropy", "largest_weight", "mean_distance", "distance_spread")},
    "offset_weights": tuple(OFFSETS),
    "target_key_weight": (FIRST_KEY,),
    "special_keys_weight": (SPECIAL_KEYS,),
    "largest_key": ("largest_key",),
}
_AT_TARGET, _AT_SPECIAL = 32, 64
ONE_PASS: frozenset[Part] = frozenset(part for parts in _ROWS.values() for part in parts)
SECOND_PASS: frozenset[Part] = frozenset({"received", "pooled_map"})


# Of cached plans, by their bounds, with the lengths of the samples.
_FIRST_KEYS_OF_PACKED: WeakKeyDictionary[KeyBounds, tuple[Tensor, Tensor]] = WeakKeyDictionary()


class Measured(NamedTuple):
    """Statistics that an operator returns.

    Attributes:
        statistics: their sum of powers of 2, an argument of the operators.
        parts: the part that each row of the result is, None for one that is not wanted; the largest key is the last.
    """

    statistics: int
    parts: tuple[Part | None, ...]

    def results(self, measured: Tensor, largest_key: Tensor) -> dict[Part, Tensor]:
        """Return the parts, (batch, heads, queries) each, from the last two results of an operator."""
        found: dict[Any, Tensor] = dict(zip(self.parts, (*measured.unbind(), largest_key), strict=False))
        found.pop(None, None)
        return found


@lru_cache(maxsize=256)
def measured(wanted: frozenset[Part], *, special: bool = False, packed: bool = False) -> Measured:
    """Return those of the wanted parts that one pass measures.

    Args:
        wanted: any parts.
        special: whether special keys are known.
        packed: whether each packed sample has a first key of its own. These keys are passed as special keys, of which
            each query sees only that of its own sample.
    """
    rows = dict(_ROWS)
    if packed:
        rows |= {"target_key_weight": (), "special_keys_weight": (FIRST_KEY,)}
    elif not special:
        rows["special_keys_weight"] = ()
    statistics, parts = 0, []
    for bit, of_name in enumerate(rows.values()):
        if wanted.intersection(of_name):
            statistics |= 1 << bit
            parts += [part if part in wanted else None for part in of_name]
    return Measured(statistics, tuple(parts))


def wanted_of(
    request: AttentionRequest, bounds: KeyBounds, wanted: Collection[Part], special_keys: Tensor | None = None
) -> tuple[Measured, tuple[Any, ...]]:
    """Return those of the wanted parts that one pass measures, and the arguments of `attention` after `v_scales`.

    Without special_keys, (batch, keys) bool, SPECIAL_KEYS is left out.
    """
    batch = request.shape.batch
    packed = request.packed_lengths is not None and special_keys is None and FIRST_KEY in wanted
    found = measured(frozenset(wanted), special=special_keys is not None, packed=packed)
    start: int | Tensor | None = request.query_start
    if isinstance(start, int):
        start = torch.full((batch,), start, device="cpu") if start else None
    first = None
    if found.statistics & _AT_TARGET:
        first = first_keys(request, bounds)
        first = first if len(first) == batch else first.repeat(batch)
    special = _first_keys_of_packed(request, bounds) if packed else special_keys
    return found, (found.statistics, start, first, special if found.statistics & _AT_SPECIAL else None)


def _first_keys_of_packed(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return marks of the first key that some query of each packed sample sees: (1, keys) bool."""
    assert request.packed_lengths is not None
    found = _FIRST_KEYS_OF_PACKED.get(bounds) if request.bias is None else None  # a bias is no part of a plan
    if found is not None and torch.equal(found[0], request.packed_lengths):
        return found[1]
    marks = _marks_of_packed(request.packed_lengths, first_seen(request, bounds)[0], request.shape.key_length)
    if request.bias is None and not is_intercepted():
        _FIRST_KEYS_OF_PACKED[bounds] = request.packed_lengths.clone(), marks
    return marks


def _marks_of_packed(packed_lengths: Tensor, first: Tensor, keys: int) -> Tensor:
    """Mark the first key of each sample, (1, keys) bool, given that of each query, (queries,)."""
    lengths = packed_lengths.cpu().numpy()  # NumPy starts faster than torch
    begin = (lengths.cumsum() - lengths)[lengths > 0]
    marks = np.zeros((1, keys + 1), dtype=bool)  # the last one is for samples that see no key
    if len(begin):
        marks[0, np.minimum.reduceat(first.cpu().numpy(), begin)] = True
    return torch.from_numpy(marks[:, :keys])


def one_pass(
    request: AttentionRequest, bounds: KeyBounds, parts: Collection[Part], special_keys: Tensor | None
) -> tuple[Tensor, dict[Part, Tensor]]:
    """Measure some parts of ONE_PASS and the logsumexp, (batch, heads, queries) each, by a forward pass without values.

    The dropout of the request is ignored; special_keys is (batch, keys) bool, or None.
    """
    found, arguments = wanted_of(request, bounds, parts, special_keys)
    _, logsumexp, *results = forward(Job(request, bounds, with_values=False), arguments)
    return logsumexp, found.results(*results)


def second_pass(
    request: AttentionRequest, bounds: KeyBounds, logsumexp: Tensor, *, cell: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of the weights that each key, and each cell of a map, receives from all queries.

    The dropout of the request is ignored. Rows whose logsumexp, (batch, heads, queries) float32, is -inf or NaN count
    as 0. `cell` has the queries and keys of a cell of the map; None computes no map.

    Returns:
        The sums per key (batch, heads, keys), and per cell (batch, heads, row cells, key cells) or None.
    """
    sums: Tensor | None = None
    maps: list[Tensor] = []
    job = Job(request, bounds, with_values=False)
    with below_autograd():
        for rows in blocks_of_queries(request, bounds, step=1 if cell is None else cell[0]):
            part, map_part = key_sums(rows.of(logsumexp), *(cell or (0, 0)), *arguments_of_job(job, rows))
            sums = part if sums is None else sums.add_(part)
            maps.append(map_part)
    assert sums is not None
    return sums, None if cell is None else torch.cat(maps, 2)
