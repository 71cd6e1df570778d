"""A layer with a cache, step by step, gives what it gives for the whole text: every option, mask and kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, MaskError, ShapeError
from multihead.kernels.call import AttentionCall, listen
from multihead.layer.cache import KeyValueCache, buffers
from multihead.layer.qk_norm import QKNorm
from multihead.rotary import Linear, Llama3, Rotary, Yarn
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias
from tests import oracle
from tests.layer.cache.stepping import of_rows

LENGTH, WINDOW, WIDTH = 14, 4, 24
CAUSAL = masks.Causal()
NEAR = CAUSAL & masks.Window(WINDOW)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"num_kv_heads": 2},
    "one kv head, other widths": {"num_kv_heads": 1, "head_dim": 8, "value_head_dim": 5, "merge": "mean"},
    "no output projection": {"output_projection": False},
    "rotary": {"rotary": Rotary()},
    "rotary, part of a head": {"rotary": Rotary(dim=4), "num_kv_heads": 2},
    "rotary, neighbours": {"rotary": Rotary(interleaved=True)},
    "rotary, linear": {"rotary": Rotary(scaling=Linear(2.0))},
    "rotary, llama 3": {"rotary": Rotary(scaling=Llama3(factor=4.0, original_length=8))},
    "rotary, yarn": {"rotary": Rotary(scaling=Yarn(factor=4.0, original_length=8))},
    "ALiBi": {"position_bias": ALiBi(4), "num_kv_heads": 2},
    "T5 bias": {"position_bias": T5Bias(4, 8, 12, both_ways=False, dtype=torch.float64), "scale": 1.0},
    "learned bias": {"position_bias": LearnedBias(4, LENGTH, LENGTH, dtype=torch.float64)},
    "norms": {"qk_norm": QKNorm("rms"), "num_kv_heads": 2},
    "norms of all heads": {"qk_norm": QKNorm("rms", over="all"), "rotary": Rotary()},
    "unit vectors": {"qk_norm": QKNorm("l2")},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks": True, "num_kv_heads": 2},
    "gates": {"head_gates": True},
    "a learned key": {"add_bias_kv": True, "num_kv_heads": 2},
    "a key of zeros": {"add_zero_attn": True},
    "all together": {
        "num_kv_heads": 2,
        "qk_norm": QKNorm("rms"),
        "rotary": Rotary(dim=4),
        "softcap": 1.5,
        "sinks": True,
        "head_gates": True,
        "add_bias_kv": True,
        "add_zero_attn": True,
    },
    "all with a bias": {
        "num_kv_heads": 2,
        "qk_norm": QKNorm("l2"),
        "position_bias": ALiBi(4),
        "softcap": 1.5,
        "sinks": True,
        "head_gates": True,
    },
}
# A table of absolute places has no meaning where the first ones are forgotten.
OF_WINDOW = {name: options for name, options in OPTIONS.items() if name != "learned bias"}
MASKS: dict[str, masks.Mask] = {
    "causal": CAUSAL,
    "window": NEAR,
    "documents": CAUSAL & masks.Documents(((5, 9), (8, 3, 3))),
    "prefix": CAUSAL | masks.Prefix((3, 4)),
    "lengths to come": CAUSAL & masks.Lengths((10, 12)),
    "keep": CAUSAL & masks.Keep(torch.arange(LENGTH) % 3 < 2, "keys"),
    "keep cells": CAUSAL & masks.Keep(torch.eye(LENGTH, dtype=torch.bool).logical_not(), "queries keys"),
}
CACHES: dict[str, Callable[[], KeyValueCache]] = {
    "growing": KeyValueCache,
    "capacity": lambda: KeyValueCache(capacity=LENGTH),
    "window": lambda: KeyValueCache(window=WINDOW),
}


@pytest.fixture(autouse=True, scope="module")
def _small_buffers() -> Iterator[None]:
    """Buffers that are full every few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "INITIAL_SLOTS", 2)
        patch.setattr(buffers, "SPARE_SLOTS", 1)
        yield


