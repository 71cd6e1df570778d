"""Measure the parts of pictures: what a query reads of the view that its own patch is in, by rows and columns.

The weights of a strip of queries are added up by the cells of a view, so that a step in rows and columns is a shift. A
distance counts patches, between the centres of two of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.kernels.parts import NEIGHBOUR_MASS, ONE_WAY_MASS, PATCH_DISTANCE, PartName
from multihead.probes.lookups import weight_at_keys
from multihead.probes.measured_call import MeasuredCall
from multihead.probes.places import PlaceTable
from multihead.probes.streaming import groups_of_call, strips_of_weights
from multihead.tensors.precision import widen, widest_float

PICTURE_PARTS: frozenset[PartName] = frozenset((PATCH_DISTANCE.name, NEIGHBOUR_MASS.name, ONE_WAY_MASS.name))


@dataclass(frozen=True, eq=False)
class _Cells:
    """The cells of the keys and queries of one sample.

    Attributes:
        view: (keys,) int64, number of the view of each key; -1 without a cell.
        cell: (keys, 2) int64, row and column.
        query: (queries,) int64, the key at the position of each query; -1 where there is none with a cell.
        size: rows and columns that hold the cells of every view.
    """

    view: Tensor
    cell: Tensor
    query: Tensor
    size: tuple[int, int]

    @staticmethod
    def of_sample(places: PlaceTable, positions: Tensor) -> _Cells:
        """Return the cells of a table of one row, for queries at `positions`, (queries,) int64."""
        device, cell = positions.device, places.cell[:, :2].to(positions.device)
        of_view = torch.stack([places.picture, places.view], 1).unique(dim=0, return_inverse=True)[1].to(device)
        view = of_view.masked_fill(cell[:, 0] < 0, -1)
        inside = (positions >= 0) & (positions < len(view))
        query = positions.masked_fill(~inside, 0)
        query = query.masked_fill(~inside | (view[query] < 0), -1)
        rows, columns = (cell.amax(0).clamp(min=0) + 1).tolist() if len(cell) else (1, 1)
        return _Cells(view, cell, query, (rows, columns))

    def key_at(self, step: Tensor) -> Tensor:
        """Return the key at a step, (2,) int64, from each query: (queries,) int64, -1 where there is none."""
        placed, size = self.view >= 0, torch.tensor(self.size, device=self.cell.device)
        keys = torch.full((int(self.view.max().clamp(min=0)) + 1, *self.size), -1, device=self.cell.device)
        keys[self.view[placed], *self.cell[placed].unbind(1)] = placed.nonzero()[:, 0]
        own = self.query.clamp(min=0)
        cell = self.cell[own] + step
        inside = (self.query >= 0) & ((cell >= 0) & (cell < size)).all(1)
        found = keys[self.view[own].clamp(min=0), *cell.clamp(min=0).minimum(size - 1).unbind(1)]
        return found.masked_fill(~inside, -1)


def measure_in_pictures(call: MeasuredCall, parts: Collection[PartName]) -> dict[PartName, Tensor]:
    """Measure `parts`, a subset of `PICTURE_PARTS`, of a call whose context has places: (batch, heads, queries) each.

    A query without a cell has 0.
    """
    shape, places = call.request.shape, call.context.places
    assert places is not None
    samples = [_Cells.of_sample(places.select(index), call.positions[index]) for index in range(shape.batch)]
    zeros = torch.zeros(shape.batch, shape.num_heads, shape.query_length, dtype=widest_float(shape.device))
    found: dict[PartName, Tensor] = {
        part: zeros.to(shape.device, copy=True) for part in (PATCH_DISTANCE.name, NEIGHBOUR_MASS.name)
    }
    steps = torch.zeros(shape.batch, shape.num_heads, 2, dtype=torch.int64, device=shape.device)
    for group in groups_of_call(call):
        cells, place = samples[group.sample], (group.sample, group.heads)
        height, width = cells.size
        heads = group.heads.stop - group.heads.start
        sums = zeros.new_zeros(heads, 2 * height - 1, 2 * width - 1, device=shape.device)
        for rows, weights in strips_of_weights(call, group):
            of_rows = {part: value[*place, rows] for part, value in found.items()}  # views of `found`
            _add_strip(cells, rows, weights, sums, of_rows)
        sums[:, height - 1, width - 1] = 0  # what a head reads of itself has a statistic of its own
        best = sums.flatten(1).argmax(1)
        steps[place] = torch.stack([best // sums.shape[2] - height + 1, best % sums.shape[2] - width + 1], 1)
    if ONE_WAY_MASS.name in parts:
        found[ONE_WAY_MASS.name] = _weights_at_steps(call, samples, steps)
    return {part: found[part] for part in parts}


def _add_strip(cells: _Cells, rows: slice, weights: Tensor, sums: Tensor, found: dict[PartName, Tensor]) -> None:
    """Measure some queries of a sample.

    Args:
        cells: the cells of the sample.
        rows: the queries.
        weights: (heads, rows, keys).
        sums: (heads, 2 R - 1, 2 C - 1), where R and C are the size of the cells; the weights are added to it by their
            step, and the step 0 is in its middle.
        found: part -> (heads, rows), which is set.
    """
    (height, width), own = cells.size, cells.query[rows]
    for view in cells.view[own[own >= 0]].unique().tolist():
        some = ((own >= 0) & (cells.view[own] == view)).nonzero()[:, 0]
        keys = (cells.view == view).nonzero()[:, 0]
        on_grid = widen(weights).new_zeros(len(weights), len(some), height * width)
        flat = cells.cell[keys, 0] * width + cells.cell[keys, 1]
        on_grid.index_add_(2, flat, widen(weights[:, some][..., keys]))
        from_cell = cells.cell[own[some]]
        grid = torch.stack(torch.meshgrid(*map(torch.arange, cells.size), indexing="ij"), -1).to(flat.device)
        steps = grid.view(-1, 2) - from_cell[:, None]  # (some, cells, 2)
        mass, lengths = on_grid.sum(-1), torch.linalg.vecdot(on_grid, steps.to(on_grid).norm(dim=-1))
        found[PATCH_DISTANCE.name][:, some] = lengths / torch.where(mass > 0, mass, 1.0)
        found[NEIGHBOUR_MASS.name][:, some] = torch.linalg.vecdot(on_grid, (steps.abs().amax(-1) <= 1).to(on_grid))
        for index, (row, column) in enumerate(from_cell.tolist()):
            to = sums[:, height - 1 - row : 2 * height - 1 - row, width - 1 - column : 2 * width - 1 - column]
            to += on_grid[:, index].unflatten(1, cells.size)


def _weights_at_steps(call: MeasuredCall, samples: list[_Cells], steps: Tensor) -> Tensor:
    """Return the weight of each query on the key at its head's step, (batch, heads, 2): (batch, heads, queries)."""
    found = torch.zeros_like(call.finite_logsumexp)
    each, number = steps.unique(dim=1, return_inverse=True)  # (batch, different, 2)
    for index, step in enumerate(each.unbind(1)):
        keys = torch.stack([cells.key_at(one) for cells, one in zip(samples, step, strict=True)])
        heads = (number == index).nonzero()[:, 0]
        found[:, heads] = weight_at_keys(call, keys)[:, heads].masked_fill(keys[:, None] < 0, 0)
    return found
