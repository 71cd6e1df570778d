"""The chapters of the walk cover every tensor once, in the order it is computed."""

from __future__ import annotations

from multihead.lab.chapters import CHAPTERS
from multihead.lab.walk import walk


def test_a_walk_has_every_tensor_that_the_chapters_tell_of_in_their_order() -> None:
    shown = [step for chapter in CHAPTERS for step in chapter.steps]
    assert len(shown) == len(set(shown))
    assert [step.name for step in walk().steps if step.name in shown] == shown


def test_the_split_is_told_before_the_attention() -> None:
    parts = [chapter.part for chapter in CHAPTERS]
    assert parts == sorted(parts, key=("split", "attention").index)
