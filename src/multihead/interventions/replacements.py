"""Rules for the output of a changed head: scale it, or replace it by a mean, that on another text, or what is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.interventions.followed import FollowedCall
from multihead.interventions.means import HeadMeans


class Replacement(Protocol):
    """A rule for the output of changed heads, before the output projection."""

    @property
    def needs_tokens(self) -> bool:
        """Whether the result depends on which token each query is."""

    @property
    def description(self) -> str:
        """The change of a head in a few words, with {factor} for its factor, such as "times {factor}"."""

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new output of the changed heads, and the factors by which their own outputs were multiplied.

        Args:
            call: the call.
            output: (batch, heads of the layer, queries, value_dim), the output of all heads.
            heads: (heads,) int64, the indices of the changed heads in the layer.
            factors: (1 or batch, heads, 1 or queries), the factors that the caller gave for the heads, in the dtype of
                the output.

        Returns:
            (batch, heads, queries, value_dim); and factors of the same shape, NaN where the output is another vector.
        """


@dataclass(frozen=True)
class ScaledOutput:
    """A head's own output times the factor of the head; the factor 0 gives 0, also for NaN and inf."""

    needs_tokens = False
    description = "times {factor}"

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the output of heads, see `Replacement.replace`."""
        own, factors_of_values = output.index_select(1, heads), factors[..., None]
        # 0 times inf is 0 here, and the gradient passes to a factor of 0.
        usable = own.masked_fill((factors_of_values == 0) & ~own.isfinite(), 0)
        return usable * factors_of_values, factors.detach()


@dataclass(frozen=True)
class MeanOutput:
    """The mean output of each head over a reference."""

    means: HeadMeans
    needs_tokens = True
    description = "by its mean"

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the output of heads by their means, see `Replacement.replace`."""
        rows = self.means.rows_of(call.layer_name, call.tokens.position)
        vectors = self.means.vectors[call.layer_name].to(output.device, output.dtype)  # (rows, heads, value_dim)
        if vectors.shape[1] < call.request.shape.num_heads or vectors.shape[2] != output.shape[-1]:
            raise ArgumentError(
                f"The reference has means of {vectors.shape[1]} heads of {vectors.shape[2]} numbers for "
                f"{call.layer_name}, which has {call.request.shape.num_heads} heads of {output.shape[-1]}.",
                "Compute them with mh.head_means on this model.",
            )
        return vectors[:, heads][rows].transpose(1, 2), torch.full_like(factors, torch.nan)


@dataclass(frozen=True)
class ResampledOutput:
    """The output of the same head at the same position of another text of the batch, never of its own text.

    Attributes:
        seed: which other text each text gets.
        copies: how many copies of the same texts the batch has, one after another; each takes its own texts.
    """

    seed: int = 0
    copies: int = 1
    needs_tokens = True
    description = "by that of another text"

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the output of heads by that of another text, see `Replacement.replace`."""
        own, rows = output.index_select(1, heads), call.tokens.rows()
        lengths, texts = (rows >= 0).sum(1), len(rows) // self.copies
        if texts < 2:
            raise ArgumentError(
                'by="resample" takes the output of another text, and the batch has one.', "Give several texts."
            )
        if int(lengths.min()) != int(lengths.max()):
            raise ArgumentError(
                f'by="resample" needs texts of equal length, and they have {int(lengths.min())} to '
                f"{int(lengths.max())} tokens.",
                "Cut the texts to one length.",
            )
        if rows.shape[1] > int(lengths[0]):
            raise ArgumentError(
                'by="resample" needs whole texts, and this call continues texts with a cache.',
                'Run the model on whole texts, or use by="mean".',
            )
        copy = torch.arange(self.copies)[:, None] * texts
        other = (_choose_other_texts(texts, self.seed) + copy).flatten().to(rows.device)
        source = torch.arange(own.shape[0] * own.shape[2], device=rows.device)
        source[rows] = rows[other]
        flat = own.transpose(1, 2).flatten(0, 1).index_select(0, source)  # (batch * queries, heads, value_dim)
        new = flat.unflatten(0, (own.shape[0], own.shape[2])).transpose(1, 2)
        return new, torch.full_like(factors, torch.nan)


@dataclass(frozen=True)
class MixedOutput:
    """The head's own output times the factor of the head, plus 1 - factor times what another rule replaces it by.

    A factor of 0 gives what the other rule gives, also where the own output is NaN or inf.
    """

    other: Replacement

    @property
    def needs_tokens(self) -> bool:
        """Whether the other rule depends on which token each query is."""
        return self.other.needs_tokens

    @property
    def description(self) -> str:
        """The change in a few words."""
        return f"times {{factor}}, and the rest {self.other.description}"

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Mix the output of heads with what replaces it, see `Replacement.replace`."""
        own, scales = ScaledOutput().replace(call, output, heads, factors)
        new, _ = self.other.replace(call, output, heads, factors)
        return own + (1 - factors[..., None]) * new, scales.where(scales == 1, torch.nan)


