"""Sentences of the lab in two languages, with numbers in them."""

from __future__ import annotations

import pytest

from multihead.errors import ArgumentError
from multihead_lab.matching import MeanOverSeeds
from multihead_lab.text import (
    NBSP,
    format_mean,
    format_mean_percent,
    format_percent,
    format_rounding_error,
    format_shape,
    load_phrases,
)


def test_items_are_joined_in_the_manner_of_the_language() -> None:
    assert load_phrases("en").join_items("123") == "1, 2 and 3"
    assert load_phrases("zh").join_items("123", "or") == "1、2 或 3"
    assert load_phrases("en").join_items("1") == "1"


def test_numbers_hold_together_over_the_end_of_a_line() -> None:
    english = load_phrases("en")
    assert english.format_count("head", 1) == f"1{NBSP}head"
    assert format_mean_percent(MeanOverSeeds(0.981, 0.004)) == f"98.1{NBSP}±{NBSP}0.4{NBSP}%"
    assert format_mean(MeanOverSeeds(12.34, 0.5)) == f"12.3{NBSP}±{NBSP}0.5"
    assert format_mean_percent(MeanOverSeeds(0.981, None)) == f"98.1{NBSP}%"
    assert format_mean(MeanOverSeeds(12.34, None)) == "12.3"
    assert (english.format_count("seed", 1), english.format_count("seed", 5)) == (f"1{NBSP}seed", f"5{NBSP}seeds")
    assert format_percent(0.5, 0) == f"50{NBSP}%"


def test_shapes_and_rounding_errors_are_written_plainly() -> None:
    assert format_shape((1, 2, 12, 12)) == "(1, 2, 12, 12)"
    assert format_rounding_error(0.0) == "0"
    assert format_rounding_error(6.4e-14) == "6.4e-14"


def test_another_language_is_refused() -> None:
    with pytest.raises(ArgumentError) as refused:
        load_phrases("fr")
    assert str(refused.value) == 'lang is "fr", and must be "en" or "zh". Give "en" or "zh".'
