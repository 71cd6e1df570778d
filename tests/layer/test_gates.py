"""Gates on heads, and a key in front of others."""

from __future__ import annotations

import pytest
import torch

from multihead.errors import ShapeError
from multihead.layer.gates import gate, prepend

OUTPUT = torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize("size", [(3,), (2, 3, 4), (1, 3, 1), (2, 1, 1)])
def test_a_gate_multiplies_what_its_head_gives(size: tuple[int, ...]) -> None:
    gates = torch.randn(size)
    expected = torch.einsum(
        "bhqd,bhq->bhqd", OUTPUT, gates.view(1, 3, 1).expand(2, 3, 4) if len(size) == 1 else gates.expand(2, 3, 4)
    )
    assert torch.allclose(gate(OUTPUT, gates), expected)


def test_a_gate_keeps_the_dtype_of_what_it_multiplies() -> None:
    assert gate(OUTPUT.bfloat16(), torch.ones(3)).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(2,), (3, 4), (2, 3, 5)])
def test_gates_that_do_not_fit_are_refused(size: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as refusal:
        gate(OUTPUT, torch.ones(size))
    assert str(refusal.value) == (
        f"head_gates has shape {size}, and there are 3 heads. "
        "Give one factor per head: shape (3,), or one that broadcasts to (batch, heads, queries) = (2, 3, 4)."
    )


def test_a_learned_row_stands_before_all_others_in_each_sample() -> None:
    key = torch.randn(3, 5)
    whole = prepend(key, OUTPUT)
    assert torch.equal(whole[:, :, 1:], OUTPUT)
    assert torch.equal(whole[:, :, 0], key.expand(2, 3, 5))
