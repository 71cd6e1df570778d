"""What a page gets of the heads that matter: the numbers of `mh.importance`, and what `Record.add` has added beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.observation.record import Record
from multihead.viewer import write_report
from multihead.viewer.page_types import HeadNumbers, SampleDescription
from multihead.viewer.payload import RecordedRun, describe_sample
from tests.families import family
from tests.head_numbers import Numbers, add_together, found, record


def described(seen: Record, lang: str = "en") -> SampleDescription:
    return describe_sample(RecordedRun("a", seen), 0, lang)


def numbers_of(seen: Record, lang: str = "en") -> HeadNumbers:
    (numbers,) = described(seen, lang)["important"]
    return numbers


def test_the_numbers_the_errors_the_order_and_the_sentence_are_those_of_importance() -> None:
    seen, effects = record(), found()
    assert described(seen)["important"] == []
    seen.add(effects)
    numbers = numbers_of(seen)
    values = described(seen)["metrics"][numbers["id"]]
    assert values == pytest.approx(effects.effects.flatten().tolist(), rel=1e-5)
    assert numbers["errors"] == pytest.approx(effects.standard_errors.flatten().tolist(), rel=1e-5)
    assert numbers["order"] == [4 * each.layer + each.head for each in effects.heads(10)]
    assert effects.describe().startswith(numbers["sentence"])
    assert numbers["within"] == (effects.effects.abs() <= 2 * effects.standard_errors).flatten().tolist()
    assert numbers["within"].count(False) == effects.beyond_errors
    assert f"{effects.beyond_errors} of 8 heads" in numbers["sentence"]
    assert numbers["name"] == "exact"
    assert numbers["note"] == "Above 0: worse without the head. Hatched: within two standard errors of 0."


@pytest.mark.parametrize("more_is_better", [True, None])
def test_the_order_follows_the_direction_of_the_measure(more_is_better: bool | None) -> None:
    seen, effects = record(), found(more_is_better=more_is_better)
    seen.add(effects)
    assert numbers_of(seen)["order"] == [4 * each.layer + each.head for each in effects.heads(10)]


def test_one_text_has_no_errors_and_the_page_says_that_nothing_is_hatched() -> None:
    seen = record()
    seen.add(found(texts=1))
    numbers = numbers_of(seen)
    assert (numbers["errors"], numbers["within"]) == ([], [])
    assert numbers["sentence"].startswith("One text has no standard error")
    assert numbers["note"].endswith("One text has no standard error, so nothing is hatched.")


def test_estimates_come_after_exact_effects_and_by_their_name() -> None:
    seen = record()
    for each in (found("gradient"), found()):
        seen.add(each)
    exact, estimate, sensitivity = described(seen)["important"]
    assert [each["name"] for each in (exact, estimate, sensitivity)] == ["exact", "gradient estimate", "sensitivity"]
    assert estimate["about"].startswith("Gradient estimate: a first-order estimate")
    assert found("gradient").describe() == estimate["sentence"]
    values = described(seen)["metrics"]
    assert values[estimate["id"]] == pytest.approx(found("gradient").effects.flatten().tolist(), rel=1e-5)
    assert values[sensitivity["id"]] == pytest.approx(found("gradient").sensitivities.flatten().tolist(), rel=1e-5)
    assert sensitivity["within"] == []
    assert "by chance" not in sensitivity["sentence"]
    labels = {each["id"]: each["label"] for each in described(seen)["columns"]}
    assert labels[estimate["id"]] == "estimated effect on surprise by zero"
    chinese = {each["id"]: each["label"] for each in described(seen, "zh")["columns"]}
    assert chinese[estimate["id"]] == "对surprise影响的估计（置零）"


@pytest.mark.parametrize("direction", ["clean into corrupted", "corrupted into clean"])
def test_shares_of_patching_are_those_of_patch_and_without_a_gap_a_sentence_stands_for_them(direction: Any) -> None:
    seen = record()
    clean = torch.arange(3, 35).view(4, 8)
    measure = mh.logit_difference(7, 9)
    shares = mh.patch(family("llama"), clean, clean + 20, measure, direction=direction)
    assert shares.has_gap
    seen.add(shares)
    numbers = numbers_of(seen)
    lost = direction == "corrupted into clean"
    expected = (1 - shares.recovered if lost else shares.recovered).flatten().tolist()
    assert described(seen)["metrics"][numbers["id"]] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert numbers["errors"] == pytest.approx(shares.standard_errors.flatten().tolist(), rel=1e-4)
    assert numbers["order"] == [4 * each.layer + each.head for each in shares.heads(10)]
    assert numbers["name"] == ("lost by patching" if lost else "recovered by patching")
    assert " over 4 pairs of texts" in numbers["sentence"]
    without = mh.patch(family("llama"), clean, clean.flip(0), measure, direction=direction)
    assert not without.has_gap
    seen.add(without)
    assert numbers_of(seen)["sentence"].endswith("so there is no share of their difference.")
    assert numbers_of(seen)["order"] == []


def test_a_record_of_other_layers_shows_the_heads_that_were_measured() -> None:
    seen, effects = record(), found()
    name = effects.layers[1].name
    one = Numbers(effects.statistic, {name: effects.effects_of_texts[name]})
    seen.add(one)
    numbers = numbers_of(seen)
    values = described(seen)["metrics"][numbers["id"]]
    assert values[:4] == numbers["errors"][:4] == [None] * 4
    assert sorted(numbers["order"]) == [4, 5, 6, 7]
    assert "of 4 heads" in numbers["sentence"]


def test_a_saved_record_shows_the_same_with_what_heads_do_together(tmp_path: Path) -> None:
    seen, effects = record(), found()
    seen.add(effects)
    add_together(seen, effects)
    seen.save(tmp_path / "a.safetensors")
    loaded = Record.load(tmp_path / "a.safetensors")
    assert loaded.statistics == seen.statistics
    assert described(loaded)["important"] == described(seen)["important"]
    together = numbers_of(loaded)["together"]
    assert together is not None
    assert together["heads"] == [7, 2]
    (_, value, error), (_, single, _), (_, random, spread) = together["rows"]
    assert (value, single, random) == pytest.approx((0.6, 0.3, 0.2))
    assert (error, spread) == pytest.approx((0.1 / 3**0.5, 0.02**0.5))


def test_profiles_of_before_the_numbers_were_added_make_a_page_without_the_panel(tmp_path: Path) -> None:
    seen = record()
    profiles = seen.profiles()
    seen.add(found())
    assert describe_sample(RecordedRun("a", seen), 0, profiles=profiles)["important"] == []
    write_report(seen, tmp_path / "page.html", profiles=profiles)
