"""Run the cases: check, time, print the table, and keep it dated in benchmarks/results/."""

from __future__ import annotations

import datetime as dt
import platform
import subprocess
from pathlib import Path

import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.cases import CASES, Case, Contest
from benchmarks.measure import Ratio, paired

RESULTS = Path(__file__).parent / "results"
TOLERANCE = 1e-5  # between two float32 computations of the same output, whose values are below 4


@click.command()
@click.option("--only", default="", help="Run the cases whose name holds this text.")
@click.option("--save/--no-save", default=True, help="Keep the table in benchmarks/results/.")
@click.option("--strict", is_flag=True, help="Exit with an error where a case is slower than it is meant to be.")
def main(only: str, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    r"""Time multihead against its rivals: interleaved, checked first, fp32, in eval without gradients.

    \b
    python -m benchmarks
    python -m benchmarks --only padded --no-save
    """
    chosen = [case for case in CASES if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(f"No case's name holds {only!r}. There are: {', '.join(case.name for case in CASES)}.")
    rows: list[tuple[Case, Contest, float, Ratio]] = []
    with torch.inference_mode(), Progress(transient=True) as progress:
        for case in chosen:
            torch.manual_seed(0)
            task = progress.add_task(case.name, total=case.pairs)
            contest = case.make()
            error = checked(case, contest)
            ratio = paired(contest.ours, contest.rival, pairs=case.pairs, beat=lambda: progress.advance(task))  # noqa: B023
            rows.append((case, contest, error, ratio))
    lines = report(rows)
    Console().print(table(rows))
    click.echo(machine())
    if save:
        RESULTS.mkdir(exist_ok=True)
        target = RESULTS / f"{dt.date.today().isoformat()}-inference.md"
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")
        click.echo(f"kept in {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
    if strict and any(ratio.median < case.least for case, _, _, ratio in rows):
        raise click.ClickException("A case is slower than it is meant to be.")


def checked(case: Case, contest: Contest) -> float:
    """Return the largest difference between ours and the rival, or stop where it is too large to be rounding."""
    ours, rival = (contest.compared(run()) for run in (contest.ours, contest.rival))
    error = float((ours - rival).abs().max())
    if not error <= TOLERANCE:
        raise click.ClickException(f"{case.name}: differs from {case.rival} by {error:.1e}, more than {TOLERANCE}.")
    return error


def table(rows: list[tuple[Case, Contest, float, Ratio]]) -> Table:
    """Lay the results out for a terminal."""
    drawn = Table("case", "against", "times faster (quartiles)", "meant", "largest difference", "memory beside q, k, v")
    for row in rows:
        drawn.add_row(*cells(*row))
    return drawn


def cells(case: Case, contest: Contest, error: float, ratio: Ratio) -> tuple[str, ...]:
    """Write one line's cells."""
    memory = "" if contest.memory is None else f"{contest.memory / 2**20:.1f} MiB"
    return case.name, case.rival, str(ratio), f"{case.least} x", f"{error:.1e}", memory


def report(rows: list[tuple[Case, Contest, float, Ratio]]) -> list[str]:
    """Write the results as a Markdown page, dated and with the machine."""
    lines = [f"# Inference, fp32, {dt.date.today().isoformat()}", "", machine(), ""]
    lines += ["| case | against | times faster (quartiles) | meant | largest difference | memory beside q, k, v |"]
    lines += ["|---|---|---|---|---|---|"]
    return lines + [f"| {' | '.join(cells(*row))} |" for row in rows]


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
