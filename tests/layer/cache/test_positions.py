"""Counting tokens: an int where all samples have equally many, a tensor where they differ."""

from __future__ import annotations

import torch

from multihead.layer.cache.positions import SlotCounts

CPU = torch.device("cpu")


def test_equal_samples_are_counted_by_an_int() -> None:
    progress = SlotCounts(3, CPU)
    assert (progress.add_tokens(4), progress.add_tokens(1), progress.next_slot, progress.largest_count) == (0, 4, 5, 5)
    assert progress.counts.tolist() == [5, 5, 5]
    assert progress.is_uniform


def test_samples_that_differ_are_counted_by_a_tensor() -> None:
    progress = SlotCounts(2, CPU)
    progress.add_tokens(3)
    start = progress.add_tokens(4, torch.tensor([4, 0]))
    assert isinstance(start, torch.Tensor)
    assert start.tolist() == [3, 3]
    assert progress.counts.tolist() == [7, 3]
    assert not progress.is_uniform
    then = progress.add_tokens(1)
    assert isinstance(then, torch.Tensor)
    assert (then.tolist(), progress.counts.tolist(), progress.largest_count) == ([7, 3], [8, 4], 8)


def test_a_returned_start_never_changes() -> None:
    progress = SlotCounts(2, CPU, in_graphs=True)
    progress.add_tokens(1, torch.tensor([1, 0]))
    start = progress.add_tokens(1)
    progress.add_tokens(1)
    assert isinstance(start, torch.Tensor)
    assert start.tolist() == [1, 0]


def test_dropped_tokens_stay_part_of_the_position() -> None:
    progress = SlotCounts(2, CPU)
    progress.add_tokens(10)
    progress.drop_slots(4)
    assert (progress.next_slot, progress.next_position) == (6, 10)
    progress.add_tokens(2, torch.tensor([1, 2]))
    progress.drop_slots(torch.tensor([0, 3]))
    assert isinstance(progress.next_position, torch.Tensor)
    assert (progress.counts.tolist(), progress.next_position.tolist()) == ([7, 5], [11, 12])


def test_setting_an_int_updates_the_tensor_of_graphs() -> None:
    progress = SlotCounts(2, CPU, in_graphs=True)
    progress.add_tokens(10)
    progress.set_counts(4)
    assert (progress.largest_count, progress.counts.tolist()) == (4, [4, 4])


def test_samples_are_selected() -> None:
    progress = SlotCounts(2, CPU)
    progress.add_tokens(10)
    progress.add_tokens(2, torch.tensor([1, 2]))
    progress.drop_slots(torch.tensor([0, 3]))
    progress.select_samples(torch.tensor([1, 1, 0]))
    assert (progress.batch, progress.counts.tolist()) == (3, [9, 9, 11])
    assert isinstance(progress.next_position, torch.Tensor)
    assert progress.next_position.tolist() == [12, 12, 11]


def test_its_tensors_move_to_a_device() -> None:
    progress = SlotCounts(2, CPU)
    progress.add_tokens(2, torch.tensor([1, 2]))
    progress.drop_slots(torch.tensor([0, 1]))
    progress.move_to("meta")
    assert progress.counts.device.type == "meta"
    assert isinstance(progress.dropped, torch.Tensor)
    assert progress.dropped.device.type == "meta"


def test_a_batch_of_no_samples_has_no_longest() -> None:
    progress = SlotCounts(0, CPU)
    progress.add_tokens(3, torch.zeros(0, dtype=torch.int64))
    assert progress.largest_count == 0


def test_steps_that_no_graph_runs_are_counted_for_a_graph_too() -> None:
    progress = SlotCounts(2, CPU, in_graphs=True)
    assert [progress.add_tokens(count) for count in (3, 1, 1, 4, 1)] == [0, 3, 4, 5, 9]
    assert (progress.largest_count, progress.counts.tolist(), progress.is_uniform) == (10, [10, 10], True)
