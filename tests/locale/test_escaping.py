"""What acts on a terminal is shown as its escape, and all other text stays as it is."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from multihead.locale.escaping import escape_controls


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mb", "a\\x1b[31mb"),
        ("\x9b2J\x07", "\\x9b2J\\x07"),
        ("two\nlines\tand\rmore", "two\\nlines\\tand\\rmore"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\u200e\u200f\u061c\u200b\ufeff", "\\u200e\\u200f\\u061c\\u200b\\ufeff"),
        ("\ud800", "\\ud800"),
        ("注意力 é مرحبا 👩\u200d💻 می\u200cخواهم", "注意力 é مرحبا 👩\u200d💻 می\u200cخواهم"),
    ],
)
def test_what_acts_is_escaped_and_the_rest_is_kept(text: str, shown: str) -> None:
    assert escape_controls(text) == shown


def test_no_control_character_and_no_override_of_direction_is_left() -> None:
    acting = {"Cc", "Cs", "Zl", "Zp"}
    turning = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    for place in range(sys.maxunicode + 1):
        sign = chr(place)
        if unicodedata.category(sign) in acting or unicodedata.bidirectional(sign) in turning:
            assert escape_controls(sign).isascii(), hex(place)
            assert escape_controls(sign).isprintable(), hex(place)
