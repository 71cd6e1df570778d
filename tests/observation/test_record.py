"""A record gives the weights and means of what ran, whole or by tiles, in one call or in many."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, MissingPackageError, ModelError, ProbeError
from multihead.functional import attend, request_of
from multihead.kernels.call import CachedSequence, CallOrigin, PositionInSequence
from multihead.observation.record import Record
from multihead.probes import PROBES
from multihead.record.analysis.highlights import findings
from multihead.record.layer import layer_profiles
from multihead.record.sample import SampleRecord
from tests.observation.recorded import ids, read

HEADS, LENGTH = 4, 10
Q, K = torch.randn(2, 1, HEADS, LENGTH, 8, generator=torch.Generator().manual_seed(0)).unbind()


class Asking(nn.Module):
    """Asks for the attention of a part of one text, as a layer with a cache would."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = CachedSequence()

    def forward(
        self,
        queries: slice,
        keys: int | None = None,
        mask: masks.Mask | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        q, k = Q[:, :, queries], K[:, :2, :keys]
        start = range(LENGTH)[queries].start
        request = request_of(q, k, k, masks.Causal() if mask is None else mask, bias, None, sinks, query_start=start)
        place = None if keys is None else PositionInSequence(self.sequence)
        return attend(replace(request, origin=CallOrigin(self, position_in_sequence=place))).output


def seen_in(*calls: Callable[[Asking], Tensor], keep: str = "cpu") -> Record:
    model = Asking()
    with mh.observe(model, keep=keep, probes=tuple(PROBES)) as seen:  # type: ignore[arg-type]
        for call in calls:
            call(model)
    return seen


def whole() -> SampleRecord:
    return seen_in(lambda model: model(slice(0, LENGTH))).layers[0].sample()


def step(model: Asking, place: int) -> Tensor:
    return model(slice(place, place + 1), place + 1)


def decoded(keep: str = "cpu") -> SampleRecord:
    """Four tokens at once, then one at a time."""
    steps = [lambda model, place=place: step(model, place) for place in range(4, LENGTH)]
    record = seen_in(lambda model: model(slice(0, 4), 4), *steps, keep=keep)
    assert record.layers[0].num_samples == 1
    return record.layers[0].sample()


def by_hand(mask: Tensor) -> Tensor:
    scores = Q @ K[:, :2].repeat_interleave(2, 1).mT / 8**0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1)[0]


TRIANGLE = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


@pytest.mark.parametrize("of", [whole, decoded], ids=["whole", "decoded"])
class TestTiles:
    def test_the_weights_are_exact(self, of: Callable[[], SampleRecord]) -> None:
        torch.testing.assert_close(of().weights(), by_hand(TRIANGLE))

    def test_what_may_be_seen_is_the_mask(self, of: Callable[[], SampleRecord]) -> None:
        assert torch.equal(of().visible(), TRIANGLE)

    @pytest.mark.parametrize(
        "queries", [slice(2, 6), slice(None, None, 3), slice(-2, None), slice(5, 5), slice(1, 20, 2)]
    )
    @pytest.mark.parametrize("keys", [slice(0, 3), slice(1, None, 4), slice(-3, -1)])
    @pytest.mark.parametrize("head", [None, 2, -1])
    def test_a_tile_is_that_part_of_the_whole(
        self, of: Callable[[], SampleRecord], queries: slice, keys: slice, head: int | None
    ) -> None:
        sample, expected = of(), by_hand(TRIANGLE)[..., queries, keys]
        tile = sample.weights(head, queries=queries, keys=keys)
        torch.testing.assert_close(tile, expected if head is None else expected[head])
        assert torch.equal(sample.visible(queries=queries, keys=keys), TRIANGLE[queries, keys])

    def test_a_head_that_is_none_is_refused(self, of: Callable[[], SampleRecord]) -> None:
        with pytest.raises(ArgumentError) as caught:
            of().weights(4)
        assert str(caught.value) == "There is no head 4. Give heads from 0 to 3."

    def test_means_are_over_the_queries_that_have_what_is_measured(self, of: Callable[[], SampleRecord]) -> None:
        sample, weights = of(), by_hand(TRIANGLE).double()
        before = weights.diagonal(-1, 1, 2).sum(-1) / (LENGTH - 1)  # the first query has no key before it
        torch.testing.assert_close(sample.means["previous_mass"], before, atol=1e-6, rtol=0)
        torch.testing.assert_close(sample.means["first_mass"], weights[..., 0].mean(-1), atol=1e-6, rtol=0)
        assert torch.equal(sample.means["next_mass"], torch.zeros(HEADS, dtype=torch.float64))  # all are hidden
        assert not {"received", "pooled_map", "largest_key"} & sample.means.keys()


