"""Two builds of the native library are compared, and a slower, wrong or different one is reported."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner, Result

from benchmarks import in_process
from benchmarks.measure import Ratio
from benchmarks.native import __main__ as native
from benchmarks.native import two_builds
from benchmarks.native.cases import CASES
from benchmarks.native.rows import Row
from benchmarks.pages import ROOT
from multihead.kernels.native import library
from tests.kernel_names import needs_native
from tools.native import found_compiler

SLOW, NOISY, EQUAL = Ratio(0.9, 0.85, 0.96, 15), Ratio(0.9, 0.85, 0.98, 15), Ratio(1.0, 0.98, 1.02, 15)
QUICK = "full, N 128, D 64, fp32"

# A library of one function that forwards to another build, whose first number of each output it changes.
WRONG = """
#include <dlfcn.h>
#include "call.h"
template <class F> F real(F, const char *name) {
  static void *library = dlopen(REAL, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<F>(dlsym(library, name));
}
#define REAL_OF(name) real(&name, #name)
EXPORT const char *multihead_layout() { return LAYOUT; }
EXPORT const char *multihead_instruction_set(int64_t i) { return REAL_OF(multihead_instruction_set)(i); }
EXPORT int64_t multihead_compiled(int64_t i) { return REAL_OF(multihead_compiled)(i); }
EXPORT int64_t multihead_runs(int64_t i) { return REAL_OF(multihead_runs)(i); }
EXPORT int64_t multihead_fastest() { return REAL_OF(multihead_fastest)(); }
EXPORT Status multihead_run(const Call *call, Pass pass) {
  const Status status = REAL_OF(multihead_run)(call, pass);
  static_cast<float *>(call->output)[0] += 1;
  return status;
}
"""


@pytest.mark.parametrize(
    ("runs", "slower"),
    [([SLOW], True), ([NOISY], False), ([EQUAL], False), ([SLOW, SLOW], True), ([SLOW, NOISY], False)],
)
def test_a_build_is_slower_if_the_upper_quartile_of_every_run_is_below_the_limit(
    runs: list[Ratio], slower: bool
) -> None:
    assert two_builds.is_slower(runs) is slower


def test_only_cases_that_look_slower_are_measured_again() -> None:
    measured: list[list[str]] = []

    def measure(names: list[str]) -> dict[str, Ratio]:
        measured.append(names)
        return {"slow": SLOW, "slow once": EQUAL if names else SLOW, "equal": EQUAL}

    runs, slower = two_builds.compared(measure)
    assert measured == [[], ["slow", "slow once"]]
    assert runs == {"slow": [SLOW, SLOW], "slow once": [SLOW, EQUAL], "equal": [EQUAL]}
    assert slower == ["slow"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the quick form with ratios that are given instead of measured."""

    def run(ratio: Ratio, note: str = "") -> Result:
        row = Row(QUICK, "SDPA", EQUAL, note=note)
        monkeypatch.setattr(two_builds, "build", lambda _against, _sets: Path("old.so"))
        monkeypatch.setattr(two_builds, "run_benchmark", lambda *_, **__: {QUICK: ratio})
        monkeypatch.setattr(native, "in_new_process", lambda *_, **__: [row])
        return CliRunner().invoke(native.main, ["--quick", "--set", "scalar", "--against", "HEAD"])

    return run


@needs_native
def test_the_quick_form_fails_where_a_case_is_slower_or_wrong(quick: Callable[..., Result]) -> None:
    assert quick(EQUAL).exit_code == quick(NOISY).exit_code == 0
    slow, wrong = quick(SLOW), quick(EQUAL, "failed: ours differs")
    assert slow.exit_code == wrong.exit_code == 1
    assert f"Error: scalar: {QUICK} is slower than in HEAD in two runs.\n" in slow.output
    assert f"Error: scalar: {QUICK} failed: ours differs.\n" in wrong.output


def test_the_quick_form_rejects_options_of_the_whole_form() -> None:
    result = CliRunner().invoke(native.main, ["--quick", "--only", "full"])
    assert result.exit_code == 2
    assert "--quick goes with --set, --against and --cpu-time alone." in result.output


def test_an_unknown_commit_is_rejected() -> None:
    with pytest.raises(click.UsageError, match=r"^git knows no commit 'nothing' with csrc and CMakeLists\.txt\.$"):
        two_builds.build("nothing", ["scalar"])


@needs_native
def test_torch_is_limited_to_the_instructions_of_the_set() -> None:
    capability = torch.backends.cpu.get_cpu_capability
    assert in_process.in_new_process(capability, instruction_set="scalar") == "DEFAULT"


# ---------------------------------------------------------------- csrc/bench


def compiled(source: Path, target: Path, *options: str) -> Path:
    compiler = found_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    command = [compiler, "-std=c++17", "-O1", str(source), "-o", str(target), *options, "-ldl"]
    subprocess.run(command, check=True)
    return target


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run csrc/bench with arguments."""
    program = compiled(ROOT / "csrc" / "bench" / "bench.cpp", tmp_path_factory.mktemp("bench") / "bench")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)

    return run


Bench = Callable[..., subprocess.CompletedProcess[str]]


def test_the_quick_cases_of_the_benchmark_are_cases_of_the_table(bench: Bench) -> None:
    names = bench("--quick", "--list").stdout.splitlines()
    assert len(names) == 12
    assert set(names) <= {case.name for case in CASES}


@needs_native
def test_a_library_is_compared_with_itself(bench: Bench) -> None:
    cases = ("--only", "full, N 16, D 64, fp32", "--only", "one query of 4 heads", "--rounds", 3, "--seconds", 0)
    found = bench(library.path_of_library(), library.path_of_library(), "--set", "scalar", "--json", *cases)
    assert (found.returncode, found.stderr) == (0, "")
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert {row["name"] for row in rows} >= {"backward, full, N 16, D 64, fp32", "statistics, full, N 16, D 64, fp32"}
    assert all(row["pairs"] == 3 and row["low"] <= row["median"] <= row["high"] for row in rows)


@needs_native
def test_a_wrong_result_and_another_struct_are_refused(bench: Bench, tmp_path: Path) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text(WRONG, encoding="utf-8")
    options = ("-shared", "-fPIC", f"-I{ROOT / 'csrc'}", f'-DREAL="{library.path_of_library()}"')
    wrong = compiled(source, tmp_path / "wrong.so", *options, "-DLAYOUT=MULTIHEAD_LAYOUT")
    found = bench(library.path_of_library(), wrong, "--set", "scalar", "--only", "full, N 16, D 64, fp32")
    assert found.returncode == 1
    assert found.stderr.startswith("full, N 16, D 64, fp32: NEW differs from OLD: output[0, 0, 0, 0] is ")
    other = compiled(source, tmp_path / "other.so", *options, '-DLAYOUT="q k value "')
    found = bench(other, library.path_of_library(), "--set", "scalar")
    assert found.returncode == 2
    assert found.stderr == (
        f"{other} has another struct Call: value where this benchmark has v. "
        "Build both libraries and the benchmark from commits with the same fields in csrc/call.h.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Give two libraries, OLD and NEW; 0 given. `bench --help` shows examples.\n"),
        (("--rounds", "x"), "--rounds is `x`. Give a number that is at least 1.\n"),
        (("--fast",), "There is no option --fast. `bench --help` shows the options.\n"),
        (("--only", "nothing"), "No case is selected. `bench --list` prints the names.\n"),
    ],
)
def test_wrong_arguments_are_refused_with_a_sentence(bench: Bench, arguments: tuple[str, ...], message: str) -> None:
    found = bench(*arguments)
    assert (found.returncode, found.stderr) == (2, message)
