"""Refuse slow paths where somebody asked for that, and say when one is taken."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from multihead.errors import SlowPathError, SlowPathWarning
from multihead.tracing import constant_in_graphs

_strict: ContextVar[bool] = ContextVar("strict", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Raise in this context instead of taking a slow path: the reference kernel, which holds queries x keys.

    A call that names its kernel is obeyed. Inside torch.compile it holds while the graph is made.

    Raises:
        SlowPathError: from the call that would be slow, with each faster kernel's reason.

    >>> import torch, multihead as mh
    >>> q = torch.randn(1, 2, 4, 8, dtype=torch.float64)
    >>> with mh.strict():
    ...     mh.attention(q, q, q, softcap=2.0)
    Traceback (most recent call last):
        ...
    multihead.errors.SlowPathError: The reference kernel would run, which holds queries x keys: native: it ...
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


@constant_in_graphs  # a compiler cannot trace a ContextVar; what holds while a graph is made holds for the graph
def refuse_if_strict(finding: str, mend: str) -> None:
    """Refuse a slow path in a strict context."""
    if _strict.get():
        raise SlowPathError(finding, mend)


def warn_of_slow_path(finding: str, mend: str) -> None:
    """Refuse a slow path in a strict context, and warn of it elsewhere."""
    refuse_if_strict(finding, mend)
    warnings.warn(f"{finding} {mend}", SlowPathWarning, stacklevel=2)
