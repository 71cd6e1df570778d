"""Copy the weights and biases of other libraries' layers to the projections of our layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from multihead.layer import MultiHeadAttention


def copy_to_projections(layer: MultiHeadAttention, parameters: Iterable[tuple[Tensor, Tensor | None]]) -> None:
    """Copy a weight (features out, features in) and a bias to each of q_proj, k_proj, v_proj and out_proj, if any."""
    projections = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    existing = [projection for projection in projections if projection is not None]
    with torch.no_grad():
        for projection, (weight, bias) in zip(existing, parameters, strict=True):
            projection.weight.copy_(weight)
            if bias is not None:
                projection.bias.copy_(bias)
