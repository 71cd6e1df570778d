"""Which tokens each rank holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from multihead.errors import ArgumentError, ShapeError
from multihead.parallel.layout import Layout, check_layout_name

KINDS = st.sampled_from(["contiguous", "balanced"])


@given(KINDS, st.integers(1, 5), st.integers(1, 3))
def test_every_token_lies_on_one_rank(kind: str, ranks: int, size: int) -> None:
    layout = Layout(check_layout_name(kind), ranks)
    length = layout.chunk_count * size
    parts = [layout.positions(rank, length) for rank in range(ranks)]
    assert sorted(torch.cat(parts).tolist()) == list(range(length))
    whole = torch.arange(length)[None]
    taken = [layout.select_tokens_of_rank(whole, rank, 1) for rank in range(ranks)]
    assert [each[0].tolist() for each in taken] == [each.tolist() for each in parts]
    assert torch.equal(layout.join_tokens_of_ranks(taken, 1), whole)


def test_a_length_without_equal_chunks_names_those_next_to_it() -> None:
    with pytest.raises(ShapeError) as error:
        Layout("balanced", 2).check_length(3)
    assert str(error.value) == (
        "The sequence has 3 tokens, and 2 ranks hold 4 equal chunks of it. Pad or cut it to 4 tokens, and hide padding "
        "with mask=masks.Lengths(...)."
    )


def test_an_unknown_layout_is_rejected() -> None:
    with pytest.raises(ArgumentError) as error:
        check_layout_name("zigzag")
    assert str(error.value) == 'layout is \'zigzag\'. Give "contiguous" or "balanced".'
