"""Parts of tools/cuda.py whose cases pass, fail, die, hang, or take too long, without a GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tools.on_gpu.worker import NotHere


def cases(seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        "passes": passes,
        "fails": fails,
        "dies": dies,
        "hangs": hangs,
        "is not here": is_not_here,
        "answers": passes,
    }


def passes() -> dict[str, Any]:
    return {"answer": "yes", "holds": True}


def fails() -> dict[str, Any]:
    raise RuntimeError("it is wrong")


def dies() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hangs() -> dict[str, Any]:
    while True:
        time.sleep(60)


def is_not_here() -> dict[str, Any]:
    raise NotHere("transformers is not installed")
