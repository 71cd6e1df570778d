"""A segment knows its place among the queries and keys of its sample."""

from __future__ import annotations

import torch

from multihead.functional import request_of
from multihead.record.segments import Segment

HEADS = 4
K = torch.randn(1, HEADS, 10, 8, generator=torch.Generator().manual_seed(0))


def test_a_piece_knows_its_place_among_the_keys_of_its_sample() -> None:
    request = request_of(K[:, :, :2], K[:, :, :5], K[:, :, :5], query_start=3)
    segment = Segment(request, 4)
    assert (segment.num_queries, segment.query_start, segment.key_stop) == (2, 7, 9)