def made(**options: Any) -> mh.MultiHeadAttention:
    """A layer in float64 whose every parameter is drawn."""
    layer = mh.MultiHeadAttention(WIDTH, 4, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def text(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, dtype=torch.float64)


def stepwise(
    layer: mh.MultiHeadAttention, x: Tensor, chunks: Sequence[int], cache: KeyValueCache, mask: masks.Mask = CAUSAL
) -> Tensor:
    outputs, first = [], 0
    for count in chunks:
        rows = slice(first, first + count)
        first += count
        outputs.append(layer(x[:, rows], cache=cache, mask=of_rows(mask, rows, first)))
    return torch.cat(outputs, 1)


def assert_same(found: Tensor, whole: Tensor) -> None:
    assert found.shape == whole.shape
    assert float((found - whole).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", CACHES)
def test_step_by_step_gives_what_one_pass_gives(name: str, kind: str) -> None:
    if kind == "window" and name not in OF_WINDOW:
        return
    layer, x = made(**OPTIONS[name]), text()
    for mask in (NEAR,) if kind == "window" else (CAUSAL, MASKS["prefix"]):
        with torch.no_grad():
            found = stepwise(layer, x, [4, 1, 1, 3, 1, 4], CACHES[kind](), mask)
            assert_same(found, layer(x, mask=mask))


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", ["plain", "rotary", "all together"])
def test_every_mask_means_the_same_of_a_text_that_grows(mask: masks.Mask, name: str) -> None:
    layer, x = made(**OPTIONS[name]), text()
    for kind in ("growing", "capacity"):
        with torch.no_grad():
            assert_same(stepwise(layer, x, [4, *[1] * 10], CACHES[kind](), mask), layer(x, mask=mask))


@settings(max_examples=40)
@given(data=st.data())
def test_any_option_mask_cache_and_chunks_go_together(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(CACHES)))
    layer, x = made(**data.draw(st.sampled_from(list((OF_WINDOW if kind == "window" else OPTIONS).values())))), text()
    mask = data.draw(st.sampled_from([mask for name, mask in MASKS.items() if name != "prefix"]))
    if kind == "window":
        mask = data.draw(st.sampled_from([NEAR, NEAR & masks.Documents(((5, 9), (8, 3, 3)))]))
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1))))
    chunks = [stop - first for first, stop in zip([0, *cuts], [*cuts, LENGTH], strict=True)]
    with torch.no_grad():
        assert_same(stepwise(layer, x, chunks, CACHES[kind](), mask), layer(x, mask=mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CACHES)
def test_lower_precision_loses_no_more_than_in_one_pass(kind: str, dtype: torch.dtype) -> None:
    exactly = made(num_kv_heads=2, rotary=Rotary(), qk_norm=QKNorm("rms"), sinks=True)
    layer, x = deepcopy(exactly).to(dtype), text()
    with torch.no_grad():
        exact, plain = exactly(x, mask=NEAR), layer(x.to(dtype), mask=NEAR)
        found = stepwise(layer, x.to(dtype), [4, 1, 1, 3, 1, 4], CACHES[kind](), NEAR)
    assert oracle.difference(found, exact) <= 2 * oracle.budget(exact, plain)


class TestSamplesOfDifferentLengths:
    @pytest.mark.parametrize("name", OPTIONS)
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_each_one_goes_on_from_its_own_prompt(self, name: str, side: Any) -> None:
        layer, x, prompts = made(**OPTIONS[name]), text(batch=3), (6, 2, 4)
        for kind, cache_of in CACHES.items():
            if kind == "window" and name not in OF_WINDOW:
                continue
            cache, mask = cache_of(), NEAR if kind == "window" else CAUSAL
            padded = torch.full((3, 6, WIDTH), torch.nan, dtype=torch.float64)
            for sample, length in enumerate(prompts):
                place = slice(0, length) if side == "right" else slice(6 - length, 6)
                padded[sample, place] = x[sample, :length]
            with torch.no_grad():
                first = layer(padded, cache=cache, mask=mask, lengths=prompts, padding_side=side)
                steps = []
                for step in range(5):
                    token = torch.stack([x[sample, length + step] for sample, length in enumerate(prompts)])
                    steps.append(layer(token[:, None], cache=cache, mask=mask))
            for sample, length in enumerate(prompts):
                place = slice(0, length) if side == "right" else slice(6 - length, 6)
                own = torch.cat([first[sample, place], *[step[sample] for step in steps]])
                assert_same(own, layer(x[sample : sample + 1, : length + 5], mask=mask)[0])
                outside = torch.ones(6, dtype=torch.bool)
                outside[place] = False
                assert not first[sample, outside].any()

    def test_a_sample_may_bring_no_token_in_a_step(self) -> None:
        layer, x, cache = made(rotary=Rotary()), text(), KeyValueCache()
        layer(x[:, :3], cache=cache, mask=CAUSAL)
        layer(x[:, 3:5], cache=cache, mask=CAUSAL, lengths=(2, 0))
        found = layer(torch.stack([x[0, 5:8], x[1, 3:6]]), cache=cache, mask=CAUSAL)
        assert_same(found[0], layer(x[:1, :8], mask=CAUSAL)[0, 5:])
        assert_same(found[1], layer(x[1:, :6], mask=CAUSAL)[0, 3:])


@pytest.mark.parametrize("name", ["plain", "rotary", "T5 bias", "all together", "all with a bias"])
def test_gradients_through_all_steps_are_those_of_one_pass(name: str) -> None:
    layer, x = made(**OPTIONS[name]), text().requires_grad_()
    cotangent = torch.randn(2, LENGTH, layer.output_dim, dtype=torch.float64)
    leaves = [x, *layer.parameters()]
    for kind in ("growing", "window"):
        whole = torch.autograd.grad(layer(x, mask=NEAR), leaves, cotangent)
        found = torch.autograd.grad(stepwise(layer, x, [4, 1, 1, 3, 1, 4], CACHES[kind](), NEAR), leaves, cotangent)
        for one, other in zip(found, whole, strict=True):
            assert_same(one, other)


def test_beams_go_on_from_the_samples_they_were_chosen_from() -> None:
    layer, x, cache = made(rotary=Rotary()), text(), KeyValueCache()
    layer(x[:, :6], cache=cache, mask=CAUSAL)
    cache.reorder((1, 0, 1))
    beams = x[[1, 0, 1]]
    beams[:, 6:] = text(batch=3)[:, 6:]
    assert_same(stepwise_on(layer, beams, 6, cache), layer(beams, mask=CAUSAL)[:, 6:])


def test_what_was_taken_back_leaves_no_trace() -> None:
    layer, x, cache = made(rotary=Rotary()), text(), KeyValueCache()
    layer(torch.cat([x[:, :6], text()[:, :3]], 1), cache=cache, mask=CAUSAL)
    cache.crop(6)
    assert_same(stepwise_on(layer, x, 6, cache), layer(x, mask=CAUSAL)[:, 6:])


def stepwise_on(layer: mh.MultiHeadAttention, x: Tensor, first: int, cache: KeyValueCache) -> Tensor:
    return torch.cat([layer(x[:, i : i + 1], cache=cache, mask=CAUSAL) for i in range(first, LENGTH)], 1)


def test_one_text_needs_no_batch() -> None:
    layer, x, cache = made(), text(batch=1)[0], KeyValueCache()
    found = torch.cat([layer(x[:5], cache=cache, mask=CAUSAL), layer(x[5:], cache=cache, mask=CAUSAL)])
    assert_same(found, layer(x, mask=CAUSAL))


class TestCrossAttention:
    @pytest.mark.parametrize(
        "mask", [masks.Full(), CAUSAL, masks.Window(2, after=1), masks.Lengths((7, 4)), masks.Prefix(3)], ids=str
    )
    @pytest.mark.parametrize("name", ["plain", "rotary", "T5 bias", "learned bias", "all together", "all with a bias"])
    def test_step_by_step_gives_what_one_pass_gives(self, mask: masks.Mask, name: str) -> None:
        layer, x, memory = made(**OPTIONS[name]), text(), text(length=9)
        for kind in ("growing", "capacity"):
            cache = CACHES[kind]()
            found = [layer(x[:, i:j], memory, mask=mask, cache=cache) for i, j in ((0, 5), (5, 6), (6, LENGTH))]
            assert_same(torch.cat(found, 1), layer(x, memory, mask=mask, query_start=0))

    def test_the_memory_is_projected_in_the_first_call_only(self) -> None:
        layer, x, memory, cache = made(), text(), text(length=9), KeyValueCache()
        projected: list[tuple[int, ...]] = []
        layer.k_proj.register_forward_hook(lambda _module, given, _output: projected.append(tuple(given[0].shape)))
        for step in range(3):
            layer(x[:, step : step + 1], memory, cache=cache)
        assert projected == [(2, 9, WIDTH)]

    def test_the_memory_is_normalised_in_the_first_call_only(self) -> None:
        layer, x, memory, cache = made(qk_norm=QKNorm()), text(), text(length=9), KeyValueCache()
        keys: list[int] = []
        assert layer.qk_norm is not None
        layer.qk_norm.register_forward_pre_hook(lambda _, given: keys.append(given[1].shape[2]))
        for step in range(3):
            layer(x[:, step : step + 1], memory, cache=cache)
        assert keys == [9, 0, 0]

    def test_padding_of_memory_and_queries_stays_out(self) -> None:
        layer, x, memory, cache = made(rotary=Rotary()), text(), text(length=9), KeyValueCache()
        memory[1, 4:] = torch.nan
        first = layer(x[:, :5], memory, memory_lengths=(9, 4), lengths=(5, 2), cache=cache)
        then = layer(torch.stack([x[0, 5:7], x[1, 2:4]]), memory, memory_lengths=(9, 4), cache=cache)
        for sample, (length, keys) in enumerate(((5, 9), (2, 4))):
            alone = layer(x[sample, : length + 2], memory[sample, :keys], query_start=0)
            assert_same(torch.cat([first[sample, :length], then[sample]]), alone)

    def test_another_memory_length_is_refused(self) -> None:
        layer, x, cache = made(), text(), KeyValueCache()
        layer(x, text(length=9), cache=cache)
        with pytest.raises(ShapeError) as refused:
            layer(x, text(length=8), cache=cache)
        assert str(refused.value) == (
            "memory has 2 samples of 8 keys, and the cache holds a memory of 2 samples of 9 keys. "
            "Give the same memory at each step, or call cache.reset() to start over."
        )

    def test_beams_take_their_memory_with_them(self) -> None:
        layer, x, memory, cache = made(rotary=Rotary()), text(), text(length=9), KeyValueCache()
        layer(x[:, :5], memory, cache=cache)
        cache.reorder((1, 1))
        found = layer(x[:, 5:], memory[[1, 1]], cache=cache)
        assert_same(found, layer(x, memory[[1, 1]], query_start=0)[:, 5:])


class TestRefusals:
    def test_query_start_beside_a_cache(self) -> None:
        with pytest.raises(ArgumentError) as refused:
            made()(text(), cache=KeyValueCache(), query_start=3)
        assert str(refused.value) == (
            "query_start is 3, and a cache is given, which knows the position of the next token. Leave query_start out."
        )

    def test_a_mask_that_looks_behind_the_window(self) -> None:
        cache = KeyValueCache(window=WINDOW)
        with pytest.raises(MaskError) as refused:
            made()(text(), cache=cache, mask=CAUSAL)
        assert str(refused.value) == (
            "Causal() shows all earlier keys, and the cache keeps a window of 4 keys. "
            "Combine it with & masks.Window(4), or use KeyValueCache(), which keeps all keys."
        )
        assert cache.length == 0

    def test_more_tokens_than_the_capacity(self) -> None:
        with torch.no_grad(), pytest.raises(ArgumentError) as refused:
            made()(text(), cache=KeyValueCache(capacity=LENGTH - 1), mask=CAUSAL)
        assert str(refused.value) == (
            "The cache has a capacity of 13 tokens, and this call needs 14. "
            "Use KeyValueCache(capacity=14), or call cache.reset() to start over."
        )


class TestARefusedCall:
    @pytest.mark.parametrize("kind", CACHES)
    @pytest.mark.parametrize("prompt", [0, 3, 9])
    def test_it_leaves_the_cache_as_it_was(self, kind: str, prompt: int) -> None:
        layer, x, cache = made(rotary=Rotary()), text(), CACHES[kind]()
        wrong = masks.Keep(torch.ones(2, 99, dtype=torch.bool), "heads queries")
        with torch.no_grad():
            found = [layer(x[:, :prompt], cache=cache, mask=NEAR)] if prompt else []
            for given in (slice(prompt, prompt + 1), slice(prompt, LENGTH)):
                with pytest.raises(MaskError, match="has 2 heads, and the call has 4"):
                    layer(x[:, given] * torch.nan, cache=cache, mask=NEAR & wrong)
                with pytest.raises(ShapeError, match="head_gates has shape"):
                    layer(x[:, given], cache=cache, mask=NEAR, head_gates=torch.ones(3))
            assert cache.length == prompt
            found.append(layer(x[:, prompt:], cache=cache, mask=NEAR))
            assert_same(torch.cat(found, 1), layer(x, mask=NEAR))

    def test_it_leaves_samples_of_different_lengths_as_they_were(self) -> None:
        layer, x = made(rotary=Rotary()), text()
        for cache_of in CACHES.values():
            cache = cache_of()
            with torch.no_grad():
                layer(x[:, :5], cache=cache, mask=NEAR, lengths=(5, 2))
                with pytest.raises(ShapeError, match="head_gates has shape"):
                    layer(x[:, :4] * torch.nan, cache=cache, mask=NEAR, lengths=(1, 4), head_gates=torch.ones(3))
                assert cache.lengths.tolist() == [5, 2]
                found = layer(torch.stack([x[0, 5:8], x[1, 2:5]]), cache=cache, mask=NEAR)
                for sample, length in enumerate((5, 2)):
                    whole = layer(x[sample : sample + 1, : length + 3], mask=NEAR)[0]
                    assert_same(found[sample], whole[length:])

    def test_it_remembers_no_memory(self) -> None:
        layer, x, cache = made(), text(), KeyValueCache()
        with pytest.raises(ShapeError, match="head_gates has shape"):
            layer(x, text(length=9), cache=cache, head_gates=torch.ones(3))
        assert cache.memory is None
        assert cache.length == 0
        layer(x, text(length=8), cache=cache)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_in_int8_any_chunks_give_the_same(options: dict[str, Any]) -> None:
    layer = mh.MultiHeadAttention(WIDTH, 4, **options, dtype=torch.float64)
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        at_once = layer(x, mask=CAUSAL, cache=KeyValueCache(dtype="int8"))
        cache = KeyValueCache(dtype="int8")
        parts = [layer(part, mask=CAUSAL, cache=cache) for part in x.split([5, 1, 1, 3, 4], 1)]
        exact = layer(x, mask=CAUSAL, cache=KeyValueCache())
    assert float((torch.cat(parts, 1) - at_once).abs().max()) < 1e-12
    assert 0 < float((at_once - exact).abs().max()) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_int8_a_decoding_token_has_the_output_of_one_pass(dtype: torch.dtype) -> None:
    layer = mh.MultiHeadAttention(64, 4, num_kv_heads=2, rotary=Rotary(), dtype=dtype)
    x = torch.randn(2, 200, 64, dtype=dtype)
    cache = KeyValueCache(dtype="int8")
    with torch.no_grad():
        at_once = layer(x, mask=CAUSAL, cache=KeyValueCache(dtype="int8"))
        parts = [layer(part, mask=CAUSAL, cache=cache) for part in x.split([150, *[1] * 50], 1)]
    within = 2e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(torch.cat(parts, 1), at_once, rtol=within, atol=within)


def test_in_int8_a_memory_is_read_by_all_steps_alike() -> None:
    layer = mh.MultiHeadAttention(WIDTH, 4, dtype=torch.float64)
    x, memory = torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    cache = KeyValueCache(dtype="int8")
    with torch.no_grad():
        parts = [layer(part, memory, memory_lengths=(9, 4), cache=cache) for part in x.split([2, 1, 3], 1)]
        at_once = layer(x, memory, memory_lengths=(9, 4), cache=KeyValueCache(dtype="int8"))
        exact = layer(x, memory, memory_lengths=(9, 4))
    assert float((torch.cat(parts, 1) - at_once).abs().max()) < 1e-12
    assert 0 < float((at_once - exact).abs().max()) < 0.1


class Ear:
    """A listener that keeps every call."""

    requested_statistics = frozenset[Any]()

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.calls.append(call)


def test_in_int8_an_observed_layer_records_the_keys_that_it_read() -> None:
    layer = mh.MultiHeadAttention(WIDTH, 4)
    ear = Ear()
    cache = KeyValueCache(dtype="int8")
    x = torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        layer(x[:, :4], mask=CAUSAL, cache=cache)
        quiet = layer(x[:, 4:], mask=CAUSAL, cache=deepcopy(cache))
        with listen(ear):
            watched = layer(x[:, 4:], mask=CAUSAL, cache=cache)
    assert torch.equal(quiet, watched)
    (call,) = ear.calls
    assert call.request.scales is None
    assert call.request.k.dtype == torch.float32
    weights = mh.attention_weights(call.request.q, call.request.k)
    torch.testing.assert_close((weights @ call.request.v), call.result.output, rtol=1e-4, atol=1e-4)
