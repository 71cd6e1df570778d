"""Rules for the output of a changed head: scale it, or replace it by a mean output or by that on another text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.interventions.followed import FollowedCall
from multihead.interventions.means import HeadMeans


class Replacement(Protocol):
    """A rule for the output of changed heads, before the output projection."""

    needs_tokens: bool
    """Whether the result depends on which token each query is."""

    description: str
    """The change of a head in a few words, with {factor} for its factor, such as "times {factor}"."""

    def replace(self, call: FollowedCall, own: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new output of the changed heads, and the factors by which their own outputs were multiplied.

        Args:
            call: the call.
            own: (batch, heads, queries, value_dim), the heads' own output.
            heads: (heads,) int64, their indices in the layer.
            factors: (heads,), the factors that the caller gave for the heads, in the dtype of the output.

        Returns:
            (batch, heads, queries, value_dim); and (heads,), NaN where the output is another vector.
        """


@dataclass(frozen=True)
class ScaledOutput:
    """A head's own output times the factor of the head; the factor 0 gives 0, also for NaN and inf."""

    needs_tokens = False
    description = "times {factor:g}"

    def replace(self, call: FollowedCall, own: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Scale the output of heads, see `Replacement.replace`."""
        scaled = own * factors[:, None, None]
        return scaled.masked_fill((factors == 0)[:, None, None], 0), factors


@dataclass(frozen=True)
class MeanOutput:
    """The mean output of each head over a reference."""

    means: HeadMeans
    needs_tokens = True
    description = "by its mean"

    def replace(self, call: FollowedCall, own: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the output of heads by their means, see `Replacement.replace`."""
        rows = self.means.rows_of(call.layer_name, call.tokens.position)
        vectors = self.means.vectors[call.layer_name].to(own.device, own.dtype)  # (rows, heads, value_dim)
        if vectors.shape[1] < call.request.shape.num_heads or vectors.shape[2] != own.shape[-1]:
            raise ArgumentError(
                f"The reference has means of {vectors.shape[1]} heads of {vectors.shape[2]} numbers for "
                f"{call.layer_name}, which has {call.request.shape.num_heads} heads of {own.shape[-1]}.",
                "Compute them with mh.head_means on this model.",
            )
        return vectors[:, heads][rows].transpose(1, 2), torch.full_like(factors, torch.nan)


@dataclass(frozen=True)
class ResampledOutput:
    """The output of the same head at the same position of another text of the batch, never of its own text."""

    seed: int = 0
    needs_tokens = True
    description = "by that of another text"

    def replace(self, call: FollowedCall, own: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the output of heads by that of another text, see `Replacement.replace`."""
        text, position = (each.flatten() for each in call.tokens)
        real = (position >= 0).nonzero()[:, 0]
        text, position = text[real], position[real]
        lengths = text.bincount()
        if len(lengths) < 2:
            raise ArgumentError(
                'by="resample" takes the output of another text, and the batch has one.', "Give several texts."
            )
        if int(lengths.min()) != int(lengths.max()):
            raise ArgumentError(
                f'by="resample" needs texts of equal length, and they have {int(lengths.min())} to '
                f"{int(lengths.max())} tokens.",
                "Cut the texts to one length.",
            )
        if int(position.max()) >= int(lengths[0]):
            raise ArgumentError(
                'by="resample" needs whole texts, and this call continues texts with a cache.',
                'Run the model on whole texts, or use by="mean".',
            )
        other = _choose_other_texts(len(lengths), self.seed).to(text.device)
        # The index of each token in the flattened (batch * queries), by text and position.
        table = torch.empty(len(lengths), int(lengths[0]), dtype=torch.int64, device=text.device)
        table[text, position] = real
        source = torch.arange(own.shape[0] * own.shape[2], device=text.device)
        source[real] = table[other[text], position]
        flat = own.transpose(1, 2).flatten(0, 1).index_select(0, source)  # (batch * queries, heads, value_dim)
        new = flat.unflatten(0, (own.shape[0], own.shape[2])).transpose(1, 2)
        return new, torch.full_like(factors, torch.nan)


def _choose_other_texts(texts: int, seed: int) -> Tensor:
    """Return for each text the index of another, (texts,) int64: the next one on a random circle."""
    order = torch.randperm(texts, generator=torch.Generator().manual_seed(seed))
    other = torch.empty(texts, dtype=torch.int64)
    other[order] = order.roll(-1)
    return other
