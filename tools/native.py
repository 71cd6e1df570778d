"""Check that the native library is built if there is a C++ compiler, and that its files share no merged symbols.

An inline function that two files share is compiled in both, and the linker keeps one copy. If that copy was compiled
for AVX-512, the scalar form would execute it on a CPU without AVX-512. So no file of an instruction set may define a
symbol that the linker could merge.

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
# Each environment except .venv builds in a folder with its name; see the Makefile.
_OWN = ROOT / "build" / Path(sys.prefix).name
BUILD = _OWN if _OWN.exists() else ROOT / "build" / "editable"
OBJECTS = BUILD / "CMakeFiles" / "multihead_native.dir" / "csrc"

SEE = f"Read the messages of the compiler: .venv/bin/cmake --build {BUILD.relative_to(ROOT)}."

# The letters of nm for symbols that the linker may merge: weak, unique and common ones.
_MERGED = frozenset("WwVvuC")


def main() -> int:
    """Print the instruction sets that are built, or the errors, one per line; return 1 if there are errors."""
    compiler = found_compiler()
    absent = library.reason_of_absence()
    errors = [] if compiler is None else errors_of(compiler, absent, OBJECTS)
    for error in errors:
        print(error)
    if errors:
        return 1
    if absent is not None:
        print(f"native kernel: no C++ compiler here, so it was not built ({absent}).")
    else:
        print(f"native kernel: {', '.join(each.name for each in library.instruction_sets() if each.compiled)}.")
    return 0


def found_compiler() -> str | None:
    """Return the path of the C++ compiler that a build would use, or None."""
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), None)


def errors_of(compiler: str, absent: str | None, objects: Path) -> list[str]:
    """Return one sentence per error of the native library, on a machine with a compiler."""
    if absent is not None:
        return [f"There is a C++ compiler, {compiler}, and no native kernel: {absent}. {SEE}"]
    compiled = [each.name for each in library.instruction_sets() if each.compiled]
    errors = []
    for name in compiled:
        path = objects / f"{name}.cpp.o"
        if not path.is_file():
            errors.append(f"{path} is missing, so its symbols cannot be read. {SEE}")
        else:
            errors += [
                f"csrc/{name}.cpp defines {symbol}, which the linker may use for another file. "
                "Move it into an anonymous namespace, and use no inline function of the C++ library."
                for symbol in merged_symbols(path)
            ]
    return errors


def merged_symbols(path: Path) -> list[str]:
    """Return the symbols of an object file that the linker may merge with those of another."""
    lines = subprocess.run(
        ["nm", "--demangle", "--defined-only", str(path)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    symbols = [line.split(maxsplit=2) for line in lines]
    return [name for _, kind, name in symbols if kind in _MERGED]


if __name__ == "__main__":
    sys.exit(main())
