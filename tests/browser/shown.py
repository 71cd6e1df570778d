"""A page in a browser: what a reader would see of it, and what it did meanwhile."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from axe_playwright_python.sync_playwright import Axe

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, ConsoleMessage, Dialog, Error, Locator, Page, Route

DESKTOP = {"viewport": {"width": 1440, "height": 900}, "color_scheme": "light"}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}
RAMP = ["#FBFAF7", "#BFDFF1", "#86C2E6", "#54A3DA", "#387FCA", "#325AB4", "#32388E", "#281E5E", "#150D2C"]


class Shown:
    """One page, which may request what begins with its address.

    Attributes:
        elsewhere: other addresses that it requested.
        complaints: errors and warnings of the console, errors that nobody caught, and dialogs.
    """

    def __init__(self, context: BrowserContext, address: str) -> None:
        self.context, self.address = context, address
        self.elsewhere: list[str] = []
        self.complaints: list[str] = []
        context.route(re.compile(f"^(?!{re.escape(address)}|data:|blob:|about:)"), self._refuse)
        self.page = context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", self._heard)
        self.page.on("pageerror", self._failed)
        self.page.on("dialog", self._asked)

    def _refuse(self, route: Route) -> None:
        self.elsewhere.append(route.request.url)
        route.abort()

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _failed(self, error: Error) -> None:
        self.complaints.append(str(error))

    def _asked(self, dialog: Dialog) -> None:
        self.complaints.append(dialog.message)
        dialog.dismiss()

    def visit(self, place: str = "", *, wait: bool = True) -> None:
        """Open an address of the viewer, afresh."""
        self.page.goto("about:blank")
        self.page.goto(self.address + place)
        if wait:
            self.settle()

    def settle(self) -> None:
        """Wait until every map in view is loaded, and the address matches the page."""
        self.page.wait_for_function(SETTLED)

    def close(self) -> None:
        self.context.close()

    def at(self, selector: str) -> Locator:
        return self.page.locator(selector)

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text().replace("\u00a0", " ")

    def texts(self, selector: str) -> list[str]:
        return [each.replace("\u00a0", " ").strip() for each in self.page.locator(selector).all_inner_texts()]

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)
        self.settle()

    @property
    def place(self) -> dict[str, str]:
        """The parameters in the address."""
        found = self.page.evaluate("Object.fromEntries(new URLSearchParams(location.hash.slice(1)))")
        assert isinstance(found, dict)
        return found

    def pane(self, which: str = "a") -> dict[str, float]:
        """Return a pane's layout: left, top, its cells' width and height, and its first key and query."""
        return dict(self.page.evaluate(PANE, which))

    def cell(self, query: int, key: int, which: str = "a") -> tuple[float, float]:
        """Where the middle of a cell is."""
        pane = self.pane(which)
        return (
            pane["left"] + (key + 0.5 - pane["key"]) * pane["x"],
            pane["top"] + (query + 0.5 - pane["query"]) * pane["y"],
        )

    def point(self, query: int, key: int, which: str = "a") -> None:
        """Point at a cell."""
        self.page.mouse.move(*self.cell(query, key, which))
        self.settle()

    def weight(self) -> float:
        """The value that the reading panel shows, with all its digits."""
        return float(self.page.locator("#read data").get_attribute("value") or "nan")

    def colour(self, query: float, key: float, which: str = "a") -> tuple[int, ...]:
        """The colour of the map at a place."""
        pane = self.pane(which)
        x, y = (key - pane["key"]) * pane["x"] + pane["left"], (query - pane["query"]) * pane["y"] + pane["top"]
        return tuple(self.page.evaluate(COLOURS, [x, y, 1])[0])

    def colours(self, query: int, key: int, size: int = 40) -> set[tuple[int, ...]]:
        """Return the colours of a square of the map, `size` pixels per side, from the middle of a cell on."""
        x, y = self.cell(query, key)
        return {tuple(each) for each in self.page.evaluate(COLOURS, [round(x), round(y), size])}

    def inspected_colour(self, row: int, column: int, cells: int) -> tuple[int, ...]:
        """The colour of a cell of the inspector's map, which has `cells` cells per side."""
        return tuple(self.page.evaluate(INSPECTED, [row, column, cells]))

    @property
    def wide(self) -> int:
        """How wide the page is, whatever the window shows of it."""
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


