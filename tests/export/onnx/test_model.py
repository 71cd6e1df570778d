"""The two functions that export a layer: metadata, files, and runs with other sizes."""

from __future__ import annotations

import inspect
from importlib import metadata
from pathlib import Path

import pytest
import torch

pytest.importorskip("onnx", reason="the package onnx is not installed")
pytest.importorskip("onnxruntime", reason="the package onnxruntime is not installed")

import onnx

from multihead import masks
from multihead.errors import InputError
from multihead.export.onnx import save, to_model
from multihead.layer import MultiHeadAttention
from multihead.layer.qk_norm import QKNorm
from tests.export.running import assert_same, evaluated, ran

# Every option of the layer; those that are written are drawn by the tests of the walk.
WRITTEN = {
    *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "value_head_dim", "key_dim", "value_dim", "output_dim"),
    *("bias", "scale", "merge", "output_projection", "rotary", "softcap", "sinks", "head_gates"),
    *("add_bias_kv", "add_zero_attn", "qk_norm", "position_bias"),
}
WITHOUT_MEANING = {"dropout", "device", "dtype"}  # none in eval mode; where and how parameters are held


def test_every_option_of_the_layer_is_exported() -> None:
    options = set(inspect.signature(MultiHeadAttention).parameters)
    assert options == WRITTEN | WITHOUT_MEANING


def test_both_functions_have_the_same_arguments() -> None:
    of_model, of_write = (inspect.signature(each).parameters for each in (to_model, save))
    assert [name for name in of_write if name != "path"] == list(of_model)
    assert all(of_write[name] == parameter for name, parameter in of_model.items())


def test_a_model_names_its_producer_and_its_mask() -> None:
    made = to_model(MultiHeadAttention(8, 2).eval(), mask=masks.Causal() & masks.Window(3))
    assert (made.producer_name, made.producer_version) == ("multihead", metadata.version("multihead"))
    assert {each.key: each.value for each in made.metadata_props} == {
        "multihead.mask": "Causal() & Window(3)",
        "multihead.query_start": "None",
    }


def test_one_model_runs_for_every_batch_and_length() -> None:
    layer, mask = MultiHeadAttention(8, 2).eval(), masks.Causal() & masks.Window(3)
    made = to_model(layer, mask=mask)
    for batch, length in ((1, 1), (3, 7), (2, 20)):
        x = torch.randn(batch, length, 8)
        assert_same(ran(made, x=x), layer, x=x, mask=mask)


def test_a_file_holds_the_model(tmp_path: Path) -> None:
    layer, x = MultiHeadAttention(8, 2).eval(), torch.randn(2, 5, 8)
    save(layer, tmp_path / "layer.onnx", mask=masks.Causal(), opset=24, batch=2)
    read = onnx.load(tmp_path / "layer.onnx")
    assert read == to_model(layer, mask=masks.Causal(), opset=24, batch=2)
    assert_same(ran(read, x=x), layer, x=x, mask=masks.Causal())


def test_a_file_in_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as refusal:
        save(MultiHeadAttention(8, 2).eval(), tmp_path / "none" / "layer.onnx")
    assert str(refusal.value) == (
        f"{str(tmp_path / 'none' / 'layer.onnx')!r} cannot be written: there is no folder "
        f"{str(tmp_path / 'none')!r}. Create it first."
    )


def test_a_model_of_bfloat16_computes_the_output_of_the_layer() -> None:
    """By the standard's own evaluator: onnxruntime has no bfloat16 on the CPU."""
    layer, mask = MultiHeadAttention(8, 2, qk_norm=QKNorm(), dtype=torch.bfloat16).eval(), masks.Causal()
    x, lengths = torch.randn(2, 5, 8).bfloat16(), torch.tensor([3, 5])
    found = evaluated(to_model(layer, inputs=("x", "lengths"), mask=mask), x=x, lengths=lengths)
    torch.testing.assert_close(found, layer(x, lengths=lengths, mask=mask), rtol=2**-6, atol=2**-6)


def test_parameters_that_need_gradients_are_copied_and_stay_as_they_are() -> None:
    layer = MultiHeadAttention(8, 2).eval()
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    to_model(layer)
    assert all(torch.equal(before[name], parameter) for name, parameter in layer.named_parameters())
    assert all(parameter.requires_grad for parameter in layer.parameters())
