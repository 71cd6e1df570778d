"""Hypothesis strategies that draw whole calls of the layer: sizes, options, mask, padding, dtype and mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.layer.qk_norm import QKNorm
from multihead.masks.base import And, Or
from multihead.rotary import Linear, Llama3, Rotary, Yarn
from multihead.scores.bias import RelativeBias
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias
from tests.drawing import Draw, Sizes, interval_leaves, trees

WAYS = ("alone", "unbatched", "padded", "packed", "cached", "across", "across cached")
MODES = ("train", "eval", "no_grad")


@dataclass
class LayerCase:
    """One call of one layer, with every sample's tokens at its first places.

    Fields:
        way: how the call is made: one of `WAYS`.
        mode: one of `MODES`.
        dtype: of the layer and of all that it is given.
        size: of the attention.
        counts: how many tokens each sample has; all others are padding.
        key_counts: the same of the keys.
        steps: of a cache, how many tokens of each sample come in each step.
        side: on which side of the tokens padding stands.
        embed_dim: width of x; memory and values have `key_dim` and `value_width`.
        options: what the layer is made with.
        position: the kind of position bias, or None.
        mask: of the whole text.
        query_start: where the first query stands, as the call says it.
        bias: the kind of bias that the call is given, and its shape, or None.
        constant: the names of what is given and has no gradient.
        gates: the shape of the gates that the call is given, or None.
        parts: whether there is a memory, and whether there are separate values.
        cache: what the cache is made with.
        seed: of every number.
    """

    way: str
    mode: str
    dtype: torch.dtype
    size: Sizes
    counts: list[int]
    key_counts: list[int]
    steps: list[list[int]]
    side: str
    embed_dim: int
    key_dim: int
    value_width: int
    options: dict[str, Any]
    position: str | None
    mask: masks.Mask
    query_start: int | str | Tensor | None
    bias: tuple[str, tuple[int, ...]] | None
    constant: frozenset[str]
    gates: tuple[int, ...] | None
    parts: tuple[bool, bool]
    cache: dict[str, int]
    seed: int

    @property
    def follows(self) -> bool:
        """Whether gradients are wanted."""
        return self.mode != "no_grad"


@dataclass
class Leaves:
    """The tensors of a call, as they are given."""

    x: Tensor
    memory: Tensor | None = None
    values: Tensor | None = None
    bias: Tensor | RelativeBias | None = None
    head_gates: Tensor | None = None
    wanting: dict[str, Tensor] = field(default_factory=dict)


def built(case: LayerCase) -> mh.MultiHeadAttention:
    """Make the layer, every parameter drawn, and none at a value where a term would vanish."""
    size = case.size
    layer = mh.MultiHeadAttention(
        case.embed_dim,
        size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        value_head_dim=size.value_dim,
        key_dim=case.key_dim,
        value_dim=case.value_width,
        position_bias=POSITIONS[case.position](case) if case.position else None,
        dropout=0.0 if case.mode == "train" else 0.4,
        dtype=case.dtype,
        **case.options,
    )
    generator = torch.Generator().manual_seed(case.seed)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if name.startswith("qk_norm"):
                drawn = 1 + 0.3 * drawn
            elif name.endswith("proj.weight"):
                drawn = drawn * parameter.shape[1] ** -0.5
            parameter.copy_(drawn)
    return layer.train(case.mode == "train")


POSITIONS: dict[str, Callable[[LayerCase], torch.nn.Module]] = {
    "alibi": lambda case: ALiBi(case.size.heads),
    "t5": lambda case: T5Bias(case.size.heads, 8, 10, dtype=case.dtype),
    "t5 behind": lambda case: T5Bias(case.size.heads, 7, 11, both_ways=False, dtype=case.dtype),
    "learned": lambda case: LearnedBias(
        case.size.heads, case.size.queries + case.size.keys, case.size.keys + 2, dtype=case.dtype
    ),
}


def leaves(case: LayerCase, dtype: torch.dtype) -> Leaves:
    """The tensors of a call: drawn in the dtype of the case, then converted."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    found: dict[str, Tensor] = {}

    def drawn(name: str, *shape: int, hidden: bool = False) -> Tensor:
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype).to(dtype)
        if hidden:
            tensor = tensor.masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf)
        found[name] = tensor.requires_grad_(case.follows and name not in case.constant)
        return tensor

    size = case.size
    given = Leaves(drawn("x", size.batch, size.queries, case.embed_dim))
    if case.parts[0]:
        given.memory = drawn("memory", size.batch, size.keys, case.key_dim)
    if case.parts[1]:
        given.values = drawn("values", size.batch, size.keys, case.value_width)
    if case.bias is not None:
        kind, shape = case.bias
        tensor = drawn("bias", *shape, hidden=kind == "tensor that hides")
        given.bias = RelativeBias(tensor) if kind == "relative" else tensor
    if case.gates is not None:
        given.head_gates = drawn("head_gates", *case.gates)
    given.wanting = {name: tensor for name, tensor in found.items() if tensor.requires_grad}
    return given


