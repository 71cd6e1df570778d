"""The parts of statistics that the native kernel measures while it computes, or in a second pass over q and k."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels.first_keys import first_keys, first_seen
from multihead.kernels.native import library
from multihead.kernels.native.call import (
    WHOLE,
    Fields,
    blocks,
    call_fields,
    contiguous_features,
    empty_float32,
    sinks_as_read,
)
from multihead.kernels.native.library import AT
from multihead.masks.base import KeyBounds
from multihead.parts import Part
from multihead.tracing import intercepted

FIRST_KEY: Part = ("first_keys_mass", 1)
SPECIAL_KEYS: Part = ("tokens_mass", "special")
OFFSETS: dict[Part, int] = {("offset_mass", offset): offset for offset in (0, -1, 1)}
# The field of csrc/call.h that each part is written to.
_FIELD: dict[Part, str] = {
    "entropy": "entropy",
    "mean_distance": "mean_distance",
    "distance_spread": "distance_spread",
    **dict.fromkeys(OFFSETS, "offset_weights"),
    FIRST_KEY: "target_key_weight",
    SPECIAL_KEYS: "special_keys_weight",
    "largest_weight": "largest_weight",
    "largest_key": "largest_key",
}
_OFFSET_VALUES = array("q", OFFSETS.values())  # not a tensor, which could be created under any dispatch mode
ONE_PASS: frozenset[Part] = frozenset(_FIELD)
SECOND_PASS: frozenset[Part] = frozenset({"received", "pooled_map"})


# Of cached plans, by their bounds, with the lengths of the samples.
_FIRST_KEYS_OF_PACKED: WeakKeyDictionary[KeyBounds, tuple[Tensor, Tensor]] = WeakKeyDictionary()


@lru_cache(maxsize=256)
def _outputs(wanted: frozenset[Part], *, special: bool, packed: bool) -> dict[Part, str]:
    """Return those of the wanted parts that one pass measures, each with the field of csrc/call.h for its output.

    Args:
        wanted: any parts.
        special: whether special keys are known.
        packed: whether each packed sample has a first key of its own. These keys are passed as special keys, of which
            each query sees only that of its own sample.
    """
    found = {part: name for part, name in _FIELD.items() if part in wanted and (special or part != SPECIAL_KEYS)}
    return found | {FIRST_KEY: _FIELD[SPECIAL_KEYS]} if packed else found


@dataclass(eq=False)
class Measurement:
    """The parts of statistics that the kernel measures in one call.

    Attributes:
        outputs: the wanted parts of ONE_PASS, each with its field of csrc/call.h.
        raw: outputs of the kernel, by their field: (batch, heads, queries) each; offset_weights are
            (offsets, batch, heads, queries).
        inputs: tensors that the kernel reads for them, by their field.
    """

    outputs: dict[Part, str]
    raw: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(
        request: AttentionRequest, bounds: KeyBounds, wanted: Collection[Part], special_keys: Tensor | None = None
    ) -> Measurement:
        """Allocate the outputs of those of the wanted parts that one pass measures.

        Args:
            request: the call.
            bounds: its plan.
            wanted: any parts; others than ONE_PASS are ignored.
            special_keys: (batch, keys) bool, or None, which leaves SPECIAL_KEYS out.
        """
        shape = request.shape
        packed = request.packed_lengths is not None and special_keys is None and FIRST_KEY in wanted
        result = Measurement(_outputs(frozenset(wanted), special=special_keys is not None, packed=packed))
        if packed:
            special_keys = _first_keys_of_packed(request, bounds)
        raw = result.raw
        rows = (shape.batch, shape.num_heads, shape.query_length)
        like = None  # empty_like takes less time than empty
        for name in dict.fromkeys(result.outputs.values()):
            if name == "offset_weights":
                raw[name] = empty_float32(len(OFFSETS), *rows)
            elif name == "largest_key":
                raw[name] = torch.empty(rows, dtype=torch.int64, device="cpu")
            else:
                raw[name] = like = empty_float32(*rows) if like is None else torch.empty_like(like)
        start = request.query_start
        if isinstance(start, Tensor):
            result.inputs["query_start"] = start.to(torch.int64).contiguous()
        elif start:
            result.inputs["query_start"] = torch.full((shape.batch,), start, device="cpu")
        if "target_key_weight" in raw:
            first = first_keys(request, bounds)
            result.inputs["target_key"] = first if len(first) == shape.batch else first.repeat(shape.batch)
        if "special_keys_weight" in raw and special_keys is not None:
            result.inputs["special_keys"] = special_keys.contiguous()
        return result

    def part(self, rows: slice) -> Measurement:
        """Return a measurement of some rows; `store` copies its results into this one."""
        count = rows.stop - rows.start
        raw = {name: tensor.new_empty((*tensor.shape[:-1], count)) for name, tensor in self.raw.items()}
        return replace(self, raw=raw)

    def store(self, part: Measurement, rows: slice) -> None:
        """Copy the results of some rows."""
        for name, tensor in part.raw.items():
            self.raw[name][..., rows] = tensor

    def set_fields(self, fields: Fields) -> None:
        """Set the addresses of the statistics and their inputs."""
        for name, tensor in (self.raw | self.inputs).items():
            fields[AT[name]] = tensor.data_ptr()
        if "offset_weights" in self.raw:
            fields[AT["offsets"]], fields[AT["num_offsets"]] = _OFFSET_VALUES.buffer_info()

    def results(self) -> dict[Part, Tensor]:
        """Return what was measured: (batch, heads, queries) each."""
        raw = self.raw
        at_offsets = raw["offset_weights"].unbind() if "offset_weights" in raw else ()
        of_offsets = dict(zip(OFFSETS, at_offsets, strict=False))
        return {part: of_offsets[part] if part in of_offsets else raw[name] for part, name in self.outputs.items()}


def _first_keys_of_packed(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Return marks of the first key that some query of each packed sample sees: (1, keys) bool."""
    assert request.packed_lengths is not None
    found = _FIRST_KEYS_OF_PACKED.get(bounds) if request.bias is None else None  # a bias is no part of a plan
    if found is not None and torch.equal(found[0], request.packed_lengths):
        return found[1]
    marks = _marks_of_packed(request.packed_lengths, first_seen(request, bounds)[0], request.shape.key_length)
    if request.bias is None and not intercepted():
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
    """Measure parts and the logsumexp by a forward pass without values.

    Args:
        request: the call; its bias, if any, in float32. Its dropout is ignored.
        bounds: its plan.
        parts: some of ONE_PASS; none of them leaves the logsumexp alone.
        special_keys: (batch, keys) bool, or None.

    Returns:
        The logsumexp, and the parts by name, (batch, heads, queries) each.
    """
    shape = request.shape
    measurement = Measurement.of(request, bounds, parts, special_keys)
    logsumexp = empty_float32(shape.batch, shape.num_heads, shape.query_length)
    q, k = contiguous_features(request.q), contiguous_features(request.k)
    sinks = None if request.sinks is None else sinks_as_read(request.sinks)
    for rows in blocks(request, bounds):
        fields = call_fields(request, rows, q, k)
        fields[AT["value_dim"]] = 0
        if sinks is not None:
            fields[AT["sinks"]] = sinks.data_ptr()
        part, row_logsumexp = measurement, logsumexp
        if rows.rows is not WHOLE:
            part, row_logsumexp = measurement.part(rows.rows), torch.empty_like(logsumexp[:, :, rows.rows])
        fields[AT["logsumexp"]] = row_logsumexp.data_ptr()
        part.set_fields(fields)
        library.run(library.FORWARD, fields)
        if part is not measurement:
            measurement.store(part, rows.rows)
            logsumexp[:, :, rows.rows] = row_logsumexp
    return logsumexp, measurement.results()


