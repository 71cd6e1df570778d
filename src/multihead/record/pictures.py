"""What queries read of a picture: weights as rows and columns of the picture, sums over queries, and rollout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multihead.errors import ArgumentError, ProbeError
from multihead.locale.escaping import escape_controls
from multihead.probes.places import PICTURE_GROUPS, PlaceTable
from multihead.record.layer import LayerRecord
from multihead.record.plots import import_pyplot, report_colormap
from multihead.record.sample import SampleRecord
from multihead.record.texts import group_of_keys

_CELLS_AT_ONCE = 1 << 22  # bounds the memory of weights, however many queries are added up
_LOWEST_SHOWN, _HIGHEST_SHOWN = 0.1, 100  # times an even spread
_QUERY_COLOUR = "#E0218A"


class QueryReading(NamedTuple):
    """What a query reads, in all heads of a layer.

    Attributes:
        query: the index of the query.
        weights: (heads, keys), times an even spread over the keys that the query sees.
        mean: (keys,), the mean over the heads.
        shares: (heads, 3) float64, the share of the weight on each of `PICTURE_GROUPS`.
    """

    query: int
    weights: Tensor
    mean: Tensor
    shares: Tensor


def read_by_query(layer: LayerRecord, query: int | str, *, sample: int = 0) -> QueryReading:
    """Return what a query reads, for all heads at once; errors are those of `Record.image_weights`.

    Args:
        layer: a layer whose keys have places in pictures.
        query: the index of the query, or the name of its token.
        sample: which sample.
    """
    one = layer.sample(sample)
    _boxes_of(layer, one)
    index = query_index(one, query)
    row = slice(index, index + 1)
    weights, groups = one.weights(None, queries=row)[:, 0], group_of_keys(one.text)
    times = weights * one.visible(queries=row).sum(-1).amax()
    shares = weights.new_zeros(len(weights), len(PICTURE_GROUPS), dtype=torch.float64)
    return QueryReading(index, times, times.mean(0), shares.index_add_(1, groups, weights.double()))


def keys_of_view(boxes: PlaceTable, picture: int, view: int) -> Tensor:
    """Return the key at each cell of a view, (rows, columns) int64; -1 where there is none.

    Raises:
        ArgumentError: there is no such view.
        ProbeError: its keys form no grid.
    """
    own = ((boxes.picture == picture) & (boxes.view == view)).nonzero()[:, 0]
    if not len(own):
        raise ArgumentError(
            f"There is no view {view!r} of a picture {picture!r}.",
            f"Give {' or '.join(f'picture={each.picture}, view={each.view}' for each in boxes.views)}.",
        )
    cells = boxes.cell[own]
    if bool((cells < 0).any()):
        raise ProbeError(
            "The tokens of the picture form no grid.", "Read their weights and boxes: layer.weights and text.boxes."
        )
    found = torch.full(tuple(cells[0, 2:].tolist()), -1)
    found[cells[:, 0], cells[:, 1]] = own
    return found


def weights_in_picture(
    layer: LayerRecord, head: int | Literal["mean"], query: int | str, *, sample: int, picture: int, view: int
) -> Tensor:
    """Return what a query reads of a picture, see `Record.image_weights`."""
    one = layer.sample(sample)
    boxes = _boxes_of(layer, one)
    index = query_index(one, query)
    row = slice(index, index + 1)
    weights = _mean_of_heads(one, head, row)[0]
    return _spread(boxes, weights * one.visible(queries=row).sum(-1).amax(), picture, view)


def received_in_picture(
    layer: LayerRecord, head: int | Literal["mean"], *, sample: int, picture: int, view: int
) -> Tensor:
    """Return what all queries read of a picture, see `Record.image_received`."""
    one = layer.sample(sample)
    boxes, found, even = _boxes_of(layer, one), torch.zeros(one.num_keys), torch.zeros(one.num_keys)
    for rows in _strips(one):
        visible = one.visible(queries=rows).double()
        visible = visible if visible.dim() == 2 else visible.mean(0)
        found = found + _mean_of_heads(one, head, rows).sum(0)
        even = even + (visible / visible.sum(1, keepdim=True).clamp(min=1)).sum(0)
    return _spread(boxes, found / even, picture, view)


def rollout(layers: Sequence[LayerRecord], query: int | str, *, sample: int) -> Tensor:
    """Follow a query of the last of some layers through these layers, see `Record.rollout`.

    Args:
        layers: the layers, in the order they ran; those with other tokens are left out.
        query: the query.
        sample: the sample.
    """
    last = layers[-1].sample(sample)
    boxes, read = last.text.boxes, torch.zeros(last.num_keys, dtype=torch.float64)
    if last.cross_attention or last.num_queries != last.num_keys:
        raise ProbeError(
            f"The queries of {layers[-1].name} are not its keys, so layers cannot be multiplied.",
            "Give a layer of self-attention: layer=.",
        )
    read[query_index(last, query)] = 1
    for layer in reversed(layers):
        one = layer.sample(sample) if sample < layer.num_samples else None
        if one is None or one.cross_attention or (one.num_queries, one.num_keys) != (len(read), len(read)):
            continue
        if not _are_equal(boxes, one.text.boxes):
            raise ProbeError(
                f"The tokens of {layer.name} are in another order than those of {layers[-1].name}.",
                "Look at the layers one by one: image_weights.",
            )
        through = torch.zeros_like(read)
        for rows in _strips(one):
            if bool(read[rows].any()):
                through += read[rows] @ _mean_of_heads(one, "mean", rows).double()
        read = (read + through) / 2
    return read


def plot_picture(
    weights: Tensor,
    one: SampleRecord,
    *,
    title: str,
    query: int | None,
    picture: int,
    view: int,
    image: Any = None,
    ax: Any = None,
) -> Any:
    """Draw weights of a picture, (rows, columns), as times an even spread, on one logarithmic scale of colours.

    Args:
        weights: the weights.
        one: the sample.
        title: the title.
        query: the query, which is outlined if it is a part of the picture; None for no query.
        picture: number of the picture.
        view: number of its view.
        image: the picture, of Pillow or an array, which is drawn in grey underneath; None draws the weights alone.
        ax: the matplotlib axes to draw on; None makes new ones.
    """
    plt = import_pyplot()
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Rectangle

    boxes = one.text.boxes
    assert boxes is not None
    own = (boxes.picture == picture) & (boxes.view == view)
    box = boxes.box[own]
    rows, columns = weights.shape
    extent = (0.0, float(columns), float(rows), 0.0)
    if not bool(box.isnan().any()):
        extent = tuple(box[:, (0, 2, 3, 1)].amax(0).tolist())
        extent = (float(box[:, 0].amin()), extent[1], extent[2], float(box[:, 1].amin()))
    if ax is None:
        ax = plt.subplots(figsize=(7, 6), layout="constrained")[1]
    if image is not None:
        grey = np.asarray(image.convert("L") if hasattr(image, "convert") else image)
        ax.imshow(grey, cmap="gray", extent=(0, grey.shape[1], grey.shape[0], 0), interpolation="nearest")
    shown = ax.imshow(
        weights.float().clamp(min=_LOWEST_SHOWN).numpy(),
        cmap=report_colormap(),
        norm=LogNorm(_LOWEST_SHOWN, _HIGHEST_SHOWN, clip=True),
        extent=extent,
        interpolation="nearest",
        alpha=1 if image is None else 0.6,
    )
    if query is not None and bool(own[query]) and not bool(box.isnan().any()):
        left, top, right, bottom = boxes.box[query].tolist()
        ax.add_patch(
            Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=_QUERY_COLOUR, linewidth=2)
        )
    ax.set(title=escape_controls(title), xlabel="pixels", ylabel="pixels")
    bar = ax.figure.colorbar(shown, ax=ax, label="times an even spread", shrink=0.8)
    bar.set_ticks([0.1, 1, 10, 100], labels=["0.1", "1", "10", "100"])
    return ax


def query_index(one: SampleRecord, query: int | str) -> int:
    """Return the index of a query that is given by its index, negative from the end, or by its name.

    Raises:
        ArgumentError: there is no such query, or several have the name.
    """
    if isinstance(query, str):
        tokens = one.query_text.tokens or []
        places = [index for index, token in enumerate(tokens) if token == query]
        if len(places) == 1:
            return places[0]
        finding = f"{len(places)} tokens are called {query!r}." if places else f"There is no token {query!r}."
        raise ArgumentError(finding, 'Give the index of a query, or a name that one has, such as "[CLS]" or "r2 c5".')
    if isinstance(query, bool) or not isinstance(query, int) or not -one.num_queries <= query < one.num_queries:
        raise ArgumentError(
            f"query is {query!r}.", f"Give an integer from 0 to {one.num_queries - 1}, or the name of a token."
        )
    return query % one.num_queries


def _boxes_of(layer: LayerRecord, one: SampleRecord) -> PlaceTable:
    boxes = one.text.boxes
    if boxes is None or not boxes.has_places:
        raise ProbeError(
            f"The tokens of {layer.name} have no places in pictures.",
            "Observe the model with processor=, and call the processor in the context or give images=.",
        )
    return boxes


def _spread(boxes: PlaceTable, values: Tensor, picture: int, view: int) -> Tensor:
    """Return the values of keys, (keys,), at the cells of a view: (rows, columns), NaN where no key is."""
    keys = keys_of_view(boxes, picture, view)
    return torch.where(keys < 0, torch.nan, values[keys])


def _mean_of_heads(one: SampleRecord, head: int | Literal["mean"], rows: slice) -> Tensor:
    """Return the weights of a head, or the mean over all heads, of some queries: (rows, keys)."""
    if head == "mean":
        return one.weights(None, queries=rows).mean(0)
    if isinstance(head, str):
        raise ArgumentError(f"head is {head!r}.", 'Give the index of a head, or "mean".')
    return one.weights(head, queries=rows)


def _strips(one: SampleRecord) -> Iterator[slice]:
    """Yield slices of the queries."""
    step = max(_CELLS_AT_ONCE // max(one.num_keys * one.num_heads, 1), 1)
    for start in range(0, one.num_queries, step):
        yield slice(start, min(start + step, one.num_queries))


def _are_equal(one: PlaceTable | None, other: PlaceTable | None) -> bool:
    """Whether two texts have the same places, or neither has any."""
    if one is None or other is None:
        return one is other
    return torch.equal(one.picture, other.picture) and torch.equal(one.patch, other.patch)
