"""Count lines of code by package: without docstrings, comments, blank lines and imports.

    python -m tools.code_lines            the package as it is
    python -m tools.code_lines v0.1.0     a commit next to it

A statement counts the lines that it takes, so joining lines would change the number, and moving code would not.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "src/"
LIBRARY = "multihead"
_BETWEEN = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    r"""Return how many lines of a file hold code.

    >>> code_lines('import os\n\ndef f(x):  # a comment\n    "A docstring."\n\n    return (x +\n        1)\n')
    3
    """
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BETWEEN:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_text(node):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _is_text(node: ast.AST) -> TypeGuard[ast.Expr]:
    """Whether a node is a string on its own: a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def by_package(sources: Mapping[str, str]) -> Counter[str]:
    """Return the lines of code of each entry of the library, and of each package beside it, from path -> source."""
    counts: Counter[str] = Counter()
    for path, source in sources.items():
        package, _, rest = path.partition("/")
        counts[rest.partition("/")[0] if package == LIBRARY else package] += code_lines(source)
    return counts


def sources_here() -> dict[str, str]:
    """Return path in `src` -> source, of this checkout."""
    folder = ROOT / FOLDER
    return {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.py"))}


def sources_of(commit: str) -> dict[str, str]:
    """Return path in `src` -> source, of a commit."""
    found = {}
    for path in _git("ls-tree", "-r", "--name-only", commit, FOLDER).splitlines():
        if path.endswith(".py"):
            found[path.removeprefix(FOLDER)] = _git("show", f"{commit}:{path}")
    return found


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main(commits: list[str]) -> None:
    """Print a table with one row per entry of the library and per package beside it."""
    columns = {each: by_package(sources_of(each)) for each in commits} | {"now": by_package(sources_here())}
    table = Table("package", *columns, box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for entry in sorted(set().union(*columns.values())):
        table.add_row(entry, *(f"{counts[entry]:,}" if counts[entry] else "" for counts in columns.values()))
    table.add_row("all", *(f"{counts.total():,}" for counts in columns.values()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