SETTLED = """() => {
  const [all, one, map, read] = ['all', 'one', 'map', 'read'].map(id => document.getElementById(id));
  if (document.documentElement.dataset.saved !== 'true') return false;
  if (!all.hidden) return document.querySelectorAll('#rows tr').length > 0;
  if (one.classList.contains('mapless')) return true;
  return map.dataset.whole === 'true' && read.ariaBusy === 'false';
}"""

PANE = """async which => {
  const { shown } = await import(new URL('static/view/map.js', document.baseURI));
  const { state } = await import(new URL('static/view/permalink.js', document.baseURI));
  const box = document.getElementById('map').getBoundingClientRect();
  const pane = shown.panes.find(each => each.which === which), { x, y, width, height } = pane;
  return { left: box.left + pane.left, top: box.top + pane.above, x, y, width, height, key: state.x, query: state.y };
}"""

# A piece of the map's canvas is copied before it is read: browsers warn of a canvas that is read again and again.
COLOURS = """([x, y, size]) => {
  const map = document.getElementById('map'), box = map.getBoundingClientRect(), ratio = map.width / box.width;
  const copy = Object.assign(document.createElement('canvas'), { width: size, height: size });
  const pen = copy.getContext('2d'), found = [];
  const from = [(x - box.left) * ratio, (y - box.top) * ratio].map(Math.floor);
  pen.drawImage(map, ...from, size, size, 0, 0, size, size);
  const { data } = pen.getImageData(0, 0, size, size);
  for (let i = 0; i < data.length; i += 4) found.push([...data.slice(i, i + 3)]);
  return found;
}"""


INSPECTED = """([row, column, cells]) => {
  const canvas = document.querySelector('#insp canvas'), side = canvas.width / cells;
  const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
  const pen = copy.getContext('2d', { willReadFrequently: true });
  pen.drawImage(canvas, 0, 0);
  return [...pen.getImageData(Math.floor((column + .5) * side), Math.floor((row + .5) * side), 1, 1).data.slice(0, 3)];
}"""


def ink(tone: float, ramp: Sequence[str] = RAMP) -> tuple[int, ...]:
    """The colour of a ramp at a tone from 0 to 1."""
    place = max(0.0, min(1.0, tone)) * (len(ramp) - 1)
    first = min(int(place), len(ramp) - 2)
    low, high = ([int(stop[at : at + 2], 16) for at in (1, 3, 5)] for stop in ramp[first : first + 2])
    return tuple(round(a + (b - a) * (place - first)) for a, b in zip(low, high, strict=True))


def percent(text: str) -> float:
    """Parse a percentage to a share: "67 %", or "5·10⁻⁴ %" if it is small."""
    found = re.search(r"([-−+]?[\d.]+)(?:·10⁻([⁰¹²³⁴⁵⁶⁷⁸⁹]+))?", text)
    assert found is not None, text
    power = int("".join(str("⁰¹²³⁴⁵⁶⁷⁸⁹".index(digit)) for digit in found[2])) if found[2] else 0
    return float(found[1].replace("−", "-")) / 10**power / 100


RULES = ("empty-table-header", "region", "aria-allowed-role", "landmark-unique", "skip-link", "target-size")
"""Rules of axe whose violations are not serious, or that are off, and that a page keeps all the same."""


def ruled(page: Page) -> list[str]:
    """List the violations of `RULES` in a page."""
    found = Axe().run(page, options={"runOnly": {"type": "rule", "values": list(RULES)}}).response["violations"]
    return [f"{one['id']}: {each['html'][:120]}" for one in found for each in one["nodes"]]


def serious(page: Page, context: str | None = None) -> list[str]:
    """List the serious violations of accessibility that axe finds in a page, or in a part of it."""
    found = Axe().run(page, context=context).response["violations"]
    return [
        f"{one['id']}: {each['html'][:120]}"
        for one in found
        if one["impact"] in ("serious", "critical")
        for each in one["nodes"]
    ]
