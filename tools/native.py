"""Require the native library where there is a C++ compiler, and keep wide instructions inside their own files.

An inline function that two files share is compiled in both, and the linker keeps one of the two: if that one was
compiled for AVX-512, the plain form would run it on a CPU that has none. So no file of an instruction set may define
a symbol that the linker could merge.

    python -m tools.native
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from multihead.kernels.native import library

ROOT = Path(__file__).resolve().parent.parent
# Each environment but .venv builds in a folder of its name; see the Makefile.
_OWN = ROOT / "build" / Path(sys.prefix).name
BUILD = _OWN if _OWN.exists() else ROOT / "build" / "editable"
OBJECTS = BUILD / "CMakeFiles" / "multihead_native.dir" / "csrc"

SEE = f"See what the compiler says: .venv/bin/cmake --build {BUILD.relative_to(ROOT)}."

# What nm calls a symbol that the linker may merge with another file's: weak ones, unique ones, and common ones.
_MERGED = frozenset("WwVvuC")


def main() -> int:
    """Say what is built, or one sentence a complaint; return 1 if there is any, 0 if not."""
    compiler = found_compiler()
    absent = library.absence()
    complaints = [] if compiler is None else complaints_of(compiler, absent, OBJECTS)
    for complaint in complaints:
        print(complaint)
    if complaints:
        return 1
    if absent is not None:
        print(f"native kernel: no C++ compiler here, so it is left out ({absent}).")
    else:
        print(f"native kernel: {', '.join(each.name for each in library.instruction_sets() if each.compiled)}.")
    return 0


def found_compiler() -> str | None:
    """The C++ compiler that a build would take, or None."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), None)


def complaints_of(compiler: str, absent: str | None, objects: Path) -> list[str]:
    """What is wrong with the native library on a machine that has a compiler, one sentence each."""
    if absent is not None:
        return [f"There is a C++ compiler, {compiler}, and no native kernel: {absent}. {SEE}"]
    compiled = [each.name for each in library.instruction_sets() if each.compiled]
    complaints = []
    for name in compiled:
        path = objects / f"{name}.cpp.o"
        if not path.is_file():
            complaints.append(f"{path} is missing, so its symbols cannot be read. {SEE}")
        else:
            complaints += [
                f"csrc/{name}.cpp defines {symbol}, which the linker may take for another file. "
                "Put it into an anonymous namespace, and use no inline function of the C++ library."
                for symbol in merged_symbols(path)
            ]
    return complaints


def merged_symbols(path: Path) -> list[str]:
    """The symbols an object file defines that the linker may merge with those of another."""
    lines = subprocess.run(
        ["nm", "--demangle", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    found = [line.split(maxsplit=2) for line in lines]
    return [name for _, kind, name in found if kind in _MERGED]


if __name__ == "__main__":
    sys.exit(main())
