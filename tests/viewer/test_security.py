"""Access to the viewer: only for the right host, with the right token, and read-only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multihead.viewer import security
from multihead.viewer.payload import RecordedRun
from tests.viewer.serving import TOKEN, Served, serving
from tests.viewer.watching import watch


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(RecordedRun("a.safetensors", watch(5))) as found:
        yield found


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]"])
def test_the_names_of_this_machine_are_answered(served: Served, host: str) -> None:
    assert served.get("api/view", headers={"Host": f"{host}:{served.port}"}).status == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:{port}", ""])
def test_any_other_name_is_refused(served: Served, host: str) -> None:
    host = host.format(port=served.port)
    answer = served.get("api/view", headers={"Host": host})
    assert answer.status == 403
    names = ", ".join(sorted(security.allowed_hosts(served.port)))
    assert answer.error == (
        f"The request is for {host!r}, and this viewer serves only {names}. "
        "Open the address that `multihead view` printed."
    )


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/x/api/view",
        f"/{TOKEN[:-1]}/api/view",
        f"/{TOKEN}x/",
        "/api/view",
        f"//{TOKEN}x",
        f"/x/../{TOKEN}/api/view",
    ],
)
def test_without_the_token_every_request_is_rejected(served: Served, path: str) -> None:
    answer = served.request(path)
    assert answer.status == 403
    assert answer.error == (
        "The address has no token, or not the token of this viewer. Open the address that `multihead view` printed."
    )


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(served: Served, method: str) -> None:
    answer = served.get("api/view", method=method)
    assert answer.status == 405
    assert answer.headers["allow"] == "GET, HEAD"
    assert answer.error == f"The method is {method}, and the viewer is read-only. Use GET."


def test_head_gives_the_headers_alone(served: Served) -> None:
    answer = served.get("api/view", method="HEAD")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    "path",
    [
        f"/{TOKEN}/",
        f"/{TOKEN}/api/view",
        f"/{TOKEN}/nowhere",
        "/wrong",
        f"/{TOKEN}/api/runs/0/samples/0/heads/0/0/row?query=0",
    ],
)
def test_every_answer_has_the_headers(served: Served, path: str) -> None:
    answer = served.request(path)
    for name, value in security.SECURITY_HEADERS.items():
        assert answer.headers[name.lower()] == value
    assert answer.headers["content-security-policy"] == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    assert "server" not in answer.headers or "uvicorn" in answer.headers["server"]
