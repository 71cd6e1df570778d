"""Heads are named by thresholds, and the findings say in words what stands out."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.analysis.highlights import KINDS, MASS_SHARE, findings, kinds, layer_profiles, percent
from multihead.errors import ArgumentError
from tests.dense_record import random_weights, record_of

LENGTH = 60


def previous_head(share: float = 1.0) -> Tensor:
    """A head that puts `share` on the previous token and spreads the rest evenly."""
    even = torch.full((LENGTH, LENGTH), (1 - share) / LENGTH)
    back = torch.eye(LENGTH).roll(-1, 1)
    return even + share * back


def first_head(share: float = 1.0) -> Tensor:
    dense = torch.full((LENGTH, LENGTH), (1 - share) / LENGTH)
    dense[:, 0] += share
    return dense


def even_head() -> Tensor:
    return torch.full((LENGTH, LENGTH), 1 / LENGTH)


def band_head(reach: int) -> Tensor:
    offset = (torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]).abs()
    dense = (offset <= reach).float()
    return dense / dense.sum(-1, keepdim=True)


def last_head() -> Tensor:
    return first_head(0.8).flip(1)


SPECIAL = [True, *[False] * (LENGTH - 2), True]
TOKENS = ["[CLS]", *[f"word{i}" for i in range(LENGTH - 2)], "[SEP]"]


def a_record(**given: Any) -> Any:
    one = torch.stack((previous_head(), first_head(), even_head(), band_head(3)))
    two = torch.stack((last_head(), previous_head().T, torch.eye(LENGTH), previous_head(0.6)))
    return record_of(one, two, special=SPECIAL, **given)


def test_each_kind_is_told_from_its_pattern() -> None:
    read = layer_profiles(a_record().layers, special=SPECIAL)
    assert [one.kinds for one in read] == [
        ("previous", "first", "broad", "local"),
        ("separator", "next", "self", "previous"),
    ]


def test_a_head_that_passes_no_threshold_is_mixed() -> None:
    dense = (
        0.3 * previous_head()
        + 0.3 * first_head()
        + 0.2 * torch.eye(LENGTH).roll(20, 1)
        + 0.2 * torch.eye(LENGTH).roll(30, 1)
    )
    assert layer_profiles(record_of(dense[None]).layers)[0].kinds == ("mixed",)


def test_where_several_thresholds_hold_the_largest_share_names_the_head() -> None:
    dense = 0.55 * first_head() + 0.45 * previous_head()
    assert layer_profiles(record_of(dense[None]).layers)[0].kinds == ("first",)


def test_a_head_without_separators_has_no_such_kind() -> None:
    read = layer_profiles(a_record().layers, special=None)
    assert "separator" not in read[1].kinds
    assert "separator_mass" not in read[1].means


def test_an_even_head_in_a_short_text_is_broad_and_not_local() -> None:
    assert layer_profiles(record_of(torch.full((1, 6, 6), 1 / 6)).layers)[0].kinds == ("broad",)


def test_an_even_causal_head_is_broad() -> None:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    dense = seen / seen.sum(-1, keepdim=True)
    assert layer_profiles(record_of(dense[None].float(), seen=seen).layers)[0].kinds == ("broad",)


def test_cross_attention_is_never_named_after_a_place_in_another_text() -> None:
    dense = torch.eye(20, 30)[None].roll(-1, 2)
    read = layer_profiles(record_of(dense).layers)
    assert read[0].crosses
    assert read[0].kinds == ("mixed",)


def test_weights_that_are_not_a_number_name_no_head() -> None:
    shares = {"entropy": torch.tensor([math.nan]), "previous_mass": torch.tensor([math.nan])}
    assert kinds(shares, largest_entropy=torch.tensor([4.0]), near=torch.tensor([math.nan])) == ("mixed",)


def test_without_weights_local_heads_are_still_told_where_the_bound_says_so() -> None:
    read = layer_profiles(a_record(keep="statistics").layers, special=SPECIAL)
    assert read[0].kinds == ("previous", "first", "broad", "local")


def test_findings_name_at_most_six_heads_and_none_twice() -> None:
    found = findings(a_record().layers, tokens=TOKENS, special=SPECIAL)
    assert len(found) == 6
    assert len({(one.layer, one.head) for one in found}) == 6


def test_a_model_with_two_heads_gets_two_findings() -> None:
    assert len(findings(record_of(random_weights(2, 30, 30)).layers)) == 2


def test_the_strongest_previous_head_is_told_with_its_share() -> None:
    first = findings(a_record().layers, tokens=TOKENS, special=SPECIAL)[0]
    assert (first.topic, first.layer, first.head) == ("previous", 0, 0)
    assert first.sentence == "looks one token back: 100\u00a0% of its attention is on the previous token."
    assert first.count == "2 of 8 heads do so"
    assert str(first) == "layer 0 head 0: 100 % on the previous token"


def test_the_first_token_is_called_by_its_name() -> None:
    by_topic = {one.topic: one for one in findings(a_record().layers, tokens=TOKENS, special=SPECIAL)}
    assert by_topic["first"].sentence == "rests on [CLS]: 100\u00a0% of its attention is on the first token."
    assert by_topic["first"].count == "1 of 8 heads does so"
    nameless = {one.topic: one for one in findings(a_record().layers)}
    assert nameless["first"].sentence.startswith("rests on the first token: ")


def test_a_weak_head_is_not_said_to_pass() -> None:
    found = {one.topic: one for one in findings(record_of(random_weights(8, LENGTH, LENGTH, sharpness=1.0)).layers)}
    assert found["self"].value < MASS_SHARE
    assert found["self"].sentence.startswith("looks at itself the most: ")
    assert found["self"].count == "No head reaches the threshold of 35\u00a0%"


def test_a_causal_model_has_no_finding_about_the_next_token() -> None:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    found = findings(record_of(random_weights(8, LENGTH, LENGTH, seen=seen), seen=seen).layers)
    assert "next" not in {one.topic for one in found}
    assert len(found) == 6


def test_cross_attention_gives_no_finding_about_neighbours() -> None:
    found = findings(record_of(random_weights(4, 20, 30)).layers)
    assert {one.topic for one in found} <= {"first", "broad", "separator", "focused"}


def test_the_findings_speak_chinese() -> None:
    found = findings(a_record().layers, tokens=TOKENS, special=SPECIAL, lang="zh")
    assert found[0].sentence == "回看一个词元：前一个词元的权重占比为 100\u00a0%。"
    assert str(found[0]) == "第 0 层第 0 头：100 % 落在前一个词元上"


def test_an_unknown_language_is_refused() -> None:
    sentence = 'lang is "fr", and must be "en" or "zh". Give "en" or "zh".'
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        findings(a_record().layers, lang="fr")


def test_percentages_have_a_decimal_below_ten() -> None:
    assert [percent(share) for share in (0, 0.0132, 0.0994, 0.0996, 0.5, 1)] == [
        f"{text}\u00a0%" for text in ("0.0", "1.3", "9.9", "10", "50", "100")
    ]


def test_every_kind_can_be_named() -> None:
    places = {"previous", "next", "self", "first", "separator", "duplicate", "induction"}
    assert set(KINDS) == places | {"local", "broad", "mixed"}


@pytest.mark.parametrize("kind", ["duplicate", "induction"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_a_head_does_with_tokens_that_were_there_before_is_named_and_said(kind: str, lang: str) -> None:
    record = a_record()
    for layer in record.layers:
        layer.samples[0].statistics[f"{kind}_mass"] = torch.zeros(4, LENGTH)
    record.layers[1].samples[0].statistics[f"{kind}_mass"][3] = 0.9
    read = layer_profiles(record.layers)
    assert read[1].kinds[3] == kind
    found = next(each for each in findings(record.layers, profiles=read, lang=lang) if each.topic == kind)
    assert (found.layer, found.head, found.value) == (1, 3, pytest.approx(0.9))
    assert "90" in found.sentence
    assert "{" not in found.sentence + found.brief


def test_a_token_in_a_sentence_cannot_act_on_a_terminal_or_turn_the_text() -> None:
    tokens, special = ["\x1b[31m\u202e", *"abcd", "\x9b"], [True, *[False] * 4, True]
    weights = torch.full((3, 4, 6), 1 / 6)  # keys of another text: nothing is said of previous tokens and distances
    weights[:2] = 0.02
    weights[0, :, 0] = weights[1, :, 5] = 0.9
    found = {
        one.topic: one for one in findings(record_of(weights, special=special).layers, tokens=tokens, special=special)
    }
    assert found["first"].sentence.startswith("rests on \\x1b[31m\\u202e: ")
    assert str(found["separator"]) == "layer 0 head 1: 90 % on \\x9b"
