"""Statistics that the native kernel measures with the output in one pass, or in a second pass over q and k."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.kernels.dense_tile import first_key_of_samples, first_key_of_texts
from multihead.kernels.native.call import (
    OperatorCall,
    below_autograd,
    forward,
    iterate_query_blocks,
    key_sums,
    operator_arguments,
)
from multihead.kernels.parts import (
    DISTANCE_SPREAD,
    ENTROPY,
    FIRST_KEYS_MASS,
    LARGEST_KEY,
    LARGEST_WEIGHT,
    MEAN_DISTANCE,
    NEAR_MASS,
    OFFSET_MASS,
    POOLED_MAP,
    RECEIVED,
    SPECIAL_MASS,
    PartName,
)
from multihead.masks.base import KeyBounds
from multihead.tensors.tracing import is_intercepted

FIRST_KEY_WEIGHT = FIRST_KEYS_MASS(1).name
# The parts that each statistic of the operator has rows for, in the order of its flags in csrc/operator.cpp.
_PARTS_OF_STATISTICS: tuple[tuple[PartName, ...], ...] = (
    (ENTROPY.name,),
    (LARGEST_WEIGHT.name,),
    (MEAN_DISTANCE.name,),
    (DISTANCE_SPREAD.name,),
    tuple(OFFSET_MASS(offset).name for offset in (0, -1, 1)),
    (FIRST_KEY_WEIGHT,),
    (SPECIAL_MASS.name,),
    (LARGEST_KEY.name,),
    (NEAR_MASS.name,),
)
_TARGET, _SPECIAL = (_PARTS_OF_STATISTICS.index((part,)) for part in (FIRST_KEY_WEIGHT, SPECIAL_MASS.name))
PARTS_OF_ONE_PASS: frozenset[PartName] = frozenset(part for parts in _PARTS_OF_STATISTICS for part in parts)
PARTS_OF_SECOND_PASS: frozenset[PartName] = frozenset({RECEIVED.name, POOLED_MAP.name})


# Key bounds of a mask with several texts in a row -> the marks of their first keys, (batch, keys) bool.
_FIRST_KEYS_OF_TEXTS: WeakKeyDictionary[KeyBounds, Tensor] = WeakKeyDictionary()


class OperatorStatistics(NamedTuple):
    """The statistics that one call of the operator `attention` measures.

    Attributes:
        requested_bits: the sum of the statistics' flags (powers of 2), an argument of the operator.
        parts: the statistic in each row of the result, None for a row that was not requested; the largest key, which
            is a result of its own, is last.
    """

    requested_bits: int
    parts: tuple[PartName | None, ...]

    def name_results(self, measured: Tensor, largest_key: Tensor) -> dict[PartName, Tensor]:
        """Convert the last two results of the operator to a dict: statistic -> (batch, heads, queries)."""
        found: dict[Any, Tensor] = dict(zip(self.parts, (*measured.unbind(), largest_key), strict=False))
        found.pop(None, None)
        return found


@lru_cache(maxsize=256)
def statistics_of_one_pass(
    requested: frozenset[PartName], *, special: bool = False, several_texts: bool = False
) -> OperatorStatistics:
    """Return the requested statistics that the operator measures in one pass.

    Args:
        requested: statistics of `parts.PARTS`; statistics outside PARTS_OF_ONE_PASS are ignored.
        special: whether special keys are given.
        several_texts: whether a row has several texts, each with its own first key; these first keys are passed as
            special keys, of which a query sees only that of its text.
    """
    rows = list(_PARTS_OF_STATISTICS)
    if several_texts:
        rows[_TARGET], rows[_SPECIAL] = (), (FIRST_KEY_WEIGHT,)
    elif not special:
        rows[_SPECIAL] = ()
    statistics, parts = 0, []
    for bit, of_statistic in enumerate(rows):
        if requested.intersection(of_statistic):
            statistics |= 1 << bit
            parts += [part if part in requested else None for part in of_statistic]
    if LARGEST_KEY.name in parts:
        parts.append(parts.pop(parts.index(LARGEST_KEY.name)))
    return OperatorStatistics(statistics, tuple(parts))


def choose_operator_statistics(
    request: AttentionRequest, bounds: KeyBounds, requested: Collection[PartName], special_keys: Tensor | None = None
) -> tuple[OperatorStatistics, tuple[Any, ...]]:
    """Return the requested statistics that one pass measures, and the operator's arguments after `v_scales`.

    The weight on special keys is ignored if special_keys, (batch, keys) bool, is None. If they are given and a row has
    several texts, the weight on their first keys is not measured.
    """
    batch = request.shape.batch
    several = FIRST_KEY_WEIGHT in requested and request.mask.row_texts is not None
    if several and special_keys is not None:
        several, requested = False, frozenset(requested) - {FIRST_KEY_WEIGHT}
    found = statistics_of_one_pass(frozenset(requested), special=special_keys is not None, several_texts=several)
    start: int | Tensor | None = request.query_start
    if isinstance(start, int):
        start = torch.full((batch,), start, device="cpu") if start else None
    first = None
    if found.requested_bits & 1 << _TARGET:
        first = first_key_of_samples(request, bounds)
        first = first if len(first) == batch else first.repeat(batch)
    special = _mark_first_keys(request, bounds) if several else special_keys
    return found, (found.requested_bits, start, first, special if found.requested_bits & 1 << _SPECIAL else None)


def _mark_first_keys(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Mark the first key that some query of each text sees: (batch, keys) bool."""
    batch, keys = request.shape.batch, request.shape.key_length
    # The cache is used only without a bias, because KeyBounds, its keys, do not depend on the bias.
    marks = _FIRST_KEYS_OF_TEXTS.get(bounds) if request.bias is None else None
    if marks is None or len(marks) != batch:
        first = first_key_of_texts(request, bounds).expand(batch, -1)
        # The last column, which is cut off, is for texts whose queries see no key.
        wide = first.new_zeros((batch, keys + 1), dtype=torch.bool).scatter_(1, first, value=True)
        marks = wide[:, :keys].contiguous()
        if request.bias is None and not is_intercepted():
            _FIRST_KEYS_OF_TEXTS[bounds] = marks
    return marks


def measure_in_one_pass(
    request: AttentionRequest, bounds: KeyBounds, parts: Collection[PartName], special_keys: Tensor | None
) -> tuple[Tensor, dict[PartName, Tensor]]:
    """Measure statistics of PARTS_OF_ONE_PASS and the logsumexp, (batch, heads, queries) each, in a pass without v.

    The dropout of the request is ignored; special_keys is (batch, keys) bool, or None.
    """
    found, arguments = choose_operator_statistics(request, bounds, parts, special_keys)
    _, logsumexp, *results = forward(OperatorCall(request, bounds, with_values=False), arguments)
    return logsumexp, found.name_results(*results)


def sum_weights_per_key(
    request: AttentionRequest, bounds: KeyBounds, logsumexp: Tensor, *, cell: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Sum the attention weights over queries, per key and per cell of a coarse map.

    The dropout of the request is ignored. Queries whose logsumexp, (batch, heads, queries) float32, is -inf or NaN
    count as 0. `cell` is the (queries, keys) size of a cell of the map; None computes no map.

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
