"""Bounds and remainder together mean what the mask means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from multihead import masks
from multihead.kernels.plan.bounds import PlanCache, fraction_within_bounds, key_bounds
from multihead.masks import Causal, Documents, Drop, Full, Keep, Lengths, Mask, Prefix, Window
from multihead.masks.base import KeyBounds
from multihead.masks.leading_keys import LeadingKeys
from tests import oracle
from tests.drawing import Sizes, interval_leaves, sizes, starts, trees


def planned(mask: Mask, size: Sizes, start: int | str | Tensor) -> KeyBounds:
    number = size.keys - size.queries if isinstance(start, str) else start
    return key_bounds(mask, queries=size.queries, keys=size.keys, query_start=number)


def within(bounds: KeyBounds, keys: int) -> Tensor:
    """(batch or 1, 1, queries, keys) bool: the cells between start and stop."""
    key = torch.arange(keys)
    return ((key >= bounds.start[..., None]) & (key < bounds.stop[..., None]))[:, None]


@settings(max_examples=120)
@given(data=st.data())
def test_bounds_and_remainder_are_the_dense_meaning(data: st.DataObject) -> None:
    size = data.draw(sizes(longest=9))
    mask, start = data.draw(trees(size)), data.draw(starts(size))
    bounds, expected = planned(mask, size, start), oracle.shown(mask, size.cells, start)
    assert bounds.start.shape == bounds.stop.shape == (bounds.start.shape[0], size.queries)
    assert bounds.start.shape[0] in (1, size.batch)
    assert bool((bounds.start >= 0).all() & (bounds.stop <= size.keys).all() & (bounds.start <= bounds.stop).all())
    shown = within(bounds, size.keys).expand_as(expected)
    if bounds.remainder is not None:
        assert not bool((expected & ~shown).any()), "the bounds cut off what may be seen"
        shown = shown & oracle.shown(bounds.remainder, size.cells, start)
    assert torch.equal(shown, expected)


@settings(max_examples=80)
@given(data=st.data())
def test_intervals_and_what_both_of_them_allow_need_no_remainder(data: st.DataObject) -> None:
    size = data.draw(sizes(longest=9))
    mask = data.draw(interval_leaves(size))
    for _ in range(data.draw(st.integers(0, 2))):
        mask = mask & data.draw(interval_leaves(size))
    assert planned(mask, size, data.draw(starts(size))).remainder is None


@settings(max_examples=60)
@given(length=st.integers(0, 9), start=st.integers(0, 9), documents=st.booleans())
def test_a_prefix_read_both_ways_is_an_interval(length: int, start: int, documents: bool) -> None:
    mask: Any = Causal() | Prefix(length)
    mask = mask & Lengths((5, 9)) if documents else mask
    assert key_bounds(mask, queries=9, keys=9, query_start=start).remainder is None


@pytest.mark.parametrize(
    ("mask", "gaps"),
    [
        (Keep(torch.tensor([[True, True, False, False]]), "batch keys"), False),
        (Drop(torch.tensor([[True, False, False, True]]), "batch keys"), False),
        (Keep(torch.tensor([[True, False, True, False]]), "batch keys"), True),
        (Keep(torch.ones(4, 4, dtype=torch.bool).tril(), "queries keys"), False),
        (Keep(torch.tensor([True, False]), "heads"), True),  # one interval each, and not the same one
        (Keep(torch.tensor([True, True]), "heads"), False),
        (Window(1) | Prefix(1), True),
        (Window(2) | Window(1, after=1), False),
        (Window(1) | Prefix(1) | Causal(), True),  # no gap in the end, but one on the way: kept to be safe
        (Full() & Causal(), False),
        (Documents((2, 2)) | Prefix(2), False),
        (Documents((1, 1, 2)) | Prefix(1), True),
    ],
    ids=repr,
)
def test_a_remainder_is_kept_where_rows_have_gaps(mask: Mask, gaps: bool) -> None:
    assert (key_bounds(mask, queries=4, keys=4).remainder is not None) == gaps


@pytest.mark.parametrize(
    "mask",
    [Full(), Causal(), Window(1), Window(3), Window(2, after=2), Causal() & Window(2), Window(1) & Window(3, after=1)],
    ids=repr,
)
def test_one_query_sees_what_its_row_of_the_whole_sees(mask: Mask) -> None:
    whole = key_bounds(mask, queries=8, keys=6)
    ones = [key_bounds(mask, queries=1, keys=6, query_start=position) for position in range(8)]
    assert [(one.start.item(), one.stop.item()) for one in ones] == list(
        zip(whole.start[0].tolist(), whole.stop[0].tolist(), strict=True)
    )


def test_samples_that_see_alike_share_their_bounds() -> None:
    assert key_bounds(Lengths((3, 3)), queries=2, keys=5).is_shared_by_samples
    assert not key_bounds(Lengths((3, 4)), queries=2, keys=5).is_shared_by_samples
    assert key_bounds(Causal(), queries=2, keys=5, query_start=torch.tensor([1, 1])).is_shared_by_samples
    assert not key_bounds(Causal(), queries=2, keys=5, query_start=torch.tensor([1, 2])).is_shared_by_samples


def test_queries_that_see_nothing_have_an_empty_interval() -> None:
    bounds = key_bounds(Window(1) & Lengths((2,)), queries=4, keys=4)
    assert bounds.sees_nothing.tolist() == [[False, False, True, True]]
    assert bounds.start[0, 2:].tolist() == bounds.stop[0, 2:].tolist() == [0, 0]


def test_a_plan_is_made_once_for_equal_masks_and_again_for_tensors() -> None:
    assert key_bounds(Causal() & Window(3), queries=5, keys=5) is key_bounds(Causal() & Window(3), queries=5, keys=5)
    lengths = torch.tensor([2])
    before = key_bounds(Lengths(lengths), queries=2, keys=5)
    lengths += 1
    assert before.stop.tolist() == [[2, 2]]
    assert key_bounds(Lengths(lengths), queries=2, keys=5).stop.tolist() == [[3, 3]]


def test_plans_are_cached_up_to_a_number_of_bytes_and_the_oldest_are_dropped_first() -> None:
    a_plan = 2 * 8 * 100 + 1024  # start and stop of 100 queries, and the entry
    cache: PlanCache[KeyBounds] = PlanCache(3 * a_plan)
    for size in range(1, 5):
        bounds = KeyBounds(torch.zeros(1, 100, dtype=torch.int64), torch.full((1, 100), size))
        cache.add(size, bounds, bounds)
    assert cache.nbytes == 3 * a_plan
    assert {size: int(bounds.stop[0, 0]) for size, bounds in cache.entries.items()} == {2: 2, 3: 3, 4: 4}
    larger = KeyBounds(torch.zeros(1, 1000, dtype=torch.int64), torch.zeros(1, 1000, dtype=torch.int64))
    cache.add("larger", larger, larger)
    assert "larger" not in cache.entries
    assert cache.nbytes == 3 * a_plan


def test_what_is_added_in_a_temporary_context_is_dropped_at_its_end() -> None:
    cache: PlanCache[str] = PlanCache(1 << 20)
    bounds = KeyBounds(torch.zeros(1, 100, dtype=torch.int64), torch.zeros(1, 100, dtype=torch.int64))
    cache.add("before", "before", bounds)
    size = cache.nbytes
    with cache.drop_added_at_end():
        cache.add("during", "during", bounds)
        assert set(cache.entries) == {"before", "during"}
    assert (set(cache.entries), cache.nbytes) == ({"before"}, size)


@pytest.mark.parametrize("queries", [1, 5])
def test_no_plan_that_is_made_under_a_mode_is_kept(queries: int) -> None:
    sizes = {"queries": queries, "keys": 9, "query_start": 3}
    with FakeTensorMode():
        assert isinstance(key_bounds(Window(7), **sizes).start, FakeTensor)
    assert type(key_bounds(Window(7), **sizes).start) is Tensor
    with FakeTensorMode():
        assert isinstance(key_bounds(Window(7), **sizes).start, FakeTensor)


@pytest.mark.parametrize(
    "mask",
    [
        Full(),
        Causal() & Window(50),
        Documents((2**17, 2**17)),
        Causal() | Prefix(9),
        Lengths((2**18,)),
        Window(1, after=1),
    ],
    ids=repr,
)
def test_a_plan_takes_memory_for_each_query_and_not_for_each_cell(mask: masks.Mask) -> None:
    """A quarter of a million queries and keys: their map would take 64 GiB."""
    length = 2**18
    bounds = key_bounds(mask, queries=length, keys=length)
    assert bounds.remainder is None
    assert bounds.start.shape == (1, length)


@pytest.mark.parametrize("mask", [Full(), Keep(torch.tensor(False), ""), Causal()])
def test_where_all_keys_are_those_in_front_every_query_sees_them(mask: Mask) -> None:
    """A record of a query that sees nothing but a learned key ends with that key: no key is left for the mask."""
    bounds = key_bounds(LeadingKeys(1, mask), queries=2, keys=1, query_start=1)
    assert bounds.start.tolist() == [[0, 0]]
    assert bounds.stop.tolist() == [[1, 1]]
    assert bounds.remainder is None


def test_the_seen_share_counts_the_cells_within_the_bounds() -> None:
    assert fraction_within_bounds(key_bounds(masks.Full(), queries=3, keys=5), keys=5) == 1
    assert fraction_within_bounds(key_bounds(masks.Causal(), queries=4, keys=4), keys=4) == 10 / 16
    assert fraction_within_bounds(key_bounds(masks.Lengths((1, 4)), queries=4, keys=4), keys=4) == 5 / 8
    assert fraction_within_bounds(key_bounds(masks.Full(), queries=0, keys=4), keys=4) == 0
