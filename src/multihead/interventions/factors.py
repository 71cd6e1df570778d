"""The factors of changed heads: numbers, or tensors with a number per head or text, through which gradients pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.interventions.followed import FollowedCall
from multihead.interventions.heads import HeadKey

HeadFactor: TypeAlias = "float | Tensor"
"""The factor of a head: a number or (texts,); of a whole layer: a number, (heads,) or (texts, heads)."""


def check_factor(name: object, key: HeadKey, factor: object) -> HeadFactor:
    """Return the factor of a head or layer, which the caller named `name`.

    Raises:
        ArgumentError: it is not finite, no number, or a tensor that does not fit.
    """
    if isinstance(factor, Tensor):
        most, shapes = (1, "(texts,)") if key.head is not None else (2, "(heads,) or (texts, heads)")
        if factor.dim() > most or not factor.is_floating_point():
            raise ArgumentError(
                f"The factor of {name} is a {factor.dtype} tensor of shape {tuple(factor.shape)}.",
                f"Give a number, or a tensor of floating-point numbers of shape {shapes}.",
            )
        if not bool(factor.isfinite().all()):
            raise ArgumentError(f"The factor of {name} has numbers that are not finite.", "Give finite numbers.")
        return factor
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not math.isfinite(factor):
        raise ArgumentError(f"The factor of {name} is {factor!r}.", "Give a finite number.")
    return float(factor)


def describe_factor(factor: HeadFactor) -> str:
    """Return a factor in a few words, such as "0.5"."""
    return f"a tensor of shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else f"{factor:g}"


def require_one_factor(key: HeadKey, factor: HeadFactor, other: HeadFactor) -> None:
    """Raise an ArgumentError if a head has two factors."""
    if other is factor or (not isinstance(factor, Tensor) and not isinstance(other, Tensor) and factor == other):
        return
    raise ArgumentError(
        f"{key} has the factors {describe_factor(factor)} and {describe_factor(other)}.", "Give it one."
    )


def values_of(factor: HeadFactor) -> object:
    """Return the numbers of a factor, which are equal for two that change a head alike."""
    return (tuple(factor.shape), tuple(factor.flatten().tolist())) if isinstance(factor, Tensor) else factor


@dataclass(frozen=True, eq=False)
class LayerFactors:
    """The factors of the changed heads of one layer.

    Attributes:
        heads: (heads,) int64, the indices of the changed heads in the layer.
        given: the factor of each of them: of its layer, or its own.
        layer_wide: whether each factor is that of the whole layer.
    """

    heads: Tensor
    given: tuple[HeadFactor, ...]
    layer_wide: tuple[bool, ...]

    @staticmethod
    def of(factors: Mapping[int, tuple[HeadFactor, bool]]) -> LayerFactors:
        """Return those of a mapping head -> (factor, whether it is that of the whole layer)."""
        given, wide = zip(*factors.values(), strict=True)
        return LayerFactors(torch.tensor(list(factors)), given, wide)

    def of_queries(self, call: FollowedCall, output: Tensor) -> Tensor:
        """Return the factors of the changed heads: (1 or batch, heads, 1 or queries), in the dtype of the output.

        They are computed again in every call, because an optimiser may have changed the tensors, and a backward pass
        may have ended.

        Raises:
            ArgumentError: a tensor has fewer texts, or another number of heads, than the call.
        """
        if not any(isinstance(each, Tensor) for each in self.given):
            return output.new_tensor(self.given)[None, :, None]
        columns = [
            self._of_head(call, output, head, factor, wide)
            for head, factor, wide in zip(self.heads.tolist(), self.given, self.layer_wide, strict=True)
        ]
        if all(each.dim() == 0 for each in columns):
            return torch.stack(columns)[None, :, None]
        text = call.tokens.text_index.to(output.device)  # (batch, queries)
        return torch.stack([each.expand(text.shape) if each.dim() == 0 else each[text] for each in columns], 1)

    def _of_head(self, call: FollowedCall, output: Tensor, head: int, factor: HeadFactor, wide: bool) -> Tensor:  # noqa: FBT001
        """Return the factor of a head, () or (texts,)."""
        if not isinstance(factor, Tensor):
            return output.new_tensor(factor)
        if wide and factor.dim():
            if factor.shape[-1] != call.request.shape.num_heads:
                raise ArgumentError(
                    f"The factor of L{call.layer_number} has {factor.shape[-1]} heads, and the layer has "
                    f"{call.request.shape.num_heads}.",
                    "Give a number per head.",
                )
            factor = factor[..., head]
        if factor.dim():
            # In a row of several documents, later calls continue more of them.
            texts = call.tokens.num_texts
            if len(factor) < texts:
                raise ArgumentError(
                    f"The factor of L{call.layer_number} H{head} has {len(factor)} texts, and the call has {texts}.",
                    "Give a number per text of the batch.",
                )
        return factor.to(output)
