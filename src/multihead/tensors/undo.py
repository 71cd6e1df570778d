"""Change a model, and undo each change once, also where Ctrl-C interrupts a change or the undoing.

A step that undoes a change is registered before the change is made. So a step must do nothing where its change was not
made, or was undone already.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import RLock
from types import TracebackType
from typing import Any

from torch import nn


class Undo:
    """Steps that undo changes: the end of a `with` block, `close()`, or dropping the object runs them, last one first.

    Changes that are `permanent` stay when the object is dropped.
    """

    permanent = False
    _steps: tuple[Callable[[], object], ...] = ()
    _uses: tuple[_Use, ...] = ()

    @classmethod
    def of(cls, change: Callable[[Undo], object]) -> Undo:
        """Call `change`, which makes changes and registers their steps; undo them if it fails or is interrupted."""
        undo = cls()
        try:
            change(undo)
        except BaseException:
            undo.close()
            raise
        return undo

    def callback(self, step: Callable[[], object]) -> None:
        """Register the step that undoes a change, before the change is made."""
        self._steps = (*self._steps, step)

    def set(self, owner: Any, attribute: str, value: object) -> None:
        """Set an attribute; the last of several users restores it."""
        use = _Use(owner, attribute)
        self._uses = (*self._uses, use)
        self.callback(use.end)
        use.begin(value)

    def before(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Register a hook that runs before the forward pass of a module."""
        self.callback(lambda: _remove(module, hook))
        module.register_forward_pre_hook(hook, **options)

    def after(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Register a hook that runs after the forward pass of a module."""
        self.callback(lambda: _remove(module, hook))
        module.register_forward_hook(hook, **options)

    def close(self) -> None:
        """Undo all changes."""
        try:
            self._run()
        except BaseException:
            self._run()  # it was interrupted: the rest
            raise

    def _run(self) -> None:
        while self._steps:
            self._steps[-1]()
            self._steps = self._steps[:-1]

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self.permanent:
            for use in self._uses:
                use.end(restore=False)  # nobody can restore it any more
        elif self._steps:
            self.close()


@dataclass(eq=False)
class _Use:
    """One use of an attribute that several users may set at the same time, in any order."""

    owner: Any
    attribute: str
    before: Any = None

    def begin(self, value: object) -> None:
        """Set the attribute."""
        with _lock:
            self.before = getattr(self.owner, self.attribute, None)
            _uses[self._key] = [*_uses.get(self._key, ()), self]
            setattr(self.owner, self.attribute, value)

    def end(self, *, restore: bool = True) -> None:
        """Restore the attribute, or leave that to the next use of it, which began later and has not ended."""
        with _lock:
            uses = _uses.get(self._key, [])
            if self not in uses:
                return  # it has not begun, or has ended
            later = uses[uses.index(self) + 1 :]
            if restore and later:
                later[0].before = self.before
            elif restore:
                setattr(self.owner, self.attribute, self.before)
            _uses[self._key] = [use for use in uses if use is not self]
            if not _uses[self._key]:
                del _uses[self._key]

    @property
    def _key(self) -> tuple[int, str]:
        return id(self.owner), self.attribute


_lock = RLock()  # dropping an object may run a step in the middle of another one
_uses: dict[tuple[int, str], list[_Use]] = {}  # in the order in which they began


def _remove(module: Any, hook: Callable[..., Any]) -> None:
    """Remove a hook from a module; its handle may be lost where registering it was interrupted."""
    for place in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(module, place)
        for key in [key for key, each in list(hooks.items()) if each is hook]:
            hooks.pop(key, None)
        for mark in ("_with_kwargs", "_always_called"):
            marks = getattr(module, place + mark, {})
            for key in [key for key in list(marks) if key not in hooks]:  # also after an interruption
                marks.pop(key, None)
