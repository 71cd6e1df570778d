"""Access control of the viewer: accepts only requests to this machine with the token; sets headers of every response.

The viewer's address has a token, which other pages in the same browser cannot guess, and the server accepts its own
host names only, so no other page can read its data. The viewer's page loads nothing from other servers; its content
security policy forbids that.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from starlette.datastructures import MutableHeaders
from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The Content-Security-Policy of the viewer: the page may load files of this server and nothing else."""

SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def allowed_hosts(port: int) -> frozenset[str]:
    """List the values of a browser's Host header that mean this machine.

    >>> sorted(allowed_hosts(8000))
    ['127.0.0.1:8000', '[::1]:8000', 'localhost:8000']
    """
    return frozenset(f"{host}:{port}" for host in ("127.0.0.1", "localhost", "[::1]"))


def json_response(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response in ASCII, because UTF-8 cannot encode a lone surrogate in a token."""
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Response(text, status, headers, media_type="application/json")


def json_error_response(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response whose JSON body is {"error": sentence}."""
    return json_response({"error": sentence}, status, headers)


class AccessGuard:
    """Middleware that passes requests to this machine with the token, and adds the headers to every response.

    Checking the Host header blocks web pages whose host name was made to resolve to this machine (DNS rebinding);
    the token blocks everybody else who can reach this port.

    Args:
        app: the wrapped application.
        token: the first part of every path.
        hosts: the allowed values of the Host header.
    """

    def __init__(self, app: ASGIApp, *, token: str, hosts: Collection[str]) -> None:
        self.app = app
        self.token = token.encode()
        self.hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        if scope["type"] != "http":
            return  # the viewer has no web sockets

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._response_if_refused(scope)
        await (self.app if refused is None else refused)(scope, receive, send_with_headers)

    def _response_if_refused(self, scope: Scope) -> Response | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self.hosts:
            host = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts"
            return json_error_response(
                403,
                f"The request is for {host!r}, and this viewer serves only {', '.join(sorted(self.hosts))}. "
                "Open the address that `multihead view` printed.",
            )
        if scope["method"] not in ("GET", "HEAD"):
            return json_error_response(
                405,
                f"The method is {scope['method']}, and the viewer is read-only. Use GET.",
                {"Allow": "GET, HEAD"},
            )
        first = scope["path"].lstrip("/").split("/", 1)[0].encode()
        if not secrets.compare_digest(first, self.token):
            return json_error_response(
                403,
                "The address has no token, or not the token of this viewer. "
                "Open the address that `multihead view` printed.",
            )
        return None
