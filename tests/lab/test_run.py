"""The lab's parts together: the chosen parts run, others are left out, and progress is reported."""

from __future__ import annotations

from dataclasses import replace

import pytest

from multihead.errors import ArgumentError
from multihead_lab import run as room
from multihead_lab.run import run_lab
from multihead_lab.tasks import TASKS


def test_only_the_chosen_parts_run() -> None:
    found = run_lab(parts=("parameters",), heads=(1, 2))
    assert found.parameters is not None
    assert (found.experiments, found.experiment_with_copied_heads, found.vector_matching) == ((), None, None)
    assert [count.num_heads for count in found.parameters.layers] == [1, 2]


def test_all_tasks_are_taught_half_as_long_where_it_must_be_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    short = {name: replace(task, steps=4) for name, task in TASKS.items()}
    monkeypatch.setattr(room, "find_task", short.__getitem__)
    monkeypatch.setattr("multihead_lab.training.HEAD_QUESTIONS", 8)
    progress: list[tuple[str, int, int]] = []
    found = run_lab(parts=("tasks",), heads=(1, 2), seeds=1, quick=True, progress=lambda *each: progress.append(each))
    assert [experiment.task.name for experiment in found.experiments] == ["one", "two", "induction"]
    assert {experiment.steps for experiment in found.experiments} == {2}
    assert found.experiment_with_copied_heads is not None
    assert (
        found.experiment_with_copied_heads.initial_heads,
        found.experiment_with_copied_heads.head_counts,
        found.experiment_with_copied_heads.steps,
    ) == ("copied", (2,), 2)
    assert progress == [(name, done, 2) for name in ("one", "two", "induction") for done in (1, 2)] + [("copies", 1, 1)]


def test_invalid_arguments_are_rejected() -> None:
    with pytest.raises(ArgumentError) as part:
        run_lab(parts=("poems",))  # type: ignore[arg-type]
    assert str(part.value) == "There is no part 'poems'. Give some of parameters, tasks, vectors."
    with pytest.raises(ArgumentError) as seeds:
        run_lab(seeds=0)
    assert str(seeds.value) == "The number of seeds is 0. Give at least 1."
    with pytest.raises(ArgumentError) as seed:
        run_lab(seed=-1)
    assert str(seed.value) == "seed is -1. Give 0 or more."
    with pytest.raises(ArgumentError) as heads:
        run_lab(heads=(1, 64))
    assert str(heads.value) == (
        "embed_dim is 32, and 64 heads do not divide it. Give 1, 2, 4, 8, 16 or 32 heads, or a width that is a "
        "multiple of 64."
    )
