"""Keys are taken as they come, each once, and a piece knows its place among them."""

from __future__ import annotations

import torch

from multihead.functional import request_of
from multihead.record.segments import ChunkedRows, Segment, append_new_keys

HEADS = 4
K = torch.randn(1, HEADS, 10, 8, generator=torch.Generator().manual_seed(0))


def test_only_what_is_new_is_taken_of_a_growing_cache() -> None:
    rows = ChunkedRows(2)
    append_new_keys(rows, K[:, :, :4], start=0, device=torch.device("cpu"))
    append_new_keys(rows, K[:, :, :6], start=0, device=torch.device("cpu"))
    append_new_keys(rows, K[:, :, 3:9], start=3, device=torch.device("cpu"))
    assert [chunk.shape[2] for chunk in rows._chunks] == [4, 2, 3]
    assert torch.equal(rows.rows_between(0, 9), K[:, :, :9])
    assert rows.length == 9


def test_keys_that_were_dropped_before_anybody_saw_them_are_zero() -> None:
    rows = ChunkedRows(2)
    append_new_keys(rows, K[:, :, :2], start=3, device=torch.device("cpu"))
    assert torch.equal(rows.rows_between(0, 5)[:, :, :3], torch.zeros(1, HEADS, 3, 8))
    assert torch.equal(rows.rows_between(3, 5), K[:, :, :2])


def test_a_piece_knows_its_place_among_the_keys_of_its_sample() -> None:
    request = request_of(K[:, :, :2], K[:, :, :5], K[:, :, :5], query_start=3)
    segment = Segment(request, 4)
    assert (segment.num_queries, segment.query_start, segment.key_stop) == (2, 7, 9)
