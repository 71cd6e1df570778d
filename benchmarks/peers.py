"""Run our layer beside the layers of others: check, time, print, and keep each row as it comes."""

from __future__ import annotations

import datetime as dt
import json
from itertools import product
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.alone import alone
from benchmarks.journal import kept_rows
from benchmarks.machine import commit, features
from benchmarks.peers_cases import CASES, DTYPES, Case
from benchmarks.peers_contest import Row, measured
from benchmarks.peers_page import cells, in_short, is_met, machine_line, ordered, page, retold

RESULTS = Path(__file__).parent / "results"
READMES = [RESULTS.parents[1] / name for name in ("README.md", "README.zh.md")]
JOURNAL = Path(__file__).resolve().parents[1] / "build" / "benchmarks" / "peers.jsonl"
SECONDS = 8.0  # that the peers of a case are timed, all together
FAST_BF16 = {"amx_bf16", "avx512_bf16"}  # without one of them bfloat16 is emulated, and nobody would choose it

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
@click.option("--only", default="", help="Run the cases whose name or dtype holds this text.")
@click.option("--seconds", default=SECONDS, show_default=True, help="About how long the peers of a case are timed.")
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run has left, and measure the others.")
@click.option("--save/--no-save", default=True, help="Keep the rows, and in benchmarks/results/ the page they make.")
@click.option("--strict", is_flag=True, help="Exit with an error where a row is not what is meant.")
def main(only: str, seconds: float, resume: bool, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time our layer beside the layers of others, in turns, in one process a case, each checked against float64 first.

    A peer that is not installed is named as such: pip install --no-deps --group peers. Everything takes about twelve
    minutes.
    """
    rows = compare(only=only, seconds=seconds, resume=resume, save=save)
    show(rows, every_peer=bool(only))
    missed = sum(not is_met(case, row) for case, row in ordered(rows))
    if strict and missed:
        raise click.ClickException(f"{missed} rows are not what is meant.")


def compare(*, only: str, seconds: float, resume: bool, save: bool) -> list[Row]:
    """Measure the chosen cases, each in a process of its own, and keep every row as soon as it is there.

    Args:
        only: part of the names or dtypes of the cases; "" for all.
        seconds: about how long the peers of a case are timed.
        resume: whether rows of an earlier run are kept.
        save: whether the rows are kept: a whole run begins anew; a part of one replaces its rows. The page and the
            READMEs are written as soon as every case has its row.
    """
    everything = jobs()
    chosen = [(dtype, case) for dtype, case in everything if only.lower() in f"{case.name}, {dtype}".lower()]
    if not chosen:
        names = "; ".join(case.name for case in CASES)
        raise click.UsageError(f"No case's name or dtype holds {only!r}. There are: {names}; {'; '.join(DTYPES)}.")
    if save and chosen == everything and not resume:
        JOURNAL.unlink(missing_ok=True)
    kept = {(row.dtype, row.case): row for row in read(JOURNAL)}  # the newest row of each
    known = {each: row for each, row in kept.items() if resume and not row.note}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True) as progress:
        missing = [(dtype, case) for dtype, case in chosen if (dtype, case.name) not in known]
        task = progress.add_task("", total=len(chosen), completed=len(chosen) - len(missing))
        for dtype, case in missing:
            progress.update(task, description=f"{dtype}: {case.name}")
            row = known[dtype, case.name] = kept[dtype, case.name] = _measured(case, dtype, seconds)
            if save:
                JOURNAL.parent.mkdir(parents=True, exist_ok=True)
                with JOURNAL.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row.to_dict()) + "\n")
            progress.advance(task)
    if save and all((dtype, case.name) in kept for dtype, case in everything):
        write([kept[dtype, case.name] for dtype, case in everything])
    return [known[dtype, case.name] for dtype, case in chosen]


def jobs() -> list[Job]:
    """Pair the cases with the dtypes that this CPU computes: bfloat16 only where it has instructions for it."""
    dtypes = [dtype for dtype in DTYPES if dtype != "bf16" or FAST_BF16 & set(features().split())]
    return list(product(dtypes, CASES))


def write(rows: list[Row]) -> None:
    """Write the page, dated, and the tables of the READMEs."""
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{dt.date.today().isoformat()}-peers.md"
    target.write_text("\n".join(page(rows)) + "\n", encoding="utf-8")
    for readme in READMES:
        readme.write_text(retold(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")
    click.echo(f"kept in {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")


def read(journal: Path) -> list[Row]:
    """Read the rows that were kept."""
    return kept_rows(journal, Row.from_dict)


def _measured(case: Case, dtype: str, seconds: float) -> Row:
    """Measure a case; what goes wrong with one is its row, and does not end the run."""
    described = commit()
    try:
        return alone(measured, CASES.index(case), dtype, seconds, described)
    except Exception as error:  # noqa: BLE001 - the other cases go on
        said = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {said[0] if said else ''}"
        return Row(case.name, dtype, note=f"failed: {reason}", commit=described)


def show(rows: list[Row], *, every_peer: bool) -> None:
    """Print how ours stands against the best peer of each case, or against every peer, the quickest first."""
    table = Table("case", "dtype", "peer", "its time by ours", "meant", "ours", "difference")
    if every_peer:
        table = Table("case", "dtype", "peer", "its time by ours", "pairs", "difference")
    for case, row in ordered(rows):
        style = None if is_met(case, row) else "red"
        if not every_peer or row.best is None:
            table.add_row(*in_short(case, row)[: len(table.columns)], style=style)
            continue
        for each in sorted(row.standings, key=lambda each: each.ratio.median if each.ratio else float("inf")):
            first = (case.name, row.dtype) if each is row.best else ("", "")
            table.add_row(*first, *cells(case, each), style=style if each is row.best else None)
        table.add_section()
    Console().print(table)
    click.echo(machine_line(rows))


if __name__ == "__main__":
    main()