@st.composite
def layer_cases(draw: Draw, kernel: str | None, way: str, *, longest: int = 8) -> LayerCase:
    """A call that the kernel takes, made in one way."""
    mode = draw(st.sampled_from(MODES))
    size, parts = draw(_layer_sizes(way, longest))
    embed_dim = draw(st.sampled_from((1, 6, 9)))
    key_dim = draw(st.sampled_from((embed_dim, 5))) if parts[0] else embed_dim
    value_width = draw(st.sampled_from((embed_dim, 7))) if parts[1] else key_dim
    steps = draw(_steps(size, whole=draw(st.booleans()))) if "cached" in way else []
    counts = [size.queries] * size.batch
    if steps:
        counts = [sum(step[sample] for step in steps) for sample in range(size.batch)]
    elif way in ("padded", "packed") or (way == "across" and draw(st.booleans())):
        counts = draw(st.lists(st.integers(0, size.queries), min_size=size.batch, max_size=size.batch))
    key_counts = counts if not parts[0] else [size.keys] * size.batch
    if parts[0] and draw(st.booleans()):
        key_counts = draw(st.lists(st.integers(0, size.keys), min_size=size.batch, max_size=size.batch))
    options = draw(_options(size, softcap=kernel != "sdpa"))
    position = None
    if not options.get("add_bias_kv") and draw(st.integers(0, 2)) == 0:
        moving = kernel == "sdpa" and mode != "no_grad"  # the fused kernel has no gradient for a bias
        position = draw(st.sampled_from(("alibi",) if moving else tuple(POSITIONS)))
    cache = draw(_caches(size, mode=mode)) if way == "cached" else {}
    if cache.get("window") and position == "learned":
        position = None
    return LayerCase(
        way=way,
        mode=mode,
        dtype=draw(st.sampled_from(dtypes_of(kernel))),
        size=size,
        counts=counts,
        key_counts=key_counts,
        steps=steps,
        side=draw(st.sampled_from(("right", "left"))),
        embed_dim=embed_dim,
        key_dim=key_dim,
        value_width=value_width,
        options=options,
        position=position,
        mask=draw(_masks(size, way, cache)),
        query_start=draw(_starts(size, way, position)),
        bias=draw(_biases(size)) if "cached" not in way else None,
        constant=frozenset({"bias"}) if kernel == "sdpa" else frozenset(),
        gates=draw(_gates(size)) if "cached" not in way else draw(st.sampled_from((None, (size.heads,)))),
        parts=parts,
        cache=cache,
        seed=draw(st.integers(0, 9999)),
    )


def dtypes_of(kernel: str | None) -> Sequence[torch.dtype]:
    return (torch.float32, torch.bfloat16) if kernel == "native" else (torch.float64, torch.float32, torch.bfloat16)


