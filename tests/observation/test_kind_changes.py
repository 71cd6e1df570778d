"""When heads became a kind: which changes count, how they are said, and which come first."""

from __future__ import annotations

import re

import pytest

from multihead.errors import ArgumentError, ProbeError
from multihead.kinds import KINDS, Kind
from multihead.observation.kind_changes import changed_places, most_telling_first
from multihead.observation.time_series import TimeSeries
from multihead.probes.catalogue import SELF_MASS

OWN = Kind("own", SELF_MASS, labels={"en": "its own", "zh": "自身的"})
FIRST, MIXED = ("first",), ("mixed",)


def series(*heads: list[tuple[str, ...]], first: int = 0) -> TimeSeries:
    """One layer with the kinds of each head at steps 0, 10, 20 and so on, all of them measured from step `first` on."""
    made = TimeSeries(watched_kinds=(*KINDS, OWN))
    for place, kinds in enumerate(zip(*heads, strict=True)):
        means = {kind.statistic: [0.5] * len(heads) for kind in made.watched_kinds if 10 * place >= first}
        made.append(10 * place, "attention", 3, {"largest_weight": [0.5] * len(heads)} | means, kinds=kinds)
    return made


@pytest.mark.parametrize(
    ("states", "places"),
    [
        ("", []),
        ("1", []),
        ("0011", [2]),
        ("0001", [3]),
        ("1100", [2]),
        ("0010", []),
        ("1101", []),
        ("0101011", [5]),
        ("100", []),
        ("1011", [2]),
        ("01101100110", [1, 6, 8, 10]),
    ],
)
def test_a_change_counts_if_it_holds_at_two_steps_in_a_row_or_at_the_last_one(states: str, places: list[int]) -> None:
    assert changed_places([each == "1" for each in states]) == places


def test_a_change_has_the_observed_steps_around_it_and_that_of_the_next_one() -> None:
    kinds = [MIXED, FIRST, MIXED, FIRST, FIRST, MIXED, MIXED]
    found = series(kinds, [FIRST] * 7).changes()
    assert [(each.layer, each.head, each.name, each.kind, each.gained) for each in found] == [
        (3, 0, "attention", "first", True),
        (3, 0, "attention", "first", False),
    ]
    assert [(each.after, each.step, each.until) for each in found] == [(20, 30, 50), (40, 50, None)]
    assert repr(found) == (
        "[<KindChange L3 H0 became a first-token head at step 30.>,\n"
        " <KindChange L3 H0 was no longer a first-token head from step 50 on.>]"
    )
    assert "<td>attention</td><td>30</td><td>first</td><td>L3 H0 became a first-token head" in found._repr_html_()


def test_a_kind_is_named_in_both_languages_and_one_of_ones_own_by_its_label() -> None:
    found = series([MIXED, ("own", "first")]).changes("own", "first")
    assert [each.sentence(lang) for each in found for lang in ("en", "zh")] == [
        "L3 H0 became a first-token head at step 10.",
        "L3 H0 在第 10 步成为首词元头。",
        "L3 H0 became a head of the kind “its own” at step 10.",
        "L3 H0 在第 10 步成为“自身的”类的头。",
    ]
    with pytest.raises(ArgumentError, match='lang is "fr", and must be "en" or "zh"'):
        found[0].sentence("fr")


def test_steps_at_which_a_kind_was_not_measured_say_nothing_about_it() -> None:
    assert series([MIXED, FIRST, FIRST, FIRST], first=10).changes() == []


def test_the_first_head_of_each_kind_comes_first_and_kinds_without_a_finding_last() -> None:
    broad, induction = ("broad",), ("induction",)
    found = series(
        [broad, broad, induction, induction, induction],
        [broad, broad, broad, induction, induction],
        [broad, broad, FIRST, FIRST, FIRST],
        [broad, FIRST, FIRST, broad, broad],
    ).changes()
    assert [(each.head, each.kind, each.gained) for each in most_telling_first(found)] == [
        (2, "first", True),
        (0, "induction", True),
        (1, "induction", True),
        (3, "first", True),  # not to the end
        (3, "first", False),
        (3, "broad", True),
        (0, "broad", False),
        (2, "broad", False),
        (1, "broad", False),
    ]


def test_changes_need_watched_kinds_and_the_name_of_one() -> None:
    sentence = "The kinds of the heads were not watched. Watch them: mh.Watch(model, kinds=True)."
    with pytest.raises(ProbeError, match=f"^{re.escape(sentence)}$"):
        TimeSeries().changes()
    with pytest.raises(ArgumentError, match=r"^There is no kind 'verbs'\. Give some of broad, duplicate, first"):
        series([FIRST]).changes("verbs")
