"""A part of tools/cuda.py with more cases than its time is enough for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tools.gpu_stub import hangs


def cases(seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    return {"passes": dict, "waits": hangs, "is left": dict, "is left too": dict}
