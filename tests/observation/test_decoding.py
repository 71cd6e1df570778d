"""A decoding that is watched: its record says what the record of one whole pass says, and later steps leave it so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.kernels.call import AttentionCall
from multihead.layer.cache import KeyValueCache
from multihead.observation import measuring, recorder
from multihead.observation.record import Record
from multihead.observation.recorder import Keep
from multihead.probes import PROBES
from multihead.probes.statistics import statistics_of_call
from multihead.record.chance import ChanceComparison
from multihead.record.layer import LayerRecord, LayerTexts
from multihead.rotary import Rotary

CAUSAL, WIDTH, LENGTH = masks.Causal(), 16, 12
NEAR = CAUSAL & masks.Window(4)
CHUNKS = (5, 1, 1, 3, 1, 1)
OF_LAYER: dict[str, dict[str, Any]] = {
    "plain": {},
    "more": {"rotary": Rotary(), "sinks": True, "head_gates": True, "softcap": 2.0},
    "added keys": {"rotary": Rotary(), "add_bias_kv": True, "add_zero_attn": True},
}


def drawn(**options: Any) -> tuple[mh.MultiHeadAttention, Tensor]:
    layer = mh.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer, torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def watched(layer: nn.Module, calls: Sequence[dict[str, Any]], **options: Any) -> Record:
    options.setdefault("probes", tuple(PROBES))
    with torch.no_grad(), mh.observe(layer, **options) as seen:
        for call in calls:
            layer(**call)
    return seen


def steps(x: Tensor, chunks: Sequence[int] = CHUNKS, **options: Any) -> list[dict[str, Any]]:
    """The calls of a text that comes in chunks."""
    edges = [sum(chunks[:n]) for n in range(len(chunks) + 1)]
    return [{"x": x[:, first:stop], **options} for first, stop in pairwise(edges)]


def assert_same(found: LayerRecord, whole: LayerRecord) -> None:
    assert found.num_samples == whole.num_samples
    for one, other in zip(found.samples, whole.samples, strict=True):
        assert (one.num_queries, one.num_keys, one.query_start) == (
            other.num_queries,
            other.num_keys,
            other.query_start,
        )
        assert torch.allclose(one.weights(), other.weights(), atol=1e-12)
        assert one.visible().equal(other.visible())
        assert set(one.statistics) == set(other.statistics)
        for name, value in other.statistics.items():
            # What a map is pooled from again is float32.
            loose = 1e-6 if name == "pooled_map" else 1e-10
            assert torch.allclose(one.statistics[name].double(), value.double(), atol=loose, equal_nan=True), name


@pytest.mark.parametrize(
    ("options", "mask"),
    [({}, CAUSAL), ({"capacity": LENGTH}, CAUSAL), ({"window": 4}, NEAR), ({}, CAUSAL & masks.Documents((7, 5)))],
    ids=str,
)
@pytest.mark.parametrize("of_layer", OF_LAYER.values(), ids=OF_LAYER)
def test_a_decoding_is_recorded_as_one_whole_pass(
    options: dict[str, int], mask: masks.Mask, of_layer: dict[str, Any]
) -> None:
    layer, x = drawn(**of_layer)
    found = watched(layer, steps(x, cache=KeyValueCache(**options), mask=mask))
    assert_same(found.layers[0], watched(layer, [{"x": x, "mask": mask}]).layers[0])


@pytest.mark.parametrize("options", [{}, {"capacity": LENGTH}, {"window": 4}], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
def test_samples_of_different_lengths_are_each_recorded_as_if_alone(options: dict[str, int], side: str) -> None:
    layer, x = drawn(rotary=Rotary())
    cache, prompts = KeyValueCache(**options), (6, 2)
    padded = torch.full((2, 6, WIDTH), torch.nan, dtype=torch.float64)
    for sample, length in enumerate(prompts):
        padded[sample, slice(0, length) if side == "right" else slice(6 - length, 6)] = x[sample, :length]
    calls: list[dict[str, Any]] = [{"x": padded, "lengths": prompts, "padding_side": side}]
    for step in range(4):
        token = torch.stack([x[sample, length + step] for sample, length in enumerate(prompts)])
        calls += [{"x": token[:, None]}]
    found = watched(layer, [{**call, "cache": cache, "mask": NEAR} for call in calls]).layers[0]
    assert found.num_samples == 2
    for sample, length in enumerate(prompts):
        whole = watched(layer, [{"x": x[sample : sample + 1, : length + 4], "mask": NEAR}]).layers[0]
        assert_same(LayerRecord(found.name, LayerTexts([found.samples[sample]])), whole)


def test_later_steps_leave_the_record_of_earlier_ones_as_it_was() -> None:
    layer, x = drawn(rotary=Rotary())
    for options in ({}, {"capacity": 3 * LENGTH}, {"window": 4}):
        cache = KeyValueCache(**options)
        with torch.no_grad(), mh.observe(layer, keep="device") as seen:
            layer(x[:, :7], cache=cache, mask=NEAR)
            call = next(iter(seen))
            before = (call.weights().clone(), {name: value.clone() for name, value in call.statistics.items()})
            for token in range(7, LENGTH):
                layer(x[:, token : token + 1], cache=cache, mask=NEAR)
            cache.crop(LENGTH - 3)
            for _ in range(LENGTH):
                layer(torch.randn(2, 1, WIDTH, dtype=torch.float64), cache=cache, mask=NEAR)
            cache.reset()
            layer(torch.randn(2, 7, WIDTH, dtype=torch.float64), cache=cache, mask=NEAR)
        assert call.weights().equal(before[0])
        assert all(call.statistics[name].equal(value) for name, value in before[1].items() if name != "pooled_map")


def test_cross_attention_is_recorded_as_one_whole_pass() -> None:
    layer, x = drawn()
    memory = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    for mask in (masks.Full(), masks.Lengths((7, 4))):
        found = watched(layer, steps(x, memory=memory, cache=KeyValueCache(), mask=mask))
        assert_same(found.layers[0], watched(layer, [{"x": x, "memory": memory, "mask": mask}]).layers[0])


def test_two_texts_in_turns_are_two_records() -> None:
    layer, x = drawn()
    one, other = KeyValueCache(), KeyValueCache()
    calls = [
        each
        for pair in zip(steps(x[:1], cache=one, mask=CAUSAL), steps(x[1:], cache=other, mask=CAUSAL), strict=True)
        for each in pair
    ]
    assert_same(watched(layer, calls).layers[0], watched(layer, [{"x": x, "mask": CAUSAL}]).layers[0])


def test_beams_begin_new_samples_and_leave_the_old_ones() -> None:
    layer, x = drawn()
    cache = KeyValueCache()
    with torch.no_grad(), mh.observe(layer) as seen:
        layer(x[:, :5], cache=cache, mask=CAUSAL)
        cache.reorder((1, 1, 0))
        layer(x[[1, 1, 0], 5:6], cache=cache, mask=CAUSAL)
        layer(x[[1, 1, 0], 6:7], cache=cache, mask=CAUSAL)
    found = seen.layers[0]
    assert [sample.num_queries for sample in found.samples] == [5, 5, 2, 2, 2]
    assert [sample.num_keys for sample in found.samples] == [5, 5, 7, 7, 7]
    whole = watched(layer, [{"x": x[:, :7], "mask": CAUSAL}]).layers[0]
    for beam, sample in enumerate((1, 1, 0)):
        again = found.sample(2 + beam)
        assert again.query_start == 5
        assert torch.allclose(again.weights(), whole.sample(sample).weights(queries=slice(5, 7)), atol=1e-12)


@pytest.mark.parametrize("of_layer", OF_LAYER.values(), ids=OF_LAYER)
@pytest.mark.parametrize(
    ("window", "lengths"),
    [
        (1, [(1, 1), (1, 1), (0, 0), (0, 0), (0, 1)]),
        (3, [(0, 2), (3, 0), (1, 1), (0, 0), (1, 2), (4, 0), (1, 1)]),
        (4, [(30, 0), (150, 3), (0, 5), *[(1, 1)] * 4]),  # so long that each sample drops keys of its own number
    ],
    ids=["one key", "few", "many"],
)
def test_steps_without_a_token_of_some_texts_are_recorded_as_if_each_text_was_alone(
    window: int, lengths: list[tuple[int, int]], of_layer: dict[str, Any]
) -> None:
    layer, mask = drawn(**of_layer)[0], CAUSAL & masks.Window(window)
    texts = [torch.randn(1, sum(counts), WIDTH, dtype=torch.float64) for counts in zip(*lengths, strict=True)]
    calls, done = [], [0, 0]
    for counts in lengths:
        x = torch.full((2, max(1, *counts), WIDTH), torch.nan, dtype=torch.float64)
        for index, count in enumerate(counts):
            x[index, :count] = texts[index][0, done[index] : done[index] + count]
            done[index] += count
        calls.append({"x": x, "lengths": counts, "mask": mask})
    cache = KeyValueCache(window=window)
    found = watched(layer, [{**call, "cache": cache} for call in calls]).layers[0]
    assert found.num_samples == len(texts)
    for sample, text in zip(found.samples, texts, strict=True):
        assert_same(LayerRecord("", LayerTexts([sample])), watched(layer, [{"x": text, "mask": mask}]).layers[0])


def test_a_bias_is_recorded_where_a_window_drops_keys_after_a_learned_one() -> None:
    layer, x = drawn(add_bias_kv=True)
    bias = torch.randn(2, 4, LENGTH, LENGTH, dtype=torch.float64)
    bias[:, :, 7, 5] = -torch.inf
    calls = steps(x, cache=KeyValueCache(window=4), mask=NEAR)
    stop = 0
    for call in calls:
        start, stop = stop, stop + call["x"].shape[1]
        call["bias"] = bias[:, :, start:stop, max(0, start - 3) : stop]
    whole = watched(layer, [{"x": x, "mask": NEAR, "bias": bias}])
    assert_same(watched(layer, calls).layers[0], whole.layers[0])


def test_a_model_of_several_layers_is_recorded_layer_by_layer() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = drawn()[0], drawn(rotary=Rotary())[0]

        def forward(self, x: Tensor, caches: tuple[KeyValueCache | None, KeyValueCache | None]) -> Tensor:
            x = x + self.first(x, mask=CAUSAL, cache=caches[0])
            return x + self.second(x, mask=CAUSAL, cache=caches[1])

    model, (_, x) = Two(), drawn()
    caches = (KeyValueCache(), KeyValueCache(capacity=LENGTH))
    found = watched(model, steps(x, caches=caches))
    whole = watched(model, [{"x": x, "caches": (None, None)}])
    assert [layer.name for layer in found.layers] == ["first", "second"]
    for one, other in zip(found.layers, whole.layers, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("keep", ["statistics", "summary"])
@pytest.mark.parametrize("of_layer", OF_LAYER.values(), ids=OF_LAYER)
def test_statistics_alone_are_kept_of_a_decoding_too(of_layer: dict[str, Any], keep: str) -> None:
    layer, x = drawn(**of_layer)
    found = watched(layer, steps(x, cache=KeyValueCache(window=4), mask=NEAR), keep=keep).layers[0]
    whole = watched(layer, [{"x": x, "mask": NEAR}], keep=keep).layers[0]
    assert found.num_samples == whole.num_samples
    means = found.means()
    for name, value in whole.means().items():
        assert torch.allclose(means[name], value, atol=1e-10), name


def test_a_later_step_that_sees_no_key_gives_the_first_one_no_weight() -> None:
    layer, x = drawn()
    hidden = CAUSAL & masks.Lengths((0, LENGTH))
    seen = watched(layer, steps(x, (5, 7), mask=hidden, cache=KeyValueCache()))
    assert bool((seen.layers[0].sample(0).statistics["first_mass"] == 0).all())
    whole = watched(layer, [{"x": x, "mask": hidden}])
    assert_same(
        LayerRecord("", LayerTexts([seen.layers[0].sample(1)])),
        LayerRecord("", LayerTexts([whole.layers[0].sample(1)])),
    )


@pytest.mark.parametrize("first", [0, 2])
def test_a_batch_of_nothing_but_padding_is_watched(first: int) -> None:
    """There is no key to tell by whether a later call goes on from it."""
    layer, x = drawn()
    calls = [{"x": x, "lengths": lengths} for lengths in ((first, first), (0, 0), (3, 1))]
    seen = watched(layer, calls)
    assert [sample.num_queries for sample in seen.layers[0].samples] == [first, first, 0, 0, 3, 1]


@pytest.mark.parametrize("crosses", [False, True], ids=["self", "cross"])
def test_a_step_of_several_texts_is_measured_once_and_each_has_what_it_has_alone(
    monkeypatch: pytest.MonkeyPatch, *, crosses: bool
) -> None:
    torch.manual_seed(0)
    (layer, _), lengths = drawn(), (5, 3, 4, 5)
    x, memory = torch.randn(2, 4, 9, WIDTH, dtype=torch.float64)
    sizes = []

    def decode(rows: list[int]) -> None:
        cache, begin = KeyValueCache(), {"lengths": [lengths[row] for row in rows]}
        options = {"memory": memory[rows, :7]} if crosses else {"mask": CAUSAL}
        layer(x[rows, :5], cache=cache, **options, **({} if crosses else begin))
        for token in range(5, 9):
            layer(x[rows, token : token + 1], cache=cache, **options)

    def observed(*batches: list[int], keep: Keep) -> LayerRecord:
        with torch.no_grad(), mh.observe(layer, keep=keep) as seen:
            for rows in batches:
                decode(rows)
        return seen.layers[0]

    def measured(call: AttentionCall, *rest: Any) -> dict[str, Tensor]:
        sizes.append(call.request.shape.batch)
        return statistics_of_call(call, *rest)

    alone, means = observed([0], [1], [2], [3], keep="statistics"), observed([0], [1], [2], [3], keep="summary")
    for module in (measuring, recorder):
        monkeypatch.setattr(module, "statistics_of_call", measured)
    together = observed([0, 1, 2, 3], keep="statistics")
    summed = observed([0, 1, 2, 3], keep="summary")
    assert set(sizes) == {4}
    for sample, one in zip(together.samples, alone.samples, strict=True):
        assert sample.statistics.keys() == one.statistics.keys()
        for name, values in one.statistics.items():
            torch.testing.assert_close(sample.statistics[name], values, rtol=0, atol=1e-12)
    found, expected = evidence(summed), evidence(means)
    assert found.keys() == expected.keys()
    for name, compared in expected.items():
        for number, other in zip(astuple(found[name]), astuple(compared), strict=True):
            torch.testing.assert_close(number, other, rtol=0, atol=1e-7, equal_nan=True)


def evidence(layer: LayerRecord) -> dict[str, ChanceComparison]:
    assert layer.running_summary is not None
    return layer.running_summary.evidence()
