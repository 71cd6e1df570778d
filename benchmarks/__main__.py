"""Run the cases: check, time, print the table, and keep it dated in benchmarks/results/."""

from __future__ import annotations

import datetime as dt
import platform
import subprocess
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cases import CASES
from benchmarks.contest import Row, measured

RESULTS = Path(__file__).parent / "results"
READMES = [RESULTS.parents[1] / name for name in ("README.md", "README.zh.md")]
BEGIN, END = "|---|---|---|\n", "\n<!-- made by make bench -->"


@click.command()
@click.option("--only", default="", help="Run the cases whose name holds this text.")
@click.option(
    "--save/--no-save", default=True, help="Keep a whole run's table in benchmarks/results/ and in the READMEs."
)
@click.option("--strict", is_flag=True, help="Exit with an error where a case is slower than it is meant to be.")
def main(only: str, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    r"""Time multihead against its rivals, in turns and checked first: fp32, in eval unless a case says training.

    \b
    python -m benchmarks
    python -m benchmarks --only padded --no-save
    """
    chosen = [case for case in CASES if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(f"No case's name holds {only!r}. There are: {', '.join(case.name for case in CASES)}.")
    rows: list[Row] = []
    # A process a case: what one case leaves behind in the allocator must not slow the next one down.
    alone = get_context("spawn")
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(chosen))
        for case in chosen:
            progress.update(task, description=case.name)
            with ProcessPoolExecutor(1, mp_context=alone) as process:
                rows.append(process.submit(measured, CASES.index(case)).result())
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
    if strict and any(row.ratio.median < CASES[row.case].least for row in rows):
        raise click.ClickException("A case is slower than it is meant to be.")


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


def machine() -> str:
    """Name what the numbers depend on: CPU, threads, torch and commit."""
    names = [line.split(":", 1)[1].strip() for line in _cpu_lines() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        check=False,
    )
    return (
        f"{names[0] if names else platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}, commit {commit.stdout.strip() or 'unknown'}, "
        "medians of paired ratios from interleaved runs"
    )


def _cpu_lines() -> list[str]:
    info = Path("/proc/cpuinfo")
    return info.read_text(encoding="utf-8").splitlines() if info.exists() else []


if __name__ == "__main__":
    main()
