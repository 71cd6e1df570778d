"""Run an exported model, and compare it with its layer."""

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
    """Return the output of a model in onnxruntime."""
    return all_of(model, **given)["output"]


def all_of(model: ModelProto, **given: Tensor) -> dict[str, Tensor]:
    """Return all outputs of a model in onnxruntime, by name."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    outputs = session.run(None, {name: tensor.numpy() for name, tensor in given.items()})
    return {each.name: torch.from_numpy(array) for each, array in zip(session.get_outputs(), outputs, strict=True)}


def evaluated(model: ModelProto, **given: Tensor) -> Tensor:
    """Return the output of a model in the reference evaluator of the package onnx, which supports bfloat16 too."""
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
    """Compare an output with the layer's in float64, within the error of the layer in its own dtype."""
    dtype = layer.q_proj.weight.dtype
    with torch.no_grad():
        plain = layer(**call)
        exact = layer.double()(**{name: wide(value) for name, value in call.items()})
    layer.to(dtype)
    assert_within(found, plain, exact)


def assert_within(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Compare an output with the exact one, within the error of the plain one in the same dtype."""
    assert found.dtype == plain.dtype
    assert found.shape == plain.shape
    apart, allowed = oracle.difference(found, exact), 2 * oracle.budget(exact, plain)
    assert apart <= allowed, f"{apart} apart, and {allowed} are allowed."


def wide(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
