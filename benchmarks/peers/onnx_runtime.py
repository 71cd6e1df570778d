"""ONNX Runtime's MultiHeadAttention, a fused operator of its domain com.microsoft: alone, and as a layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers.cases import Trial
from benchmarks.peers.contender import CannotError, Contender
from benchmarks.peers.libraries import imported

IR_VERSION, OPSET = 10, 20  # of the model; the operator is version 1 of its domain


def attention(trial: Trial) -> Contender:
    """The operator alone, on packed q, k and v."""
    helper = _helper(trial)
    k, v = trial.alone
    node = _attention(helper, trial, "x", "k", "v")
    return _contender(trial, [node], {"x": trial.x, "k": k, "v": v}, {})


def layer(trial: Trial) -> Contender:
    """The operator between four matrix products; it adds the biases of q, k and v itself."""
    helper = _helper(trial)
    q, k, v, out = trial.weights
    inputs = {"x": trial.x} if trial.memory is None else {"x": trial.x, "memory": trial.memory}
    other = next(reversed(inputs))
    weights = {name: linear.weight.mT for name, linear in trial.weights._asdict().items()}
    weights |= {"biases": torch.cat([q.bias, k.bias, v.bias]), "out_bias": out.bias}
    nodes = [
        helper.make_node("MatMul", ["x", "q"], ["queries"]),
        helper.make_node("MatMul", [other, "k"], ["keys"]),
        helper.make_node("MatMul", [other, "v"], ["values"]),
        _attention(helper, trial, "queries", "keys", "values", "biases", output="merged"),
        helper.make_node("MatMul", ["merged", "out"], ["projected"]),
        helper.make_node("Add", ["projected", "out_bias"], ["output"]),
    ]
    return _contender(trial, nodes, inputs, weights)


def _helper(trial: Trial) -> Any:
    """Return the module that makes parts of a model.

    Raises:
        CannotError: a package is not installed, or the operator does not compute the case.
    """
    if trial.x.dtype != torch.float32:
        raise CannotError("its operator computes only float32 on the CPU")
    if trial.case.training:
        raise CannotError("it has no backward pass")
    imported("onnxruntime")
    return imported("onnx").helper


def _attention(helper: Any, trial: Trial, *inputs: str, output: str = "output") -> Any:
    """Return the operator's node; its inputs and output are packed, (batch, length, features)."""
    causal = int(trial.case.kind == "causal")
    return helper.make_node(
        "MultiHeadAttention", inputs, [output], domain="com.microsoft", num_heads=trial.heads, unidirectional=causal
    )


def _contender(trial: Trial, nodes: list[Any], inputs: dict[str, Tensor], weights: dict[str, Tensor]) -> Contender:
    """Make a contender that runs a model with torch's number of threads and without copies of inputs and output."""
    onnx, runtime = imported("onnx"), imported("onnxruntime")
    value = {name: _info(onnx, name, tensor) for name, tensor in {**inputs, "output": trial.x}.items()}
    constants = [
        onnx.numpy_helper.from_array(np.ascontiguousarray(each.numpy()), name) for name, each in weights.items()
    ]
    graph = onnx.helper.make_graph(nodes, "attention", [value[name] for name in inputs], [value["output"]], constants)
    opsets = [onnx.helper.make_opsetid("", OPSET), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Its threads would otherwise wait actively for the next call, and slow down the contender that runs next.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    output, binding = torch.empty_like(trial.x), session.io_binding()
    for name, tensor in inputs.items():
        binding.bind_input(name, "cpu", 0, np.float32, tuple(tensor.shape), tensor.data_ptr())
    binding.bind_output("output", "cpu", 0, np.float32, tuple(output.shape), output.data_ptr())

    def forward(_: Tensor) -> Tensor:  # the input of the trial is bound
        session.run_with_iobinding(binding)
        return output

    return Contender(forward)


def _info(onnx: Any, name: str, tensor: Tensor) -> Any:
    """Return the description of an input or output."""
    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, list(tensor.shape))
