"""Write docs/api.md: every public name with the first sentence of its docstring.

python -m tools.api
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
MODULES = (
    "multihead",
    "multihead.masks",
    "multihead.scores",
    "multihead.rotary",
    "multihead.probes",
    "multihead.kernels",
    "multihead.kinds",
    "multihead.observation.textbook",
    "multihead.record.memory_use",
    "multihead.record.texts",
    "multihead.models",
    "multihead.interventions.predictions",
    "multihead.parallel",
    "multihead.errors",
    "multihead.viewer",
    "multihead.export.onnx",
    "multihead.compat.torch_nn",
    "multihead.compat.d2l",
    "multihead.compat.annotated",
    "multihead.compat.per_head",
    "multihead.compat.huggingface",
    "multihead.compat.keras",
)
INTRODUCTION = """# Public names

Every public name with the first sentence of its docstring. `help(name)` shows all of it: shapes, \
units, errors and an example. Other modules may change without notice. `python -m tools.api` writes this page.
"""


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    print(f"Wrote {PAGE.relative_to(PAGE.parent.parent)}.")
    return 0


def page() -> str:
    """Return the page as Markdown: one table per module."""
    parts = [INTRODUCTION]
    for name in MODULES:
        module = importlib.import_module(name)
        rows = [f"| `{each}` | {_escaped(sentence(module, each))} |" for each in module.__all__]
        parts.append("\n".join([f"## {name}", "", "| name | description |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def sentence(module: ModuleType, name: str) -> str:
    """Return the first sentence of the docstring of a public name, on one line."""
    value = getattr(module, name)
    text = inspect.getdoc(value) if callable(value) or inspect.ismodule(value) else _comment_of_constant(name)
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    found = re.match(r".+?[^\s.]\.(?=\s+[A-Z`]|$)", paragraph)  # "q . k" does not end a sentence
    return found[0] if found else paragraph


def _comment_of_constant(name: str) -> str:
    """Return the string after the assignment of a constant in the package."""
    for path in sorted((PAGE.parent.parent / "src" / "multihead").rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in pairwise(body):
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                match after:
                    case ast.Expr(ast.Constant(str(text))):
                        return text
    return ""


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
