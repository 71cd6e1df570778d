"""Heads that copy are found on tokens that come again, where nothing else can be copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, InputError, ProbeError
from multihead.observation.textbook import (
    DEFAULT_DRAWS,
    add_repeated,
    measure_repeated,
    repeated_tokens,
    start_token_id,
    word_token_ids,
)
from multihead.probes import DEFAULT
from multihead.record.analysis.highlights import findings
from multihead.record.layer import layer_profiles
from multihead.record.repeated import RepeatedTokens
from tests.families import family

WORDS = 12


class Copier(nn.Module):
    """Head 0 looks for the query's own token, head 1 for the token that followed it the last time."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = mh.MultiHeadAttention(embed_dim=2 * WORDS, num_heads=2, bias=False)
        same, before = torch.eye(2 * WORDS)[:WORDS], torch.eye(2 * WORDS)[WORDS:]
        with torch.no_grad():
            self.attention.q_proj.weight.copy_(torch.cat([same, same]) * 20)
            self.attention.k_proj.weight.copy_(torch.cat([same, before]) * 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        words = nn.functional.one_hot(input_ids, WORDS).float()
        told = torch.cat([words, nn.functional.pad(words, (0, 0, 1, -1))], -1)  # a token, and the one before it
        output: Tensor = self.attention(told, mask=masks.Causal())
        return output


@pytest.fixture(scope="module")
def found() -> RepeatedTokens:
    (measured,) = measure_repeated(Copier(), range(1, WORDS), start=0, length=6, times=3).values()
    return measured


def test_a_head_that_looks_up_what_followed_is_an_induction_head(found: RepeatedTokens) -> None:
    assert found.means()["repeated_induction"].tolist() == pytest.approx([0, 1], abs=1e-4)


def test_a_head_that_looks_for_its_own_token_finds_it_as_often_as_it_was_there(found: RepeatedTokens) -> None:
    # The second time half of it lies on the first, the third time two thirds on both; the rest on the token itself.
    assert float(found.means()["repeated_duplicate"][0]) == pytest.approx((1 / 2 + 2 / 3) / 2, abs=1e-4)


def test_the_seed_draws_the_texts_that_are_run() -> None:
    run: list[Tensor] = []
    model = Copier()
    model.register_forward_pre_hook(lambda _, __, inputs: run.append(inputs["input_ids"]), with_kwargs=True)
    measure_repeated(model, range(1, WORDS), length=6, seed=3)
    assert torch.equal(run[0], repeated_tokens(range(1, WORDS), length=6, seed=3))
    assert not torch.equal(run[0], repeated_tokens(range(1, WORDS), length=6))


def test_every_statistic_is_known_per_text_with_its_chance(found: RepeatedTokens) -> None:
    assert (found.length, found.times, found.start) == (6, 3, True)
    assert list(found.shares) == ["repeated_induction", "repeated_duplicate", "repeated_previous", "repeated_first"]
    assert all(shares.shape == (DEFAULT_DRAWS, 2) for shares in found.shares.values())
    # A start token and three runs of six: query i sees i + 1 keys, one copy in the second run and two in the third.
    of_copies = sum((1 if query < 13 else 2) / (query + 1) for query in range(7, 19)) / 12
    for name in ("repeated_induction", "repeated_duplicate"):
        assert found.chance[name].tolist() == pytest.approx([of_copies] * 2, abs=1e-12)
    assert float(found.chance["repeated_previous"][0]) == pytest.approx(sum(1 / n for n in range(2, 20)) / 18)
    assert float(found.chance["repeated_first"][0]) == pytest.approx(sum(1 / n for n in range(1, 20)) / 19)


def test_a_record_shows_what_was_measured_in_tables_searches_and_findings() -> None:
    model = Copier()
    with mh.observe(model) as seen:
        model(torch.arange(1, WORDS)[None])
    assert "repeated_induction" not in seen.table().rows[0]
    with pytest.raises(ProbeError) as caught:
        seen.find(repeated_induction=(0.5, None))
    assert str(caught.value) == (
        "The record has no numbers for 'repeated_induction'. It needs texts of repeated random tokens: "
        "look --textbook, or add_repeated in observation.textbook."
    )
    add_repeated(seen, measure_repeated(model, range(1, WORDS), start=0, length=6, times=3))
    assert {each.kind for each in seen.kinds("repeated_induction")} == {"repeated_induction"}
    with pytest.raises(ProbeError) as caught:
        seen.kinds("induction")
    assert str(caught.value) == (
        "The record has no numbers for 'induction'. It needs the statistic \"induction_mass\": "
        "probes=[..., \"induction_mass\"] of observe or census. The record has numbers for 'repeated_induction'."
    )
    with pytest.raises(ArgumentError) as mistaken:
        seen.kinds("induction on random repeats")
    assert str(mistaken.value) == ("There is no kind 'induction on random repeats'. It is called 'repeated_induction'.")
    assert seen.table().rows[1]["repeated_induction"] == pytest.approx(1, abs=1e-4)
    assert "repeated_induction" not in seen.table(of="median").rows[1]
    with pytest.raises(ProbeError) as caught:
        seen.find(repeated_induction=(0.5, None), of="median")
    assert str(caught.value) == (
        'repeated_induction is known per text, not per query, so it has only a mean. Give of="mean".'
    )
    (one,) = seen.find(repeated_induction=(0.5, None))
    assert str(one) == "L0 H1: induction on random repeats 100 %"
    assert [each.topic for each in findings(layer_profiles(seen.layers))] == [
        "repeated_induction",
        "repeated_duplicate",
    ]
    assert layer_profiles(seen.layers)[0].kinds[1][0] == "repeated_induction"


@pytest.mark.parametrize(
    ("name", "seed"),
    [*((name, 1) for name in ("bert", "gpt2", "llama", "t5", "modernbert", "gpt_oss")), ("bert", 0), ("llama", 0)],
)
def test_a_model_with_random_weights_has_no_finding(name: str, seed: int) -> None:
    model = family(name).base_model.eval()
    model = getattr(model, "encoder", model) if name == "t5" else model
    torch.manual_seed(seed)
    for module in model.modules():  # as the library initialises it: small weights, zero biases
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02 if seed else 0.2)
    with torch.no_grad(), mh.observe(model, probes=(*DEFAULT, "duplicate_mass", "induction_mass")) as seen:
        model(input_ids=torch.randint(3, 100, (1, 60)))
    add_repeated(seen, measure_repeated(model, range(3, 100), start=1, length=20, times=3))
    assert findings(layer_profiles(seen.layers)) == []
    assert all("repeated_induction" in one.means for one in layer_profiles(seen.layers))


