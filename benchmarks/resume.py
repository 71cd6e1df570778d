"""Store each measured row at once, so that an interrupted run can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

JOURNALS = Path(__file__).resolve().parents[1] / "build" / "benchmarks"
FINAL = "stops: "  # a note that begins with it is a result; other notes are the reason why a row has none

Key = TypeVar("Key")
R = TypeVar("R")


def read_rows(journal: Path, from_dict: Callable[[dict[str, Any]], R]) -> list[R]:
    """Read the rows of a journal, one JSON object per line; skip a line that was cut off.

    Args:
        journal: the file; it may be missing.
        from_dict: makes a row of the object of a line.
    """
    rows = []
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []:
        try:
            rows.append(from_dict(json.loads(line)))
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
    return rows


def append_row(journal: Path, row: Any) -> None:
    """Append a row, a dataclass, to a journal."""
    journal.parent.mkdir(parents=True, exist_ok=True)
    with journal.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def measure_missing(
    jobs: Mapping[Key, str],
    measure: Callable[[Key], R],
    *,
    kept: dict[Key, R],
    resume: bool,
    journal: Path | None,
    after_each: Callable[[], None] = lambda: None,
) -> list[R]:
    """Measure the jobs in order, with a progress bar, and return their rows.

    Args:
        jobs: the jobs, each with the name that the progress bar shows.
        measure: measures a job.
        kept: rows of earlier runs; new rows are added to it.
        resume: whether rows of earlier runs are reused, except those without a result.
        journal: the file that new rows are appended to, or None.
        after_each: called after each new row.
    """
    reused = {job for job in jobs if resume and job in kept and _is_result(kept[job])}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), transient=True) as progress:
        task = progress.add_task("", total=len(jobs), completed=len(reused))
        for job, name in jobs.items():
            if job in reused:
                continue
            progress.update(task, description=name)
            kept[job] = measure(job)
            if journal is not None:
                append_row(journal, kept[job])
            after_each()
            progress.advance(task)
    return [kept[job] for job in jobs]


def _is_result(row: Any) -> bool:
    return not row.note or row.note.startswith(FINAL)
