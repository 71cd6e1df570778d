"""Reject models whose attention our kernels would not compute, whichever way they are chosen in transformers.

transformers accepts a registered name for every family, and families that never look it up silently compute something
else with the mask that was made for it. So its own methods are extended, where all ways of naming an attention meet:

- `PreTrainedModel.__init__` runs before the layers are created, for families that choose a class by the name;
- `PreTrainedModel.post_init` runs at the end of the `__init__` of every model and of the models in it, whether
  `from_pretrained`, `from_config` or the class itself creates it, and before weights are loaded;
- `PreTrainedModel.set_attn_implementation` is for loaded models.

For any other implementation these methods do what they did before.

`use` extends three methods of transformers: `PreTrainedModel.__init__`, `post_init` and `set_attn_implementation`.
There is no hook of transformers for a check, and a family that never looks the name up cannot notice it while it runs.
`post_init` ends the constructor of every model and of the models in it, however it is created, and runs before weights
are loaded. `from_pretrained`, `from_config` and the classes themselves therefore need no further places.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from multihead.models.coverage import (
    attention_outside_interface,
    classes_lacking_implementation,
    unsupported_model_error,
)
from multihead.models.pretrained import innermost_model, pretrained_models

CHOICE = "_attn_implementation_internal"  # the attribute of a configuration that names its attention


def reject_unsupported_models(implementation: str) -> None:
    """Make transformers reject an implementation for models that bypass its AttentionInterface; once per process."""
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    kind.__init__ = _wrap_init(kind.__init__, implementation)
    kind.post_init = _wrap_post_init(kind.post_init, implementation)
    kind.set_attn_implementation = _wrap_set_implementation(kind.set_attn_implementation, implementation)


def _wrap_init(init: Callable[..., None], implementation: str) -> Callable[..., None]:
    @wraps(init)
    def checked_init(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(config, CHOICE, None) == implementation and (
            by_name := classes_lacking_implementation(type(model), implementation)
        ):
            raise unsupported_model_error(type(model), by_name)
        init(model, config, *args, **kwargs)

    return checked_init


def _wrap_post_init(post_init: Callable[..., None], implementation: str) -> Callable[..., None]:
    @wraps(post_init)
    def checked_post_init(model: Any) -> None:
        _check_attention_interface(model, lambda config: getattr(config, CHOICE, None) == implementation)
        post_init(model)

    return checked_post_init


def _wrap_set_implementation(set_implementation: Callable[..., None], implementation: str) -> Callable[..., None]:
    @wraps(set_implementation)
    def checked_set_implementation(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        requested = _requested_implementations(model.config, attn_implementation)
        of_model = requested[id(model.config)]  # also used for copies of a part of the configuration

        def is_requested(config: Any) -> bool:
            return bool(requested.get(id(config), of_model) == implementation)

        _check_attention_interface(model, is_requested)
        set_implementation(model, attn_implementation, *args, **kwargs)
        # transformers sets the implementation in the model's configuration, but not in copies that layers hold.
        for config in configurations_of(model):
            if is_requested(config):
                setattr(config, CHOICE, implementation)
            elif id(config) not in requested and getattr(config, CHOICE, None) == implementation:
                setattr(config, CHOICE, getattr(model.config, CHOICE))

    return checked_set_implementation


def configurations_of(model: nn.Module) -> list[Any]:
    """Return every configuration of the models in a module, nested ones included, each once."""
    from transformers import PreTrainedConfig

    waiting = [getattr(module, "config", None) for module in model.modules()]
    listed: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in listed:
            listed[id(config)] = config
            waiting += [getattr(config, key, None) for key in config.sub_configs]
    return list(listed.values())


def _check_attention_interface(model: Any, is_requested: Callable[[Any], bool]) -> None:
    """Check that all attention in the models with some configurations goes through transformers' AttentionInterface.

    Args:
        model: a model of transformers.
        is_requested: whether the attention of the model with a configuration should be ours.

    Raises:
        ModelError: some attention does not.
    """
    models = pretrained_models(model)
    wanting = {name for name, part in models.items() if is_requested(part.config)}
    if not wanting:
        return
    elsewhere = {
        name: reason
        for name, reason in attention_outside_interface(model).items()
        if innermost_model(name, models) in wanting
    }
    if elsewhere:
        raise unsupported_model_error(type(model), elsewhere)


def _requested_implementations(config: Any, request: Any) -> dict[int, Any]:
    """Return the implementation requested for a configuration and those in it, by their ids.

    Args:
        config: a configuration of transformers.
        request: a name for all, or a dict with names by part, "" for the configuration itself; nested or not.
    """
    parts = request if isinstance(request, dict) else {}
    found = {id(config): parts.get("", getattr(config, CHOICE, None)) if isinstance(request, dict) else request}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            found |= _requested_implementations(part, parts.get(key, {}) if isinstance(request, dict) else request)
    return found
