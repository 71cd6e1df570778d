"""One tile of the map is the same as that part of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attention_with_logsumexp, weights
from multihead.probes.weights import head_indices
from tests import oracle
from tests.drawing import Drawn, calls


@settings(max_examples=40)
@given(case=calls(), data=st.data())
def test_a_tile_is_that_part_of_the_full_softmax(case: Drawn, data: st.DataObject) -> None:
    q, k = case.q.double(), case.k.double()
    options = {name: value.double() if isinstance(value, Tensor) else value for name, value in case.options.items()}
    queries = slice(data.draw(st.integers(0, 12)), data.draw(st.integers(0, 12)))
    keys = slice(data.draw(st.integers(-5, 12)), None, data.draw(st.integers(1, 3)))
    heads = data.draw(st.lists(st.integers(0, case.size.heads - 1), min_size=1, max_size=4))
    seen = oracle.shown(case.mask, case.size.cells, case.query_start)
    whole = oracle.attend(q, k, k, seen, **options).weights
    tile = weights(
        q, k, mask=case.mask, query_start=case.query_start, heads=heads, queries=queries, keys=keys, **options
    )
    assert oracle.difference(tile, whole[:, heads][:, :, queries, keys]) <= 1e-13


@pytest.mark.parametrize("heads", [2, -1, [0, 3], (1,), slice(1, 3), slice(None)], ids=str)
def test_heads_are_named_by_an_index_several_or_a_slice(heads: Any) -> None:
    q = torch.randn(2, 4, 3, 8)
    chosen = [heads] if isinstance(heads, int) else list(heads) if not isinstance(heads, slice) else heads
    assert torch.allclose(weights(q, q, heads=heads), (q @ q.mT / 8**0.5).softmax(-1)[:, chosen], atol=1e-6)


def test_each_head_of_a_group_looks_at_the_keys_of_its_group() -> None:
    q, k = torch.randn(1, 6, 3, 8), torch.randn(1, 2, 5, 8)
    whole = (q @ k.repeat_interleave(3, 1).mT / 8**0.5).softmax(-1)
    for head in range(6):
        assert torch.allclose(weights(q, k, heads=head)[0, 0], whole[0, head], atol=1e-6)


def test_a_logsumexp_at_hand_is_used() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    _, logsumexp = attention_with_logsumexp(q, k, v)
    assert torch.allclose(weights(q, k, logsumexp=logsumexp), weights(q, k), atol=1e-7)
    shifted = weights(q, k, logsumexp=logsumexp - 1)
    assert torch.allclose(shifted, torch.e * weights(q, k), atol=1e-5)


def test_a_logsumexp_of_another_shape_is_refused() -> None:
    q = torch.zeros(1, 2, 5, 8)
    with pytest.raises(ShapeError) as refusal:
        weights(q, q, logsumexp=torch.zeros(1, 2, 4))
    assert str(refusal.value) == "logsumexp has shape (1, 2, 4). Give (batch, heads, queries) = (1, 2, 5)."


@pytest.mark.parametrize("head", [4, -5])
def test_a_head_that_does_not_exist_is_refused(head: int) -> None:
    q = torch.zeros(1, 4, 5, 8)
    with pytest.raises(ArgumentError) as refusal:
        weights(q, q, heads=[0, head])
    assert str(refusal.value) == f"There is no head {head}. Give heads from 0 to 3."


@pytest.mark.parametrize("heads", [[], slice(2, 2)])
def test_no_head_at_all_is_refused(heads: list[int] | slice) -> None:
    with pytest.raises(ArgumentError, match=r"^No head was chosen\. Give heads from 0 to 2\.$"):
        head_indices(heads, 3)
