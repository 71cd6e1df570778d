"""A sample that is cut out of a call means what it meant in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import listening, masks
from multihead.call import AttentionCall
from multihead.functional import attend, request_of
from multihead.kernels.tile import seen
from multihead.masks.place import Span
from multihead.observation.trimming import cut, hull, spans, without_queries
from multihead.probes.weights import tile

BATCH, HEADS, QUERIES, KEYS = 2, 4, 6, 9


def call_of(mask: masks.Mask, *, query_start: int | Tensor = 0, bias: Tensor | None = None) -> AttentionCall:
    q = torch.randn(BATCH, HEADS, QUERIES, 8)
    k = torch.randn(BATCH, 2, KEYS, 8)
    request = request_of(q, k, k, mask, bias, query_start=query_start)
    return AttentionCall(request, attend(request))


MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Window(3, after=1),
    "lengths": masks.Lengths((9, 5)),
    "lengths of queries": masks.Lengths(tuple(tuple(range(first, first + QUERIES)) for first in (0, 3))),
    "prefix": masks.Causal() | masks.Prefix((4, 2)),
    "documents": masks.Documents(((4, 5), (2, 6))),
    "shared documents": masks.Documents((3, 3, 3)),
    "kept": masks.Keep(torch.rand(BATCH, 1, QUERIES, KEYS) > 0.4),
    "dropped keys": masks.Drop(torch.rand(1, KEYS) > 0.6, "batch keys"),
    "kept heads": masks.Keep(torch.rand(HEADS, QUERIES, KEYS) > 0.4, "heads queries keys"),
    "both": masks.Causal() & masks.Lengths((9, 5)) & masks.Drop(torch.rand(BATCH, KEYS) > 0.7, "batch keys"),
}


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=30)
@given(sample=st.integers(0, 1), edges=st.tuples(*[st.integers(0, 5)] * 2), columns=st.tuples(*[st.integers(0, 8)] * 2))
def test_a_part_of_a_mask_is_the_mask_of_the_part(
    name: str, sample: int, edges: tuple[int, int], columns: tuple[int, int]
) -> None:
    rows, keys = (min(edges), max(edges) + 1), (min(columns), max(columns) + 1)
    start = torch.tensor([1, 3])
    request = call_of(masks.Full(), query_start=start).request
    request = replace(request, mask=MASKS[name])
    whole = seen(request).expand(BATCH, HEADS, -1, -1)[sample, :, slice(*rows), slice(*keys)]
    part = cut(AttentionCall(request, attend(request)), Span(sample, rows, keys)).request
    assert part.shape.batch == 1
    assert torch.equal(seen(part).expand(1, HEADS, -1, -1)[0], whole)


def test_weights_of_a_sample_without_its_padding_are_those_of_the_batch() -> None:
    padding = torch.ones(BATCH, KEYS, dtype=torch.bool)
    padding[1, :3] = False
    bias = torch.randn(1, HEADS, QUERIES, KEYS)
    call = call_of(masks.Causal() & masks.Keep(padding, "batch keys"), query_start=3, bias=bias)
    whole = tile(call.request, call.attended.logsumexp)
    part = cut(call, Span(1, (0, 6), (3, 9)))
    assert part.request.query_start == 0
    assert part.request.mask == masks.Causal()
    torch.testing.assert_close(tile(part.request, part.attended.logsumexp)[0], whole[1, :, :, 3:])


class TestWhereSamplesStand:
    def test_without_padding_they_stand_everywhere(self) -> None:
        assert spans(call_of(masks.Full()).request) == [Span(index, (0, 6), (0, 9)) for index in range(2)]

    def test_keys_that_no_query_may_see_are_left_out(self) -> None:
        assert [each.keys for each in spans(call_of(masks.Lengths((9, 5))).request)] == [(0, 9), (0, 5)]
        assert [each.keys for each in spans(call_of(masks.Causal()).request)] == [(0, 6), (0, 6)]

    def test_queries_at_the_end_that_see_nothing_are_padding_where_nothing_else_says(self) -> None:
        mask = masks.Lengths(((9, 9, 9, 9, 9, 9), (9, 9, 9, 0, 0, 0)))
        assert [each.queries for each in spans(call_of(mask).request)] == [(0, 6), (0, 3)]

    def test_padding_that_is_known_is_left_out_on_both_sides(self) -> None:
        queries = torch.tensor([[True] * 6, [False, True, True, True, True, False]])
        keys = torch.tensor([[True] * 9, [False, False, *[True] * 5, False, False]])
        found = spans(call_of(masks.Full()).request, queries=queries, keys=keys)
        assert found == [Span(0, (0, 6), (0, 9)), Span(1, (1, 5), (2, 7))]

    def test_a_sample_of_padding_alone_is_empty(self) -> None:
        nothing = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
        found = spans(call_of(masks.Full()).request, queries=nothing)
        assert [each.queries for each in found] == [(0, 0), (0, 0)]

    def test_a_packed_row_holds_one_sample_a_document(self) -> None:
        q = torch.randn(1, 2, 7, 4)
        request = replace(
            request_of(q, q, q, masks.Causal() & masks.Documents((4, 3))), packed_lengths=torch.tensor([4, 3])
        )
        assert spans(request) == [Span(0, (0, 4), (0, 4)), Span(0, (4, 7), (4, 7))]
        part = cut(AttentionCall(request, attend(request)), spans(request)[1]).request
        assert part.mask == masks.Causal()
        assert part.query_start == 0
        assert part.packed_lengths is None


def test_a_whole_sample_keeps_the_statistics_its_kernel_gave() -> None:
    call = call_of(masks.Full())
    given_ = {"entropy": torch.rand(BATCH, HEADS, QUERIES)}
    call = AttentionCall(call.request, replace(call.attended, statistics=given_))
    whole, part = cut(call, Span(1, (0, 6), (0, 9))), cut(call, Span(1, (0, 5), (0, 9)))
    assert torch.equal(whole.attended.statistics["entropy"], given_["entropy"][1:])
    assert part.attended.statistics == {}


def test_padding_between_real_queries_sees_nothing() -> None:
    call = cut(call_of(masks.Full()), Span(0, (0, 6), (0, 9)))
    real = torch.tensor([True, True, False, True, False, True])
    found = without_queries(call, real)
    assert torch.equal(seen(found.request).expand(1, 1, -1, -1)[0, 0].any(-1), real)
    assert torch.equal(tile(found.request, found.attended.logsumexp)[0, :, ~real], torch.zeros(HEADS, 2, KEYS))
    assert without_queries(call, torch.ones(QUERIES, dtype=torch.bool)) is call


def test_the_documents_of_a_packing_are_taken_out_and_nothing_else() -> None:
    packing = masks.Documents((3, 4))
    assert packing.without_documents() == masks.Full()
    assert (masks.Causal() & packing).without_documents() == masks.Causal()
    assert (masks.Causal() & masks.Window(2) & packing).without_documents() == masks.Causal() & masks.Window(2)
    assert masks.Causal().without_documents() == masks.Causal()


def test_a_tensor_that_hides_nothing_of_a_sample_is_no_mask_of_it() -> None:
    kept = masks.Keep(torch.tensor([[True, True], [True, False]]), "batch keys")
    assert kept.part(Span(0, (0, 1), (0, 2))) == masks.Full()
    assert isinstance(kept.part(Span(1, (0, 1), (0, 2))), masks.Keep)


@pytest.mark.parametrize(
    ("flags", "expected"), [([0, 1, 0, 1, 0], (1, 4)), ([1, 1], (0, 2)), ([0, 0], (0, 0)), ([], (0, 0))]
)
def test_a_hull_reaches_from_the_first_to_behind_the_last(flags: list[int], expected: tuple[int, int]) -> None:
    assert hull(torch.tensor(flags, dtype=torch.bool)) == expected


def test_nobody_hears_of_a_cut() -> None:
    assert listening.listeners() == ()
