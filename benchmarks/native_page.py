"""Write the native kernel's results as a page: in short, row by row, and its accuracy."""

from __future__ import annotations

import datetime as dt

import torch

from benchmarks.alone import HELD
from benchmarks.machine import cpu, features
from benchmarks.native_cases import CASES, Accuracy, Case
from benchmarks.native_rows import Row, identity, is_met, meant
from multihead.kernels.native import library

EXPLAINED = (
    "Each output is compared with float64 first. A ratio is the median of paired runs, with its quartiles; it says "
    "how many times faster the native kernel is, and where *at most* is meant, how many times as long it takes. "
    "Batch 1, but 2 where a mask is compared with SDPA, and 4 where padded; 8 heads. `mh.attention` is timed as a user "
    "calls it; `native.attend` is the kernel alone, with a request and a plan made before."
)

HEAD = "|---|---|---|\n"  # of a table of three columns
Measured = list[tuple[Case | Accuracy, Row]]


def page(rows: list[Row], instruction_set: str) -> list[str]:
    """Write a whole page, dated and with the machine."""
    measured = paired_with_cases(rows)
    lines = [f"# The native kernel and its rivals, {instruction_set}, {dt.date.today().isoformat()}", ""]
    lines += [machine_line(rows, instruction_set), "", f"CPU features: {features()}.", *absent(), ""]
    if len(rows) < len(CASES):
        lines += [f"{len(rows)} of {len(CASES)} rows so far.", ""]
    lines += [
        EXPLAINED,
        "",
        "## In short",
        "",
        "| case | meant | worst and best row |  |",
        "|---|---|---|---|",
        *(f"| {' | '.join(line)} |" for line in in_short(measured, instruction_set)),
        "",
        "## Row by row",
        "",
        "| case | against | ratio (quartiles) | meant | pairs | largest difference | timed |",
        "|---|---|---|---|---|---|---|",
    ]
    timed = [(case, row) for case, row in measured if isinstance(case, Case)]
    lines += [f"| {' | '.join(cells(case, row, instruction_set))} |" for case, row in timed]
    lines += ["", "## Against float64", "", "| what | found | meant |", "|---|---|---|"]
    for case, row in measured:
        if isinstance(case, Accuracy):
            found = row.note if row.error is None else f"{row.error:.3g}"
            lines.append(f"| {case.name} | {found} | {_meant(case, row, instruction_set)} |")
    return lines


def paired_with_cases(rows: list[Row]) -> Measured:
    """Find the case of each row, in the order of the cases."""
    by_identity = {(row.name, row.rival): row for row in rows}
    return [(case, by_identity[identity(case)]) for case in CASES if identity(case) in by_identity]


def in_short(measured: Measured, instruction_set: str) -> list[tuple[str, str, str, str]]:
    """Write a line for rows that mean the same: the case, what is meant, the worst and the best, whether it is met."""
    lines = []
    for line in dict.fromkeys(case.line for case, _ in measured if isinstance(case, Case)):
        rows = [(case, row) for case, row in measured if isinstance(case, Case) and case.line == line]
        ratios = sorted(row.ratio.median for _, row in rows if row.ratio is not None)
        said = {each[0] for case, _ in rows if (each := meant(case, instruction_set))}
        found = f"{ratios[0]:.2f}-{ratios[-1]:.2f} x" if ratios else rows[0][1].note
        lines.append((line, ", ".join(sorted(said)), found, verdict(rows, instruction_set)))
    return lines


def retold(page: str, rows: list[Row], instruction_set: str) -> str:
    """Put the results in short between the head of a table and the mark behind it; a page without mark stays."""
    mark = f"\n<!-- made by make bench, {instruction_set} -->"
    if mark not in page:
        return page
    behind = page.index(mark)
    begin = page.rindex(HEAD, 0, behind) + len(HEAD)
    lines = [line[:3] for line in in_short(paired_with_cases(rows), instruction_set)]
    return page[:begin] + "\n".join(f"| {' | '.join(line)} |" for line in lines) + page[behind:]


def verdict(rows: Measured, instruction_set: str) -> str:
    """Say how many rows are not what is meant, or that all are."""
    met = [is_met(row, case, instruction_set) for case, row in rows]
    failed = sum(row.failed for _, row in rows)
    if failed:
        return f"{failed} of {len(rows)} failed"
    if False in met:
        return f"{met.count(False)} of {len(met)} not met"
    return "met" if True in met else ""


def cells(case: Case, row: Row, instruction_set: str) -> tuple[str, ...]:
    """Write the cells of one row."""
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.ratio is None:
        return case.name, case.rival, row.note, _meant(case, row, instruction_set), "", error, case.timed
    pairs = str(row.ratio.pairs)
    return case.name, case.rival, str(row.ratio), _meant(case, row, instruction_set), pairs, error, case.timed


def _meant(case: Case | Accuracy, row: Row, instruction_set: str) -> str:
    condition = meant(case, instruction_set)
    if condition is None:
        return ""
    return condition[0] + (", not met" if is_met(row, case, instruction_set) is False else "")


def machine_line(rows: list[Row], instruction_set: str) -> str:
    """Name CPU, instruction set, threads, torch and commit, and what torch was held to."""
    held = " and ".join(f"{name}={value}" for name, value in HELD.get(instruction_set, {}).items())
    commits = ", ".join(dict.fromkeys(row.commit for row in rows)) or "unknown"
    return (
        f"{cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}, commit {commits}. "
        f"The native kernel with {instruction_set}; "
        + (f"torch held to the same by {held}." if held else "torch as it chooses for itself.")
    )


def absent() -> list[str]:
    """Say which instruction sets were not measured because they do not run here."""
    missing = [each.name for each in library.instruction_sets() if not each.runs and not each.for_tests]
    return [f"Not measured, because they do not run here: {', '.join(missing)}."] if missing else []
