"""A sample that is cut out of a call means what it meant in it."""

from __future__ import annotations

import gc
import itertools
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionCall, CallOrigin, listen, listeners
from multihead.kernels.dense_tile import visible_cells
from multihead.layer.cache import KeyValueCache
from multihead.masks.positions import SampleSpan
from multihead.observation.record import Record
from multihead.probes import ProbeContext
from multihead.probes.tile import tile
from multihead.record.batch import copy_rows, hide_padding_queries, slice_call, spans_of_call
from multihead.record.sample import SampleRecord
from tests.families import LENGTH, batch_of, family
from tests.kernel_names import needs_native
from tests.models.test_families import DECODERS, decoded
from tests.native_runs import native_runs
from tests.observation.recorded import Reader, ids, read
from tests.watched import brute_force

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
def test_a_part_of_a_mask_is_the_mask_of_the_part(name: str) -> None:
    start = torch.tensor([1, 3])
    request = call_of(masks.Full(), query_start=start).request
    request = replace(request, mask=MASKS[name])
    whole, call = visible_cells(request).expand(BATCH, HEADS, -1, -1), AttentionCall(request, attend(request))

    @settings(max_examples=20)
    @given(
        sample=st.integers(0, 1), edges=st.tuples(*[st.integers(0, 5)] * 2), columns=st.tuples(*[st.integers(0, 8)] * 2)
    )
    def is_the_mask_of_the_part(sample: int, edges: tuple[int, int], columns: tuple[int, int]) -> None:
        rows, keys = (min(edges), max(edges) + 1), (min(columns), max(columns) + 1)
        part = slice_call(call, SampleSpan(sample, rows, keys)).request
        assert part.shape.batch == 1
        assert torch.equal(
            visible_cells(part).expand(1, HEADS, -1, -1)[0], whole[sample, :, slice(*rows), slice(*keys)]
        )

    is_the_mask_of_the_part()


def test_weights_of_a_sample_without_its_padding_are_those_of_the_batch() -> None:
    padding = torch.ones(BATCH, KEYS, dtype=torch.bool)
    padding[1, :3] = False
    bias = torch.randn(1, HEADS, QUERIES, KEYS)
    call = call_of(masks.Causal() & masks.Keep(padding, "batch keys"), query_start=3, bias=bias)
    whole = tile(call.request, call.result.logsumexp)
    part = slice_call(call, SampleSpan(1, (0, 6), (3, 9)))
    assert part.request.query_start == 0
    assert part.request.mask == masks.Causal()
    torch.testing.assert_close(tile(part.request, part.result.logsumexp)[0], whole[1, :, :, 3:])


class TestWhereSamplesStand:
    def test_without_padding_they_stand_everywhere(self) -> None:
        assert spans_of_call(call_of(masks.Full()).request) == [SampleSpan(index, (0, 6), (0, 9)) for index in range(2)]

    def test_keys_that_no_query_may_see_are_left_out(self) -> None:
        assert [each.keys for each in spans_of_call(call_of(masks.Lengths((9, 5))).request)] == [(0, 9), (0, 5)]
        assert [each.keys for each in spans_of_call(call_of(masks.Causal()).request)] == [(0, 6), (0, 6)]

    def test_queries_at_the_end_that_see_nothing_are_padding_where_nothing_else_says(self) -> None:
        mask = masks.Lengths(((9, 9, 9, 9, 9, 9), (9, 9, 9, 0, 0, 0)))
        assert [each.queries for each in spans_of_call(call_of(mask).request)] == [(0, 6), (0, 3)]

    def test_padding_that_is_known_is_left_out_on_both_sides(self) -> None:
        queries = torch.tensor([[True] * 6, [False, True, True, True, True, False]])
        keys = torch.tensor([[True] * 9, [False, False, *[True] * 5, False, False]])
        found = spans_of_call(call_of(masks.Full()).request, queries=queries, keys=keys)
        assert found == [SampleSpan(0, (0, 6), (0, 9)), SampleSpan(1, (1, 5), (2, 7))]

    def test_a_sample_of_padding_alone_is_empty(self) -> None:
        nothing = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
        found = spans_of_call(call_of(masks.Full()).request, queries=nothing)
        assert [each.queries for each in found] == [(0, 0), (0, 0)]

    def test_a_row_has_one_sample_per_document(self) -> None:
        q = torch.randn(2, 2, 7, 4)
        request = request_of(q, q, q, masks.Causal() & masks.Documents(((4, 3), (5, 0))))
        spans = spans_of_call(request, request.mask.row_texts)
        expected = [SampleSpan(0, (0, 4), (0, 4)), SampleSpan(0, (4, 7), (4, 7)), SampleSpan(1, (0, 5), (0, 5))]
        assert spans == expected
        part = slice_call(AttentionCall(request, attend(request)), spans[1]).request
        assert (part.mask, part.query_start, part.shape.key_length) == (masks.Causal(), 0, 3)

    def test_padding_within_the_documents_of_a_row_is_left_out(self) -> None:
        q, mask = torch.randn(1, 2, 7, 4), masks.Documents((4, 3)) & masks.Lengths((6,))
        request = request_of(q, q, q, mask)
        assert [each.keys for each in spans_of_call(request, mask.row_texts)] == [(0, 4), (4, 6)]
        real = torch.tensor([[False, True, True, False, True, True, False]])
        found = spans_of_call(request, mask.row_texts, queries=real, keys=real)
        assert found == [SampleSpan(0, (1, 3), (1, 3)), SampleSpan(0, (4, 6), (4, 6))]


