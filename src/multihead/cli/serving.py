"""Serve pages to the browser of this machine until Ctrl-C: what the commands `view` and `try` share."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import webbrowser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from multihead.locale.texts import text
from multihead.viewer.server import serve

if TYPE_CHECKING:
    from multihead.viewer.site import WebSite


def serve_in_browser(
    site: WebSite, *, names: str, port: int | None, browser: bool, lang: str, fragment: str = ""
) -> None:
    """Serve a site until Ctrl-C: print its address, and open it in the browser.

    Args:
        site: what is served.
        names: what the page shows, for the line above the address.
        port: the port; None takes a free one.
        browser: whether to open the page.
        lang: the language of what is printed.
        fragment: the part of the address after "#".
    """
    console = Console(highlight=False, soft_wrap=True)

    def announce_address(address: str) -> None:
        address += f"#{fragment}" if fragment else ""
        console.print(text("view.open", lang, names=names), markup=False)
        console.print(f"  {address}", markup=False)
        console.print(text("view.end", lang), markup=False)
        if browser:
            webbrowser.open(redirect(address))

    with _exit_on_sigterm(), _redirecting_page() as redirect:
        serve(site, token=secrets.token_urlsafe(16), port=port or 0, ready=announce_address)


@contextmanager
def _redirecting_page() -> Iterator[Callable[[str], str]]:
    """Yield a function that writes an HTML page redirecting to an address, and returns the file:// URL of the page.

    Every user of the machine can read the command line of the browser, and the viewer's address contains its access
    token. So the browser opens a file that only this user can read, which is deleted when the context exits.
    """
    with tempfile.TemporaryDirectory(prefix="multihead-") as folder:  # only this user can open it (mode 700)

        def write_redirect(address: str) -> str:
            place = Path(folder) / "open.html"
            shown = escape(address)
            page = (
                '<!doctype html><meta charset="utf-8"><meta name="referrer" content="no-referrer">'
                f'<meta http-equiv="refresh" content="0; url={shown}"><a href="{shown}">multihead</a>\n'
            )
            with os.fdopen(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(page)
            return place.as_uri()

        yield write_redirect


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Raise SystemExit on SIGTERM within the context, so that temporary files are deleted."""

    def exit_with_signal_status(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_with_signal_status)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
