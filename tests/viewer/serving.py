"""A running viewer: a real server on a real port, requested with the standard library's HTTP client."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn

from multihead.viewer.payload import RecordedRun
from multihead.viewer.routes import Viewer
from multihead.viewer.security import allowed_hosts
from multihead.viewer.server import build_application
from multihead.viewer.site import WebSite

TOKEN = "the-token-of-a-test"


@dataclass(frozen=True)
class Answer:
    """A response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        sentence: str = self.json["error"]
        return sentence

    @property
    def floats(self) -> Any:
        shape = [int(each) for each in self.headers["x-shape"].split(",")]
        return np.frombuffer(self.body, "<f4").reshape(shape)


@dataclass(frozen=True)
class Served:
    """A running server."""

    port: int

    def get(self, path: str, **options: Any) -> Answer:
        """Request an address below the token."""
        return self.request(f"/{TOKEN}/{path}", **options)

    def request(self, path: str, *, method: str = "GET", headers: Mapping[str, str] | None = None) -> Answer:
        """Request any address, without adding the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        given = dict(headers or {})
        connection.putrequest(method, path, skip_host="Host" in given, skip_accept_encoding=True)
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        found = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
        connection.close()
        return found

    @contextmanager
    def requesting(self, path: str) -> Iterator[None]:
        """Request an address below the token, and disconnect at the end of the block without reading the response."""
        with socket.create_connection(("127.0.0.1", self.port)) as client:
            client.sendall(f"GET /{TOKEN}/{path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n\r\n".encode())
            yield


def viewer_of(*runs: RecordedRun, lang: str = "en", progress: Any = lambda done, total: None) -> Viewer:
    """Make the pages of some records."""
    return Viewer(runs, lang=lang, progress=progress)


@contextmanager
def serving(*runs: RecordedRun, **options: Any) -> Iterator[Served]:
    """Serve records until the block ends."""
    with serving_site(viewer_of(*runs, **options)) as served:
        yield served


@contextmanager
def serving_site(site: WebSite) -> Iterator[Served]:
    """Serve pages until the block ends."""
    with socket.socket(proto=socket.IPPROTO_TCP) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        app = build_application(site, token=TOKEN, hosts=allowed_hosts(port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [taken]}, daemon=True)
        thread.start()
        try:
            yield Served(port)
        finally:
            server.should_exit = True
            thread.join(20)
