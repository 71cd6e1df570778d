"""The style sheets have no rule without an element, and their colours are variables, which both themes have."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
STYLES = sorted(SOURCE.rglob("*.css"))
PAGES = [
    *SOURCE.rglob("*.js"),
    *SOURCE.rglob("*.html"),
    *(SOURCE / "multihead" / "viewer").rglob("*.py"),
    *(SOURCE / "multihead_lab").rglob("*.py"),
]
COMPUTED = {"c2": "a colour of the lab's charts: c0 to c3"}
COLOUR = re.compile(r"#[0-9a-fA-F]{3,8}\b|\b(?:rgba?|hsla?|oklch|lab)\(|\b(?:black|white|gray|grey|red|green|blue)\b")


def rules(path: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", path.read_text("utf-8"), flags=re.DOTALL)


@cache
def named() -> frozenset[str]:
    """The words of all strings, attributes and ids of the pages."""
    sources = "\n".join(path.read_text("utf-8") for path in PAGES)
    strings = re.findall(r"'[^'\n]*'|\"[^\"\n]*\"|`[^`]*`", sources)
    return frozenset(word for each in strings for word in re.findall(r"[A-Za-z][\w-]*", each))


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_every_class_and_id_of_a_rule_is_named_by_a_page(path: Path) -> None:
    selectors = (each for each in re.findall(r"([^{}]+)\{", rules(path)) if not each.strip().startswith("@"))
    used = {
        name
        for selector in selectors
        for name in re.findall(r"[.#]([A-Za-z][\w-]*)", re.sub(r"\[[^\]]*\]", "", selector))
    }
    assert used - named() - COMPUTED.keys() == set()


@pytest.mark.parametrize("path", STYLES, ids=lambda path: path.name)
def test_a_colour_is_a_variable(path: Path) -> None:
    values = re.findall(r"^\s*([\w-]+):\s*([^;{}]*);", rules(path), re.MULTILINE)
    assert [f"{name}: {value}" for name, value in values if not name.startswith("--") and COLOUR.search(value)] == []


def test_every_variable_is_declared_and_used() -> None:
    styles = "\n".join(map(rules, STYLES))
    pages = "\n".join(path.read_text("utf-8") for path in PAGES if path.suffix != ".py")
    declared = {*re.findall(r"(--[\w-]+)\s*:", styles), *re.findall(r"['\"](--[\w-]+)['\"]", pages)}
    of_script = re.findall(r"cssVariable\('([\w-]+)'\)", pages)
    used = {*re.findall(r"var\((--[\w-]+)", styles + pages), *(f"--{each}" for each in of_script)}
    assert used - declared == set()
    assert declared - used == set()


@pytest.mark.parametrize(
    "path", [path for path in STYLES if path.name in ("base.css", "lab.css")], ids=lambda p: p.name
)
def test_both_themes_have_the_same_colours(path: Path) -> None:
    light, dark = re.search(
        r":root[^{]*\{(.*?)\n\}\n@media screen and \(prefers-color-scheme: dark\) \{(.*?)\n\}", rules(path), re.DOTALL
    ).groups()  # type: ignore[union-attr]
    colours = [set(re.findall(r"(--[\w-]+): #", each)) for each in (light, dark)]
    assert colours[0] == colours[1]
