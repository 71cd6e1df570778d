"""Writing tokens into a buffer, copying slots, checking counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.layer.cache.buffer_ops import copy_slots, counts_of, write


def rows(*values: list[float]) -> Tensor:
    """Return a buffer (batch, 1, slots, 1) from one list per sample."""
    return torch.tensor(values, dtype=torch.float32)[:, None, :, None]


def shown(tensor: Tensor) -> list[list[float]]:
    return tensor[:, 0, :, 0].tolist()


class TestWrite:
    def test_each_samples_tokens_are_written_to_its_own_slots(self) -> None:
        buffer = torch.zeros(2, 1, 5, 1)
        assert write(buffer, rows([1, 2], [3, 4]), torch.tensor([[0, 1], [2, 3]]), copy=False) is buffer
        assert shown(buffer) == [[1, 2, 0, 0, 0], [0, 0, 3, 4, 0]]

    def test_padding_is_not_stored_whatever_it_contains(self) -> None:
        buffer = torch.zeros(2, 1, 5, 1)
        real = torch.tensor([[True, False], [False, False]])
        slots = torch.tensor([[3, 4], [0, 1]])
        write(buffer, rows([1, torch.nan], [torch.inf, torch.nan]), slots, real=real, copy=False)
        assert shown(buffer) == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]

    def test_where_gradients_flow_the_buffer_is_copied(self) -> None:
        buffer, new = torch.zeros(2, 1, 5, 1), rows([1, 2], [3, 4]).requires_grad_()
        written = write(buffer, new, torch.tensor([[2, 3], [1, 2]]), copy=True)
        assert not buffer.any()
        written.sum().backward()
        assert new.grad is not None
        assert shown(new.grad) == [[1, 1], [1, 1]]

    def test_a_backward_pass_may_still_read_the_slots_before(self) -> None:
        buffer, q = torch.ones(1, 1, 3, 1), torch.ones(1, 1, 1, 1, requires_grad=True)
        score = q @ buffer[:, :, :1].mT
        write(buffer, rows([7]), torch.tensor([[1]]), copy=False)
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
            counts = counts_of(given, batch=2, limit=2, device=torch.device("cpu"))
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
            counts_of(given, batch=2, limit=3, device=torch.device("cpu"))
        assert str(refused.value) == sentence

    def test_another_number_of_samples_is_rejected(self) -> None:
        with pytest.raises(ShapeError) as refused:
            counts_of((1, 2, 3), batch=2, limit=3, device=torch.device("cpu"))
        assert str(refused.value) == (
            "lengths has shape (3,), and the batch has 2 samples. Give one number per sample: shape (2,)."
        )
