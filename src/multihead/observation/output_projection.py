"""Find the weight of an attention layer's output projection."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor, nn

PROJECTION_NAMES = ("out_proj", "o_proj", "c_proj", "out_lin", "Wo", "W_o", "o", "dense")
"""Attribute names of output projections, as in: multihead, OPT, CLIP, Whisper; Llama; GPT-2; DistilBERT; ModernBERT;
d2l; T5; ALBERT, GPT-NeoX."""


def output_weight(owner: nn.Module, root: nn.Module, name: str, *, width: int) -> Tensor | None:
    """Return the weight of an output projection, found by name in the attention layer or its sibling module `output`.

    Args:
        owner: the attention layer.
        root: the model.
        name: qualified name of the layer in the model.
        width: heads * value_dim, the number of input features of the projection.

    Returns:
        (embed_dim, heads * value_dim), as in `nn.Linear`, multiplied by per-head gates (`head_gates`) if there are any;
        None if no weight has this shape.

    >>> import multihead as mh
    >>> output_weight(layer := mh.MultiHeadAttention(8, 2), layer, "", width=8) is layer.out_proj.weight
    True
    """
    for module in _candidate_projections(owner, root, name):
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            continue
        local = getattr(weight, "to_local", None)  # a DTensor has the columns for the heads of this process
        if local is not None:
            weight = local()
        # The Conv1D of transformers' GPT-2 stores its weight as (input, output).
        found = weight.mT if type(module).__name__ == "Conv1D" else weight
        if found.shape[1] == width:
            gates = getattr(owner, "head_gates", None)
            if isinstance(gates, Tensor) and gates.dim() == 1:
                found = found * torch.repeat_interleave(gates, width // len(gates))
            return found
    return None


def _candidate_projections(owner: nn.Module, root: nn.Module, name: str) -> Iterator[nn.Module]:
    places: list[object] = [owner]
    if "." in name:
        parent = root.get_submodule(name.rpartition(".")[0])
        places.append(getattr(parent, "output", None))  # BERT and ViT: attention.self and attention.output.dense
    for place, each in product(places, PROJECTION_NAMES):
        module = getattr(place, each, None)
        if isinstance(module, nn.Module):
            yield module
