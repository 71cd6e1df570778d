"""The cache itself: its properties, crop, reorder, rollback, cross-attention memory and rejected arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError, DtypeError, MaskError, ShapeError
from multihead.kernels.quantised import dequantise
from multihead.layer.cache import KeyValueCache
from multihead.layer.cache.buffers import SPARE_SLOTS, CachedKeyValues


def tokens(count: int, *, batch: int = 2, dim: int = 4) -> Tensor:
    return torch.randn(batch, 3, count, dim)


def step(cache: KeyValueCache, count: int = 1, **options: Any) -> CachedKeyValues:
    return cache.extend(tokens(count), tokens(count, dim=5), **options)


@pytest.fixture(params=[{}, {"capacity": 400}, {"window": 6}], ids=str)
def cache(request: pytest.FixtureRequest) -> KeyValueCache:
    return KeyValueCache(**request.param)


class TestProperties:
    def test_an_empty_cache_starts_at_the_first_position(self, cache: KeyValueCache) -> None:
        assert (cache.query_start, cache.length, cache.lengths.tolist(), cache.nbytes) == (0, 0, [], 0)

    def test_positions_count_all_tokens(self, cache: KeyValueCache) -> None:
        step(cache, 200)
        step(cache)
        assert (cache.query_start, cache.length, cache.lengths.tolist()) == (201, 201, [201, 201])

    def test_samples_of_different_lengths_have_a_position_each(self, cache: KeyValueCache) -> None:
        step(cache, 200, lengths=(200, 150))
        held = step(cache)
        assert isinstance(cache.query_start, Tensor)
        assert (cache.query_start.tolist(), cache.length, cache.lengths.tolist()) == ([201, 151], 201, [201, 151])
        assert isinstance(held.query_start, Tensor)
        assert (held.query_start + held.key_start).tolist() == [200, 150]

    def test_lengths_without_padding_keep_an_int_position(self, cache: KeyValueCache) -> None:
        assert step(cache, 3, lengths=(3, 3)).query_start == 0
        assert step(cache, 2, lengths=torch.tensor([2, 2])).query_start == 3
        assert isinstance(step(cache, 2, lengths=(2, 1)).query_start, Tensor)

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            ({}, "KeyValueCache(): 5 tokens, 2 samples, 14,040 bytes"),
            ({"capacity": 9}, "KeyValueCache(capacity=9): 5 tokens, 2 samples, 2,160 bytes"),
            ({"window": 3}, "KeyValueCache(window=3): 5 tokens, 2 samples, 29,160 bytes"),
        ],
    )
    def test_its_repr_shows_its_content(self, options: dict[str, int], expected: str) -> None:
        cache = KeyValueCache(**options)
        assert repr(cache) == expected.split(":", maxsplit=1)[0] + ": empty"
        step(cache, 5)
        assert repr(cache) == expected

    def test_its_repr_shows_the_range_of_lengths(self) -> None:
        cache = KeyValueCache(capacity=9)
        step(cache, 5, lengths=(2, 5))
        assert repr(cache) == "KeyValueCache(capacity=9): 2 to 5 tokens, 2 samples, 2,160 bytes"

    def test_a_copy_continues_independently(self, cache: KeyValueCache) -> None:
        held = step(cache, 5)
        for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            assert repr(copied) == repr(cache)
            again = step(copied)
            assert again.k[:, :, :5].equal(held.k)
            assert (copied.query_start, cache.query_start) == (6, 5)

    def test_gradients_flow_through_a_copy(self) -> None:
        cache, k = KeyValueCache(), tokens(5).requires_grad_()
        cache.extend(k, tokens(5, dim=5))
        copy.deepcopy(cache).extend(tokens(1), tokens(1, dim=5)).k.sum().backward()
        assert k.grad is not None
        assert k.grad.eq(1).all()
        other = KeyValueCache()
        other.store_memory(k * 2, tokens(5, dim=5))
        memory = copy.deepcopy(other).memory
        assert memory is not None
        assert torch.autograd.grad(memory.k.sum(), k)[0].eq(2).all()

    def test_calls_that_continue_one_another_share_a_sequence(self, cache: KeyValueCache) -> None:
        assert cache.last_call_position is None
        step(cache, 5)
        first = cache.last_call_position
        step(cache, 200, lengths=(200, 3))
        then = cache.last_call_position
        assert first is not None
        assert then is not None
        assert then.sequence is first.sequence
        assert then.lengths is not None
        assert then.lengths.tolist() == [200, 3]
        for change in (lambda: cache.crop((204, 8)), lambda: cache.reorder((1, 0)), cache.reset):
            change()
            assert cache.last_call_position is None
            step(cache)
            assert cache.last_call_position is not None
            assert cache.last_call_position.sequence is not then.sequence
            then = cache.last_call_position

    def test_queries_of_a_cross_attention_have_a_position(self, cache: KeyValueCache) -> None:
        cache.store_memory(tokens(7), tokens(7, dim=5))
        cache.advance(5)
        cache.advance(1)
        assert cache.last_call_position is not None
        assert cache.last_call_position.first_query == 5

    def test_it_moves_to_a_device(self, cache: KeyValueCache) -> None:
        step(cache, 5, lengths=(2, 5))
        assert cache.to("cpu") is cache
        assert cache.to("meta").lengths.device.type == "meta"

    def test_an_empty_cache_moves_to_a_device(self, cache: KeyValueCache) -> None:
        assert cache.to("meta").query_start == 0


class TestCrop:
    def test_cropped_tokens_leave_no_trace(self, cache: KeyValueCache) -> None:
        step(cache, 200)
        k, v = tokens(9), tokens(9, dim=5)
        first = cache.extend(k, v)
        cache.crop(203)
        again = cache.extend(k[:, :, 3:], v[:, :, 3:])
        assert again.query_start + again.key_start == 203
        keys = again.k.shape[2] - 1
        assert again.k[:, :, -keys:].equal(first.k[:, :, -keys:])

    def test_each_sample_can_be_cropped_to_its_own_length(self, cache: KeyValueCache) -> None:
        step(cache, 20)
        cache.crop((18, 20))
        assert cache.lengths.tolist() == [18, 20]
        held = step(cache)
        assert held.lengths is not None
        assert (held.lengths + held.key_start).tolist() == [19, 21]
        assert not held.k[0, :, 19:].any()

    def test_samples_shorter_than_the_length_keep_all_tokens(self, cache: KeyValueCache) -> None:
        step(cache, 20, lengths=(20, 7))
        cache.crop(15)
        assert cache.lengths.tolist() == [15, 7]

    def test_keeping_everything_copies_nothing(self) -> None:
        cache = KeyValueCache()
        place = step(cache, 20).k.data_ptr()
        cache.crop(20)
        assert step(cache).k.data_ptr() == place

    def test_with_a_window_some_tokens_can_be_removed_at_any_time(self) -> None:
        cache = KeyValueCache(window=6)
        for _ in range(300):
            step(cache, SPARE_SLOTS)
            cache.crop(cache.length - SPARE_SLOTS + 1)
        assert cache.length == 300

    def test_with_a_window_cropping_to_dropped_keys_is_rejected(self) -> None:
        cache = KeyValueCache(window=6)
        step(cache, 2000)
        with pytest.raises(ArgumentError) as refused:
            cache.crop(1000)
        assert str(refused.value) == (
            "The next query would see keys that the cache has dropped: with a window, only the last 64 tokens can be "
            "removed. Remove fewer tokens, or use KeyValueCache(), which keeps all of them."
        )
        assert cache.length == 2000

    @pytest.mark.parametrize(
        ("length", "sentence"),
        [
            (6, "length is 6, and there are 5 tokens. Give at most 5."),
            (-1, "length is -1. Give an integer of at least 0."),
            ((1, 9), "length holds 9, and there are 5 tokens. Give numbers from 0 to 5."),
        ],
    )
    def test_invalid_lengths_are_rejected(self, length: int | tuple[int, int], sentence: str) -> None:
        cache = KeyValueCache()
        step(cache, 5)
        with pytest.raises(ArgumentError) as refused:
            cache.crop(length)
        assert str(refused.value) == sentence

    def test_an_empty_cache_has_nothing_to_crop(self) -> None:
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache().crop(0)
        assert str(refused.value) == "The cache is empty. Crop it after the first call."


def refuse(cache: KeyValueCache, k: Tensor, v: Tensor) -> None:
    """Append tokens in a context that ends in an error."""
    with cache.rollback_on_error():
        cache.extend(k, v)
        raise ValueError("refused")


class TestRollback:
    def test_appended_tokens_are_removed_and_leave_no_trace(self, cache: KeyValueCache) -> None:
        first = step(cache, 5, lengths=(5, 3))
        with pytest.raises(ValueError, match="refused"):
            refuse(cache, torch.full((2, 3, 90, 4), torch.nan), tokens(90, dim=5))
        assert cache.lengths.tolist() == [5, 3]
        held = step(cache, 2, lengths=(2, 0))
        assert held.k[:, :, :3].equal(first.k[:, :, :3])
        assert held.k.isfinite().all()

    def test_a_failed_first_call_leaves_the_cache_empty(self, cache: KeyValueCache) -> None:
        with pytest.raises(ValueError, match="refused"):
            refuse(cache, tokens(5), tokens(5, dim=5))
        assert repr(cache).endswith(": empty")
        assert cache.last_call_position is None

    def test_a_call_without_an_error_stays(self, cache: KeyValueCache) -> None:
        with cache.rollback_on_error():
            step(cache, 5)
        assert cache.length == 5


class TestReorder:
    def test_a_sample_continues_the_one_it_was_selected_from(self, cache: KeyValueCache) -> None:
        first = step(cache, 5, lengths=(5, 3))
        cache.reorder((1, 1, 0))
        held = cache.extend(tokens(1, batch=3), tokens(1, batch=3, dim=5))
        assert held.k[:, :, :3].equal(first.k[[1, 1, 0], :, :3])
        assert cache.lengths.tolist() == [4, 4, 6]

    def test_tokens_of_the_samples_before_are_rejected(self, cache: KeyValueCache) -> None:
        step(cache)
        step(cache)
        cache.reorder((1, 1, 0))
        with pytest.raises(ShapeError) as refused:
            step(cache)
        assert str(refused.value) == (
            "k has shape (2, 3, 1, 4), and the cache holds 3 samples of 3 heads with 4 features. "
            "Give (3, 3, new tokens, 4), or call cache.reset() to start over."
        )

    def test_keys_returned_before_stay_the_same(self, cache: KeyValueCache) -> None:
        first = step(cache, 5)
        copied = first.k.clone()
        cache.reorder(torch.tensor([1, 0]))
        step(cache)
        assert first.k.equal(copied)

    @pytest.mark.parametrize(
        ("index", "sentence"),
        [
            ((0, 2), "index is [0, 2], and there are 2 samples. Give numbers from 0 to 1."),
            ((0.0, 1.0), "index is (0.0, 1.0). Give integers: for each new sample, the index of the old sample."),
            ([[0], [1]], "index is [[0], [1]]. Give integers: for each new sample, the index of the old sample."),
        ],
    )
    def test_invalid_indices_are_rejected(self, index: Any, sentence: str) -> None:
        cache = KeyValueCache()
        step(cache)
        with pytest.raises(ArgumentError) as refused:
            cache.reorder(index)
        assert str(refused.value) == sentence

    def test_an_empty_cache_has_nothing_to_reorder(self) -> None:
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache().reorder((0,))
        assert str(refused.value) == "The cache is empty. Reorder it after the first call."


class TestMemory:
    def test_it_is_stored_and_reordered(self) -> None:
        cache, k, v = KeyValueCache(), tokens(7), tokens(7, dim=5)
        assert cache.memory is None
        memory = cache.store_memory(k, v, torch.tensor([7, 4]))
        assert cache.memory is memory
        assert memory.k.equal(k)
        assert memory.lengths is not None
        cache.reorder((1,))
        assert cache.memory is not None
        assert cache.memory.lengths is not None
        assert cache.memory.lengths.tolist() == [4]
        assert cache.memory.v.equal(v[1:])
        assert repr(cache) == "KeyValueCache(): 0 tokens, a memory of 7, 1 sample, 756 bytes"
        assert cache.to("meta").memory is not None

    def test_queries_without_new_keys_are_counted(self, cache: KeyValueCache) -> None:
        cache.store_memory(tokens(7), tokens(7, dim=5))
        assert [cache.advance(5), cache.advance(1), cache.query_start] == [0, 5, 6]
        cache.crop(4)
        start = cache.advance(2, lengths=(2, 1))
        assert isinstance(start, Tensor)
        assert (start.tolist(), cache.lengths.tolist()) == ([4, 4], [6, 5])

    def test_a_memory_of_another_length_is_rejected(self) -> None:
        cache = KeyValueCache()
        cache.check_same_memory(torch.zeros(2, 9, 16))
        cache.store_memory(tokens(7), tokens(7, dim=5))
        cache.check_same_memory(torch.zeros(2, 7, 16))
        with pytest.raises(ShapeError) as refused:
            cache.check_same_memory(torch.zeros(2, 9, 16))
        assert str(refused.value) == (
            "memory has 2 samples of 9 keys, and the cache holds a memory of 2 samples of 7 keys. "
            "Give the same memory at each step, or call cache.reset() to start over."
        )

    def test_a_cache_serves_one_attention(self) -> None:
        cache = KeyValueCache()
        cache.store_memory(tokens(7), tokens(7, dim=5))
        with pytest.raises(ArgumentError) as refused:
            step(cache)
        assert str(refused.value) == (
            "The cache holds the memory of a cross-attention, and extend() adds keys of a self-attention. "
            "Use a separate cache for each attention."
        )
        cache.reset()
        step(cache)
        with pytest.raises(ArgumentError) as refused:
            cache.store_memory(tokens(7), tokens(7, dim=5))
        assert str(refused.value) == (
            "The cache is in use. Use a separate cache for each attention, or call cache.reset() to start over."
        )

    def test_an_empty_cache_counts_no_queries(self) -> None:
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache().advance(1)
        assert str(refused.value) == "The cache is empty. Advance it after the first call."


class TestRefusals:
    def test_capacity_and_window_together(self) -> None:
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache(capacity=9, window=3)
        assert str(refused.value) == (
            "capacity is 9 and window is 3. "
            "Give one of them: a cache with a window already has bounded memory, about two windows."
        )

    @pytest.mark.parametrize("options", [{"capacity": 0}, {"window": 0}, {"window": True}], ids=str)
    def test_no_room_at_all(self, options: dict[str, int]) -> None:
        ((name, value),) = options.items()
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache(**options)
        assert str(refused.value) == f"{name} is {value!r}. Give an integer of at least 1."

    def test_keys_without_values(self) -> None:
        with pytest.raises(ShapeError) as refused:
            KeyValueCache().extend(tokens(2), tokens(1, dim=5))
        assert str(refused.value) == "k has 2 new tokens and v has 1. Give one value per key."

    def test_another_batch_than_before_until_it_is_reset(self, cache: KeyValueCache) -> None:
        step(cache)
        other = tokens(1, batch=3), tokens(1, batch=3, dim=5)
        with pytest.raises(ShapeError, match="the cache holds 2 samples of 3 heads"):
            cache.extend(*other)
        cache.reset()
        assert cache.extend(*other).k.shape == (3, 3, 1, 4)


class TestMasksWithAWindow:
    @pytest.mark.parametrize(
        "mask",
        [
            masks.Window(4),
            masks.Causal() & masks.Window(3),
            masks.Causal() & masks.Window(4) & masks.Documents((9, 100)),
            masks.Window(4) & (masks.Causal() | masks.Prefix(2)),
            masks.Window(4) & masks.Keep(torch.tensor([True, False]), "heads"),
        ],
        ids=str,
    )
    def test_masks_within_the_window_are_accepted(self, mask: masks.Mask) -> None:
        KeyValueCache(window=4).check_window_fits_mask(mask)

    @pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Causal() | masks.Window(4)], ids=str)
    def test_masks_with_unbounded_lookback_are_rejected(self, mask: masks.Mask) -> None:
        with pytest.raises(MaskError) as refused:
            KeyValueCache(window=4).check_window_fits_mask(mask)
        assert str(refused.value) == (
            f"{mask!r} shows all earlier keys, and the cache keeps a window of 4 keys. "
            "Combine it with & masks.Window(4), or use KeyValueCache(), which keeps all keys."
        )
        KeyValueCache().check_window_fits_mask(mask)

    def test_a_lookback_beyond_the_window_is_rejected(self) -> None:
        with pytest.raises(MaskError) as refused:
            KeyValueCache(window=4).check_window_fits_mask(masks.Window(5))
        assert str(refused.value) == (
            "Window(5) shows the last 5 keys, and the cache keeps a window of 4 keys. "
            "Combine it with & masks.Window(4), or use KeyValueCache(), which keeps all keys."
        )

    def test_a_column_per_key_is_rejected(self) -> None:
        mask = masks.Window(4) & masks.Drop(torch.zeros(9, dtype=torch.bool), "keys")
        with pytest.raises(MaskError) as refused:
            KeyValueCache(window=4).check_window_fits_mask(mask)
        assert str(refused.value) == (
            "Window(4) & Drop(<bool tensor (9,)>, 'keys') has a column per key, and a cache with a window drops keys. "
            "Use KeyValueCache(), which keeps all keys."
        )


class TestInt8:
    def test_it_takes_a_byte_per_element_and_a_scale_per_token_and_head(self) -> None:
        cache = KeyValueCache(capacity=9, dtype="int8")
        step(cache, 3)
        assert cache.nbytes == 10 * 2 * 3 * (4 + 5 + 4 + 4)
        assert repr(cache) == "KeyValueCache(capacity=9, dtype='int8'): 3 tokens, 2 samples, 1,020 bytes"

    @pytest.mark.parametrize("options", [{}, {"capacity": 400}, {"window": 6}], ids=str)
    def test_returned_keys_are_within_half_a_scale(self, options: dict[str, int]) -> None:
        cache, k, v = KeyValueCache(**options, dtype="int8"), tokens(5), tokens(5, dim=5)
        held = cache.extend(k, v)
        assert held.scales is not None
        for integers, scale, exact in ((held.k, held.scales.k, k), (held.v, held.scales.v, v)):
            assert integers.dtype == torch.int8
            error = (dequantise(integers, scale, torch.float32) - exact).abs()
            assert bool((error <= 0.501 * scale[..., None]).all())

    def test_a_failed_call_leaves_no_trace(self) -> None:
        cache = KeyValueCache(dtype="int8")
        step(cache, 3)
        before = cache.nbytes
        with pytest.raises(ValueError, match="refused"):
            refuse(cache, tokens(200), tokens(200, dim=5))
        assert (cache.length, cache.nbytes) == (3, before)

    def test_a_copy_and_a_pickle_continue(self) -> None:
        cache = KeyValueCache(dtype="int8")
        step(cache, 3)
        for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
            held = step(other)
            assert held.scales is not None
            assert held.scales.v.shape == (2, 3, 4)
        assert cache.length == 3

    def test_a_memory_is_stored_in_int8(self) -> None:
        cache = KeyValueCache(dtype="int8")
        memory = cache.store_memory(tokens(7), tokens(7, dim=5))
        assert memory.k.dtype == torch.int8
        assert memory.scales is not None
        assert cache.nbytes == 7 * 2 * 3 * (4 + 5 + 4 + 4)
        cache.reorder([1, 1, 0])
        assert cache.memory is not None
        assert cache.memory.scales is not None
        assert torch.equal(cache.memory.scales.k, memory.scales.k[[1, 1, 0]])

    @pytest.mark.parametrize("given", ["int4", torch.int8, 8])
    def test_another_dtype_is_rejected(self, given: Any) -> None:
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache(dtype=given)
        assert str(refused.value) == (
            f'dtype is {given!r}. Give "int8", or leave it out to store keys and values as they are.'
        )

    def test_a_gradient_is_rejected_and_nothing_is_written(self) -> None:
        cache = KeyValueCache(dtype="int8")
        step(cache, 3)
        sentence = (
            'A gradient flows through a cache with dtype="int8", which rounds keys and values. '
            "Run it under torch.no_grad(), or use KeyValueCache(), which keeps them as they are."
        )
        with pytest.raises(ArgumentError) as refused:
            cache.extend(tokens(1).requires_grad_(), tokens(1, dim=5))
        assert str(refused.value) == sentence
        assert cache.length == 3
        with pytest.raises(ArgumentError) as refused:
            KeyValueCache(dtype="int8").store_memory(tokens(1), tokens(1, dim=5).requires_grad_())
        assert str(refused.value) == sentence
        with torch.no_grad():
            cache.extend(tokens(1).requires_grad_(), tokens(1, dim=5))
        assert cache.length == 4

    def test_keys_of_another_dtype_than_before_are_rejected(self) -> None:
        cache = KeyValueCache(dtype="int8")
        step(cache, 3)
        with pytest.raises(DtypeError) as refused:
            cache.extend(tokens(1).bfloat16(), tokens(1, dim=5).bfloat16())
        assert str(refused.value) == (
            "k is torch.bfloat16 on cpu, and the cache holds torch.float32 on cpu. "
            "Convert it, move the cache with cache.to(device), or call cache.reset() to start over."
        )
