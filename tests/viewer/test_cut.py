"""Files truncated while they are shown, and full disks: the viewer responds with an error and keeps running."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from multihead import masks
from multihead.observation.record import Record
from multihead.viewer import routes
from multihead.viewer.payload import RecordedRun
from tests.viewer.serving import Served, serving
from tests.viewer.watching import watch

SAMPLE = "api/runs/0/samples/0"


@pytest.fixture(scope="module")
def long() -> Record:
    return watch(2100, layers=1, mask=masks.Causal())


def until_built(served: Served) -> dict[str, Any]:
    """Wait until the levels are built, or given up."""
    for _ in range(600):
        progress: dict[str, Any] = served.get(f"{SAMPLE}/levels").json
        if progress["state"] != "building":
            return progress
        time.sleep(0.02)
    raise AssertionError("The levels were never ready.")


def test_a_record_that_is_cut_while_it_is_shown_is_an_error_and_the_viewer_goes_on(
    long: Record, tmp_path: Path
) -> None:
    long.save(file := tmp_path / "run.safetensors")
    with serving(RecordedRun("run.safetensors", Record.load(file, mapped=False))) as served:
        os.truncate(file, 100_000)
        answer = served.get(f"{SAMPLE}/heads/0/1/tile?level=0&row=0&column=0")
        sentence = f"{str(file)!r} was changed, truncated or removed while it was read. Open it again."
        assert (answer.status, answer.error) == (500, sentence)
        progress = until_built(served)
        assert progress["error"] == f"The coarse levels could not be built: {sentence}"
        assert served.get("api/view").status == 200


@pytest.mark.parametrize("harm", [lambda file: os.truncate(file, 2000), lambda file: file.unlink()])
def test_levels_that_are_cut_while_they_are_shown_are_an_error(
    harm: Callable[[Path], None], long: Record, tmp_path: Path
) -> None:
    with serving(RecordedRun("run.safetensors", long, tmp_path / "levels")) as served:
        until_built(served)
        harm(file := tmp_path / "levels" / "layer-0.sample-0.safetensors")
        sentence = f"{str(file)!r} was changed, truncated or removed while it was read. Open it again."
        for path in (f"{SAMPLE}/heads/0/1/tile?level=6&row=0&column=0", f"{SAMPLE}/layers/0/maps"):
            answer = served.get(path)
            assert (answer.status, answer.error) == (500, sentence)
        assert served.get(f"{SAMPLE}/heads/0/1/tile?level=0&row=0&column=0").status == 200


def test_levels_in_memory_are_bounded(long: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_LEVEL_BYTES_IN_MEMORY", 12_000)  # of one head: 33 x 33 cells of 8 bytes, and 33
    with serving(RecordedRun("run.safetensors", long)) as served:
        progress = until_built(served)
        sentence = (
            "The coarse levels could not be built: The disk has no room for the levels, and memory holds 8,976 of "
            "at most 12,000 bytes. Free some space next to the record, and open it again."
        )
        assert (progress["state"], progress["error"]) == ("none", sentence)
        paths = [f"{SAMPLE}/heads/0/{head}/tile?level=6&row=0&column=0" for head in (0, 1)]
        answers = sorted((served.get(path) for path in paths), key=lambda each: each.status)
        assert [each.status for each in answers] == [200, 404]
        assert answers[1].error == f"{sentence} Zoom in: finer levels do not need them."
