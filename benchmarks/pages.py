"""Write results: a dated page in benchmarks/results/, tables in docs/measured.md and its translation, and pictures."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "docs" / name for name in ("measured.md", "measured.zh.md")]
HEAD = "|---|---|---|\n"  # of a table with three columns
INK, ACCENT, GREY = "#1D2733", "#C2185B", "#8A93A0"


def today() -> str:
    """Return the date, such as 2026-11-22."""
    return dt.date.today().isoformat()


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table.

    >>> table(["case", "ratio"], [["layer", "2.0 x"]])
    ['| case | ratio |', '|---|---|', '| layer | 2.0 x |']
    """
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]


def write_page(folder: Path, name: str, lines: Iterable[str]) -> None:
    """Write a page as `<date>-<name>.md`, and print its path."""
    folder.mkdir(exist_ok=True)
    target = folder / f"{today()}-{name}.md"
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    click.echo(f"written to {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")


def replace_table(page: str, mark: str, rows: Iterable[Sequence[str]]) -> str:
    r"""Replace the rows of the table with three columns that ends at a mark; a page without the mark stays as it is.

    >>> replace_table("|---|---|---|\n| old | | |\n<!-- mark -->", "\n<!-- mark -->", [["new", "", ""]])
    '|---|---|---|\n| new |  |  |\n<!-- mark -->'
    """
    if mark not in page:
        return page
    end = page.index(mark)
    begin = page.rindex(HEAD, 0, end) + len(HEAD)
    return page[:begin] + "\n".join(f"| {' | '.join(row)} |" for row in rows) + page[end:]


@contextmanager
def picture(target: Path, width: float, height: float) -> Iterator[Any]:
    """Yield axes of a size in inches, and write what is drawn there as an SVG that is equal from run to run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": target.stem, "font.family": "sans-serif"}):
        figure = Figure((width, height), layout="constrained")
        yield figure.add_subplot()
        figure.savefig(target, metadata={"Date": None})
    click.echo(f"{target}: {target.stat().st_size / 1e3:.0f} kB")
