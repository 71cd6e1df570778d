"""A real browser that may speak to the viewer alone, and pages that may not complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from multihead.viewer.payload import RecordedRun
from tests.browser.records import (
    causal,
    encoder_decoder,
    hostile,
    inherited,
    medium,
    of_a_script,
    other_run,
    partial,
    repeated,
    statistics_only,
    translating,
    whole,
)
from tests.viewer.serving import TOKEN, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.shown import Shown

SILENT = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")


# `make browser` runs these tests: it installs a browser and the packages that they import. `make test` reads this file
# too, so what those packages give is imported where it is used.
collect_ignore_glob = [] if os.environ.get("MULTIHEAD_BROWSER") else ["*.py"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Start Chromium once for all tests."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path is not None, "There is no Chromium. `make browser` installs it."
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", *SILENT])
        yield started
        started.close()


@pytest.fixture(scope="session")
def served(browser: Browser) -> Iterator[Callable[..., str]]:
    """Serve records by name, each set of them once; the pages' addresses come back."""
    made = {
        "causal": causal,
        "other": other_run,
        "hostile": hostile,
        "statistics": statistics_only,
        "translating": translating,
        "whole": whole,
        "inherited": inherited,
        "of a script": of_a_script,
        "partial": partial,
        "medium": medium,
        "encoder decoder": encoder_decoder,
        "repeated": repeated,
    }
    with ExitStack() as servers:
        kept: dict[tuple[str, ...], str] = {}

        def address(*names: str, lang: str = "en") -> str:
            key = (*names, lang)
            if key not in kept:
                runs = [RecordedRun(f"{name}.safetensors", made[name]()) for name in names]
                kept[key] = f"http://127.0.0.1:{servers.enter_context(serving(*runs, lang=lang)).port}/{TOKEN}/"
            return kept[key]

        yield address


@pytest.fixture
def opened(browser: Browser, served: Callable[..., str]) -> Iterator[Callable[..., Shown]]:
    """Open pages; fails at the end if one requested another address or logged an error."""
    from tests.browser.shown import Shown

    shown: list[Shown] = []

    def open_page(*names: str, place: str = "", lang: str = "en", wait: bool = True, **options: Any) -> Shown:
        given = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"} | options
        page = Shown(browser.new_context(**given), served(*(names or ("causal",)), lang=lang))
        shown.append(page)
        page.visit(place, wait=wait)
        return page

    yield open_page
    for page in shown:
        page.close()
    for page in shown:
        assert page.elsewhere == [], f"The page requested {page.elsewhere}."
        assert page.complaints == [], f"The page logged errors: {page.complaints}."
