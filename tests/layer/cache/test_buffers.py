"""Buffers that are filled step by step: returned keys never change, and buffers grow as configured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.layer.cache import buffers
from multihead.layer.cache.buffers import CachedKeyValues, KeyValueBuffers, check_token_counts, copy_slots, write_slots


def tokens(count: int, *, batch: int = 2, dim: int = 4, **options: Any) -> Tensor:
    return torch.randn(batch, 3, count, dim, **options)


def filled(*counts: int, **options: Any) -> tuple[KeyValueBuffers, list[CachedKeyValues], Tensor]:
    """Return buffers filled in steps of these numbers of tokens, the results of the steps, and all keys."""
    options = {"capacity": None, "window": None} | options
    found = KeyValueBuffers(tokens(1), tokens(1, dim=5), **options)
    keys = [tokens(count) for count in counts]
    return found, [found.extend(k, tokens(k.shape[2], dim=5), None) for k in keys], torch.cat(keys, 2)


@pytest.fixture(params=[{}, {"capacity": 400}, {"window": 6}], ids=str)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def test_all_keys_so_far_are_returned_with_the_position_of_the_first_new_one() -> None:
    for option in ({}, {"capacity": 9}):
        _, held, keys = filled(5, 1, 3, **option)
        assert [each.query_start for each in held] == [0, 5, 6]
        assert [each.lengths for each in held] == [None] * 3
        for each, stop in zip(held, (5, 6, 9), strict=True):
            assert each.k.equal(keys[:, :, :stop])
            assert each.v.shape == (2, 3, stop, 5)


def test_with_a_window_the_keys_that_the_first_new_token_sees_are_returned() -> None:
    _, held, keys = filled(5, 1, 3, 1, window=3)
    assert [(each.key_start, each.query_start) for each in held] == [(0, 0), (3, 2), (4, 2), (7, 2)]
    for each, first, stop in zip(held, (0, 3, 4, 7), (5, 6, 9, 10), strict=True):
        assert each.k.equal(keys[:, :, first:stop])


def test_returned_keys_never_change(options: dict[str, Any]) -> None:
    found, held, _ = filled(30, 1, 40, 1, 1, 200, 1, 90, 1, **options)
    copies = [(each.k.clone(), each.v.clone()) for each in held]
    for _ in range(10):
        found.extend(tokens(1), tokens(1, dim=5), None)
    found.crop(3)
    found.extend(tokens(9), tokens(9, dim=5), None)
    for each, (k, v) in zip(held, copies, strict=True):
        assert each.k.equal(k)
        assert each.v.equal(v)


def test_a_growing_buffer_doubles_and_a_capacity_stays() -> None:
    found, _, _ = filled(*[1] * 70)
    assert found.tensors[0].shape[2] == 2 * buffers.INITIAL_SLOTS + 1
    found, held, _ = filled(*[1] * 70, capacity=70)
    assert found.tensors[0].shape[2] == 71
    assert {each.k.data_ptr() for each in held} == {found.tensors[0].data_ptr()}


def test_with_a_window_the_memory_does_not_grow_with_the_length() -> None:
    found, _, _ = filled(3, *[1] * 600, window=6)
    assert found.tensors[0].shape[2] == 2 * (6 + buffers.SPARE_SLOTS) + 1
    found.extend(tokens(5000), tokens(5000, dim=5), None)
    assert found.tensors[0].shape[2] == 2 * (6 + buffers.SPARE_SLOTS) + 1
    assert found.slot_counts.next_position == 5603


def test_slots_not_yet_written_are_zeros() -> None:
    found, _, _ = filled(3)
    held = found.extend(tokens(2), tokens(2, dim=5), torch.tensor([2, 0]))
    assert held.lengths is not None
    assert held.lengths.tolist() == [5, 3]
    assert not held.k[1, :, 3:].any()
    assert not found.tensors[0][:, :, 5:].any()


def test_more_than_the_capacity_is_rejected_and_nothing_is_written() -> None:
    found, _, keys = filled(4, capacity=5)
    with pytest.raises(ArgumentError) as refused:
        found.extend(tokens(3), tokens(3, dim=5), None)
    assert str(refused.value) == (
        "The cache has a capacity of 5 tokens, and this call needs 7. "
        "Use KeyValueCache(capacity=7), or call cache.reset() to start over."
    )
    assert found.extend(tokens(1), tokens(1, dim=5), None).k[:, :, :4].equal(keys)


def test_padding_may_exceed_the_capacity() -> None:
    found, _, keys = filled(4, capacity=5)
    new = tokens(3)
    held = found.extend(new, tokens(3, dim=5), torch.tensor([1, 0]))
    assert held.k[0, :, 4].equal(new[0, :, 0])
    assert held.k[:, :, :4].equal(keys)
    assert not held.k[1, :, 4].any()


def test_a_gradient_through_a_capacity_is_rejected() -> None:
    found, _, _ = filled(4, capacity=9)
    with pytest.raises(ArgumentError) as refused:
        found.extend(tokens(1, requires_grad=True), tokens(1, dim=5), None)
    assert str(refused.value) == (
        "A gradient flows through a cache with a capacity, which is written in place. Run it under torch.no_grad(), or "
        "use KeyValueCache(), which concatenates keys where gradients flow."
    )
    with torch.no_grad():
        found.extend(tokens(1, requires_grad=True), tokens(1, dim=5), None)


def test_a_sequence_started_in_inference_mode_continues_outside_of_it(options: dict[str, Any]) -> None:
    with torch.inference_mode():
        found, _, keys = filled(3, **options)
    held = found.extend(tokens(1), tokens(1, dim=5), None)
    assert held.k[:, :, :3].equal(keys)
    with torch.inference_mode():
        held = found.extend(tokens(1), tokens(1, dim=5), None)
    assert held.k[:, :, :3].equal(keys)


def test_a_backward_pass_of_queries_alone_reads_keys_returned_before(options: dict[str, Any]) -> None:
    found, (held,), keys = filled(3, **options)
    q = torch.ones(2, 3, 1, 4, requires_grad=True)
    score = (q @ held.k.mT).sum()
    found.extend(tokens(1), tokens(1, dim=5), None)
    score.backward()
    assert q.grad is not None
    assert torch.allclose(q.grad[:, :, 0], keys.sum(2))


def test_a_call_that_a_backward_pass_recomputes_is_rejected() -> None:
    found, _, _ = filled(3)

    def call(k: Tensor) -> Tensor:
        return found.extend(k, k.new_zeros(2, 3, 1, 5), None).k.sum().sin()

    output = checkpoint(call, tokens(1, requires_grad=True), use_reentrant=False)
    assert isinstance(output, Tensor)
    with pytest.raises(ArgumentError) as refused:
        output.backward()
    assert str(refused.value) == (
        "A backward pass recomputes this call, as activation checkpointing does, and the cache would append its tokens "
        "a second time. Call the layer without a cache, or outside of the checkpoint."
    )


class TestRefusals:
    def test_keys_of_another_size(self) -> None:
        with pytest.raises(ShapeError) as refused:
            buffers.check_fits_cached("k", tokens(1, batch=3), torch.zeros(2, 3, 9, 4), torch.float32)
        assert str(refused.value) == (
            "k has shape (3, 3, 1, 4), and the cache holds 2 samples of 3 heads with 4 features. "
            "Give (2, 3, new tokens, 4), or call cache.reset() to start over."
        )

    def test_values_of_another_dtype(self) -> None:
        with pytest.raises(DtypeError) as refused:
            buffers.check_fits_cached("v", tokens(1, dtype=torch.float64), torch.zeros(2, 3, 9, 4), torch.float32)
        assert str(refused.value) == (
            "v is torch.float64 on cpu, and the cache holds torch.float32 on cpu. "
            "Convert it, move the cache with cache.to(device), or call cache.reset() to start over."
        )

    def test_heads_that_are_not_split(self) -> None:
        with pytest.raises(ShapeError) as refused:
            KeyValueBuffers(torch.zeros(2, 3, 4), tokens(3), capacity=None, window=None)
        assert str(refused.value) == (
            "k has shape (2, 3, 4), and must be (batch, kv_heads, new tokens, dim). "
            "Split the heads first: mh.split_heads(x, num_heads)."
        )

    def test_keys_and_values_that_do_not_fit_each_other(self) -> None:
        with pytest.raises(ShapeError) as refused:
            KeyValueBuffers(tokens(3), tokens(3, dtype=torch.float64), capacity=None, window=None)
        assert str(refused.value) == (
            "k is (2, 3, 3, 4) in torch.float32 on cpu, and v is (2, 3, 3, 4) in torch.float64 on cpu. "
            "Give both the same batch, heads, dtype and device."
        )


def rows(*values: list[float]) -> Tensor:
    """Return a buffer (batch, 1, slots, 1) from one list per sample."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None]


