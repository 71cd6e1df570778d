"""Statistics of heads on the tokens of pictures: distances in rows and columns, in place of distances in a text.

They are computed from q and k when the statistics of a sample are read, because the places of tokens are known only
after the model has run. A distance counts patches, between the centres of two tokens of one view of one picture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.kernels.parts import part_named
from multihead.probes.catalogue import (
    CLASS_MASS,
    NEIGHBOUR_MASS,
    ONE_WAY_MASS,
    PATCH_DISTANCE,
    PICTURE_MASS,
    PROBES,
    SELF_MASS,
    WORDS_MASS,
)
from multihead.probes.context import ProbeContext
from multihead.probes.lookups import weight_at_keys
from multihead.probes.measured_call import MeasuredCall
from multihead.record.sample import ChangedStatistics, SampleRecord
from multihead.record.texts import group_of_keys

_MASS_OF_GROUP = (PICTURE_MASS, CLASS_MASS, WORDS_MASS)  # in the order of `PICTURE_GROUPS`
_CELLS_AT_ONCE = 1 << 22  # bounds the memory of weights
_NO_VIEW = -1


@dataclass(frozen=True, eq=False)
class _PictureGrid:
    """The cells of the keys of a sample.

    Attributes:
        view: (keys,) int64, number of the view of each key; -1 without a cell.
        cell: (keys, 2) int64, row and column.
        start: the key of the first query.
        groups: (keys,) int64, the group of each key, see `group_of_keys`.
    """

    view: Tensor
    cell: Tensor
    start: int
    groups: Tensor

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns that hold the cells of every view."""
        rows, columns = (self.cell.amax(0).clamp(min=0) + 1).tolist()
        return rows, columns

    def of_queries(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the steps from some queries to the keys, (rows, keys, 2) int64, and which are of the same view."""
        queries = slice(rows.start + self.start, rows.stop + self.start)
        steps = self.cell - self.cell[queries, None]
        same = (self.view == self.view[queries, None]) & (self.view[queries, None] != _NO_VIEW)
        return steps, same

    def keys_at(self, step: Tensor, queries: int) -> Tensor:
        """Return the key at a step, (2,), from each of the first queries: (queries,) int64, -1 where there is none."""
        size, placed = torch.tensor(self.size), self.view != _NO_VIEW
        table = torch.full((int(self.view.max()) + 1, *size.tolist()), -1)
        table[self.view[placed], *self.cell[placed].unbind(1)] = placed.nonzero()[:, 0]
        own = slice(self.start, self.start + queries)
        cell = self.cell[own] + step
        inside = placed[own] & ((cell >= 0) & (cell < size)).all(1)
        found = table[self.view[own].clamp(min=0), *cell.clamp(min=0).minimum(size - 1).unbind(1)]
        return found.masked_fill(~inside, -1)

    def add_steps(self, sums: Tensor, weights: Tensor, rows: slice) -> None:
        """Add the weights of some queries, (heads, rows, keys), to `sums` by their step: (heads, 2 R - 1, 2 C - 1).

        R and C are the `size`, and the step 0 is in the middle.
        """
        height, width = self.size
        queries = torch.arange(rows.start, rows.stop) + self.start
        for view in range(int(self.view.max()) + 1):
            keys = (self.view == view).nonzero()[:, 0]
            own = (self.view[queries] == view).nonzero()[:, 0]
            if not len(own):
                continue
            flat = self.cell[keys, 0] * width + self.cell[keys, 1]
            on_grid = weights.new_zeros(len(weights), len(own), height * width)
            on_grid.index_add_(2, flat, weights[:, own][..., keys])
            for index, (row, column) in enumerate(self.cell[queries[own]].tolist()):
                to = sums[:, height - 1 - row : 2 * height - 1 - row, width - 1 - column : 2 * width - 1 - column]
                to += on_grid[:, index].unflatten(1, (height, width))


def change_statistics(
    sample: SampleRecord, *, compares_texts: bool, names: Set[str] | None = None
) -> ChangedStatistics:
    """Return how the statistics of a sample change if its tokens have places in pictures.

    Args:
        sample: the sample.
        compares_texts: whether it keeps statistics that compare positions in a text.
        names: the statistics of pictures that are added; None adds all.
    """
    boxes = sample.text.boxes
    if boxes is None or not boxes.has_places or sample.split is not None:
        return ChangedStatistics({}, frozenset())
    of_text = {name for name, probe in PROBES.items() if any(part_named(each).uses_positions for each in probe.parts)}
    wanted = sample.keeps_weights and (names is None or len(names) > 0)
    measured = measure_in_picture(sample) if wanted else {}
    return ChangedStatistics(
        {name: values for name, values in measured.items() if names is None or name in names},
        frozenset() if compares_texts else of_text - {SELF_MASS.name},
    )


def measure_in_picture(sample: SampleRecord) -> dict[str, Tensor]:
    """Return the statistics of a sample with q and k: name -> (heads, queries); {} where its tokens form no grid."""
    grid = _grid_of(sample)
    if grid is None:
        return {}
    found, offsets = _measure(sample, grid, lambda rows: sample.weights(None, queries=rows), counts_offsets=True)
    found[ONE_WAY_MASS.name] = _weights_at_offsets(sample, grid, offsets)
    return {name: values.to(torch.float32) for name, values in found.items()}


def chance_in_picture(sample: SampleRecord) -> dict[str, Tensor]:
    """Return the statistics of a head that reads all visible keys alike: name -> (heads or 1, queries) float64."""
    grid = _grid_of(sample)
    if grid is None:
        return {}

    def even(rows: slice) -> Tensor:
        visible = sample.visible(queries=rows).double()
        visible = visible if visible.dim() == 3 else visible[None]
        return visible / visible.sum(-1, keepdim=True).clamp(min=1)

    found, _ = _measure(sample, grid, even, counts_offsets=False)
    found[ONE_WAY_MASS.name] = torch.cat([even(rows).amax(-1) for rows in _strips(sample)], -1)
    return found


def _grid_of(sample: SampleRecord) -> _PictureGrid | None:
    """Return the cells of the keys of a sample; None without cells, or where queries are no keys."""
    boxes = sample.text.boxes
    if boxes is None or sample.cross_attention or not bool((boxes.cell[:, 0] >= 0).any()):
        return None
    view = torch.stack([boxes.picture, boxes.view], 1).unique(dim=0, return_inverse=True)[1]
    view = view.masked_fill(boxes.cell[:, 0] < 0, _NO_VIEW)
    return _PictureGrid(view, boxes.cell[:, :2], sample.query_start, group_of_keys(sample.text))


def _measure(
    sample: SampleRecord, grid: _PictureGrid, weights_of: Callable[[slice], Tensor], *, counts_offsets: bool
) -> tuple[dict[str, Tensor], Tensor]:
    """Measure distances and neighbours, and find each head's commonest step.

    Args:
        sample: the sample.
        grid: the cells of its keys.
        weights_of: returns the weights of some queries, (heads, rows, keys).
        counts_offsets: whether the steps are counted; else they are 0.

    Returns:
        name -> (heads, queries) float64; and rows and columns of the steps, (heads, 2) int64.
    """
    found = []
    share_of = {probe.name: (grid.groups == number) for number, probe in enumerate(_MASS_OF_GROUP)}
    members = torch.stack([*share_of.values()], 1).double()  # (keys, groups)
    height, width = grid.size
    sums: Tensor | None = None
    for rows in _strips(sample):
        weights = weights_of(rows).double()
        steps, same = grid.of_queries(rows)
        of_view = (
            torch.stack([same, steps.double().square().sum(-1).sqrt(), steps.abs().amax(-1) <= 1], -1) * same[..., None]
        )
        of_query = (weights.transpose(0, 1) @ of_view).transpose(0, 1)  # (heads, rows, 3)
        found.append(torch.cat([of_query, weights @ members], -1))
        if counts_offsets:
            sums = weights.new_zeros(len(weights), 2 * height - 1, 2 * width - 1) if sums is None else sums
            grid.add_steps(sums, weights, rows)
    offsets = torch.zeros(sample.num_heads, 2, dtype=torch.int64)
    if sums is not None:
        sums[:, height - 1, width - 1] = 0  # a head that reads itself has a kind of its own
        best = sums.flatten(1).argmax(1)
        offsets = torch.stack([best // (2 * width - 1) - height + 1, best % (2 * width - 1) - width + 1], 1)
    total, lengths, neighbours, *shares = torch.cat(found, 1).unbind(-1)
    return {
        PATCH_DISTANCE.name: lengths / torch.where(total > 0, total, 1.0),
        NEIGHBOUR_MASS.name: neighbours,
        **{name: share for (name, own), share in zip(share_of.items(), shares, strict=True) if bool(own.any())},
    }, offsets


def _weights_at_offsets(sample: SampleRecord, grid: _PictureGrid, offsets: Tensor) -> Tensor:
    """Return the weight of each query on the key at its head's step, (heads, 2): (heads, queries) float64."""
    found = torch.zeros(sample.num_heads, sample.num_queries, dtype=torch.float64)
    for offset in offsets.unique(dim=0):
        keys = grid.keys_at(offset, sample.num_queries)
        heads = (offsets == offset).all(1)
        for segment in sample.segments:
            rows = slice(segment.row_start, segment.row_stop)
            call = MeasuredCall.from_request(*sample.request_of(segment), ProbeContext())
            own = keys[rows] - segment.key_start
            own = own.masked_fill((own < 0) | (own >= segment.key_stop - segment.key_start), -1)
            with torch.no_grad():
                weights = weight_at_keys(call, own[None].to(segment.request.shape.device))[0].double().cpu()
            found[heads, rows] = weights.masked_fill(own < 0, 0)[heads]
    return found


def _strips(sample: SampleRecord) -> Iterator[slice]:
    """Yield slices of the queries."""
    step = max(_CELLS_AT_ONCE // max(sample.num_keys * sample.num_heads, 1), 1)
    for start in range(0, sample.num_queries, step):
        yield slice(start, min(start + step, sample.num_queries))
