"""Format the results of the peers: a page, and a table for docs/measured.md."""

from __future__ import annotations

from benchmarks.machine import features, machine_line, measured_on
from benchmarks.pages import table, today
from benchmarks.peers.cases import CASES, DTYPES, Case
from benchmarks.peers.race import LEAST_SHARE, MOST_MICROSECONDS, MOST_PERCENT, Row, Standing

EXPLAINED = (
    "Every contender has the same weights (512 features, 8 heads, biases) and the same inputs, and is called in the "
    "fastest way that it offers for the case. Its output, or in training the gradient of its input, was compared with "
    "float64 before it was timed: the difference is relative to the largest value. The contenders of a case run "
    "alternately in one process. A ratio is the time of the peer divided by ours, the median over paired runs with its "
    "quartiles: above 1 ours is faster. Dense masks and block masks are made before; our mask values are planned in "
    "every call. Evaluation mode without gradients, except for the training step. Attention alone has no projections: "
    "its inputs and output are packed, (batch, length, features)."
)
MARK = "\n<!-- made by make bench, peers -->"  # after its table in docs/measured.md


def page(rows: list[Row]) -> list[str]:
    """Return the lines of the page, with the date and the machine."""
    found = ordered(rows)
    lines = [f"# Our layer and its peers, {today()}", ""]
    lines += [machine_line(row.commit for row in rows), ""]
    lines += [f"CPU features: {features()}.", ""]
    if len(rows) < (all_rows := sum(len(case.dtypes) for case in CASES)):
        lines += [f"{len(rows)} of {all_rows} rows.", ""]
    lines += [EXPLAINED, "", "## Against the best peer", ""]
    lines += table(
        ("case", "dtype", "best peer", "its time / ours", "target", "ours", "difference"),
        (summary(case, row) for case, row in found),
    )
    lines += ["", "## Peer by peer", ""]
    return lines + table(
        ("case", "dtype", "peer", "its time / ours", "pairs", "difference"),
        ((row.case, row.dtype, *cells(case, each)) for case, row in found for each in row.standings),
    )


def ordered(rows: list[Row]) -> list[tuple[Case, Row]]:
    """Pair each row with its case, in the order of the dtypes and cases."""
    by_identity = {(row.case, row.dtype): row for row in rows}
    jobs = ((case, by_identity.get((case.name, dtype))) for dtype in DTYPES for case in CASES)
    return [(case, row) for case, row in jobs if row is not None]


def summary(case: Case, row: Row) -> tuple[str, ...]:
    """Return the cells of one line against the best peer."""
    error = "" if row.error is None else f"{row.error:.1e}"
    if row.best is None:
        return case.name, row.dtype, "", row.note or "no peer was timed", target(case), "", error
    ours = f"{row.milliseconds:.3g} ms" if row.milliseconds < 1000 else f"{row.milliseconds:,.0f} ms"
    reached = target(case) + ("" if is_met(case, row) else ", not met")
    return case.name, row.dtype, row.best.peer, finding(case, row.best), reached, ours, error


def cells(case: Case, standing: Standing) -> tuple[str, ...]:
    """Return the cells of one peer."""
    error = "" if standing.error is None else f"{standing.error:.1e}"
    if standing.ratio is None:
        return standing.peer, standing.note, "", error
    context = f"{standing.ratio}, {finding(case, standing)}" if case.overhead else str(standing.ratio)
    return standing.peer, context, str(standing.ratio.pairs), error


def finding(case: Case, best: Standing) -> str:
    """Return the result of a case: a ratio, or our overhead over the rival."""
    if case.overhead == "%":
        return f"{percent(best):+.1f} %"
    if case.overhead == "microseconds":
        return f"{best.beyond:+.0f} microseconds a call"
    return str(best.ratio)


def percent(best: Standing) -> float:
    """Return by how many percent our call takes longer: with r = theirs / ours, 100 (1 / r - 1)."""
    return 100 * (1 / best.ratio.median - 1)


def target(case: Case) -> str:
    """Return the target of a case."""
    if case.overhead == "%":
        return f"under {MOST_PERCENT:g} %"
    if case.overhead == "microseconds":
        return f"under {MOST_MICROSECONDS:g} microseconds"
    if case.least:
        return f"median at least {case.least:g} x"
    return f"upper quartile at least {LEAST_SHARE:g} x" + (", median above 1 x" if case.hides else "")


def is_met(case: Case, row: Row) -> bool | None:
    """Return whether a row meets its target; None if nothing was timed."""
    best = row.best
    if best is None:
        return None
    if case.overhead == "%":
        return percent(best) < MOST_PERCENT
    if case.overhead == "microseconds":
        return best.beyond < MOST_MICROSECONDS
    if case.least:
        return best.ratio.median >= case.least
    return best.ratio.high >= LEAST_SHARE and (best.ratio.median > 1 or not case.hides)


def table_lines(rows: list[Row]) -> list[tuple[str, ...]]:
    """Return one line per case: the result against the best peer, and its name, in each dtype; last the machine."""
    found = {(row.case, row.dtype): row for row in rows}
    lines = []
    for case in CASES:
        line = [case.name]
        for dtype in DTYPES:
            if dtype not in case.dtypes:
                line.append("")
                continue
            best = None if (row := found.get((case.name, dtype))) is None else row.best
            line.append("not measured" if best is None else f"{finding(case, best)}, {best.peer}")
        lines.append(tuple(line))
    return [*lines, measured_on(row.commit for row in rows)]
