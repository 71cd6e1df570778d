"""Make transformers raise an error for models whose attention would not run on our kernels.

transformers accepts the name of a registered attention for every model. Models that never look up this name silently
compute other attention with the mask that was made for ours. So three methods of transformers are wrapped; whichever
way a user selects an attention, one of them is called:

- `PreTrainedModel.__init__` runs before the layers are created, for models that choose a layer class by the name;
- `PreTrainedModel.post_init` runs at the end of the `__init__` of every model and of the models in it, whether
  `from_pretrained`, `from_config` or the class itself creates it, and before weights are loaded;
- `PreTrainedModel.set_attn_implementation` changes the attention of a loaded model.

The wrapped methods change nothing if another attention is selected. Each `nn.MultiheadAttention` of a model that
selects ours becomes the drop-in, as in `mh.use`, until another attention is selected.

The methods are wrapped because transformers has no hook for such a check, and a model that never looks up the name
never calls our code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from multihead.compat.torch_nn.replace import can_replace, set_drop_in
from multihead.models.config_in_use import NAME_ATTRIBUTE, configurations_of, hold_original_configurations
from multihead.models.coverage import (
    IMPLEMENTATION_NAME,
    classes_without_our_attention,
    require_attention_interface,
    unsupported_model_error,
)
from multihead.models.pretrained import innermost_model, pretrained_models


def selects_our_attention(config: Any) -> bool:
    """Whether a configuration of transformers selects this library's attention."""
    return bool(getattr(config, NAME_ATTRIBUTE, None) == IMPLEMENTATION_NAME)


def reject_unsupported_models() -> None:
    """Make transformers reject this library's attention for models that bypass AttentionInterface; called once."""
    from transformers import PreTrainedModel

    kind: Any = PreTrainedModel
    init, post_init, set_implementation = kind.__init__, kind.post_init, kind.set_attn_implementation

    @wraps(init)
    def checked_init(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if selects_our_attention(config) and (by_name := classes_without_our_attention(type(model))):
            raise unsupported_model_error(type(model), by_name)
        init(model, config, *args, **kwargs)

    @wraps(post_init)
    def checked_post_init(model: Any) -> None:
        hold_original_configurations(model)
        _check_attention_interface(model, selects_our_attention)
        _choose_drop_ins(model)
        post_init(model)

    @wraps(set_implementation)
    def checked_set_implementation(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        requested = _requested_implementations(model.config, attn_implementation)
        # the implementation requested for the model, which also applies to copies of sub-configurations
        of_model = requested[id(model.config)]

        def is_requested(config: Any) -> bool:
            return bool(requested.get(id(config), of_model) == IMPLEMENTATION_NAME)

        _check_attention_interface(model, is_requested)
        set_implementation(model, attn_implementation, *args, **kwargs)
        # transformers sets the implementation in the model's configuration, but not in copies that layers hold.
        for config in configurations_of(model):
            if is_requested(config):
                setattr(config, NAME_ATTRIBUTE, IMPLEMENTATION_NAME)
            elif id(config) not in requested and selects_our_attention(config):
                setattr(config, NAME_ATTRIBUTE, getattr(model.config, NAME_ATTRIBUTE))
        _choose_drop_ins(model)

    kind.__init__, kind.post_init = checked_init, checked_post_init
    kind.set_attn_implementation = checked_set_implementation


def _check_attention_interface(model: Any, is_requested: Callable[[Any], bool]) -> None:
    """Check that all attention for which our kernels are requested goes through transformers' AttentionInterface.

    Args:
        model: a model of transformers.
        is_requested: whether our attention is requested for the model with a configuration.

    Raises:
        ModelError: a module computes attention without the interface.
    """
    models = pretrained_models(model)
    wanting = {name for name, part in models.items() if is_requested(part.config)}
    if wanting:
        replaced = {name for name, module in model.named_modules() if can_replace(module)}
        require_attention_interface(
            model, lambda name: innermost_model(name, models) in wanting and name not in replaced
        )


def _choose_drop_ins(model: nn.Module) -> None:
    """Make each nn.MultiheadAttention of a model that selects our attention a drop-in, and restore all others."""
    models = pretrained_models(model)
    for name, module in model.named_modules():
        if can_replace(module) and (around := innermost_model(name, models)) is not None:
            part: Any = models[around]
            set_drop_in(module, is_drop_in=selects_our_attention(part.config))


def _requested_implementations(config: Any, request: Any) -> dict[int, Any]:
    """Return the attention implementation requested for each (nested) configuration: id(configuration) -> name.

    Args:
        config: a configuration of transformers.
        request: a name for all, or a dict: sub-configuration ("" for `config` itself) -> a name or such a dict.
    """
    parts = request if isinstance(request, dict) else dict.fromkeys(("", *config.sub_configs), request)
    found = {id(config): parts.get("", getattr(config, NAME_ATTRIBUTE, None))}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            found |= _requested_implementations(part, parts.get(key, {}))
    return found
