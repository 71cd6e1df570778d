"""What the queries of a layer may see is read off the mask: its pattern, and the entropy of an even spread."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import MultiHeadAttention, observe
from multihead.masks import Causal, Full, Mask, Window
from multihead.record.visibility import query_blocks, visibility_of
from tests.dense_record import random_weights, record_of


def sample_of(seen: Tensor, *, heads: int = 2, query_start: int = 0, keep: str = "cpu") -> Any:
    dense = random_weights(heads, *seen.shape, seen=seen)
    return record_of(dense, seen=seen, query_start=query_start, keep=keep).layers[0].sample()


def band(queries: int, keys: int, before: int, after: int, start: int = 0) -> Tensor:
    offset = torch.arange(keys)[None] - (torch.arange(queries)[:, None] + start)
    return (offset >= -before) & (offset <= after)


@pytest.mark.parametrize(
    ("seen", "start", "expected"),
    [
        (torch.ones(6, 6, dtype=torch.bool), 0, ("full", 0, 0)),
        (torch.ones(6, 6, dtype=torch.bool).tril(), 0, ("causal", 0, 0)),
        (band(3, 9, 99, 0, start=6), 6, ("causal", 0, 0)),
        (band(9, 9, 2, 0), 0, ("causal window", 2, 0)),
        (band(9, 9, 2, 3), 0, ("window", 2, 3)),
        (torch.ones(1, 7, dtype=torch.bool), 6, ("full", 0, 0)),
        (torch.eye(6, dtype=torch.bool).roll(3, 1), 0, ("other", 0, 0)),
        (torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 1]]).bool(), 0, ("other", 0, 0)),
        (torch.zeros(3, 3, dtype=torch.bool), 0, ("other", 0, 0)),
    ],
    ids=["full", "causal", "causal with a cache", "causal window", "window", "decoding", "shifted", "hole", "nothing"],
)
def test_the_pattern_of_a_mask_is_named(seen: Tensor, start: int, expected: tuple[str, int, int]) -> None:
    visibility = visibility_of(sample_of(seen, query_start=start))
    assert (visibility.pattern, visibility.before, visibility.after) == expected


@pytest.mark.parametrize(
    ("mask", "pattern"),
    [(Full(), "full"), (Causal(), "causal"), (Window(3), "causal"), (Window(3, after=1), "full")],
)
def test_a_text_of_one_token_has_the_pattern_of_its_mask(mask: Mask, pattern: str) -> None:
    layer = MultiHeadAttention(8, 2)
    with torch.no_grad(), observe(layer) as seen:
        layer(torch.zeros(1, 1, 8), mask=mask)
    assert visibility_of(seen.layers[0].sample()).pattern == pattern


def test_the_largest_entropy_of_a_causal_head_is_the_mean_of_ln_of_the_keys_seen() -> None:
    visibility = visibility_of(sample_of(torch.ones(5, 5, dtype=torch.bool).tril()))
    expected = sum(math.log(n) for n in range(1, 6)) / 5
    assert visibility.largest_entropy.tolist() == pytest.approx([expected, expected], abs=1e-12)
    assert visibility.mean_keys.tolist() == [3.0, 3.0]
    assert visibility.hides_keys
    assert visibility.blind_queries == 0


def test_a_query_that_sees_no_key_is_counted_and_left_out_of_the_mean() -> None:
    seen = torch.ones(4, 4, dtype=torch.bool)
    seen[2] = False
    visibility = visibility_of(sample_of(seen))
    assert visibility.blind_queries == 1
    assert visibility.largest_entropy.tolist() == pytest.approx([math.log(4)] * 2)


def test_blocks_give_what_one_look_at_everything_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sample_of(band(50, 50, 7, 0))
    whole = visibility_of(sample)
    monkeypatch.setattr("multihead.record.visibility.MAX_TILE_CELLS", 300)
    parts = visibility_of(sample)
    assert (whole.pattern, whole.before) == (parts.pattern, parts.before) == ("causal window", 7)
    torch.testing.assert_close(whole.largest_entropy, parts.largest_entropy)


def test_blocks_of_queries_cover_all_of_them() -> None:
    blocks = list(query_blocks(1000, 100_000))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(1000))
