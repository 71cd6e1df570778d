"""Tokens are set in the spelling of the text they came from."""

from __future__ import annotations

import re

import pytest

from multihead.errors import ShapeError
from multihead.viewer.tokens import PIECE_FLAG, SPECIAL_FLAG, UNKNOWN_FLAG, layout_of_tokens


def joined(page: dict[str, list[str]]) -> str:
    return "".join(gap + shown for gap, shown in zip(page["gaps"], page["shown"], strict=True)) + str(page["tail"])


def test_the_text_keeps_its_spelling_and_its_line_breaks() -> None:
    text = "One  Two,\nthree.\n"
    offsets = [(0, 0), (0, 3), (5, 8), (8, 9), (10, 15), (15, 16), (0, 0)]
    page = layout_of_tokens(["[CLS]", "one", "two", ",", "three", ".", "[SEP]"], text=text, offsets=offsets)
    assert joined(page) == "[CLS] One  Two,\nthree. [SEP]\n"


def test_offsets_are_counted_in_characters_not_in_utf_16() -> None:
    text = "🎉🎉 中文"
    page = layout_of_tokens(["🎉", "🎉", "中", "文"], text=text, offsets=[(0, 1), (1, 2), (3, 4), (4, 5)])
    assert page["shown"] == ["🎉", "🎉", "中", "文"]
    assert joined(page) == text


def test_tokens_that_share_a_character_show_it_once() -> None:
    page = layout_of_tokens(["�", "�", "👩"], text="👩", offsets=[(0, 1), (0, 1), (0, 1)])
    assert page["shown"] == ["👩", "", ""]
    assert page["flags"] == [0, PIECE_FLAG, PIECE_FLAG]


def test_word_pieces_without_spaces_get_one_between() -> None:
    assert joined(layout_of_tokens(["every", "head"])).strip() == "every head"


def test_tokens_with_their_own_spaces_are_joined_as_they_are() -> None:
    assert joined(layout_of_tokens(["Every", " head", "!"])) == "Every head!"


def test_the_space_before_a_word_is_no_part_of_what_is_painted() -> None:
    page = layout_of_tokens([" head", "  ", "s"])
    assert (page["gaps"], page["shown"]) == ([" ", "", ""], ["head", "  ", "s"])


def test_a_token_cannot_turn_the_direction_of_the_page() -> None:
    page = layout_of_tokens(["\u202eabc", "\u2066"])
    assert page["shown"] == ["U+202Eabc", "U+2066"]
    assert page["labels"] == ["U+202Eabc", "U+2066"]


def test_marks_and_unknown_tokens_are_flagged() -> None:
    page = layout_of_tokens(["<s>", "x"], special=[True, False], unknown=[False, True])
    assert page["flags"] == [SPECIAL_FLAG, UNKNOWN_FLAG]


def test_a_token_of_spaces_has_a_label_that_can_be_seen() -> None:
    assert layout_of_tokens([" word ", "\n\n", " ", "\t", ""])["labels"] == ["word", "↵↵", "␣", "⇥", "∅"]


@pytest.mark.parametrize("name", ["special", "unknown", "offsets"])
def test_lists_without_one_entry_per_token_are_rejected(name: str) -> None:
    sentence = f"{name} has 1 entries for 2 tokens. Give {name} one entry per token."
    with pytest.raises(ShapeError, match=f"^{re.escape(sentence)}$"):
        layout_of_tokens(["a", "b"], **{name: [(0, 1)] if name == "offsets" else [True]})


def test_what_stands_between_tokens_cannot_turn_the_direction_of_the_page() -> None:
    page = layout_of_tokens(["a", "b"], text="\u200fa\u202e b\u2067", offsets=[(1, 2), (4, 5)])
    assert (page["gaps"], page["shown"], page["tail"]) == (["U+200F", "U+202E "], ["a", "b"], "U+2067")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["The", "Ġcaf", "Ã©", "Ċ", "Ġå¥½", "!"], "The café\n 好!"),  # byte-level (GPT-2)
        (["▁The", "▁cat", "s", "."], "The cats."),  # SentencePiece
        (["the", "gu", "##ll", ",", "flies"], "the gull, flies"),  # WordPiece
        (["注", "意", "力", "。"], "注意力。"),
    ],
)
def test_entries_of_a_vocabulary_are_joined_as_their_tokenizer_joins_them(tokens: list[str], text: str) -> None:
    assert joined(layout_of_tokens(tokens)).strip() == text


@pytest.mark.parametrize(
    ("tokens", "text", "flags"),
    [
        (["Ġa", "å¥", "½"], "a好", [0, 0, PIECE_FLAG]),
        (["å", "¥", "½", "å¥½"], "好好", [0, PIECE_FLAG, PIECE_FLAG, 0]),
        (["Ġx", "å¥"], "x\ufffd", [0, PIECE_FLAG]),  # the text ends inside of a character
        (["a", "👩", "⤷", "⤷", "b"], "a 👩 b", [0, 0, PIECE_FLAG, PIECE_FLAG, 0]),  # decoded one by one
    ],
)
def test_the_first_piece_of_a_character_shows_it_and_the_others_take_no_room(
    tokens: list[str], text: str, flags: list[int]
) -> None:
    page = layout_of_tokens(["Ġ" + tokens[0], *tokens[1:]] if tokens[0] == "å" else tokens)
    assert page["flags"] == flags
    assert joined(page).strip() == text
    assert all(
        not shown and label == "⤷"
        for shown, label, flag in zip(page["shown"], page["labels"], flags, strict=True)
        if flag & PIECE_FLAG and shown != "\ufffd"
    )


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["the", "word", '"', "lonely", '"', "and", '"', "quiet", '"', "."], 'the word "lonely" and "quiet".'),
        (["it", "(", "was", ")", "don", "'", "t", "well", "-", "known"], "it (was) don't well-known"),
    ],
)
def test_words_are_set_with_quotes_and_brackets_where_they_belong(tokens: list[str], text: str) -> None:
    assert joined(layout_of_tokens(tokens)) == text


def test_known_gaps_come_before_every_convention() -> None:
    tokens, special = ["[CLS]", "a", "gu", "ll", "-", "b"], [True, *[False] * 5]
    gaps = [None, "", " ", "", " ", "  "]
    assert joined(layout_of_tokens(tokens, special=special, gaps=gaps)) == "[CLS] a gull -  b"
    assert (
        joined(layout_of_tokens(tokens, special=special, gaps=[None, None, None, "", None, None])) == "[CLS] a gull-b"
    )


def test_a_special_token_is_set_apart_and_never_split() -> None:
    page = layout_of_tokens(["<s>", "▁a", "</s>"], special=[True, False, True])
    assert (page["gaps"], page["shown"]) == (["", " ", " "], ["<s>", "a", "</s>"])
