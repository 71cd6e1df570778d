"""Entry points of the layer: against its definition in float64, and each text of a batch against the text alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks, scores
from multihead.errors import MultiheadError
from tests import oracle
from tests.agreeing import SLACK
from tests.drawing import Every
from tests.fuzz.draw import BUDGET, Draw, Mismatch, check_error
from tests.fuzz.masks import Before
from tests.fuzz.on_device import CPU, moved, on_device
from tests.layer.layer_drawing import WAYS, LayerCase, built, layer_cases
from tests.layer.layer_ways import LAYER_SLACK, MEASURED, assert_statistics_agree, by_the_book, by_the_layer

ALLOWED = LAYER_SLACK * SLACK["native"]


def layer(draw: Draw) -> None:
    """A layer with any options, called in any way: output and gradients."""
    way = draw.pick("way", *WAYS)
    case: LayerCase | None = draw.from_strategy("layer", layer_cases(None, way, longest=draw.size("longest", 4, 8, 12)))
    if case is None:
        return
    draw.notes["case"] = case
    made = built(case)
    if draw.has("observed", 0.15):
        with on_device(made), mh.observe(made, probes=MEASURED) as seen:
            by_the_layer(case, made)
        wholes = by_the_book(case, made, torch.float64)[1], by_the_book(case, made, case.dtype)[1]
        assert_statistics_agree(case, seen, wholes, BUDGET * ALLOWED)
    with on_device(made):
        found = moved(by_the_layer(case, made), CPU)
    compare_results(case.dtype, found, lambda dtype: by_the_book(case, made, dtype)[0])


def compare_results(dtype: torch.dtype, found: dict[str, Tensor], book: Any) -> None:
    """Compare with float64; the plain computation in the dtype is only made where something is off."""
    exact, plain = book(torch.float64), None
    # What cancels in one gradient was rounded at the size of the others.
    size = max((float(each.abs().max()) for each in exact.values() if each.numel()), default=1.0)
    size = max(size, 1.0)
    for name, value in found.items():
        error = oracle.difference(value, exact[name])
        if error <= 32 * torch.finfo(dtype).eps * size:
            continue
        plain = book(dtype) if plain is None else plain
        allowed = ALLOWED * oracle.budget(exact[name], plain[name].to(dtype))
        check_error(f"gradient of a parameter: {name}" if "." in name else name, error, allowed)


class Absolute(nn.Module):
    """A position bias of a user: a table of absolute positions, as a tensor."""

    def __init__(self, heads: int, longest: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(heads, longest, longest) * 2)

    def forward(
        self,
        queries: int,
        keys: int,
        *,
        query_start: int | Tensor = 0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        first = query_start if isinstance(query_start, Tensor) else torch.tensor([query_start])
        last = self.weight.shape[1] - 1
        rows = (first[:, None] + torch.arange(queries, device=first.device)).clamp(0, last)  # (batch or 1, queries)
        columns = torch.arange(keys).clamp(max=last)
        found = self.weight[:, rows[:, :, None], columns[None, None]].transpose(0, 1)
        return found.to(device=device, dtype=dtype)  # (batch or 1, heads, queries, keys)


def made_layer(draw: Draw, heads: int, longest: int) -> mh.MultiHeadAttention:
    """Make a layer with some options, all of its parameters random."""
    options: dict[str, Any] = {}
    for name, make in OPTIONS.items():
        if draw.has(name, 0.12):
            options |= make(heads, longest)
    if "add_bias_kv" in options and "position_bias" in options:
        del options["add_bias_kv"]
    draw.notes["options"] = ", ".join(f"{name}={type(each).__name__}" for name, each in options.items()) or "none"
    kv_heads = draw.pick("kv heads", *(n for n in (1, 2, 3) if heads % n == 0))
    torch.manual_seed(draw.stream("parameters").getrandbits(48))
    made = mh.MultiHeadAttention(12, heads, num_kv_heads=kv_heads, head_dim=4, **options)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if not name.startswith("position_bias"):
                parameter.normal_(std=0.6)
    return made.eval()


OPTIONS: dict[str, Any] = {
    "own position bias": lambda heads, longest: {"position_bias": Absolute(heads, longest)},
    "ALiBi": lambda heads, _: {"position_bias": scores.ALiBi(heads)},
    "T5": lambda heads, _: {"position_bias": scores.T5Bias(heads)},
    "table": lambda heads, longest: {"position_bias": scores.LearnedBias(heads, longest, longest)},
    "rotary": lambda *_: {"rotary": mh.Rotary()},
    "qk_norm": lambda *_: {"qk_norm": mh.QKNorm()},
    "softcap": lambda *_: {"softcap": 3.0},
    "sinks": lambda *_: {"sinks": True},
    "head_gates": lambda *_: {"head_gates": True},
    "add_bias_kv": lambda *_: {"add_bias_kv": True},
    "add_zero_attn": lambda *_: {"add_zero_attn": True},
    "mean": lambda *_: {"merge": "mean"},
}


def drawn_text_mask(draw: Draw) -> masks.Mask:
    """A mask that says the same of a text alone and in a batch."""
    if not draw.has("mask", 0.6):
        return masks.Full()
    random = draw.stream("mask")
    some: tuple[masks.Mask, ...] = (
        masks.Causal(),
        masks.Causal(),
        masks.Window(3),
        masks.Window(2, after=1),
        Every(3),
        Every(2),
        Before(1),
    )
    mask = random.choice(some)
    for _ in range(random.choice((0, 0, 1, 2))):
        other = random.choice(some)
        mask = mask & other if random.random() < 0.5 else mask | other
    draw.notes["mask"] = mask
    return mask


class Texts:
    """A batch of texts of different lengths, the layer that reads them, and what it gives for each alone."""

    def __init__(self, draw: Draw) -> None:
        self.draw, self.heads = draw, draw.pick("heads", 2, 3, 4)
        self.longest = draw.size("longest", 3, 5, 8, 12, 20, 33)
        batch = 0 if draw.has("empty batch", 0.04) else draw.pick("batch", 1, 2, 2, 3, 4)
        random = draw.stream("lengths")
        self.lengths = [random.choice((0, 1, self.longest, random.randint(0, self.longest))) for _ in range(batch)]
        if batch and draw.pick("one text is full", True, True, True, False):
            self.lengths[0] = self.longest
        self.dtype = draw.feature("dtype", torch.float32, torch.float64, share=0.3)
        self.drops_keys = False  # whether a cache forgets the first ones
        self.layer = made_layer(draw, self.heads, self.longest).to(self.dtype)
        self.mask = drawn_text_mask(draw)
        self.x = draw.normal("x", batch, self.longest, 12).to(self.dtype)
        draw.notes |= {"lengths": self.lengths, "longest": self.longest, "heads": self.heads, "dtype": self.dtype}

    def alone(self, index: int, layer: nn.Module | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """(length, 12): the output of one text, from a call without padding."""
        x = self.x[index : index + 1, : self.lengths[index]].to(dtype or self.dtype)
        output: Tensor = (self.layer if layer is None else layer)(x, mask=self.mask)
        return output[0]

    def compare(self, name: str, found: list[Tensor]) -> None:
        """Compare the output of each text with that of the text alone, in float64."""
        exact_layer = copy.deepcopy(self.layer).double()
        for index, value in enumerate(found):
            exact = self.alone(index, exact_layer, torch.float64)
            plain = self.alone(index)
            allowed = 4 * (oracle.budget(exact, plain) + 16 * torch.finfo(self.dtype).eps)
            check_error(f"{name} of a text next to that of the text alone", oracle.difference(value, exact), allowed)


def padded(texts: Texts, side: str) -> list[Tensor]:
    """Call the layer on a padded batch."""
    x = torch.full_like(texts.x, torch.nan)
    for index, length in enumerate(texts.lengths):
        place = slice(0, length) if side == "right" else slice(texts.longest - length, None)
        x[index, place] = texts.x[index, :length]
    lengths: Any = texts.lengths
    form = texts.draw.pick("form of lengths", "list", "tuple", "int64", "int32")
    if form != "list":
        lengths = tuple(lengths) if form == "tuple" else torch.tensor(lengths, dtype=getattr(torch, form))
    output = texts.layer(x, mask=texts.mask, lengths=lengths, padding_side=side)
    found = []
    for index, length in enumerate(texts.lengths):
        place = slice(0, length) if side == "right" else slice(texts.longest - length, None)
        found.append(output[index, place])
        outside = output[index, length:] if side == "right" else output[index, : texts.longest - length]
        if not bool((outside == 0).all()):
            raise Mismatch("the output of padding is not 0")
    return found


def packed(texts: Texts) -> list[Tensor]:
    tokens, packing = mh.pack(texts.x, texts.lengths)
    output = mh.unpack(texts.layer(tokens, mask=texts.mask, packing=packing), packing)
    return [row[:length] for row, length in zip(output, texts.lengths, strict=True)]


def in_documents(texts: Texts) -> list[Tensor]:
    """All texts as documents of a few rows, with tokens of no document after them, at once or with a cache."""
    draw, rows = texts.draw, texts.draw.pick("rows", 1, 1, 2, 3)
    texts.mask = texts.mask & masks.Causal() if draw.has("causal documents", 0.5) else texts.mask
    places = [index * rows // max(len(texts.lengths), 1) for index in range(len(texts.lengths))]
    lengths = [[n for n, place in zip(texts.lengths, places, strict=True) if place == row] for row in range(rows)]
    if rows > 1:  # lengths of 0 at the end fill up a row
        lengths = [[n for n in row if n] for row in lengths]
    width = max(map(sum, lengths)) + draw.pick("more tokens", 0, 0, 2)
    x = texts.draw.normal("tokens of no document", rows, width, 12).to(texts.dtype)
    edges, at = [], dict.fromkeys(range(rows), 0)
    for index, (length, row) in enumerate(zip(texts.lengths, places, strict=True)):
        edges.append((row, slice(at[row], at[row] + length)))
        x[row, edges[-1][1]] = texts.x[index, :length]
        at[row] += length
    counts: Any = lengths if rows > 1 else lengths[0]
    if rows == 1 and draw.has("tensor of documents", 0.5):
        counts = torch.tensor(counts, dtype=torch.int64)
    output = texts.layer(x, mask=texts.mask & masks.Documents(counts))
    return [output[row, tokens] for row, tokens in edges]


CACHES = ("growing", "capacity", "window")


def stepped(texts: Texts) -> list[Tensor]:
    """Each text by itself, some tokens at a time, with a cache."""
    draw, found = texts.draw, []
    kind = draw.pick("cache", *CACHES)
    texts.mask = texts.mask & masks.Causal()
    options: dict[str, int] = {}
    if kind == "capacity":
        options["capacity"] = texts.longest + 1
    elif kind == "window":
        options["window"] = draw.pick("window", 1, 2, 4, 16)
        texts.drops_keys = True
        texts.mask = texts.mask & masks.Window(options["window"])
    draw.notes |= {"cache": options, "mask": texts.mask}
    random = draw.stream("steps")
    for index, length in enumerate(texts.lengths):
        cache, parts, first = mh.KeyValueCache(**options), [texts.x.new_zeros(0, 12)], 0  # type: ignore[arg-type]
        while first < length:
            count = random.choice((1, 1, 2, 3, length))
            step = texts.x[index : index + 1, first : min(first + count, length)]
            with torch.no_grad():
                parts.append(texts.layer(step, mask=texts.mask, cache=cache)[0, :, : texts.layer.output_dim])
            first += count
        found.append(torch.cat(parts))
    return found


def called(texts: Texts, way: str) -> list[Tensor] | None:
    """Call the layer on all texts: (length, 12) each; None where there is nothing to pack."""
    if way == "packed":
        return packed(texts) if texts.lengths else None
    if way == "documents":
        return in_documents(texts) if texts.lengths and texts.layer.bias_k is None else None
    return stepped(texts) if way == "stepped" else padded(texts, way)


def texts(draw: Draw) -> None:
    """Padded, packed and cached texts: each is as if it was alone."""
    made = Texts(draw)
    way = draw.pick("way", "right", "right", "left", "packed", "documents", "stepped")
    draw.notes["way"] = way
    with torch.no_grad():
        try:
            with on_device(made.layer):
                found = called(made, way)
        except MultiheadError:
            of_positions = "own position bias" in draw.used or "table" in draw.used
            if of_positions and made.drops_keys:  # such a bias needs the first keys, too
                return
            raise
        if found is not None:
            made.compare({"stepped": "a cached output", "packed": "a packed output"}.get(way, "a padded output"), found)
