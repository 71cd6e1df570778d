"""Copies of configurations that select this library's attention, for the forward passes that begin during a use.

transformers selects a model's attention by the name in its configuration, which every layer reads when it runs. Models
may share a configuration, and a forward pass may run in another thread when a use of the model begins or ends. So a use
writes no name into a configuration. It replaces the configurations that the modules of the model hold by copies, which
share all attributes with the original, except the name. A copy returns the name that was valid when the forward pass of
the reading thread began: a mask and the layers that read it are always computed by the same attention.

A pass that began before the use is found on the reading thread's stack. A pass that began during the use is counted by
hooks; the model is restored after the last of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice
from threading import RLock, get_ident
from traceback import walk_stack
from types import FrameType
from typing import Any, cast

import torch
from torch import nn

from multihead.tensors.undo import Undo

NAME_ATTRIBUTE = "_attn_implementation_internal"
"""Attribute of a configuration of transformers with the name of the attention."""

_MODULE_CALL_CODE = nn.Module._wrapped_call_impl.__code__  # noqa: SLF001 - `__call__` of every module


@dataclass(eq=False)
class ForwardPasses:
    """The running forward passes of one use of a model.

    Attributes:
        model_ids: the id of every model of transformers in the module that is used.
        ended: whether the use has ended, so that new passes are not part of it.
        running: thread -> id of the outermost model in its pass that began during the use.
    """

    model_ids: frozenset[int] = frozenset()
    ended: bool = False
    running: dict[int, int] = field(default_factory=dict)
    _delayed: Undo | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ForwardPasses, ()  # a copy of the model has copies of the hooks, and its own configuration

    def include_this_thread(self, skipped_calls: int = 0) -> bool:
        """Whether what this thread computes now is part of the use.

        Args:
            skipped_calls: number of innermost module calls that have just begun.
        """
        return get_ident() in self.running or not (self.ended or self._are_on_stack(_stack(), skipped_calls))

    def begin(self, module: nn.Module, _: object) -> None:
        """Forward pre-hook of each model."""
        if not torch.compiler.is_compiling() and get_ident() not in self.running and self.include_this_thread(1):
            self.running[get_ident()] = id(module)

    def end(self, module: nn.Module, *_: object) -> None:
        """Forward hook of each model; restores a model whose use has ended."""
        if torch.compiler.is_compiling() or self.running.get(get_ident()) != id(module):
            return
        if self._are_on_stack(_stack(), 1):
            return  # a hook of the pass has run the model again
        with _passes_lock:
            del self.running[get_ident()]
            delayed = None if self.running else self._delayed
        if delayed is not None:
            delayed.close()

    def delay(self, undo: Undo) -> bool:
        """End the use; return whether `undo` must wait for passes of it, and is then closed by the last of them."""
        with _passes_lock:
            self.ended = True
            frames = sys._current_frames()  # noqa: SLF001 - the function that the standard library offers
            for thread in list(self.running):  # an error or Ctrl-C ends a pass without its hooks
                if thread not in frames or not self._are_on_stack(walk_stack(frames[thread])):
                    self.running.pop(thread, None)
            self._delayed = undo if self.running else None
            return bool(self.running)

    def _are_on_stack(self, stack: Iterator[tuple[FrameType, int]], skipped_calls: int = 0) -> bool:
        """Whether a call of a model is on a stack, apart from the innermost `skipped_calls` calls of modules."""
        return any(id(each) in self.model_ids for each in islice(_modules_on_stack(stack), skipped_calls, None))


def _stack() -> Iterator[tuple[FrameType, int]]:
    """Return the stack of this thread, from the innermost frame."""
    return walk_stack(sys._getframe())  # noqa: SLF001 - the function that the standard library offers


def _modules_on_stack(stack: Iterator[tuple[FrameType, int]]) -> Iterator[Any]:
    """Yield the modules whose calls are on a stack, innermost first."""
    for frame, _ in stack:
        if frame.f_code is _MODULE_CALL_CODE:
            yield frame.f_locals["self"]


_passes_lock = RLock()


def select_in_passes(undo: Undo, model: nn.Module, models: Iterable[nn.Module], name: str) -> None:
    """Make the models in a module select an attention in the passes that begin from now on, until undone.

    Args:
        undo: restores the configurations, once no pass that began meanwhile runs.
        model: any module.
        models: the models of transformers in it.
        name: name of the attention in transformers.
    """
    passes = ForwardPasses(frozenset(id(each) for each in models))
    undo.delay = passes.delay
    copies = _copies_of_configurations(model, passes, name)
    # Hooks that end passes are added first and removed last, so that none that has begun is missed.
    for each in models:
        undo.hook_after_forward(each, passes.end)
    for each in models:
        undo.hook_before_forward(each, passes.begin, prepend=True)
    for module in model.modules():
        for attribute, config in list(vars(module).items()):
            if id(config) in copies:
                undo.set_attribute(module, attribute, copies[id(config)])


def configurations_of(model: nn.Module) -> list[Any]:
    """Return all distinct configurations of transformers that the modules of a module hold, nested ones included."""
    from transformers import PreTrainedConfig

    waiting = [each for module in model.modules() for each in vars(module).values()]
    listed: dict[int, Any] = {}
    for config in waiting:  # the body appends nested configurations to this list
        if isinstance(config, PreTrainedConfig) and id(config) not in listed:
            listed[id(config)] = config
            nested = {*config.sub_configs, *_nested_names(config)}
            waiting += [getattr(config, key, None) for key in nested]
    return list(listed.values())


def is_none_mask_causal(module: Any) -> bool:
    """Whether a layer of a causal model that received no mask must hide later keys, as transformers' own functions do.

    That is so if an enclosing model that is not in use made the mask, with another attention than eager: such a model
    passes None instead of a causal mask.
    """
    config = getattr(module, "config", None)
    if not isinstance(config, _ConfigurationInUse) or getattr(config.use_original, NAME_ATTRIBUTE) == "eager":
        return False
    return any(
        hasattr(each, "config") and each.config is original_configuration(each.config)
        for each in _modules_on_stack(_stack())
    )


def original_configuration(config: Any) -> Any:
    """Return the configuration of which this one is a copy for the time of a use; else the configuration itself."""
    while isinstance(config, _ConfigurationInUse):
        config = config.use_original
    return config


def hold_original_configurations(model: nn.Module) -> None:
    """Let the modules of a new model hold the original of a configuration that another model uses."""
    for module in model.modules():
        for attribute, config in list(vars(module).items()):
            if isinstance(config, _ConfigurationInUse):
                setattr(module, attribute, original_configuration(config))


def _copies_of_configurations(model: nn.Module, passes: ForwardPasses, name: str) -> dict[int, Any]:
    """Return id of a configuration -> its copy for a use, for all configurations that the modules of a model hold."""
    copies: dict[int, Any] = {}
    for config in configurations_of(model):
        original = original_configuration(config)
        made = object.__new__(_class_in_use(cast("Any", type(original)), _nested_names(original)))
        made.use_original, made.use_name, made.use_passes, made.use_copies = config, name, passes, copies
        object.__setattr__(made, "__dict__", vars(original))
        copies[id(config)] = made
    return copies


def _nested_names(config: Any) -> frozenset[str]:
    """Return the names of the attributes of a configuration that are configurations."""
    from transformers import PreTrainedConfig

    return frozenset(key for key, each in vars(config).items() if isinstance(each, PreTrainedConfig))


class _ConfigurationInUse:
    """Base class of the copies; a slot is no attribute of the original, whose `__dict__` the copy shares.

    Attributes:
        use_original: the configuration before the use.
        use_name: the name of the attention in the use.
        use_passes: the passes of the use.
        use_copies: id of a configuration -> its copy in the same use.
    """

    __slots__ = ("use_copies", "use_name", "use_original", "use_passes")

    use_original: Any
    use_name: str
    use_passes: ForwardPasses
    use_copies: dict[int, Any]

    def __init_subclass__(cls, **_: object) -> None:
        """Leave out the hook of transformers, which would make a dataclass of the copy's class."""

    @property
    def _attn_implementation_internal(self) -> str | None:
        """The name of the attention for what this thread computes now."""
        if torch.compiler.is_compiling() or self.use_passes.include_this_thread():
            return self.use_name
        return getattr(self.use_original, NAME_ATTRIBUTE)  # type: ignore[no-any-return]

    @_attn_implementation_internal.setter
    def _attn_implementation_internal(self, name: str) -> None:
        self.use_name = name

    def __eq__(self, other: object) -> bool:
        return bool(vars(self) == vars(other)) if isinstance(other, type(original_configuration(self))) else False

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        """Pickle a configuration of the original class, with the name of the attention and the copies inside it."""
        original = original_configuration(self)
        nested = {key: getattr(self, key) for key in _nested_names(original)}
        state = {**vars(original), **nested, NAME_ATTRIBUTE: getattr(self, NAME_ATTRIBUTE)}
        return object.__new__, (type(original),), state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the original, with the name of the attention in the use if a whole model is copied."""
        of_model = any(isinstance(each, nn.Module) for each in memo.values())
        if not of_model and get_ident() not in self.use_passes.running:
            return copy.deepcopy(original_configuration(self), memo)
        function, arguments, state = self.__reduce_ex__(4)
        made = memo[id(self)] = function(*arguments)
        made.__dict__.update(copy.deepcopy(state, memo))
        return made


@cache
def _class_in_use(kind: Any, nested: frozenset[str]) -> Any:
    """Return the class of the copies of configurations of a class; cached, so that compiled graphs stay valid.

    Args:
        kind: a class of configurations.
        nested: names of the attributes that are configurations, which a copy returns as copies of the same use.
    """
    properties = {key: property(partial(_get_nested, key=key), partial(_set_nested, key)) for key in nested}
    attributes = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (_ConfigurationInUse, kind), {**attributes, **properties, "__slots__": ()})


def _get_nested(config: Any, key: str) -> Any:
    found = vars(config)[key]
    return config.use_copies.get(id(found), found)


def _set_nested(key: str, config: Any, value: Any) -> None:
    vars(config)[key] = value
