"""Import the functions that show a record or a census only when they are used, since they are in higher packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

PRESENTERS = {
    "census": ("multihead.viewer.census_page", "write_census_page"),
    "report": ("multihead.viewer.report", "write_report"),
    "view": ("multihead.viewer.widget.view", "View"),
}
"""Method of a record, or kind of page -> module and name of the function that shows it."""


def presenting_function(method: str) -> Callable[..., Any]:
    """Import and return the function or class listed under `method` in PRESENTERS."""
    module, name = PRESENTERS[method]
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