def test_a_whole_sample_keeps_the_statistics_its_kernel_gave() -> None:
    call = call_of(masks.Full())
    given_ = {"entropy": torch.rand(BATCH, HEADS, QUERIES)}
    call = AttentionCall(call.request, replace(call.result, statistics=given_))
    whole, part = slice_call(call, SampleSpan(1, (0, 6), (0, 9))), slice_call(call, SampleSpan(1, (0, 5), (0, 9)))
    assert torch.equal(whole.result.statistics["entropy"], given_["entropy"][1:])
    assert part.result.statistics == {}


def test_padding_between_real_queries_sees_nothing() -> None:
    call = slice_call(call_of(masks.Full()), SampleSpan(0, (0, 6), (0, 9)))
    real = torch.tensor([True, True, False, True, False, True])
    found = hide_padding_queries(call, real)
    assert torch.equal(visible_cells(found.request).expand(1, 1, -1, -1)[0, 0].any(-1), real)
    assert torch.equal(tile(found.request, found.result.logsumexp)[0, :, ~real], torch.zeros(HEADS, 2, KEYS))
    assert hide_padding_queries(call, torch.ones(QUERIES, dtype=torch.bool)) is call


def test_the_documents_of_a_packing_are_taken_out_and_nothing_else() -> None:
    packing = masks.Documents((3, 4))
    assert packing.without_documents() == masks.Full()
    assert (masks.Causal() & packing).without_documents() == masks.Causal()
    assert (masks.Causal() & masks.Window(2) & packing).without_documents() == masks.Causal() & masks.Window(2)
    assert masks.Causal().without_documents() == masks.Causal()


def test_a_tensor_that_hides_nothing_of_a_sample_is_no_mask_of_it() -> None:
    kept = masks.Keep(torch.tensor([[True, True], [True, False]]), "batch keys")
    assert kept.select_span(SampleSpan(0, (0, 1), (0, 2))) == masks.Full()
    assert isinstance(kept.select_span(SampleSpan(1, (0, 1), (0, 2))), masks.Keep)


def _expected(sample: SampleRecord, q: Tensor, k: Tensor, shown: Tensor) -> dict[str, Tensor]:
    """Compute the statistics of one sample in float64 by their definitions: q and k (1, heads, tokens, head_dim)."""
    groups = q.shape[1] // k.shape[1]
    scores = (q.double() @ k.double().repeat_interleave(groups, 1).mT / q.shape[-1] ** 0.5)[0]
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1).nan_to_num(0)
    found = brute_force(weights, sample.query_start, shown)
    found["mean_distance"] = found["mean_distance"].nan_to_num(0)
    found["effective_keys"] = found["effective_keys"].where(weights.sum(-1) > 0, 0)
    seen_keys = shown.any(-2).flatten().nonzero()
    found["first_mass"] = weights[..., int(seen_keys[0])] if len(seen_keys) else torch.zeros_like(weights[..., 0])
    return {name: value for name, value in found.items() if name in FROM_THE_KERNEL}


