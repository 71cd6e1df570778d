"""The HTTP responses of the viewer: numbers, files of the page, downloads, and error sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from multihead.errors import InputError, MultiheadError
from multihead.probes.blocks import CancelledError
from multihead.viewer.page import render_viewer_page
from multihead.viewer.query_params import NotFoundError, NotReadyError
from multihead.viewer.security import SECURITY_HEADERS, json_error_response

if TYPE_CHECKING:
    from starlette.requests import Request

    from multihead.viewer.levels import Array

SERVED_FOLDERS = ("view", "try", "shared")
"""The folders of `static` whose files are served."""

MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
"""Media type by file extension; other files are not served."""

DOWNLOAD_MEDIA_TYPES = {
    "csv": "text/csv; charset=utf-8",
    "json": "application/json",
    "html": "text/html; charset=utf-8",
}

STATUS_CLIENT_GONE = 499
"""HTTP status of the response to a client that has disconnected, which is never read."""


def page_response(lang: str, folder: str = "view") -> Response:
    """Return the HTML page of the viewer, "view", or of `multihead try`, "try", in a language."""
    return Response(render_viewer_page(folder, lang), media_type=DOWNLOAD_MEDIA_TYPES["html"])


def file_response(folder: str, name: str) -> Response:
    """Return a script or style sheet of the page; only files that are listed in the folder are served.

    Raises:
        NotFoundError: there is no such file, or its type is not served.
    """
    files = resources.files(__package__) / "static" / folder
    listed = {each.name: each for each in files.iterdir()} if folder in SERVED_FOLDERS else {}
    kind = MEDIA_TYPES.get(PurePosixPath(name).suffix)
    if name not in listed or kind is None:
        raise NotFoundError("The page has no such file.", "Open the address that `multihead view` printed.")
    return Response(listed[name].read_bytes(), media_type=kind)


def floats_response(values: Array, block: tuple[int, int] | None = None) -> Response:
    """Return an array as little-endian float32, with its shape in the X-Shape header; NaN marks a masked cell.

    Args:
        values: the numbers.
        block: numbers of rows and columns of weights that each value averages, for the X-Block header.
    """
    headers = {"X-Shape": ",".join(map(str, values.shape))}
    if block is not None:
        headers["X-Block"] = ",".join(map(str, block))
    return Response(values.astype("<f4").tobytes(), headers=headers, media_type="application/octet-stream")


def download_response(parts: Iterator[bytes], name: str, form: str) -> Response:
    """Return a download of the file `name.form`, streamed as its parts are computed."""
    headers = {"Content-Disposition": f'attachment; filename="{name}.{form}"'}
    return StreamingResponse(parts, headers=headers, media_type=DOWNLOAD_MEDIA_TYPES[form])


async def wait_for_disconnect(request: Request) -> None:
    """Wait until the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def error_response(request: Request, error: Exception) -> Response:
    """Return the sentence of an error: status 400, 404, 500 or 503."""
    if isinstance(error, NotReadyError):
        return json_error_response(503, str(error), {"Retry-After": "1"})
    # Status 500, because an unreadable or truncated file is not the fault of the request.
    status = 404 if isinstance(error, NotFoundError) else 500 if isinstance(error, InputError) else 400
    return json_error_response(status, str(error))


async def cancelled_response(request: Request, error: Exception) -> Response:
    """Return an empty response for a cancelled computation, whose client has disconnected."""
    return Response(status_code=STATUS_CLIENT_GONE)


async def unknown_address_response(request: Request, error: HTTPException) -> Response:
    """Return the response to an address without a route."""
    if error.status_code == 404:
        return json_error_response(
            404, "The viewer has nothing at this address. Open the address that `multihead view` printed."
        )
    return Response(status_code=error.status_code)


async def failure_response(request: Request, error: Exception) -> Response:
    """Return the response to an unexpected failure; the server prints the traceback."""
    return json_error_response(
        500, "The viewer failed on this request. Please report the error that its terminal shows.", SECURITY_HEADERS
    )


EXCEPTION_HANDLERS: Mapping[Any, Any] = {
    MultiheadError: error_response,
    CancelledError: cancelled_response,
    HTTPException: unknown_address_response,
    Exception: failure_response,
}
"""Class of an exception -> the response to a request that raised it, for every application of the viewer."""
