"""Draw masks of every kind, and where the first query stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from multihead import masks
from multihead.masks.leading_keys import LeadingKeys
from tests.drawing import Every, Sizes
from tests.fuzz.draw import Draw

AXES = ("batch", "heads", "queries", "keys")


@dataclass(frozen=True)
class Before(masks.Mask):
    """A mask of a user with an interval: the keys up to a distance before the query."""

    n: int

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return keys <= queries - self.n

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(queries), queries - self.n + 1


@dataclass(frozen=True, eq=False)
class Marked(masks.Mask):
    """A mask of a user that holds a tensor: (keys,) bool."""

    marks: Tensor

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return self.marks[keys.clamp(0, len(self.marks) - 1)] | (queries == keys)

    def select_sample(self, index: int) -> Marked:
        return self

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Marked:
        return self


def drawn_mask(draw: Draw, size: Sizes) -> masks.Mask:
    """Draw a mask: half of them the plain ones of everyday use, the others trees of & and | up to three deep."""
    if not draw.has("mask", 0.8):
        return masks.Full()
    random = draw.stream("mask")
    depth = random.choice((1, 1, 2, 3)) if draw.has("tree", 0.45) else 0
    return _tree(random, size, depth)


def _tree(random: Random, size: Sizes, depth: int) -> masks.Mask:
    if depth == 0:
        return _leaf(random, size)
    if size.keys > 1 and random.random() < 0.06:
        count = random.randint(0, size.keys - 1)
        return LeadingKeys(count, _tree(random, replace(size, keys=size.keys - count), depth - 1))
    left, right = (_tree(random, size, random.choice((0, depth - 1))) for _ in range(2))
    return left & right if random.random() < 0.6 else left | right


LEAVES = ("causal", "causal", "window", "lengths", "lengths", "rows", "documents", "prefix", "tensor", "tensor", "own")


def _leaf(random: Random, size: Sizes) -> masks.Mask:
    kind = random.choice(LEAVES)
    if kind == "causal":
        return masks.Causal()
    if kind == "window":
        return masks.Window(_near(random, size.keys + 1, least=1), after=random.choice((0, 0, 1, 3, 2**40)))
    if kind in ("lengths", "rows", "prefix"):
        shape = (size.batch, size.queries) if kind == "rows" else (size.batch,)
        if kind == "prefix" and random.random() < 0.4:
            return masks.Prefix(_near(random, size.keys))
        counts = _counts(random, shape, size.keys)
        return masks.Prefix(counts) if kind == "prefix" else masks.Lengths(counts)
    if kind == "documents":
        return _documents(random, size)
    if kind == "own" and size.keys:
        own = random.choice(("every", "before", "marked"))
        if own == "marked":
            return Marked(torch.tensor([random.random() < 0.5 for _ in range(size.keys)]))
        return Every(random.randint(1, 4)) if own == "every" else Before(random.randint(-2, 3))
    if kind == "tensor":
        return _tensor(random, size)
    return masks.Full()


def _near(random: Random, most: int, *, least: int = 0) -> int:
    """A count from least to most, the ends more often than others."""
    most = max(least, most)
    return random.choice((least, most, random.randint(least, most), random.randint(least, most)))


def _counts(random: Random, shape: tuple[int, ...], most: int) -> Any:
    """Counts as a list, a tuple, or a tensor of some integer dtype and layout."""
    if 0 in shape and len(shape) == 2:
        return torch.zeros(shape, dtype=torch.int64)
    flat = [_near(random, most) for _ in range(shape[0] * (shape[1] if len(shape) > 1 else 1))]
    rows: list[Any] = list(flat)
    if len(shape) == 2:
        rows = [flat[n * shape[1] : (n + 1) * shape[1]] for n in range(shape[0])]
    form = random.choice(("list", "tuple", "int64", "int64", "int32", "int16", "strided"))
    if form == "list":
        return rows
    if form == "tuple":
        return tuple(rows)
    if form == "strided":
        return torch.tensor(rows, dtype=torch.int64).reshape(shape).repeat_interleave(2, -1)[..., ::2]
    return torch.tensor(rows, dtype=getattr(torch, form)).reshape(shape)


def _documents(random: Random, size: Sizes) -> masks.Mask:
    rows = []
    for _ in range(size.batch):
        row: list[int] = []
        for _ in range(random.randint(0, 4)):
            row.append(_near(random, size.keys - sum(row)))
        rows.append(row)
    if random.random() < 0.5 or not rows:
        first = rows[0] if rows else [size.keys]
        return masks.Documents(torch.tensor(first, dtype=torch.int64) if random.random() < 0.5 else first)
    return masks.Documents(rows)


def _tensor(random: Random, size: Sizes) -> masks.Mask:
    named = [axis for axis in AXES if random.random() < 0.6]
    of = dict(zip(AXES, size.cells, strict=True))
    shape = [of[axis] if random.random() < 0.8 else 1 for axis in named]
    generator = torch.Generator().manual_seed(random.getrandbits(32))
    tensor = torch.rand(shape, generator=generator) < random.choice((0.0, 0.5, 0.5, 0.8, 0.8, 1.0))
    if len(shape) > 1 and random.random() < 0.3:
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    kind = random.choice((masks.Keep, masks.Drop))
    if named[-1:] == ["keys"] and shape[-1] > 1 and random.random() < 0.3:
        tensor[..., : random.randint(1, shape[-1] - 1)] = kind is masks.Drop  # nobody sees the first keys
    return kind(tensor, " ".join(named))


def drawn_start(draw: Draw, size: Sizes) -> int | str | Tensor | None:
    """Draw where the first query stands; left out or 0 in most calls of as many queries as keys."""
    square = size.queries == size.keys
    if not draw.has("query_start", 0.3 if square else 0.8):
        return None if square else 0
    random = draw.stream("query_start")
    kind = random.choice(("int", "int", "end", "tensor", "tensor", "far"))
    if kind == "int":
        return random.randint(0, size.keys + 1)
    if kind == "end":
        return "end"
    if kind == "far":
        return random.choice((2**31 - 1, 2**31, 2**39, 2**40))
    return torch.tensor([random.randint(-2, size.keys) for _ in range(size.batch)], dtype=torch.int64)
