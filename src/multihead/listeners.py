"""The active listeners of attention calls, and the statistics that they want."""

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
    """An object that receives every attention call while it is active."""

    @property
    def wanted(self) -> frozenset[Part]:
        """The parts of statistics that a kernel should measure together with the output if it can."""
        ...

    def hear(self, call: AttentionCall) -> None:
        """Receive one call that has run."""
        ...


_listeners: ContextVar[tuple[Listener, ...]] = ContextVar("listeners", default=())
active = _listeners.get  # for calls that no compiler traces


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Publish every call in this context, and in no other thread, to a listener."""
    token = _listeners.set((*_listeners.get(), listener))
    try:
        yield
    finally:
        _listeners.reset(token)


def listeners() -> tuple[Listener, ...]:
    """Return the active listeners; none inside a compiled graph, which a ContextVar would break."""
    return () if torch.compiler.is_compiling() else _listeners.get()


def wanted() -> frozenset[Part]:
    """Return the union of the statistics that all listeners want."""
    found = frozenset[Part]()
    for listener in listeners():
        found |= listener.wanted
    return found


def publish(call: AttentionCall) -> None:
    """Pass a call to every listener; not again where a backward pass recomputes a checkpointed call."""
    if runs_backward():
        return
    for listener in listeners():
        listener.hear(call)
