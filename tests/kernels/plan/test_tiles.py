"""Full, partial and skipped tiles."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead import masks
from multihead.kernels.plan.bounds import key_bounds
from multihead.kernels.plan.tiles import FULL, PARTIAL, SKIPPED, seen_share, tiles
from tests import oracle
from tests.drawing import sizes, starts, trees


@settings(max_examples=120)
@given(data=st.data())
def test_a_tile_is_full_partial_or_skipped_as_its_cells_are(data: st.DataObject) -> None:
    """Without a remainder exactly so; with one, nothing that is seen is skipped and nothing hidden is called full."""
    size = data.draw(sizes(longest=11))
    mask, start = data.draw(trees(size, depth=2)), data.draw(starts(size))
    number = size.keys - size.queries if isinstance(start, str) else start
    bounds = key_bounds(mask, queries=size.queries, keys=size.keys, query_start=number)
    high, wide = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    kinds = tiles(bounds, keys=size.keys, query_block=high, key_block=wide).kinds
    seen = oracle.shown(mask, size.cells, start)
    for sample in range(size.batch):
        for row in range(kinds.shape[1]):
            for column in range(kinds.shape[2]):
                kind = kinds[sample if kinds.shape[0] > 1 else 0, row, column]
                cells = seen[sample, :, row * high : (row + 1) * high, column * wide : (column + 1) * wide]
                assert cells.numel()
                exact = FULL if bool(cells.all()) else PARTIAL if bool(cells.any()) else SKIPPED
                allowed = {exact} if bounds.remainder is None else {exact, PARTIAL}
                assert int(kind) in allowed


def test_the_seen_share_counts_the_cells_within_the_bounds() -> None:
    assert seen_share(key_bounds(masks.Full(), queries=3, keys=5), keys=5) == 1
    assert seen_share(key_bounds(masks.Causal(), queries=4, keys=4), keys=4) == 10 / 16
    assert seen_share(key_bounds(masks.Lengths((1, 4)), queries=4, keys=4), keys=4) == 5 / 8
    assert seen_share(key_bounds(masks.Full(), queries=0, keys=4), keys=4) == 0


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_and_no_keys_are_no_special_case(queries: int, keys: int) -> None:
    kinds = tiles(key_bounds(masks.Full(), queries=queries, keys=keys), keys=keys).kinds
    assert not bool((kinds != SKIPPED).any())


def test_the_last_tile_may_be_smaller() -> None:
    kinds = tiles(key_bounds(masks.Full(), queries=70, keys=130), keys=130).kinds
    assert torch.equal(kinds, torch.full((1, 2, 3), FULL, dtype=torch.int8))
