"""The nodes of a mask compute the mask, for every size and start."""

from __future__ import annotations

import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("onnx", reason="the package onnx is not installed")

from multihead import masks
from multihead.errors import MaskError
from multihead.export.onnx.graph import Graph
from multihead.export.onnx.masks import PositionValues, QueryStart, every_query_sees_key, export_mask, fixed_sizes
from multihead.masks.leading_keys import LeadingKeys
from tests import drawing, oracle


def computed(mask: masks.Mask, queries: int, keys: int, start: QueryStart) -> Tensor:
    """Return the result of the nodes of a mask, broadcasting to (batch, heads, queries, keys)."""
    graph = Graph()
    sizes = [graph.size_of_axis(graph.add_input(name, torch.float32, (None,)), 0) for name in ("queries", "keys")]
    found = export_mask(graph, mask, PositionValues.from_sizes(graph, *sizes, start))
    graph.add_output(graph.add_node("Identity", found), "seen", torch.bool, (None,) * 4)
    session = onnxruntime.InferenceSession(graph.build_model(opset=23, name="mask").SerializeToString())
    given = {"queries": torch.zeros(queries).numpy(), "keys": torch.zeros(keys).numpy()}
    taken = [each.name for each in session.get_inputs()]
    return torch.from_numpy(session.run(None, {name: given[name] for name in taken})[0])


@settings(max_examples=50)
@given(st.data(), drawing.sizes(longest=6))
def test_nodes_show_what_the_mask_shows(data: st.DataObject, size: drawing.Sizes) -> None:
    mask, start = data.draw(drawing.trees(size)), data.draw(drawing.starts(size))
    found = computed(mask, size.queries, size.keys, start)
    assert torch.equal(found.expand(size.cells), oracle.shown(mask, size.cells, start))


def test_a_tensor_after_leading_keys_covers_the_keys_after_them() -> None:
    mask = LeadingKeys(2, masks.Drop(torch.tensor([True, False, True]), "keys")) & masks.Lengths((5, 4))
    expected = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 1, 0]]).bool()
    assert torch.equal(computed(mask, 1, 5, 0)[:, 0, 0], expected)


def test_a_prefix_of_no_key_shows_none() -> None:
    assert not every_query_sees_key(masks.Prefix(0), own_keys=True)
    assert every_query_sees_key(masks.Prefix(1), own_keys=False)


@settings(max_examples=50)
@given(st.data(), drawing.sizes(longest=6))
def test_if_always_sees_is_true_every_query_sees_a_key(data: st.DataObject, size: drawing.Sizes) -> None:
    mask, own = data.draw(drawing.trees(size)), data.draw(st.booleans())
    cells = (size.batch, size.heads, size.queries, size.queries) if own else size.cells
    try:
        seen = oracle.shown(mask, cells)
    except IndexError:  # the mask was drawn for another number of keys
        return
    assert not every_query_sees_key(mask, own_keys=own) or bool(seen.any(-1).all())


@pytest.mark.parametrize(
    ("mask", "sizes"),
    [
        (masks.Full(), {}),
        (masks.Causal() & masks.Window(3), {}),
        (masks.Lengths((5, 3)), {"batch": 2}),
        (masks.Lengths((5,)), {}),
        (masks.Lengths(((1, 2, 3),)), {"queries": 3}),
        (masks.Prefix(3) | masks.Prefix((1, 2, 3)), {"batch": 3}),
        (masks.Documents((5, 3)), {}),
        (masks.Documents(((5, 3), (1, 1))), {"batch": 2}),
        (masks.Keep(torch.ones(2, 1, 4, 6, dtype=torch.bool)), {"batch": 2, "queries": 4, "keys": 6}),
        (LeadingKeys(2, masks.Keep(torch.ones(6, dtype=torch.bool), "keys")), {"keys": 8}),
    ],
)
def test_a_mask_fixes_the_sizes_of_its_tensors_and_lists(mask: masks.Mask, sizes: dict[str, int]) -> None:
    assert fixed_sizes(mask) == sizes


def test_parts_of_different_sizes_are_refused() -> None:
    with pytest.raises(MaskError) as refusal:
        fixed_sizes(masks.Lengths((5, 3)) & masks.Prefix((1, 2, 3)))
    assert str(refusal.value) == (
        "Lengths((5, 3)) & Prefix((1, 2, 3)) has parts with 2 batch and parts with 3. Give its parts the same sizes."
    )


def test_a_mask_that_is_not_ours_is_refused() -> None:
    class Odd(masks.Mask):
        def __repr__(self) -> str:
            return "Odd()"

    with pytest.raises(MaskError) as refusal:
        export_mask(Graph(), Odd(), PositionValues("", ""))
    assert str(refusal.value) == (
        "Odd() cannot be exported to ONNX. "
        "Use the masks of multihead.masks, or masks.Keep with a tensor of the exported sizes."
    )
