"""Queries and keys are rotated by the operator as by the layer, far from the start too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")

from multihead import masks
from multihead.errors import ArgumentError
from multihead.export.onnx import to_model
from multihead.layer import MultiHeadAttention
from multihead.rotary import Linear, Llama3, Rotary, Yarn
from tests.export.running import assert_same, ran

ROTARIES = [
    Rotary(),
    Rotary(interleaved=True),
    Rotary(dim=4),
    Rotary(dim=4, interleaved=True, scaling=Linear(2.0)),
    Rotary(base=500_000.0, scaling=Llama3(8.0, original_length=32)),
    Rotary(scaling=Yarn(4.0, 32)),
]


@pytest.mark.parametrize("rotary", ROTARIES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_queries_and_keys_are_rotated_as_by_the_layer(rotary: Rotary, dtype: torch.dtype) -> None:
    layer = MultiHeadAttention(16, 2, num_kv_heads=1, rotary=rotary, dtype=dtype).eval()
    x = torch.randn(2, 40, 16).to(dtype)
    assert_same(ran(to_model(layer, mask=masks.Causal()), x=x), layer, x=x, mask=masks.Causal())


def test_a_hundred_thousand_tokens_from_the_start_they_are_rotated_as_exactly() -> None:
    layer = MultiHeadAttention(16, 2, rotary=Rotary()).eval()
    x, memory, start = torch.randn(2, 3, 16), torch.randn(2, 4, 16), torch.tensor([100_000, 7])
    made = to_model(layer, inputs=("x", "memory", "query_start"))
    found = ran(made, x=x, memory=memory, query_start=start)
    assert_same(found, layer, x=x, memory=memory, query_start=start)


def test_float64_is_refused() -> None:
    with pytest.raises(ArgumentError) as refusal:
        to_model(MultiHeadAttention(8, 2, rotary=Rotary(), dtype=torch.float64).eval())
    assert str(refusal.value) == (
        "The layer is float64 and has a rotary, and the operator RotaryEmbedding does not support float64. "
        "Convert it first: layer.float()."
    )
