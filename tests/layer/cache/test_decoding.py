"""Decoding with a cache returns what one pass over the whole sequence returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.kernels.quantised import dequantise, quantise
from multihead.layer.cache import KeyValueCache, buffers
from tests import oracle
from tests.layer.cache.stepping import Text, looked, stepwise, stepwise_apart

LENGTH, WINDOW = 20, 5
CAUSAL, NEAR = masks.Causal(), masks.Causal() & masks.Window(WINDOW)


@pytest.fixture(autouse=True, scope="module")
def _small_buffers() -> Iterator[None]:
    """Buffers that are full every few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers, "INITIAL_SLOTS", 2)
        patch.setattr(buffers, "SPARE_SLOTS", 1)
        yield


def kept(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7


BACKWARD = {  # no token sees a later one, so later tokens change nothing
    "causal": CAUSAL,
    "window": NEAR,
    "documents": CAUSAL & masks.Documents((7, 9, 4)),
    "documents a sample": CAUSAL & masks.Documents(((3, 17), (12, 2, 6))),
    "keep keys": CAUSAL & masks.Keep(kept(2, LENGTH), "batch keys"),
    "keep cells": CAUSAL & masks.Keep(kept(4, LENGTH, LENGTH), "heads queries keys"),
    "drop rows": CAUSAL & masks.Drop(kept(LENGTH), "queries"),
    "lengths to come": CAUSAL & masks.Lengths((15, 18)),
}
AHEAD = {  # tokens see some later ones, which must be in the same step
    "prefix": CAUSAL | masks.Prefix(6),
    "prefix a sample": CAUSAL | masks.Prefix((4, 6)),
}
IN_WINDOW = {
    "window": NEAR,
    "documents in a window": NEAR & masks.Documents((7, 9, 4)),
    "prefix in a window": masks.Window(WINDOW) & (CAUSAL | masks.Prefix((4, 6))),
    "lengths in a window": NEAR & masks.Lengths(torch.tensor([15, 18])),
    "heads in a window": NEAR & masks.Keep(torch.tensor([True, False, True, True]), "heads"),
    "two windows": masks.Window(WINDOW) & (masks.Window(2) | masks.Documents((3, 1, 8, 8))) & CAUSAL,
}
CACHES: dict[str, Callable[[], KeyValueCache]] = {
    "growing": KeyValueCache,
    "capacity": lambda: KeyValueCache(capacity=LENGTH),
}


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> KeyValueCache:
    return CACHES[request.param]()


def assert_same(found: Tensor, whole: Tensor) -> None:
    assert found.shape == whole.shape
    assert float((found - whole).detach().abs().max()) < 1e-12


@pytest.mark.parametrize("mask", BACKWARD.values(), ids=BACKWARD)
def test_token_by_token_equals_one_pass(cache: KeyValueCache, mask: masks.Mask) -> None:
    text = Text.drawn()
    assert_same(stepwise(text, cache, mask, [1] * LENGTH), text.whole(mask))


@pytest.mark.parametrize("mask", (BACKWARD | AHEAD).values(), ids=BACKWARD | AHEAD)
def test_a_prompt_in_chunks_equals_one_pass(cache: KeyValueCache, mask: masks.Mask) -> None:
    text = Text.drawn()
    assert_same(stepwise(text, cache, mask, [6, 7, 1, 1, 5]), text.whole(mask))


@pytest.mark.parametrize("mask", IN_WINDOW.values(), ids=IN_WINDOW)
@pytest.mark.parametrize("chunks", [[1] * LENGTH, [4, 7, 1, 1, 1, 6], [LENGTH - 1, 1]], ids=str)
def test_with_a_window_no_visible_key_is_dropped(mask: masks.Mask, chunks: list[int]) -> None:
    text, cache = Text.drawn(), KeyValueCache(window=WINDOW)
    if "Prefix" in repr(mask) and chunks[0] < 6:
        chunks = [6, *[1] * (LENGTH - 6)]  # a bidirectional prompt must be one step
    assert_same(stepwise(text, cache, mask, chunks), text.whole(mask))


def test_a_window_of_one_token_sees_itself() -> None:
    text, mask = Text.drawn(), CAUSAL & masks.Window(1)
    assert_same(stepwise(text, KeyValueCache(window=1), mask, [1] * LENGTH), text.whole(mask))


@st.composite
def chunkings(draw: Callable[[st.SearchStrategy[Any]], Any], total: int) -> list[int]:
    chunks: list[int] = []
    while sum(chunks) < total:
        chunks.append(draw(st.integers(1, total - sum(chunks))))
    return chunks


@settings(max_examples=40)
@given(chunks=chunkings(LENGTH), data=st.data())
def test_any_chunking_equals_one_pass(chunks: list[int], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(("growing", "capacity", "window")))
    mask = data.draw(st.sampled_from(list((IN_WINDOW if kind == "window" else BACKWARD).values())))
    if "Prefix" in repr(mask):
        mask = NEAR
    cache = KeyValueCache(window=WINDOW) if kind == "window" else CACHES[kind]()
    text = Text.drawn()
    assert_same(stepwise(text, cache, mask, chunks), text.whole(mask))


@settings(max_examples=40)
@given(data=st.data())
def test_any_chunking_of_samples_of_different_lengths_equals_one_pass(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(("growing", "capacity", "window")))
    cache = KeyValueCache(window=WINDOW) if kind == "window" else CACHES[kind]()
    mask = data.draw(st.sampled_from([NEAR, IN_WINDOW["documents in a window"], IN_WINDOW["heads in a window"]]))
    mask = mask if kind == "window" else data.draw(st.sampled_from([mask, CAUSAL, BACKWARD["documents a sample"]]))
    counts = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=5))
    text = Text.drawn()
    found, done = stepwise_apart(text, cache, mask, counts)
    whole = text.whole(mask)
    for sample, stop in enumerate(done):
        assert_same(found[sample, :, :stop], whole[sample, :, :stop]) if stop else None
    if counts:
        assert cache.lengths.tolist() == done


