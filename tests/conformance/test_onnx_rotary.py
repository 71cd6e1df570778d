"""The ONNX package's own tests of its RotaryEmbedding operator, every one of them, through `Rotary`.

Their cosines and sines are random numbers and not those of angles, so each test hands them over as the waves that a
`Rotary` would have computed.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx", reason="the ONNX package, whose tests these are, is not installed")

import onnx

import multihead as mh
from multihead.rotary import Rotary
from multihead.rotary.factors import RotationFactors

CARRIED = 8  # with onnx 1.23; what a newer package carries beside them is run too
READ = {"interleaved", "num_heads", "rotary_embedding_dim"}


@dataclass(frozen=True, eq=False)
class Node:
    """One node test: its attributes, the tensors it gives by the operator's own names, and what it expects."""

    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    expected: Tensor
    rtol: float
    atol: float


@cache
def nodes() -> dict[str, Node]:
    """The node tests by name; cases named `_expanded` are the same data again."""
    importlib.import_module("onnx.backend.test.case.node.rotaryembedding")
    collected = importlib.import_module("onnx.backend.test.case.node")._NodeTestCases
    found = {}
    for case in collected:
        operators = [node.op_type for node in case.model.graph.node]
        if case.name.startswith("test_rotary_embedding") and operators == ["RotaryEmbedding"]:
            (node,) = case.model.graph.node
            ((given, (expected,)),) = case.data_sets
            formal = ("X", "cos_cache", "sin_cache", "position_ids")
            inputs = {name: torch.from_numpy(array) for name, array in zip(formal, given, strict=False)}
            said = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
            found[case.name] = Node(said, inputs, torch.from_numpy(expected), case.rtol, case.atol)
    return found


def caches(node: Node) -> tuple[Tensor, Tensor]:
    """(batch, length, 1, pairs) twice: the cosines and sines of each token."""
    cosine, sine = node.inputs["cos_cache"], node.inputs["sin_cache"]
    if "position_ids" in node.inputs:
        cosine, sine = cosine[node.inputs["position_ids"]], sine[node.inputs["position_ids"]]
    return cosine[:, :, None], sine[:, :, None]


def waves_of(node: Node) -> list[RotationFactors | Tensor]:
    """The caches in every form that a turn takes: of pairs of neighbours also as one complex number a pair."""
    cosine, sine = caches(node)
    if node.attributes.get("interleaved"):
        both = RotationFactors(
            cosine.repeat_interleave(2, -1), torch.stack([-sine, sine], -1).flatten(-2), from_table=False
        )
        return [both, torch.complex(cosine, sine)]
    halves = torch.cat([cosine, cosine], -1), torch.cat([-sine, sine], -1)
    return [RotationFactors(*halves, from_table=False), RotationFactors(*halves, from_table=True)]


@pytest.mark.parametrize("name", list(nodes()))
def test_columns_are_turned_as_the_node_test_expects(name: str) -> None:
    node = nodes()[name]
    said = node.attributes
    assert set(said) <= READ
    x = node.inputs["X"]
    heads = x if x.dim() == 4 else mh.split_heads(x, said["num_heads"])  # (batch, heads, length, head_dim)
    rotary = Rotary(dim=said.get("rotary_embedding_dim") or None, interleaved=bool(said.get("interleaved")))
    for waves in waves_of(node):
        turned = rotary._rotate_columns(heads, waves)
        found = turned if x.dim() == 4 else mh.merge_heads(turned)
        torch.testing.assert_close(found, node.expected, rtol=node.rtol, atol=node.atol)


def test_the_package_carries_as_many_node_tests_as_it_did() -> None:
    assert len(nodes()) >= CARRIED
