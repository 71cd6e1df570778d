"""Hugging Face models: load one, make it call this library's attention, and restore it."""

from typing import Any

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name == "load":  # imported on first use, because loading.py takes long to import
        from multihead.models.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
