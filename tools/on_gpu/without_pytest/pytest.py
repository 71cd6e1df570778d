"""Stand-in for pytest where it is not installed: what tests/kernels/test_cuda.py uses of it when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Mark(SimpleNamespace):
    """A mark of a test: its `name` and `args`."""


class _Marks:
    def __getattr__(self, name: str) -> Callable[..., Callable[[Any], Any]]:
        def mark(*args: object, **_: object) -> Callable[[Any], Any]:
            def add(function: Any) -> Any:
                function.pytestmark = [*getattr(function, "pytestmark", ()), Mark(name=name, args=args)]
                return function

            return add

        return mark


mark = _Marks()


def skip(reason: str, **_: object) -> None:
    """Raise an error: a module that skips itself cannot be run."""
    raise RuntimeError(reason)