def shown(tensor: Tensor) -> list[list[float]]:
    return tensor[:, 0, :, 0].tolist()


class TestWrite:
    def test_each_samples_tokens_are_written_to_its_own_slots(self) -> None:
        buffer = torch.zeros(2, 1, 5, 1)
        assert write_slots(buffer, rows([1, 2], [3, 4]), torch.tensor([[0, 1], [2, 3]]), copy=False) is buffer
        assert shown(buffer) == [[1, 2, 0, 0, 0], [0, 0, 3, 4, 0]]

    def test_padding_is_not_stored_whatever_it_contains(self) -> None:
        buffer = torch.zeros(2, 1, 5, 1)
        real = torch.tensor([[True, False], [False, False]])
        slots = torch.tensor([[3, 4], [0, 1]])
        write_slots(buffer, rows([1, torch.nan], [torch.inf, torch.nan]), slots, is_token=real, copy=False)
        assert shown(buffer) == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]

    def test_where_gradients_flow_the_buffer_is_copied(self) -> None:
        buffer, new = torch.zeros(2, 1, 5, 1), rows([1, 2], [3, 4]).requires_grad_()
        written = write_slots(buffer, new, torch.tensor([[2, 3], [1, 2]]), copy=True)
        assert not buffer.any()
        written.sum().backward()
        assert new.grad is not None
        assert shown(new.grad) == [[1, 1], [1, 1]]

    def test_a_backward_pass_may_still_read_the_slots_before(self) -> None:
        buffer, q = torch.ones(1, 1, 3, 1), torch.ones(1, 1, 1, 1, requires_grad=True)
        score = q @ buffer[:, :, :1].mT
        write_slots(buffer, rows([7]), torch.tensor([[1]]), copy=False)
        score.sum().backward()
        assert q.grad is not None
        assert q.grad.item() == 1


