"""Copy the weights and biases of other libraries' layers to the projections of our layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention

# The second is the output projection of PyTorch's layer, the third GPT-2's linear layer.
_PLAIN = (
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.linear.NonDynamicallyQuantizableLinear",
    "transformers.pytorch_utils.Conv1D",
)


def copy_to_projections(layer: MultiHeadAttention, parameters: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Copy a weight (features out, features in) and a bias to each of q_proj, k_proj, v_proj and out_proj, if any."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    existing = [projection for projection in projections if projection is not None]
    with torch.no_grad():
        for projection, (weight, bias) in zip(existing, parameters, strict=True):
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)


def reject_wrapped(**projections: object) -> None:
    """Reject a projection whose weight is not all that it computes: an adapter, or a quantised layer.

    Raises:
        ArgumentError: a projection is no plain linear layer; the error names it.
    """
    for name, projection in projections.items():
        kind = f"{type(projection).__module__}.{type(projection).__qualname__}"
        computes_weight = isinstance(projection, nn.Module) and is_parametrized(projection)
        if projection is not None and kind not in _PLAIN and not computes_weight:
            raise ArgumentError(
                f"The layer's {name} is a {kind}, not an nn.Linear.",
                "Merge its wrapper (an adapter, a quantisation) into an nn.Linear first.",
            )
