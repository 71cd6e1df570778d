"""What the viewer answers with: files of the page by their list alone, numbers with their shape, sentences."""

from __future__ import annotations

import asyncio
import json
import re
from importlib import resources

import numpy as np
import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from multihead.errors import ArgumentError
from multihead.locale.texts import section
from multihead.viewer import responses
from multihead.viewer.query_params import NotFoundError, NotReadyError

REQUEST = Request({"type": "http"})


def test_every_file_of_the_page_is_served_with_its_type() -> None:
    for folder in ("view", "try", "shared"):
        files = resources.files("multihead.viewer") / "static" / folder
        # Templates are rendered, not served.
        names = [each.name for each in files.iterdir() if each.is_file() and not each.name.endswith(".html")]
        assert len(names) > 9
        for name in names:
            answer = responses.file_response(folder, name)
            assert answer.body == (files / name).read_bytes()
            assert answer.headers["content-type"] == responses.MEDIA_TYPES[name[name.rindex(".") :]]


def test_the_page_carries_its_texts_in_its_language() -> None:
    html = bytes(responses.page_response("zh").body).decode()
    (found,) = re.findall(r'<script type="application/json" id="texts">(.*?)</script>', html)
    assert json.loads(found) == section("zh", "common", "page", "viewer")
    assert '<html lang="zh-CN">' in html
    assert '<h2 id="hg">每个头</h2>' in html


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        *(("view", name) for name in ("../page.js", "..", "", "/etc/passwd", "none.js", "..%2fpage.js", "main.js\0")),
        ("view", "index.html"),  # a template
        ("report", "page.js"),
        ("..", "server.py"),
        ("", "server.py"),
    ],
)
def test_no_other_file_is_served(folder: str, name: str) -> None:
    with pytest.raises(NotFoundError) as refused:
        responses.file_response(folder, name)
    assert str(refused.value) == "The page has no such file. Open the address that `multihead view` printed."


def test_numbers_are_float32_with_their_shape() -> None:
    answer = responses.floats_response(np.array([[1.5, np.nan, 2.0]]))
    assert answer.headers["x-shape"] == "1,3"
    np.testing.assert_array_equal(np.frombuffer(answer.body, "<f4"), np.float32([1.5, np.nan, 2.0]))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ArgumentError("It is 3.", "Give 2."), 400),
        (NotFoundError("It is 3.", "Give 2."), 404),
        (NotReadyError("It is 3.", "Give 2."), 503),
    ],
)
def test_an_error_is_its_sentence(error: Exception, status: int) -> None:
    answer = asyncio.run(responses.error_response(REQUEST, error))
    assert answer.status_code == status
    assert json.loads(answer.body) == {"error": "It is 3. Give 2."}
    assert (answer.headers.get("retry-after") == "1") == (status == 503)


def test_a_failure_of_the_viewer_returns_a_sentence_and_has_the_headers() -> None:
    answer = asyncio.run(responses.failure_response(REQUEST, ValueError("secret")))
    assert answer.status_code == 500
    assert json.loads(answer.body) == {
        "error": "The viewer failed on this request. Please report the error that its terminal shows.",
    }
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")


def test_an_address_without_a_route_returns_an_error_sentence() -> None:
    answer = asyncio.run(responses.unknown_address_response(REQUEST, HTTPException(404)))
    assert json.loads(answer.body) == {
        "error": "The viewer has nothing at this address. Open the address that `multihead view` printed.",
    }
    assert asyncio.run(responses.unknown_address_response(REQUEST, HTTPException(405))).status_code == 405
