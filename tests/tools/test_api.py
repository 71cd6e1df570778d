"""The page of public names is that of the package."""

from __future__ import annotations

import re

from tools import api


def test_the_page_of_public_names_is_up_to_date() -> None:
    assert api.PAGE.read_text(encoding="utf-8") == api.page(), "Run python -m tools.api."


def test_every_public_name_has_a_sentence() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", api.page(), re.MULTILINE)
    assert len(rows) > 60
    assert [name for name, text in rows if len(text) < 15 or not text.endswith(".")] == []
