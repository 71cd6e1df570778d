"""Answer the requests of the viewer's page without a port: each answer is sent as messages of bounded size.

The server's application runs in the process of the kernel, so every request has the routes, errors, cancellation and
cache of `multihead view`, and no handler exists twice. The application has an event loop in a separate thread, because
notebooks deliver messages in different threads and loops.
"""

from __future__ import annotations

import asyncio
import threading
import traceback
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from starlette.applications import Starlette

from multihead.viewer.responses import EXCEPTION_HANDLERS
from multihead.viewer.routes import Viewer

if TYPE_CHECKING:
    from multihead.viewer.payload import RecordedRun

MAX_BYTES_PER_MESSAGE = 512 << 10
"""Maximum number of bytes of a response body in one message to the page."""

FORWARDED_HEADERS = ("content-type", "content-disposition", "x-shape", "x-block")
"""The response headers that the page's script reads; only these are sent to it."""

SendPart = Callable[[dict[str, Any], bytes], None]
"""Function that sends a part of a response: {"status", "headers", "last"}, and the next bytes of the body."""


class InProcessServer:
    """Answers requests for some records with the routes of the viewer's server.

    The server runs a separate thread with an event loop, because Jupyter kernels deliver messages in different threads.
    Widgets of the same records share one server, and so its cache of tiles. The threads of a server end when it is
    deleted.

    Args:
        runs: the records.
        lang: the language of the page, "en" or "zh".
    """

    def __init__(self, runs: Sequence[RecordedRun], lang: str) -> None:
        viewer = Viewer(runs, lang=lang, progress=lambda done, total: None)
        self._app = Starlette(routes=viewer.routes(), exception_handlers=EXCEPTION_HANDLERS)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run_loop, args=(self._loop,), name="multihead widget", daemon=True).start()
        weakref.finalize(self, _stop_loop, viewer, self._loop).atexit = False

    def start_answering(self, path: str, send: SendPart) -> Future[None]:
        """Answer a request; cancelling the result cancels the computation.

        Args:
            path: the address relative to the page, such as "api/view".
            send: called with each part of the answer, in the thread of this object.
        """
        return asyncio.run_coroutine_threadsafe(self._answer(path, send), self._loop)

    async def _answer(self, path: str, send: SendPart) -> None:
        address, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET",
            "scheme": "http",
            "path": unquote(f"/{address}"),
            "raw_path": f"/{address}".encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [],
        }
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()  # without an end: a page that no longer waits cancels
        received.put_nowait({"type": "http.request", "body": b"", "more_body": False})
        head: dict[str, Any] = {}
        body = bytearray()

        async def send_part(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                found = {name.decode().lower(): value.decode() for name, value in message["headers"]}
                head["status"] = message["status"]
                head["headers"] = {name: found[name] for name in FORWARDED_HEADERS if name in found}
                return
            body.extend(message.get("body", b""))
            while len(body) > MAX_BYTES_PER_MESSAGE:
                send({**head, "last": False}, bytes(body[:MAX_BYTES_PER_MESSAGE]))
                del body[:MAX_BYTES_PER_MESSAGE]
            if not message.get("more_body", False):
                send({**head, "last": True}, bytes(body))

        try:
            await self._app(scope, received.get, send_part)
        except Exception:
            traceback.print_exc()  # the page shows only that the viewer failed
            raise


_SHARED_SERVERS: weakref.WeakValueDictionary[tuple[object, ...], InProcessServer] = weakref.WeakValueDictionary()


def shared_server(runs: Sequence[RecordedRun], lang: str) -> InProcessServer:
    """Return the server of these records: an existing one if a widget shows the same records, else a new one."""
    key = (*(id(run.record) for run in runs), lang)  # the object keeps the records, so the ids are not reused
    return _SHARED_SERVERS.get(key) or _SHARED_SERVERS.setdefault(key, InProcessServer(runs, lang))


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    with closing(loop):
        loop.run_forever()


def _stop_loop(viewer: Viewer, loop: asyncio.AbstractEventLoop) -> None:
    loop.call_soon_threadsafe(loop.stop)
    # In a separate thread, because the current thread may be a worker, which cannot wait for itself.
    threading.Thread(target=viewer.close, name="multihead widget closing", daemon=True).start()
