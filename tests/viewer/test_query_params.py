"""Numbers of an address: what is read, and the whole sentence where one is wrong."""

from __future__ import annotations

import pytest

from multihead.errors import ArgumentError
from multihead.viewer.query_params import NotFoundError, parse_flag, parse_number, parse_range


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "The layer is missing. Give a whole number from 0 to 5."),
        ("", "The layer is ''. Give a whole number from 0 to 5."),
        ("x", "The layer is 'x'. Give a whole number from 0 to 5."),
        ("-1", "The layer is '-1'. Give a whole number from 0 to 5."),
        ("1.5", "The layer is '1.5'. Give a whole number from 0 to 5."),
        ("1e3", "The layer is '1e3'. Give a whole number from 0 to 5."),
        ("٣", "The layer is '٣'. Give a whole number from 0 to 5."),
        ("3\n", "The layer is '3\\n'. Give a whole number from 0 to 5."),
        ("9" * 5000, f"The layer is '{'9' * 39}…'. Give a whole number from 0 to 5."),
    ],
)
def test_text_that_is_not_a_number_is_rejected(text: str | None, sentence: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_number("layer", text, below=6)
    assert str(refused.value) == sentence


def test_a_number_beyond_the_last_is_absent() -> None:
    with pytest.raises(NotFoundError, match=r"^There is no layer 6\. Give a number from 0 to 5\.$"):
        parse_number("layer", "6", below=6)


def test_a_number_may_be_left_out_where_there_is_a_default() -> None:
    assert parse_number("top", None, below=6, default=4) == 4
    assert parse_number("top", "2", below=6, default=4) == 2


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "3",
            "The keys are '3'. Give the first and the one after the last with a colon between them, such as 0:10.",
        ),
        (
            "-1:3",
            "The keys are '-1:3'. Give the first and the one after the last with a colon between them, such as 0:10.",
        ),
        ("3:3", "The keys are 3:3, of 10. Give a part of 0:10."),
        ("5:3", "The keys are 5:3, of 10. Give a part of 0:10."),
        ("5:11", "The keys are 5:11, of 10. Give a part of 0:10."),
        ("5:999999999999", "The keys are 5:999999999999, of 10. Give a part of 0:10."),
    ],
)
def test_an_invalid_range_is_rejected(text: str, sentence: str) -> None:
    with pytest.raises(ArgumentError) as refused:
        parse_range("keys", text, 10)
    assert str(refused.value) == sentence


def test_a_flag_is_1_or_0() -> None:
    assert [parse_flag("sink", text, default=True) for text in ("1", "0", None)] == [True, False, True]
    with pytest.raises(ArgumentError, match=r"^sink is 'yes'\. Give 1 or 0\.$"):
        parse_flag("sink", "yes", default=True)
