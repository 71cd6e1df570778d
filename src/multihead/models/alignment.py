"""Find the alignment heads that a Hugging Face model declares: cross-attention heads that follow the audio in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from multihead.models.pretrained import pretrained_models


def alignment_heads(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the alignment heads of the models in a module: qualified name of a cross-attention layer -> its heads.

    Whisper's generation config lists these heads as [decoder layer, head], and Whisper computes word timestamps from
    them (https://github.com/openai/whisper). An entry that names no layer or head of the model is left out.
    """
    found: dict[str, set[int]] = {}
    names = {id(module): name for name, module in model.named_modules()}
    for module in pretrained_models(model).values():
        whole: Any = module
        listed = getattr(getattr(module, "generation_config", None), "alignment_heads", None)
        if not isinstance(listed, Sequence) or not getattr(module.config, "is_encoder_decoder", False):
            continue
        layers = [getattr(layer, "encoder_attn", None) for layer in getattr(whole.get_decoder(), "layers", ())]
        for entry in listed:
            layer, head = entry if isinstance(entry, Sequence) and len(entry) == 2 else (-1, -1)
            if not (isinstance(layer, int) and isinstance(head, int) and 0 <= layer < len(layers)):
                continue
            crossing = layers[layer]
            if crossing is not None and 0 <= head < int(getattr(crossing, "num_heads", 0)):
                found.setdefault(names[id(crossing)], set()).add(head)
    return {name: tuple(sorted(heads)) for name, heads in found.items()}
