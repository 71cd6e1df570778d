"""Write what came of the peers as a page, and in short for the READMEs."""

from __future__ import annotations

import datetime as dt

import torch

from benchmarks.machine import cpu, features
from benchmarks.peers_cases import CASES, DTYPES, Case
from benchmarks.peers_contest import LEAST_SHARE, MOST_MICROSECONDS, MOST_PERCENT, Row, Standing

EXPLAINED = (
    "Every contender has the same weights (512 features, 8 heads, biases) and the same inputs, is called in the best "
    "way it has for the case, and its output, in training its input's gradient, was compared with float64 before it "
    "was timed: the difference is a share of the largest value. Contenders of a case run in turns in one process. A "
    "ratio is the peer's time by ours, the median over paired runs with its quartiles: above 1 ours is faster. Dense "
    "masks and block masks are made before, mask values are planned in every call of ours. Without grad, in eval, but "
    "for the training step."
)
HEAD, MARK = "|---|---|---|\n", "\n<!-- made by make bench, peers -->"  # around the table of a README


def page(rows: list[Row]) -> list[str]:
    """Write a whole page, dated and with the machine."""
    found = ordered(rows)
    lines = [f"# Our layer and its peers, {dt.date.today().isoformat()}", "", machine_line(rows), ""]
    lines += [f"CPU features: {features()}.", ""]
    if len(rows) < len(CASES) * len(DTYPES):
        lines += [f"{len(rows)} of {len(CASES) * len(DTYPES)} rows.", ""]
    lines += [EXPLAINED, "", "## Against the best peer", ""]
    lines += ["| case | dtype | best peer | its time by ours | meant | ours | difference |", f"|{'---|' * 7}"]
    lines += [f"| {' | '.join(in_short(case, row))} |" for case, row in found]
    lines += ["", "## Peer by peer", "", "| case | dtype | peer | its time by ours | pairs | difference |"]
    lines += [f"|{'---|' * 6}"]
    for case, row in found:
        lines += [f"| {row.case} | {row.dtype} | {' | '.join(cells(case, each))} |" for each in row.standings]
    return lines


def ordered(rows: list[Row]) -> list[tuple[Case, Row]]:
    """Find the case of each row, in the order of the cases, dtype behind dtype."""
    by_identity = {(row.case, row.dtype): row for row in rows}
    jobs = ((case, by_identity.get((case.name, dtype))) for dtype in DTYPES for case in CASES)
    return [(case, row) for case, row in jobs if row is not None]


def in_short(case: Case, row: Row) -> tuple[str, ...]:
    """Write one line against the best peer."""
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.best is None:
        return case.name, row.dtype, "", row.note or "no peer was timed", meant(case), "", error
    ours = f"{row.milliseconds:.3g} ms" if row.milliseconds < 1000 else f"{row.milliseconds:,.0f} ms"
    told = meant(case) + ("" if is_met(case, row) else ", not met")
    return case.name, row.dtype, row.best.peer, finding(case, row.best), told, ours, error


def cells(case: Case, standing: Standing) -> tuple[str, ...]:
    """Write what came of one peer."""
    error = "" if standing.error is None else f"{standing.error:.1e}"
    if standing.ratio is None:
        return standing.peer, standing.note, "", error
    context = f"{standing.ratio}, {finding(case, standing)}" if case.overhead else str(standing.ratio)
    return standing.peer, context, str(standing.ratio.pairs), error


def finding(case: Case, best: Standing) -> str:
    """Write what a case is measured for: a ratio, or what a call of ours costs beside its rival."""
    if case.overhead == "%":
        return f"{percent(best):+.1f} %"
    if case.overhead == "microseconds":
        return f"{best.beyond:+.0f} microseconds a call"
    return str(best.ratio)


def percent(best: Standing) -> float:
    """Return how many hundredths longer our call takes: from r = theirs / ours, 100 (1 / r - 1)."""
    return 100 * (1 / best.ratio.median - 1)


def meant(case: Case) -> str:
    """Say what is meant of a case."""
    if case.overhead == "%":
        return f"under {MOST_PERCENT:g} %"
    if case.overhead == "microseconds":
        return f"under {MOST_MICROSECONDS:g} microseconds"
    return f"upper quartile at least {LEAST_SHARE:g} x" + (", median above 1 x" if case.hides else "")


def is_met(case: Case, row: Row) -> bool | None:
    """Tell whether a row is what is meant; None where nothing was timed."""
    best = row.best
    if best is None:
        return None
    if case.overhead == "%":
        return percent(best) < MOST_PERCENT
    if case.overhead == "microseconds":
        return best.beyond < MOST_MICROSECONDS
    return best.ratio.high >= LEAST_SHARE and (best.ratio.median > 1 or not case.hides)


def retold(page: str, rows: list[Row]) -> str:
    """Put a line a case between the head of a table and the mark behind it; a page without the mark stays."""
    if MARK not in page:
        return page
    behind = page.index(MARK)
    begin = page.rindex(HEAD, 0, behind) + len(HEAD)
    return page[:begin] + "\n".join(f"| {' | '.join(line)} |" for line in told(rows)) + page[behind:]


def told(rows: list[Row]) -> list[tuple[str, ...]]:
    """Write a line a case: what was found against the best peer, and its name, in each dtype."""
    found = {(row.case, row.dtype): row for row in rows}
    lines = []
    for case in CASES:
        line = [case.name]
        for dtype in DTYPES:
            best = None if (row := found.get((case.name, dtype))) is None else row.best
            line.append("not measured" if best is None else f"{finding(case, best)}, {best.peer}")
        lines.append(tuple(line))
    return lines


def machine_line(rows: list[Row]) -> str:
    """Name CPU, threads, torch and commit."""
    commits = ", ".join(dict.fromkeys(row.commit for row in rows)) or "unknown"
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{cpu()} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}, commit {commits}."
