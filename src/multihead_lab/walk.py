"""Compute the split of heads and a whole attention, one named step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.layer.heads import head_dim_of, merge_heads, split_heads

__all__ = ["CHAPTERS", "MAX_TENSOR_VALUES", "Walk", "WalkChapter", "WalkSizes", "WalkStep", "walk"]

# About 30 tensors are stored, in float64: one gigabyte if each has this many values.
MAX_TENSOR_VALUES = 2**22


@dataclass(frozen=True)
class WalkSizes:
    """The checked sizes of a walk.

    Attributes:
        batch, length, model_dim, num_heads: the arguments of `walk`; length is in tokens, model_dim
            in columns.
        head_dim: columns of one head, ``model_dim / num_heads``.
        lengths: the tokens of each sample that are not padding, (batch,).
        seed: the seed of the projections.
    """

    batch: int
    length: int
    model_dim: int
    num_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    seed: int

    @property
    def scale(self) -> float:
        """The factor that scales the scores, 1 / sqrt(head_dim)."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def batch_times_heads(self) -> int:
        """Length of the first axis, batch * heads, once heads are folded into the batch."""
        return self.batch * self.num_heads


@dataclass(frozen=True, eq=False)
class WalkStep:
    """One tensor of the walk and the code that computed it.

    Attributes:
        name: the name of the tensor in the code of later steps.
        code: the expression that computed the tensor; ``seeded`` is the walk's random generator.
        axes: one name per axis of the tensor.
        tensor: the values.
        head_axis: the axis along which heads vary, or None if heads are mixed.
        head_of_entry: the head of each entry along ``head_axis``.
    """

    name: str
    code: str
    axes: tuple[str, ...]
    tensor: Tensor
    head_axis: int | None = None
    head_of_entry: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Walk:
    """All steps of a walk, in order.

    Attributes:
        sizes: the sizes of the walk.
        steps: the steps by name; ``walk["scores"]`` is one of them.
        sdpa_difference: the largest difference between ``concat`` and PyTorch's
            ``scaled_dot_product_attention`` on the same q, k and v.
    """

    sizes: WalkSizes
    steps: dict[str, WalkStep]
    sdpa_difference: float

    def __getitem__(self, name: str) -> WalkStep:
        return self.steps[name]

    def __iter__(self) -> Iterator[WalkStep]:
        return iter(self.steps.values())


