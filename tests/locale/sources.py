"""Read the literals of the sources that may name a text: plain keys, and patterns of keys that are put together."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"
ANY = "[^.]+"  # what a variable part of a key may be: one level of it

TEMPLATE = "viewer/static/shared/page.html"
# Section of the texts -> the files that use it.
USERS = {
    "common": ("**/*.py", "**/*.js"),
    "page": ("viewer/*.py", "viewer/static/**/*.js", "viewer/static/**/*.html"),
    "report": ("viewer/report.py",),
    "viewer": (
        "viewer/*.py",
        "viewer/static/[stv]*/*.js",
        "viewer/static/[tv]*/*.html",
    ),
    "widget": ("viewer/widget/*.py",),
    "findings": ("record/analysis/highlights.py",),
    "look": ("cli/look*.py", "cli/progress.py", "viewer/looking.py"),
    "progress": ("cli/progress.py",),
    "view": ("cli/view.py", "cli/serving.py"),
    "compare": ("cli/compare.py", "record/analysis/changes.py"),
    "ablate": ("cli/ablate.py", "cli/interventions.py"),
    "importance": (
        "interventions/importance.py",
        "interventions/patch.py",
        "interventions/together.py",
        "cli/importance.py",
        "record/head_numbers.py",
        "viewer/importance.py",
    ),
    "try": ("viewer/trial.py", "viewer/static/try/*.js", "viewer/static/try/*.html"),
    "census": ("cli/census.py",),
    "census page": (
        "viewer/census_page.py",
        "viewer/page.py",
        "viewer/static/census/*.js",
        "viewer/static/[cs]*/*.html",
    ),
    "series": (
        "observation/time_series.py",
        "viewer/series_page.py",
        "viewer/page.py",
        "viewer/static/series/*.js",
        "viewer/static/series/*.html",
        TEMPLATE,
    ),
    "lab": ("multihead_lab/**/*.py", "multihead_lab/static/*.js", "multihead_lab/static/*.html", TEMPLATE),
    "walk": ("multihead_lab/commands/walk.py", "multihead_lab/walk.py", "multihead_lab/text.py"),
}

_JS_STRING = re.compile(r"'((?:[^'\\\n]|\\.)*)'( \+)?")
_JS_TEMPLATE = re.compile(r"`([^`]*)`")
_HTML_KEY = re.compile(r'words\["([^"]+)"\]')


def files(globs: Iterable[str]) -> list[Path]:
    """List the files that match one of some patterns, in the library or from the name of the lab on; texts left out."""
    found = {path for glob in globs for path in _root(glob).glob(glob)}
    return sorted(path for path in found if path.parent.name != "locale")


def _root(glob: str) -> Path:
    return SOURCE if glob.startswith(("multihead_lab/", "**")) else SOURCE / "multihead"


@cache
def keys_in(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Return the literals of a file, and regular expressions for those with variable parts."""
    text = path.read_text("utf-8")
    if path.suffix == ".html":
        return frozenset(_HTML_KEY.findall(text)), frozenset()
    if path.suffix == ".js":
        plain = {found[1] for found in _JS_STRING.finditer(text)}
        patterns = {re.escape(found[1]) + ANY for found in _JS_STRING.finditer(text) if found[2]}
        for found in _JS_TEMPLATE.finditer(text):
            patterns.add(ANY.join(map(re.escape, re.split(r"\$\{[^}]*\}", found[1]))).replace(ANY, ".*"))
        return frozenset(plain), frozenset(each for each in patterns if re.search("[a-z0-9]", each))
    plain, patterns = set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            plain.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            patterns.add("".join(_part(each) for each in node.values))
    return frozenset(plain), frozenset(each for each in patterns if re.search("[a-z0-9]", each))


def _part(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return re.escape(str(node.value))
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp):
        ends = (node.value.body, node.value.orelse)
        if all(isinstance(each, ast.Constant) for each in ends):
            return f"({'|'.join(_part(each) for each in ends)})"
    return ANY


def is_used(section: str, key: str) -> bool:
    """Whether a file names a text of a section, with or without the name of the section."""
    names = (key, f"{section}.{key}")
    plain, patterns = _keys_of_users(section)
    return any(name in plain or patterns.fullmatch(name) is not None for name in names)


@cache
def _keys_of_users(section: str) -> tuple[frozenset[str], re.Pattern[str]]:
    """Return the literals of all files that use a section, and one regular expression for their patterns."""
    general = {f"{section}\\.{ANY}"}  # a function that adds the section names no text
    plain, patterns = set[str](), set[str]()
    for path in files(USERS[section]):
        literals, of_file = keys_in(path)
        plain |= literals
        patterns |= of_file - general
    return frozenset(plain), re.compile("|".join(f"(?:{pattern})" for pattern in sorted(patterns)) or "(?!)")
