"""Check that a record has the layers that a user selected, and find layers whose calls were not heard."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from multihead.errors import ModelError
from multihead.models import pretrained
from multihead.models.coverage import whole_model_advice
from multihead.observation.layer_filter import LayerFilter


def check_complete(model: nn.Module, recorded: Sequence[str], layer_filter: LayerFilter | None) -> None:
    """Check that every layer that the user selected was recorded.

    Args:
        model: the model.
        recorded: names of the layers whose calls were heard, in their order.
        layer_filter: the layers that the user selected; None for all.

    Raises:
        ModelError: no attention call was captured, or an item of `layers` matches no layer that ran.
    """
    if not recorded:
        # Subclasses are not counted, because `replace` does not replace them.
        of_torch = any(type(module) is nn.MultiheadAttention for module in model.modules())
        advice = whole_model_advice(model) or (
            "Call multihead.compat.torch_nn.replace(model, inplace=True), which makes each nn.MultiheadAttention a "
            "layer that is recorded, and run the model inside the context."
            if of_torch
            else "Run the model inside the context. Layers of multihead are recorded, and Hugging Face models that "
            "use AttentionInterface."
        )
        raise ModelError(
            f"No attention call of {type(model).__name__} was captured: it did not run inside the context, or its "
            f"layers compute their attention themselves{', as nn.MultiheadAttention does' if of_torch else ''}.",
            advice,
        )
    missed = [] if layer_filter is None else layer_filter.unmatched_items(recorded)
    if missed:
        raise ModelError(
            f"No layer that ran matches {' or '.join(repr(each) for each in missed)}.",
            f"Choose among {', '.join(f'{index}: {name}' for index, name in enumerate(recorded))}.",
        )


def unheard_layers(model: nn.Module, names: Mapping[int, str], recorded: Iterable[str]) -> dict[str, str]:
    """Return each nn.MultiheadAttention of a model that made no call that was heard: its name -> its class.

    A plain one in a Hugging Face model is replaced while the model is observed, so without a call it did not run.

    Args:
        model: the model.
        names: id of each module of the model -> its name.
        recorded: names of the layers whose calls were heard.
    """
    heard = {name.partition("#")[0] for name in recorded}
    unheard = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.MultiheadAttention) and names[id(module)] not in heard
    }
    models = pretrained.pretrained_models(model) if unheard else {}
    return {
        name: type(module).__name__
        for name, module in unheard.items()
        if type(module) is not nn.MultiheadAttention or pretrained.innermost_model(name, models) is None
    }
