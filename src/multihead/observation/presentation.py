"""Find the functions that show a record. They are in layers above, so they are named here and imported when called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

PRESENTERS = {
    "report": ("multihead.viewer.report", "write_report"),
    "view": ("multihead.widget.view", "View"),
}
"""What each method of a record calls: module and name."""


def presenter(method: str) -> Callable[..., Any]:
    """Return the function that a method of a record calls."""
    module, name = PRESENTERS[method]
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