@st.composite
def _layer_sizes(draw: Draw, way: str, longest: int) -> tuple[Sizes, tuple[bool, bool]]:
    across = way.startswith("across")
    kv_heads = draw(st.integers(1, 2))
    queries = draw(st.integers(1, longest))
    size = Sizes(
        batch=1 if way == "unbatched" else draw(st.integers(1, 3)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        queries=queries,
        keys=draw(st.integers(1, longest)) if across else queries,
        head_dim=draw(st.sampled_from((2, 4, 6, 8))),
        value_dim=draw(st.sampled_from((1, 4, 5, 8))),
    )
    return size, (across, across and draw(st.booleans()))


@st.composite
def _options(draw: Draw, size: Sizes, *, softcap: bool) -> dict[str, Any]:
    """Options of the constructor, each in about a third of the layers."""
    found: dict[str, Any] = {}

    def perhaps(name: str, *values: object, of: int = 3) -> None:
        if draw(st.integers(1, of)) == 1:
            found[name] = draw(st.sampled_from(values))

    if draw(st.booleans()):
        found["rotary"] = draw(_rotaries(size.head_dim))
    perhaps("qk_norm", QKNorm(), QKNorm(over="all"), QKNorm("l2", initial_scale=2.0), QKNorm(learned=False, eps=0.1))
    if softcap:
        perhaps("softcap", 1.5)
    perhaps("sinks", True)
    perhaps("head_gates", True)
    perhaps("add_bias_kv", True, of=4)
    perhaps("add_zero_attn", True, of=4)
    perhaps("scale", 1.0, 0.3, -0.5)
    perhaps("merge", "mean")
    perhaps("bias", False, of=4)
    perhaps("output_projection", False, of=4)
    if found.get("output_projection", True):
        perhaps("output_dim", 3, of=4)
    return found


@st.composite
def _rotaries(draw: Draw, head_dim: int) -> Rotary:
    scalings = (None, Linear(2.5), Llama3(4.0, original_length=60), Yarn(4.0, 30))
    return Rotary(
        base=draw(st.sampled_from((10_000.0, 50.0))),
        dim=draw(st.sampled_from((None, 2, head_dim))),
        interleaved=draw(st.booleans()),
        scaling=draw(st.sampled_from(scalings)),
    )


@st.composite
def _steps(draw: Draw, size: Sizes, *, whole: bool) -> list[list[int]]:
    """Cut a text into steps; where not `whole`, each sample has tokens of its own number in each step."""
    cuts = sorted(draw(st.sets(st.integers(1, size.queries - 1), max_size=4))) if size.queries > 1 else []
    widths = [behind - first for first, behind in zip([0, *cuts], [*cuts, size.queries], strict=True)]
    if whole:
        return [[width] * size.batch for width in widths]
    return [[draw(st.integers(0, width)) for _ in range(size.batch)] for width in widths]


@st.composite
def _caches(draw: Draw, size: Sizes, *, mode: str) -> dict[str, int]:
    kind = draw(st.sampled_from(("growing", "window", "capacity")))
    if kind == "window":
        return {"window": draw(st.integers(1, size.queries + 1))}
    if kind == "capacity" and mode == "no_grad":  # it is written in place
        return {"capacity": size.queries + draw(st.integers(0, 3))}
    return {}


@st.composite
def _masks(draw: Draw, size: Sizes, way: str, cache: dict[str, int]) -> masks.Mask:
    """Any tree of masks; in steps only what has no row for each query and, but for a memory, hides what comes later."""
    if way in ("padded", "packed") and draw(st.booleans()):
        # What speaks of differences of positions only keeps a padded batch in one row of tokens.
        plain = (masks.Full(), masks.Causal(), masks.Window(3, after=1), masks.Causal() & masks.Window(2))
        return draw(st.sampled_from(plain))
    if "cached" not in way:
        return draw(trees(size, depth=2))
    of_text = interval_leaves(size).filter(lambda mask: not _has_rows(mask))
    mask = draw(st.one_of(st.just(masks.Full()), of_text, st.builds(_joined, of_text, of_text, st.booleans())))
    if way == "across cached":
        return mask
    mask = mask & masks.Causal()
    return mask & masks.Window(draw(st.integers(1, cache["window"]))) if "window" in cache else mask


def _joined(left: masks.Mask, right: masks.Mask, both: bool) -> masks.Mask:
    return left & right if both else left | right


def _has_rows(mask: masks.Mask) -> bool:
    if isinstance(mask, (And, Or)):
        return any(_has_rows(part) for part in mask.parts)
    return isinstance(mask, masks.Lengths) and torch.as_tensor(mask.lengths).dim() == 2


def _starts(size: Sizes, way: str, position: str | None) -> st.SearchStrategy[int | str | Tensor | None]:
    """Where the first query stands: left out only where queries are keys."""
    if "cached" in way or way == "packed":
        return st.none()
    least = 0 if position == "learned" else -2
    each = st.lists(st.integers(least, size.keys), min_size=size.batch, max_size=size.batch).map(torch.tensor)
    some = [st.just(0), st.integers(0, size.keys), each]
    if position != "learned" or size.keys >= size.queries:
        some.append(st.just("end"))
    return st.one_of(*some) if way == "across" else st.one_of(st.none(), st.none(), *some)


@st.composite
def _biases(draw: Draw, size: Sizes) -> tuple[str, tuple[int, ...]] | None:
    kind = draw(st.sampled_from((None, None, None, "tensor", "tensor that hides", "relative")))
    if kind is None:
        return None
    if kind == "relative":
        some = tuple(draw(st.sampled_from((1, n))) for n in size.cells[:2])
        return kind, (*some, size.queries + size.keys - 1)
    return kind, tuple(draw(st.sampled_from((1, n))) for n in size.cells)


def _gates(size: Sizes) -> st.SearchStrategy[tuple[int, ...] | None]:
    each = st.tuples(*(st.sampled_from((1, n)) for n in size.cells[:3]))
    return st.one_of(st.none(), st.none(), st.just((size.heads,)), each)
