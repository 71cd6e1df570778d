"""Entry points: heads that are switched off, scaled or replaced, by their contributions to the output in float64."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ModelError, MultiheadError
from multihead.interventions.replacements import _choose_other_texts
from tests import oracle
from tests.fuzz.draw import Draw, Mismatch, check_error
from tests.fuzz.layers import CACHES, Texts, called
from tests.fuzz.models import _batch, _compare, _ours, sharp_model
from tests.fuzz.on_device import on_device

BEYOND = 40  # larger than any text


class Chosen:
    """The heads of a layer, their texts and positions, and what becomes of them.

    Attributes:
        heads: index of a head -> its factor.
        by: "scale", "mean" or "resample".
        over: over what means are taken.
    """

    def __init__(self, draw: Draw, texts: Texts, way: str) -> None:
        random = draw.stream("heads")
        self.by = draw.pick("by", "scale", "scale", "mean", "resample")
        if self.by == "resample" and (len(texts.lengths) < 2 or way == "stepped"):
            self.by = "scale"
        if way == "stepped":
            texts.mask = texts.mask & masks.Causal()
            if draw.pick("cache", *CACHES) == "window":  # the reference has no such mask
                self.by = "scale"
        heads = random.sample(range(texts.heads), random.randint(1, texts.heads - 1))
        self.heads = {head: random.choice((0.0, 0.0, 1.0, -2.0, 0.5)) for head in heads}
        self.over: Any = draw.pick("over", "text", "position")
        self.seed = random.randint(0, 9)
        first = random.randint(0, texts.longest)
        self.positions: Any = draw.pick(
            "positions", None, None, 0, first, [first, 0, first + 2], slice(first, None), slice(0, first + 1, 2)
        )
        self.samples = None if way == "stepped" else draw.pick("samples", None, None, [0], [1, 0, 2])
        draw.notes |= {name: each for name, each in vars(self).items() if name != "seed"}

    def tokens(self, length: int, index: int) -> Tensor:
        """Which tokens of a text are changed, (length,) bool."""
        places = torch.zeros(BEYOND + length, dtype=torch.bool)
        places[slice(None) if self.positions is None else self.positions] = (
            self.samples is None or index in self.samples
        )
        return places[:length]

    def intervention(self, texts: Texts) -> Any:
        """Make the intervention."""
        given: dict[str, Any] = {"positions": self.positions, "samples": self.samples}
        if self.by == "scale":
            return mh.scale_heads(texts.layer, {(0, head): factor for head, factor in self.heads.items()}, **given)
        heads = [(0, head) for head in self.heads]
        if self.by == "resample":
            return mh.ablate(texts.layer, heads, by="resample", seed=self.seed, **given)
        reference = [
            {"x": texts.x[index : index + 1, :length], "mask": texts.mask}
            for index, length in enumerate(texts.lengths)
            if length
        ]
        return mh.ablate(texts.layer, heads, by="mean", mean_over=self.over, reference=reference, **given)


def by_definition(texts: Texts, chosen: Chosen, dtype: torch.dtype) -> list[Tensor]:
    """The output of each text, (length, 12): without the heads, and with what they add to it changed."""
    numbers = range(len(texts.lengths))
    plain = copy.deepcopy(texts.layer).to(dtype)
    whole = [texts.alone(index, plain, dtype) for index in numbers]
    own = torch.ones(texts.heads, dtype=dtype) if plain.head_gates is None else plain.head_gates.detach()
    outputs = [each.clone() for each in whole]
    for head, factor in chosen.heads.items():
        gates = own.clone()
        gates[head] = 0
        plain.head_gates = nn.Parameter(gates)
        adds = [each - texts.alone(index, plain, dtype) for index, each in zip(numbers, whole, strict=True)]
        instead = replaced(chosen, adds, factor)
        for index in numbers:
            where = chosen.tokens(texts.lengths[index], index)[:, None]
            outputs[index] += torch.where(where, instead[index] - adds[index], 0)
    return outputs


def replaced(chosen: Chosen, adds: list[Tensor], factor: float) -> list[Tensor]:
    """What a head adds to the output of each text with the intervention, from what it adds without: (length, 12)."""
    if chosen.by == "scale":
        return [factor * each for each in adds]
    if chosen.by == "resample":
        other = _choose_other_texts(len(adds), chosen.seed).tolist()
        return [adds[each] for each in other]
    means = []
    for place in range(max(map(len, adds))):
        several = chosen.over == "text" and place > 0
        rows = [each[1:] if several else each[place : place + 1] for each in adds]
        means.append(torch.cat(rows).mean(0))
    return [torch.stack(means[: len(each)]) if len(each) else each for each in adds]


def heads_off(draw: Draw) -> None:
    """Changed heads of a layer with any options, of texts that are padded, packed or cached."""
    texts = Texts(draw)
    way = draw.pick("way", "right", "right", "left", "packed", "stepped")
    if not texts.lengths or (way == "packed" and not sum(texts.lengths)):
        return
    chosen = Chosen(draw, texts, way)
    if chosen.by == "resample":
        texts.lengths = [texts.longest] * len(texts.lengths)
    if chosen.by == "mean" and not any(texts.lengths):
        return
    draw.notes["way"] = way
    of_positions = "own position bias" in draw.used or "table" in draw.used
    changes = any(chosen.tokens(n, index).any() for index, n in enumerate(texts.lengths))
    with torch.no_grad():
        try:
            with ExitStack() as stack:
                stack.enter_context(on_device(texts.layer))
                if draw.has("observed", 0.15):
                    stack.enter_context(mh.observe(texts.layer, probes=("output_norm",)))
                stack.enter_context(chosen.intervention(texts))
                found = called(texts, way)
        except ModelError as error:
            if "was never reached" in str(error) and not changes:
                return
            raise
        except MultiheadError:
            if of_positions and texts.drops_keys:  # such a bias needs the first keys, too
                return
            raise
        if not changes and (chosen.positions, chosen.samples) != (None, None):
            raise Mismatch("an intervention without a token is no error")
        assert found is not None
        exact = by_definition(texts, chosen, torch.float64)
        plain = by_definition(texts, chosen, texts.dtype)
    for value, right, near in zip(found, exact, plain, strict=True):
        allowed = 4 * (oracle.budget(right, near) + 64 * torch.finfo(texts.dtype).eps)
        check_error(f"the output with heads by {chosen.by}", oracle.difference(value, right), allowed)


def heads_of_models_off(draw: Draw) -> None:
    """Scaled heads of tiny models of ten families, some of their tokens, against changed eager attention."""
    from tests.families import FAMILIES, PADDED
    from tests.interventions.changed_eager import changed_eager, scaled
    from tests.interventions.tiny_models import IMAGES, real_queries

    name = draw.pick("family", *FAMILIES)
    padding = draw.pick("padding", "none", "right", "left") if name in PADDED else "none"
    model = sharp_model(draw, name)
    batch = _batch(draw, name, padding)
    with torch.no_grad(), changed_eager(model, {}) as plain:
        model(**batch)
    random = draw.stream("heads")
    calls = random.sample(range(len(plain.outputs)), random.choice((1, 1, 2)))
    factors = {call: {head: random.choice((0.0, -2.0, 0.5)) for head in random.sample(range(4), 2)} for call in calls}
    positions = None if name in IMAGES else draw.pick("positions", None, [0], [0, 3], list(range(1, 12)))
    samples = draw.pick("samples", None, [1])
    way = draw.pick("way", "use", "packed", "observe")
    draw.notes |= {"family": name, "padding": padding, "heads": factors, "positions": positions, "samples": samples}
    changes = {}
    for call, given in factors.items():
        output = plain.outputs[call]
        real = real_queries(name, batch, call, output)
        position = real.cumsum(1) - 1
        where = torch.ones_like(real) if positions is None else real & torch.isin(position, torch.tensor(positions))
        where = where & torch.ones(2, 1).bool() if samples is None else where & torch.tensor([[False], [True]])
        changes[call] = scaled(given, where)

    def eager(kind: torch.dtype) -> Any:
        exact = copy.deepcopy(model).to(kind)
        inputs = {key: each.to(kind) if each.is_floating_point() else each for key, each in batch.items()}
        with torch.no_grad(), changed_eager(exact, changes):
            return exact(**inputs)

    near = eager(torch.float32)
    try:
        right = eager(torch.float64)
    except RuntimeError:  # a family without float64
        right = near
    right = right if bool(right[0].isfinite().all()) else near
    heads = {(call, head): factor for call, given in factors.items() for head, factor in given.items()}
    try:
        with on_device(model), mh.scale_heads(model, heads, positions=positions, samples=samples):
            found, _ = _ours(draw, model, batch, way)
    except ModelError:
        if way == "packed":  # not every family can
            return
        raise
    kept = batch.get("decoder_attention_mask", batch.get("attention_mask"))
    rows = slice(None) if kept is None else kept.bool()
    _compare("output with changed heads", found[rows], right[0][rows], near[0][rows])
