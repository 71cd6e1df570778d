"""Columns name a statistic, its unit and its label in the page's language."""

from __future__ import annotations

from multihead.viewer.columns import column


def test_units_follow_the_statistics_name() -> None:
    found = {name: column(name, "en") for name in ("largest_weight", "induction_mass", "effective_keys", "some_new")}
    assert {name: (one["id"], one["unit"]) for name, one in found.items()} == {
        "largest_weight": ("largest", "share"),
        "induction_mass": ("induction", "share"),
        "effective_keys": ("keys", "keys"),
        "some_new": ("some_new", "number"),
    }


def test_a_label_is_in_the_language_of_the_page() -> None:
    assert column("previous_mass", "en")["label"] == "previous"
    assert column("previous_mass", "zh")["label"] == "前一个"


def test_a_statistic_from_outside_keeps_its_name_in_every_language() -> None:
    assert column("of_verbs_mass", "en")["label"] == "of verbs"
    assert column("of_verbs_mass", "zh")["label"] == "of verbs"
