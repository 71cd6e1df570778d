"""Measure the time and memory of observing every head of a model or a layer: python -m benchmarks.watching."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console
from rich.table import Table

from benchmarks.in_process import in_new_process
from benchmarks.machine import commit, features, machine_line
from benchmarks.pages import RESULTS, table, today, write_page
from benchmarks.resume import JOURNALS, measure_missing, read_rows
from benchmarks.watching.cases import CASES, Row, measured

JOURNAL = JOURNALS / "watching.jsonl"
HEAD = ("case", "measured", "target", "absolute", "difference")

EXPLAINED = (
    "The rival of each row is the same model on transformers' own `sdpa` attention, unobserved, fp32, without "
    "gradients, with all logits; for the padded layer it is the same layer, unobserved. The outputs were compared "
    "before anything was timed. Both run alternately in one process per case. A ratio is the observed time divided by "
    "the unobserved one, the median over paired runs with its quartiles: below 1 observing is faster than not "
    "observing. Without the native kernel its library is hidden, and the next kernel takes the calls. Extra memory is "
    "the peak resident memory of an observed run minus that of an unobserved one, each in a new process, the median "
    "of three."
)

EXAMPLES = """
\b
Examples:
  python -m benchmarks.watching
  python -m benchmarks.watching --only "2,048 tokens, default" --pairs 3 --no-save
  python -m benchmarks.watching --resume
"""


@click.command(epilog=EXAMPLES)
@click.option("--only", default="", help="Run the cases whose name contains this text.")
@click.option("--pairs", default=7, show_default=True, help="How many pairs are timed; 5 of the longest text.")
@click.option("--resume", is_flag=True, help="Reuse the rows of an interrupted run.")
@click.option("--save/--no-save", default=True, help="Store the rows, and their page in benchmarks/results/.")
@click.option("--strict", is_flag=True, help="Exit with an error if a row misses its target.")
def main(only: str, pairs: int, resume: bool, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Measure the time and memory of observing every head of a language model. Takes about half an hour."""
    chosen = [case for case in CASES if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(
            f"No case's name contains {only!r}. There are: {'; '.join(case.name for case in CASES)}."
        )
    if save and not resume and chosen == CASES:
        JOURNAL.unlink(missing_ok=True)
    kept = {row.name: row for row in read_rows(JOURNAL, Row.from_dict)}
    indices = {case.name: CASES.index(case) for case in chosen}
    rows = measure_missing(
        {name: name for name in indices},
        lambda name: in_new_process(measured, indices[name], pairs, commit()),
        kept=kept,
        resume=resume,
        journal=JOURNAL if save else None,
    )
    shown = Table(*HEAD)
    for row in rows:
        shown.add_row(*cells(row), style=None if is_met(row) is not False else "red")
    Console().print(shown)
    if save and all(case.name in kept for case in CASES):
        write_page(RESULTS, "watching", page([kept[case.name] for case in CASES]))
    missed = sum(is_met(row) is False for row in rows)
    if strict and missed:
        raise click.ClickException(f"{missed} rows miss their targets.")


def is_met(row: Row) -> bool | None:
    """Return whether a row meets its target; None if nothing was measured."""
    most = next(case.most for case in CASES if case.name == row.name)
    return None if row.found is None else row.found <= most


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row."""
    case = next(case for case in CASES if case.name == row.name)
    if row.found is None:
        return row.name, row.note, "", "", "" if row.error is None else f"{row.error:.1e}"
    target = f"at most {case.most:g}" + ("" if is_met(row) else ", not met")
    absolute = row.absolute or 0.0
    if case.measures in ("time", "texts", "padded"):
        return row.name, str(row.ratio), target, f"{absolute:.2g} s unobserved", f"{row.error:.1e}"
    return row.name, f"{row.found:.2f}", target, f"{absolute / 2**20:,.0f} MiB", ""


def page(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the page, with the date and the machine."""
    lines = [f"# Observing every head, {today()}", "", machine_line(row.commit for row in rows), ""]
    lines += [f"CPU features: {features()}.", "", EXPLAINED, ""]
    return lines + table(HEAD, map(cells, rows))


if __name__ == "__main__":
    main()
