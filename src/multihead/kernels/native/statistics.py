"""The parts of statistics that the native kernel measures while it computes, or in a second pass over q and k."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.kernels.native import library
from multihead.kernels.native.call import WHOLE, Fields, blocks, call_fields, contiguous_features, room
from multihead.kernels.native.library import AT
from multihead.masks.base import KeyBounds
from multihead.parts import Part

FIRST_KEY: Part = ("first_keys_mass", 1)
SPECIAL_KEYS: Part = ("tokens_mass", "special")
_OFFSETS: dict[Part, int] = {("offset_mass", offset): offset for offset in (0, -1, 1)}
# Part -> the field of csrc/call.h that it is written to.
_FIELD: dict[Part, str] = {
    "entropy": "entropy",
    "mean_distance": "mean_distance",
    "distance_spread": "distance_spread",
    **dict.fromkeys(_OFFSETS, "at_offsets"),
    FIRST_KEY: "on_given_key",
    SPECIAL_KEYS: "on_special_keys",
    "largest_weight": "largest_weight",
    "largest_key": "largest_key",
}
_OF_OFFSETS = array("q", _OFFSETS.values())  # no tensor, which the caller's dispatch mode could turn into a fake one
ONE_PASS: frozenset[Part] = frozenset(_FIELD)
SECOND_PASS: frozenset[Part] = frozenset({"received", "pooled_map"})


@dataclass(eq=False)
class Measuring:
    """What the kernel measures of one call while it runs.

    Fields:
        parts: which parts, of ONE_PASS.
        raw: (batch, heads, queries) each, by the names of csrc/call.h; at_offsets has its offsets in front.
        needs: tensors that the kernel reads for them.
        packed: whether each packed sample has a first key of its own: these are marked as special keys, since each
            query sees only the one of its own sample.
    """

    parts: tuple[Part, ...]
    raw: dict[str, Tensor] = field(default_factory=dict)
    needs: dict[str, Tensor] = field(default_factory=dict)
    packed: bool = False

    @staticmethod
    def of(
        request: AttentionRequest, bounds: KeyBounds, wanted: Collection[Part], special_keys: Tensor | None = None
    ) -> Measuring:
        """Allocate the outputs of those of the wanted parts that one pass measures.

        Args:
            request: the call.
            bounds: its plan.
            wanted: any parts.
            special_keys: (batch, keys) bool, or None: then SPECIAL_KEYS is left out.
        """
        shape = request.shape
        parts = tuple(part for part in _FIELD if part in wanted and (part != SPECIAL_KEYS or special_keys is not None))
        packed = request.packed_lengths is not None and special_keys is None and FIRST_KEY in parts
        if packed:
            special_keys = _first_keys_of_packed(request, bounds)
        made = Measuring(parts, packed=packed)
        rows = (shape.batch, shape.num_heads, shape.query_length)
        for name in {made.source(part) for part in parts}:
            size = (len(_OFFSETS), *rows) if name == "at_offsets" else rows
            dtype = torch.int64 if name == "largest_key" else torch.float32
            made.raw[name] = torch.empty(size, dtype=dtype, device="cpu")
        start = request.query_start
        if parts:
            whole = start if isinstance(start, Tensor) else torch.full((shape.batch,), start, device="cpu")
            made.needs["query_start"] = whole.to(torch.int64).contiguous()
        if "on_given_key" in made.raw:
            made.needs["given_key"] = first_keys(bounds).expand(shape.batch).contiguous()
        if "on_special_keys" in made.raw and special_keys is not None:
            made.needs["special_keys"] = special_keys.contiguous()
        return made

    def source(self, part: Part) -> str:
        """Return the field of csrc/call.h that a part is written to."""
        return "on_special_keys" if self.packed and part == FIRST_KEY else _FIELD[part]

    def part(self, rows: slice) -> Measuring:
        """Allocate the outputs of some rows, which `put` copies into the whole."""
        count = rows.stop - rows.start
        raw = {name: tensor.new_empty((*tensor.shape[:-1], count)) for name, tensor in self.raw.items()}
        return replace(self, raw=raw)

    def put(self, part: Measuring, rows: slice) -> None:
        """Copy what the kernel wrote of some rows."""
        for name, tensor in part.raw.items():
            self.raw[name][..., rows] = tensor

    def put_into(self, fields: Fields) -> None:
        """Set the addresses that the kernel writes to and reads from."""
        for name, tensor in {**self.raw, **self.needs}.items():
            fields[AT[name]] = tensor.data_ptr()
        if "at_offsets" in self.raw:
            fields[AT["offsets"]], fields[AT["num_offsets"]] = _OF_OFFSETS.buffer_info()

    def found(self) -> dict[Part, Tensor]:
        """Return what was measured: (batch, heads, queries) each."""
        result = {part: self.raw[self.source(part)] for part in self.parts if part not in _OFFSETS}
        for index, part in enumerate(_OFFSETS):
            if part in self.parts:
                result[part] = self.raw["at_offsets"][index]
        return result


def first_keys(bounds: KeyBounds) -> Tensor:
    """Return the first key that some query of each sample may see: (batch or 1,), -1 where there is none."""
    if not bounds.start.shape[1]:
        return torch.full((bounds.start.shape[0],), -1, device="cpu")
    behind = torch.iinfo(torch.int64).max
    first = bounds.start.masked_fill(bounds.sees_nothing, behind).amin(1)
    return first.masked_fill(first == behind, -1)


def _first_keys_of_packed(request: AttentionRequest, bounds: KeyBounds) -> Tensor:
    """Mark the first key that some query of each packed sample may see: (1, keys) bool."""
    assert request.packed_lengths is not None
    keys, lengths = request.shape.key_length, request.packed_lengths.to("cpu")
    sample = torch.arange(len(lengths)).repeat_interleave(lengths)  # (queries,)
    seen_from = bounds.start[0].masked_fill(bounds.sees_nothing[0], keys)
    first = torch.full_like(lengths, keys).scatter_reduce(0, sample, seen_from, "amin")
    marks = torch.zeros(1, keys + 1, dtype=torch.bool)  # the last one for samples that see no key
    marks[0, first] = True
    return marks[:, :keys]


def one_pass(
    request: AttentionRequest, bounds: KeyBounds, parts: Collection[Part], special_keys: Tensor | None
) -> dict[Part, Tensor]:
    """Measure a call again, without its values.

    Args:
        request: the call; its dropout is ignored.
        bounds: its plan.
        parts: some of ONE_PASS.
        special_keys: (batch, keys) bool, or None.

    Returns: (batch, heads, queries) each.
    """
    shape = request.shape
    measuring = Measuring.of(request, bounds, parts, special_keys)
    logsumexp = room(shape.batch, shape.num_heads, shape.query_length)  # written, and not read
    q, k = contiguous_features(request.q), contiguous_features(request.k)
    for rows in blocks(request, bounds):
        fields = call_fields(request, rows, q, k)
        fields[AT["value_dim"]] = 0
        if request.sinks is not None:
            sinks = request.sinks.float().contiguous()
            fields[AT["sinks"]] = sinks.data_ptr()
        part = measuring if rows.rows is WHOLE else measuring.part(rows.rows)
        row_logsumexp = logsumexp if rows.rows is WHOLE else torch.empty_like(logsumexp[:, :, rows.rows])
        fields[AT["logsumexp"]] = row_logsumexp.data_ptr()
        part.put_into(fields)
        library.run(library.FORWARD, fields)
        if part is not measuring:
            measuring.put(part, rows.rows)
    return measuring.found()


def second_pass(
    request: AttentionRequest, bounds: KeyBounds, logsumexp: Tensor, *, cell: tuple[int, int] | None
) -> tuple[Tensor, Tensor | None]:
    """Sum the weights that each key receives, and those in each cell of a map, from q, k and the logsumexp.

    Args:
        request: the call; its bias, if any, in float32.
        bounds: its plan.
        logsumexp: (batch, heads, queries) float32; rows of -inf or NaN count as 0.
        cell: queries and keys of a cell of the map, or None where nobody wants the map.

    Returns: (batch, heads, keys), and (batch, heads, row cells, key cells) sums of weights or None.
    """
    shape = request.shape
    size = (shape.batch, shape.num_heads)
    received = room(*size, shape.key_length).zero_()
    pooled = None
    if cell is not None:
        pooled = room(*size, -(-shape.query_length // cell[0]), -(-shape.key_length // cell[1])).zero_()
    q, k = contiguous_features(request.q), contiguous_features(request.k)
    for rows in blocks(request, bounds, step=1 if cell is None else cell[0]):
        part, map_part = received, pooled
        if rows.rows is not WHOLE:
            part, map_part = torch.empty_like(received), None
            if cell is not None:
                first, behind = rows.rows.start // cell[0], -(-rows.rows.stop // cell[0])
                map_part = room(*size, behind - first, -(-shape.key_length // cell[1]))
        row_logsumexp = rows.of(logsumexp).contiguous()
        fields = call_fields(request, rows, q, k)
        fields[AT["logsumexp"]], fields[AT["received"]] = row_logsumexp.data_ptr(), part.data_ptr()
        if cell is not None and map_part is not None:
            fields[AT["pooled"]] = map_part.data_ptr()
            fields[AT["pool_rows"]], fields[AT["pool_keys"]] = cell
        library.run(library.RECEIVED, fields)
        if part is not received:
            received += part
            if pooled is not None and map_part is not None:
                pooled[:, :, first:behind] += map_part
    return received, pooled
