"""Find the functions that show a record or a census, in higher layers of the package: they are imported on use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

PRESENTERS = {
    "census": ("multihead.viewer.census_page", "write_census_page"),
    "report": ("multihead.viewer.report", "write_report"),
    "view": ("multihead.viewer.widget.view", "View"),
}
"""What each method of a record calls, and `report` of a census: module and name."""


def presenting_function(method: str) -> Callable[..., Any]:
    """Return the function or class that a method in PRESENTERS calls to show its record or census."""
    module, name = PRESENTERS[method]
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
