"""The number of threads with which torch computes, changed for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from multihead.tensors.undo import Undo


@contextmanager
def set_torch_threads(count: int | None) -> Iterator[None]:
    """Set torch's number of threads in this context; None leaves the number unchanged."""
    with Undo() as undo:
        undo.add_step(partial(torch.set_num_threads, torch.get_num_threads()))
        if count is not None:
            torch.set_num_threads(count)
        yield
