"""Measure how much the memory of this process grows during a call."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")


def peak(run: Callable[[], object]) -> int:
    """Run once, and return by how many bytes the resident memory grew at its peak, the result included.

    The high-water mark of the operating system is reset first, and glibc returns the pages that it keeps from earlier
    calls; another C library keeps them, so run this in a process that has run nothing larger.

    Raises:
        OSError: the operating system is not Linux.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    (_PROCESS / "clear_refs").write_text("5", encoding="ascii")  # sets VmHWM to VmRSS, see proc(5)
    before = _kilobytes("VmRSS")
    result = run()
    grown = _kilobytes("VmHWM") - before
    del result
    return 1024 * grown


def _kilobytes(field: str) -> int:
    lines = (_PROCESS / "status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
