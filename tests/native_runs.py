"""Which passes of the native kernel run in a block, as PyTorch's profiler sees the operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def native_runs() -> Iterator[list[str]]:
    """Yield the list of the passes that ran in the block, filled at its end; one without values ends in "of scores"."""
    runs: list[str] = []
    with torch.profiler.profile(acc_events=True, record_shapes=True) as profile:
        yield runs
    for event in profile.events() or ():
        if event.name == "multihead::attention":
            runs.append("attention" if event.input_shapes[2] else "attention of scores")
        elif event.name.startswith("multihead::"):
            runs.append(event.name.removeprefix("multihead::"))
