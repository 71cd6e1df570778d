"""Statistics that the native kernel measures with the output in one pass, or in a second pass over q and k."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import first_key_of_queries, first_key_of_samples
from multihead.kernels.native.call import (
    OperatorCall,
    below_autograd,
    forward,
    iterate_query_blocks,
    key_sums,
    operator_arguments,
)
from multihead.kernels.parts import Part
from multihead.masks.base import KeyBounds
from multihead.tensors.tracing import is_intercepted

FIRST_KEY: Part = ("first_keys_mass", 1)
SPECIAL_KEYS: Part = ("tokens_mass", "special")
OFFSETS: dict[Part, int] = {("offset_mass", offset): offset for offset in (0, -1, 1)}
# Each statistic of the operator, in the order of STATISTICS in csrc/operator.cpp, and the parts that its rows hold.
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


# For each cached plan: the lengths of the packed samples, and the marks of their first keys.
_FIRST_KEYS_OF_PACKED: WeakKeyDictionary[KeyBounds, tuple[Tensor, Tensor]] = WeakKeyDictionary()


class OperatorStatistics(NamedTuple):
    """The statistics that one call of an operator measures.

    Attributes:
        statistics: the sum of their flags (powers of 2), an argument of the operators.
        parts: the quantity in each row of the result, or None for a row that is not wanted; the largest key is last.
    """

    statistics: int
    parts: tuple[Part | None, ...]

    def results(self, measured: Tensor, largest_key: Tensor) -> dict[Part, Tensor]:
        """Name the last two results of an operator: quantity -> (batch, heads, queries)."""
        found: dict[Any, Tensor] = dict(zip(self.parts, (*measured.unbind(), largest_key), strict=False))
        found.pop(None, None)
        return found


@lru_cache(maxsize=256)
def statistics_of_one_pass(
    wanted: frozenset[Part], *, special: bool = False, packed: bool = False
) -> OperatorStatistics:
    """Select the wanted quantities that one pass measures.

    Args:
        wanted: any quantities of `parts.PARTS`; others than those of ONE_PASS are left out.
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
    return OperatorStatistics(statistics, tuple(parts))


def select_wanted_statistics(
    request: AttentionRequest, bounds: KeyBounds, wanted: Collection[Part], special_keys: Tensor | None = None
) -> tuple[OperatorStatistics, tuple[Any, ...]]:
    """Select the wanted quantities that one pass measures; return them and the operator's arguments after `v_scales`.

    Where special_keys, (batch, keys) bool, is None, the weight on special keys is left out.
    """
    batch = request.shape.batch
    packed = request.packed_lengths is not None and special_keys is None and FIRST_KEY in wanted
    found = statistics_of_one_pass(frozenset(wanted), special=special_keys is not None, packed=packed)
    start: int | Tensor | None = request.query_start
    if isinstance(start, int):
        start = torch.full((batch,), start, device="cpu") if start else None
    first = None
    if found.statistics & _AT_TARGET:
        first = first_key_of_samples(request, bounds)
        first = first if len(first) == batch else first.repeat(batch)
    special = _first_keys_of_samples(request, bounds) if packed else special_keys
    return found, (found.statistics, start, first, special if found.statistics & _AT_SPECIAL else None)


def _first_keys_of_samples(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return marks of the first key that some query of each packed sample sees: (1, keys) bool."""
    assert request.packed_lengths is not None
    # The cache holds plans, which do not depend on a bias.
    found = _FIRST_KEYS_OF_PACKED.get(bounds) if request.bias is None else None
    if found is not None and torch.equal(found[0], request.packed_lengths):
        return found[1]
    marks = _mark_first_keys(request.packed_lengths, first_key_of_queries(request, bounds)[0], request.shape.key_length)
    if request.bias is None and not is_intercepted():
        _FIRST_KEYS_OF_PACKED[bounds] = request.packed_lengths.clone(), marks
    return marks


def _mark_first_keys(packed_lengths: Tensor, first: Tensor, keys: int) -> Tensor:
    """Mark the first key of each sample, (1, keys) bool, given that of each query, (queries,)."""
    lengths = packed_lengths.cpu().numpy()  # NumPy starts faster than torch
    begin = (lengths.cumsum() - lengths)[lengths > 0]
    marks = np.zeros((1, keys + 1), dtype=bool)  # the last column is for samples that see no key, and is cut off
    if len(begin):
        marks[0, np.minimum.reduceat(first.cpu().numpy(), begin)] = True
    return torch.from_numpy(marks[:, :keys])


def measure_in_one_pass(
    request: AttentionRequest, bounds: KeyBounds, parts: Collection[Part], special_keys: Tensor | None
) -> tuple[Tensor, dict[Part, Tensor]]:
    """Measure quantities of ONE_PASS and the logsumexp, (batch, heads, queries) each, in a forward pass without values.

    The dropout of the request is ignored; special_keys is (batch, keys) bool, or None.
    """
    found, arguments = select_wanted_statistics(request, bounds, parts, special_keys)
    _, logsumexp, *results = forward(OperatorCall(request, bounds, with_values=False), arguments)
    return logsumexp, found.results(*results)


def sum_weights_per_key(
    request: AttentionRequest, bounds: KeyBounds, logsumexp: Tensor, *, cell: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of the weights that each key, and each cell of a map, receives from all queries.

    The dropout of the request is ignored. Rows whose logsumexp, (batch, heads, queries) float32, is -inf or NaN count
    as 0. `cell` is the size of one cell of the map, (queries, keys); None computes no map.

    Returns:
        The sums per key (batch, heads, keys), and per cell (batch, heads, row cells, key cells) or None.
    """
    sums: Tensor | None = None
    maps: list[Tensor] = []
    job = OperatorCall(request, bounds, with_values=False)
    with below_autograd():
        for rows in iterate_query_blocks(request, bounds, step=1 if cell is None else cell[0]):
            part, map_part = key_sums(rows.slice_queries(logsumexp), *(cell or (0, 0)), *operator_arguments(job, rows))
            sums = part if sums is None else sums.add_(part)
            maps.append(map_part)
    assert sums is not None
    return sums, None if cell is None else torch.cat(maps, 2)
