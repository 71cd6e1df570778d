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
from benchmarks.machine import commit
from benchmarks.native_cases import CASES, Accuracy, Case
from benchmarks.native_page import absent, cells, machine_line, page, paired_with_cases
from benchmarks.native_rows import Row, identity, is_met, meant, measured
from multihead.kernels import library

RESULTS = Path(__file__).parent / "results"
JOURNALS = Path(__file__).resolve().parents[1] / "build" / "benchmarks"


@click.command()
@click.option("--set", "sets", multiple=True, help="An instruction set; may be repeated. [avx2 and the widest here]")
@click.option("--only", default="", help="Run the cases whose name or rival holds this text.")
@click.option("--seconds", default=3.0, show_default=True, help="About how long a case is timed.")
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run has left, and measure the others.")
@click.option("--save/--no-save", default=True, help="Keep a whole run's page in benchmarks/results/, row by row.")
@click.option("--strict", is_flag=True, help="Exit with an error where a row is not what is meant.")
def main(sets: tuple[str, ...], only: str, seconds: float, resume: bool, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    r"""Time the native kernel against its rivals, in turns, in one process a case, each checked against float64 first.

    For avx2, torch is held to AVX2 too. Everything takes about half an hour an instruction set.

    \b
    python -m benchmarks.native
    python -m benchmarks.native --set avx2 --only "one query" --no-save
    python -m benchmarks.native --set avx512_bf16 --only full --seconds 1 --no-save
    python -m benchmarks.native --resume
    """
    if (reason := library.absence()) is not None:
        raise click.ClickException(f"The native kernel is not measured: {reason}.")
    refuse_unless_known(sets)
    missed = []
    for name in sets:
        if name not in runs_here(asked=sets):
            click.echo(f"{name}: not measured, this CPU cannot run it")
    for name in runs_here(asked=sets):
        rows = compare(name, only=only, seconds=seconds, resume=resume, save=save)
        show(rows, name)
        missed += [row for case, row in paired_with_cases(rows) if row.failed or is_met(row, case, name) is False]
    for line in absent():
        click.echo(line)
    if strict and missed:
        raise click.ClickException(f"{len(missed)} rows are not what is meant.")


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
        save: whether the page of a whole run is written.
    """
    chosen = [case for case in CASES if only.lower() in " ".join(identity(case)).lower()]
    if not chosen:
        raise click.UsageError(f"No case's name or rival holds {only!r}.")
    journal = JOURNALS / f"native-{instruction_set}.jsonl"
    JOURNALS.mkdir(parents=True, exist_ok=True)
    kept = {(row.name, row.rival): row for row in read(journal) if not row.note} if resume else {}
    if len(chosen) == len(CASES) and not resume:
        journal.unlink(missing_ok=True)
    rows = [kept[identity(case)] for case in chosen if identity(case) in kept]
    missing = [case for case in chosen if identity(case) not in kept]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True) as progress:
        task = progress.add_task("", total=len(chosen), completed=len(rows))
        for case in missing:
            progress.update(task, description=f"{instruction_set}: {case.name}")
            row = _measured(case, seconds, instruction_set)
            rows.append(row)
            with journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row.to_dict()) + "\n")
            if save and len(chosen) == len(CASES):
                RESULTS.mkdir(exist_ok=True)
                target = RESULTS / f"{dt.date.today().isoformat()}-native-{instruction_set}.md"
                target.write_text("\n".join(page(rows, instruction_set)) + "\n", encoding="utf-8")
            progress.advance(task)
    return rows


def read(journal: Path) -> list[Row]:
    """Read the rows that were kept; a line that was cut off is none."""
    rows = []
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        try:
            rows.append(Row.from_dict(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return rows


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
