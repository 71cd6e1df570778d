"""A statistic, how it is shown, and the definition of a probe."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError
from multihead.probes.probe import Probe, Statistic


def mine(**options: Any) -> Probe:
    return Probe("mine", options.pop("of", lambda parts: parts["entropy"]), {"entropy"}, **options)


def refusal_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(ArgumentError) as refusal:
        Probe(*arguments, **options)
    return str(refusal.value)


def test_a_probe_shows_its_name_alone() -> None:
    assert repr(mine()) == "Probe(name='mine')"


def test_probes_are_told_apart_by_what_they_are_made_of() -> None:
    assert mine(of=lambda parts: parts["entropy"] * 1) == mine(of=lambda parts: parts["entropy"] * 1) != mine()
    unknown = (each for each in ())
    reads_iterator = mine(of=lambda parts: (parts, unknown))
    assert reads_iterator == mine(of=reads_iterator.of) != mine(of=lambda parts: (parts, unknown))
    assert mine() != Probe("mine", mine().of, {"sink_mass"})
    assert mine() != mine(label="another")


def test_a_label_that_is_left_out_is_the_name_with_spaces() -> None:
    assert Statistic("late_mass").label == "late mass"
    assert Statistic("late_mass", label="late").short_label == "late"


@pytest.mark.parametrize(
    ("number_format", "value", "written"),
    [
        ("share", 0.5, "50"),
        ("share", 0.0993, "9.9"),
        ("share", 0.0996, "10"),
        ("share", -0.5, "-50"),
        (".2f", 1.256, "1.26"),
        (".0f", 12.0, "12"),
        (".3g", 123456.0, "123000"),
        (".3g", 0.000012345, "0.0000123"),
        (".3g", 1.2, "1.2"),
        (".3g", 0.0, "0"),
        (".3g", math.nan, "-"),
        (".3g", None, "-"),
        (".3g", -math.inf, "-inf"),
    ],
)
def test_a_number_is_written_in_its_format(number_format: str, value: float | None, written: str) -> None:
    assert Statistic("some", number_format=number_format).number(value) == written


def test_a_heading_and_a_text_have_the_unit() -> None:
    assert Statistic("some", unit="nats").heading == "some (nats)"
    assert Statistic("some", unit="nats").text(1.5) == "1.5 nats"
    assert Statistic("some", unit="nats").text(None) == "-"
    assert Statistic("some").heading == "some"


@pytest.mark.parametrize(
    ("part", "needs", "axes"),
    [
        ("entropy", set(), "queries"),
        (("offset_mass", -3), set(), "queries"),
        ("induction_mass", {"ids"}, "queries"),
        (("tokens_mass", "special"), {"special_keys"}, "queries"),
        (("tokens_mass", "commas"), {"sets"}, "queries"),
        ("contribution", {"values", "output_weight"}, "queries"),
        ("sink_mass", {"sinks"}, "queries"),
        ("received", set(), "keys"),
        ("pooled_map", set(), "map"),
    ],
)
def test_needs_and_axes_follow_from_the_parts(part: Any, needs: set[str], axes: str) -> None:
    probe = Probe("mine", lambda parts: parts[part], {part})
    assert probe.needs == needs
    assert probe.axes == axes


def test_a_set_with_token_ids_needs_the_ids_of_the_keys() -> None:
    assert Probe("mine", len, {("tokens_mass", "commas")}, tokens=frozenset({11})).needs == {"ids"}  # type: ignore[arg-type]


def test_an_unknown_part_is_refused() -> None:
    assert refusal_of("mine", len, {"entropy", "entropie"}).startswith("There is no part 'entropie'. Give some of ")


@pytest.mark.parametrize("parts", ["entropy", ("offset_mass", 1), frozenset(), None])
def test_parts_that_are_no_set_are_refused(parts: Any) -> None:
    assert refusal_of("mine", len, parts) == (
        f'The parts of mine are {parts!r}. Give a set of at least one, such as {{"entropy"}}.'
    )


def test_parts_of_different_shapes_are_refused() -> None:
    assert refusal_of("mine", len, {"entropy", "received"}) == (
        'The parts of mine have different shapes. Combine parts with a number per query, or take "received" or '
        '"pooled_map" alone.'
    )


@pytest.mark.parametrize("name", ["", "full stops", "1st", "layer", "head", "name", "kind", "of"])
def test_a_name_that_a_table_or_find_cannot_have_is_refused(name: str) -> None:
    assert refusal_of(name, len, {"entropy"}) == (
        f"A probe is called {name!r}. Give a Python identifier other than layer, head, name, kind, of, such as "
        '"late_mass".'
    )


def test_fields_of_another_type_are_refused() -> None:
    assert refusal_of(3, len, {"entropy"}) == "The name of a statistic is 3. Give a string."
    assert refusal_of("mine", len, {"entropy"}, unit=None) == "The unit of a statistic is None. Give a string."
    assert refusal_of("mine", 3, {"entropy"}) == (
        'The function of mine is 3. Give one, such as lambda parts: parts["entropy"].exp().'
    )


@pytest.mark.parametrize("number_format", ["", "%", ".3e", "3f", ".12f", ".0g", "share "])
def test_an_unknown_number_format_is_refused(number_format: str) -> None:
    assert refusal_of("mine", len, {"entropy"}, number_format=number_format) == (
        f'The number format of mine is {number_format!r}. Give "share", a number of decimals such as ".2f", or of '
        'significant digits such as ".3g".'
    )


@pytest.mark.parametrize("counted", ["", "previous", "offset 2", "offset -"])
def test_an_unknown_rule_of_counting_is_refused(counted: str) -> None:
    assert refusal_of("mine", len, {"entropy"}, counted=counted) == (
        f'The queries counted for mine are {counted!r}. Give "all", "repeated", "placed", or an offset '
        'such as "offset -2".'
    )


@pytest.mark.parametrize("page", ["probes.md", "probes.zh.md"])
@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal()], ids=repr)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_example_of_the_page_is_the_sum_of_its_weights(page: str, mask: masks.Mask, *, with_sinks: bool) -> None:
    """Against even weights by hand in float64: 4 queries and keys, and a sink that weighs as much as a key."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    example = re.search(r"^>>> OWN, .*?^\.\.\. \)$", text, re.DOTALL | re.MULTILINE)
    assert example is not None
    names: dict[str, Any] = {"probes": mh.probes}
    exec(re.sub(r"^(>>>|\.\.\.) ", "", example[0], flags=re.MULTILINE), names)
    q = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
    sinks = torch.zeros(2, dtype=torch.float64) if with_sinks else None
    found = mh.statistics(q, q, mask=mask, sinks=sinks, probes=(names["local"],))["local_mass"][0, 0]
    seen = [4] * 4 if mask == masks.Full() else [1, 2, 3, 4]
    expected = [min(2, position + 1) / (seen[position] + with_sinks) for position in range(4)]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_a_share_with_another_unit_is_refused() -> None:
    assert refusal_of("mine", len, {"entropy"}, unit="nats", number_format="share") == (
        "mine is written as a share, and its unit is 'nats'. Leave the unit out (it is \"%\"), or choose another "
        'number format, such as ".2f".'
    )
