"""Counting tokens: a number where samples are alike, a tensor where they are not."""

from __future__ import annotations

import torch

from multihead.cache.positions import Progress

CPU = torch.device("cpu")


def test_samples_that_are_alike_are_counted_by_a_number() -> None:
    progress = Progress(3, CPU)
    assert (progress.add(4), progress.add(1), progress.start, progress.longest) == (0, 4, 5, 5)
    assert progress.each.tolist() == [5, 5, 5]
    assert progress.alike


def test_samples_that_differ_are_counted_by_a_tensor() -> None:
    progress = Progress(2, CPU)
    progress.add(3)
    start = progress.add(4, torch.tensor([4, 0]))
    assert isinstance(start, torch.Tensor)
    assert start.tolist() == [3, 3]
    assert progress.each.tolist() == [7, 3]
    assert not progress.alike
    then = progress.add(1)
    assert isinstance(then, torch.Tensor)
    assert (then.tolist(), progress.each.tolist(), progress.longest) == ([7, 3], [8, 4], 8)


def test_a_start_that_was_handed_out_stays_what_it_was() -> None:
    progress = Progress(2, CPU, in_graphs=True)
    progress.add(1, torch.tensor([1, 0]))
    start = progress.add(1)
    progress.add(1)
    assert isinstance(start, torch.Tensor)
    assert start.tolist() == [1, 0]


def test_what_is_forgotten_stays_part_of_the_position() -> None:
    progress = Progress(2, CPU)
    progress.add(10)
    progress.forget(4)
    assert (progress.start, progress.position) == (6, 10)
    progress.add(2, torch.tensor([1, 2]))
    progress.forget(torch.tensor([0, 3]))
    assert isinstance(progress.position, torch.Tensor)
    assert (progress.each.tolist(), progress.position.tolist()) == ([7, 5], [11, 12])


def test_a_number_set_anew_reaches_the_tensor_of_graphs() -> None:
    progress = Progress(2, CPU, in_graphs=True)
    progress.add(10)
    progress.put(4)
    assert (progress.longest, progress.each.tolist()) == (4, [4, 4])


def test_samples_are_chosen_anew() -> None:
    progress = Progress(2, CPU)
    progress.add(10)
    progress.add(2, torch.tensor([1, 2]))
    progress.forget(torch.tensor([0, 3]))
    progress.choose(torch.tensor([1, 1, 0]))
    assert (progress.batch, progress.each.tolist()) == (3, [9, 9, 11])
    assert isinstance(progress.position, torch.Tensor)
    assert progress.position.tolist() == [12, 12, 11]


def test_its_tensors_move_to_a_device() -> None:
    progress = Progress(2, CPU)
    progress.add(2, torch.tensor([1, 2]))
    progress.forget(torch.tensor([0, 1]))
    progress.move("meta")
    assert progress.each.device.type == "meta"
    assert isinstance(progress.forgotten, torch.Tensor)
    assert progress.forgotten.device.type == "meta"


def test_a_batch_of_no_samples_has_no_longest() -> None:
    progress = Progress(0, CPU)
    progress.add(3, torch.zeros(0, dtype=torch.int64))
    assert progress.longest == 0
