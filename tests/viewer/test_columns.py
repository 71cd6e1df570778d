"""Columns have the label, the unit and the number format of their statistic, in the page's language."""

from __future__ import annotations

from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multihead.locale.texts import statistic_label
from multihead.probes import PROBES, Probe, Statistic
from multihead.probes.catalogue import REPEAT_PROBES, statistic
from multihead.viewer.columns import (
    columns_not_recorded,
    describe_column,
    names_of_statistics,
    without_repeated_special_tokens,
)


def test_a_label_and_a_unit_are_in_the_language_of_the_page() -> None:
    assert describe_column(statistic("mean_distance"), "en") == {
        "id": "mean_distance",
        "label": "distance",
        "unit": "tokens",
        "format": ".1f",
        "about": "",
        "focus": False,
    }
    assert describe_column(statistic("mean_distance"), "zh") == {
        "id": "mean_distance",
        "label": "平均距离",
        "unit": "词元",
        "format": ".1f",
        "about": "",
        "focus": False,
    }


def test_a_statistic_of_a_script_keeps_its_label_and_unit_in_every_language() -> None:
    late = Statistic("late", label="late\x1b keys", unit="nats per key", number_format=".3g")
    for lang in ("en", "zh"):
        assert describe_column(late, lang) == {
            "id": "late",
            "label": "late\\x1b keys",
            "unit": "nats per key",
            "format": ".3g",
            "about": "",
            "focus": False,
        }
    probe = Probe("last_mass", itemgetter("entropy"), {"entropy"}, about="the last key\x1b")
    assert describe_column(probe, "en")["about"] == "the last key\\x1b"


def test_tables_are_sorted_by_the_entropy_at_first() -> None:
    assert [name for name, probe in PROBES.items() if describe_column(probe, "en")["focus"]] == ["entropy"]


@pytest.mark.parametrize(
    ("chance", "left_out"),
    [
        ({"separator_mass": [0.0, 0.0]}, "separator_mass"),
        ({"separator_mass": [0.0, 0.1]}, "special_mass"),
        ({}, "separator_mass"),
    ],
    ids=["no special token after the first", "some", "unknown"],
)
def test_special_tokens_have_one_column_besides_that_of_the_first_token(
    chance: dict[str, list[float]], left_out: str
) -> None:
    levels = {name: torch.tensor(values) for name, values in chance.items()}
    profiles: Any = [
        SimpleNamespace(means=dict.fromkeys(("entropy", "special_mass", "separator_mass")), chance=levels),
        SimpleNamespace(means=dict.fromkeys(("entropy", "late")), chance={}),
    ]
    names = names_of_statistics(profiles)
    assert names == ["entropy", "special_mass", "separator_mass", "late"]
    assert set(names) - set(without_repeated_special_tokens(names, profiles)) == {left_out}


def test_statistics_that_were_not_recorded_are_listed_with_their_labels() -> None:
    left_out = "sink_mass", "induction_mass", "repeated_first"
    missing = columns_not_recorded([name for name in (*PROBES, *REPEAT_PROBES) if name not in left_out], "zh")
    assert missing == [
        {"id": "sink_mass", "label": statistic_label("sink_mass", "zh", "")},
        {"id": "induction_mass", "label": statistic_label("induction_mass", "zh", "")},
        {"id": "repeated_first", "label": statistic_label("repeated_first", "zh", "")},
    ]
    assert {"largest_key", "received", "pooled_map"}.isdisjoint(each["id"] for each in columns_not_recorded((), "en"))
