"""PyTorch's transformer layers by a changed import: the same parameters, the same training, our attention."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from multihead.compat import torch_nn


def trained(classes: ModuleType, **options: Any) -> tuple[nn.Module, torch.Tensor]:
    """Train a small encoder whose classes are imported from one place or another."""
    torch.manual_seed(0)
    layer = classes.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options)
    model = nn.Sequential(classes.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        x = torch.randn(4, 6, 16)
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), (x[..., 0] > x.mean(1)[:, :1]).long().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, torch.tensor(losses)


def attentions(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules() if isinstance(module, nn.MultiheadAttention)]


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_strangers_training_goes_the_same_way_after_changing_its_import(*, norm_first: bool) -> None:
    theirs, expected = trained(nn, norm_first=norm_first)
    ours, actual = trained(torch_nn, norm_first=norm_first)
    assert attentions(ours) == [torch_nn.MultiheadAttention] * 2
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert expected[-1] < expected[0] - 0.05
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_an_encoder_of_ours_packs_padded_batches_without_a_warning_at_its_making() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer = torch_nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        ours = torch_nn.TransformerEncoder(layer, 2).eval()
    assert type(layer.self_attn) is torch_nn.MultiheadAttention
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2).eval()
    theirs.load_state_dict(ours.state_dict())
    x, padding = torch.randn(2, 5, 16), torch.arange(5) >= torch.tensor([[5], [2]])
    with torch.no_grad():
        actual, expected = (model(x, src_key_padding_mask=padding) for model in (ours, theirs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


def test_decoder_and_transformer_are_the_originals_with_our_attention() -> None:
    torch.manual_seed(1)
    theirs = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    torch.manual_seed(1)
    ours = torch_nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)
    assert attentions(ours) == [torch_nn.MultiheadAttention] * 3
    x, y = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    torch.testing.assert_close(ours(x, y), theirs(x, y), rtol=0, atol=2e-5)
    layer = torch_nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    decoder = torch_nn.TransformerDecoder(layer, 2)
    assert attentions(decoder) == [torch_nn.MultiheadAttention] * 4
    assert decoder(y, x).shape == y.shape
