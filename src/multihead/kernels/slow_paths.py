"""Raise (in `strict()`) or warn if a call uses a slow kernel or fallback."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from multihead.errors import SlowPathError, SlowPathWarning
from multihead.tensors.tracing import constant_in_graphs
from multihead.tensors.undo import Undo

_strict: ContextVar[bool] = ContextVar("strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Raise an error in this context instead of using the reference kernel, which holds queries x keys.

    A call with `kernel="reference"` is allowed. For torch.compile the context must be active while the graph is traced.

    Raises:
        SlowPathError: the reference kernel would run; the error lists why each faster kernel refuses.

    >>> import torch, multihead as mh
    >>> q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    >>> with mh.strict():
    ...     mh.attention(q, q, q, softcap=2.0)
    Traceback (most recent call last):
        ...
    multihead.errors.SlowPathError: The reference kernel would run, which holds queries x keys: native: it ...
    """
    with Undo() as undo:
        undo.set_variable(_strict, value=True)
        yield


@constant_in_graphs  # a compiler cannot trace a ContextVar; its value at trace time becomes a constant of the graph
def raise_if_strict(finding: str, remedy: str) -> None:
    """Raise a SlowPathError in a `strict()` context; elsewhere do nothing."""
    if _strict.get():
        raise SlowPathError(finding, remedy)


def warn_of_slow_path(finding: str, remedy: str) -> None:
    """Raise a SlowPathError in a `strict()` context; elsewhere warn with a SlowPathWarning."""
    raise_if_strict(finding, remedy)
    warnings.warn(f"{finding} {remedy}", SlowPathWarning, stacklevel=2)