def gated(rule: Replacement) -> Replacement:
    """Return the rule whose factors are gates: 1 is the head's own output, and 0 what another rule replaces it by."""
    return rule if isinstance(rule, ScaledOutput) else MixedOutput(rule)


@dataclass(frozen=True, eq=False)
class HeadCall:
    """A call of a changed head, for the function that is given as `by=` of `mh.ablate`.

    Attributes:
        layer: number of the layer.
        layer_name: name of the layer.
        head: index of the head in the layer.
        outputs: (batch, heads, queries, value_dim), the output of every head of the layer before this change.
    """

    layer: int
    layer_name: str
    head: int
    outputs: Tensor
    _call: FollowedCall

    @property
    def texts(self) -> Tensor:
        """Index of the text of each query: (batch, queries) int64. A packed batch is one row."""
        return self._call.tokens.text_index

    @property
    def positions(self) -> Tensor:
        """Index of each query among the tokens of its text: (batch, queries) int64; -1 for padding."""
        return self._call.tokens.position


OutputFunction: TypeAlias = "Callable[[Tensor, HeadCall], Tensor]"
"""Function of the output of a head, (batch, queries, value_dim), and its call; returns the new output."""


@dataclass(frozen=True, eq=False)
class GivenOutput:
    """What a function of the user returns for each head, or one vector (value_dim,) for every query.

    Two of them are equal if they hold the same object, because the results of two functions cannot be compared.
    """

    by: Tensor | OutputFunction
    needs_tokens = False
    description = "by what was given"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenOutput) and other.by is self.by

    def __hash__(self) -> int:
        return id(self.by)

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the output of heads by what the user gave, see `Replacement.replace`."""
        if isinstance(self.by, Tensor):
            if not _is_like(self.by, output, output.shape[3:]):
                raise ArgumentError(
                    f"by is {_description(self.by)}, and the heads of {call.layer_name} write vectors of "
                    f"{output.shape[3]} numbers.",
                    f"Give a {output.dtype} tensor of shape ({output.shape[3]},) on {output.device}.",
                )
            new = self.by.expand(len(output), len(heads), *output.shape[2:])
        else:
            outputs = output.clone()  # so that a function that writes to it changes no other head
            new = torch.stack([self._output_of(call, outputs, head) for head in heads.tolist()], 1)
        return new, torch.full_like(factors, torch.nan)

    def _output_of(self, call: FollowedCall, outputs: Tensor, head: int) -> Tensor:
        """Call the function for one head: (batch, queries, value_dim)."""
        assert not isinstance(self.by, Tensor)
        own, before = outputs[:, head], None if outputs.is_inference() else outputs._version  # noqa: SLF001 - public in PyTorch
        found = self.by(own, HeadCall(call.layer_number, call.layer_name, head, outputs, call))
        if before is not None and outputs._version != before:  # noqa: SLF001
            raise ArgumentError(
                f"The function by wrote to an output of L{call.layer_number}.",
                "Return a new tensor, such as output + vector.",
            )
        if not _is_like(found, own, own.shape):
            raise ArgumentError(
                f"The function by returned {_description(found)} for L{call.layer_number} H{head}.",
                f"Return a {own.dtype} tensor of shape {tuple(own.shape)} on {own.device}, as the output is.",
            )
        return found


def _is_like(given: object, output: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether something is a tensor of a shape, with the dtype and on the device of an output."""
    return isinstance(given, Tensor) and (given.shape, given.dtype, given.device) == (
        shape,
        output.dtype,
        output.device,
    )


def _description(given: object) -> str:
    if isinstance(given, Tensor):
        return f"a {given.dtype} tensor of shape {tuple(given.shape)} on {given.device}"
    return f"an object of type {type(given).__name__}"


def _choose_other_texts(texts: int, seed: int) -> Tensor:
    """Return for each text the index of another, (texts,) int64: the next one on a random circle."""
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(seed))
    other = torch.empty(texts, dtype=torch.int64)
    other[order] = order.roll(-1)
    return other
