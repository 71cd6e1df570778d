"""Tensors of which each rank holds a part, as one process holds them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor | None) -> Tensor:
    """Gather a parameter or a gradient; a tensor that is not split is copied. All ranks must call this."""
    assert tensor is not None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