def walk(
    *,
    batch: int = 2,
    length: int = 3,
    model_dim: int = 6,
    num_heads: int = 3,
    lengths: Sequence[int] | None = None,
    bias: Literal["distance", "none"] = "distance",
    seed: int = 1,
) -> Walk:
    """Split counted numbers into heads and back, then carry them through a whole attention.

    The first part moves the whole numbers from 0 upwards, so that every number shows where it came
    from. The second divides them by a power of ten and projects them with matrices drawn with
    ``seed``, in float64: q, k, v, scores, scale, bias, lengths, softmax, each head's Z, their
    concatenation and the output projection.

    Args:
        batch: samples, at least 1.
        length: tokens of each sample, padding included, at least 1.
        model_dim: columns of the input, at least 1.
        num_heads: heads, at least 1; they must divide ``model_dim``.
        lengths: the tokens of each sample that are not padding, from 0 to ``length``, (batch,);
            by default each sample is one token shorter than the one before.
        bias: the term added to the scaled scores: ``"distance"`` subtracts 1/2, 1/4, 1/8, ... per
            token of distance in head 0, 1, 2, ... (similar to ALiBi, arXiv:2108.12409), ``"none"``
            adds nothing.
        seed: the seed of the four projections, at least 0.

    Returns:
        The steps, with their axes, values and code.

    Raises:
        ArgumentError: for a size, a length or an option out of its range.

    Source: Vaswani et al. 2017, section 3.2, arXiv:1706.03762.

    >>> steps = walk()
    >>> steps["by_head"].axes
    ('batch', 'heads', 'length', 'head_dim')
    >>> steps["by_head"].tensor[1, 2].tolist()
    [[22, 23], [28, 29], [34, 35]]
    >>> steps["lengths_per_head"].tensor.tolist()
    [3, 3, 3, 2, 2, 2]
    """
    counts = {"batch": batch, "length": length, "model_dim": model_dim, "num_heads": num_heads}
    for name, size in counts.items():
        if size < 1:
            raise ArgumentError(f"{name} is {size}, and must be at least 1.", "Give 1 or more.")
    largest = max(batch * length * model_dim, batch * num_heads * length * length, model_dim * model_dim)
    if largest > MAX_TENSOR_VALUES:
        raise ArgumentError(
            f"These sizes need a tensor of {largest:,} values, and a walk allows at most {MAX_TENSOR_VALUES:,}.",
            "Give a smaller batch, length, model_dim or number of heads.",
        )
    head_dim = head_dim_of(model_dim, num_heads, name="model_dim")
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"seed is {seed}, and must be from 0 to 2**63 - 1.", "Give 0 or another such number.")
    if lengths is None:
        lengths = [length - sample % length for sample in range(batch)]
    if len(lengths) != batch:
        raise ArgumentError(
            f"lengths has {len(lengths)} {'entry' if len(lengths) == 1 else 'entries'}, and the "
            f"batch has {batch} {'sample' if batch == 1 else 'samples'}.",
            f"Give {batch} {'length' if batch == 1 else 'lengths'}, one per sample.",
        )
    for sample, tokens in enumerate(lengths):
        if not 0 <= tokens <= length:
            raise ArgumentError(
                f"The length of sample {sample} is {tokens}, and must be from 0 to {length}, "
                "the length of the sequence.",
                "Give a length in that range.",
            )
    if bias not in ("distance", "none"):
        raise ArgumentError(
            f"bias is {bias!r}, and must be 'distance' or 'none'.",
            "Give 'distance' for a bias that grows with distance, or 'none'.",
        )
    sizes = WalkSizes(batch, length, model_dim, num_heads, head_dim, tuple(lengths), seed)
    steps: dict[str, WalkStep] = {}
    _record_split(sizes, steps)
    _record_projections(sizes, steps)
    _record_attention(sizes, steps, bias)
    return Walk(sizes, steps, _sdpa_difference(sizes, steps))


