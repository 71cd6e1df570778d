"""What a wheel may contain, need and be called, and that this build of the library would fit into one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from multihead.kernels.native import library
from tools import wheel
from tools.wheel import LIBRARY, Symbol

NAME = "multihead-0.1.0-py3-none-manylinux_2_27_x86_64.whl"
LICENSE = "multihead-0.1.0.dist-info/licenses/LICENSE"
PACKAGE = {"multihead/__init__.py", "multihead/py.typed"}

needs_nm = pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="nm lists ELF symbols here")


def test_a_wheel_for_every_python_and_a_glibc_of_torch_has_a_valid_name() -> None:
    assert wheel.errors_of_tag(NAME) == []
    assert wheel.errors_of_tag(NAME.replace("x86_64", "aarch64").replace("2_27", "2_28")) == []


@pytest.mark.parametrize("tag", ["py3-none-linux_x86_64", "py3-none-any", "cp311-cp311-manylinux_2_27_x86_64"])
def test_another_tag_is_an_error(tag: str) -> None:
    assert wheel.errors_of_tag(f"multihead-0.1.0-{tag}.whl") == [
        f"The wheel is multihead-0.1.0-{tag}.whl, and its name should end in py3-none-manylinux_X_Y_MACHINE.whl."
    ]


def test_a_glibc_newer_than_that_of_torch_is_an_error() -> None:
    newer = NAME.replace("2_27", "2_34")
    assert wheel.errors_of_tag(newer) == [f"The wheel is {newer}, and torch's wheels need only glibc 2.28."]
    sentence = (
        "The library needs dlsym of glibc 2.34, and torch's wheels need only glibc 2.28. "
        "Use another function, or an older version of it."
    )
    assert wheel.errors_of_symbols([Symbol("memcpy", (2, 14)), Symbol("dlsym", (2, 34))]) == [sentence]


def test_a_function_of_python_is_an_error() -> None:
    assert wheel.errors_of_symbols([Symbol("PyTuple_New", None), Symbol("_Py_Dealloc", None)]) == [
        "The library needs PyTuple_New of Python, so py3-none would be wrong.",
        "The library needs _Py_Dealloc of Python, so py3-none would be wrong.",
    ]


def test_a_wheel_has_the_files_of_the_package_the_library_and_the_license() -> None:
    assert wheel.errors_of_files([*PACKAGE, LIBRARY, LICENSE, "multihead/masks/"], PACKAGE) == []
    assert wheel.errors_of_files(["multihead/__init__.py", "csrc/call.h", "tests/oracle.py"], PACKAGE) == [
        f"The wheel lacks {LIBRARY}.",
        "The wheel lacks multihead/py.typed.",
        "The wheel should not have csrc/call.h.",
        "The wheel should not have tests/oracle.py.",
        "The wheel lacks the license in its metadata.",
    ]


def test_the_files_of_the_package_are_its_modules_texts_and_pages() -> None:
    files = wheel.package_files()
    assert {
        "multihead/py.typed",
        "multihead/__init__.pyi",
        "multihead/kernels/measured.json",
        "multihead/kernels/proven.json",
        "multihead/locale/zh.json",
        "multihead/viewer/static/view/index.html",
        "multihead_lab/static/lab.js",
    } <= files
    assert LIBRARY not in files
    assert not any("__pycache__" in name for name in files)


@needs_nm
@pytest.mark.skipif(library.reason_of_absence() is not None, reason="there is no native library here")
def test_this_library_needs_neither_python_nor_a_newer_glibc_than_torch() -> None:
    symbols = wheel.symbols_of(Path(str(library.path_of_library())))
    assert any(name == "posix_memalign" and glibc is not None for name, glibc in symbols)
    assert wheel.errors_of_symbols(symbols) == []


def test_a_failed_command_ends_with_its_output(tmp_path: Path) -> None:
    code = "import sys; print('no such thing'); sys.exit(3)"
    with pytest.raises(SystemExit, match=r"^no such thing\n\n\[.*\] exited with 3, not 0\.$"):
        wheel._run([sys.executable, "-c", code], folder=tmp_path)
    assert wheel._run([sys.executable, "-c", code], folder=tmp_path, status=3) == "no such thing\n"