def test_tokens_of_a_text_are_unlike_until_they_repeat() -> None:
    ids = repeated_tokens(range(10, 99), start=1, length=20, times=3, draws=5)
    assert ids.shape == (5, 61)
    assert (ids[:, 0] == 1).all()
    first, second, third = ids[:, 1:].split(20, dim=1)
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    assert all(len(set(row)) == 20 for row in first.tolist())
    assert not torch.equal(first[0], first[1])
    assert torch.equal(ids, repeated_tokens(range(10, 99), start=1, length=20, times=3, draws=5))


def test_without_a_start_token_there_is_none() -> None:
    assert repeated_tokens(range(100), length=4, times=2, draws=1).shape == (1, 8)


def test_too_few_words_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        measure_repeated(Copier(), range(WORDS))
    assert str(caught.value) == (
        "The model knows 12 words, and 64 random ones are drawn. Give a model with a larger vocabulary, or draw fewer."
    )


class Tokens(SimpleNamespace):
    def __len__(self) -> int:
        return 6


def test_marks_are_no_words() -> None:
    assert word_token_ids(Tokens(all_special_ids=[0, 2], added_tokens_decoder={5: "<added>"})) == [1, 3, 4]
    assert word_token_ids(Tokens(all_special_ids=[0])) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("marks", "start"),
    [({"bos_token_id": 1, "cls_token_id": 7}, 1), ({"bos_token_id": None, "cls_token_id": 7}, 7), ({}, None)],
)
def test_a_text_begins_with_the_mark_that_the_model_knows(marks: dict[str, Any], start: int | None) -> None:
    assert start_token_id(SimpleNamespace(**marks)) == start
