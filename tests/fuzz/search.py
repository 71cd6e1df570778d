"""Run cases until the time is over, and sort what fails into kinds, each with its smallest case."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from tests.fuzz.entries import ENTRIES, Entry
from tests.fuzz.worker import Case, Outcome, Worker

REDUCING = 15.0  # seconds for the smallest case of a kind
KINDS_OF_A_SHAPE = 6  # further ones are counted with the last
SLOW = 1.0
QUOTA = 0.1  # share of the time that slow cases may take
EVERY = 10.0  # seconds between lines of progress


@dataclass
class Kind:
    """Failures of one entry point with the same words, which go away without the same features.

    Fields:
        case: the smallest one.
        outcome: how it ended.
        features: those that it needs to fail.
        after: seconds from the start of the run to the first case.
        count: how many cases failed so.
    """

    case: Case
    outcome: Outcome
    features: frozenset[str]
    after: float = 0.0
    count: int = 1

    def text(self) -> str:
        needs = ", ".join(sorted(self.features)) or "nothing special"
        lines = [f"{self.case.entry}: {self.outcome.failure}", f"  needs: {needs}"]
        if self.outcome.described:
            lines.append(f"  case:  {self.outcome.described}")
        lines += [f"  after: {self.after:.1f} s", f"  again: {self.case.command()}"]
        return "\n".join(lines)


@dataclass
class Tally:
    """What an entry point has done: cases, seconds, failures."""

    cases: int = 0
    seconds: float = 0.0
    failures: int = 0


@dataclass
class Search:
    """A run of the fuzzer.

    Fields:
        entries: the entry points, by name.
        seed: of the run; the n-th case of an entry point has the seed seed * 1,000,000 + n.
        report: is called with the text of each new kind.
    """

    entries: Mapping[str, Entry]
    seed: int = 0
    report: Callable[[str], None] = print
    kinds: list[Kind] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    workers: list[Worker] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.tallies = {name: Tally() for name in self.entries}

    # ---- a run

    def for_seconds(self, seconds: float, jobs: int, progress: Callable[[str], None] | None = None) -> None:
        """Run cases of all entry points, each for its share of the time, in some processes."""
        said = self.began
        end = self.began + seconds
        threads = [threading.Thread(target=self._job, args=(end,), daemon=True) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():
                    thread.join(0.2)
                    if progress is not None and time.monotonic() - said >= EVERY:
                        said = time.monotonic()
                        cases = sum(tally.cases for tally in self.tallies.values())
                        progress(f"{said - self.began:.0f} s: {cases:,} cases, {len(self.kinds)} kinds of failures")
        finally:
            self.close()

    def sample(self, name: str, count: int, worker: Worker) -> None:
        """Run the first cases of one entry point."""
        for case in self._cases(name, count):
            self._one(case, worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()

    def _worker(self) -> Worker:
        worker = Worker()
        self.workers.append(worker)
        return worker

    def _cases(self, name: str, count: int) -> Iterator[Case]:
        for number in range(count):
            self.tallies[name].cases += 1
            yield Case(name, self.seed * 1_000_000 + number)

    def _job(self, end: float) -> None:
        quick, slow = self._worker(), self._worker()
        while time.monotonic() < end:
            with self.lock:
                name = self._next()
                case = Case(name, self.seed * 1_000_000 + self.tallies[name].cases)
                self.tallies[name].cases += 1
                self.tallies[name].seconds += self.entries[name].seconds  # until it is known
            try:
                taken = self._one(case, slow if self.entries[name].seconds >= SLOW else quick)
            except (OSError, ValueError):  # the run was ended meanwhile
                return
            with self.lock:
                self.tallies[name].seconds += taken - self.entries[name].seconds

    def _next(self) -> str:
        """Choose the entry point that is furthest behind its share, of the slow ones as long as their quota lasts."""
        slow = [name for name, entry in self.entries.items() if entry.seconds >= SLOW]
        quick = [name for name in self.entries if name not in slow]
        seconds = {name: tally.seconds for name, tally in self.tallies.items()}
        chosen = max(slow, key=lambda name: self.entries[name].share / (seconds[name] + 1), default="")
        if chosen and quick:
            spent = sum(seconds[name] for name in slow) + self.entries[chosen].seconds
            if spent > QUOTA * (sum(seconds.values()) + self.entries[chosen].seconds):
                chosen = ""
        return chosen or min(quick, key=lambda name: seconds[name] / self.entries[name].share)

    # ---- what fails

    def _one(self, case: Case, worker: Worker) -> float:
        """Run a case and sort its failure; return the seconds of the case alone."""
        result = worker.run(case)
        if result.failure is not None:
            with self.lock:
                self.tallies[case.entry].failures += 1
            if not self._known(case, result, worker):
                self._reduce(case, result, worker)
        return result.seconds

    def _known(self, case: Case, result: Outcome, worker: Worker) -> bool:
        """Whether a known kind explains a failure: without the features of the kind it does not fail."""
        same = [kind for kind in self.kinds if kind.case.entry == case.entry and kind.outcome.shape == result.shape]
        for kind in same:
            if not result.used or kind.features <= set(result.used):
                needed = sorted(kind.features)
                if not needed or worker.run(replace(case, without=(*case.without, *needed))).failure is None:
                    kind.count += 1
                    return True
        if len(same) >= KINDS_OF_A_SHAPE:
            same[-1].count += 1
            return True
        return False

    def _reduce(self, case: Case, result: Outcome, worker: Worker) -> None:
        """Leave out one feature after another, and make the sizes smaller, as long as it fails with the same words."""
        after = time.monotonic() - self.began
        end = time.monotonic() + REDUCING
        if not result.used:  # it died: once more, told step by step
            again = worker.run(replace(case, told=True))
            if again.failure is None:
                result.failure = f"{result.failure} (not when it ran alone)"
            result.used, result.described = again.used, again.described
        shape, best = result.shape, result
        features = result.used
        needed = list(features)
        for feature in reversed(features):
            if time.monotonic() > end:
                break
            tried = replace(case, without=(*case.without, feature))
            ended = worker.run(tried)
            if ended.shape == shape:
                case, best = tried, ended
                needed.remove(feature)
        for most in (1, 2, 3, 4, 6, 9, 17, 33):
            if time.monotonic() > end:
                break
            tried = replace(case, most=most)
            ended = worker.run(tried)
            if ended.shape == shape:
                case, best = tried, ended
                break
        if not best.described:
            best.described = worker.run(replace(case, told=True)).described
        kind = Kind(case, best, frozenset(needed), after)
        with self.lock:
            for known in self.kinds:  # of another job, meanwhile
                if (known.case.entry, known.outcome.shape, known.features) == (case.entry, shape, kind.features):
                    known.count += 1
                    return
            self.kinds.append(kind)
        self.report(kind.text())


def entries_of(only: str | None) -> Mapping[str, Entry]:
    """The entry points whose names contain a word; all if it is None."""
    if only is None:
        return ENTRIES
    return {only: ENTRIES[only]} if only in ENTRIES else {n: e for n, e in ENTRIES.items() if only in n}
