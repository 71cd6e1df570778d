"""Blocks of a map are the sums of its weights, wherever the calls of a text begin and end."""

from __future__ import annotations

import itertools

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ProbeError
from multihead.layer.cache import KeyValueCache
from multihead.masks.documents import Chunks
from multihead.probes.blocks import CancelledError
from multihead.record.blocks import checked_slice_ends, query_blocks
from multihead.record.sample import SampleRecord
from tests.observation.recorded import asked

CHUNKS = (5, 1, 1, 6, 1, 3)


def in_calls(mask: masks.Mask, *, window: int | None = None) -> SampleRecord:
    layer, x = mh.MultiHeadAttention(16, 4, num_kv_heads=2), torch.randn(1, sum(CHUNKS), 16)
    cache = KeyValueCache(window=window)
    edges = [sum(CHUNKS[:index]) for index in range(len(CHUNKS) + 1)]
    with torch.no_grad(), mh.observe(layer) as seen:
        for first, stop in itertools.pairwise(edges):
            layer(x[:, first:stop], cache=cache, mask=mask)
    return seen.layers[0].sample()


SAMPLES = {
    "in one call": asked(queries=17, keys=17, mask=masks.Causal()).layers[0].sample,
    "in calls that join": lambda: in_calls(masks.Causal()),
    "in calls of a window": lambda: in_calls(masks.Causal() & masks.Window(4), window=4),
    "in calls that stay apart": lambda: in_calls(masks.Causal() & Chunks((9, 8))),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("part", [(slice(None), slice(None)), (slice(3, 15), slice(2, 16)), (slice(4, 4), slice(None))])
def test_blocks_are_sums_of_the_weights(name: str, part: tuple[slice, slice]) -> None:
    sample, (queries, keys) = SAMPLES[name](), part
    weights, shown = sample.weights(queries=queries, keys=keys).double(), sample.visible(queries=queries, keys=keys)
    for block in (1, 4, (3, 5), 64):
        height, width = (block, block) if isinstance(block, int) else block
        rows = range(0, weights.shape[1], height)
        columns = range(0, weights.shape[2], width)
        sums, counts = torch.zeros(2, len(weights), len(rows), len(columns), dtype=torch.float64).unbind()
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
            cell = slice(row, row + height), slice(column, column + width)
            sums[:, i, j] = weights[:, cell[0], cell[1]].sum((1, 2))
            counts[:, i, j] = shown[cell].sum()
        for head, heads in ((None, slice(None)), (2, slice(2, 3))):
            found = sample.blocks(head, queries=queries, keys=keys, block=block)
            torch.testing.assert_close(found.sums, sums[heads], atol=1e-6, rtol=1e-6)
            assert torch.equal(found.counts, counts[heads].long())


@pytest.mark.parametrize("name", SAMPLES)
def test_the_first_key_can_be_left_out(name: str) -> None:
    sample = SAMPLES[name]()
    found = sample.blocks(1, block=64, without_first_key=True)
    torch.testing.assert_close(found.sums[0, 0, 0], sample.weights(1).double()[:, 1:].sum(), atol=1e-5, rtol=1e-5)
    assert int(found.counts) == int(sample.visible()[:, 1:].sum())


@pytest.mark.parametrize("name", SAMPLES)
def test_a_map_is_the_mean_of_what_may_be_seen(name: str) -> None:
    sample = SAMPLES[name]()
    found = sample.map(3, bins=4)
    assert found.shape == (4, 4)
    weights, shown = sample.weights(3), sample.visible()
    torch.testing.assert_close(found[3, 0], weights[15:, :5][shown[15:, :5]].mean(), equal_nan=True)
    assert found[0, 3].isnan()  # what comes after these queries
    assert sample.map(bins=(4, 2)).shape == (4, 4, 2)


def test_who_no_longer_wants_it_is_heard() -> None:
    with pytest.raises(CancelledError):
        SAMPLES["in one call"]().blocks(0, block=4, cancelled=lambda: True)


def test_steps_empty_blocks_and_missing_weights_are_refused() -> None:
    sample = SAMPLES["in one call"]()
    with pytest.raises(ArgumentError) as caught:
        sample.blocks(0, queries=slice(None, None, 2), block=4)
    assert str(caught.value) == "queries has steps of 2. Give slices without steps."
    with pytest.raises(ArgumentError) as caught:
        sample.map(0, bins=0)
    assert str(caught.value) == "bins is 0. Give an integer of at least 1."
    with pytest.raises(ProbeError):
        asked(watch={"keep": "statistics"}).layers[0].sample().map(0)
    assert checked_slice_ends(slice(5, 2), 9) == (5, 5)


def test_blocks_of_queries_cover_all_of_them() -> None:
    blocks = list(query_blocks(1000, 100_000))
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(1000))
