"""The ONNX package's own tests of its Attention operator, every one of them, through `mh.attention`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx", reason="the ONNX package, whose tests these are, is not installed")

from multihead.errors import ArgumentError
from tests.conformance import onnx_nodes
from tests.conformance.onnx_nodes import Node
from tests.kernel_names import EACH

CARRIED, OPSETS = 93, {23, 24, 25}  # with onnx 1.23; what a newer package carries beside them is run too
BFLOAT16 = 2**-6  # two roundings: what the package itself allows where it compares bfloat16


@pytest.fixture(params=list(onnx_nodes.nodes()))
def node(request: pytest.FixtureRequest) -> Node:
    return onnx_nodes.nodes()[request.param]


def assert_as_expected(node: Node, found: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(node.expected)
    for name, expected in node.expected.items():
        rtol = max(node.rtol, BFLOAT16) if expected.dtype == torch.bfloat16 else node.rtol
        given = found[name]
        if expected.dtype == torch.float16:
            given = torch.where(nearer_to_the_exact(given, expected, name, node), expected, given)
        torch.testing.assert_close(
            given, expected, rtol=rtol, atol=node.atol, msg=lambda told, name=name: f"{name}: {told}"
        )


def nearer_to_the_exact(given: Tensor, expected: Tensor, name: str, node: Node) -> Tensor:
    """Where a result is nearer than the expected one to that of float64.

    The package's float16 results have rounded scores, weights and sums, and its tolerance is one rounding of the
    last: a result that rounds once may be further from them than that, and is then better than they are.
    """
    call = onnx_nodes.call_of(node)
    wide = replace(call, q=call.q.double(), k=call.k.double(), v=call.v.double())
    exact = onnx_nodes.outputs_of(node, wide)[name]
    return (given - exact).abs() <= (expected - exact).abs()


def test_the_chosen_kernel_gives_what_the_node_test_expects(node: Node) -> None:
    assert_as_expected(node, onnx_nodes.outputs_of(node, onnx_nodes.call_of(node)))


@pytest.mark.parametrize("kernel", EACH)
def test_every_kernel_that_takes_the_call_gives_what_the_node_test_expects(node: Node, kernel: str) -> None:
    call = onnx_nodes.call_of(node)
    try:
        found = onnx_nodes.outputs_of(node, call, kernel=kernel)
    except ArgumentError as refusal:
        if not str(refusal).startswith(f"Kernel {kernel!r} refuses"):
            raise
        pytest.skip(str(refusal))
    assert_as_expected(node, found)


def test_the_package_carries_as_many_node_tests_of_as_many_opsets_as_it_did_and_each_is_run() -> None:
    assert len(onnx_nodes.nodes()) >= CARRIED
    assert {node.opset for node in onnx_nodes.nodes().values()} >= OPSETS


def test_a_case_with_the_operator_written_out_has_the_data_of_the_case_it_is_made_from() -> None:
    again = [case for case in onnx_nodes.cases() if onnx_nodes.expands_another(case)]
    data = {case.name: case.data_sets for case in onnx_nodes.cases() if not onnx_nodes.expands_another(case)}
    assert len(again) == len(data)
    for case in again:
        original = case.name[: case.name.index("_expanded")]
        ((inputs, outputs),), ((same_inputs, same_outputs),) = case.data_sets, data[original]
        assert inputs is same_inputs
        assert outputs is same_outputs
