"""Heads are named by thresholds, and the findings say in words what stands out."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kinds import KINDS
from multihead.record.analysis.highlights import findings
from multihead.record.chance import ChanceComparison
from multihead.record.layer import layer_profiles
from multihead.record.profiles import kinds_of_heads
from multihead.record.repeated import RepeatedTokens
from multihead.record.texts import Text
from tests.dense_record import random_weights, record_of
from tests.viewer.watching import watch

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


def findings_of(layers: Any, special: Any = None, **options: Any) -> Any:
    return findings(layer_profiles(layers, special=special), special=special, **options)


def test_each_kind_is_told_from_its_pattern() -> None:
    read = layer_profiles(a_record().layers, special=SPECIAL)
    assert [one.kinds for one in read] == [
        (("previous",), ("first",), ("broad",), ("local",)),
        (("separator",), ("next",), ("self",), ("previous",)),
    ]


def test_a_head_that_passes_no_threshold_is_mixed() -> None:
    dense = (
        0.3 * previous_head()
        + 0.3 * first_head()
        + 0.2 * torch.eye(LENGTH).roll(20, 1)
        + 0.2 * torch.eye(LENGTH).roll(30, 1)
    )
    assert layer_profiles(record_of(dense[None]).layers)[0].kinds == (("mixed",),)


def test_a_head_has_every_kind_whose_threshold_it_reaches_the_largest_share_first() -> None:
    dense = 0.55 * first_head() + 0.45 * previous_head()
    assert layer_profiles(record_of(dense[None]).layers)[0].kinds == (("first", "previous"),)
    dense = 0.38 * first_head() + 0.62 * band_head(3)
    assert layer_profiles(record_of(dense[None]).layers)[0].kinds == (("first", "local"),)


def test_where_it_is_unknown_which_tokens_are_special_no_head_rests_on_separators() -> None:
    read = layer_profiles(a_record().layers, special=None)
    assert "separator" not in {kind for kinds in read[1].kinds for kind in kinds}
    assert "separator_mass" not in read[1].evidence


def test_an_even_head_in_a_short_text_is_broad_and_not_local() -> None:
    assert layer_profiles(record_of(torch.full((1, 6, 6), 1 / 6)).layers)[0].kinds == (("broad",),)


def test_an_even_causal_head_is_broad() -> None:
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    dense = seen / seen.sum(-1, keepdim=True)
    assert layer_profiles(record_of(dense[None].float(), seen=seen).layers)[0].kinds == (("broad",),)


def test_cross_attention_is_never_named_after_a_place_in_another_text() -> None:
    dense = torch.eye(20, 30)[None].roll(-1, 2)
    read = layer_profiles(record_of(dense).layers)
    assert read[0].cross_attention
    assert read[0].kinds == (("mixed",),)


def test_cross_attention_is_known_where_both_texts_have_one_length() -> None:
    record = watch(12)
    record.layers[0].samples[0].cross_attention = True
    (read,) = layer_profiles(record.layers)
    local = next(kind for kind in KINDS if kind.name == "local")
    assert (read.cross_attention, read.decides(local)) == (True, False)


def test_weights_that_are_not_a_number_name_no_head() -> None:
    names = ("entropy", "previous_mass", "near_mass")
    shares, some = (torch.tensor([value]) for value in (math.nan, 0.1))
    assert kinds_of_heads({name: ChanceComparison(shares, some, some, some) for name in names}, heads=1) == (
        ("mixed",),
    )
    assert kinds_of_heads({name: ChanceComparison(some, some, shares, some) for name in names}, heads=1) == (
        ("broad",),
    )


def test_local_heads_are_told_without_weights_too() -> None:
    read = layer_profiles(a_record(keep="statistics").layers, special=SPECIAL)
    assert read[0].kinds == (("previous",), ("first",), ("broad",), ("local",))


def with_repeated(record: Any, layer: int, **shares: float) -> Any:
    """Add statistics of four texts of repeated random tokens to head 3 of a layer."""
    one = record.layers[layer]
    measured = {name: torch.full((4, one.num_heads), 0.02, dtype=torch.float64) for name in shares}
    for name, share in shares.items():
        measured[name][:, 3] = share + torch.tensor([0.0, 0.01, -0.01, 0.0])
    chance = {name: torch.full((one.num_heads,), 0.011, dtype=torch.float64) for name in shares}
    one.repeated = RepeatedTokens(64, 3, True, measured, chance)
    return record


def test_findings_name_at_most_six_heads_and_none_twice() -> None:
    record = with_repeated(with_repeated(a_record(), 0, repeated_induction=0.9), 1, repeated_duplicate=0.8)
    found = findings_of(record.layers, tokens=TOKENS, special=SPECIAL)
    assert [one.topic for one in found] == [
        "repeated_induction",
        "previous",
        "next",
        "first",
        "repeated_duplicate",
        "self",
    ]
    assert len({(one.layer, one.head) for one in found}) == 6


def test_the_strongest_previous_head_is_named_with_its_share_and_chance() -> None:
    first = findings_of(a_record().layers, tokens=TOKENS, special=SPECIAL)[0]
    assert (first.topic, first.layer, first.head) == ("previous", 0, 0)
    assert first.chance == pytest.approx(1 / LENGTH)
    assert first.sentence == (
        "looks one token back: 100\u00a0% of its attention is on the previous token, where chance is 1.7\u00a0%."
    )
    assert first.count == "2 of 8 heads do so"
    assert str(first) == "layer 0 head 0: 100 % on the previous token (chance 1.7 %)"


@pytest.mark.parametrize(
    ("per_layer", "english", "chinese"),
    [
        ((1, 1, 1, 2), "5 of 20 heads do so, in 4 layers", "20 个头中有 5 个如此，分布在 4 层"),
        ((3, 3, 0, 0), "6 of 20 heads do so, in 2 layers", "20 个头中有 6 个如此，分布在 2 层"),
        ((1, 4, 1, 0), "6 of 20 heads do so, most of them in layer 1", "20 个头中有 6 个如此，多数在第 1 层"),
        ((0, 0, 5, 0), "5 of 20 heads do so", "20 个头中有 5 个如此"),
    ],
)
def test_a_layer_has_most_of_the_heads_only_where_it_has_more_than_half(
    per_layer: tuple[int, ...], english: str, chinese: str
) -> None:
    layers = [torch.stack([first_head()] * count + [even_head()] * (5 - count)) for count in per_layer]
    record = record_of(*layers)
    for lang, count in (("en", english), ("zh", chinese)):
        (found,) = (one for one in findings_of(record.layers, lang=lang) if one.topic == "first")
        assert found.count == count


def test_what_was_measured_on_repeated_random_tokens_is_a_kind_a_statistic_and_a_finding() -> None:
    record = with_repeated(a_record(), 0, repeated_induction=0.92)
    profile = layer_profiles(record.layers, special=SPECIAL)[0]
    assert profile.kinds[3] == ("repeated_induction", "local")
    assert float(profile.means["repeated_induction"][3]) == pytest.approx(0.92)
    row = profile.row(3)
    assert row["kind"] == "repeated_induction+local"
    assert row["repeated_induction_chance"] == 0.011
    found = findings([profile])[0]
    assert str(found) == "layer 0 head 3: induction, 92 % on repeated random tokens (chance 1.1 %)"


def test_a_share_that_varies_from_text_to_text_is_no_finding() -> None:
    record = with_repeated(a_record(), 0, repeated_induction=0.0)
    record.layers[0].repeated.shares["repeated_induction"][:, 3] = torch.tensor([1.0, 0.0, 0.9, 0.0])
    assert "repeated_induction" not in layer_profiles(record.layers)[0].kinds[3]


def test_the_first_token_is_called_by_its_name() -> None:
    by_topic = {one.topic: one for one in findings_of(a_record().layers, tokens=TOKENS, special=SPECIAL)}
    assert by_topic["first"].sentence == (
        "rests on “[CLS]”: 100\u00a0% of its attention is on the first token, where chance is 1.7\u00a0%."
    )
    assert by_topic["first"].count == "1 of 8 heads does so"
    nameless = {one.topic: one for one in findings_of(a_record().layers)}
    assert nameless["first"].sentence.startswith("rests on the first token: ")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sharpness", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "causal"])
def test_random_weights_give_no_finding(seed: int, sharpness: float, masked: bool) -> None:
    torch.manual_seed(seed)
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if masked else None
    layers = [random_weights(12, LENGTH, LENGTH, seen=seen, sharpness=sharpness) for _ in range(3)]
    assert findings_of(record_of(*layers, seen=seen, special=SPECIAL).layers, tokens=TOKENS, special=SPECIAL) == []


def test_an_even_spread_of_a_few_tokens_exceeds_no_chance() -> None:
    for length in range(1, 9):
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        dense = (seen / seen.sum(-1, keepdim=True)).float()
        assert findings_of(record_of(dense[None], seen=seen).layers) == []


def test_a_head_that_reaches_farther_than_an_even_spread_is_a_finding() -> None:
    dense = torch.zeros(1, LENGTH, LENGTH)
    for query in range(LENGTH):
        dense[0, query, [1, 2] if query > LENGTH // 2 else [LENGTH - 2, LENGTH - 3]] = 0.5
    (found,) = findings_of(record_of(dense).layers)
    assert found.topic == "distance"
    assert found.chance == pytest.approx((LENGTH**2 - 1) / 3 / LENGTH)
    assert str(found) == "layer 0 head 0: reaches farthest, 43 tokens from the query on average (chance 20)"
    assert found.count == "The mean over all heads is 43.0"


def test_several_texts_are_read_together_and_their_error_is_that_over_texts() -> None:
    record = record_of(previous_head()[None])
    sample = record.layers[0].samples[0]
    others = [record_of(even_head()[None]).layers[0].samples[0] for _ in range(3)]
    record.layers[0].samples = [sample, *others]
    one, together = (layer_profiles(record.layers, sample=which)[0] for which in (0, None))
    assert one.kinds == (("previous",),)
    assert float(together.means["previous_mass"]) == pytest.approx((1 + 3 / LENGTH) / 4, abs=1e-3)
    assert float(together.evidence["previous_mass"].standard_error) == pytest.approx((1 - 1 / LENGTH) / 4, abs=1e-6)
    assert together.kinds == (("mixed",),)


def test_cross_attention_gives_no_finding_about_neighbours() -> None:
    dense = torch.zeros(3, 20, 30)
    dense[0, :, 0] = dense[1, torch.arange(20), torch.arange(20)] = dense[2, :, 20] = 1
    assert {one.topic for one in findings_of(record_of(dense).layers)} == {"first"}


def test_the_findings_speak_chinese() -> None:
    found = findings_of(a_record().layers, tokens=TOKENS, special=SPECIAL, lang="zh")
    assert found[0].sentence == "回看一个词元：前一个词元的权重占比为 100\u00a0%，随机水平为 1.7\u00a0%。"
    assert str(found[0]) == "第 0 层第 0 头：100 % 落在前一个词元上（随机水平 1.7 %）"


def test_an_unknown_language_is_refused() -> None:
    sentence = 'lang is "fr", and must be "en" or "zh". Give "en" or "zh".'
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        findings_of(a_record().layers, lang="fr")


@pytest.mark.parametrize("kind", ["duplicate", "induction"])
@pytest.mark.parametrize("lang", ["en", "zh"])
def test_what_a_head_does_with_tokens_that_were_there_before_is_named_and_said(kind: str, lang: str) -> None:
    record = a_record()
    for layer in record.layers:
        layer.samples[0].statistics[f"{kind}_mass"] = torch.zeros(4, LENGTH)
        layer.samples[0].text = Text(torch.arange(LENGTH) % (LENGTH // 2))
    record.layers[1].samples[0].statistics[f"{kind}_mass"][3] = 0.9
    read = layer_profiles(record.layers)
    assert kind in read[1].kinds[3]
    found = next(each for each in findings(read, lang=lang) if each.topic == kind)
    assert (found.layer, found.head, found.value) == (1, 3, pytest.approx(0.9))
    assert "90" in found.sentence
    assert "{" not in found.sentence + found.brief


def test_a_token_in_a_sentence_cannot_act_on_a_terminal_or_turn_the_text() -> None:
    tokens, special = ["\x1b[31m\u202e", *"abcd", "\x9b"], [True, *[False] * 4, True]
    weights = torch.full((3, 4, 6), 1 / 6)  # keys of another text: nothing is said of previous tokens and distances
    weights[:2] = 0.02
    weights[0, :, 0] = weights[1, :, 5] = 0.9
    layers = record_of(weights, special=special).layers
    found = {one.topic: one for one in findings_of(layers, tokens=tokens, special=special)}
    assert found["first"].sentence.startswith("rests on “\\x1b[31m\\u202e”: ")
    assert str(found["separator"]) == "layer 0 head 1: 90 % on “\\x9b” (chance 17 %)"


def test_findings_over_several_texts_have_their_spread_and_the_number_of_texts() -> None:
    texts = [torch.stack((previous_head(share), even_head())) for share in (0.9, 0.6, 0.2)]
    record = record_of(texts[0])
    for each in texts[1:]:
        record.layers[0].samples.append(record_of(each).layers[0].samples[0])
    by_text = [layer_profiles(record.layers, sample=sample) for sample in range(3)]
    (first, *_) = findings(layer_profiles(record.layers, sample=None), by_text=by_text)
    assert (first.topic, first.layer, first.head) == ("previous", 0, 0)
    shares = torch.tensor([(1 - share) / LENGTH + share for share in (0.9, 0.6, 0.2)], dtype=torch.float64)
    assert first.value == pytest.approx(float(shares.mean()), abs=1e-6)
    assert first.over_texts is not None
    assert (first.over_texts.number, first.over_texts.having) == (3, 2)
    assert first.over_texts.spread == pytest.approx(float(shares.std()), abs=1e-6)
    assert first.over_texts.sentence == "in 2 of 3 texts, standard deviation 35\u00a0%"
    assert str(first).endswith("; in 2 of 3 texts, standard deviation 35\u00a0%")
