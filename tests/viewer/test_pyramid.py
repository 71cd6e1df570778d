"""The building of coarse levels: step by step, the head in view first, once, and a failure ends one sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multihead import masks
from multihead.viewer import levels, pyramid
from multihead.viewer.pyramid import Builder, Pyramid, state_of_building
from tests.viewer.watching import watch

pytestmark = pytest.mark.usefixtures("shallow")


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "BASE", 1)
    monkeypatch.setattr(pyramid, "BASE", 1)
    monkeypatch.setattr(levels, "SIDE", 2)
    monkeypatch.setattr(levels, "STRIP", 300)


def made_pyramid(folder: Path | None = None, **options: Any) -> Pyramid:
    return Pyramid(watch(layers=2, mask=masks.Causal(), **options), 0, folder)


def order(made: Pyramid) -> list[tuple[int, int]]:
    """Build all levels; returns the order in which heads were finished."""
    finished: list[tuple[int, int]] = []
    while not made.finished:
        before = set(made._left)
        made.step()
        finished += before - set(made._left)
    return finished


def test_heads_are_built_in_their_order() -> None:
    made = made_pyramid()
    assert (made.done, made.total) == (0, 4)
    assert order(made) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (made.done, made.finished, made.step()) == (4, True, False)


def test_the_head_in_view_is_built_first() -> None:
    made = made_pyramid()
    made.want((1, 0))
    made.want((1, 1), (0, 1))
    assert order(made) == [(1, 1), (0, 1), (1, 0), (0, 0)]


def test_what_was_begun_is_not_lost_when_another_head_comes_into_view() -> None:
    made = made_pyramid()
    made.step()
    begun = made.done
    assert 0 < begun < 1
    made.want((1, 1))
    assert order(made) == [(1, 1), (0, 0), (0, 1), (1, 0)]


def test_a_head_that_is_built_or_unknown_is_not_wanted() -> None:
    made = made_pyramid()
    order(made)
    made.want((0, 0), (7, 7))
    assert not made.step()


def test_short_texts_have_nothing_to_build() -> None:
    made = Pyramid(watch(2), 0, None)
    assert (made.total, made.finished, made.step()) == (0, True, False)
    assert state_of_building(made) == {"state": "ready", "done": 0, "total": 0, "inMemory": False}


def test_what_is_kept_in_the_folder_is_not_built_again(tmp_path: Path) -> None:
    record = watch(layers=2, mask=masks.Causal())
    folder = tmp_path / "run.levels"
    first = Pyramid(record, 0, folder)
    first.want((1, 0))
    while not first.has(1, 0):
        first.step()
    again = Pyramid(record, 0, folder)
    assert (again.done, again.total) == (1, 4)
    order(again)
    assert sorted(each.name for each in folder.iterdir()) == [
        "layer-0.sample-0.safetensors",
        "layer-1.sample-0.safetensors",
    ]
    assert Pyramid(record, 0, folder).finished
    another = watch(layers=2, mask=masks.Causal(), seed=1)
    assert Pyramid(another, 0, folder).done == 0


def test_states_of_a_pyramid() -> None:
    assert state_of_building(None) == {"state": "none", "done": 0, "total": 0}
    made = made_pyramid()
    made.step()
    progress = state_of_building(made)
    assert progress["state"] == "building"
    assert 0 < progress["done"] < 1
    order(made)
    assert state_of_building(made) == {"state": "ready", "done": 4, "total": 4, "inMemory": True}
    failed = state_of_building(made, ValueError("no room"))
    assert failed["state"] == "none"
    assert failed["error"] == "The coarse levels could not be built: no room"


def test_the_sample_opened_last_is_built_first_and_progress_is_reported() -> None:
    progress: list[tuple[float, int]] = []
    builder = Builder(lambda done, total: progress.append((done, total)))
    first, second = made_pyramid(), made_pyramid(seed=1)
    assert builder.look("first", lambda: first) is first
    assert builder.look("second", lambda: second) is second
    while not second.finished:
        assert builder.step()
    assert first.done == 0
    while builder.step():
        pass
    assert first.finished
    assert [total for _, total in progress] == [8] * len(progress)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1] == (8, 8)


def test_a_failure_ends_one_sample_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = Builder()
    good, bad = made_pyramid(), made_pyramid(seed=1)

    def fail() -> bool:
        raise ValueError("q cannot be read")

    monkeypatch.setattr(bad, "step", fail)
    builder.look("good", lambda: good)
    builder.look("bad", lambda: bad)
    while builder.step():
        pass
    assert good.finished
    assert str(builder.failure("bad")) == "q cannot be read"
    assert builder.failure("good") is None