def test_a_decoding_has_the_statistics_of_one_call() -> None:
    found, expected = decoded().statistics, whole().statistics
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_decoding_of_which_only_statistics_are_kept_has_all_but_the_pooled_map() -> None:
    found, expected = decoded("statistics").statistics, whole().statistics
    assert found.keys() == expected.keys() - {"pooled_map"}
    torch.testing.assert_close(found, {name: expected[name] for name in found}, atol=1e-5, rtol=1e-5)


def test_each_call_of_a_decoding_is_gone_through_alone() -> None:
    record = seen_in(lambda model: model(slice(0, 4), 4), lambda model: step(model, 4))
    assert [(call.query_start, call.num_queries, call.num_keys) for call in record] == [(0, 4, 4), (4, 1, 5)]
    torch.testing.assert_close(list(record)[1].weights(), by_hand(TRIANGLE)[:, 4:5, :5])


def test_a_query_that_sees_nothing_counts_in_no_mean() -> None:
    mask = masks.Lengths((tuple([0] + [LENGTH] * (LENGTH - 1)),))
    sample = seen_in(lambda model: model(slice(0, LENGTH), mask=mask)).layers[0].sample()
    rows = by_hand(torch.ones(LENGTH, LENGTH, dtype=torch.bool))[:, 1:].double()
    torch.testing.assert_close(sample.means["largest_weight"], rows.amax(-1).mean(-1), atol=1e-6, rtol=0)
    after = rows.diagonal(2, 1, 2).sum(-1) / (LENGTH - 2)  # neither the blind first query nor the last has one
    torch.testing.assert_close(sample.means["next_mass"], after, atol=1e-6, rtol=0)


def test_a_bias_and_sinks_are_in_the_weights() -> None:
    bias, sinks = torch.randn(1, HEADS, LENGTH, LENGTH), torch.randn(HEADS)
    bias[..., 3, 1] = -torch.inf
    sample = seen_in(lambda model: model(slice(0, LENGTH), bias=bias, sinks=sinks)).layers[0].sample()
    scores = (Q @ K[:, :2].repeat_interleave(2, 1).mT / 8**0.5 + bias).masked_fill(~TRIANGLE, -torch.inf)
    with_sink = torch.cat([scores, sinks.view(1, HEADS, 1, 1).expand(-1, -1, LENGTH, 1)], -1).softmax(-1)[0, ..., :-1]
    torch.testing.assert_close(sample.weights(), with_sink)
    hidden = TRIANGLE.clone()
    hidden[3, 1] = False
    assert torch.equal(sample.visible(), hidden.expand(HEADS, -1, -1))


def test_what_a_bias_hides_is_known_where_only_statistics_are_kept() -> None:
    bias = torch.zeros(1, 1, LENGTH, LENGTH)
    bias[..., 3, 1] = -torch.inf
    sample = seen_in(lambda model: model(slice(0, LENGTH), bias=bias), keep="statistics").layers[0].sample()
    assert not sample.visible()[3, 1]
    assert int(sample.visible().sum()) == int(TRIANGLE.sum()) - 1


def test_a_table_has_a_row_a_head_with_its_means() -> None:
    record = seen_in(lambda model: model(slice(0, LENGTH)))
    table = record.table(sort="entropy", top=3)
    means = record.layers[0].means()["entropy"]
    assert [row["entropy"] for row in table.rows] == sorted(means.tolist(), reverse=True)[:3]
    assert {row["name"] for row in record.table().rows} == {"Asking"}
    assert [row["head"] for row in record.table().rows] == [0, 1, 2, 3]


def test_a_layer_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ModelError) as caught:
        _ = seen_in(lambda model: model(slice(0, LENGTH)))["encoder"]
    assert str(caught.value) == "There is no layer 'encoder' in the record. The recorded layers are: Asking."


@pytest.mark.parametrize("columns", [slice(1, 3), slice(None, None, 2), slice(-2, None), slice(3, 1), slice(4, 99)])
def test_a_tile_of_joined_calls_is_that_part_of_the_whole(columns: slice) -> None:
    record = seen_in(lambda model: model(slice(0, 4), 4), lambda model: step(model, 4))
    sample = record.layers[0].sample()
    assert sample.num_queries == 5
    rows = slice(2, 5)
    tile = sample.weights(queries=rows, keys=columns)
    torch.testing.assert_close(tile, sample.weights()[:, rows, columns])
    assert torch.equal(sample.visible(queries=rows, keys=columns), sample.visible()[rows, columns])


