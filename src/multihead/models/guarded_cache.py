"""Let the key/value cache of a Hugging Face model know which heads were switched off while it was filled.

The class of the cache object, which outlives the model's call, is replaced by a subclass that checks each update. So a
cache is also checked after the context of an intervention has ended, when the model has no hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

from torch import nn

from multihead.kernels import head_changes
from multihead.models.pretrained import pretrained_models
from multihead.tensors.undo import Undo


@contextmanager
def guard_caches(model: nn.Module) -> Iterator[None]:
    """Guard each cache that a Hugging Face model in `model` is called with, or returns, in this context.

    A guarded cache raises a ModelError if it is continued with other heads switched off than when it was filled; a
    cache that was filled before it was guarded raises one too.
    """
    with Undo() as undo:
        for module in pretrained_models(model).values():
            undo.hook_before_forward(module, _guard_given_cache, with_kwargs=True, prepend=True)
            undo.hook_after_forward(module, _guard_returned_cache)
        yield


def _guard_given_cache(module: nn.Module, _: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Forward pre-hook that guards the cache with which a model is called."""
    for each in _unguarded_caches((kwargs or {}).get("past_key_values")):
        states = head_changes.change_states_of(module)
        if each.get_seq_length() > 0:
            head_changes.check_cache_states(frozenset(), states)
        else:
            _guard_cache(each, module, states)


def _guard_returned_cache(module: nn.Module, _: object, output: object) -> None:
    """Forward hook that guards a cache that the model made itself."""
    for each in _unguarded_caches(getattr(output, "past_key_values", None)):
        _guard_cache(each, module, head_changes.change_states_of(module))


def _unguarded_caches(given: Any) -> list[Any]:
    """Return the caches of self- and cross-attention in a cache of transformers that are not guarded yet."""
    parts = [getattr(given, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    found = parts if parts[0] is not None else [given]
    caches = [each for each in found if hasattr(each, "update") and hasattr(each, "get_seq_length")]
    return [each for each in caches if not isinstance(each, _CacheGuard)]


class _CacheGuard:
    """Base class of guarded caches, which checks each update of a cache.

    Attributes:
        model_reference: weak reference to the model that the cache belongs to.
        states_when_filled: the states of the changes of heads that were active when the cache was filled.
    """

    model_reference: weakref.ref[nn.Module]
    states_when_filled: frozenset[object]

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Append keys and values if the same heads are switched off as before, or if the cache is empty."""
        model, whole = self.model_reference(), cast("Any", super())
        if model is not None and (head_changes.active_changes or self.states_when_filled):
            states = head_changes.change_states_of(model)
            if whole.get_seq_length() > 0:
                head_changes.check_cache_states(self.states_when_filled, states)
            else:
                self.states_when_filled = states or frozenset()
        return whole.update(*args, **kwargs)


@cache
def _guarded_class(kind: Any) -> type:
    """Return a subclass of the cache class `kind` that checks each update."""
    return type(kind.__name__, (_CacheGuard, kind), {"__module__": kind.__module__})


def _guard_cache(cache_: Any, module: nn.Module, states: frozenset[object] | None) -> None:
    """Make a cache check its updates, unless it may be continued under any changes of heads."""
    if states is not None:
        cache_.model_reference, cache_.states_when_filled = weakref.ref(module), states
        kind: Any = type(cache_)
        cache_.__class__ = _guarded_class(kind)
