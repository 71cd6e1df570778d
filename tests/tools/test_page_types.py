"""The types that the scripts of the pages are checked with are those of what Python sends, and of the templates."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

import pytest

from tools.page_types import FILE, _interface, _typescript, declarations, elements_by_id


def test_the_file_is_what_python_sends() -> None:
    assert FILE.read_text("utf-8") == declarations()


class Sent(TypedDict):
    """An answer."""

    side: Literal["A", "B"]
    numbers: list[float | None]
    pairs: Sequence[tuple[str, int]]
    names: tuple[str, ...]
    more: NotRequired[Mapping[str, Any] | None]


def test_a_typed_dictionary_becomes_an_interface() -> None:
    assert _interface(Sent) == (
        "/** An answer. */\ninterface Sent {\n  side: 'A' | 'B';\n  numbers: (number | null)[];\n"
        "  pairs: [string, number][];\n  names: string[];\n  more?: Record<string, any> | null;\n}"
    )


def test_a_type_that_json_does_not_have_is_rejected() -> None:
    sentence = "<class 'complex'> is no type of a value that is sent as JSON."
    with pytest.raises(TypeError, match=f"^{re.escape(sentence)}$"):
        _typescript(complex)


def test_an_id_has_the_type_of_its_element_in_the_templates() -> None:
    assert "  filter: HTMLElementTagNameMap['input'];\n" in elements_by_id()
