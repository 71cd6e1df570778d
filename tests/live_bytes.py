"""How many bytes of tensors are live in a block at most, as the allocator of PyTorch reports them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch


@dataclass
class LiveBytes:
    """Bytes of tensors in CPU memory that were allocated in a block, at most at one time and at its end."""

    peak: int = 0
    kept: int = 0


@contextmanager
def live_bytes() -> Iterator[LiveBytes]:
    """Yield the bytes that are live in the block, filled at its end. What the operating system holds is more."""
    found = LiveBytes()
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    *_, found.kept = live = list(accumulate(changes, initial=0))
    found.peak = max(live)
