"""A contract of three kernels: one passes, one fails a call, one ends the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tools.gpu_stub import dies, fails


def cases(seconds: float) -> dict[str, Callable[[], dict[str, Any]]]:
    passes = {name: (lambda name=name: {"kernel": name, "code": "89ab"}) for name in ("right", "wrong", "fatal")}
    return {
        "right: causal": passes["right"],
        "wrong: causal": passes["wrong"],
        "right: window": passes["right"],
        "wrong: window": fails,
        "fatal: causal": passes["fatal"],
        "fatal: window": dies,
    }
