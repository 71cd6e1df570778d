"""A real browser that may speak to the viewer alone, and pages that may not complain."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from multihead.viewer.payload import RecordedRun
from tests.browser.records import (
    causal,
    encoder_decoder,
    hostile,
    important,
    inherited,
    medium,
    of_a_script,
    other_run,
    partial,
    repeated,
    several,
    statistics_only,
    translating,
    whole,
)
from tests.picture_records import encoder, generated, written
from tests.viewer.serving import TOKEN, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.shown import Shown

Page = TypeVar("Page", bound="Shown")
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
        "several": several,
        "encoder": encoder,
        "generated": generated,
        "written": written,
        "important": important,
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
def checked() -> Iterator[Callable[[Page], Page]]:
    """Close pages at the end; fails if one requested another address or logged an error."""
    shown: list[Any] = []

    def check_at_end(page: Page) -> Page:
        shown.append(page)
        return page

    yield check_at_end
    for page in shown:
        page.close()
    for page in shown:
        assert page.elsewhere == [], f"The page requested {page.elsewhere}."
        assert page.complaints == [], f"The page logged errors: {page.complaints}."


@pytest.fixture
def opened(browser: Browser, served: Callable[..., str], checked: Callable[[Shown], Shown]) -> Callable[..., Shown]:
    """Open pages of records."""
    from tests.browser.shown import DESKTOP, Shown

    def open_page(*names: str, place: str = "", lang: str = "en", wait: bool = True, **options: Any) -> Shown:
        context = browser.new_context(**DESKTOP | options)
        page = checked(Shown(context, served(*(names or ("causal",)), lang=lang)))
        page.visit(place, wait=wait)
        return page

    return open_page
