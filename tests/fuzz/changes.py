"""Entry point: a tensor of a call is changed in place between forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from random import Random

import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from tests.fuzz.calls import Drawn, drawn_cotangents, gradients, leaves_of
from tests.fuzz.draw import Draw
from tests.fuzz.judge import compare, judge, masked_cotangents

REFUSED = "inplace"


def tensors_of(mask: masks.Mask) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a mask holds, and those of its parts."""
    for value in mask.values().values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, masks.Mask):
                yield from tensors_of(each)
            elif isinstance(each, Tensor):
                yield type(mask).__name__, each


def changed(draw: Draw) -> None:
    """Gradients after an input was changed in place: an error, or those of the values that the forward pass read."""
    drawn = Drawn(draw)
    call = drawn.call
    leaves = leaves_of(drawn)
    options = drawn.given()
    assert call.v is not None
    output, logsumexp = mh.attention_with_logsumexp(call.q, call.k, call.v, **options)
    if not output.requires_grad:
        return
    cotangents: tuple[Tensor | None, Tensor | None] = drawn_cotangents(draw, output, logsumexp)
    judged = judge(call, *cotangents)
    kept = masked_cotangents(judged.rows, *cotangents)
    assert kept is not None
    there = [*tensors_of(drawn.mask), *((name, getattr(call, name)) for name in ("q", "k", "v", "bias", "sinks"))]
    there += [("output", output), ("query_start", drawn.start)]
    places = [(name, each) for name, each in there if isinstance(each, Tensor) and each.numel()]
    of_masks = [each for each in places if each[0] not in ("q", "k", "v", "bias", "sinks", "output", "query_start")]
    if not places:
        return
    random = draw.stream("changed")
    if of_masks and random.random() < 0.6:
        places = of_masks
    name, tensor = random.choice(places)
    draw.notes["changed"] = name
    before = copy.copy(call)
    for each in ("q", "k", "v", "bias", "sinks"):
        value = getattr(call, each)
        setattr(before, each, value if value is None else value.detach().clone())
    with torch.no_grad():
        try:
            change(random, tensor, drawn.size.keys)
        except RuntimeError:  # an expanded tensor cannot be written to
            return
    try:
        found = gradients(draw, leaves, output, logsumexp, kept)
    except RuntimeError as error:
        if REFUSED not in str(error):
            raise
        return
    compare(before, judged, found, kept)


def change(random: Random, tensor: Tensor, keys: int) -> None:
    """Write other numbers into a tensor."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_() if random.random() < 0.6 else tensor.fill_(random.random() < 0.5)
    elif tensor.is_floating_point():
        tensor.mul_(-3) if random.random() < 0.5 else tensor.fill_(0.25)
    else:
        tensor.fill_(random.choice((0, 0, keys, min(1, keys))))
