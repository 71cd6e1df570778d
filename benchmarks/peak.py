"""Measure how far the memory of this process rises while something runs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")


def peak(run: Callable[[], object]) -> int:
    """Run once, and return by how many bytes the resident memory rose at its highest, what is returned with it.

    The kernel's own high-water mark is reset before, so that the peak is that of this run; pages that an allocator
    keeps from before count as held already, and a process that has run nothing larger keeps none.

    Raises:
        OSError: this is no Linux.
    """
    gc.collect()
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # sets VmHWM to VmRSS, see proc(5)
    before = _kilobytes("VmRSS")
    result = run()
    risen = _kilobytes("VmHWM") - before
    del result
    return 1024 * risen


def _kilobytes(field: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
