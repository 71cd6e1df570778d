"""Check and time our layer against those of other libraries: python -m benchmarks.peers."""

from __future__ import annotations

from itertools import product

import click
from rich.console import Console
from rich.table import Table

from benchmarks.in_process import failure, in_new_process
from benchmarks.machine import commit, features, machine_line
from benchmarks.pages import PAGES, RESULTS, replace_table, write_page
from benchmarks.peers.cases import CASES, DTYPES, Case
from benchmarks.peers.page import MARK, cells, is_met, ordered, page, summary, table_lines
from benchmarks.peers.race import Row, measured
from benchmarks.resume import JOURNALS, measure_missing, read_rows

JOURNAL = JOURNALS / "peers.jsonl"
SECONDS = 8.0  # per case, for all peers together
FAST_BF16 = {"amx_bf16", "avx512_bf16"}  # without one of them bfloat16 is emulated, and too slow to be useful

EXAMPLES = """
\b
Examples:
  python -m benchmarks.peers
  python -m benchmarks.peers --only padded --no-save
  python -m benchmarks.peers --only bf16 --seconds 3 --no-save
  python -m benchmarks.peers --resume
"""

Job = tuple[str, Case]


@click.command(epilog=EXAMPLES)
@click.option("--only", default="", help="Run the cases whose name or dtype contains this text.")
@click.option("--seconds", default=SECONDS, show_default=True, help="About how long the peers of each case are timed.")
@click.option("--resume", is_flag=True, help="Reuse the rows of an interrupted run.")
@click.option("--save/--no-save", default=True, help="Store the rows, and their page in benchmarks/results/.")
@click.option("--strict", is_flag=True, help="Exit with an error if a row misses its target.")
def main(only: str, seconds: float, resume: bool, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time our layer against those of other libraries, alternately, in one process per case, after a float64 check.

    Install the peers with pip install --no-deps --group peers; the table names those that are missing. A whole run
    takes about fourteen minutes.
    """
    rows = compare(only=only, seconds=seconds, resume=resume, save=save)
    show(rows, every_peer=bool(only))
    missed = sum(not is_met(case, row) for case, row in ordered(rows))
    if strict and missed:
        raise click.ClickException(f"{missed} rows miss their targets.")


def compare(*, only: str, seconds: float, resume: bool, save: bool) -> list[Row]:
    """Measure the selected cases, each in a new process, and store every row at once.

    Args:
        only: a part of the names or dtypes of the cases; "" for all.
        seconds: about how long the peers of each case are timed.
        resume: whether rows of an interrupted run are reused.
        save: whether rows are stored. A whole run starts a new journal; a part of one replaces its rows. The page and
            docs/measured.md is written when every case has a row.
    """
    everything = jobs()
    chosen = [(dtype, case) for dtype, case in everything if only.lower() in f"{case.name}, {dtype}".lower()]
    if not chosen:
        names = "; ".join(case.name for case in CASES)
        raise click.UsageError(f"No case's name or dtype contains {only!r}. There are: {names}; {'; '.join(DTYPES)}.")
    if save and chosen == everything and not resume:
        JOURNAL.unlink(missing_ok=True)
    stored = {(row.dtype, row.case): row for row in read_rows(JOURNAL, Row.from_dict)}  # the newest row of each
    kept = {(dtype, case): stored[dtype, case.name] for dtype, case in everything if (dtype, case.name) in stored}
    rows = measure_missing(
        {(dtype, case): f"{dtype}: {case.name}" for dtype, case in chosen},
        lambda job: _measured(job[1], job[0], seconds),
        kept=kept,
        resume=resume,
        journal=JOURNAL if save else None,
    )
    if save and all(job in kept for job in everything):
        write([kept[job] for job in everything])
    return rows


def jobs() -> list[Job]:
    """Return all cases in their dtypes; bfloat16 only if the CPU has instructions for it."""
    dtypes = [dtype for dtype in DTYPES if dtype != "bf16" or FAST_BF16 & set(features().split())]
    return [(dtype, case) for dtype, case in product(dtypes, CASES) if dtype in case.dtypes]


def write(rows: list[Row]) -> None:
    """Write the dated page, and the tables of docs/measured.md and its translation."""
    write_page(RESULTS, "peers", page(rows))
    for path in PAGES:
        text = replace_table(path.read_text(encoding="utf-8"), MARK, table_lines(rows))
        path.write_text(text, encoding="utf-8")


def _measured(case: Case, dtype: str, seconds: float) -> Row:
    """Measure a case; an error becomes the note of its row, so that the run continues."""
    described = commit()
    try:
        return in_new_process(measured, CASES.index(case), dtype, seconds, described)
    except Exception as error:  # noqa: BLE001 - the run continues with the other cases
        return Row(case.name, dtype, note=failure(error), commit=described)


def show(rows: list[Row], *, every_peer: bool) -> None:
    """Print the ratio to the best peer of each case, or to every peer, the fastest first."""
    table = Table("case", "dtype", "peer", "its time / ours", "target", "ours", "difference")
    if every_peer:
        table = Table("case", "dtype", "peer", "its time / ours", "pairs", "difference")
    for case, row in ordered(rows):
        style = None if is_met(case, row) else "red"
        if not every_peer or row.best is None:
            table.add_row(*summary(case, row)[: len(table.columns)], style=style)
            continue
        for each in sorted(row.standings, key=lambda each: each.ratio.median if each.ratio else float("inf")):
            first = (case.name, row.dtype) if each is row.best else ("", "")
            table.add_row(*first, *cells(case, each), style=style if each is row.best else None)
        table.add_section()
    Console().print(table)
    click.echo(machine_line(row.commit for row in rows))


if __name__ == "__main__":
    main()
