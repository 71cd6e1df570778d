"""What a server of pages serves: its routes, and computations that are cancelled when no client waits for them."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException

from multihead.viewer.responses import STATUS_CLIENT_GONE, file_response, wait_for_disconnect

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    from multihead.viewer.tiles import IsCancelled, WorkerThreads

WriteLine = Callable[[Mapping[str, Any]], None]
"""Function that writes a line of a streamed response, given as the content of a JSON object."""


class WebSite(ABC):
    """The routes of a server, and the threads that compute the responses.

    Args:
        threads: all threads that compute responses.

    Attributes:
        closing: set when the server shuts down; requests then stop waiting.
    """

    def __init__(self, *threads: WorkerThreads) -> None:
        self.closing = asyncio.Event()
        self._threads = threads

    @abstractmethod
    def routes(self) -> list[Route]:
        """Return the routes, relative to the token."""

    def close(self) -> None:
        """Cancel running computations and release the requests that wait for them."""
        self.closing.set()
        for each in self._threads:
            each.close()

    async def send_static_file(self, request: Request) -> Response:
        """Return a file of the page, `static/{folder}/{name}`."""
        return file_response(request.path_params["folder"], request.path_params["name"])

    async def compute_in_thread(
        self,
        request: Request,
        workers: WorkerThreads,
        compute: Callable[[IsCancelled], object],
    ) -> Any:
        """Run a computation in a worker thread; cancelled when the client disconnects or the server shuts down.

        Requests to the same address at the same time share one computation.
        """
        disconnected = asyncio.ensure_future(wait_for_disconnect(request))
        return await self._wait_for_job(workers, str(request.url), compute, disconnected)

    async def stream_lines(
        self, workers: WorkerThreads, compute: Callable[[IsCancelled, WriteLine], object]
    ) -> AsyncIterator[bytes]:
        """Yield newline-delimited JSON: what a computation in a worker thread writes with its second argument.

        The computation is cancelled when this iterator is closed, which happens when the client of a streamed response
        disconnects.
        """
        lines: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def write(line: Mapping[str, Any] | None) -> None:
            loop.call_soon_threadsafe(lines.put_nowait, line)

        def compute_and_end(is_cancelled: IsCancelled) -> None:
            try:
                compute(is_cancelled, write)
            finally:
                write(None)

        job = asyncio.ensure_future(self._wait_for_job(workers, object(), compute_and_end))
        try:
            while (line := await lines.get()) is not None:
                yield json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            await job
        finally:
            job.cancel()

    async def _wait_for_job(
        self,
        workers: WorkerThreads,
        key: Hashable,
        compute: Callable[[IsCancelled], object],
        *ends: asyncio.Future[Any],
    ) -> Any:
        """Wait for a computation in a worker thread, until one of `ends` is done or the server shuts down."""
        job = workers.submit(key, compute)
        done: asyncio.Future[Any] = asyncio.wrap_future(job.result)
        stops = [*ends, asyncio.ensure_future(self.closing.wait())]
        try:
            await asyncio.wait({done, *stops}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise HTTPException(STATUS_CLIENT_GONE, "gone")  # 499 has no standard reason phrase
            return done.result()
        finally:
            for each in stops:
                each.cancel()
            workers.stop_waiting(job)
            # Retrieve the exception of an abandoned job, or asyncio logs it as never retrieved.
            done.add_done_callback(lambda each: each.cancelled() or each.exception())