FROM_THE_KERNEL = (
    "entropy",
    "effective_keys",
    "mean_distance",
    "self_mass",
    "previous_mass",
    "next_mass",
    "first_mass",
    "largest_weight",
)
PADDED: dict[str, dict[str, Any]] = {
    "packed": {},
    "packed, on the left": {"padding_side": "left"},
    "packed, causal": {"mask": masks.Causal()},
    "packed, a window before the query": {"mask": masks.Window(2, after=0) & masks.Causal()},
    "packed, only later keys": {"mask": masks.Window(1, after=3)},
    "not packed": {"mask": masks.Prefix(4) | masks.Window(2, after=1)},
    "not packed, on the left": {"mask": masks.Prefix(4) | masks.Causal(), "padding_side": "left"},
}


@needs_native
@pytest.mark.parametrize("keep", ["cpu", "summary"])
@pytest.mark.parametrize("name", PADDED)
def test_a_padded_batch_is_measured_by_the_kernel_run_that_computes_it(name: str, keep: Any) -> None:
    torch.manual_seed(0)
    layer, x = mh.MultiHeadAttention(16, 4, num_kv_heads=2), 4 * torch.randn(4, 9, 16)
    lengths = (9, 3, 0 if name.startswith("packed") else 1, 6)
    with torch.no_grad(), native_runs() as runs, mh.observe(layer, keep=keep) as record:
        layer(x, lengths=lengths, **PADDED[name])
    assert len(runs) == 1 + (keep == "summary")  # which measures chance levels
    assert record.layers[0].num_samples == 4
    if keep == "summary":
        return
    for index, length in enumerate(lengths):
        sample = record.layers[0].sample(index)
        assert (sample.num_queries, sample.num_keys) == (length, length)
        found = {statistic: sample.statistics[statistic].double() for statistic in FROM_THE_KERNEL}
        request, _ = sample.request_of(sample.segments[0])
        assert sample.weights().shape == (4, length, length)
        if length:
            expected = _expected(sample, request.q, request.k, sample.visible())
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            largest = sample.weights().amax(-1)
            key = sample.statistics["largest_key"]
            assert torch.equal(sample.weights().gather(-1, key.clamp(min=0)[..., None])[..., 0], largest)
            assert torch.equal(key == -1, largest == 0)


@needs_native
@pytest.mark.parametrize("keep", ["cpu", "summary"])
def test_special_tokens_of_a_padded_batch_are_measured_in_one_more_run_per_layer(keep: Any) -> None:
    torch.manual_seed(0)
    model, texts, lengths = Reader().eval(), ids(3, 9), (9, 4, 6)
    special = tuple(texts[:, 2].tolist())
    with torch.no_grad(), native_runs() as runs, mh.observe(model, keep=keep, special_ids=special) as found:
        model(texts, lengths=lengths)
    # A summary looks the few special tokens up, and measures the chance levels of both layers in one run.
    assert len(runs) == (len(found.layers) + 1 if keep == "summary" else 2 * len(found.layers))
    with torch.no_grad(), mh.observe(model, special_ids=special) as expected:
        for text, length in zip(texts, lengths, strict=True):
            model(text[None, :length])
    for layer, other in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.summary(), other.summary(), atol=1e-6, rtol=1e-5)


@needs_native
def test_a_sample_of_a_packed_batch_keeps_its_own_mask_alone() -> None:
    layer, x = mh.MultiHeadAttention(16, 4), torch.randn(2, 9, 16)
    with torch.no_grad(), mh.observe(layer) as record:
        layer(x, lengths=(9, 4), mask=masks.Causal())
    assert [one.segments[0].request.mask for one in record.layers[0].samples] == [masks.Causal(), masks.Causal()]


