"""Which passes of the native kernel run in a block, as PyTorch's profiler sees the operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def native_runs() -> Iterator[list[str]]:
    """Yield the list of the passes that ran in the block, filled at its end; one without values ends in "of scores"."""
    runs: list[str] = []
    with torch.profiler.profile(record_shapes=True) as profile:
        yield runs
    # `profile.events()` makes an object of each of thousands of events, which takes most of the time of a test.
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        name = event.name()
        if name == "multihead::attention":
            runs.append("attention" if event.shapes()[2] else "attention of scores")
        elif name.startswith("multihead::"):
            runs.append(name.removeprefix("multihead::"))
