"""Write what `make cuda` measured into the pages: python -m benchmarks.cuda build/cuda."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.measure import Ratio
from benchmarks.pages import PAGES, RESULTS, replace_table, table, today, write_page

MARK = "\n<!-- made by make cuda -->"  # after its table in docs/measured.md
HEAD = ("mask", "batch x length", "heads", "against", "times faster (quartiles)", "device", "host, us", "largest error")
STATISTICS = ("default statistics, causal", "4 x 4096", "16/16, D 128", "our forward pass")


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Write the measurements of FOLDER/result.json to benchmarks/results/ and docs/measured.md."""
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    machine, measured = result["machine"], result["parts"].get("measure")
    if measured is None or measured["state"] != "passed":
        state = "was not run" if measured is None else f"ended as {measured['state']!r}"
        raise click.ClickException(f"The part measure {state} in {folder}, and the pages show whole runs only.")
    rows = rows_of(measured["rows"])
    lines = [
        f"# Attention on a GPU, bf16, {today()}",
        "",
        f"{machine['card']}, torch {machine['torch']}, commit {result['commit']}.",
        "Medians of paired ratios from interleaved runs.",
        "",
        *table(HEAD, rows),
    ]
    write_page(RESULTS, "cuda", lines)
    of_docs = [(", ".join(row[:3]), row[3], row[4]) for row in rows]
    of_docs.append(("measured on", f"{machine['card']}, torch {machine['torch']}", ""))
    for path in PAGES:
        path.write_text(replace_table(path.read_text(encoding="utf-8"), MARK, of_docs), encoding="utf-8")


def rows_of(measured: list[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of the table: wall time with quartiles, the ratio of device time, host time of both."""
    rows = []
    for row in measured:
        if "cells" in row:
            median, low, high = row["ratios"]["wall"]
            ours, theirs = row["host_us"]
            ratio = str(Ratio(median, low, high, 0))
            device = f"{row['ratios']['device'][0]:.2f} x"
            rows.append((*row["cells"], ratio, device, f"{ours:.0f}, {theirs:.0f}", f"{row['largest_error']:.1e}"))
    of_statistics = [row for row in measured if row["case"] == "default statistics"]
    return rows + [
        (*STATISTICS, f"takes {row['ratio']:.0f} times as long", "", "", f"{row['largest_error']:.1e}")
        for row in of_statistics
    ]


if __name__ == "__main__":
    main()
