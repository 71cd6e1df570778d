"""The Attention node tests that the ONNX package carries, each read into arguments of `mh.attention`."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from torch import Tensor

import multihead as mh
from multihead import masks

RAW, CAPPED, BIASED, SOFTMAX = range(4)  # what qk_matmul_output holds, by its mode
READ = {  # every attribute of the operator, and what becomes of it here
    "is_causal": "masks.Causal, and query_start for the keys before the first query",
    "kv_num_heads": "mh.split_heads",
    "left_window_size": "masks.Window, which counts the query's own key",
    "q_num_heads": "mh.split_heads",
    "qk_matmul_output_mode": "mh.attention_weights, and log(weights) + logsumexp",
    "right_window_size": "masks.Window(after=)",
    "scale": "scale",
    "softcap": "softcap",
    "softmax_precision": "nothing: our softmax is float32 for all dtypes below float64",
}


@dataclass(frozen=True, eq=False)
class Node:
    """One node test: what it asks, the tensors it gives and those it expects.

    Fields:
        name: the name that the ONNX package gives it.
        opset: the version of the operator.
        attributes: those of the node.
        inputs: by the operator's own names; what the node leaves out is not there.
        expected: by the operator's own names.
        rtol: of the test.
        atol: of the test.
    """

    name: str
    opset: int
    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: dict[str, Tensor]
    rtol: float
    atol: float


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of `mh.attention`: q (batch, heads, queries, head_dim), k, v and what is said by keyword."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]


@cache
def cases() -> tuple[Any, ...]:
    """Every case of the operator that the package carries; those named `_expanded` are the same data again."""
    importlib.import_module("onnx.backend.test.case.node.attention")
    collected = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    return tuple(case for case in collected if case.name.startswith("test_attention_"))


@cache
def nodes() -> dict[str, Node]:
    """The node tests by name."""
    return {case.name: _node(case) for case in cases() if not expands_another(case)}


def expands_another(case: Any) -> bool:
    """Whether a case is another one's data with the operator written out as a graph of older operators."""
    return [node.op_type for node in case.model.graph.node] != ["Attention"]


def call_of(node: Node) -> Call:
    """Read a node into our arguments."""
    given, said = node.inputs, node.attributes
    assert set(said) <= set(READ), f"{node.name} has attributes that nobody reads: {set(said) - set(READ)}."
    q, k, v = given["Q"], given["K"], given["V"]
    if q.dim() == 3:  # (batch, length, heads * head_dim)
        q = mh.split_heads(q, said["q_num_heads"])
        k, v = (mh.split_heads(each, said["kv_num_heads"]) for each in (k, v))
    before: int | Tensor = 0  # how many keys stand before the first query
    if "past_key" in given:
        before = given["past_key"].shape[2]
        k, v = torch.cat([given["past_key"], k], 2), torch.cat([given["past_value"], v], 2)
    lengths = given.get("nonpad_kv_seqlen")
    if lengths is not None:
        before = lengths - q.shape[2]
    mask = _mask(said, longest=q.shape[2] + k.shape[2]) & (masks.Full() if lengths is None else masks.Lengths(lengths))
    options: dict[str, Any] = {"query_start": before}
    if "attn_mask" in given:
        table = _of_four_dimensions(given["attn_mask"], keys=k.shape[2])
        if table.dtype == torch.bool:
            mask = mask & masks.Keep(table)
        else:
            options["bias"] = table
    options["mask"] = mask
    options["scale"] = said.get("scale")
    options["softcap"] = said.get("softcap") or None
    return Call(q, k, v, options)


def outputs_of(node: Node, call: Call, *, kernel: str | None = None) -> dict[str, Tensor]:
    """Everything that a node is asked for, by our library."""
    y = mh.attention(call.q, call.k, call.v, **call.options, kernel=kernel)
    found = {"Y": y if node.inputs["Q"].dim() == 4 else mh.merge_heads(y)}
    if "present_key" in node.expected:
        found |= {"present_key": call.k, "present_value": call.v}
    if "qk_matmul_output" in node.expected:
        found["qk_matmul_output"] = _inside(node, call).to(call.q.dtype)
    return found


def _inside(node: Node, call: Call) -> Tensor:
    """(batch, heads, queries, keys): the weights, or the scores log(weights) + logsumexp of what the mode counts."""
    options, mode = dict(call.options), node.attributes.get("qk_matmul_output_mode", RAW)
    if mode == SOFTMAX:
        return mh.attention_weights(call.q, call.k, **options)
    if mode != BIASED:
        options |= {"mask": masks.Full(), "bias": None}
    if mode == RAW:
        options["softcap"] = None
    _, logsumexp = mh.attention_with_logsumexp(call.q, call.k, call.v, **options)
    return mh.attention_weights(call.q, call.k, **options).log() + logsumexp[..., None]


def _mask(said: dict[str, Any], *, longest: int) -> masks.Mask:
    mask: masks.Mask = masks.Causal() if said.get("is_causal") else masks.Full()
    left, right = said.get("left_window_size", -1), said.get("right_window_size", -1)
    if left < 0 and right < 0:
        return mask
    # A side without a bound is as wide as there are positions.
    return mask & masks.Window(longest if left < 0 else left + 1, after=longest if right < 0 else right)


def _of_four_dimensions(table: Tensor, *, keys: int) -> Tensor:
    """Put size-1 axes in front, and hide the keys behind a table that is narrower than the keys."""
    hidden = False if table.dtype == torch.bool else -torch.inf
    if table.shape[-1] not in (1, keys):
        table = F.pad(table, (0, keys - table.shape[-1]), value=hidden)
    return table.reshape((1,) * (4 - table.dim()) + tuple(table.shape))


def _node(case: Any) -> Node:
    (node,) = case.model.graph.node
    ((inputs, outputs),) = case.data_sets
    return Node(
        name=case.name,
        opset=next(each.version for each in case.model.opset_import if not each.domain),
        attributes={each.name: onnx.helper.get_attribute_value(each) for each in node.attribute},
        inputs=_named(case.name, "inputs", node.input, inputs),
        expected=_named(case.name, "outputs", node.output, outputs),
        rtol=case.rtol,
        atol=case.atol,
    )


def _named(case: str, side: str, names: Any, arrays: Any) -> dict[str, Tensor]:
    """Name tensors as the operator names them: by their place, whatever the node calls them."""
    formal = [each.name for each in getattr(onnx.defs.get_schema("Attention"), side)]
    present = [place for name, place in zip(names, formal, strict=False) if name]
    assert len(present) == len(arrays), f"{case} names {present} and gives {len(arrays)} {side}."
    return {name: _tensor(array) for name, array in zip(present, arrays, strict=True)}


def _tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())
