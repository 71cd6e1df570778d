"""Find the functions that show a record or a census. They are in layers above, so they are imported when called."""

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


def presenter(method: str) -> Callable[..., Any]:
    """Return the function that a method calls."""
    module, name = PRESENTERS[method]
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
