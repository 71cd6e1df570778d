"""The models of transformers in a module, by qualified name, and which of their layers are cross-attention."""

from __future__ import annotations

import re
import sys

from torch import nn

from multihead.call import CallOrigin


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the Hugging Face models in a module, itself included, by qualified name."""
    if "transformers" not in sys.modules:
        return {}  # then there cannot be one
    from transformers import PreTrainedModel

    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


def is_within(name: str, other: str) -> bool:
    """Whether the module `name` is the module `other`, or a part of it.

    >>> is_within("encoder.layer.0", "encoder"), is_within("encoder2", "encoder"), is_within("encoder", "")
    (True, False, True)
    """
    return not other or f"{name}.".startswith(f"{other}.")


def crosses(origin: CallOrigin, name: str) -> bool:
    """Whether the keys of a call come from another sequence than its queries: its layer knows, or else its names do.

    Args:
        origin: where the call comes from.
        name: the qualified name of the layer.
    """
    return is_cross_attention(origin.layer, name) if origin.crosses is None else origin.crosses


def is_cross_attention(module: nn.Module, name: str = "") -> bool:
    """Whether the keys of an attention layer come from another sequence than its queries, by its flag or its names."""
    if isinstance(flag := getattr(module, "is_cross_attention", None), bool):
        return flag
    names = f"{name}.{type(module).__name__}"
    return re.search("cross|encdec|encoder_attn", names, re.IGNORECASE) is not None
