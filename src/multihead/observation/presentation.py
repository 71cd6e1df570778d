"""Find the functions of the viewer that show a record, a census or a time series; they are imported on use.

Users look for `view` and `report` on the record, but the functions that show a record are in layers above it. They are
given by name instead of an import.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def function_of_viewer(module: str, name: str) -> Callable[..., Any]:
    """Import a module of `multihead.viewer`, and return its function or class of this name."""
    found: Callable[..., Any] = getattr(import_module(f"multihead.viewer.{module}"), name)
    return found