@pytest.mark.parametrize("kind", ["growing", "capacity", "window"])
def test_a_batch_of_different_prompts_continues_token_by_token(kind: str) -> None:
    cache = KeyValueCache(window=WINDOW) if kind == "window" else CACHES[kind]()
    text = Text.drawn(batch=3)
    found, done = stepwise_apart(text, cache, NEAR, [(8, 1, 0), *[(1, 1, 1)] * 12])
    assert done == [20, 13, 12]
    for sample, stop in enumerate(done):
        assert_same(found[sample, :, :stop], text.whole(NEAR)[sample, :, :stop])


@pytest.mark.parametrize("options", [{}, {"capacity": 130}, {"window": 30}], ids=str)
def test_a_long_text_in_float32_stays_within_the_budget(options: dict[str, int]) -> None:
    mask = CAUSAL & masks.Window(30)
    text = Text.drawn(length=130, dtype=torch.float32)
    exact = Text(text.q.double(), text.k.double(), text.v.double()).whole(mask)
    seen = oracle.shown(mask, (2, 4, 130, 130), 0)
    plain = oracle.attend(text.q, text.k, text.v, seen).output
    found = stepwise(text, KeyValueCache(**options), mask, [17, *[1] * 60, 40, *[1] * 13])
    assert oracle.difference(found, exact) <= oracle.budget(exact, plain)


