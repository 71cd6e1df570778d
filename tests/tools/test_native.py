"""The native library is built where it can be, and no file of an instruction set leaks its instructions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from multihead.kernels.native import library
from tools import native

COMPILER = native.found_compiler()
TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler here")


@needs_compiler
def test_where_there_is_a_compiler_the_library_is_built_and_leaks_nothing() -> None:
    assert native.errors_of(str(COMPILER), library.reason_of_absence(), native.OBJECTS) == []


def test_a_missing_library_is_an_error_where_there_is_a_compiler(tmp_path: Path) -> None:
    assert native.errors_of("/usr/bin/c++", "its library was not built", tmp_path) == [
        f"There is a C++ compiler, /usr/bin/c++, and no native kernel: its library was not built. {native.SEE}"
    ]


@pytest.mark.skipif(library.reason_of_absence() is not None, reason="there is no native library here")
def test_a_missing_object_file_is_an_error(tmp_path: Path) -> None:
    assert native.errors_of("/usr/bin/c++", None, tmp_path)[0] == (
        f"{tmp_path}/scalar.cpp.o is missing, so its symbols cannot be read. {native.SEE}"
    )


@needs_compiler
def test_a_shared_inline_function_is_found_and_one_of_its_own_file_is_not(tmp_path: Path) -> None:
    source, compiled = tmp_path / "leak.cpp", tmp_path / "leak.o"
    source.write_text(
        "inline int shared(int x) { return x + 1; }\n"
        "namespace { int own(int x) { return x + 2; } }\n"
        "int (*const kept[])(int) = {shared, own};\n"
        "auto use = kept;\n"
    )
    subprocess.run([str(COMPILER), "-c", str(source), "-o", str(compiled)], check=True, timeout=60)
    assert native.merged_symbols(compiled) == ["shared(int)"]


@needs_compiler
@pytest.mark.skipif(shutil.which("cmake", path=TOOLS) is None, reason="there is no cmake here")
def test_a_build_has_all_sets_the_named_ones_or_those_that_this_cpu_needs(tmp_path: Path) -> None:
    sets = [each for each in library.instruction_sets() if not each.for_tests]
    fastest = library._library().fastest_set.name
    command = ["cmake", "-S", str(native.ROOT), "-B", str(tmp_path)]
    built: dict[str, list[str]] = {}
    for wanted in ("all", "scalar", ""):  # in one folder, where cmake examines the compiler once
        environment = {**os.environ, "PATH": TOOLS, "MULTIHEAD_SETS": wanted}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        (line,) = (line for line in done.stdout.splitlines() if line.startswith("-- Instruction sets: "))
        built[wanted] = line.removeprefix("-- Instruction sets: ").split(";")
    assert set(built["all"]) >= {each.name for each in sets if each.compiled}  # this environment may have fewer
    assert built["scalar"] == ["scalar"]
    assert built[""] == [each.name for each in sets if each.name in {"scalar", "avx2", fastest}]


def test_the_compiler_that_is_named_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own-c++"
    own.touch(mode=0o755)
    monkeypatch.setenv("CXX", f"{own} -m64")
    assert native.found_compiler() == str(own)


def test_without_a_compiler_none_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert native.found_compiler() is None
