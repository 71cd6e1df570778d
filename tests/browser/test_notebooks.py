"""The widget in JupyterLab, Notebook 7 and marimo: real servers, a real kernel, a real browser."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import nbformat
import pytest

from tests.browser.records import IMAGE, causal, hostile
from tests.browser.shown import Shown, serious

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Dialog, Error, Locator

ROOT = Path(__file__).resolve().parents[2]
CELLS = [
    "import multihead as mh\nseen = mh.Record.load('causal.safetensors')",
    "view = seen.view()\nview",
    "second = seen.view(linked=view)\nsecond",
    "view.selection = (2, 1, slice(100, 200), slice(100, 200), 150)",
    "print(second.selection)",
    "mh.Record.load('hostile.safetensors').view(height=500)",
]
APP = """
import marimo

app = marimo.App()


@app.cell
def _():
    import multihead as mh

    seen = mh.Record.load("causal.safetensors")
    view = seen.view()
    view
    return


if __name__ == "__main__":
    app.run()
"""
WIDGET = re.compile(r"blob:|/@file/|data:text/javascript")  # where notebooks load the scripts of widgets from
SETTLED = """number => {
  const page = document.querySelectorAll('.multihead-view')[number]?.shadowRoot?.querySelector('.page');
  if (page?.dataset.saved !== 'true') return false;
  const [all, map, read] = ['all', 'map', 'read'].map(id => page.querySelector('#' + id));
  if (!all.hidden) return page.querySelectorAll('#rows tr').length > 0;
  return map.dataset.whole === 'true' && read.ariaBusy === 'false';
}"""


def data_dir() -> Path:
    """Where the pages of JupyterLab are installed, which may be another environment than that of the tests."""
    import jupyterlab

    return next(
        each / "share/jupyter" for each in Path(jupyterlab.__file__).parents if (each / "share/jupyter/lab").is_dir()
    )


@contextmanager
def server(folder: Path, *command: str) -> Iterator[str]:
    """Run a server of notebooks on a free port until the end of the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {f"{name}_DIR": str(folder / name.lower()) for name in ("JUPYTER_CONFIG", "JUPYTER_RUNTIME")}
    settings |= {"JUPYTER_PATH": str(data_dir()), "JUPYTERLAB_DIR": str(data_dir() / "lab"), "PYTHONPATH": str(ROOT)}
    settings |= {"IPYTHONDIR": str(folder / "ipython"), "XDG_CONFIG_HOME": str(folder / "config")}
    arguments = [each.format(port=port) for each in command]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], cwd=folder, env=os.environ | settings, stdout=log, stderr=log
        )
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 90
            while not responds(address):
                assert process.poll() is None, (folder / "server.log").read_text()
                assert time.monotonic() < deadline, (folder / "server.log").read_text()
                time.sleep(0.2)
            yield address
        finally:
            process.terminate()  # it stops its kernels first
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def responds(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two records, a notebook and an app."""
    made = tmp_path_factory.mktemp("notebooks")
    causal().save(made / "causal.safetensors")
    hostile().save(made / "hostile.safetensors")
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    for name in ("lab", "notebook"):
        cells = [nbformat.v4.new_code_cell(source) for source in CELLS]
        nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), made / f"{name}.ipynb")
    (made / "app.py").write_text(APP)
    return made


@pytest.fixture(scope="module")
def jupyter(folder: Path) -> Iterator[str]:
    """Serve JupyterLab and Notebook 7."""
    options = [
        "ip=127.0.0.1",
        "port={port}",
        "token=",
        "password=",
        "open_browser=False",
        "allow_root=True",
        "disable_check_xsrf=True",
    ]
    pages = "--ServerApp.jpserver_extensions={{'jupyterlab': True, 'notebook': True}}"
    with server(folder, "jupyterlab", *(f"--ServerApp.{option}" for option in options), pages) as address:
        yield address


class Cells(Shown):
    """A notebook in a browser; its complaints are errors of the widget's script."""

    def __init__(self, context: BrowserContext, address: str) -> None:
        super().__init__(context, address)
        self.page.set_default_timeout(60_000)

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type == "error" and WIDGET.search(message.location["url"]):
            self.complaints.append(message.text)

    def _failed(self, error: Error) -> None:
        if WIDGET.search(error.stack or ""):
            self.complaints.append(f"{error}\n{error.stack}")

    def _asked(self, dialog: Dialog) -> None:
        dialog.accept()  # the notebook may be left without saving it

    def run_all(self) -> None:
        """Run all cells, and wait for their end."""
        prompts = self.page.locator(".jp-Cell .jp-InputPrompt")
        prompts.nth(len(CELLS) - 1).wait_for()
        while not prompts.first.inner_text().strip("[]: "):  # a kernel that is not connected yet ignores it
            self.page.get_by_role("menuitem", name="Run", exact=True).click()
            self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            self.page.wait_for_timeout(2000)
        self.page.get_by_text(f"[{len(CELLS)}]:").wait_for()
        self.page.locator(".jp-Cell").last.scroll_into_view_if_needed()
        self.settle(2)

    def settle(self, number: int = 0) -> None:
        """Wait until a widget shows all that it requested."""
        self.page.wait_for_function(SETTLED, arg=number)

    def widget(self, number: int = 0) -> Locator:
        return self.page.locator(".multihead-view").nth(number)

    def static(self) -> Locator:
        return self.page.locator("[data-multihead-static]")

    def printed(self) -> str:
        """The output of the fifth cell, run again."""
        cell = self.page.locator(".jp-Cell").nth(4)
        cell.locator(".cm-content").click()
        before = cell.locator(".jp-InputPrompt").inner_text()
        self.page.keyboard.press("Control+Enter")
        self.page.wait_for_function(
            "before => { const prompt = document.querySelectorAll('.jp-Cell')[4].querySelector('.jp-InputPrompt');"
            " return prompt.innerText !== before && !prompt.innerText.includes('*'); }",
            arg=before,
        )
        return cell.locator(".jp-OutputArea-output").inner_text()


@pytest.fixture
def opened(browser: Browser, checked: Callable[[Cells], Cells]) -> Callable[..., Cells]:
    """Open notebooks."""

    def open_page(address: str, path: str) -> Cells:
        context = browser.new_context(viewport={"width": 1440, "height": 2600})  # notebooks draw only cells in view
        cells = checked(Cells(context, address))
        cells.visit(path, wait=False)
        return cells

    return open_page


@pytest.mark.parametrize(
    ("name", "path"), [("lab", "/lab/tree/lab.ipynb?reset"), ("notebook", "/notebooks/notebook.ipynb")]
)
def test_the_widget_shows_the_viewer_and_both_sides_select(
    opened: Callable[..., Cells], jupyter: str, folder: Path, name: str, path: str
) -> None:
    cells = opened(jupyter, path)
    cells.run_all()

    # Python selected a part of a head, and the linked view follows.
    for number in (0, 1):
        cells.settle(number)
        cells.widget(number).locator("#map[data-level='0']").wait_for()
        assert cells.widget(number).locator("#heada option:checked").inner_text().startswith("L2\u00a0H1")
    assert "queries=slice(100, 200, None), keys=slice(100, 200, None), query=150" in cells.printed()
    assert [each.is_visible() for each in cells.static().all()] == [False] * 3

    assert serious(cells.page, ".multihead-view") == []

    # The wheel zooms once the map has the focus; the ruler, the level and Python's selection follow.
    cells.widget().locator("#map").scroll_into_view_if_needed()
    cells.widget().locator("#map").click()
    cells.page.mouse.wheel(0, 900)
    cells.settle()
    cells.page.wait_for_function(
        "document.querySelector('.multihead-view').shadowRoot.getElementById('map').dataset.level > 0"
    )
    found = re.search(r"Selection\(layer=2, head=1, queries=slice\((\d+), (\d+), None\)", cells.printed())
    assert found is not None
    assert int(found[2]) - int(found[1]) > 150

    # Keys act on the widget and not on the notebook, and a selection in one view moves the other.
    count = cells.page.locator(".jp-Cell").count()
    cells.widget().locator("#map").click()
    cells.page.keyboard.press("]")
    for number in (0, 1):
        cells.page.wait_for_function(
            "n => document.querySelectorAll('.multihead-view')[n].shadowRoot.getElementById('heada').value === '8'",
            arg=number,
        )
    cells.page.keyboard.press("Escape")
    cells.page.keyboard.press("d")
    cells.page.keyboard.press("d")
    cells.widget().locator("#grid a").first.wait_for()
    cells.widget(1).locator("#grid a").first.wait_for()
    assert cells.page.locator(".jp-Cell").count() == count
    assert cells.page.url.split("?")[0].endswith(f"{name}.ipynb")  # its address stays that of the notebook

    # Tokens that try to be more than text stay text.
    strange = cells.widget(2)
    strange.scroll_into_view_if_needed()
    strange.locator("#grid a").first.click()
    cells.settle(2)
    assert IMAGE in strange.locator("#text").inner_text()
    assert cells.page.evaluate("window.broken") is None

    # A saved notebook, opened again without a kernel, shows the picture and the table.
    cells.page.keyboard.press("Control+s")
    outputs = wait_for_saved(folder / f"{name}.ipynb")
    assert not any("<script" in html for html in outputs)
    assert len(outputs) == 3
    request = urllib.request.Request(f"{jupyter}/api/sessions")
    for session in json.load(urllib.request.urlopen(request)):
        if session["path"] == f"{name}.ipynb":
            urllib.request.urlopen(urllib.request.Request(f"{jupyter}/api/sessions/{session['id']}", method="DELETE"))
    cells.page.goto("about:blank")
    cells.page.goto(jupyter + path)
    cells.static().nth(0).locator("img").wait_for()
    assert cells.static().nth(0).locator("img").evaluate("image => image.naturalWidth") > 100
    assert cells.static().nth(0).locator("table tr").count() == 1 + 12 + 1  # the chance of each share comes last
    assert not cells.page.get_by_text("Error displaying widget").first.is_visible()
    assert cells.page.evaluate("window.broken") is None


def wait_for_saved(path: Path) -> list[str]:
    """Return the HTML outputs of a notebook's file, once it has some."""
    for _ in range(100):
        notebook = nbformat.read(path, as_version=4)
        found = [
            output.data.get("text/html", "") for cell in notebook.cells for output in cell.outputs if "data" in output
        ]
        if any(found):
            return ["".join(each) for each in found if each]
        time.sleep(0.2)
    return []


def test_the_widget_works_in_marimo(opened: Callable[..., Cells], folder: Path) -> None:
    command = ["marimo", "run", "app.py", "--headless", "--no-token", "--host", "127.0.0.1", "--port", "{port}"]
    with server(folder, *command) as address:
        cells = opened(address, "/")
        cells.widget().locator("#grid a").first.click()
        cells.widget().locator("#map[data-whole=true]").wait_for()
        cells.widget().locator("#zoomone").click()
        cells.widget().locator("#map[data-level='0']").wait_for()
        assert cells.widget().locator("#read data").inner_text() != ""
