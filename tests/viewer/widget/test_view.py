"""The widget from Python: its messages, its selection, its static output, its errors."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from multihead.errors import ArgumentError, ModelError
from multihead.observation.record import Record
from multihead.viewer.widget import view as widget
from multihead.viewer.widget.view import Selection, View
from tests.viewer.widget.records import small, statistics_only


class Page:
    """The page of a view: it sends messages, and keeps those that it gets."""

    def __init__(self, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
        self.view = view
        self.messages: list[tuple[dict[str, Any], list[bytes]]] = []
        self.last = threading.Event()
        monkeypatch.setattr(view, "send", self.take)

    def take(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        self.messages.append((content, buffers))
        if content["last"]:
            self.last.set()

    def ask(self, path: str) -> tuple[dict[str, Any], bytes]:
        self.view._handle_custom_msg({"id": "one 1", "path": path}, [])
        assert self.last.wait(60)
        return self.messages[-1][0], b"".join(part for _, buffers in self.messages for part in buffers)


def test_a_request_is_answered_in_messages_with_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    view = small().view()
    head, body = Page(view, monkeypatch).ask("api/view")
    assert head == {"id": "one 1", "status": 200, "headers": {"content-type": "application/json"}, "last": True}
    (sample,) = json.loads(body)["runs"][0]["samples"]
    assert (sample["queries"], sample["keys"]) == (40, 40)


def test_a_request_that_has_ended_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    view = small().view()
    ended: Future[None] = Future()
    ended.set_result(None)
    waiting: Future[None] = Future()
    pending = {"one": ended, "two": waiting}
    monkeypatch.setattr(view._server, "start_answering", lambda path, send: pending[path])
    for key in pending:
        view._handle_custom_msg({"id": key, "path": key}, [])
    assert view._pending_answers == {"two": waiting}
    waiting.set_result(None)
    assert view._pending_answers == {}


def test_a_request_is_cancelled_by_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    view = small().view()
    page = Page(view, monkeypatch)
    monkeypatch.setattr(view._server, "start_answering", lambda path, send: pending)
    pending: Future[None] = Future()
    view._handle_custom_msg({"id": "one 1", "path": "api/view"}, [])
    view._handle_custom_msg({"cancel": "another"}, [])
    assert not pending.cancelled()
    view._handle_custom_msg({"cancel": "one 1"}, [])
    assert pending.cancelled()
    assert page.messages == []


def test_a_closed_view_answers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    view = small().view()
    page = Page(view, monkeypatch)
    view.close()
    view._handle_custom_msg({"id": "one 1", "path": "api/view"}, [])
    assert page.messages == []


def test_the_state_of_a_widget_is_one_message_of_bounded_size() -> None:
    state = small().view().get_state()
    assert len(json.dumps({name: state[name] for name in ("_esm", "_page", "selection")})) < 1_000_000
    assert state["_page"]["texts"]["silent"].startswith("The kernel has not answered")


def test_two_records_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    view = small().view(statistics_only(), small())
    _, body = Page(view, monkeypatch).ask("api/view")
    names = [run["name"] for run in json.loads(body)["runs"]]
    assert names == ["a <b>model</b> 1", statistics_only().title, "a <b>model</b> 2"]


def test_a_selection_travels_as_json_and_comes_back() -> None:
    view = small().view()
    view.selection = (2, 1, slice(3, 9), slice(None), 5)
    assert view.selection == Selection(2, 1, slice(3, 9), slice(0, 40), 5)
    sent = {"layer": 2, "head": 1, "queries": [3, 9], "keys": [0, 40], "query": 5}
    assert view.get_state("selection") == {"selection": sent}
    view.set_state({"selection": {**sent, "layer": 0}})
    assert view.selection == Selection(0, 1, slice(3, 9), slice(0, 40), 5)
    view.selection = (1, 0)
    assert view.get_state("selection")["selection"] == {
        "layer": 1, "head": 0, "queries": None, "keys": None, "query": None,
    }  # fmt: skip
    view.selection = None
    assert view.get_state("selection") == {"selection": None}


def test_linked_views_select_the_same() -> None:
    first = small().view()
    first.selection = (1, 1)
    second = small().view(linked=first)
    assert second.selection == Selection(1, 1)
    second.selection = (2, 0)
    assert first.selection == Selection(2, 0)
    first.selection = None
    assert second.selection is None


def test_a_selection_outside_of_the_record_is_rejected() -> None:
    view = small().view()
    with pytest.raises(ModelError, match=r"^There is no layer 9 in the record\. The recorded layers are: 0, 1, 2\.$"):
        view.selection = (9, 0)
    with pytest.raises(ArgumentError, match=r"^There is no head 2 in layer 1\. Give 0 to 1\.$"):
        view.selection = (1, 2)
    sentence = (
        r"^keys is slice\(40, 50, None\), and the map has 40 keys\. Give a slice without steps that is not empty\.$"
    )
    with pytest.raises(ArgumentError, match=sentence):
        view.selection = (1, 0, None, slice(40, 50))
    view.selection = (1, 0, slice(30, 99), None, 99)
    assert view.selection == Selection(1, 0, slice(30, 40), None, 39)


def test_arguments_are_checked() -> None:
    with pytest.raises(ArgumentError, match=r'^lang is "fr", and must be "en" or "zh"\. Give "en" or "zh"\.$'):
        small().view(lang="fr")
    with pytest.raises(ArgumentError, match=r"^height is 10\. Give a number of pixels from 240 on\.$"):
        small().view(height=10)
    with pytest.raises(ArgumentError, match=r"^linked is str, and must be a view\. Give a result of view\(\)\.$"):
        small().view(linked="view")
    sentence = (
        r"^The record has no sample to view\. "
        r'Run the model inside observe first, and keep "all" or "statistics"\.$'
    )
    with pytest.raises(ArgumentError, match=sentence):
        Record().view()


def test_a_cell_gets_the_widget_and_a_static_output(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(widget, "display", lambda data, raw: shown.append(data))
    view = small().view()
    view._ipython_display_()
    first, second = shown
    assert first["application/vnd.jupyter.widget-view+json"]["model_id"] == view.model_id
    sentence = (
        "The live view of a <b>model</b> needs a running kernel: run this cell again. A picture and table follow."
    )
    assert first["text/plain"] == sentence == repr(view)
    assert f'data-multihead-static="{view._page["mark"]}"' in second["text/html"]
    assert second["text/plain"] == repr(small())
    view.close()
    shown.clear()
    view._ipython_display_()
    assert shown == []
