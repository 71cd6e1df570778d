"""Queries and keys are normalised as the layer normalises them, in float32 for any dtype of the layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")

from multihead.errors import ArgumentError
from multihead.export.onnx import to_model
from multihead.layer import MultiHeadAttention
from multihead.layer.qk_norm import QKNorm
from tests.export.running import assert_same, ran

NORMS = [
    QKNorm(),
    QKNorm(learned=False, eps=0.5),
    QKNorm(over="all"),
    QKNorm("l2"),
    QKNorm("l2", learned=False, initial_scale=3.0, eps=0.5),
]


@pytest.mark.parametrize("norm", NORMS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_queries_and_keys_are_normalised_as_the_layer_does(norm: QKNorm, dtype: torch.dtype, num_heads: int) -> None:
    layer = MultiHeadAttention(16, num_heads, num_kv_heads=1, qk_norm=norm, scale=0.7, dtype=dtype).eval()
    assert layer.qk_norm is not None
    for parameter in layer.qk_norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 16).to(dtype)
    assert_same(ran(to_model(layer), x=x), layer, x=x)


def test_large_queries_of_float16_are_squared_in_float32() -> None:
    layer = MultiHeadAttention(16, 2, qk_norm=QKNorm(), dtype=torch.float16).eval()
    x = torch.randn(1, 5, 16).mul(1000).half()
    layer.v_proj.weight.data.mul_(1e-3)
    assert_same(ran(to_model(layer), x=x), layer, x=x)


def test_a_norm_that_is_not_ours_is_refused() -> None:
    layer = MultiHeadAttention(16, 2, qk_norm=QKNorm()).eval()
    layer.qk_norm = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ArgumentError) as refusal:
        to_model(layer)
    assert str(refusal.value) == (
        "qk_norm is a Identity, which cannot be exported. Give a layer constructed with qk_norm=QKNorm(...)."
    )
