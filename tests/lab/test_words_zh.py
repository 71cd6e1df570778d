"""Chinese says all that English says, with the same numbers in it."""

from __future__ import annotations

import string

import pytest

from multihead.lab.words_en import ENGLISH
from multihead.lab.words_zh import CHINESE


def fields(sentence: str) -> set[str]:
    """Name the fields that a sentence has filled in."""
    return {field for _, field, _, _ in string.Formatter().parse(sentence) if field}


def chinese(sentence: str) -> bool:
    return any("\u4e00" <= letter <= "\u9fff" for letter in sentence)


@pytest.mark.parametrize("name", ENGLISH.passages)
def test_a_passage_names_the_same_numbers_in_chinese(name: str) -> None:
    english, translated = ENGLISH.passages[name], CHINESE.passages[name]
    assert fields(translated.text) <= fields(english.text) | fields(english.title) | {"heads_of"}
    assert chinese(translated.text)


@pytest.mark.parametrize("mapping", ["parts", "passages", "axes", "entries"])
def test_nothing_is_left_untold_in_chinese(mapping: str) -> None:
    assert getattr(CHINESE, mapping).keys() == getattr(ENGLISH, mapping).keys()
    assert len(CHINESE.commands) == len(ENGLISH.commands)