def second_pass(
    request: AttentionRequest, bounds: KeyBounds, logsumexp: Tensor, *, cell: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the sums of the weights that each key, and each cell of a map, receives from all queries.

    Args:
        request: the call; its bias, if any, in float32.
        bounds: its plan.
        logsumexp: (batch, heads, queries) float32; rows of -inf or NaN count as 0.
        cell: queries and keys of a cell of the map, or None for no map.

    Returns:
        The sums per key (batch, heads, keys), and per cell (batch, heads, row cells, key cells) or None.
    """
    shape = request.shape
    size = (shape.batch, shape.num_heads)
    key_sums = empty_float32(*size, shape.key_length).zero_()
    pooled_map = None
    if cell is not None:
        pooled_map = empty_float32(*size, -(-shape.query_length // cell[0]), -(-shape.key_length // cell[1])).zero_()
    q, k = contiguous_features(request.q), contiguous_features(request.k)
    for rows in blocks(request, bounds, step=1 if cell is None else cell[0]):
        part, map_part = key_sums, pooled_map
        if rows.rows is not WHOLE:
            part, map_part = torch.empty_like(key_sums), None
            if cell is not None:
                first, end = rows.rows.start // cell[0], -(-rows.rows.stop // cell[0])
                map_part = empty_float32(*size, end - first, -(-shape.key_length // cell[1]))
        row_logsumexp = rows.of(logsumexp).contiguous()
        fields = call_fields(request, rows, q, k)
        fields[AT["logsumexp"]], fields[AT["key_sums"]] = row_logsumexp.data_ptr(), part.data_ptr()
        if cell is not None and map_part is not None:
            fields[AT["pooled_map"]] = map_part.data_ptr()
            fields[AT["pool_rows"]], fields[AT["pool_keys"]] = cell
        library.run(library.KEY_SUMS, fields)
        if part is not key_sums:
            key_sums += part
            if pooled_map is not None and map_part is not None:
                pooled_map[:, :, first:end] += map_part
    return key_sums, pooled_map
