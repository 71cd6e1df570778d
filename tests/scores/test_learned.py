"""A table of biases by absolute places."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attention
from multihead.scores.learned import LearnedBias


def drawn(queries: int = 6, keys: int = 9) -> LearnedBias:
    bias = LearnedBias(2, queries, keys, dtype=torch.float64)
    nn.init.normal_(bias.weight)
    return bias


@pytest.mark.parametrize(
    ("queries", "keys", "start"), [(6, 9, 0), (2, 3, 0), (2, 9, 4), (1, 1, 5), (0, 3, 6), (2, 0, 1)]
)
def test_the_bias_of_a_call_is_cut_out_of_the_table(queries: int, keys: int, start: int) -> None:
    bias = drawn()
    found = bias(queries, keys, query_start=start)
    assert found.shape == (1, 2, queries, keys)
    assert torch.equal(found[0], bias.weight[:, start : start + queries, :keys])


def test_each_sample_uses_the_rows_of_its_own_positions() -> None:
    bias = drawn()
    found = bias(2, 7, query_start=torch.tensor([0, 4, 3]))
    assert found.shape == (3, 2, 2, 7)
    for sample, start in enumerate((0, 4, 3)):
        assert torch.equal(found[sample], bias.weight[:, start : start + 2, :7])


def test_padding_outside_the_table_uses_the_nearest_row() -> None:
    bias = drawn()
    found = bias(3, 9, query_start=torch.tensor([3, 5, -1]))
    assert torch.equal(found[1], bias.weight[:, [5, 5, 5]])
    assert torch.equal(found[2], bias.weight[:, [0, 0, 1]])


@pytest.mark.parametrize("start", [1, torch.tensor([1, 3])], ids=["one start", "two starts"])
def test_gradients_reach_the_table(start: int | Tensor) -> None:
    bias = drawn()
    q, k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4)

    def output(weight: Tensor) -> Tensor:
        found = torch.func.functional_call(bias, {"weight": weight}, (3, 8), {"query_start": start})
        return attention(q.double(), k.double(), v.double(), bias=found)

    assert torch.autograd.gradcheck(output, bias.weight)


def test_the_bias_has_the_requested_dtype_and_device() -> None:
    assert drawn()(2, 2, dtype=torch.bfloat16).dtype == torch.bfloat16
    bias = LearnedBias(2, 6, 9, device="meta")
    assert bias(2, 2).device.type == "meta"
    assert bias(2, 2, query_start=torch.tensor([0, 1], device="meta")).shape == (2, 2, 2, 2)


def test_it_begins_as_no_bias_at_all() -> None:
    bias = LearnedBias(2, 6, 9, device="meta").to_empty(device="cpu")
    bias.reset_parameters()
    assert not bias.weight.any()
    assert list(bias.state_dict()) == ["weight"]
    assert str(bias) == "LearnedBias(num_heads=2, queries=6, keys=9)"


def test_it_compiles_once_for_all_starts() -> None:
    bias = drawn()

    def found(queries: int, start: Tensor) -> Tensor:
        return bias(queries, 9, query_start=start)

    torch._dynamo.reset()
    compiled = torch.compile(found, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(2, torch.tensor([1, 2]))
    with torch.compiler.set_stance("fail_on_recompile"):
        expected = bias.weight[:, torch.tensor([[4, 5, 5], [0, 1, 2]])].transpose(0, 1)
        assert torch.equal(compiled(3, torch.tensor([4, 0])), expected)


MEND = "Create it with larger sizes, or give fewer tokens."


@pytest.mark.parametrize(
    ("queries", "keys", "start", "reach"),
    [
        (7, 9, 0, "7 and 9"),
        (6, 10, 0, "6 and 10"),
        (1, 9, 6, "7 and 9"),
        (2, 9, torch.tensor([5, 5]), "7 and 9"),
        (1, 9, torch.tensor([0, 7]), "7 and 9"),
    ],
    ids=["queries", "keys", "start", "starts", "one start"],
)
def test_positions_outside_the_table_are_rejected(queries: int, keys: int, start: Any, reach: str) -> None:
    finding = f"The learned bias has 6 query positions and 9 key positions, and the call needs {reach}."
    with pytest.raises(ShapeError, match=f"^{re.escape(f'{finding} {MEND}')}$"):
        drawn()(queries, keys, query_start=start)


def test_a_size_out_of_range_is_rejected() -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape('keys is 0. Give an integer of at least 1.')}$"):
        LearnedBias(2, 6, 0)


def test_a_query_before_the_first_position_uses_the_first_row() -> None:
    """An int below 0 once cut rows from the end of the table."""
    bias = LearnedBias(1, 7, 7)
    nn.init.normal_(bias.weight)
    assert torch.equal(bias(3, 2, query_start=-1), bias(3, 2, query_start=torch.tensor([-1])))
    assert torch.equal(bias(3, 2, query_start=-1)[0, 0], bias.weight[0, [0, 0, 1], :2])