@needs_native
@pytest.mark.parametrize("padding", ["right", "left", "between"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_an_attention_mask_is_measured_by_the_kernel_run_that_computes_it(name: str, padding: str) -> None:
    model, batch = family(name), batch_of(name)
    real = torch.ones_like(batch["input_ids"])
    real[1, {"right": slice(5, None), "left": slice(0, 4), "between": [0, 4, 5, 7]}[padding]] = 0
    batch["attention_mask"] = real
    with torch.no_grad(), native_runs() as runs, mh.observe(model) as record:
        model(**batch)
    assert len(runs) == len(record.layers)
    for layer in record.layers:
        for sample in layer.samples:
            request, _ = sample.request_of(sample.segments[0])
            expected = _expected(sample, request.q, request.k, sample.visible())
            found = {statistic: sample.statistics[statistic].double() for statistic in FROM_THE_KERNEL}
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_statistics_that_mean_something_else_in_a_sample_are_left_out_of_it() -> None:
    call = call_of(masks.Window(2, after=1), query_start=2)
    first, own = ("first_keys_mass", 1), ("offset_mass", 0)
    measured = dict.fromkeys(("entropy", first, own, "largest_key"), torch.ones(BATCH, HEADS, QUERIES))
    call = AttentionCall(call.request, replace(call.result, statistics=measured))
    part = SampleSpan(1, (2, 5), (2, 8))
    assert slice_call(call, part).result.statistics.keys() == set()
    assert slice_call(call, replace(part, holds_all_visible_keys=True)).result.statistics.keys() == measured.keys() - {
        first
    }
    both = replace(part, holds_all_visible_keys=True, holds_first_visible_key=True)
    assert slice_call(call, both).result.statistics.keys() == measured.keys()
    before = replace(both, keys=(6, 8))  # the first query stands before the first key
    assert slice_call(call, before).result.statistics.keys() == measured.keys() - {own}


def test_a_sample_knows_whether_its_keys_are_all_that_its_queries_see() -> None:
    queries = torch.tensor([[True] * 6, [False, True, True, True, True, False]])
    keys = torch.tensor([[True] * 9, [False, False, *[True] * 5, False, False]])
    for mask, first, second in (
        (masks.Full(), (True, True), (False, True)),
        (masks.Keep(keys, "batch keys"), (True, True), (True, True)),
        (masks.Keep(keys, "batch keys") & masks.Window(1, after=8), (True, True), (True, True)),
        (masks.Window(1, after=2), (True, True), (False, False)),
    ):
        found = spans_of_call(call_of(mask).request, queries=queries, keys=keys)
        assert [(each.holds_all_visible_keys, each.holds_first_visible_key) for each in found] == [first, second]


@pytest.mark.parametrize(
    ("flags", "expected"), [([0, 1, 0, 1, 0], (1, 4)), ([1, 1], (0, 2)), ([0, 0], (0, 0)), ([], (0, 0))]
)
def test_a_hull_reaches_from_the_first_to_behind_the_last(flags: list[int], expected: tuple[int, int]) -> None:
    q, real = torch.zeros(2, 1, len(flags), 4), torch.tensor([flags, flags], dtype=torch.bool)
    found = spans_of_call(request_of(q, q, q, masks.Full()), queries=real, keys=real)
    assert [(each.queries, each.keys) for each in found] == [(expected, expected)] * 2


def test_nobody_hears_of_a_cut() -> None:
    assert listeners() == ()


@needs_native
def test_queries_of_nan_have_sinks_and_special_tokens_of_nan_in_a_batch_too() -> None:
    class Sinking(nn.Module):
        def forward(self, q: Tensor, input_ids: Tensor) -> Tensor:
            request = request_of(q, q, q, sinks=torch.tensor([0.5, -1.0]), origin=CallOrigin(self))
            return attend(request).output

    torch.manual_seed(0)
    q, texts = torch.randn(2, 2, 6, 8), torch.tensor([[7, 1, 2, 7, 3, 4], [1, 7, 2, 3, 4, 5]])
    q[0, :, 2] = torch.nan
    probes = ["sink_mass", "special_mass", "entropy"]
    with mh.observe(model := Sinking(), probes=probes, special_ids=[7]) as together:
        model(q, texts)
    with mh.observe(model, probes=probes, special_ids=[7]) as alone:
        for one, text in zip(q, texts, strict=True):
            model(one[None], text[None])
    context = ProbeContext(special_keys=texts == 7)
    expected = mh.statistics(q, q, sinks=torch.tensor([0.5, -1.0]), probes=probes, context=context)
    for index, (found, other) in enumerate(zip(together.layers[0].samples, alone.layers[0].samples, strict=True)):
        for name in probes:
            torch.testing.assert_close(found.statistics[name], expected[name][index], equal_nan=True)
            torch.testing.assert_close(other.statistics[name], expected[name][index], equal_nan=True)


@pytest.mark.parametrize("places", [None, [1, 2, 3, 5, 6, 7, 8, 9], [0, 7, 8, 9], []], ids=str)
@pytest.mark.parametrize("layout", ["heads first", "rows first"])
@pytest.mark.parametrize("batch", [1, 2])
def test_rows_of_a_batch_are_copied_text_by_text(places: list[int] | None, layout: str, batch: int) -> None:
    tensor = torch.randn(2, 5, 3, 4).transpose(1, 2) if layout == "rows first" else torch.randn(2, 3, 5, 4)
    tensor = tensor[:batch]
    chosen = None if places is None else [each for each in places if each < 5 * batch]
    rows = torch.cat(tensor.unbind(), 1)  # (heads, batch * rows, features)
    expected = rows.clone() if chosen is None else rows[:, chosen]
    copy = copy_rows(tensor, None if chosen is None else torch.tensor(chosen, dtype=torch.int64), torch.device("cpu"))
    tensor.fill_(7)
    assert torch.equal(copy, expected)
    assert copy.stride(-1) == 1


@needs_native
@pytest.mark.parametrize("name", PADDED)
def test_cutting_a_batch_changes_no_bit_of_its_table(name: str) -> None:
    layer, lengths = mh.MultiHeadAttention(16, 4, num_kv_heads=2), (9, 3, 1, 6)
    with torch.no_grad(), mh.observe(layer) as record:
        for _ in range(2):
            layer(4 * torch.randn(4, 9, 16), lengths=lengths, **PADDED[name])
    assert record.layers[0].texts.waiting
    wanted: tuple[Any, ...] = ("mean", "p95", "max")  # the median is a quantile, too
    before = [record.table(of=of).rows for of in wanted]
    assert record.layers[0].num_samples == 8
    assert [(sample.num_queries, call) for sample, call in record.calls] == [(length, 0) for length in 2 * lengths]
    assert [record.table(of=of).rows for of in wanted] == before
    assert len(record.layers[0].samples) == 8
    assert not record.layers[0].texts.waiting
    assert [record.table(of=of).rows for of in wanted] == before


@needs_native
def test_a_batch_is_cut_where_a_later_call_continues_its_samples() -> None:
    layer, cache, x = mh.MultiHeadAttention(16, 4), KeyValueCache(), torch.randn(3, 7, 16)
    with torch.no_grad(), mh.observe(layer) as record:
        layer(x[:, :5], mask=masks.Causal(), cache=cache)
        assert record.layers[0].texts.waiting
        layer(x[:, 5:], mask=masks.Causal(), cache=cache)
    table = record.table().rows
    assert [len(sample.calls) for sample in record.layers[0].samples] == [2, 2, 2]
    assert [call for _, call in record.calls] == [0, 0, 0, 1, 1, 1]
    assert record.table().rows == table
    with torch.no_grad(), mh.observe(layer) as whole:
        layer(x, mask=masks.Causal())
    for row, other in zip(table, whole.table().rows, strict=True):
        assert row == pytest.approx(other, abs=1e-5)


@needs_native
def test_a_record_keeps_neither_the_layer_nor_the_tensors_of_a_call_in_memory() -> None:
    class Ear:
        requested_statistics = frozenset[Any]()

        def receive(self, call: AttentionCall) -> None:
            request = call.request
            held.extend(map(weakref.ref, (request.q, request.k, request.v, call.result.output)))

    held: list[Any] = []

    def observed(keep: Any) -> mh.Record:
        layer = mh.MultiHeadAttention(16, 4)
        with torch.no_grad(), mh.observe(layer, keep=keep) as record, listen(Ear()):
            layer(torch.randn(3, 7, 16), lengths=(7, 2, 3))
        held.append(weakref.ref(layer))
        return record

    records = [observed(keep) for keep in ("cpu", "statistics", "summary")]
    gc.collect()
    assert len(held) == 3 * 5
    assert [each() for each in held] == [None] * 3 * 5
    assert [record.layers[0].num_samples for record in records] == [3, 3, 3]


def test_lengths_that_change_after_the_call_do_not_change_its_record() -> None:
    layer, x, lengths = mh.MultiHeadAttention(16, 2), torch.randn(2, 6, 16), torch.tensor([6, 3])
    with mh.observe(layer, keep="cpu") as expected:
        layer(x, mask=masks.Lengths((6, 3)))
    with mh.observe(layer, keep="cpu") as seen:
        layer(x, mask=masks.Lengths(lengths))
    tokens, packing = mh.pack(x, lengths)
    with mh.observe(layer, keep="cpu") as packed:
        layer(tokens, packing=packing)
    lengths.fill_(1)
    for sample, length in enumerate((6, 3)):
        found, wanted = (each.layers[0].weights(head=0, sample=sample) for each in (seen, expected))
        assert torch.equal(found, wanted)
        own = packed.layers[0].weights(head=0, sample=sample)
        torch.testing.assert_close(own, wanted[:length, :length], rtol=0, atol=1e-6)


class TestQueriesAndKeysThatAreNotCopied:
    @needs_native
    def test_a_layer_s_own_queries_and_keys_are_copied_when_a_map_is_read(self) -> None:
        calls: list[AttentionCall] = []

        class Ear:
            requested_statistics = frozenset[Any]()

            def receive(self, call: AttentionCall) -> None:
                calls.append(call)

        layer, x = mh.MultiHeadAttention(16, 4, num_kv_heads=2), torch.randn(3, 7, 16)
        with mh.observe(layer) as seen, listen(Ear()):
            layer(x, lengths=(7, 2, 3))
        (batch,), (call,) = [each.call for each in seen.layers[0].texts.waiting], calls
        assert batch is not None
        assert batch.q is not None
        assert batch.k is not None
        assert batch.q.tensor.data_ptr() == call.request.q.data_ptr()
        assert batch.k.tensor.data_ptr() == call.request.k.data_ptr()
        seen.table(kinds=False)
        assert batch.q.places is not None
        first = seen.layers[0].weights(head=1, sample=1)
        call.request.q.detach().fill_(9)  # too late to change a map
        assert torch.equal(seen.layers[0].weights(head=1, sample=1), first)

    @needs_native
    @pytest.mark.parametrize("changed", ["q_proj", "k_proj"])
    def test_a_map_whose_queries_or_keys_were_changed_in_place_is_refused(self, changed: str) -> None:
        model = nn.Sequential(mh.MultiHeadAttention(16, 4))
        layer, outputs = model[0], []
        getattr(layer, changed).register_forward_hook(lambda _module, _inputs, output: outputs.append(output.detach()))
        with mh.observe(model) as seen:
            model(torch.randn(1, 5, 16))
        table = str(seen.table(kinds=False))
        outputs[0].zero_()
        assert str(seen.table(kinds=False)) == table
        with pytest.raises(mh.errors.ModelError) as raised:
            seen.layers[0].weights(head=0)
        assert str(raised.value) == (
            "Queries or keys of 0 were changed in place after the layer computed them. "
            "Change a copy of what its projections return, such as output.clone() in a hook."
        )

    @needs_native
    def test_keys_that_a_cache_overwrites_are_those_of_the_call(self) -> None:
        layer, x, cache = mh.MultiHeadAttention(16, 4), torch.randn(2, 6, 16), KeyValueCache()
        with torch.no_grad(), mh.observe(layer) as expected:
            layer(x, mask=masks.Causal())
        with torch.no_grad(), mh.observe(layer) as seen:
            layer(x, mask=masks.Causal(), cache=cache)
            cache.crop(3)
            layer(torch.randn(2, 3, 16), mask=masks.Causal(), cache=cache)
        weights = seen.layers[0].samples[1].call(0).weights(head=2)
        torch.testing.assert_close(weights, expected.layers[0].weights(head=2, sample=1))

    @needs_native
    def test_inference_tensors_are_copied_at_once_since_they_have_no_version(self) -> None:
        layer, outputs = mh.MultiHeadAttention(16, 4), []
        layer.k_proj.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        with torch.inference_mode(), mh.observe(layer) as seen:
            layer(x := torch.randn(1, 5, 16))
            outputs[0].zero_()
        with torch.no_grad(), mh.observe(layer) as expected:
            layer(x)
        assert torch.equal(seen.layers[0].weights(head=3), expected.layers[0].weights(head=3))

    @needs_native
    def test_a_record_is_pickled_before_its_maps_are_read(self) -> None:
        layer = mh.MultiHeadAttention(16, 4)
        with mh.observe(layer) as seen:
            layer(torch.randn(2, 5, 16), lengths=(5, 3))
        again = pickle.loads(pickle.dumps(seen))
        assert torch.equal(again.layers[0].weights(head=1, sample=1), seen.layers[0].weights(head=1, sample=1))


def texts(record: Record) -> list[list[list[int] | None]]:
    """The ids of every sample of every layer."""
    found = [[one.text.ids for one in layer.samples] for layer in record.layers]
    return [[None if each is None else each.tolist() for each in layer] for layer in found]


def test_every_text_of_a_batch_has_its_own() -> None:
    given = ids(3, 6)
    assert texts(read(given)) == [given.tolist()] * 2


def test_batches_add_up() -> None:
    assert texts(read(ids(1, 4), ids(2, 5))) == [[*ids(1, 4).tolist(), *ids(2, 5).tolist()]] * 2


@pytest.mark.parametrize("padding", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_padding_is_left_out(name: str, padding: Any) -> None:
    batch = batch_of(name, padding=padding)
    with torch.no_grad(), mh.observe(model := family(name)) as seen:
        model(**batch)
    expected = [
        row[mask.bool()].tolist() for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    assert texts(seen) == [expected] * len(seen.layers)


@pytest.mark.parametrize("name", [each for each in DECODERS if each != "gpt_oss"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_decoding_reads_what_it_wrote(name: str, padding: Any) -> None:
    batch = batch_of(name, padding=padding)
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    with mh.observe(model := family(name)) as seen:
        written = decoded(model, batch)[:, :-1]
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, written.shape[1] - LENGTH), value=1).bool()
    assert texts(seen) == [[row[shown].tolist() for row, shown in zip(written, mask, strict=True)]] * len(seen.layers)


def test_ones_own_cache_goes_on_from_text_to_text() -> None:
    given, caches = ids(2, 9), [KeyValueCache(), KeyValueCache()]

    class Stepping(Reader):
        def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
            x = self.embed(input_ids)
            for layer, one in zip(self.layers, caches, strict=True):
                x = layer(x, mask=mh.masks.Causal(), cache=one)
            return x  # type: ignore[no-any-return]

    with torch.no_grad(), mh.observe(model := Stepping().eval()) as seen:
        for first, stop in itertools.pairwise((0, 4, 5, 6, 9)):
            model(given[:, first:stop])
    assert texts(seen) == [given.tolist()] * 2


def test_a_decoder_knows_both_texts() -> None:
    model, batch = family("t5"), batch_of("t5", padding="right")
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch)
    real = batch["attention_mask"][1].bool()
    for layer in seen.layers:
        one = layer.sample(1)
        assert one.cross_attention == ("EncDec" in layer.name)
        if one.cross_attention:
            assert one.text.ids.tolist() == batch["input_ids"][1][real].tolist()  # type: ignore[union-attr]
            assert one.query_text.ids.tolist() == batch["decoder_input_ids"][1][: one.num_queries].tolist()  # type: ignore[union-attr]
    assert [text.length for text in seen.texts] == [int(mask.sum()) for mask in batch["attention_mask"]]


def test_where_embeddings_are_given_no_ids_are_known() -> None:
    model, batch = family("bert"), batch_of("bert")
    embedded = model.get_input_embeddings()(batch["input_ids"])
    with torch.no_grad(), mh.observe(model) as seen:
        model(inputs_embeds=embedded)
    assert texts(seen) == [[None, None]] * 2
    assert [text.length for text in seen.texts] == [0, 0]


def test_a_text_that_was_begun_unwatched_is_unknown() -> None:
    model, batch = family("llama"), batch_of("llama")
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"][:, :8], use_cache=True).past_key_values
        with mh.observe(model) as seen:
            model(input_ids=batch["input_ids"][:, 8:], past_key_values=cache)
    assert texts(seen)[0] == [None, None]


def test_what_the_caller_writes_over_later_is_kept_as_it_was() -> None:
    given = ids(1, 5)
    expected = given.clone()
    with torch.no_grad(), mh.observe(model := Reader()) as seen:
        model(given)
        given.zero_()
    assert texts(seen) == [expected.tolist()] * 2
