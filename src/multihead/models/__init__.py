"""Hugging Face models: load one, make it call this attention, convert each call and its mask, restore."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "load":  # imported when it is used, as what it needs takes long to import
        from multihead.models.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
