"""Describe the pictures of a text for its page: their pixels, their views and rows of weights."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.probes.places import NO_PICTURE, PICTURE_GROUPS, PlaceTable, View
from multihead.record.texts import group_of_keys
from multihead.tensors.shapes import consecutive_slices
from multihead.viewer import maps
from multihead.viewer.offline import PackedArrays, PageFullError
from multihead.viewer.page_types import GreyPicture, LayerDescription, PictureText, PictureView
from multihead.viewer.tiles import visible_weights

if TYPE_CHECKING:
    from multihead.observation.record import Record
    from multihead.record.sample import SampleRecord
    from multihead.record.texts import Text

ANSWER_GROUP = len(PICTURE_GROUPS)
"""The group of the words that a model has generated, after those of `PICTURE_GROUPS`."""

RASTERS = (4, 8, 16)
"""Rows and columns of the rasters of patches whose rows a page stores, the finer ones if there is room."""

_WEIGHTS_AT_ONCE = 1 << 24  # bounds the memory of rows that are read together
_CELL_WITHOUT_BOX = 16  # pixels of a cell that is drawn where the boxes of a grid are unknown
_LETTERS_OF_CONTENT = 3  # a generated word of so many letters is taken for one that has a content, except these
_WORDS_WITHOUT_CONTENT = frozenset({"the", "and", "this", "that", "there", "here", "these", "are", "was", "with"})


def describe_pictures(
    record: Record, layers: Sequence[LayerDescription], sample: int
) -> tuple[list[GreyPicture], list[PictureText]]:
    """Describe the pictures of a text, and the texts of layers whose keys have places in them, that with words first.

    Args:
        record: the record.
        layers: the descriptions of its layers.
        sample: index of the text.
    """
    images: list[GreyPicture] = []
    found: dict[tuple[int, int], PictureText] = {}
    for layer, described in zip(record.layers, layers, strict=True):
        one, number = layer.sample(sample), (described["keyText"], described["queryText"])
        if described["rows"] != "all":
            continue
        if number in found:
            found[number]["layers"].append(layer.number)
        elif (part := _describe_text(one, number, images)) is not None:
            found[number] = part | {"layers": [layer.number]}
    return images, sorted(found.values(), key=lambda part: PICTURE_GROUPS.index("words") not in part["groups"])


def rows_of_tokens(ones: Sequence[SampleRecord], wanted: Sequence[int]) -> Tensor:
    """Return the weights of the queries at some tokens, in all heads of some layers.

    The tokens are the keys, and in cross-attention the queries after them, which no query reads.

    Returns:
        (heads, wanted tokens, tokens) float32, NaN = masked.
    """
    found = []
    for one in ones:
        queries = one.num_queries if one.cross_attention else 0
        begin = one.num_keys if queries else one.query_start
        rows = torch.full((one.num_heads, len(wanted), one.num_keys + queries), torch.nan)
        known = [place for place, token in enumerate(wanted) if 0 <= token - begin < one.num_queries]
        for places in _runs_of_one_step(known, wanted):
            first, last, step = wanted[places[0]] - begin, wanted[places[-1]] - begin, 1
            if len(places) > 1:
                step = wanted[places[1]] - wanted[places[0]]
            chosen = slice(min(first, last), max(first, last) + 1, abs(step))
            weights = visible_weights(one, None, queries=chosen).float()
            rows[:, places, : one.num_keys] = weights.flip(1) if step < 0 else weights
        found.append(rows)
    return torch.cat(found)


def _runs_of_one_step(places: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
    """Divide places into runs whose tokens have one distance, because the weights of a slice are read at once."""
    runs: list[list[int]] = []
    for place in places:
        run = runs[-1] if runs else [place]
        step = wanted[place] - wanted[run[-1]]
        if step and (len(run) == 1 or step == wanted[run[1]] - wanted[run[0]]):
            run.append(place)
        else:
            runs.append([place])
    return runs


def add_rows(arrays: PackedArrays, ones: Sequence[SampleRecord], part: PictureText, name: str) -> list[int]:
    """Add the rows of the most important tokens of a text as `{name} {token}`, in 12 bits.

    First the token with which the page opens, then those outside of the picture, the last one first, then rasters of
    patches. They are stored in all heads until half of the room is taken, then as means over the heads of each layer
    until half of the rest is taken.

    Args:
        arrays: the arrays of the page.
        ones: the layers of the text.
        part: the description of the text.
        name: begin of the names of the arrays.

    Returns:
        The tokens whose rows were added.
    """
    room, added, whole = arrays.max_bytes, list[int](), True
    arrays.max_bytes = arrays.num_bytes + (room - arrays.num_bytes) / 2
    wanted, cells = list(_tokens_by_importance(part)), sum(one.num_heads for one in ones) * len(part["groups"])
    with suppress(PageFullError):
        for block in consecutive_slices(len(wanted), max(1, _WEIGHTS_AT_ONCE // cells)):
            for token, rows in zip(wanted[block], rows_of_tokens(ones, wanted[block]).unbind(1), strict=True):
                means = torch.stack(
                    [each.nan_to_num(0).mean(0) for each in rows.split([one.num_heads for one in ones])]
                )
                try:
                    _add(arrays, f"{name} {token}", rows if whole else means)
                except PageFullError:
                    if not whole:
                        raise
                    whole, arrays.max_bytes = False, room - (room - arrays.num_bytes) / 2
                    _add(arrays, f"{name} {token}", means)
                added.append(token)
    arrays.max_bytes = room
    return added


def _add(arrays: PackedArrays, name: str, rows: Tensor) -> None:
    codes = maps.encode_weights(rows, bits=12, rounding=maps.LargestRoundingError())
    arrays.add(name, maps.pack_codes(codes, 12), shape=list(rows.shape), coding="root12")


def _tokens_by_importance(part: PictureText) -> Iterator[int]:
    """Yield the tokens whose rows a page should have: at first the opening one, at last the finest raster."""
    groups = part["groups"]
    outside = [token for token, group in enumerate(groups) if group != PICTURE_GROUPS.index("picture")]
    crosses = part["keys"] < len(groups)  # the keys are no queries
    outside = [token for token in outside if token >= part["keys"]] if crosses else outside
    # The row that predicts a generated word is that of the token before it.
    wanted = [token - (groups[token] == ANSWER_GROUP) for token in (part["opening"], *reversed(outside))]
    for side in () if crosses else RASTERS:
        for view in part["views"]:
            centres = torch.tensor(view["boxes"]).view(-1, 2, 2).mean(1)  # (keys, x and y)
            ends = centres.amin(0), centres.amax(0)
            steps = (torch.arange(side) + 0.5) / side
            points = torch.cartesian_prod(*(low + (high - low) * steps for low, high in zip(*ends, strict=True)))
            wanted += [view["keys"][each] for each in torch.cdist(points, centres).argmin(1).tolist()]
    yield from dict.fromkeys(wanted)


def _describe_text(one: SampleRecord, number: tuple[int, int], images: list[GreyPicture]) -> PictureText | None:
    """Describe a text without its layers, adding its pictures to `images`; None if no token has a place to draw.

    Args:
        one: a layer that reads it.
        number: index of the text of the keys, and of that of the queries.
        images: the pictures so far.
    """
    text = one.text
    if text.boxes is None or (one.cross_attention and one.query_text.tokens is None):
        return None
    views = [each for each in (_describe_view(text.boxes, view) for view in text.boxes.views) if each is not None]
    if not views:
        return None
    for view in views:
        view["image"] = _index_of_image(text, view, images)
    groups, tokens = group_of_keys(text), list(text.tokens or [""] * one.num_keys)
    if one.cross_attention:  # the first row predicts the second token
        of_queries = torch.full((one.num_queries,), ANSWER_GROUP)
        of_queries[:1] = PICTURE_GROUPS.index("words")
        groups = torch.cat([groups, of_queries])
        tokens += one.query_text.tokens or []
    else:
        prompt = one.calls[0][1][1] if one.calls else one.num_keys
        groups[prompt:] = torch.where(text.boxes.picture[prompt:] == NO_PICTURE, ANSWER_GROUP, groups[prompt:])
    listed: list[int] = groups.tolist()
    opening = _opening_token(tokens, listed, views)
    return {
        "text": number[0],
        "queryText": number[1],
        "keys": one.num_keys,
        "layers": [],
        "views": views,
        "groups": listed,
        "opening": opening,
    }


def _describe_view(boxes: PlaceTable, view: View) -> PictureView | None:
    """Describe a view of a picture; None if neither boxes nor a grid are known. Without boxes, cells are squares."""
    keys = ((boxes.picture == view.picture) & (boxes.view == view.view)).nonzero()[:, 0]
    box, cell = boxes.box[keys], boxes.cell[keys]
    if bool(box.isnan().any()):
        if not view.rows:
            return None
        box = torch.stack([cell[:, 1], cell[:, 0], cell[:, 1] + 1, cell[:, 0] + 1], 1) * float(_CELL_WITHOUT_BOX)
    return {
        "picture": view.picture,
        "view": view.view,
        "image": -1,
        "rows": view.rows,
        "columns": view.columns,
        "keys": keys.tolist(),
        "boxes": [round(each, 1) for each in box.flatten().tolist()],
    }


def _index_of_image(text: Text, view: PictureView, images: list[GreyPicture]) -> int:
    """Return the index of the picture of a view in `images`, to which it is added if it is not there."""
    if view["picture"] < len(text.pictures):
        picture = text.pictures[view["picture"]]
        content = f"data:image/png;base64,{base64.b64encode(picture.png()).decode('ascii')}"
        image = GreyPicture(source=content, width=picture.width, height=picture.height)
    else:
        corners = torch.tensor(view["boxes"]).view(-1, 4)
        width, height = (float(each) for each in corners[:, 2:].amax(0))
        image = GreyPicture(source="", width=width, height=height)
    if image not in images:
        images.append(image)
    return images.index(image)


def _opening_token(tokens: Sequence[str], groups: Sequence[int], views: Sequence[PictureView]) -> int:
    """Return the token that the page shows at first.

    The first word of the answer that has a content; without an answer the last word of the prompt, and in an image
    encoder its class token or, without one, the patch in the middle.
    """

    def keys_of_group(wanted: int) -> list[int]:
        return [key for key, group in enumerate(groups) if group == wanted]

    if answer := keys_of_group(ANSWER_GROUP):
        words = {key: "".join(filter(str.isalpha, tokens[key])).lower() for key in answer}
        long = (key for key, word in words.items() if len(word) >= _LETTERS_OF_CONTENT or not word.isascii())
        return next((key for key in long if words[key] not in _WORDS_WITHOUT_CONTENT), answer[0])
    if prompt := keys_of_group(PICTURE_GROUPS.index("words")):
        return prompt[-1]
    own = keys_of_group(PICTURE_GROUPS.index("class"))
    return own[0] if own else views[0]["keys"][len(views[0]["keys"]) // 2]
