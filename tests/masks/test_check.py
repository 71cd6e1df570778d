"""The tools for masks of one's own: ours pass the check, a wrong claim is named with its first cell; pictures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.errors import MaskError
from multihead.masks.base import Band
from tests.drawing import sizes, trees


@settings(max_examples=60)
@given(data=st.data())
def test_what_the_masks_of_the_package_say_about_themselves_is_true(data: st.DataObject) -> None:
    size = data.draw(sizes(longest=9))
    masks.check(data.draw(trees(size)), size.queries, size.keys)


CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "an interval that is too short": (
        {"interval": lambda self, queries, keys: (queries - 2, queries + 1)},
        "interval hides key 0 from query 3, and visible shows it (query_start=0)",
    ),
    "an interval that is too long": (
        {"interval": lambda self, queries, keys: (0 * queries, queries + 2)},
        "interval shows key 1 to query 0, and visible hides it (query_start=0)",
    ),
    "a band": (
        {"band": Band(keys_before=1, keys_after=0)},
        "band hides key 0 from query 2, and visible shows it (query_start=0)",
    ),
    "positions": (
        {"uses_positions": False},
        "uses_positions = False shows key 1 to query 0, and visible hides it (query_start=0)",
    ),
    "distances": (
        {"visible": lambda self, queries, keys: keys <= queries // 2, "translation_invariant": True},
        "translation_invariant hides key 0 from query 0, and visible shows it (query_start=0)",
    ),
    "later keys": (
        {"visible": lambda self, queries, keys: keys <= queries + 1, "sees_no_later_key": True},
        "sees_no_later_key hides key 1 from query 0, and visible shows it (query_start=0)",
    ),
    "a lookback": ({"lookback": 4}, "lookback hides key 0 from query 4, and visible shows it (query_start=0)"),
    "hiding nothing": (
        {"hides_nothing": True},
        "hides_nothing shows key 1 to query 0, and visible hides it (query_start=0)",
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_that_disagrees_with_visible_is_refused_with_the_first_query_and_key(name: str) -> None:
    claims, sentence = CLAIMS[name]
    causal = {"visible": lambda self, queries, keys: keys <= queries}
    mask = type("Claiming", (masks.Mask,), causal | claims)()
    with pytest.raises(MaskError) as refusal:
        masks.check(mask)
    assert str(refusal.value) == f"Claiming.{sentence}. Change one of them so that both agree."


def test_a_claim_is_checked_where_the_first_query_is_not_at_position_zero() -> None:
    class Early(masks.Mask):
        sees_no_later_key = True
        lookback = 3

        def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
            return keys <= queries

    with pytest.raises(MaskError) as refusal:
        masks.check(Early(), queries=1, keys=6)
    assert str(refusal.value) == (
        "Early.lookback hides key 0 from query 0, and visible shows it (query_start=3). Change one of them so that "
        "both agree."
    )


def test_a_bare_tensor_is_no_mask() -> None:
    with pytest.raises(MaskError, match=r"Give masks\.Keep\(t\)"):
        masks.check(torch.ones(2, 2, dtype=torch.bool))  # type: ignore[arg-type]


def test_a_picture_has_a_row_a_query_and_a_column_a_key() -> None:
    assert masks.picture(masks.Window(2), queries=2, keys=3, query_start=1) == "■ ■ ·\n· ■ ■"


def test_samples_and_heads_are_drawn_side_by_side() -> None:
    assert masks.picture(masks.Lengths((1, 2)), queries=1, keys=2) == "■ ·   ■ ■"
    heads = masks.Keep(torch.tensor([True, False]), "heads")
    assert masks.picture(heads, queries=1, keys=2) == "■ ■   · ·"
    assert masks.picture(masks.Causal(), queries=1, keys=2, query_start=torch.tensor([0, 1])) == "■ ·   ■ ■"
