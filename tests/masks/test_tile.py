"""What each mask means, against loops over its cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead.errors import MaskError
from multihead.functional import attention
from multihead.masks import Causal, Documents, Drop, Keep, Lengths, Mask, Prefix, Window
from multihead.masks.positions import CallSize, TilePositions
from tests import oracle
from tests.drawing import sizes, starts, trees


@settings(max_examples=80)
@given(data=st.data())
def test_the_dense_meaning_is_that_of_the_loops(data: st.DataObject) -> None:
    size = data.draw(sizes(longest=9))
    mask, start = data.draw(trees(size)), data.draw(starts(size))
    rows = slice(data.draw(st.integers(0, size.queries)), None)
    columns = slice(data.draw(st.integers(0, size.keys)), data.draw(st.integers(0, size.keys)))
    number = size.keys - size.queries if isinstance(start, str) else start
    mask.check_fits(CallSize(size.batch, size.heads, size.queries, size.keys))
    place = TilePositions.from_sizes(size.queries, size.keys, query_start=number, rows=rows, columns=columns)
    expected = oracle.shown(mask, size.cells, start)[:, :, rows, columns]
    assert torch.equal(mask.tile(place).expand_as(expected), expected)


def test_positions_before_the_first_key_see_nothing_before_them() -> None:
    place = TilePositions.from_sizes(4, 2, query_start=-2)
    assert Causal().tile(place)[0, 0].tolist() == [[False, False], [False, False], [True, False], [True, True]]
    assert Documents((2,)).tile(place)[0, 0].tolist() == [[False] * 2, [False] * 2, [True] * 2, [True] * 2]


def test_positions_after_all_documents_see_nothing_and_are_not_seen() -> None:
    shown = Documents((1, 1)).tile(TilePositions.from_sizes(4, 4))[0, 0]
    assert shown.tolist() == [[True, False, False, False], [False, True, False, False], [False] * 4, [False] * 4]


UNFIT: list[tuple[Mask, str]] = [
    (Lengths((1, 2, 3)), "Lengths((1, 2, 3)) has lengths for 3 samples, and the batch has 2. Give one row per sample."),
    (Prefix((1, 2, 3)), "Prefix((1, 2, 3)) has lengths for 3 samples, and the batch has 2. Give one row per sample."),
    (
        Documents(((1,), (2,), (3,))),
        "Documents(((1,), (2,), (3,))) has lengths for 3 samples, and the batch has 2. Give one row per sample.",
    ),
    (
        Lengths(((1, 2), (3, 4))),
        (
            "Lengths(((1, 2), (3, 4))) has lengths for 2 queries, and the call has 4. "
            "Give one length per sample and query."
        ),
    ),
    (
        Lengths((4, 6)),
        "Lengths((4, 6)) has a length of 6 tokens, and there are 5 keys. Give lengths of at most 5 tokens.",
    ),
    (
        Lengths(torch.tensor([[0, 0, 0, 9]])),
        (
            "Lengths(<int64 tensor (1, 4)>) has a length of 9 tokens, and there are 5 keys. "
            "Give lengths of at most 5 tokens."
        ),
    ),
    (Prefix(6), "Prefix(6) has a length of 6 tokens, and there are 5 keys. Give lengths of at most 5 tokens."),
    (
        Documents((3, 3)),
        (
            "Documents((3, 3)) has documents of 6 tokens in total, and there are 5 keys. "
            "Give lengths that add up to at most 5."
        ),
    ),
    (
        Keep(torch.ones(3, dtype=torch.bool), "keys"),
        (
            "Keep(<bool tensor (3,)>, 'keys') has 3 keys, and the call has 5. "
            "Give a tensor that broadcasts to (batch, heads, queries, keys) = (2, 3, 4, 5)."
        ),
    ),
    (
        Drop(torch.ones(2, 4, 4, 5, dtype=torch.bool)),
        (
            "Drop(<bool tensor (2, 4, 4, 5)>, 'batch heads queries keys') has 4 heads, and the call has 3. "
            "Give a tensor that broadcasts to (batch, heads, queries, keys) = (2, 3, 4, 5)."
        ),
    ),
]


@pytest.mark.parametrize(("mask", "sentence"), UNFIT, ids=[repr(mask) for mask, _ in UNFIT])
@pytest.mark.parametrize("wrap", [lambda mask: mask, lambda mask: Causal() & mask, lambda mask: Window(1) | mask])
def test_a_mask_that_does_not_fit_the_call_is_refused(mask: Mask, sentence: str, wrap: Any) -> None:
    q, k = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5, 8)
    with pytest.raises(MaskError) as refusal:
        attention(q, k, k, mask=wrap(mask), query_start=0)
    assert str(refusal.value) == sentence


def test_a_mask_that_does_not_define_visible_is_refused() -> None:
    class Own(Mask):
        def __repr__(self) -> str:
            return "Own()"

    with pytest.raises(MaskError) as refusal:
        Own().tile(TilePositions.from_sizes(1, 1))
    assert str(refusal.value) == (
        "Own does not define visible(queries, keys). "
        "Define it: from integer positions (.., queries, 1) and (.., 1, keys), return which keys a query may see."
    )
