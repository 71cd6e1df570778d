"""The number of threads with which torch computes, changed for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def set_torch_threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads in this context; None leaves the number unchanged."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
