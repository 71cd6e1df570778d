"""Check and time the cases of benchmarks/cases.py, and write their table: python -m benchmarks."""

from __future__ import annotations

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cases import CASES
from benchmarks.check_then_time import Row, measured
from benchmarks.in_process import in_new_process
from benchmarks.machine import machine_line, measured_on
from benchmarks.native.__main__ import SECONDS, against_rivals
from benchmarks.pages import PAGES, RESULTS, replace_table, table, today, write_page

MARK = "\n<!-- made by make bench -->"  # after its table in docs/measured.md

EXAMPLES = """
\b
Examples:
  python -m benchmarks
  python -m benchmarks --no-native
  python -m benchmarks --only padded --no-save
"""


@click.command(epilog=EXAMPLES)
@click.option("--only", default="", help="Run the cases whose name contains this text.")
@click.option(
    "--save/--no-save", default=True, help="Write the table of a whole run to benchmarks/results/ and docs/measured.md."
)
@click.option("--strict", is_flag=True, help="Exit with an error if a case is slower than it must be.")
@click.option("--native/--no-native", default=True, help="After a whole run, measure the native kernel too.")
def main(only: str, save: bool, strict: bool, native: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time multihead against its rivals, alternately, after a check: fp32, in evaluation unless a case trains.

    The native kernel takes about half an hour per instruction set; python -m benchmarks.native measures it alone, and
    can resume an interrupted run.
    """
    chosen = [case for case in CASES if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(
            f"No case's name contains {only!r}. There are: {', '.join(case.name for case in CASES)}."
        )
    rows: list[Row] = []
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            rows.append(in_new_process(measured, CASES.index(case)))
            progress.advance(task)
    shown = Table(*HEAD)
    for row in rows:
        shown.add_row(*cells(row))
    Console().print(shown)
    click.echo(machine_line())
    if save and chosen == CASES:
        write_page(RESULTS, "fp32", page(rows))
        for path in PAGES:
            lines = [*(cells(row)[:3] for row in rows), measured_on()]
            text = replace_table(path.read_text(encoding="utf-8"), MARK, lines)
            path.write_text(text, encoding="utf-8")
    missed = sum(row.ratio.median < CASES[row.case].least for row in rows)
    if native and chosen == CASES:
        missed += against_rivals((), only="", seconds=SECONDS, resume=False, save=save)
    if strict and missed:
        raise click.ClickException(f"{missed} cases are slower than they must be.")


HEAD = ("case", "against", "times faster (quartiles)", "required", "largest difference", "memory besides q, k, v")


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row."""
    case = CASES[row.case]
    memory = "" if row.memory is None else f"{row.memory / 2**20:.1f} MiB"
    return case.name, case.rival, str(row.ratio), f"{case.least} x", f"{row.error:.1e}", memory


def page(rows: list[Row]) -> list[str]:
    """Return the lines of the page."""
    lines = [f"# Times faster, fp32, {today()}", "", machine_line(), ""]
    lines += ["Medians of paired ratios from interleaved runs.", ""]
    return lines + table(HEAD, map(cells, rows))


if __name__ == "__main__":
    main()
