"""Building a graph: names, constants bit by bit, and the metadata of every model."""

from __future__ import annotations

import sys

import pytest
import torch

pytest.importorskip("onnx", reason="the package onnx is not installed")

from onnx import numpy_helper

from multihead.errors import MissingPackageError
from multihead.export.onnx.graph import Graph


def test_without_the_package_onnx_the_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingPackageError) as refusal:
        Graph()
    assert str(refusal.value) == (
        'Writing a layer as ONNX needs onnx, which is not installed. Run pip install "multihead[onnx]".'
    )


def test_a_name_that_is_taken_gets_a_number() -> None:
    graph = Graph()
    assert [graph.add_constant(torch.zeros(1), name="weight") for _ in range(3)] == ["weight", "weight_2", "weight_3"]


def test_a_list_of_integers_and_a_range_are_added_once() -> None:
    graph = Graph()
    assert graph.add_integers((1, 2)) == graph.add_integers((1, 2)) != graph.add_integers((1,)) != graph.add_integers(1)
    assert graph.range_up_to(graph.add_integers((1,))) == graph.range_up_to(graph.add_integers((1,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64])
def test_a_constant_holds_the_tensor_bit_by_bit(dtype: torch.dtype) -> None:
    graph, tensor = Graph(), torch.randn(2, 3).mul(100).to(dtype)
    graph.add_output(graph.add_node("Identity", graph.add_constant(tensor.T)), "y", dtype, (3, 2))
    (constant,) = graph.build_model(opset=23, name="constant").graph.initializer
    found = torch.from_numpy(numpy_helper.to_array(constant).astype("float64"))
    assert torch.equal(found, tensor.T.double())


def test_a_model_names_its_producer_in_the_oldest_format_with_its_operators() -> None:
    graph = Graph()
    graph.add_output(
        graph.add_node("Identity", graph.add_input("x", torch.float32, ("batch", None))), "y", torch.float32, (None, 1)
    )
    model = graph.build_model(opset=23, name="nothing", metadata={"multihead.mask": "Full()"}, version="1.2")
    assert (model.producer_name, model.producer_version, model.ir_version) == ("multihead", "1.2", 11)
    assert [(each.key, each.value) for each in model.metadata_props] == [("multihead.mask", "Full()")]
    assert [(each.domain, each.version) for each in model.opset_import] == [("", 23)]
