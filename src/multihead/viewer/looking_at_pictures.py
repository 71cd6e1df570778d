"""Run a model on pictures and record it: what `mh.look` and the command `look` do with pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from multihead.errors import ModelError
from multihead.kinds import Kind
from multihead.models.loading import LoadedModel, ModelDescription, describe, load, silence_transformers
from multihead.models.pictures import (
    ReadPictures,
    check_number_of_tokens,
    load_processor,
    number_of_picture_tokens,
    picture_call,
)
from multihead.models.source import FoundModel
from multihead.observation.observe import Options, record_calls
from multihead.observation.places import Progress
from multihead.observation.record import Record
from multihead.probes.catalogue import DEFAULT, POOLED_MAP
from multihead.probes.choices import MARGINS_OF_MAP
from multihead.record.pictures import read_by_query
from multihead.record.plots import save_png

MAX_PICTURE_TOKENS = 4096
"""The largest number of tokens that pictures may become, unless more is allowed."""
_MAX_ANSWER_TOKENS = 32


class PictureRun(NamedTuple):
    """A model that has read pictures.

    Attributes:
        record: the record of the run.
        images: the pictures, of Pillow, as the model's processor got them.
        tokens: how many tokens they became.
        notes: one sentence for each change of a picture.
    """

    record: Record
    images: list[Any]
    tokens: int
    notes: list[str]


class OpeningHead(NamedTuple):
    """The head and the query with which a page of pictures opens."""

    layer: int
    head: int
    query: int


def load_picture_model(
    model: str | FoundModel | ModelDescription, *, device: str = "cpu", dtype: str = "auto"
) -> tuple[LoadedModel, Any]:
    """Load a model that reads pictures, with the head that answers if it has one, and its processor."""
    described = model if isinstance(model, ModelDescription) else describe(model)
    processor = load_processor(described)
    return load(described, device=device, dtype=dtype, reads_pictures=True), processor


def look_at_pictures(
    loaded: LoadedModel,
    processor: Any,
    given: ReadPictures,
    text: str | None,
    *,
    max_tokens: int = MAX_PICTURE_TOKENS,
    layers: Sequence[int] | None = None,
    kinds: Sequence[Kind] = (),
    progress: Progress | None = None,
) -> PictureRun:
    """Run a model on pictures, and record it.

    A model of pictures alone reads each of them by itself, as one sample. A model that reads text too reads all
    pictures in one prompt. The latter, and a model with a decoder, write at most 32 tokens if they can. `progress` is
    called with (runs done, runs expected) while the places of tokens are measured; None shows a bar if that takes over
    two seconds.

    Raises:
        InputError: the pictures become more than `max_tokens` tokens.
        ModelError: the model reads no text and got one, or needs one and got none.
    """
    images, notes = given
    tokenizer = getattr(processor, "tokenizer", None)
    options = Options(
        layers,
        probes=(*DEFAULT, *MARGINS_OF_MAP, POOLED_MAP),
        kinds=kinds,
        names_pictures=True,
        compares_texts=False,
        processor=processor,
        tokenizer=tokenizer,
        progress=progress,
    )
    count, model = 0, loaded.model
    with torch.no_grad(), record_calls(model, options) as record:
        with_text = tokenizer is not None and text is not None
        writes = with_text or getattr(loaded.config, "is_encoder_decoder", False)
        for group in [images] if with_text else [[image] for image in images]:
            call = picture_call(loaded, processor, group, text)
            count += number_of_picture_tokens(loaded, processor, call)
            check_number_of_tokens(count, max_tokens)
            with silence_transformers():
                if writes and getattr(model, "can_generate", lambda: False)():
                    model.generate(**call, do_sample=False, max_new_tokens=_MAX_ANSWER_TOKENS)  # type: ignore[operator]
                else:
                    model(**call)
    record.title = loaded.title
    return PictureRun(record, images, count, notes)


def opening_head(record: Record) -> OpeningHead:
    """Return the head that reads a part of a picture furthest above an even spread, for the query that decides most.

    That query is the class token of an encoder, and of a language model the last token of the prompt, which predicts
    the first word of the answer.

    Raises:
        ModelError: no token of the record has a place in a picture.
    """
    best: tuple[float, OpeningHead] | None = None
    for layer in record.layers:
        one = layer.sample()
        boxes = one.text.boxes
        if one.cross_attention or boxes is None or not boxes.has_cells:
            continue
        query = 0 if one.text.ids is None else max(one.calls[0][0][1] - 1, 0)
        weights = read_by_query(layer, query).weights.masked_fill(boxes.picture < 0, 0)
        value, place = weights.flatten().max(0)
        if best is None or float(value) > best[0]:
            best = float(value), OpeningHead(layer.number, int(place) // weights.shape[1], query)
    if best is None:
        raise ModelError(
            f"No token of {record.title} has a place in a picture.", "Give a model whose tokens are parts of pictures."
        )
    return best[1]


def save_picture(run: PictureRun, file: str) -> OpeningHead:
    """Save the first picture, with what the opening head reads of it, as a PNG file."""
    opening = opening_head(run.record)
    save_png(lambda: run.record.plot_image(*opening, image=run.images[0]), file)
    return opening
