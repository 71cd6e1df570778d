"""Requests without a port: the answers are those of the server, in messages of bounded size."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
import pytest

from multihead.probes.blocks import CancelledError as Cancelled
from multihead.viewer import routes
from multihead.viewer.payload import RecordedRun
from multihead.viewer.widget import requests
from multihead.viewer.widget.requests import MAX_BYTES_PER_MESSAGE, InProcessServer, shared_server
from tests.viewer.serving import serving
from tests.viewer.widget.records import long, small

PATHS = (
    "api/view",
    "api/runs/0/samples/0",
    "api/runs/0/samples/0/levels",
    "api/runs/0/samples/0/layers/0/maps",
    "api/runs/0/samples/0/heads/0/1/tile?level=0&row=1&column=0",
    "api/runs/0/samples/0/heads/0/1/row?query=7",
    "api/runs/0/samples/0/heads/0/1/nearest?top=1",
    "api/runs/0/samples/0/heads/0/1/weights.csv?queries=0:600&keys=0:600",
    "api/runs/0/samples/0/table.json",
    "api/runs/0/samples/9",
    "api/runs/0/samples/0/heads/0/1/tile?level=99&row=0&column=0",
    "api/nothing",
)


def answer(running: InProcessServer, path: str) -> list[tuple[dict[str, Any], bytes]]:
    """Return all parts of the answer to a request."""
    parts: list[tuple[dict[str, Any], bytes]] = []
    running.start_answering(path, lambda head, body: parts.append((head, body))).result(60)
    return parts


@pytest.fixture(scope="module")
def of_long() -> InProcessServer:
    return InProcessServer([RecordedRun("long.safetensors", long())], "en")


def test_every_answer_is_that_of_the_server(of_long: InProcessServer) -> None:
    with serving(RecordedRun("long.safetensors", long())) as served:
        for path in PATHS:
            expected, parts = served.get(path), answer(of_long, path)
            assert b"".join(body for _, body in parts) == expected.body, path
            head = parts[-1][0]
            assert head["status"] == expected.status, path
            assert all(expected.headers[name] == value for name, value in head["headers"].items()), path


def test_no_message_exceeds_the_limit_and_only_the_last_one_is_marked(of_long: InProcessServer) -> None:
    assert MAX_BYTES_PER_MESSAGE < 1_000_000
    parts = answer(of_long, "api/runs/0/samples/0/heads/0/1/weights.csv?queries=0:600&keys=0:600")
    assert len(parts) > 2
    assert max(len(body) for _, body in parts) <= MAX_BYTES_PER_MESSAGE
    assert [head["last"] for head, _ in parts] == [False] * (len(parts) - 1) + [True]
    for path in PATHS:
        assert all(len(body) <= MAX_BYTES_PER_MESSAGE for _, body in answer(of_long, path)), path


def test_a_tile_arrives_as_its_numbers(of_long: InProcessServer) -> None:
    ((head, body),) = answer(of_long, "api/runs/0/samples/0/heads/0/1/tile?level=0&row=0&column=0")
    shape = [int(each) for each in head["headers"]["x-shape"].split(",")]
    tile = np.frombuffer(body, "<f4").reshape(shape)
    expected = long().layers[0].sample().weights(1, queries=slice(0, 256), keys=slice(0, 256)).numpy()
    lower = np.tril(np.ones(shape, dtype=bool))
    np.testing.assert_allclose(tile[lower], expected[lower], rtol=1e-5)
    assert np.isnan(tile[~lower]).all()


def test_a_cancelled_request_ends_its_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    began, ended = threading.Event(), threading.Event()

    def endless(run: RecordedRun, sample: int, lang: str) -> None:
        began.set()
        ended.wait(60)
        raise Cancelled

    monkeypatch.setattr(routes, "describe_sample", endless)
    parts: list[object] = []
    pending = InProcessServer([RecordedRun("small", small())], "en").start_answering(
        "api/runs/0/samples/0", lambda *part: parts.append(part)
    )
    assert began.wait(60)
    assert pending.cancel()
    with pytest.raises(CancelledError):
        pending.result(60)
    ended.set()
    assert parts == []


def test_a_failure_is_answered_and_its_traceback_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: RecordedRun) -> None:
        raise ZeroDivisionError("no such thing")

    def noted() -> None:
        failures.append(sys.exc_info()[1])
        printed.set()

    failures: list[object] = []
    printed = threading.Event()
    monkeypatch.setattr(routes, "describe_run", broken)
    monkeypatch.setattr(requests.traceback, "print_exc", noted)
    parts: list[tuple[dict[str, Any], bytes]] = []
    running = InProcessServer([RecordedRun("small", small())], "en")
    running.start_answering("api/view", lambda *part: parts.append(part))
    assert printed.wait(60)
    assert [str(each) for each in failures] == ["no such thing"]
    assert parts[-1][0]["status"] == 500
    assert json.loads(parts[-1][1])["error"].startswith("The viewer failed on this request.")


def test_widgets_of_the_same_records_share_the_computed_tiles() -> None:
    runs = [RecordedRun("small", small())]
    first = shared_server(runs, "en")
    assert shared_server([RecordedRun("small", small())], "en") is first
    assert shared_server(runs, "zh") is not first
    assert shared_server([*runs, RecordedRun("long", long())], "en") is not first


def test_the_threads_end_with_the_last_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    monkeypatch.setattr(routes.Viewer, "close", lambda self: closed.set())
    made = InProcessServer([RecordedRun("small", small())], "en")
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None
    assert closed.wait(60)
    assert requests._SHARED_SERVERS.get((id(small()), "none")) is None
