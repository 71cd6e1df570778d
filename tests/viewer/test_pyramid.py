"""The building of coarse levels: step by step, the head in view first, once, and a failure ends one sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multihead import masks
from multihead.viewer import levels, pyramid
from multihead.viewer.pyramid import LevelBuilder, SampleMapLevels, describe_building_progress
from tests.viewer.watching import watch

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "FINEST_STORED_LEVEL", 1)
    monkeypatch.setattr(pyramid, "FINEST_STORED_LEVEL", 1)
    monkeypatch.setattr(levels, "MAX_COARSEST_SIDE", 2)
    monkeypatch.setattr(levels, "SCORES_PER_STRIP", 300)


def made_pyramid(folder: Path | None = None, **options: Any) -> SampleMapLevels:
    return SampleMapLevels(watch(layers=2, mask=masks.Causal(), **options), 0, folder)


def order(made: SampleMapLevels) -> list[tuple[int, int]]:
    """Build all levels; returns the order in which heads were finished."""
    finished: list[tuple[int, int]] = []
    while not made.is_finished:
        before = set(made._heads_left)
        made.build_strip()
        finished += before - set(made._heads_left)
    return finished


def test_heads_are_built_in_their_order() -> None:
    made = made_pyramid()
    assert (made.num_built_heads, made.num_heads) == (0, 4)
    assert order(made) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (made.num_built_heads, made.is_finished, made.build_strip()) == (4, True, False)


def test_the_head_in_view_is_built_first() -> None:
    made = made_pyramid()
    made.move_heads_to_front((1, 0))
    made.move_heads_to_front((1, 1), (0, 1))
    assert order(made) == [(1, 1), (0, 1), (1, 0), (0, 0)]


def test_what_was_begun_is_not_lost_when_another_head_comes_into_view() -> None:
    made = made_pyramid()
    made.build_strip()
    begun = made.num_built_heads
    assert 0 < begun < 1
    made.move_heads_to_front((1, 1))
    assert order(made) == [(1, 1), (0, 0), (0, 1), (1, 0)]


def test_a_head_that_is_built_or_unknown_is_not_wanted() -> None:
    made = made_pyramid()
    order(made)
    made.move_heads_to_front((0, 0), (7, 7))
    assert not made.build_strip()


def test_short_texts_have_nothing_to_build() -> None:
    made = SampleMapLevels(watch(2), 0, None)
    assert (made.num_heads, made.is_finished, made.build_strip()) == (0, True, False)
    assert describe_building_progress(made) == {"state": "ready", "done": 0, "total": 0, "inMemory": False}


def test_what_is_kept_in_the_folder_is_not_built_again(tmp_path: Path) -> None:
    record = watch(layers=2, mask=masks.Causal())
    folder = tmp_path / "run.levels"
    first = SampleMapLevels(record, 0, folder)
    first.move_heads_to_front((1, 0))
    while not first.is_built(1, 0):
        first.build_strip()
    again = SampleMapLevels(record, 0, folder)
    assert (again.num_built_heads, again.num_heads) == (1, 4)
    order(again)
    assert sorted(each.name for each in folder.iterdir()) == [
        "layer-0.sample-0.safetensors",
        "layer-1.sample-0.safetensors",
    ]
    assert SampleMapLevels(record, 0, folder).is_finished
    another = watch(layers=2, mask=masks.Causal(), seed=1)
    assert SampleMapLevels(another, 0, folder).num_built_heads == 0


def test_states_of_a_pyramid() -> None:
    assert describe_building_progress(None) == {"state": "none", "done": 0, "total": 0}
    made = made_pyramid()
    made.build_strip()
    progress = describe_building_progress(made)
    assert progress["state"] == "building"
    assert 0 < progress["done"] < 1
    order(made)
    assert describe_building_progress(made) == {"state": "ready", "done": 4, "total": 4, "inMemory": True}
    made.failure = ValueError("no room")
    failed = describe_building_progress(made)
    assert failed["state"] == "none"
    assert failed["error"] == "The coarse levels could not be built: no room"


def test_the_sample_opened_last_is_built_first_and_progress_is_reported() -> None:
    progress: list[tuple[float, int]] = []
    builder = LevelBuilder(lambda done, total: progress.append((done, total)))
    first, second = made_pyramid(), made_pyramid(seed=1)
    assert builder.queue_sample("first", lambda: first) is first
    assert builder.queue_sample("second", lambda: second) is second
    while not second.is_finished:
        assert builder.build_strip()
    assert first.num_built_heads == 0
    while builder.build_strip():
        pass
    assert first.is_finished
    assert [total for _, total in progress] == [8] * len(progress)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1] == (8, 8)


def test_a_failure_ends_one_sample_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = LevelBuilder()
    good, bad = made_pyramid(), made_pyramid(seed=1)

    def fail() -> bool:
        raise ValueError("q cannot be read")

    monkeypatch.setattr(bad, "build_strip", fail)
    builder.queue_sample("good", lambda: good)
    builder.queue_sample("bad", lambda: bad)
    while builder.build_strip():
        pass
    assert good.is_finished
    assert str(bad.failure) == "q cannot be read"
    assert good.failure is None
