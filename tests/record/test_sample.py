"""A sample joins its calls, holds each number once, and gives any part of its map."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ProbeError
from multihead.layer.cache import KeyValueCache
from multihead.masks.documents import Chunks
from multihead.observation.record import Record
from multihead.probes import PROBES
from multihead.record.batch import KeptRows
from multihead.record.sample import SampleRecord, add_received_weights
from multihead.record.text_table import RowsInTable
from tests.observation.recorded import asked, ids, read

CAUSAL = masks.Causal()


def stepwise(
    mask: masks.Mask = CAUSAL, *, chunks: Sequence[int] = (5, 1, 2, 1, 1), window: int | None = None, **options: Any
) -> SampleRecord:
    layer, cache = mh.MultiHeadAttention(16, 4, num_kv_heads=2), KeyValueCache(window=window)
    with torch.no_grad(), mh.observe(layer, **{"probes": tuple(PROBES)} | options) as seen:
        for chunk in chunks:
            layer(torch.randn(1, chunk, 16), cache=cache, mask=mask)
    return seen.layers[0].sample()


def bytes_of_tensor(record: Record) -> int:
    """What q and k of a record take, whatever holds them, each storage once."""
    storages = {}
    for layer in record.layers:
        for one in layer.samples:
            for rows in (one.q, one.k):
                for chunk in rows.column._chunks if isinstance(rows, RowsInTable) else ():
                    kept = chunk.rows.tensor if isinstance(chunk.rows, KeptRows) else chunk.rows
                    assert isinstance(kept, Tensor)
                    storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("mask", "window", "segments"),
    [
        (CAUSAL, None, 1),
        (CAUSAL & masks.Window(4), 4, 1),
        (masks.Window(3), None, 1),
        (CAUSAL & Chunks((6, 4)), None, 5),
    ],
    ids=str,
)
def test_calls_are_joined_where_one_mask_says_what_all_see(mask: masks.Mask, window: int | None, segments: int) -> None:
    sample = stepwise(mask, window=window)
    assert (len(sample.segments), len(sample.calls)) == (segments, 5)
    shown = sample.visible()
    assert torch.equal(shown, asked(queries=10, keys=10, mask=mask).layers[0].sample().visible())
    torch.testing.assert_close(sample.weights().sum(-1), torch.ones(4, 10))


@pytest.mark.parametrize("index", range(5))
@pytest.mark.parametrize("window", [None, 4])
def test_a_call_alone_is_that_part_of_the_whole(index: int, window: int | None) -> None:
    sample = stepwise(CAUSAL & masks.Window(4), window=window)
    rows, keys = sample.calls[index]
    alone = sample.call(index)
    assert (alone.num_queries, alone.num_keys, len(alone.calls)) == (rows[1] - rows[0], keys[1], 1)
    torch.testing.assert_close(alone.weights(), sample.weights()[:, slice(*rows), : keys[1]])
    assert torch.equal(alone.visible(), sample.visible()[slice(*rows), : keys[1]])
    assert torch.equal(alone.statistics["entropy"], sample.statistics["entropy"][:, slice(*rows)])


def test_what_keys_receive_adds_up_over_the_calls() -> None:
    sample = stepwise()
    received = sample.weights().sum(1)
    torch.testing.assert_close(sample.statistics["received"], received, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(sample.statistics["coverage"], received.clamp(max=1), atol=1e-5, rtol=1e-5)
    # What was cut off at 1 does not add up: it is computed from what keys receive in all calls, which is recorded too.
    alone = stepwise(probes=["coverage"])
    assert list(alone.statistics) == ["coverage", "received"]
    torch.testing.assert_close(alone.statistics["coverage"], alone.weights().sum(1).clamp(max=1), atol=1e-5, rtol=1e-5)


def test_a_map_of_largest_weights_is_none_of_several_calls() -> None:
    assert "pooled_map" in stepwise().statistics
    assert "pooled_map" not in stepwise(map_pool="max").statistics
    assert "pooled_map" in stepwise(map_pool="max", chunks=[4]).statistics


def test_weights_at_an_offset_are_a_diagonal() -> None:
    sample = stepwise(CAUSAL & masks.Documents((6, 4)))
    for offset in (-3, -1, 0):
        expected = torch.nn.functional.pad(sample.weights().diagonal(offset, 1, 2), (-offset, 0))
        torch.testing.assert_close(sample.at_offset(offset), expected)
    assert not sample.at_offset(1).any()
    with pytest.raises(ProbeError):
        stepwise(keep="statistics").at_offset(0)


def test_what_may_be_seen_is_told_by_intervals_where_it_is_one() -> None:
    start, stop = stepwise(CAUSAL & masks.Window(4), window=4).intervals() or (torch.zeros(0), torch.zeros(0))
    assert start.tolist() == [0, 0, 0, 0, 1, 2, 3, 4, 5, 6]
    assert stop.tolist() == list(range(1, 11))
    dense: Tensor = torch.rand(9, 9) < 0.5
    assert asked(mask=masks.Keep(dense, "queries keys")).layers[0].sample().intervals() is None
    hides = torch.zeros(1, 4, 9, 9).masked_fill(dense, -torch.inf)
    assert asked(bias=hides).layers[0].sample().intervals() is None
    assert asked(bias=torch.zeros(1, 1, 9, 9)).layers[0].sample().intervals() is not None


class TestMemory:
    def test_q_and_k_are_held_once_and_keys_not_for_every_head(self) -> None:
        with torch.no_grad(), mh.observe(layer := mh.MultiHeadAttention(64, 8, num_kv_heads=2)) as seen:
            layer(torch.randn(3, 50, 64), mask=CAUSAL)
        assert bytes_of_tensor(seen) == 3 * 50 * 4 * (64 + 16)

    def test_a_decoding_holds_each_key_once(self) -> None:
        layer, cache = mh.MultiHeadAttention(64, 8, num_kv_heads=2), KeyValueCache()
        with torch.no_grad(), mh.observe(layer) as seen:
            for _ in range(40):
                layer(torch.randn(1, 1, 64), cache=cache, mask=CAUSAL)
        assert bytes_of_tensor(seen) == 40 * 4 * (64 + 16)
        assert (len(seen.layers[0].sample().segments), len(list(seen))) == (1, 40)
        seen.layers[0].weights(0)
        assert bytes_of_tensor(seen) == 40 * 4 * (64 + 16)

    def test_where_only_statistics_are_kept_none_are_held(self) -> None:
        assert bytes_of_tensor(read(ids(2, 9), keep="statistics")) == 0


def test_what_keys_receive_in_a_later_call_is_added_at_their_places() -> None:
    assert add_received_weights(torch.ones(1, 3), torch.full((1, 3), 2.0), 1).tolist() == [[1, 3, 3, 2]]
