"""Undo changes of a model exactly once, even if Ctrl-C interrupts a change or an undo step.

An undo step is registered before its change is made, so the step must do nothing if the change was not made or is
already undone.
"""

from __future__ import annotations

import sys
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from threading import RLock
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # modules that import this one while torch is being imported need no torch
    from torch import nn

Value = TypeVar("Value")


class Undo:
    """A stack of undo steps, run in reverse order by the end of a `with` block, `close()`, or deletion of the object.

    If `permanent`, deletion of the object keeps the changes. `delay` is called with the object before the steps run; it
    returns True if the changes are still needed, and calls `close()` again later.
    """

    permanent = False
    delay: Callable[[Undo], bool] | None = None
    _is_exiting = staticmethod(sys.is_finalizing)
    _undo_steps: tuple[Callable[[], object], ...] = ()
    _attribute_uses: tuple[_AttributeUse, ...] = ()

    @classmethod
    def run_change(cls, change: Callable[[Undo], object]) -> Undo:
        """Call `change`, which makes changes and registers their undo steps; undo them if it raises an exception."""
        undo = cls()
        try:
            change(undo)
        except BaseException:
            undo.close()
            raise
        return undo

    def add_step(self, step: Callable[[], object]) -> None:
        """Register an undo step; call this before making the change."""
        self._undo_steps = (*self._undo_steps, step)

    def set_attribute(self, owner: Any, attribute: str, value: object) -> None:
        """Set an attribute until undone; if several users have set it, the last of them to end restores it."""
        use = _AttributeUse(owner, attribute)
        self._attribute_uses = (*self._attribute_uses, use)
        self.add_step(use.end)
        use.begin(value)

    def set_variable(self, variable: ContextVar[Value], value: Value) -> None:
        """Set a ContextVar until undone; unlike `ContextVar.reset`, undoing may run in another context."""
        self.add_step(partial(variable.set, variable.get()))
        variable.set(value)

    def hook_before_forward(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Register a hook that runs before the forward pass of a module."""
        hook = partial(hook)  # a new object, so that undoing removes this registration of the hook only
        self.add_step(lambda: _remove_hook(module, hook))
        module.register_forward_pre_hook(hook, **options)

    def hook_after_forward(self, module: nn.Module, hook: Callable[..., Any], **options: bool) -> None:
        """Register a hook that runs after the forward pass of a module."""
        hook = partial(hook)  # see `hook_before_forward`
        self.add_step(lambda: _remove_hook(module, hook))
        module.register_forward_hook(hook, **options)

    def replace_method(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        """Let a method of one object run `function(method, *args, **options)`, until undone."""
        before = vars(owner).get(name)

        def restore() -> None:
            vars(owner).pop(name, None)
            if before is not None:
                vars(owner)[name] = before

        self.add_step(restore)
        vars(owner)[name] = partial(function, getattr(owner, name))

    def close(self) -> None:
        """Undo all changes, unless `delay` returns True, or Python is exiting, where modules may be deleted already."""
        if self._is_exiting() or (self.delay is not None and self.delay(self)):
            return
        try:
            self._run_steps()
        except BaseException:
            self._run_steps()  # an interrupt stopped the loop: run the remaining steps
            raise

    def _run_steps(self) -> None:
        while self._undo_steps:
            self._undo_steps[-1]()
            self._undo_steps = self._undo_steps[:-1]

    def __enter__(self) -> Undo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._is_exiting():
            return
        try:
            if self.permanent:
                for use in self._attribute_uses:
                    use.end(restore=False)  # the change is permanent
            elif self._undo_steps:
                self.close()
        except KeyboardInterrupt:  # Python ignores what `__del__` raises, so raise it once more after `__del__`
            start_new_thread(interrupt_main, ())


@dataclass(eq=False)
class _AttributeUse:
    """A temporary value of an attribute of `owner`; several users may set and restore an attribute in any order."""

    owner: Any
    attribute: str
    value_before: Any = None

    def begin(self, value: object) -> None:
        """Set the attribute to a temporary value."""
        with _attribute_lock:
            self.value_before = getattr(self.owner, self.attribute, None)
            _active_attribute_uses[self._attribute_key] = [*_active_attribute_uses.get(self._attribute_key, ()), self]
            setattr(self.owner, self.attribute, value)

    def end(self, *, restore: bool = True) -> None:
        """Restore the attribute, unless a later use is active, which then restores it."""
        with _attribute_lock:
            uses = _active_attribute_uses.get(self._attribute_key, [])
            if self not in uses:
                return  # this use has not begun, or has ended
            later = uses[uses.index(self) + 1 :]
            if restore and later:
                later[0].value_before = self.value_before
            elif restore:
                setattr(self.owner, self.attribute, self.value_before)
            _active_attribute_uses[self._attribute_key] = [use for use in uses if use is not self]
            if not _active_attribute_uses[self._attribute_key]:
                del _active_attribute_uses[self._attribute_key]

    @property
    def _attribute_key(self) -> tuple[int, str]:
        return id(self.owner), self.attribute


_attribute_lock = RLock()  # reentrant, because deletion of an object may run a step during another step
# (object id, attribute) -> its uses, in the order in which they began.
_active_attribute_uses: dict[tuple[int, str], list[_AttributeUse]] = {}


def _remove_hook(module: Any, hook: Callable[..., Any]) -> None:
    """Remove a hook from a module by searching for it, because an interrupt may have lost the hook's handle."""
    for place in ("_forward_pre_hooks", "_forward_hooks"):
        hooks = getattr(module, place)
        for key in [key for key, each in list(hooks.items()) if each is hook]:
            hooks.pop(key, None)
        for mark in ("_with_kwargs", "_always_called"):
            marks = getattr(module, place + mark, {})
            # Delete the options of hooks that no longer exist, including options that an interrupt left.
            for key in [key for key in list(marks) if key not in hooks]:
                marks.pop(key, None)
