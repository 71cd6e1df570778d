"""Which kernels have passed the contract on a GPU: the rows of proven.json, which tools/cuda.py writes.

Until the code of a kernel for CUDA has passed `multihead.contract` on some card, it runs there only if it is asked for:
by `kernel=`, or by the environment variable MULTIHEAD_UNPROVEN. A row holds for one state of the code, and comments do
not count. Kernels that ran on CUDA before there were rows stay in use without one.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import tokenize
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from multihead.tensors.tracing import constant_in_graphs

UNPROVEN_VARIABLE = "MULTIHEAD_UNPROVEN"
ALL = "all"  # value of the variable that names every kernel


@dataclass(frozen=True)
class ProvenRow:
    """One state of a kernel's code that passed the contract.

    Attributes:
        path: name of the kernel.
        code: `hash_of_code` of its sources.
        card: name of the GPU.
        torch: version of torch.
        triton: version of Triton, or None.
        date: day of the run, such as "2026-11-28".
    """

    path: str
    code: str
    card: str
    torch: str
    triton: str | None
    date: str


@dataclass(frozen=True)
class GpuPath:
    """The code of a kernel that decides what runs on a GPU.

    Attributes:
        name: name of the kernel in `KERNELS`.
        sources: its files, relative to the package.
        in_use_before_rows: whether it ran on CUDA before rows were kept; then it needs none.
    """

    name: str
    sources: tuple[str, ...]
    in_use_before_rows: bool = False


def row_of(path: GpuPath) -> ProvenRow | None:
    """Return the row of the present code of a kernel, or None if this code has not passed the contract on any card."""
    code = code_of(path.sources)
    return next((row for row in rows() if (row.path, row.code) == (path.name, code)), None)


@constant_in_graphs  # files are not read in a graph
def has_run_on_hardware(path: GpuPath) -> bool:
    """Whether the present code of a kernel passed the contract on a card, or needs no row."""
    return path.in_use_before_rows or row_of(path) is not None


@constant_in_graphs
def is_asked_for(path: GpuPath) -> bool:
    """Whether the environment variable MULTIHEAD_UNPROVEN names a kernel, or all, with commas between names."""
    names = {each.strip() for each in os.environ.get(UNPROVEN_VARIABLE, "").split(",")}
    return bool(names & {path.name, ALL})


def reason_to_wait(path: GpuPath) -> str | None:
    """Return why a kernel does not run on CUDA unless it is asked for, in one sentence, or None."""
    if path.in_use_before_rows or has_run_on_hardware(path) or is_asked_for(path):
        return None
    return f"it has not yet run on hardware; {UNPROVEN_VARIABLE}={path.name} uses it, multihead doctor --gpu checks it"


@cache
def rows() -> tuple[ProvenRow, ...]:
    """Return the rows of proven.json."""
    text = files("multihead.kernels").joinpath("proven.json").read_text(encoding="utf-8")
    return tuple(ProvenRow(**row) for row in json.loads(text))


@cache
def code_of(sources: tuple[str, ...]) -> str:
    """Return the hash of files of the package, relative to it, without comments."""
    package = files("multihead")
    return hash_of_code("\n".join(package.joinpath(source).read_text(encoding="utf-8") for source in sources))


def hash_of_code(source: str) -> str:
    r"""Return a hash of Python code that does not depend on comments, docstrings and empty lines: 16 hex digits.

    >>> hash_of_code("x = 1  # a number\n") == hash_of_code("'Numbers.'\n\nx = 1\n")
    True
    >>> hash_of_code("x = 1\n") == hash_of_code("x = 2\n")
    False
    """
    # Not ast.dump or ast.unparse, whose text differs between versions of Python.
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        # Expressions that are only a string: docstrings, of attributes too.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for row in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                lines[row - 1] = ""
    kept = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(kept.encode()).hexdigest()[:16]
