"""The most exact numbers of a device, in which weights and angles are computed and sums are accumulated."""

from __future__ import annotations

import torch
from torch import Tensor


def widest_float(device: torch.device) -> torch.dtype:
    """Return float64, or float32 if the device does not support float64, as Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def widen(tensor: Tensor) -> Tensor:
    """Convert a tensor to the widest floating-point numbers of its device."""
    return tensor.to(widest_float(tensor.device))