def _step_recorder(
    sizes: WalkSizes, steps: dict[str, WalkStep], *, columns_are_of_heads: bool = False
) -> Callable[..., Tensor]:
    """Return a function that adds a step to `steps`, and returns the tensor of the step.

    The heads of a step follow from the names of its axes, unless its entries mix several heads; `columns_are_of_heads`:
    whether the columns of the input, "model_dim", are those of the heads.
    """
    per_head = tuple(range(sizes.num_heads))
    per_column = tuple(column // sizes.head_dim for column in range(sizes.model_dim))
    heads_along = {"heads": per_head, "batch*heads": per_head * sizes.batch, "heads*head_dim": per_column}
    if columns_are_of_heads:
        heads_along["model_dim"] = per_column

    def record(name: str, code: str, axes: tuple[str, ...], tensor: Tensor, *, mixes_heads: bool = False) -> Tensor:
        head_axis = None if mixes_heads else next((n for n, axis in enumerate(axes) if axis in heads_along), None)
        head_of_entry = () if head_axis is None else heads_along[axes[head_axis]]
        steps[name] = WalkStep(name, code, axes, tensor, head_axis, head_of_entry)
        return tensor

    return record


def _record_split(sizes: WalkSizes, steps: dict[str, WalkStep]) -> None:
    """Split columns into heads in the batch and merge them again, and show the reshape that mixes positions."""
    record = _step_recorder(sizes, steps, columns_are_of_heads=True)
    b, n, m, h, d = sizes.batch, sizes.length, sizes.model_dim, sizes.num_heads, sizes.head_dim
    columns = ("batch", "length", "model_dim")
    cut = ("batch", "length", "heads", "head_dim")
    turned = ("batch", "heads", "length", "head_dim")
    folded = ("batch*heads", "length", "head_dim")
    numbers = torch.arange(b * n * m).reshape(b, n, m)
    x = record("x", f"torch.arange({b * n * m}).reshape({b}, {n}, {m})", columns, numbers)
    record("grouped", f"x.reshape({b}, {n}, {h}, {d})", cut, x.reshape(b, n, h, d))
    by_head = record("by_head", "grouped.transpose(1, 2)", turned, split_heads(x, h))
    flat = record("flat", f"by_head.reshape({b * h}, {n}, {d})", folded, by_head.reshape(b * h, n, d))
    unflat = record("unflat", f"flat.reshape({b}, {h}, {n}, {d})", turned, flat.reshape(b, h, n, d))
    record("ungrouped", "unflat.transpose(1, 2)", cut, unflat.transpose(1, 2))
    record("merged", f"ungrouped.reshape({b}, {n}, {m})", columns, merge_heads(unflat))
    record("wrong", f"x.reshape({b}, {h}, {n}, {d})", turned, x.reshape(b, h, n, d), mixes_heads=True)
    # In memory order a row of head_dim numbers comes from one position and one head.
    rows, code = torch.arange(h * n).reshape(h, n), f"torch.arange({h * n}).reshape({h}, {n})"
    record("wrong_position", f"{code} // {h}", ("heads", "length"), rows // h, mixes_heads=True)
    record("wrong_head", f"{code} % {h}", ("heads", "length"), rows % h, mixes_heads=True)


def _record_projections(sizes: WalkSizes, steps: dict[str, WalkStep]) -> None:
    """Scale x down, draw the four projections, and compute q, k and v of every head."""
    record = _step_recorder(sizes, steps)
    m, h, x = sizes.model_dim, sizes.num_heads, steps["x"].tensor
    # Powers of ten keep the number of decimals small, and the scores near 1, where softmax varies the most.
    smaller = 10 ** max(len(str(x.numel() - 1)) - 1, 0)
    finer = 10 if m <= 16 else 100 if m <= 1600 else 1000
    inputs = record("inputs", f"x.double() / {smaller}", ("batch", "length", "model_dim"), x.double() / smaller)

    seeded = torch.Generator().manual_seed(sizes.seed)
    code = f"torch.randint(-4, 5, ({m}, {m}), generator=seeded).double() / {finer}"
    weights: dict[str, Tensor] = {}
    for letter in "qkvo":
        # A head has its columns of w_q, w_k and w_v, and its rows of w_o.
        axes = ("heads*head_dim", "output_dim") if letter == "o" else ("model_dim", "heads*head_dim")
        drawn = torch.randint(-4, 5, (m, m), generator=seeded).double() / finer
        weights[letter] = record(f"w_{letter}", code, axes, drawn)
    wide = ("batch", "length", "heads*head_dim")
    projected = {letter: record(letter, f"inputs @ w_{letter}", wide, inputs @ weights[letter]) for letter in "qkv"}
    for letter, rows in (("q", "queries"), ("k", "keys"), ("v", "keys")):
        heads = split_heads(projected[letter], h).flatten(0, 1)
        record(f"{letter}_heads", f"split_heads({letter}, {h}).flatten(0, 1)", ("batch*heads", rows, "head_dim"), heads)


def _record_attention(sizes: WalkSizes, steps: dict[str, WalkStep], bias: Literal["distance", "none"]) -> None:
    """Compute the steps from the scores to the output, with heads folded into the batch."""
    record = _step_recorder(sizes, steps)
    b, n, h, d = sizes.batch, sizes.length, sizes.num_heads, sizes.head_dim
    q_heads, k_heads, v_heads, w_o = (steps[name].tensor for name in ("q_heads", "k_heads", "v_heads", "w_o"))
    maps = ("batch*heads", "queries", "keys")
    scores = record("scores", "q_heads @ k_heads.transpose(1, 2)", maps, q_heads @ k_heads.transpose(1, 2))
    to_mask = record("scaled", f"scores / math.sqrt({d})", maps, scores / math.sqrt(d))
    to_mask_name = "scaled"
    if bias == "distance":
        slopes = record("slopes", f"0.5 ** torch.arange(1, {h + 1})", ("heads",), 0.5 ** torch.arange(1, h + 1))
        distance = (torch.arange(n)[:, None] - torch.arange(n)).abs()
        code = f"-(torch.arange({n})[:, None] - torch.arange({n})).abs() * slopes[:, None, None]"
        added = record("bias", code, ("heads", "queries", "keys"), -distance * slopes[:, None, None])
        to_mask = record("biased", f"scaled + bias.repeat({b}, 1, 1)", maps, to_mask + added.repeat(b, 1, 1))
        to_mask_name = "biased"

    given = torch.tensor(sizes.lengths)
    lengths = record("lengths", f"torch.tensor({list(sizes.lengths)})", ("batch",), given)
    code = f"lengths.repeat_interleave({h})"
    per_head = record("lengths_per_head", code, ("batch*heads",), lengths.repeat_interleave(h))[:, None, None]
    code = f"{to_mask_name}.masked_fill(torch.arange({n}) >= lengths_per_head[:, None, None], -torch.inf)"
    masked = record("masked", code, maps, to_mask.masked_fill(torch.arange(n) >= per_head, -torch.inf))
    weights, code = masked.softmax(-1), "masked.softmax(-1)"
    if 0 in sizes.lengths:
        # Softmax without any key is 0 / 0; by this library's contract the weights of such a query are 0.
        weights = weights.masked_fill(per_head == 0, 0)
        code += ".masked_fill(lengths_per_head[:, None, None] == 0, 0)"
    record("weights", code, maps, weights)

    z = record("z", "weights @ v_heads", ("batch*heads", "queries", "head_dim"), weights @ v_heads)
    code, wide = f"merge_heads(z.reshape({b}, {h}, {n}, {d}))", ("batch", "length", "heads*head_dim")
    concat = record("concat", code, wide, merge_heads(z.reshape(b, h, n, d)))
    record("output", "concat @ w_o", ("batch", "length", "output_dim"), concat @ w_o)


def _sdpa_difference(sizes: WalkSizes, steps: dict[str, WalkStep]) -> float:
    """Return the largest difference between the heads' results and PyTorch's attention on the same q, k and v."""
    q, k, v = (split_heads(steps[letter].tensor, sizes.num_heads) for letter in "qkv")
    visible = torch.arange(sizes.length) < steps["lengths"].tensor[:, None, None, None]
    bias = steps["bias"].tensor.double() if "bias" in steps else torch.zeros(1, 1, 1, dtype=q.dtype)
    mask = torch.where(visible, bias, -torch.inf)  # (batch, heads, queries, keys)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return float((merge_heads(theirs) - steps["concat"].tensor).abs().max())


@dataclass(frozen=True)
class WalkChapter:
    """One chapter of the walk: its part and the steps that it shows; its texts are `walk.chapter.NAME` in a locale."""

    part: str
    name: str
    step_names: tuple[str, ...]


CHAPTERS = (
    WalkChapter("split", "x", ("x",)),
    WalkChapter("split", "grouped", ("grouped",)),
    WalkChapter("split", "by_head", ("by_head",)),
    WalkChapter("split", "flat", ("flat",)),
    WalkChapter("split", "back", ("unflat", "ungrouped", "merged")),
    WalkChapter("split", "wrong", ("wrong",)),
    WalkChapter("attention", "inputs", ("inputs",)),
    WalkChapter("attention", "projections", ("w_q", "w_k", "w_v", "w_o")),
    WalkChapter("attention", "qkv", ("q", "k", "v")),
    WalkChapter("attention", "qkv_heads", ("q_heads", "k_heads", "v_heads")),
    WalkChapter("attention", "scores", ("scores",)),
    WalkChapter("attention", "scaled", ("scaled",)),
    WalkChapter("attention", "bias", ("slopes", "bias", "biased")),
    WalkChapter("attention", "lengths", ("lengths", "lengths_per_head")),
    WalkChapter("attention", "masked", ("masked",)),
    WalkChapter("attention", "weights", ("weights",)),
    WalkChapter("attention", "z", ("z",)),
    WalkChapter("attention", "concat", ("concat",)),
    WalkChapter("attention", "output", ("output",)),
)
