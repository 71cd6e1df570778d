"""Run what an entry point calls on another device; what goes in and comes out stays on the CPU, where it is judged."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from multihead import masks
from multihead.layer.packing import Packing
from multihead.probes import ProbeContext
from multihead.scores.bias import RelativeBias
from tests.fuzz.worker import PLACE

CPU = torch.device("cpu")
RETURNED = (Tensor, tuple)
ELSEWHERE = PLACE in os.environ
DEVICE = torch.device(os.environ.get(PLACE, "cpu"))
"""Where calls run, `--device` of the command."""


def moved(value: Any, device: torch.device = DEVICE) -> Any:
    """Move every tensor of an argument or a result, with a graph for those that require a gradient."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, RelativeBias):
        return RelativeBias(value.values.to(device))
    if isinstance(value, (tuple, list)) and any(isinstance(each, Tensor) for each in value):
        return type(value)(moved(each, device) for each in value)
    if isinstance(value, dict):
        return {name: moved(each, device) for name, each in value.items()}
    if isinstance(value, (masks.Mask, ProbeContext, Packing)):
        stored = io.BytesIO()
        torch.save(value, stored)
        stored.seek(0)
        return torch.load(stored, map_location=device, weights_only=False)
    return value


def there(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs on the device: its arguments are moved there, and its results back."""
    if not ELSEWHERE:
        return function
    return lambda *args, **options: moved(function(*moved(args), **moved(options)), CPU)


@contextmanager
def on_device(module: nn.Module) -> Iterator[None]:
    """Move a module to the device for the time of a block, and at each call its inputs, and the tensors it returns."""
    if not ELSEWHERE:
        yield
        return
    module.to(DEVICE)
    before = module.register_forward_pre_hook(lambda _, args, kwargs: (moved(args), moved(kwargs)), with_kwargs=True)
    after = module.register_forward_hook(lambda *given: moved(given[-1], CPU) if type(given[-1]) in RETURNED else None)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        module.to("cpu")
