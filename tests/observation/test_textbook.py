"""Heads that copy are found on tokens that come again, where nothing else can be copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import InputError
from multihead.observation.textbook import TextbookHead, repeated_tokens, start_of, textbook_heads, words_of

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
def found() -> dict[str, list[TextbookHead]]:
    return textbook_heads(Copier(), range(1, WORDS), start=0, length=6, times=3)


def test_a_head_that_looks_up_what_followed_is_an_induction_head(found: dict[str, list[TextbookHead]]) -> None:
    first, second = found["induction"]
    assert (first.layer, first.head, second.head) == (0, 1, 0)
    assert first.share == pytest.approx(1, abs=1e-4)
    assert second.share == pytest.approx(0, abs=1e-4)


def test_a_head_that_looks_for_its_own_token_finds_it_as_often_as_it_was_there(
    found: dict[str, list[TextbookHead]],
) -> None:
    # The second time half of it lies on the first, the third time two thirds on both; the rest on the token itself.
    assert found["duplicate"][0].head == 0
    assert found["duplicate"][0].share == pytest.approx((1 / 2 + 2 / 3) / 2, abs=1e-4)


def test_every_head_is_ranked_for_every_kind(found: dict[str, list[TextbookHead]]) -> None:
    assert list(found) == ["induction", "duplicate", "previous", "first"]
    for heads in found.values():
        assert sorted(each.head for each in heads) == [0, 1]
        assert heads[0].share >= heads[1].share


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
        textbook_heads(Copier(), range(WORDS))
    assert str(caught.value) == (
        "The model knows 12 words, and 64 random ones are drawn. Give a model with a larger vocabulary, or draw fewer."
    )


class Tokens(SimpleNamespace):
    def __len__(self) -> int:
        return 6


def test_marks_are_no_words() -> None:
    assert words_of(Tokens(all_special_ids=[0, 2], added_tokens_decoder={5: "<added>"})) == [1, 3, 4]
    assert words_of(Tokens(all_special_ids=[0])) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("marks", "start"),
    [({"bos_token_id": 1, "cls_token_id": 7}, 1), ({"bos_token_id": None, "cls_token_id": 7}, 7), ({}, None)],
)
def test_a_text_begins_with_the_mark_that_the_model_knows(marks: dict[str, Any], start: int | None) -> None:
    assert start_of(SimpleNamespace(**marks)) == start
