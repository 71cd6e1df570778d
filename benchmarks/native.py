"""Run the native kernel against its rivals: check, time, print, and keep each row as it comes."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.alone import alone, runs_here
from benchmarks.journal import kept_rows
from benchmarks.machine import commit
from benchmarks.native_cases import CASES, Accuracy, Case
from benchmarks.native_page import absent, cells, machine_line, page, paired_with_cases, retold
from benchmarks.native_rows import Row, identity, is_met, meant, measured
from multihead.kernels.native import library

RESULTS = Path(__file__).parent / "results"
PAGES = [RESULTS.parents[1] / "docs" / name for name in ("measured.md", "measured.zh.md")]
SECONDS = 3.0  # that a case is timed
JOURNALS = Path(__file__).resolve().parents[1] / "build" / "benchmarks"

EXAMPLES = """
\b
Examples:
  python -m benchmarks.native
  python -m benchmarks.native --set avx2 --only "one query" --no-save
  python -m benchmarks.native --set avx512_bf16 --only full --seconds 1 --no-save
  python -m benchmarks.native --resume
"""


@click.command(epilog=EXAMPLES)
@click.option("--set", "sets", multiple=True, help="An instruction set; may be repeated. [avx2 and the widest here]")
@click.option("--only", default="", help="Run the cases whose name or rival holds this text.")
@click.option("--seconds", default=SECONDS, show_default=True, help="About how long a case is timed.")
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run has left, and measure the others.")
@click.option("--save/--no-save", default=True, help="Keep the rows, and in benchmarks/results/ the page they make.")
@click.option("--strict", is_flag=True, help="Exit with an error where a row is not what is meant.")
def main(sets: tuple[str, ...], only: str, seconds: float, resume: bool, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time the native kernel against its rivals, in turns, in one process a case, each checked against float64 first.

    For avx2, torch is held to AVX2 too. Everything takes about half an hour an instruction set.
    """
    missed = against_rivals(sets, only=only, seconds=seconds, resume=resume, save=save)
    if strict and missed:
        raise click.ClickException(f"{missed} rows are not what is meant.")


def against_rivals(sets: tuple[str, ...], *, only: str, seconds: float, resume: bool, save: bool) -> int:
    """Measure the instruction sets that run here, print their tables, and count the rows that are not what is meant.

    Takes what `compare` takes; sets are names, none for AVX2 and the widest here.
    """
    if (reason := library.absence()) is not None:
        raise click.ClickException(f"The native kernel is not measured: {reason}.")
    refuse_unless_known(sets)
    running = runs_here(asked=sets)
    missed = 0
    for name in running:
        rows = compare(name, only=only, seconds=seconds, resume=resume, save=save)
        show(rows, name)
        missed += sum(row.failed or is_met(row, case, name) is False for case, row in paired_with_cases(rows))
    for name in sets:
        if name not in running:
            click.echo(f"{name}: not measured, this CPU cannot run it.")
    for line in absent():
        click.echo(line)
    return missed


def refuse_unless_known(sets: tuple[str, ...]) -> None:
    """Refuse instruction sets that do not exist."""
    known = [each.name for each in library.instruction_sets()]
    for name in sets:
        if name not in known:
            raise click.UsageError(f"There is no instruction set {name!r}. Give one of {', '.join(known)}.")


def compare(instruction_set: str, *, only: str, seconds: float, resume: bool, save: bool) -> list[Row]:
    """Measure the chosen cases, each in a process of its own, and keep every row as soon as it is there.

    Args:
        instruction_set: what the native kernel is forced to.
        only: part of the names or rivals of the cases; "" for all.
        seconds: about how long a case is timed.
        resume: whether rows of an earlier run are kept.
        save: whether the rows are kept: a whole run begins anew and writes its page row by row; a part of one
            replaces its rows in a page that is whole.
    """
    chosen = [case for case in CASES if only.lower() in " ".join(identity(case)).lower()]
    if not chosen:
        raise click.UsageError(f"No case's name or rival holds {only!r}.")
    whole = len(chosen) == len(CASES)
    journal = JOURNALS / f"native-{instruction_set}.jsonl"
    if save and whole and not resume:
        journal.unlink(missing_ok=True)
    kept = {identity(case): row for case, row in paired_with_cases(read(journal))}  # the newest row of each
    known = {each: row for each, row in kept.items() if resume and not row.note}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True) as progress:
        missing = [case for case in chosen if identity(case) not in known]
        task = progress.add_task("", total=len(chosen), completed=len(chosen) - len(missing))
        for case in missing:
            progress.update(task, description=f"{instruction_set}: {case.name}")
            row = known[identity(case)] = kept[identity(case)] = _measured(case, seconds, instruction_set)
            if save:
                JOURNALS.mkdir(parents=True, exist_ok=True)
                with journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row.to_dict()) + "\n")
            if save and (whole or len(kept) == len(CASES)):
                write(list(kept.values()), instruction_set)
            progress.advance(task)
    if save and resume and whole:
        write(list(kept.values()), instruction_set)
    return [known[identity(case)] for case in chosen]


def write(rows: list[Row], instruction_set: str) -> None:
    """Write the page of an instruction set, dated, and the pages of docs/ where every case has its row."""
    RESULTS.mkdir(exist_ok=True)
    target = RESULTS / f"{dt.date.today().isoformat()}-native-{instruction_set}.md"
    target.write_text("\n".join(page(rows, instruction_set)) + "\n", encoding="utf-8")
    if len(rows) == len(CASES):
        retell(rows, instruction_set)


def retell(rows: list[Row], instruction_set: str) -> None:
    """Put the results in short into the pages that tell them, where they have a place for this instruction set."""
    for told in PAGES:
        told.write_text(retold(told.read_text(encoding="utf-8"), rows, instruction_set), encoding="utf-8")


def read(journal: Path) -> list[Row]:
    """Read the rows that were kept."""
    return kept_rows(journal, Row.from_dict)


def _measured(case: Case | Accuracy, seconds: float, instruction_set: str) -> Row:
    """Measure a case; what goes wrong with one is its row, and does not end the run."""
    name, rival = identity(case)
    described = commit()
    try:
        return alone(measured, CASES.index(case), seconds, described, instruction_set=instruction_set)
    except Exception as error:  # noqa: BLE001 - a benchmark of half an hour goes on to the next row
        said = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {said[0] if said else ''}"
        return Row(name, rival, note=f"failed: {reason}", commit=described)


def show(rows: list[Row], instruction_set: str) -> None:
    """Print the rows as a table."""
    table = Table("case", "against", "ratio (quartiles)", "meant", "pairs", "difference", title=instruction_set)
    for case, row in paired_with_cases(rows):
        style = "red" if row.failed or is_met(row, case, instruction_set) is False else None
        if isinstance(case, Case):
            table.add_row(*cells(case, row, instruction_set)[:-1], style=style)
        else:
            condition = meant(case, instruction_set)
            found = row.note if row.error is None else f"{row.error:.3g}"
            table.add_row(case.name, "float64", found, condition[0] if condition else "", style=style)
    Console().print(table)
    click.echo(machine_line(rows, instruction_set))


if __name__ == "__main__":
    main()
