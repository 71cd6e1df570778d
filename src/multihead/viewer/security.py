"""Who may ask the viewer: a request to this machine, by the address that was printed; and what every answer says."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""What a page of the viewer may load: its own files, and nothing from anywhere else."""

HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def hosts_of(port: int) -> frozenset[str]:
    """Name the hosts that mean this machine, as a browser's Host header says them.

    >>> sorted(hosts_of(8000))
    ['127.0.0.1:8000', '[::1]:8000', 'localhost:8000']
    """
    return frozenset(f"{host}:{port}" for host in ("127.0.0.1", "localhost", "[::1]"))


def said(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with JSON; a lone surrogate in a token stays what it is."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def refusal(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """Answer with a sentence that says what is wrong."""
    return said({"error": sentence}, status, headers)


class Guard:
    """Lets requests through that name this machine and carry the token, and adds the headers to every answer.

    The Host header keeps out pages whose name was made to point here (DNS rebinding), the token everybody else
    who can reach this port.

    Args:
        app: what answers them.
        token: the first part of every address.
        hosts: what the Host header may say.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        self.app = app
        self.token = token.encode()
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return  # there are no web sockets here

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                more = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(each for each in more if each[0] not in there)]
            await send(message)

        refused = self._refused(scope)
        await (self.app if refused is None else refused)(scope, receive, with_headers)

    def _refused(self, scope: Scope) -> Response | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            given = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
            return refusal(
                403,
                f"The request is for {given!r}, and this viewer answers only as {', '.join(sorted(self.hosts))}. "
                "Open the address that `multihead view` printed.",
            )
        if scope["method"] not in ("GET", "HEAD"):
            return refusal(
                405,
                f"The method is {scope['method']}, and the viewer only shows: nothing can be changed. Use GET.",
                {"Allow": "GET, HEAD"},
            )
        first = scope["path"].lstrip("/").split("/", 1)[0].encode()
        if not secrets.compare_digest(first, self.token):
            return refusal(
                403,
                "The address does not carry the token of this viewer, or that of an earlier one. "
                "Open the address that `multihead view` printed.",
            )
        return None
