"""The statistics of heads over steps: their values, file, rows and plot."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from multihead import probes
from multihead.errors import ArgumentError, InputError, ProbeError
from multihead.kinds import KINDS, Kind
from multihead.observation.time_series import TimeSeries, changed_places, most_telling_first
from multihead.probes.catalogue import SELF_MASS
from multihead.probes.probe import Statistic


def series() -> TimeSeries:
    """Three steps of two layers; layer 1 has no entropy at step 10."""
    made = TimeSeries()
    shown = {"mine": Statistic("mine", label="my own", unit="tokens", number_format=".1f")}
    for step in (0, 10, 20):
        made.append(step, "a", 0, {"entropy": [1.0 + step, 2.0], "mine": [0.5, step / 4]}, shown)
        made.append(step, "b", 1, {"mine": [3.0]} if step == 10 else {"entropy": [4.0], "mine": [3.0]}, shown)
    return made


OWN = Kind(
    "own",
    probes.offset_mass(-2),
    above_chance=None,
    at_least=0.5,
    rank=1,
    finding=None,
    labels={"en": "its own", "zh": "自身的"},
    about={"en": "At least {at_least} {{so}}."},
    glyph="M0 0h2v2z",
    colour=("#123456", "#ABCDEF"),
)


def series_with_kinds() -> TimeSeries:
    """Two steps of two layers, of which layer 1 did not run at step 10; head 1 of layer 0 becomes two kinds."""
    made = TimeSeries(watched_kinds=(*KINDS, OWN))
    shown = {OWN.statistic: Statistic(OWN.statistic, number_format="share")}
    means = {"first_mass": [0.5, 0.75], OWN.statistic: [0.25, 0.5]}
    made.append(0, "a", 0, means, shown, kinds=[["mixed"], ["mixed"]])
    made.append(0, "b", 1, {"entropy": [1.0]}, kinds=[["broad"]])
    made.append(10, "a", 0, means, shown, kinds=[["mixed"], ["own", "first"]])
    return made


def test_kinds_have_an_item_per_step_and_are_a_column_of_the_rows() -> None:
    made = series_with_kinds()
    assert made.kinds(layer=0) == [(("mixed",), ("mixed",)), (("mixed",), ("own", "first"))]
    assert made.kinds(layer=1) == [(("broad",),), None]
    assert made.kinds_of_all_heads() == [[("mixed",), ("mixed",), ("broad",)], [("mixed",), ("own", "first"), ()]]
    assert [row["kind"] for row in made.rows()] == ["mixed", "mixed", "broad", "mixed", "own+first"]
    assert repr(made).startswith("<TimeSeries of 2 steps, 2 layers, 16 kinds, first_mass, ")
    assert "<td>own+first</td>" in made._repr_html_()
    with pytest.raises(ArgumentError, match=r"^There is no kind 'verbs'\. Give some of broad, "):
        made.append(20, "a", 0, {}, kinds=[["mixed"], ["verbs"]])
    with pytest.raises(ArgumentError) as caught:
        made.kinds(layer=7)
    assert str(caught.value) == "There are no kinds of the heads of layer 7. Give a layer of 0, 1."
    with pytest.raises(ArgumentError) as caught:
        series().kinds(layer=0)
    sentence = "There are no kinds of the heads of layer 0. Watch them: mh.Watch(model, kinds=True)."
    assert str(caught.value) == sentence


def test_values_have_a_row_per_step_and_nan_where_nothing_was_measured() -> None:
    np.testing.assert_array_equal(series().values("entropy", layer=0), [[1, 2], [11, 2], [21, 2]])
    np.testing.assert_array_equal(series().values("entropy", layer=1), [[4], [np.nan], [4]])


def test_rows_have_one_dict_per_step_and_head() -> None:
    rows = series().rows()
    assert len(rows) == 3 * 3
    assert rows[1] == {"step": 0, "layer": 0, "head": 1, "entropy": 2.0, "mine": 0.0}
    assert rows[5] == {"step": 10, "layer": 1, "head": 0, "mine": 3.0}


def test_a_notebook_shows_the_heads_at_the_last_step() -> None:
    tree = ET.fromstring(series()._repr_html_())
    assert "".join(tree.find("p").itertext()) == "TimeSeries: 3 steps, 2 layers; at step 20."  # type: ignore[union-attr]
    assert [[cell.text for cell in row] for row in tree.iter("tr")] == [
        ["layer", "head", "name", "entropy (nats)", "my own (tokens)"],
        ["0", "0", "a", "21.00", "0.5"],
        ["0", "1", "a", "2.00", "5.0"],
        ["1", "0", "b", "4.00", "3.0"],
    ]
    many = TimeSeries()
    many.append(0, "a", 0, {"entropy": [1.0] * 30})
    assert "6 heads more: rows() has all." in many._repr_html_()
    assert "nothing was observed yet" in TimeSeries()._repr_html_()


def test_a_saved_series_is_loaded_as_it_was(tmp_path: Path) -> None:
    series().save(tmp_path / "heads.safetensors")
    loaded = TimeSeries.load(tmp_path / "heads.safetensors")
    assert (loaded.rows(), loaded.layers) == (series().rows(), {0: "a", 1: "b"})
    shown = {name: each.display() for name, each in loaded.statistics.items()}
    assert shown == {name: each.display() for name, each in series().statistics.items()}
    assert repr(loaded) == "<TimeSeries of 3 steps, 2 layers, entropy, mine>"


def test_a_saved_series_has_the_kinds_and_the_texts_of_ones_own(tmp_path: Path) -> None:
    made = series_with_kinds()
    made.save(tmp_path / "heads.safetensors")
    loaded = TimeSeries.load(tmp_path / "heads.safetensors")
    assert loaded.watched_kinds[:-1] == KINDS
    own = loaded.watched_kinds[-1]
    for lang in ("en", "zh"):
        assert (own.label(lang), own.noun_phrase(lang)) == (OWN.label(lang), OWN.noun_phrase(lang))
        assert own.definition(lang) == OWN.definition(lang) == "At least 50\u00a0% {so}."
    names = ("name", "statistic", "at_least", "above_chance", "of_largest", "rank", "finding", "glyph", "colour")
    assert [getattr(own, name) for name in names] == [getattr(OWN, name) for name in names]
    assert (loaded.rows(), loaded.changes(), repr(loaded)) == (made.rows(), made.changes(), repr(made))


def test_a_series_without_kinds_has_the_file_of_earlier_versions(tmp_path: Path) -> None:
    from safetensors import safe_open

    series().save(tmp_path / "heads.safetensors")
    with safe_open(tmp_path / "heads.safetensors", "numpy") as opened:
        assert opened.metadata()["version"] == "1"
        assert sorted(opened.keys()) == ["entropy/0", "entropy/1", "mine/0", "mine/1", "steps"]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"combinations": '[["mixed"], ["verbs"]]'}, "the kinds verbs are not described"),
        ({"combinations": '[["mixed"]]'}, "kind/0 has other numbers than those of kinds"),
        ({"kinds": "own.glyph"}, "The glyph of own is '<script>'"),
        ({"kinds": "own.at_least"}, "The thresholds of the kind own are"),
        ({"steps": "[[0]]"}, "kind/0 does not fit the steps, layers and heads"),
    ],
)
def test_a_file_with_damaged_kinds_is_rejected(tmp_path: Path, changed: dict[str, str], sentence: str) -> None:
    from safetensors import safe_open
    from safetensors.numpy import save_file

    file = tmp_path / "heads.safetensors"
    series_with_kinds().save(file)
    with safe_open(file, "numpy") as opened:
        header, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    for name, value in changed.items():
        if name == "steps":
            tensors["kind/0"] = tensors["kind/0"][:1]
        elif name == "kinds":
            described = json.loads(header["kinds"])
            described[-1][value.removeprefix("own.")] = "<script>"
            header["kinds"] = json.dumps(described)
        else:
            header[name] = value
    save_file(tensors, file, header)
    with pytest.raises(InputError, match=f"is damaged: .*{sentence}"):
        TimeSeries.load(file)


def test_a_file_of_another_kind_or_a_damaged_one_is_rejected(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    file = tmp_path / "heads.safetensors"
    with pytest.raises(InputError, match=r"^There is no file"):
        TimeSeries.load(file)
    save_file({"steps": np.zeros(2)}, file)
    with pytest.raises(InputError) as caught:
        TimeSeries.load(file)
    assert str(caught.value) == f"{str(file)!r} is not a time series of heads. Give a file that TimeSeries.save wrote."
    series().save(file)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(InputError, match="is damaged"):
        TimeSeries.load(file)
    header = {"format": "multihead time series", "version": "1", "layers": "{}", "statistics": "{}"}
    save_file({"steps": np.zeros(2), "entropy/0": np.zeros((1, 1))}, file, header)
    with pytest.raises(InputError, match="entropy/0 does not fit the steps, layers and statistics"):
        TimeSeries.load(file)


def test_a_plot_has_a_line_per_head_or_per_layer() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    ax = series().plot("entropy", layer=0)
    assert [line.get_ydata().tolist() for line in ax.lines] == [[1, 11, 21], [2, 2, 2]]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "entropy (nats)")
    assert [line.get_label() for line in series().plot("mine").lines] == ["layer 0", "layer 1"]


def test_an_unknown_statistic_or_layer_is_rejected_with_those_that_exist() -> None:
    with pytest.raises(ArgumentError) as caught:
        series().values("entropy", layer=7)
    assert str(caught.value) == "There is no 'entropy' of layer 7. Give one of entropy, mine and a layer of 0, 1."
    with pytest.raises(ArgumentError, match="There is no statistic 'received'"):
        series().plot("received")


OF_SELF = Kind("own", SELF_MASS, labels={"en": "its own", "zh": "自身的"})
FIRST, MIXED = ("first",), ("mixed",)


def series_of_kinds(*heads: list[tuple[str, ...]], first: int = 0) -> TimeSeries:
    """One layer with the kinds of each head at steps 0, 10, 20 and so on, all of them measured from step `first` on."""
    made = TimeSeries(watched_kinds=(*KINDS, OF_SELF))
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
    found = series_of_kinds(kinds, [FIRST] * 7).changes()
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
    found = series_of_kinds([MIXED, ("own", "first")]).changes("own", "first")
    assert [each.sentence(lang) for each in found for lang in ("en", "zh")] == [
        "L3 H0 became a first-token head at step 10.",
        "L3 H0 在第 10 步成为首词元头。",
        "L3 H0 became a head of the kind “its own” at step 10.",
        "L3 H0 在第 10 步成为“自身的”类的头。",
    ]
    with pytest.raises(ArgumentError, match='lang is "fr", and must be "en" or "zh"'):
        found[0].sentence("fr")


def test_steps_at_which_a_kind_was_not_measured_say_nothing_about_it() -> None:
    assert series_of_kinds([MIXED, FIRST, FIRST, FIRST], first=10).changes() == []


def test_the_first_head_of_each_kind_comes_first_and_kinds_without_a_finding_last() -> None:
    broad, induction = ("broad",), ("induction",)
    found = series_of_kinds(
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
        series_of_kinds([FIRST]).changes("verbs")
