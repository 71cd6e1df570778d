"""The local web server of `multihead view` and `multihead try`: pages that are served to this machine only."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import RedirectResponse
from starlette.routing import Mount, Route

from multihead.errors import InputError
from multihead.viewer.responses import EXCEPTION_HANDLERS
from multihead.viewer.security import AccessGuard, allowed_hosts

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from multihead.viewer.site import WebSite


def build_application(site: WebSite, *, token: str, hosts: Collection[str]) -> Starlette:
    """Build the web application of a site.

    Args:
        site: the routes and computations to serve, such as a `Viewer`.
        token: the first part of every path.
        hosts: the allowed values of a request's Host header.
    """

    @asynccontextmanager
    async def close_site_at_end(app: Starlette) -> AsyncIterator[None]:
        yield
        site.close()

    async def redirect_to_page(request: Request) -> Response:
        return RedirectResponse(f"/{token}/")

    return Starlette(
        routes=[Route(f"/{token}", redirect_to_page), Mount(f"/{token}", routes=site.routes())],
        middleware=[Middleware(AccessGuard, token=token, hosts=hosts)],
        lifespan=close_site_at_end,
        exception_handlers=EXCEPTION_HANDLERS,
    )


def serve(site: WebSite, *, token: str, port: int = 0, ready: Callable[[str], None] = lambda address: None) -> None:
    """Serve a site to this machine until Ctrl-C.

    Args:
        site: the routes and computations to serve, such as a `Viewer`.
        token: the first part of every path.
        port: the port to listen on; 0 chooses a free one.
        ready: called with the page's address once the server listens.

    Raises:
        InputError: the port is in use or cannot be opened.
    """
    # asyncio sets TCP_NODELAY only if the socket's protocol is IPPROTO_TCP; otherwise each small response is delayed
    # by 40 ms, until the browser's acknowledgement.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as taken:
        try:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            taken.listen()
        except OSError as error:
            reason = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be opened: {error.strerror}"
            raise InputError(
                f"Port {port} {reason}.", "Give another --port, or leave it out to use a free one."
            ) from None
        port = taken.getsockname()[1]
        app = build_application(site, token=token, hosts=allowed_hosts(port))
        options: dict[str, Any] = {"server_header": False, "date_header": False, "proxy_headers": False, "ws": "none"}
        config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1, **options)
        ready(f"http://127.0.0.1:{port}/{token}/")
        with suppress(KeyboardInterrupt):  # the server has shut down already
            _CancellingServer(config, site).run(sockets=[taken])


class _CancellingServer(uvicorn.Server):
    """A server that cancels running computations when it shuts down, so that open requests end at once."""

    def __init__(self, config: uvicorn.Config, site: WebSite) -> None:
        super().__init__(config)
        self.site = site

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Cancel the running computations, then shut down."""
        self.site.closing.set()
        await asyncio.sleep(0)
        await super().shutdown(sockets)
