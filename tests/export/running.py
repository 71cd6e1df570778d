"""Run what was written as ONNX, and hold it against the layer it was written from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import onnxruntime
import torch
from torch import Tensor

from multihead.layer import MultiHeadAttention
from tests import oracle

if TYPE_CHECKING:
    from onnx import ModelProto


def ran(model: ModelProto, **given: Tensor) -> Tensor:
    """What onnxruntime makes of a model."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (output,) = session.run(["output"], {name: tensor.numpy() for name, tensor in given.items()})
    return torch.from_numpy(output)


def assert_same(found: Tensor, layer: MultiHeadAttention, **call: Any) -> None:
    """Hold an output against the layer's in float64, within what the layer itself is off in its own dtype."""
    dtype = layer.q_proj.weight.dtype
    with torch.no_grad():
        plain = layer(**call)
        exact = layer.double()(**{name: wide(value) for name, value in call.items()})
    layer.to(dtype)
    assert found.dtype == dtype
    assert found.shape == plain.shape
    apart, allowed = oracle.difference(found, exact), 2 * oracle.budget(exact, plain)
    assert apart <= allowed, f"{apart} apart, and {allowed} are allowed."


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
