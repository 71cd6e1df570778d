"""Hypothesis strategies that draw masks and whole attention calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.masks.leading_keys import LeadingKeys

Draw = Callable[[st.SearchStrategy[Any]], Any]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Every(masks.Mask):
    """A mask of a user, `visible` and nothing else: every n-th key, counted from the query."""

    n: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries - keys) % self.n == 0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a call: (batch, heads, queries, keys) for a mask, and those of q, k and v."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int = 4
    value_dim: int = 4

    @property
    def cells(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.keys


@st.composite
def sizes(draw: Draw, *, longest: int = 12, least: int = 1, most: int = 3) -> Sizes:
    """Sizes with at most `most` samples, and heads of queries for each of keys."""
    kv_heads = draw(st.integers(1, 2))
    return Sizes(
        batch=draw(st.integers(1, most)),
        heads=kv_heads * draw(st.integers(1, most)),
        kv_heads=kv_heads,
        queries=draw(st.integers(least, longest)),
        keys=draw(st.integers(least, longest)),
        head_dim=draw(st.sampled_from((1, 3, 4, 8, 17))),
        value_dim=draw(st.sampled_from((1, 4, 5, 8, 20))),
    )


def starts(size: Sizes) -> st.SearchStrategy[int | str | Tensor]:
    whole = st.integers(0, size.keys)
    each = st.lists(st.integers(-2, size.keys), min_size=size.batch, max_size=size.batch).map(torch.tensor)
    return st.one_of(st.just(0), st.just("end"), whole, each)


@st.composite
def interval_leaves(draw: Draw, size: Sizes) -> masks.Mask:
    """A mask whose rows are intervals."""
    kind = draw(st.sampled_from(("full", "causal", "window", "lengths", "lengths 2", "documents", "prefix")))
    tensor = draw(st.booleans())
    some = st.integers(0, size.keys)
    if kind == "causal":
        return masks.Causal()
    if kind == "window":
        return masks.Window(draw(st.integers(1, size.keys + 1)), after=draw(st.integers(0, 3)))
    if kind in ("lengths", "prefix"):
        counts = draw(st.lists(some, min_size=size.batch, max_size=size.batch))
        given = torch.tensor(counts) if tensor else tuple(counts)
        if kind == "lengths":
            return masks.Lengths(given)
        return masks.Prefix(counts[0] if draw(st.booleans()) else given)
    if kind == "lengths 2":
        row = st.lists(some, min_size=size.queries, max_size=size.queries)
        rows = draw(st.lists(row, min_size=size.batch, max_size=size.batch))
        return masks.Lengths(torch.tensor(rows) if tensor else rows)
    if kind == "documents":
        rows = [draw(documents(size.keys)) for _ in range(size.batch)]
        if draw(st.booleans()):
            return masks.Documents(torch.tensor(rows[0], dtype=torch.int64) if tensor else rows[0])
        return masks.Documents(rows)
    return masks.Full()


@st.composite
def documents(draw: Draw, keys: int) -> list[int]:
    lengths: list[int] = []
    for _ in range(draw(st.integers(0, 4))):
        lengths.append(draw(st.integers(0, keys - sum(lengths))))
    return lengths


@st.composite
def given_tensors(draw: Draw, size: Sizes) -> masks.Mask:
    """Keep or Drop of a random tensor with some of the axes, some of them of size 1."""
    axes = draw(st.sets(st.sampled_from(("batch", "heads", "queries", "keys"))))
    named = [axis for axis in ("batch", "heads", "queries", "keys") if axis in axes]
    of = dict(zip(("batch", "heads", "queries", "keys"), size.cells, strict=True))
    shape = [draw(st.sampled_from((1, of[axis]))) for axis in named]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensor = torch.rand(shape, generator=generator) < draw(st.sampled_from((0.0, 0.5, 0.8, 1.0)))
    return draw(st.sampled_from((masks.Keep, masks.Drop)))(tensor, " ".join(named))


@st.composite
def trees(draw: Draw, size: Sizes, *, depth: int = 3) -> masks.Mask:
    """A mask joined of others with & and |, up to `depth` levels."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return draw(st.one_of(interval_leaves(size), interval_leaves(size), given_tensors(size)))
    if size.keys > 1 and draw(st.integers(0, 5)) == 0:
        count = draw(st.integers(0, size.keys - 1))
        return LeadingKeys(count, draw(trees(replace(size, keys=size.keys - count), depth=depth - 1)))
    left, right = draw(trees(size, depth=depth - 1)), draw(trees(size, depth=depth - 1))
    return left & right if draw(st.booleans()) else left | right


@dataclass
class Drawn:
    """The tensors and options of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    size: Sizes
    mask: masks.Mask
    query_start: int | str | Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Describe the call in one line: the numbers of its tensors would take a hundred."""
        layout = ", ".join(f"{name} {each.stride()}" for name, each in (("q", self.q), ("k", self.k), ("v", self.v)))
        options = {name: value for name, value in self.options.items() if not isinstance(value, Tensor)}
        tensors = [f"{name} {tuple(value.shape)}" for name, value in self.options.items() if isinstance(value, Tensor)]
        start = self.query_start.tolist() if isinstance(self.query_start, Tensor) else self.query_start
        return f"{self.size} {self.q.dtype} {self.mask} start {start} strides {layout} {options} {tensors}"


@st.composite
def calls(
    draw: Draw,
    *,
    softcap: bool = True,
    longest: int = 12,
    most: int = 3,
    dtypes: Sequence[torch.dtype] = tuple(DTYPES.values()),
) -> Drawn:
    """An attention call: sizes, layout, dtype, mask and options."""
    size = draw(sizes(longest=longest, most=most))
    dtype = draw(st.sampled_from(dtypes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    b, h, g = size.batch, size.heads, size.kv_heads
    shapes = ((b, h, size.queries, size.head_dim), (b, g, size.keys, size.head_dim), (b, g, size.keys, size.value_dim))
    q, k, v = (laid_out(random(*shape).to(dtype), draw(st.sampled_from(LAYOUTS))) for shape in shapes)
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from((1.0, 0.3, 0.0, -0.5)))
    if draw(st.integers(0, 2)) == 0:
        bias = random(*(draw(st.sampled_from((1, n))) for n in size.cells)).to(dtype)
        hidden = torch.rand(bias.shape, generator=generator) < draw(st.sampled_from((0.0, 0.3)))
        options["bias"] = bias.masked_fill(hidden, -torch.inf)
    if draw(st.integers(0, 2)) == 0:
        options["sinks"] = random(h).to(dtype)
    if softcap and draw(st.integers(0, 3)) == 0:
        options["softcap"] = 1.5
    return Drawn(q, k, v, size, draw(trees(size, depth=2)), draw(starts(size)), options)


LAYOUTS = ("plain", "heads inside", "features outside", "every second")


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another order of memory."""
    if layout == "heads inside":  # what splitting a projection's columns gives
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "features outside":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    if layout == "every second":
        wide = torch.full((*tensor.shape[:-1], 2 * tensor.shape[-1]), torch.nan, dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "negative":  # as the imaginary part of a conjugate, which stores its numbers negated
        return torch._neg_view(-tensor)
    return tensor
