"""English has words for every chapter."""

from __future__ import annotations

from multihead.lab.words import CHAPTERS
from multihead.lab.words_en import ENGLISH


def test_english_has_a_passage_for_every_chapter_and_for_every_part() -> None:
    assert set(ENGLISH.passages) >= {chapter.name for chapter in CHAPTERS}
    assert set(ENGLISH.parts) == {chapter.part for chapter in CHAPTERS}


def test_one_head_is_no_heads() -> None:
    assert ENGLISH.heads_of(1, 6) == "1 head of 6 columns"
    assert ENGLISH.heads_of(3, 1) == "3 heads of 1 column"
