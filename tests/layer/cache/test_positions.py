"""Counting tokens: an int where all samples have equally many, a tensor where they differ."""

from __future__ import annotations

import torch

from multihead.layer.cache.positions import Progress

CPU = torch.device("cpu")


def test_equal_samples_are_counted_by_an_int() -> None:
    progress = Progress(3, CPU)
    assert (progress.add(4), progress.add(1), progress.start, progress.longest) == (0, 4, 5, 5)
    assert progress.counts.tolist() == [5, 5, 5]
    assert progress.uniform


def test_samples_that_differ_are_counted_by_a_tensor() -> None:
    progress = Progress(2, CPU)
    progress.add(3)
    start = progress.add(4, torch.tensor([4, 0]))
    assert isinstance(start, torch.Tensor)
    assert start.tolist() == [3, 3]
    assert progress.counts.tolist() == [7, 3]
    assert not progress.uniform
    then = progress.add(1)
    assert isinstance(then, torch.Tensor)
    assert (then.tolist(), progress.counts.tolist(), progress.longest) == ([7, 3], [8, 4], 8)


def test_a_returned_start_never_changes() -> None:
    progress = Progress(2, CPU, in_graphs=True)
    progress.add(1, torch.tensor([1, 0]))
    start = progress.add(1)
    progress.add(1)
    assert isinstance(start, torch.Tensor)
    assert start.tolist() == [1, 0]


def test_dropped_tokens_stay_part_of_the_position() -> None:
    progress = Progress(2, CPU)
    progress.add(10)
    progress.drop(4)
    assert (progress.start, progress.position) == (6, 10)
    progress.add(2, torch.tensor([1, 2]))
    progress.drop(torch.tensor([0, 3]))
    assert isinstance(progress.position, torch.Tensor)
    assert (progress.counts.tolist(), progress.position.tolist()) == ([7, 5], [11, 12])


def test_setting_an_int_updates_the_tensor_of_graphs() -> None:
    progress = Progress(2, CPU, in_graphs=True)
    progress.add(10)
    progress.set(4)
    assert (progress.longest, progress.counts.tolist()) == (4, [4, 4])


def test_samples_are_selected() -> None:
    progress = Progress(2, CPU)
    progress.add(10)
    progress.add(2, torch.tensor([1, 2]))
    progress.drop(torch.tensor([0, 3]))
    progress.select(torch.tensor([1, 1, 0]))
    assert (progress.batch, progress.counts.tolist()) == (3, [9, 9, 11])
    assert isinstance(progress.position, torch.Tensor)
    assert progress.position.tolist() == [12, 12, 11]


def test_its_tensors_move_to_a_device() -> None:
    progress = Progress(2, CPU)
    progress.add(2, torch.tensor([1, 2]))
    progress.drop(torch.tensor([0, 1]))
    progress.move("meta")
    assert progress.counts.device.type == "meta"
    assert isinstance(progress.dropped, torch.Tensor)
    assert progress.dropped.device.type == "meta"


def test_a_batch_of_no_samples_has_no_longest() -> None:
    progress = Progress(0, CPU)
    progress.add(3, torch.zeros(0, dtype=torch.int64))
    assert progress.longest == 0


def test_steps_that_no_graph_runs_are_counted_for_a_graph_too() -> None:
    progress = Progress(2, CPU, in_graphs=True)
    assert [progress.add(count) for count in (3, 1, 1, 4, 1)] == [0, 3, 4, 5, 9]
    assert (progress.longest, progress.counts.tolist(), progress.uniform) == (10, [10, 10], True)
