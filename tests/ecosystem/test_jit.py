"""TorchScript: what cannot be scripted or traced is refused with a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

import multihead as mh
from multihead.compat import annotated, d2l, per_head, torch_nn
from multihead.errors import ArgumentError
from tests.ecosystem.ways import EMBED, HEADS, layer

MADE: dict[str, Callable[[], nn.Module]] = {
    "layer.attention.MultiHeadAttention": layer,
    "compat.torch_nn.attention.MultiheadAttention": lambda: torch_nn.MultiheadAttention(EMBED, HEADS),
    "compat.d2l.MultiHeadAttention": lambda: d2l.MultiHeadAttention(EMBED, EMBED, EMBED, EMBED, HEADS, 0.0),
    "compat.d2l.DotProductAttention": lambda: d2l.DotProductAttention(0.0),
    "compat.annotated.MultiHeadAttention": lambda: annotated.MultiHeadAttention(EMBED, HEADS),
    "compat.annotated.MultiHeadedAttention": lambda: annotated.MultiHeadedAttention(HEADS, EMBED),
    "compat.per_head.PerHeadAttention": lambda: per_head.PerHeadAttention(EMBED, HEADS, EMBED // HEADS),
}


@pytest.mark.parametrize("name", MADE)
def test_scripting_is_refused_with_a_sentence_also_inside_a_model(name: str) -> None:
    sentence = (
        f"torch.jit.script cannot compile multihead.{name}: its masks and the choice of its kernel are Python objects, "
        "which TorchScript does not support. Use torch.export.export, torch.compile or torch.jit.trace."
    )
    module = MADE[name]()
    for model in (module, nn.Sequential(nn.Linear(EMBED, EMBED), module)):
        with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
            torch.jit.script(model)


def test_scripting_an_encoder_with_drop_ins_is_refused_too() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True), 1)
    torch.jit.script(model)
    with mh.compat.torch_nn.replace(model, inplace=True), pytest.raises(ArgumentError, match=r"^torch\.jit\.script"):
        torch.jit.script(model)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tracing_an_encoder_that_packs_padded_batches_is_refused_with_a_sentence() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True), 1).eval()
    model = mh.compat.torch_nn.replace(encoder, inplace=True).model
    x, padding = torch.randn(2, 5, EMBED), torch.arange(5) >= torch.tensor([[5], [3]])
    sentence = (
        "query is a nested tensor, whose lengths torch.jit.trace would record as constants. "
        "Set enable_nested_tensor=False in nn.TransformerEncoder (or encoder.use_nested_tensor = False)."
    )
    with torch.no_grad(), pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        torch.jit.trace(lambda x, padding: model(x, src_key_padding_mask=padding), (x, padding))