@pytest.mark.parametrize("kind", ["growing", "window"])
def test_gradients_through_all_steps_are_those_of_one_pass(kind: str) -> None:
    text, mask = Text.drawn(), NEAR
    leaves = [tensor.requires_grad_() for tensor in (text.q, text.k, text.v)]
    cotangent = torch.randn(2, 4, LENGTH, 5, dtype=torch.float64)
    whole = torch.autograd.grad(text.whole(mask), leaves, cotangent)
    cache = KeyValueCache(window=WINDOW) if kind == "window" else KeyValueCache()
    found = torch.autograd.grad(stepwise(text, cache, mask, [6, 1, 1, 9, 1, 2]), leaves, cotangent)
    for one, other in zip(found, whole, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("kind", ["growing", "window"])
def test_gradients_of_samples_of_different_lengths_are_those_of_one_pass(kind: str) -> None:
    text, mask = Text.drawn(), NEAR
    leaves = [tensor.requires_grad_() for tensor in (text.q, text.k, text.v)]
    cotangent = torch.randn(2, 4, LENGTH, 5, dtype=torch.float64)
    cotangent[1, :, 12:] = 0  # the second sample stops there
    whole = torch.autograd.grad(text.whole(mask), leaves, cotangent)
    cache = KeyValueCache(window=WINDOW) if kind == "window" else KeyValueCache()
    output, done = stepwise_apart(text, cache, mask, [(6, 3), (1, 1), (9, 0), (1, 1), (3, 7)])
    assert done == [20, 12]
    for one, other in zip(torch.autograd.grad(output, leaves, cotangent), whole, strict=True):
        assert_same(one, other)


def test_a_sequence_started_with_gradients_continues_without_them() -> None:
    text, cache = Text.drawn(), KeyValueCache()
    text.k.requires_grad_()
    first = stepwise(text.part(slice(0, 5)), cache, CAUSAL, [4, 1])
    with torch.no_grad():
        later = stepwise(text.part(slice(5, 8)), cache, CAUSAL, [1, 1, 1])
    assert_same(torch.cat([first, later], 2), text.whole(CAUSAL)[:, :, :8])
    (gradient,) = torch.autograd.grad(first.sum(), text.k)
    assert gradient[:, :, :5].any()


def test_cropped_speculative_tokens_leave_no_trace() -> None:
    text, other = Text.drawn(), Text.drawn()
    for options in ({}, {"capacity": LENGTH}, {"window": WINDOW}):
        cache = KeyValueCache(**options)
        outputs = [stepwise(text.part(slice(0, 6)), cache, NEAR, [6])]
        for first in range(6, LENGTH, 2):
            wrong = other.part(slice(0, 1))
            cache.extend(wrong.k, wrong.v)
            cache.crop(first)
            outputs.append(stepwise(text.part(slice(first, first + 2)), cache, NEAR, [2]))
        assert_same(torch.cat(outputs, 2), text.whole(NEAR))


def test_beams_continue_the_samples_they_were_selected_from() -> None:
    text, chosen = Text.drawn(), torch.tensor([1, 1, 0])
    for options in ({}, {"capacity": LENGTH}, {"window": WINDOW}):
        cache = KeyValueCache(**options)
        stepwise(text.part(slice(0, 9)), cache, NEAR, [8, 1])
        cache.reorder(chosen)
        beams = Text(text.q[chosen], text.k[chosen], text.v[chosen])
        found = stepwise(beams.part(slice(9, LENGTH)), cache, NEAR, [1] * (LENGTH - 9))
        assert_same(found, beams.whole(NEAR)[:, :, 9:])


def test_nan_in_padding_reaches_neither_output_nor_gradient() -> None:
    text, cache = Text.drawn(), KeyValueCache()
    leaves = [tensor.requires_grad_() for tensor in (text.k, text.v)]
    output, _ = stepwise_apart(text, cache, CAUSAL, [(5, 2), (1, 4)])
    assert output.isfinite().all()
    assert all(each.isfinite().all() for each in torch.autograd.grad(output.sum(), leaves))


def test_a_nan_in_a_token_reaches_only_the_queries_that_see_it() -> None:
    text, cache = Text.drawn(), KeyValueCache(window=WINDOW)
    text.k[0, :, 3] = torch.nan
    found = stepwise(text, cache, NEAR, [2, 1, 1, 1, 10, 5])
    bad = found.isnan().any(-1).any(1)  # (batch, queries)
    assert bad[0].nonzero().flatten().tolist() == [3, 4, 5, 6, 7]
    assert not bad[1].any()


def rounded(text: Text) -> Text:
    """The text whose keys and values are those that a cache in int8 holds."""

    def of(tensor: Tensor) -> Tensor:
        integers, scale = quantise(tensor)
        return dequantise(integers, scale[..., 0], tensor.dtype)

    return Text(text.q, of(text.k), of(text.v))


@pytest.mark.parametrize("mask", BACKWARD.values(), ids=BACKWARD)
def test_in_int8_token_by_token_equals_one_pass_over_the_rounded_keys(mask: masks.Mask) -> None:
    text = Text.drawn(length=LENGTH)
    for options in ({}, {"capacity": LENGTH}):
        cache = KeyValueCache(**options, dtype="int8")
        assert_same(stepwise(text, cache, mask, [3, *[1] * (LENGTH - 3)]), rounded(text).whole(mask))


@pytest.mark.parametrize("mask", IN_WINDOW.values(), ids=IN_WINDOW)
def test_in_int8_with_a_window_equals_one_pass_over_the_rounded_keys(mask: masks.Mask) -> None:
    text = Text.drawn(length=LENGTH)
    cache = KeyValueCache(window=WINDOW, dtype="int8")
    assert_same(stepwise(text, cache, mask, [1] * LENGTH), rounded(text).whole(mask))


def test_in_int8_samples_of_different_lengths_equal_one_pass_over_the_rounded_keys() -> None:
    text = Text.drawn(length=LENGTH)
    found, done = stepwise_apart(text, KeyValueCache(dtype="int8"), CAUSAL, [(5, 2), (1, 1), (0, 3), (1, 1)])
    whole = rounded(text).whole(CAUSAL)
    for sample, length in enumerate(done):
        assert_same(found[sample, :, :length], whole[sample, :, :length])


def test_in_int8_cropped_and_reordered_samples_continue_with_their_own_scales() -> None:
    text = Text.drawn(length=LENGTH)
    cache = KeyValueCache(dtype="int8")
    stepwise(text, cache, CAUSAL, [9])
    cache.crop(6)
    cache.reorder([1, 1, 0])
    beams = Text(*(tensor[[1, 1, 0]] for tensor in (text.q, text.k, text.v)))
    rest = beams.part(slice(6, 8))
    held = cache.extend(rest.k, rest.v)
    assert_same(looked(rest.q, held, CAUSAL), rounded(beams.part(slice(0, 8))).whole(CAUSAL)[:, :, 6:])
