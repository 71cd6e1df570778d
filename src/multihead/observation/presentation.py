"""Find the functions of higher layers that show a record, a census or a time series; they are imported on use.

Users look for `view` and `report` on the record, but the functions that show a record are in layers above it. A table
names their modules and functions instead of an import.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

PRESENTERS = {
    "census": ("multihead.viewer.census_page", "write_census_page"),
    "film": ("multihead.viewer.series_page", "film_of_series"),
    "report": ("multihead.viewer.report", "write_report"),
    "series": ("multihead.viewer.series_page", "write_series_page"),
    "view": ("multihead.viewer.widget.view", "View"),
}
"""What `report` and `view` of a record, a census and a time series call: module and name."""


def presenting_function(method: str) -> Callable[..., Any]:
    """Return the function or class that a method in PRESENTERS calls to show what it belongs to."""
    module, name = PRESENTERS[method]
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found
