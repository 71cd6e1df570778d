"""The built-in statistics, and the functions that make probes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from multihead.errors import ProbeError
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS
from multihead.kernels.parts import PART_FAMILIES, PARTS
from multihead.locale.texts import statistic_label, unit_label
from multihead.probes.catalogue import DEFAULT, PROBES, first_keys_mass, offset_mass, tokens_mass


def test_the_default_is_what_the_native_kernel_measures_in_its_pass_and_what_follows_from_it() -> None:
    follows = {"sink_mass", "first_special_mass"}
    assert {part for name in DEFAULT for part in PROBES[name].parts} == PARTS_OF_ONE_PASS | follows


def test_the_default_is_what_has_the_flag_in_any_order() -> None:
    assert set(DEFAULT) == {name for name, probe in PROBES.items() if probe.default}


@pytest.mark.parametrize("name", PROBES)
def test_each_has_a_definition_a_label_and_a_unit_or_none(name: str) -> None:
    probe = PROBES[name]
    assert probe.name == name
    assert probe.about
    assert probe.label
    assert len(probe.short_label) <= len(probe.label)
    assert probe.unit in ("", "nats", "tokens", "patches", "queries", "%")
    assert (probe.unit == "%") == (probe.number_format == "share")


def test_what_is_an_index_or_has_no_number_per_query_has_no_mean() -> None:
    without = [name for name, probe in PROBES.items() if not probe.has_mean]
    assert without == ["largest_key", "received", "coverage", "pooled_map"]


def test_labels_are_unique() -> None:
    assert len({probe.label for probe in PROBES.values()}) == len(PROBES)


def test_a_made_probe_has_a_label_of_its_own() -> None:
    assert offset_mass(-5).heading == "offset -5 (%)"
    assert first_keys_mass(4).heading == "first 4 (%)"
    assert tokens_mass("full_stops", [13]).heading == "full stops (%)"


def test_probes_that_are_made_of_the_same_are_the_same() -> None:
    assert offset_mass(-5) == offset_mass(-5)
    assert hash(offset_mass(-5)) == hash(offset_mass(-5))
    assert offset_mass(-5) != offset_mass(-6)
    assert tokens_mass("commas", [11]) == tokens_mass("commas", (11, 11))
    assert tokens_mass("commas", [11]) != tokens_mass("commas", [12])


def test_one_concept_has_one_name() -> None:
    assert [offset_mass(offset).name for offset in (0, -1, 1)] == ["self_mass", "previous_mass", "next_mass"]
    assert first_keys_mass(1) is PROBES["first_mass"]
    assert offset_mass(7).name == "offset_plus_7_mass"


@pytest.mark.parametrize("offset", [1.0, "1", True, None])
def test_an_offset_that_is_no_integer_is_refused(offset: Any) -> None:
    with pytest.raises(ProbeError) as refusal:
        offset_mass(offset)
    assert str(refusal.value) == f"offset_mass was given {offset!r}. Give an integer: -1 is the key before the query."


@pytest.mark.parametrize("count", [0, -2, 1.5, True])
def test_a_count_below_one_is_refused(count: Any) -> None:
    with pytest.raises(ProbeError) as refusal:
        first_keys_mass(count)
    assert str(refusal.value) == f"first_keys_mass was given {count!r}. Give an integer of at least 1."


@pytest.mark.parametrize("name", ["", "full stops", "1st", 3])
def test_a_name_that_is_no_identifier_is_refused(name: Any) -> None:
    with pytest.raises(ProbeError) as refusal:
        tokens_mass(name, [1])
    assert (
        str(refusal.value)
        == f'tokens_mass was given the name {name!r}. Give a Python identifier, such as "punctuation".'
    )


@pytest.mark.parametrize("name", ["self", "special", "sink", "offset_minus_5", "first_4"])
def test_a_name_that_is_taken_is_refused(name: str) -> None:
    with pytest.raises(ProbeError) as refusal:
        tokens_mass(name, [1])
    assert str(refusal.value) == f"{name}_mass is the name of another statistic. Give the set another name."


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(ProbeError) as refusal:
        tokens_mass("commas", [","])  # type: ignore[list-item]
    assert (
        str(refusal.value)
        == "tokens_mass('commas') was given ids that are no integers. Give token ids, such as [11, 13]."
    )


DOCS = Path(__file__).parents[2] / "docs"


def listed(page: str) -> list[list[str]]:
    """The cells of the table of built-in statistics, without its head and the names of its groups."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| `entropy`"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    cells = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in rows)
    return [row for row in cells if row[0].startswith("`")]


def test_the_page_lists_every_statistic_as_the_catalogue_defines_it() -> None:
    assert listed("probes.md") == [
        [f"`{each.name}`", each.label, each.about.replace("|", "\\|"), each.unit, each.source]
        for each in PROBES.values()
    ]


def test_the_chinese_page_lists_the_same_statistics_with_their_chinese_labels_and_the_same_papers() -> None:
    rows = listed("probes.zh.md")
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (f"`{each.name}`", statistic_label(each.name, "zh", each.label), unit_label(each.unit, "zh"))
        for each in PROBES.values()
    ]
    papers = re.compile(r"[0-9]{4}\.[0-9]{5}")
    assert [papers.findall(row[4]) for row in rows] == [papers.findall(each.source) for each in PROBES.values()]


def test_both_pages_list_every_part() -> None:
    for page in ("probes.md", "probes.zh.md"):
        text = (DOCS / page).read_text(encoding="utf-8")
        assert all(f'| `"{part}"` |' in text for part in PARTS)
        assert all(f'| `("{name}", {family.argument.__name__})` |' in text for name, family in PART_FAMILIES.items())
