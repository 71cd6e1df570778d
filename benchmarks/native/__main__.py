"""Check and time the native kernel against its rivals: python -m benchmarks.native."""

from __future__ import annotations

from functools import partial

import click
from rich.console import Console
from rich.table import Table

from benchmarks.in_process import failure, in_new_process, runs_here
from benchmarks.machine import commit
from benchmarks.native import two_builds
from benchmarks.native.cases import CASES, Accuracy, Case
from benchmarks.native.page import absent, cells, limits_line, page, paired_with_cases, summary_replaced
from benchmarks.native.rows import Row, all_measured, identity, index_of, is_met, measured, requirement
from benchmarks.pages import PAGES, RESULTS, write_page
from benchmarks.resume import JOURNALS, measure_missing, read_rows
from multihead.kernels.native import library

SECONDS = 3.0  # per case
QUICK_SECONDS = 1.0

EXAMPLES = """
\b
Examples:
  python -m benchmarks.native
  python -m benchmarks.native --set avx2 --only "one query" --no-save
  python -m benchmarks.native --set avx512_bf16 --only full --seconds 1 --no-save
  python -m benchmarks.native --resume
  python -m benchmarks.native --quick
  python -m benchmarks.native --quick --set avx2 --against HEAD~3
  python -m benchmarks.native --quick --cpu-time --against before/libmultihead_native.so
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--set",
    "sets",
    multiple=True,
    help="An instruction set; repeatable.  [default: avx2 and the widest; with --quick, all that run here]",
)
@click.option("--only", default="", help="Run the cases whose name or rival contains this text.")
@click.option("--seconds", default=SECONDS, show_default=True, help="About how long each case is timed.")
@click.option("--resume", is_flag=True, help="Reuse the rows of an interrupted run.")
@click.option("--save/--no-save", default=True, help="Store the rows, and their page in benchmarks/results/.")
@click.option("--strict", is_flag=True, help="Exit with an error if a row misses its target.")
@click.option("--quick", is_flag=True, help="Twelve cases, against an older build of the library too; stores nothing.")
@click.option("--against", default="", help="With --quick: a commit, or a library.  [default: before the last change]")
@click.option("--cpu-time", is_flag=True, help="With --quick: compare both builds by the CPU time of one thread.")
def main(
    sets: tuple[str, ...],
    only: str,
    seconds: float,
    resume: bool,  # noqa: FBT001  (click passes flags as arguments)
    save: bool,  # noqa: FBT001
    strict: bool,  # noqa: FBT001
    quick: bool,  # noqa: FBT001
    against: str,
    cpu_time: bool,  # noqa: FBT001
) -> None:
    """Time the native kernel against its rivals, alternately, in one process per case, after a check against float64.

    Torch is limited to the same instructions. A whole run takes about half an hour per instruction set.

    With --quick, twelve cases take up to three minutes per instruction set. The installed library is compared with the
    one of an older commit too, and it is an error if a case is slower in two runs: if the upper quartile of old time /
    new time is below 0.97.
    """
    if quick:
        if only or resume or strict:
            raise click.UsageError("--quick goes with --set, --against and --cpu-time alone.")
        if errors := against_old_build(sets, against, cpu_time=cpu_time):
            raise click.ClickException("\n".join(errors))
        return
    missed = against_rivals(sets, only=only, seconds=seconds, resume=resume, save=save)
    if strict and missed:
        raise click.ClickException(f"{missed} rows miss their targets.")


def against_rivals(sets: tuple[str, ...], *, only: str, seconds: float, resume: bool, save: bool) -> int:
    """Measure the instruction sets that run here, print their tables, and return how many rows miss their targets.

    Args:
        sets: their names; without any, AVX2 and the widest.
        only: see `compare`.
        seconds: see `compare`.
        resume: see `compare`.
        save: see `compare`.
    """
    running = chosen(sets)
    missed = 0
    for name in running:
        rows = compare(name, only=only, seconds=seconds, resume=resume, save=save)
        show(rows, name)
        missed += sum(row.failed or is_met(row, case, name) is False for case, row in paired_with_cases(rows))
    for line in absent():
        click.echo(line)
    return missed


def against_old_build(sets: tuple[str, ...], against: str, *, cpu_time: bool) -> list[str]:
    """Measure the quick cases, print their tables, and return a sentence per case that is slower than before or wrong.

    Args:
        sets: instruction sets; without any, all that run here.
        against: the commit or the library to compare with; without it, the commit before the last change.
        cpu_time: whether both builds are compared by the CPU time of one thread.
    """
    running = chosen(
        sets
        or tuple(each.name for each in library.instruction_sets() if each.is_supported_by_cpu and not each.for_tests)
    )
    against = against or two_builds.before()
    old, new = two_builds.build(against, running), library.path_of_library()
    errors = []
    for name in running:
        runs, slower = two_builds.compared(partial(two_builds.run_benchmark, old, new, name, cpu_time=cpu_time))
        indices = [index_of(case) for case in runs]
        rows = in_new_process(all_measured, indices, QUICK_SECONDS, commit(), instruction_set=name)
        table = Table("case", f"time of {against} / now", "again", "against", "ratio (quartiles)", title=name)
        for (case, ratios), row in zip(runs.items(), rows, strict=True):
            first, again = str(ratios[0]), "".join(map(str, ratios[1:]))
            style = "red" if case in slower or row.failed else None
            table.add_row(case, first, again, row.rival, str(row.ratio or row.note), style=style)
        Console().print(table)
        click.echo(limits_line(rows, name))
        errors += [f"{name}: {case} is slower than in {against} in two runs." for case in slower]
        errors += [f"{name}: {row.name} {row.note}." for row in rows if row.failed]
    return errors


def chosen(sets: tuple[str, ...]) -> list[str]:
    """Return those of the named instruction sets that run here, and print which do not; AVX2 and the widest by default.

    Raises:
        ClickException: there is no native library.
        UsageError: a name is unknown.
    """
    if (reason := library.reason_of_absence()) is not None:
        raise click.ClickException(f"The native kernel is not measured: {reason}.")
    known = [each.name for each in library.instruction_sets()]
    for name in sets:
        if name not in known:
            raise click.UsageError(f"There is no instruction set {name!r}. Give one of {', '.join(known)}.")
    running = runs_here(sets)
    for name in sets:
        if name not in running:
            click.echo(f"{name}: not measured, because this CPU does not support it.")
    return running


def compare(instruction_set: str, *, only: str, seconds: float, resume: bool, save: bool) -> list[Row]:
    """Measure the selected cases, each in a new process, and store every row at once.

    Args:
        instruction_set: the set that the native kernel must use.
        only: a part of the names or rivals of the cases; "" for all.
        seconds: about how long each case is timed.
        resume: whether rows of an interrupted run are reused.
        save: whether rows are stored. A whole run starts a new journal and writes its page row by row; a part of one
            replaces its rows in a complete page.
    """
    chosen = [case for case in CASES if only.lower() in " ".join(identity(case)).lower()]
    if not chosen:
        raise click.UsageError(f"No case's name or rival contains {only!r}.")
    whole = len(chosen) == len(CASES)
    journal = JOURNALS / f"native-{instruction_set}.jsonl"
    if save and whole and not resume:
        journal.unlink(missing_ok=True)
    stored = paired_with_cases(read_rows(journal, Row.from_dict))
    kept = {identity(case): row for case, row in stored}  # the newest row of each case
    cases = {identity(case): case for case in chosen}

    def write_if_complete() -> None:
        if save and (whole or len(kept) == len(CASES)):
            write(list(kept.values()), instruction_set)

    rows = measure_missing(
        {each: f"{instruction_set}: {case.name}" for each, case in cases.items()},
        lambda each: _measured(cases[each], seconds, instruction_set),
        kept=kept,
        resume=resume,
        journal=journal if save else None,
        after_each=write_if_complete,
    )
    if resume and whole:
        write_if_complete()
    return rows


def write(rows: list[Row], instruction_set: str) -> None:
    """Write the dated page of an instruction set and, if every case has a row, its summary in docs/."""
    write_page(RESULTS, f"native-{instruction_set}", page(rows, instruction_set))
    if len(rows) == len(CASES):
        for path in PAGES:
            text = summary_replaced(path.read_text(encoding="utf-8"), rows, instruction_set)
            path.write_text(text, encoding="utf-8")


def _measured(case: Case | Accuracy, seconds: float, instruction_set: str) -> Row:
    """Measure a case; an error becomes the note of its row, so that the run continues."""
    name, rival = identity(case)
    described = commit()
    try:
        return in_new_process(measured, CASES.index(case), seconds, described, instruction_set=instruction_set)
    except Exception as error:  # noqa: BLE001 - a benchmark of half an hour continues with the next row
        return Row(name, rival, note=failure(error), commit=described)


def show(rows: list[Row], instruction_set: str) -> None:
    """Print the rows as a table."""
    table = Table("case", "against", "ratio (quartiles)", "target", "pairs", "difference", title=instruction_set)
    for case, row in paired_with_cases(rows):
        style = "red" if row.failed or is_met(row, case, instruction_set) is False else None
        if isinstance(case, Case):
            table.add_row(*cells(case, row, instruction_set)[:-1], style=style)
        else:
            condition = requirement(case, instruction_set)
            found = row.note if row.error is None else f"{row.error:.3g}"
            table.add_row(case.name, "float64", found, condition[0] if condition else "", style=style)
    Console().print(table)
    click.echo(limits_line(rows, instruction_set))


if __name__ == "__main__":
    main()