class TestCopySlots:
    def test_slots_are_copied_to_the_beginning_of_a_new_buffer_with_zeros_after_them(self) -> None:
        buffer = rows([1, 2, 3, 4], [5, 6, 7, 8])
        moved = copy_slots(buffer, 1, 3, slots=3)
        assert shown(moved) == [[2, 3, 0, 0], [6, 7, 0, 0]]
        moved.zero_()
        assert shown(buffer) == [[1, 2, 3, 4], [5, 6, 7, 8]]

    def test_each_sample_keeps_its_own_slots(self) -> None:
        buffer = rows([1, 2, 3, torch.nan], [5, 6, torch.nan, torch.nan])
        moved = copy_slots(buffer, torch.tensor([1, 0]), torch.tensor([3, 1]), slots=2)
        assert shown(moved) == [[2, 3, 0], [5, 0, 0]]

    def test_gradients_flow_to_the_copied_slots(self) -> None:
        buffer = rows([1, 2, 3], [4, 5, 6]).requires_grad_()
        copy_slots(buffer, torch.tensor([1, 0]), torch.tensor([3, 1]), slots=4).sum().backward()
        assert buffer.grad is not None
        assert shown(buffer.grad) == [[0, 1, 1], [1, 0, 0]]

    def test_a_batch_of_no_samples_stays_one(self) -> None:
        nothing = torch.zeros(0, dtype=torch.int64)
        assert copy_slots(torch.zeros(0, 1, 4, 2), nothing, nothing, slots=3).shape == (0, 1, 4, 2)


class TestCounts:
    def test_integers_and_tensors_are_accepted(self) -> None:
        for given in ((2, 0), torch.tensor([2, 0], dtype=torch.int32)):
            counts = check_token_counts(given, batch=2, limit=2, device=torch.device("cpu"))
            assert (counts.dtype, counts.tolist()) == (torch.int64, [2, 0])

    @pytest.mark.parametrize(
        ("given", "sentence"),
        [
            ((1.5, 2), "lengths is (1.5, 2). Give integers, one per sample."),
            ((True, 2), "lengths is (True, 2). Give integers, one per sample."),
            (torch.tensor([1.0, 2.0]), "lengths is tensor([1., 2.]). Give integers, one per sample."),
            ((-1, 2), "lengths holds -1, and there are 3 tokens. Give numbers from 0 to 3."),
            ((1, 4), "lengths holds 4, and there are 3 tokens. Give numbers from 0 to 3."),
        ],
    )
    def test_invalid_counts_are_rejected(self, given: tuple[int, ...] | Tensor, sentence: str) -> None:
        with pytest.raises(ArgumentError) as refused:
            check_token_counts(given, batch=2, limit=3, device=torch.device("cpu"))
        assert str(refused.value) == sentence

    def test_another_number_of_samples_is_rejected(self) -> None:
        with pytest.raises(ShapeError) as refused:
            check_token_counts((1, 2, 3), batch=2, limit=3, device=torch.device("cpu"))
        assert str(refused.value) == (
            "lengths has shape (3,), and the batch has 2 samples. Give one length per sample: shape (2,)."
        )
