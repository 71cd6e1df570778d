"""The command of the fuzzer: python -m tests.fuzz.

`make fuzz` (`tests/fuzz/`) calls every public entry point with random arguments, as users do: without a `kernel=`. A
case is an entry point and a seed. Each of its choices (a layout, a mask, a bias, a special number) has random numbers
of its own, so one choice can be left out and all others stay. That is how a failure is reduced: feature after feature
is left out, and sizes become smaller, as long as it fails with the same words. Failures with the same words that need
the same features are one kind, which is printed once; a known kind hides no other, because a case that fails without
the features of the kind is a new one.

The judge is the oracle of the other tests (`tests/oracle.py`) in float64. `tests/fuzz/judge.py` adds which rows must be
NaN and which may overflow, and how far each element may be off: the rounding of a call is followed to first order, and
only where a result is outside is the plain computation made in its dtype, whose error counts, too. Cases run in child
processes. Their tensors may end at a page that cannot be read, so a read past the end is a signal, which is a failure
like another. `make test` runs a fixed sample; `python -m tools.mutants --fuzz` undoes corrections and measures how long
the fuzzer needs to find each.
"""

from __future__ import annotations

import os
import sys
import time

import click

from tests.fuzz.entries import ENTRIES
from tests.fuzz.search import Search, entries_of
from tests.fuzz.worker import PLACE, Case, Worker

EXAMPLES = """
\b
Examples:
  make fuzz                                        one minute, on all cores
  make fuzz SECONDS=300 SEED=1                     longer, with other cases
  python -m tests.fuzz --seconds 60 --only layer   one entry point, or all whose names contain a word
  python -m tests.fuzz --only attention --case 17  one case again, as a failure prints it
  python -m tests.fuzz --device cuda               on a GPU, the entry points that can run there
  python -m tests.fuzz --list                      the entry points
"""


@click.command(epilog=EXAMPLES)
@click.option("--seconds", default=60.0, show_default=True, help="How long cases are run.")
@click.option("--seed", default=0, show_default=True, help="Of the run; each seed has other cases.")
@click.option("--jobs", default=os.cpu_count() or 1, show_default=True, help="Processes, one thread each.")
@click.option("--only", metavar="NAME", help="The entry points whose names contain this word.")
@click.option("--budget", default=1.0, show_default=True, help="Factor of every error budget.")
@click.option("--device", metavar="DEVICE", help="Where the calls run, such as cuda; results are judged on the CPU.")
@click.option("--case", metavar="SEED", type=int, help="Run this case of the entry point --only again.")
@click.option("--without", metavar="FEATURES", default="", help="With --case: features to leave out, with commas.")
@click.option("--most", type=int, help="With --case: the largest size.")
@click.option("--list", "listed", is_flag=True, help="Print the entry points, and run nothing.")
def main(
    seconds: float,
    seed: int,
    jobs: int,
    only: str | None,
    budget: float,
    device: str | None,
    case: int | None,
    without: str,
    most: int | None,
    listed: bool,
) -> None:
    """Compare random calls of every public entry point with a dense computation in float64.

    Each kind of failure is printed once, with its smallest case and the line that runs it again.
    Exits with 1 if a case failed.
    """
    os.environ["MULTIHEAD_FUZZ_BUDGET"] = str(budget)  # before the processes that compare are started
    entries = entries_of(only)
    if device is not None:
        os.environ[PLACE] = device
        entries = {name: entry for name, entry in entries.items() if entry.moves}
    if not entries:
        raise click.UsageError(f"No entry point contains {only!r}. There are: {', '.join(ENTRIES)}.")
    if listed:
        for name, entry in entries.items():
            click.echo(f"{name:24} {(entry.check.__doc__ or '').splitlines()[0]}")
        return
    if case is not None:
        if only not in ENTRIES:
            raise click.UsageError("Name the entry point of the case, such as --only attention --case 17.")
        features = tuple(each.strip() for each in without.split(",") if each.strip())
        sys.exit(_again(Case(only, case, features, most)))
    search = Search(entries, seed, report=_print)
    _print(f"{len(entries)} entry points, {seconds:g} seconds, seed {seed}, {jobs} processes")
    began = time.monotonic()
    search.for_seconds(seconds, jobs, progress=_print)
    _print(summary(search, time.monotonic() - began))
    sys.exit(1 if search.kinds else 0)


def _print(text: str) -> None:
    click.echo(text)
    sys.stdout.flush()


def _again(case: Case) -> int:
    """Run one case again, and print what it is."""
    worker = Worker()
    try:
        result = worker.run(case)
        if result.failure is not None and not result.used:
            result = worker.run(Case(case.entry, case.seed, case.without, case.most, told=True))
    finally:
        worker.close()
    _print(f"{case.entry} {case.seed}: {result.described}\nfeatures: {', '.join(result.used) or 'none'}")
    if result.trace:
        _print(result.trace)
    _print(f"FAILED {result.failure}" if result.failure is not None else "passed")
    return 1 if result.failure is not None else 0


def summary(search: Search, seconds: float) -> str:
    """Cases per entry point, and the kinds of failures with their counts."""
    lines = [f"{'entry point':24} {'cases':>8} {'per second':>10} {'failed':>8}"]
    for name, tally in search.tallies.items():
        rate = tally.cases / tally.seconds if tally.seconds > 0 else 0.0
        lines.append(f"{name:24} {tally.cases:8,} {rate:10.3g} {tally.failures:8,}")
    total = sum(tally.cases for tally in search.tallies.values())
    lines.append(f"{total:,} cases in {seconds:.0f} s, {len(search.kinds)} kinds of failures")
    kinds = sorted(search.kinds, key=lambda kind: -kind.count)
    lines += [
        f"{each.count:6,} x {each.case.entry}: {each.outcome.shape}\n         {each.case.command()}" for each in kinds
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
