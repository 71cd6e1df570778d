"""Random calls of every entry point on the GPU, compared with float64, in 4 processes (tests/fuzz)."""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec

from tools.on_gpu.worker import Cases, NotHere

JOBS = 4
DEVICE = "cuda"
START = 12.0  # seconds that the processes take to start, and the last cases to end


def cases(seconds: float) -> Cases:
    """Return one case: the whole search, for the time of this part."""
    return {"fuzz": partial(search, max(seconds - START, 3.0))}


def search(seconds: float) -> dict[str, object]:
    """Run the fuzzer; raise an error with the kinds of failures, if there are any."""
    if find_spec("hypothesis") is None:
        raise NotHere(
            "hypothesis, with which the fuzzer draws, is not installed: put a folder with it into PYTHONPATH."
        )
    os.environ["MULTIHEAD_FUZZ_DEVICE"] = DEVICE  # before the fuzzer is imported
    from tests.fuzz.entries import ENTRIES
    from tests.fuzz.search import Search

    entries = {name: entry for name, entry in ENTRIES.items() if entry.moves}
    found = Search(entries, report=lambda _: None)
    found.for_seconds(seconds, JOBS)
    count = sum(tally.cases for tally in found.tallies.values())
    if found.kinds:
        lines = [f"{kind.count} x {kind.outcome.shape}; {kind.case.command()}" for kind in found.kinds]
        raise AssertionError(f"{len(found.kinds)} kinds of failures in {count} cases: " + " | ".join(lines))
    if not count:
        raise AssertionError("No case was run within the time.")
    return {"answer": f"{count} cases of {len(entries)} entry points, no failure"}
