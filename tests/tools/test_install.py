"""The installation prints which instruction sets it compiles, before it compiles them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from multihead.kernels.native import library
from tools import install

PIP = """
import sys
print("-- Build files have been written to: /build")
print("an error")
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def _pip_that_configures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace pip by a program that prints what CMake prints, and exits with its last argument."""
    (tmp_path / "pip.py").write_text(PIP, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(install, "files_to_compile", lambda _build: ["dispatch", "scalar", "avx2"])


@pytest.mark.usefixtures("_pip_that_configures")
def test_sets_are_named_and_the_output_of_pip_is_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["0"]) == 0
    assert capsys.readouterr().out.splitlines() == install.announcements(["scalar", "avx2"])


@pytest.mark.usefixtures("_pip_that_configures")
def test_the_last_lines_of_a_failed_run_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.main(["3"]) == 3
    assert capsys.readouterr().out.endswith("an error\n")


def test_only_files_that_ninja_would_compile_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = "[1/2] Building CXX object CMakeFiles/multihead_native.dir/csrc/avx2.cpp.o\n[2/2] Linking ..."
    ninja = tmp_path / "ninja"
    ninja.write_text(f"#!/bin/sh\nprintf '%s' '{planned}'\n", encoding="utf-8")
    ninja.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert install.files_to_compile(tmp_path) == ["avx2"]


def test_every_instruction_set_of_x86_has_its_seconds() -> None:
    sets = {each.name for each in library.instruction_sets()}
    assert set(install.SECONDS) == {name for name in sets if not name.startswith("neon")}
