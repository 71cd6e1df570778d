"""The server as a whole: where it listens, whom it answers, and how it ends."""

from __future__ import annotations

import threading
import urllib.request
from typing import Any

import pytest

from multihead.errors import InputError
from multihead.viewer import server
from multihead.viewer.payload import RecordedRun
from tests.viewer.serving import TOKEN, serving, serving_site, viewer_of
from tests.viewer.watching import watch


def test_it_says_its_address_once_it_takes_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    plain = server._CancellingServer
    monkeypatch.setattr(server, "_CancellingServer", lambda *given: made.append(plain(*given)) or made[0])
    addresses: list[str] = []
    options = {"token": "abc", "ready": addresses.append}
    thread = threading.Thread(target=server.serve, args=(viewer_of(RecordedRun("a", watch(5))),), kwargs=options)
    thread.start()
    while not made or not made[0].started:
        thread.join(0.01)
        assert thread.is_alive()
    with urllib.request.urlopen(addresses[0]) as page:
        assert addresses[0].endswith("/abc/")
        assert b"<!doctype html>" in page.read()[:100].lower()
    made[0].should_exit = True
    thread.join(20)
    assert not thread.is_alive()


def test_the_address_without_its_last_slash_leads_to_the_page() -> None:
    with serving(RecordedRun("a", watch(5))) as served:
        answer = served.request(f"/{TOKEN}")
        assert (answer.status, answer.headers["location"]) == (307, f"/{TOKEN}/")


def test_a_port_that_is_taken_is_refused_in_words() -> None:
    with serving(RecordedRun("a", watch(5))) as served, pytest.raises(InputError) as refused:
        server.serve(viewer_of(), token="x", port=served.port)
    assert str(refused.value) == (
        f"Port {served.port} is already in use. Give another --port, or leave it out to use a free one."
    )


def test_when_the_server_ends_its_threads_end() -> None:
    viewer = viewer_of(RecordedRun("a", watch(5)))
    with serving_site(viewer) as served:
        assert served.get("api/runs/0/samples/0").status == 200
        threads = [*viewer.workers._threads, *viewer.slow_workers._threads]
        assert all(thread.is_alive() for thread in threads)
    assert not any(thread.is_alive() for thread in threads)
