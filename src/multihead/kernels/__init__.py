"""Kernels: modules that compute an attention request; `add` puts one of your own in front of them."""

from typing import Any

__all__ = ["AddedKernel", "AttentionResult", "Kernel", "WorkEstimate", "add"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the operators are registered while torch is being imported.
    if name in ("AttentionResult", "WorkEstimate"):
        from multihead.kernels import call

        return getattr(call, name)
    if name in __all__:
        from multihead.kernels import choose

        return getattr(choose, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
