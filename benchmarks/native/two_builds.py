"""Compare two builds of the native library on one instruction set with csrc/bench, which times their calls in turn."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from functools import cache
from io import BytesIO
from pathlib import Path

import click

from benchmarks.measure import Ratio
from benchmarks.pages import ROOT
from multihead.kernels.native import library

BUILDS = ROOT / "build" / "native"
SOURCES = ("csrc", "CMakeLists.txt")
SLOWER = 0.97  # old time / new time: a build is slower where even the upper quartile is below it, in two runs


def is_slower(runs: Iterable[Ratio]) -> bool:
    """Return whether every run says that the new build is slower.

    >>> is_slower([Ratio(0.9, 0.88, 0.96, 15), Ratio(0.91, 0.9, 0.97, 15)])
    False
    """
    return all(run.high < SLOWER for run in runs)


def compared(measure: Callable[[list[str]], dict[str, Ratio]]) -> tuple[dict[str, list[Ratio]], list[str]]:
    """Measure all cases once, and again those that are slower; return the runs per case, and the slower cases.

    Args:
        measure: returns old time / new time of the named cases; of all, if there are no names.
    """
    runs = {name: [ratio] for name, ratio in measure([]).items()}
    doubtful = [name for name, ratios in runs.items() if is_slower(ratios)]
    if doubtful:
        again = measure(doubtful)
        for name in doubtful:
            runs[name].append(again[name])
    return runs, [name for name in doubtful if is_slower(runs[name])]


def run_benchmark(old: Path, new: Path, instruction_set: str, names: list[str], *, cpu_time: bool) -> dict[str, Ratio]:
    """Return old time / new time per quick case, or of the named ones.

    Args:
        old: a build of libmultihead_native.so.
        new: another one, with the same fields of a call.
        instruction_set: the set that both use.
        names: cases; without any, all quick ones.
        cpu_time: whether the CPU time of one thread is measured.
    """
    only = [word for name in names for word in ("--only", name)]
    timer = ["--cpu-time"] if cpu_time else []
    arguments = [str(old), str(new), "--set", instruction_set, "--quick", "--json", *only, *timer]
    found = subprocess.run([str(benchmark()), *arguments], stdout=subprocess.PIPE, text=True, check=False)
    if found.returncode:
        raise click.ClickException(f"csrc/bench failed on {instruction_set} with exit code {found.returncode}.")
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    return {row["name"]: Ratio(row["median"], row["low"], row["high"], row["pairs"]) for row in rows}


@cache
def benchmark() -> Path:
    """Build csrc/bench of this checkout, and return its path."""
    return _built(ROOT, BUILDS / "bench", "bench", ())


def build(reference: str, sets: Iterable[str]) -> Path:
    """Build the library of a commit with some instruction sets; the same sources are compiled once.

    Args:
        reference: a commit, or the path of a library that was built before.
        sets: the instruction sets that are needed.
    """
    if reference.endswith(".so"):
        return Path(reference).resolve()
    trees = [_git("rev-parse", "--verify", "--quiet", f"{reference}:{path}") for path in SOURCES]
    if not all(trees):
        raise click.UsageError(f"git knows no commit {reference!r} with {' and '.join(SOURCES)}.")
    folder = BUILDS / "-".join(tree[:12] for tree in trees)
    if not (folder / "CMakeLists.txt").exists():
        with tarfile.open(fileobj=BytesIO(_output(["git", "archive", reference, *SOURCES]))) as archive:
            archive.extractall(folder, filter="data")
    return _built(folder, folder / "build", "multihead_native", sets)


def before() -> str:
    """Return the commit to compare with: HEAD if the sources differ from it, else the one before their last change."""
    if _git("status", "--porcelain", "--", *SOURCES):
        return "HEAD"
    return f"{_git('log', '-1', '--format=%H', '--', *SOURCES)}~1"


def _built(source: Path, folder: Path, target: str, sets: Iterable[str]) -> Path:
    """Compile a target with the named instruction sets, and those that every build has."""
    needed = set(sets)
    options = [f"-DCMAKE_MAKE_PROGRAM={_tool('ninja')}", "-DMULTIHEAD_SETS=all"]
    for each in library.instruction_sets():
        variable = f"MULTIHEAD_COMPILES_{each.name}"
        # -U: CMake asks the compiler about the set again, in a folder that was configured without it.
        options.append(f"-U{variable}" if each.name in needed else f"-D{variable}=0")
    click.echo(f"building {target} in {folder.relative_to(ROOT)}", err=True)
    _output([_tool("cmake"), "-G", "Ninja", "-S", str(source), "-B", str(folder), *options])
    _output([_tool("cmake"), "--build", str(folder), "--target", target])
    return folder / (library.LIBRARY_NAME if target == "multihead_native" else target)


def _tool(name: str) -> str:
    """Return the path of a program, which may be installed in this environment."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise click.ClickException(f"{name} is missing. Install it: pip install {name}.")
    return found


def _output(command: list[str]) -> bytes:
    """Run a command in the root of this checkout, and return the bytes that it prints."""
    found = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    if found.returncode:
        message = (found.stderr or found.stdout).decode(errors="replace").strip()
        raise click.ClickException(f"{' '.join(command[:3])} ... failed:\n{message}")
    return found.stdout


def _git(*arguments: str) -> str:
    """Return what a git command prints, or "" if it fails."""
    found = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""
