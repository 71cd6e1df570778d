"""The page of public names is that of the package."""

from __future__ import annotations

import re

from tools import api


def test_the_page_of_public_names_is_up_to_date_and_every_name_has_a_sentence() -> None:
    page = api.page()
    assert api.PAGE.read_text(encoding="utf-8") == page, "Run python -m tools.api."
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) > 60
    assert [name for name, text in rows if len(text) < 15 or not text.endswith(".")] == []
