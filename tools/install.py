"""Run `pip install` on this checkout, and print what it compiles, and about how long that takes.

    python -m tools.install --editable ".[hf,view]"

All arguments are those of pip. It uses only the standard library, because it runs in an empty environment.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

# Seconds that the compiler needs per file, with GCC 12 on a server's core; other files take about two seconds each.
SECONDS = {
    "scalar": 15,
    "avx2": 15,
    "avx512": 25,
    "avx512_vnni": 25,
    "avx512_bf16": 25,
    "amx": 25,
    "emulated": 30,
    "emulated_amx": 30,
}
SHOWN = 60  # last lines of a failed run


def main(arguments: Sequence[str]) -> int:
    """Run pip, and return its exit status; print its last lines if it fails."""
    command = [sys.executable, "-m", "pip", "install", "--verbose", *arguments]
    last: deque[str] = deque(maxlen=SHOWN)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        for line in pip.stdout or ():
            last.append(line)
            if configured := re.search(r"Build files have been written to: (.+)", line):
                for sentence in announcements(files_to_compile(Path(configured[1].strip()))):
                    print(sentence, flush=True)
    if pip.returncode:
        print(*last, sep="", end="")
    return pip.returncode


def files_to_compile(build: Path) -> list[str]:
    """Return the names of the source files that ninja would compile in a configured folder, without their suffix."""
    ninja = Path(sys.executable).with_name("ninja")
    planned = subprocess.run([ninja, "-C", build, "-n"], capture_output=True, text=True, check=False).stdout
    return re.findall(r"Building CXX object \S+/(\w+)\.cpp\.o", planned)


def announcements(names: Sequence[str]) -> list[str]:
    """Return one sentence per instruction set that is to be compiled.

    >>> announcements(["dispatch", "avx2"])
    ['  compiling the kernel for avx2: about 15 s']
    """
    return [f"  compiling the kernel for {name}: about {SECONDS[name]} s" for name in names if name in SECONDS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
