"""Who listens to attention calls, and what statistics they want."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch

from multihead.call import AttentionCall
from multihead.parts import Part
from multihead.tracing import runs_backward


class Listener(Protocol):
    """Somebody who hears of every attention call while they listen."""

    @property
    def wanted(self) -> frozenset[Part]:
        """The parts of statistics that a kernel may measure while it computes."""
        ...

    def hear(self, call: AttentionCall) -> None:
        """Take note of one call that has run."""
        ...


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Let a listener hear of every call in this context, and in no other thread."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def listeners() -> tuple[Listener, ...]:
    """Return who listens now; nobody does inside a compiled graph, which a ContextVar would break."""
    return () if torch.compiler.is_compiling() else _listeners.get()


def wanted() -> frozenset[Part]:
    """Return the union of what all listeners want."""
    return frozenset[Part]().union(*(listener.wanted for listener in listeners()))


def publish(call: AttentionCall) -> None:
    """Tell every listener of a call, once: not again where a backward pass computes a checkpointed one anew."""
    if runs_backward():
        return
    for listener in listeners():
        listener.hear(call)
