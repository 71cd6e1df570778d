"""Run the cases: check, time, print the table, and keep it dated in benchmarks/results/."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.alone import alone
from benchmarks.cases import CASES
from benchmarks.contest import Row, measured
from benchmarks.machine import machine
from benchmarks.native import SECONDS, against_rivals

RESULTS = Path(__file__).parent / "results"
READMES = [RESULTS.parents[1] / name for name in ("README.md", "README.zh.md")]
BEGIN, END = "|---|---|---|\n", "\n<!-- made by make bench -->"

EXAMPLES = """
\b
Examples:
  python -m benchmarks
  python -m benchmarks --no-native
  python -m benchmarks --only padded --no-save
"""


@click.command(epilog=EXAMPLES)
@click.option("--only", default="", help="Run the cases whose name holds this text.")
@click.option(
    "--save/--no-save", default=True, help="Keep a whole run's table in benchmarks/results/ and in the READMEs."
)
@click.option("--strict", is_flag=True, help="Exit with an error where a case is slower than it is meant to be.")
@click.option("--native/--no-native", default=True, help="Behind a whole run, the native kernel's own table too.")
def main(only: str, save: bool, strict: bool, native: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time multihead against its rivals, in turns and checked first: fp32, in eval unless a case says training.

    The native kernel's own table takes about half an hour an instruction set; python -m benchmarks.native makes it
    alone, and goes on where a run was broken off.
    """
    chosen = [case for case in CASES if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(f"No case's name holds {only!r}. There are: {', '.join(case.name for case in CASES)}.")
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            rows.append(alone(measured, CASES.index(case)))
            progress.advance(task)
    lines = report(rows)
    Console().print(table(rows))
    click.echo(machine())
    if save and chosen == CASES:
        RESULTS.mkdir(exist_ok=True)
        target = RESULTS / f"{dt.date.today().isoformat()}-fp32.md"
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for readme in READMES:
            readme.write_text(retold(readme.read_text(encoding="utf-8"), rows), encoding="utf-8")
        click.echo(f"kept in {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
    missed = sum(row.ratio.median < CASES[row.case].least for row in rows)
    if native and chosen == CASES:
        missed += against_rivals((), only="", seconds=SECONDS, resume=False, save=save)
    if strict and missed:
        raise click.ClickException(f"{missed} cases are slower than they are meant to be.")


def table(rows: list[Row]) -> Table:
    """Lay the results out for a terminal."""
    drawn = Table("case", "against", "times faster (quartiles)", "meant", "largest difference", "memory beside q, k, v")
    for row in rows:
        drawn.add_row(*cells(row))
    return drawn


def cells(row: Row) -> tuple[str, ...]:
    """Write one line's cells."""
    case = CASES[row.case]
    memory = "" if row.memory is None else f"{row.memory / 2**20:.1f} MiB"
    return case.name, case.rival, str(row.ratio), f"{case.least} x", f"{row.error:.1e}", memory


def report(rows: list[Row]) -> list[str]:
    """Write the results as a Markdown page, dated and with the machine."""
    lines = [f"# Times faster, fp32, {dt.date.today().isoformat()}", "", machine(), ""]
    lines += ["| case | against | times faster (quartiles) | meant | largest difference | memory beside q, k, v |"]
    lines += ["|---|---|---|---|---|---|"]
    return lines + [f"| {' | '.join(cells(row))} |" for row in rows]


def retold(page: str, rows: list[Row]) -> str:
    """Put the results into a page, between the head of its table and the mark behind it."""
    behind = page.index(END)
    begin = page.rindex(BEGIN, 0, behind) + len(BEGIN)
    return page[:begin] + "\n".join(f"| {' | '.join(cells(row)[:3])} |" for row in rows) + page[behind:]


if __name__ == "__main__":
    main()
