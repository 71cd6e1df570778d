"""Mutation testing: break one line of the library at a time, and check that a test fails.

Each mutant of tools/mutant_lines.py is written into a copy of src/multihead with the native library that was built, or
into a copy of csrc, from which one is built; and its tests run against the copy. If they pass, a test is missing.

    python -m tools.mutants [--only WORD]

With --fuzz it undoes corrections instead, and measures how long the fuzzer (tests/fuzz) needs to find each.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from multihead.kernels.native import library
from tools.mutant_lines import FUZZED, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "multihead"
LIMIT = 600  # seconds that a test may take

# The finder of an editable install comes before all paths, and would import the sources instead of the copy. Nobody
# reads the examples that hypothesis finds, so it need not shrink them.
_RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
sys.path.insert(0, sys.argv[1])
import multihead
assert multihead.__file__.startswith(sys.argv[1]), multihead.__file__
from multihead.kernels.native import library
assert sys.argv[2] == str(library.reason_of_absence() is None), library.reason_of_absence()
from hypothesis import Phase, settings
settings.register_profile("unshrunk", phases=(Phase.explicit, Phase.generate))
settings.load_profile("unshrunk")
import pytest
sys.exit(pytest.main(sys.argv[3:]))
"""

# The same for the processes that the fuzzer starts: Python runs this file from PYTHONPATH when it starts.
_STARTED = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
"""

Outcome = Literal["caught", "survived", "no verdict"]


class Verdict(NamedTuple):
    """The result of a mutant.

    Attributes:
        outcome: whether its tests failed; "no verdict" if they could not run.
        test: the first test that failed, or the reason why none ran.
        seconds: how long it took.
    """

    outcome: Outcome
    test: str
    seconds: float


class MutantError(Exception):
    """The text of a mutant does not occur in its file exactly once."""


def path_of(mutant: Mutant) -> Path:
    """Return the file of a mutant in this checkout."""
    return (ROOT if mutant.native else SOURCES) / mutant.file


def mutated(mutant: Mutant) -> str:
    """Return the file of a mutant with its broken line.

    Raises:
        MutantError: the text does not occur in the file exactly once.
    """
    source = path_of(mutant).read_text(encoding="utf-8")
    count = source.count(mutant.text)
    if count != 1:
        raise MutantError(
            f"{mutant.file} contains {mutant.text!r} {count} times. Change tools/mutant_lines.py, so that it is once."
        )
    return source.replace(mutant.text, mutant.replacement)


def copied(mutant: Mutant, folder: Path) -> None:
    """Copy the package and its native library into a folder, with a mutant in one of them."""
    package = folder / "multihead"
    shutil.copytree(SOURCES, package, ignore=shutil.ignore_patterns("__pycache__"))
    if not mutant.native:
        (package / mutant.file).write_text(mutated(mutant), encoding="utf-8")
    built = compiled(mutant) if mutant.native else library.path_of_library()
    if built is not None:
        shutil.copy(built, package / "kernels" / "native" / built.name)


def compiled(mutant: Mutant) -> Path:
    """Build the native library with a mutant, for the instruction set that runs here, and return its path."""
    source, build = ROOT / "build" / "mutants" / "source", ROOT / "build" / "mutants" / "native"
    for path in (ROOT / "CMakeLists.txt", *(ROOT / "csrc").rglob("*.*")):
        copy, text = source / path.relative_to(ROOT), path.read_text(encoding="utf-8")
        text = mutated(mutant) if path == path_of(mutant) else text
        if not copy.exists() or copy.read_text(encoding="utf-8") != text:  # what has not changed is not compiled again
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text, encoding="utf-8")
    cmake = shutil.which("cmake", path=str(Path(sys.executable).parent)) or "cmake"
    sets = f"-DMULTIHEAD_SETS={library.chosen_instruction_set().name}"
    for command in (["-G", "Ninja", "-S", str(source), "-B", str(build), sets], ["--build", str(build)]):
        subprocess.run([cmake, *command], check=True, stdout=subprocess.DEVNULL)
    return build / "libmultihead_native.so"


def run(tests: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run tests against the package in a folder."""
    # With CI, hypothesis draws the same examples each time: a test that fails in one run of ten would prove nothing.
    environment = {**os.environ, "CI": "1", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    native = str(library.reason_of_absence() is None)
    # Hypothesis is imported before its pytest plugin, which warns about that.
    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    options = ("-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", *quiet)
    return subprocess.run(
        [sys.executable, "-c", _RUN, str(folder), native, *options, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )


def judged(mutant: Mutant) -> Verdict:
    """Write the mutant into a copy, run its tests, and return whether one failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="multihead-mutant-") as folder:
        copied(mutant, Path(folder))
        try:
            finished = run(mutant.tests, Path(folder))
        except subprocess.TimeoutExpired:
            return Verdict("no verdict", f"it ran more than {LIMIT} seconds", time.monotonic() - began)
    outcome, test = verdict_of(finished.returncode, finished.stdout, finished.stderr)
    return Verdict(outcome, test, time.monotonic() - began)


def verdict_of(status: int, stdout: str, stderr: str) -> tuple[Outcome, str]:
    """Read pytest's output: the mutant is caught if a test failed, and not if the tests could not start.

    >>> verdict_of(1, "FAILED tests/layer/test_heads.py::test_a[1] - assert 1 == 2", "")
    ('caught', 'tests/layer/test_heads.py::test_a[1]')
    >>> verdict_of(0, "12 passed", "")
    ('survived', '')
    """
    if status == 0:
        return "survived", ""
    failed = re.search(r"^FAILED (\S+::.*?)(?: - .*)?$", stdout, re.MULTILINE)
    if status == 1 and failed is not None:
        return "caught", failed[1]
    printed = (stderr.strip() or stdout.strip() or f"pytest exited with {status}").splitlines()
    return "no verdict", printed[-1]


def chosen(word: str | None, mutants: tuple[Mutant, ...] = MUTANTS) -> tuple[Mutant, ...]:
    """Return the mutants whose part, file or breakage contains a word; all if it is None."""
    if word is None:
        return mutants
    return tuple(each for each in mutants if word.lower() in f"{each.part} {each.file} {each.breaks}".lower())


class Found(NamedTuple):
    """How the fuzzer found a mutant with one seed.

    Attributes:
        seed: of the fuzzer.
        seconds: after which the first case failed that passes without the mutant; None if there was none.
        kind: the entry point of that case.
    """

    seed: int
    seconds: float | None
    kind: str


def fuzzed(mutant: Mutant, seed: int, seconds: int, budget: float) -> Found:
    """Undo a correction in a copy, and run the fuzzer on it until it fails in a case that passes without the mutant."""
    with tempfile.TemporaryDirectory(prefix="multihead-mutant-") as folder:
        copied(mutant, Path(folder))
        (Path(folder) / "sitecustomize.py").write_text(_STARTED, encoding="utf-8")
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(seconds), "--seed", str(seed)]
        command += ["--budget", str(budget)]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            kind, after = "", 0.0
            for line in run.stdout:
                words = line.split()
                kind = line.split(":")[0] if line[:1].strip() else kind
                if words[:1] == ["after:"]:
                    after = float(words[1])
                elif words[:1] == ["again:"] and _passes(line.split("again:")[1].strip()):
                    run.terminate()
                    return Found(seed, after, kind)
    return Found(seed, None, "")


def _passes(command: str) -> bool:
    """Whether a case that the fuzzer printed passes with the library as it is."""
    words = [sys.executable, *shlex.split(command)[1:]]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return (
        subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, timeout=LIMIT, check=False).returncode
        == 0
    )


def fuzz_table(mutants: Sequence[Mutant], seeds: int, seconds: int, budget: float, console: Console) -> bool:
    """Print how long the fuzzer takes for each mutant, and return whether it found all of them with all seeds."""
    table, every = Table("undone", "median s", "worst s", "found by", box=None, pad_edge=False), True
    for mutant in mutants:
        found = [fuzzed(mutant, seed, seconds, budget) for seed in range(1, seeds + 1)]
        times = sorted(seconds if each.seconds is None else each.seconds for each in found)
        missed = sum(each.seconds is None for each in found)
        every = every and not missed
        worst = f"not found with {missed} of {seeds} seeds" if missed else f"{times[-1]:.0f}"
        kinds = ", ".join(dict.fromkeys(each.kind for each in found if each.kind))
        row = (f"{mutant.part}: {mutant.breaks}", f"{times[len(times) // 2]:.0f}", worst, kinds)
        console.print(" | ".join(row), markup=False, highlight=False)
        table.add_row(*row)
    console.print(table)
    return every


def table_of(verdicts: Sequence[tuple[Mutant, Verdict]]) -> Table:
    """Return a table with one row per mutant."""
    table = Table("part", "broken", "caught by", "seconds", box=None, pad_edge=False)
    table.columns[2].overflow, table.columns[3].justify = "fold", "right"
    for mutant, verdict in verdicts:
        style = None if verdict.outcome == "caught" else "bold red"
        result = verdict.test if verdict.outcome == "caught" else f"{verdict.outcome} {verdict.test}".strip()
        cells = (mutant.part, mutant.breaks, result.removeprefix("tests/"), f"{verdict.seconds:.0f}")
        table.add_row(*(cell.replace("[", r"\[") for cell in cells), style=style)
    return table


EXAMPLES = """
\b
Examples:
  make mutants                                 all of them, some minutes
  python -m tools.mutants --only rotary        those of one part
  python -m tools.mutants --only kernels/sdpa  those of one file
  python -m tools.mutants --list               all mutants, and the tests that must fail
  python -m tools.mutants --against tests/layer/test_agreement.py
                                               which of them one test file catches
  python -m tools.mutants --fuzz --seeds 5     how long the fuzzer needs to find each correction that is undone
"""


@click.command(epilog=EXAMPLES)
@click.option("--only", metavar="WORD", help="Take the mutants whose part, file or breakage contains this word.")
@click.option("--against", metavar="PATH", help="Run these tests instead of those of each mutant.")
@click.option("--list", "listed", is_flag=True, help="Print the mutants and their tests, and run nothing.")
@click.option("--fuzz", is_flag=True, help="Undo corrections, and time how long `make fuzz` needs to find each.")
@click.option("--seeds", default=5, show_default=True, help="With --fuzz: runs per correction.")
@click.option("--seconds", default=300, show_default=True, help="With --fuzz: the longest run.")
@click.option("--budget", default=1.0, show_default=True, help="With --fuzz: factor of every error budget.")
def main(
    only: str | None, against: str | None, seeds: int, seconds: int, budget: float, *, listed: bool, fuzz: bool
) -> None:
    """Break one line of the library at a time, and check that a test fails.

    Exits with 1 if the tests pass for a mutant.
    """
    mutants, console = chosen(only, FUZZED if fuzz else MUTANTS), Console()
    if against is not None:
        mutants = tuple(each._replace(tests=tuple(against.split())) for each in mutants)
    if not console.is_terminal:
        console = Console(width=200)  # a file has no width
    if not mutants:
        parts = ", ".join(dict.fromkeys(each.part for each in MUTANTS))
        raise click.UsageError(f"No mutant contains {only!r}. The parts are: {parts}.")
    if listed:
        for each in mutants:
            console.print(f"{each.part}: {each.breaks} ({' '.join(each.tests)})", markup=False, highlight=False)
        return
    if fuzz:
        sys.exit(0 if fuzz_table(mutants, seeds, seconds, budget, console) else 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    verdicts: list[tuple[Mutant, Verdict]] = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(mutants))
        for each in mutants:
            progress.update(task, description=f"{each.part}: {each.breaks}")
            verdicts.append((each, judged(each)))
            if verdicts[-1][1].outcome != "caught":
                progress.print(f"{each.part}: {each.breaks}: {verdicts[-1][1].outcome}", markup=False)
            progress.advance(task)
    console.print(table_of(verdicts))
    missed = sum(verdict.outcome != "caught" for _, verdict in verdicts)
    console.print(f"{len(verdicts) - missed} of {len(verdicts)} were caught.")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
