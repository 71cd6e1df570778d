"""Run what was written as ONNX, and hold it against the layer it was written from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import onnx
import onnx.reference
import onnxruntime
import torch
from torch import Tensor

from multihead.layer import MultiHeadAttention
from tests import oracle

if TYPE_CHECKING:
    from onnx import ModelProto


def ran(model: ModelProto, **given: Tensor) -> Tensor:
    """The output that onnxruntime makes of a model."""
    return all_of(model, **given)["output"]


def all_of(model: ModelProto, **given: Tensor) -> dict[str, Tensor]:
    """All outputs that onnxruntime makes of a model, by name."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    return {each.name: torch.from_numpy(array) for each, array in zip(session.get_outputs(), outputs, strict=True)}


def evaluated(model: ModelProto, **given: Tensor) -> Tensor:
    """The output by the ONNX package's own evaluator, which follows the words of the standard, bfloat16 too."""
    feeds = {
        name: tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype == torch.bfloat16
        else tensor.numpy()
        for name, tensor in given.items()
    }
    output = onnx.reference.ReferenceEvaluator(model).run(["output"], feeds)[0]
    if output.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(output.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(output)


def assert_same(found: Tensor, layer: MultiHeadAttention, **call: Any) -> None:
    """Hold an output against the layer's in float64, within what the layer itself is off in its own dtype."""
    dtype = layer.q_proj.weight.dtype
    with torch.no_grad():
        plain = layer(**call)
        exact = layer.double()(**{name: wide(value) for name, value in call.items()})
    layer.to(dtype)
    assert_within(found, plain, exact)


def assert_within(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Hold an output against the exact one, within what the plain one of the same dtype is off."""
    assert found.dtype == plain.dtype
    assert found.shape == plain.shape
    apart, allowed = oracle.difference(found, exact), 2 * oracle.budget(exact, plain)
    assert apart <= allowed, f"{apart} apart, and {allowed} are allowed."


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
