"""Format the native kernel's results: a summary, row by row, and its accuracy."""

from __future__ import annotations

import torch

from benchmarks.in_process import TORCH_LIMITS
from benchmarks.machine import cpu, features, measured_on
from benchmarks.native.cases import CASES, Accuracy, Case
from benchmarks.native.rows import Row, identity, is_met, requirement
from benchmarks.pages import HEAD, replace_table, table, today
from multihead.kernels.native import library

EXPLAINED = (
    "Each output is compared with float64 first. A ratio is the median over paired runs, with its quartiles: how many "
    "times faster the native kernel is or, for *at most*, how many times as long it takes. The batch is 1, "
    "2 for masks against SDPA, and 4 for padding; 8 heads. `mh.attention` is timed as a user calls it; `native.attend` "
    "is the kernel alone, with a request and a plan made before."
)

NEXT_SET = "<!-- the next instruction set -->"

Measured = list[tuple[Case | Accuracy, Row]]


def page(rows: list[Row], instruction_set: str) -> list[str]:
    """Return the lines of the page, with the date and the machine."""
    measured = paired_with_cases(rows)
    lines = [f"# The native kernel and its rivals, {instruction_set}, {today()}", ""]
    lines += [limits_line(rows, instruction_set), "", f"CPU features: {features()}.", *absent(), ""]
    if len(rows) < len(CASES):
        lines += [f"{len(rows)} of {len(CASES)} rows so far.", ""]
    lines += [
        EXPLAINED,
        "",
        "## Summary",
        "",
        *table(("case", "target", "worst and best row", ""), summary(measured, instruction_set)),
        "",
        "## Row by row",
        "",
    ]
    timed = [cells(case, row, instruction_set) for case, row in measured if isinstance(case, Case)]
    lines += table(("case", "against", "ratio (quartiles)", "target", "pairs", "largest difference", "timed"), timed)
    exact = [
        (case.name, row.note if row.error is None else f"{row.error:.3g}", _target(case, row, instruction_set))
        for case, row in measured
        if isinstance(case, Accuracy)
    ]
    return [*lines, "", "## Against float64", "", *table(("quantity", "measured", "target"), exact)]


def paired_with_cases(rows: list[Row]) -> Measured:
    """Pair each row with its case, in the order of the cases."""
    by_identity = {(row.name, row.rival): row for row in rows}
    return [(case, by_identity[identity(case)]) for case in CASES if identity(case) in by_identity]


def summary(measured: Measured, instruction_set: str) -> list[tuple[str, str, str, str]]:
    """Return the lines of the summary: name, targets, worst and best ratio, and whether all targets are met."""
    lines = []
    for line in dict.fromkeys(case.line for case, _ in measured if isinstance(case, Case)):
        rows = [(case, row) for case, row in measured if isinstance(case, Case) and case.line == line]
        ratios = sorted(row.ratio.median for _, row in rows if row.ratio is not None)
        targets = {each[0] for case, _ in rows if (each := requirement(case, instruction_set))}
        found = f"{ratios[0]:.2f}-{ratios[-1]:.2f} x" if ratios else rows[0][1].note
        lines.append((line, ", ".join(sorted(targets)), found, verdict(rows, instruction_set)))
    return lines


def summary_replaced(page: str, rows: list[Row], instruction_set: str) -> str:
    """Replace the summary of an instruction set in a page, or add its section before NEXT_SET if the page has that."""
    mark = f"\n<!-- made by make bench, {instruction_set} -->"
    if mark not in page and NEXT_SET in page:
        heading = page[: page.index(HEAD)].splitlines()[-1]  # of the first table, in the language of the page
        page = page.replace(NEXT_SET, f"### {instruction_set}\n\n{heading}\n{HEAD}{mark}\n\n{NEXT_SET}")
    lines = [line[:3] for line in summary(paired_with_cases(rows), instruction_set)]
    limits = " ".join(f"`{name}={value}`" for name, value in TORCH_LIMITS.get(instruction_set, {}).items())
    name, machine, _ = measured_on(row.commit for row in rows)
    return replace_table(page, mark, [*lines, (name, limits, machine)])


def verdict(rows: Measured, instruction_set: str) -> str:
    """Return how many rows failed or miss their target, or that all meet it."""
    met = [is_met(row, case, instruction_set) for case, row in rows]
    failed = sum(row.failed for _, row in rows)
    if failed:
        return f"{failed} of {len(rows)} failed"
    if False in met:
        return f"{met.count(False)} of {len(met)} not met"
    return "met" if True in met else ""


def cells(case: Case, row: Row, instruction_set: str) -> tuple[str, ...]:
    """Return the cells of one row."""
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.ratio is None:
        return case.name, case.rival, row.note, _target(case, row, instruction_set), "", error, case.timed
    pairs = str(row.ratio.pairs)
    return case.name, case.rival, str(row.ratio), _target(case, row, instruction_set), pairs, error, case.timed


def _target(case: Case | Accuracy, row: Row, instruction_set: str) -> str:
    condition = requirement(case, instruction_set)
    if condition is None:
        return ""
    return condition[0] + (", not met" if is_met(row, case, instruction_set) is False else "")


def limits_line(rows: list[Row], instruction_set: str) -> str:
    """Return a line with the CPU, the threads, torch and the commits, the instruction set, and the limits of torch."""
    limits = " and ".join(f"{name}={value}" for name, value in TORCH_LIMITS.get(instruction_set, {}).items())
    commits = ", ".join(dict.fromkeys(row.commit for row in rows)) or "unknown"
    return (
        f"{cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}, commit {commits}. "
        f"The native kernel with {instruction_set}; "
        + (f"torch is limited to it by {limits}." if limits else "torch chooses its own.")
    )


def absent() -> list[str]:
    """Return a sentence that names the instruction sets that do not run here, if there are any."""
    missing = [each.name for each in library.instruction_sets() if not each.is_supported_by_cpu and not each.for_tests]
    return [f"Not measured, because they do not run here: {', '.join(missing)}."] if missing else []