def test_a_sample_knows_the_width_and_dtype_of_its_heads() -> None:
    sample = seen_in(lambda model: model(slice(0, LENGTH)), keep="statistics").layers[0].sample()
    assert (sample.head_dim, sample.dtype) == (Q.shape[3], Q.dtype)


class TestPandas:
    def test_without_it_a_sentence_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(MissingPackageError) as caught:
            seen_in(lambda model: model(slice(0, LENGTH))).to_pandas()
        assert str(caught.value) == "A DataFrame needs pandas, which is not installed. Run pip install pandas."

    def test_with_it_a_frame_is_made_of_the_rows_of_the_table(self, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[Any] = []
        monkeypatch.setitem(
            sys.modules,
            "pandas",
            SimpleNamespace(DataFrame=lambda rows: given.append(rows) or "frame", __spec__=ModuleSpec("pandas", None)),
        )
        record = seen_in(lambda model: model(slice(0, LENGTH)))
        assert record.to_pandas(of="median") == "frame"
        assert given == [record.table(of="median").rows]


def test_nothing_but_asking_for_a_frame_imports_pandas() -> None:
    code = "import sys, multihead; print('pandas' in sys.modules, 'safetensors' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_a_record_is_titled_by_the_models_class_and_has_an_id_of_its_own() -> None:
    first, second = (seen_in(lambda model: model(slice(0, LENGTH))) for _ in range(2))
    assert first.title == "Asking"
    assert first.id != second.id
    assert len(first.id) == 32


@pytest.mark.parametrize("keep", ["cpu", "statistics", "summary"])
def test_a_layer_keeps_its_number_where_only_some_layers_are_watched(keep: str) -> None:
    every = read(ids(1, 12), keep=keep, layers=None)
    some = read(ids(1, 12), keep=keep, layers=[1])
    assert [(layer.number, layer.name) for layer in some.layers] == [(1, every.layers[1].name)]
    assert some.table().rows == [row for row in every.table().rows if row["layer"] == 1]
    found = some.find(entropy=(0, None))
    assert {(one.layer, one.name) for one in found} == {(1, every.layers[1].name)}
    assert str(found[0]).startswith("L1 H")
    assert some[1] is some[every.layers[1].name] is some.layers[0]


def test_the_nearest_heads_are_asked_for_and_found_by_the_numbers_of_their_layers() -> None:
    some = read(ids(1, 12), layers=[1])
    assert {(one.layer, one.name) for one in some.nearest(1, 0)} == {(1, some.layers[0].name)}
    with pytest.raises(ArgumentError) as caught:
        some.nearest(0, 0)
    assert str(caught.value) == "There is no layer 0. Give 1."


def test_what_stands_out_is_said_of_the_layers_own_number() -> None:
    some = read(ids(1, 12), layers=[1])
    sample = some.layers[0].samples[0]
    sample.set_statistics({"previous_mass": torch.full((sample.num_heads, 12), 0.9)})
    found = findings(layer_profiles(some.layers))
    assert {one.layer for one in found} == {1}
    assert all(str(one).startswith("layer 1 head ") for one in found)


def test_a_layer_number_that_was_not_watched_is_refused_with_those_that_were() -> None:
    with pytest.raises(ModelError) as caught:
        read(ids(1, 12), layers=[1])[0]
    assert str(caught.value) == "There is no layer 0 in the record. The recorded layers are: 1."


def test_layers_of_two_stacks_are_numbered_in_the_order_they_run() -> None:
    stacks = nn.ModuleDict({name: nn.ModuleList(mh.MultiHeadAttention(8, 2) for _ in range(2)) for name in "ab"})
    x = torch.zeros(1, 3, 8)
    with mh.observe(stacks, layers=["b.1", "a.0"]) as seen:
        for name in "ab":
            for layer in stacks[name]:  # type: ignore[attr-defined]
                layer(x)
    assert [(layer.number, layer.name) for layer in seen.layers] == [(0, "a.0"), (3, "b.1")]


def test_the_findings_of_a_record_are_those_of_all_its_texts_or_of_one() -> None:
    record = read(ids(4, 12))
    assert record.findings() == []
    for number, one in enumerate(record.layers[1].samples):
        one.set_statistics({"previous_mass": torch.full((one.num_heads, 12), 0.9 if number else 0.05)})
    assert record.findings(sample=0) == []
    assert [(one.topic, one.layer, one.head) for one in record.findings(sample=1)] == [("previous", 1, 0)]
    assert record.findings() == []  # one of the four texts differs, so the error over texts is large
    with pytest.raises(ArgumentError, match="There is no sample 4"):
        record.findings(sample=4)
    summary = read(ids(4, 12), keep="summary")
    assert summary.findings() == []
    with pytest.raises(ProbeError, match="so it has no single texts"):
        summary.findings(sample=0)
