"""Classify the layers of an encoder-decoder model: encoder, decoder or cross-attention.

The role of a layer is not stored: cross-attention is known from the call, and encoder and decoder from the layer's
name. Models without cross-attention have no roles, also if their layers are named `encoder`, as those of BERT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from multihead.record.layer import LayerRecord

ROLES = ("encoder", "decoder", "cross")
"""Self-attention of the encoder, self-attention of the decoder, and cross-attention to the encoder's output."""

_STACK = re.compile(r"(?:^|[._])(encoder|decoder)(?=[._]|$)")


def roles(layers: Sequence[LayerRecord], *, sample: int = 0) -> list[str]:
    """Return the role of each layer of a record: one of `ROLES`, or "" for all if no layer has cross-attention.

    Encoder and decoder are recognised by the names of layers; self-attention without such a name has the role "".
    """
    crossing = [layer.sample(sample).cross_attention for layer in layers]
    if not any(crossing):
        return [""] * len(layers)
    return ["cross" if each else _stack_of_name(layer.name) for layer, each in zip(layers, crossing, strict=True)]


def rows_with_roles(
    layers: Sequence[LayerRecord], rows: Sequence[Mapping[str, Any]], *, sample: int = 0
) -> list[dict[str, Any]]:
    """Add the columns "role" and "alignment" to table rows, if the record has roles or alignment heads.

    Args:
        layers: the layers of a record.
        rows: table rows with "layer" and "head".
        sample: index of the text.
    """
    named = dict(zip((layer.number for layer in layers), roles(layers, sample=sample), strict=True))
    aligned = {(layer.number, head) for layer in layers for head in layer.alignment_heads}
    return [
        {
            **row,
            **({"role": named[row["layer"]]} if any(named.values()) else {}),
            **({"alignment": (row["layer"], row["head"]) in aligned} if aligned else {}),
        }
        for row in rows
    ]


def _stack_of_name(name: str) -> str:
    """Return "encoder" or "decoder", whichever comes first in a layer's name, or "".

    >>> _stack_of_name("model.decoder.layers.0.self_attn"), _stack_of_name("0")
    ('decoder', '')
    >>> _stack_of_name("decoder.bert.encoder.layer.0.attention.self")
    'decoder'
    """
    found = _STACK.search(name)
    return "" if found is None else found[1]
