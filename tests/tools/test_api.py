"""The page of public names is that of the package."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tools import api


def test_the_page_of_public_names_is_up_to_date_and_every_name_has_a_sentence() -> None:
    page = api.page()
    assert api.PAGE.read_text(encoding="utf-8") == page, "Run python -m tools.api."
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 60
    assert [name for name, text in rows if len(text) < 15 or not text.endswith(".")] == []


ROOT = api.PAGE.parent.parent
OTHERS = (
    "api.md",
    "architecture.md",
    "families.md",
    "families.zh.md",
)  # the inside of the package, and of transformers
PAGES = [
    page
    for page in (*sorted(ROOT.glob("README*.md")), *sorted(api.PAGE.parent.glob("*.md")))
    if page.name not in OTHERS
]
PUBLIC = {name: frozenset(importlib.import_module(name).__all__) for name in api.MODULES}
PACKAGES = {name.rsplit(".", count)[0] for name in PUBLIC for count in range(1, name.count(".") + 1)} | PUBLIC.keys()
IMPORTED = re.compile(r"from (multihead(?:\.\w+)*) import ([\w, ]+)")
DOTTED = re.compile(r"(?<![\w.\"'/-])(?:multihead|mh)((?:\.[a-zA-Z]\w*)+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_that_a_page_uses_is_public(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    used = [
        f"{module}.{name.split()[0]}"
        for module, names in IMPORTED.findall(text)
        for name in names.split(",")
        if name.strip()
    ]
    used += [f"multihead{name}" for name in DOTTED.findall(text)]
    assert [name for name in dict.fromkeys(used) if not _is_public(name)] == []


def _is_public(name: str) -> bool:
    """Whether a dotted name is a public module, or starts with one and a name that it exports."""
    if name in PACKAGES:
        return True
    module = max((each for each in PUBLIC if name.startswith(f"{each}.")), key=len)
    return name.removeprefix(f"{module}.").split(".")[0] in PUBLIC[module]
