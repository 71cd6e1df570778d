"""A text grows token by token, is named by a tokenizer, and is unknown as a whole where a part is."""

from __future__ import annotations

import pytest
import torch

import multihead as mh
from multihead.errors import ArgumentError
from multihead.record.texts import GrowingText, Text
from tests.observation.recorded import Tokenizer, ids, read


def test_only_new_tokens_are_taken() -> None:
    reading = GrowingText()
    reading.append_ids(torch.tensor([1, 2]), start=0)
    reading.append_ids(torch.tensor([2, 3]), start=1)
    assert reading.text(3).ids.tolist() == [1, 2, 3]  # type: ignore[union-attr]
    assert reading.text(4).ids is None


@pytest.mark.parametrize("missing", [torch.tensor([5]), None])
def test_a_gap_makes_the_text_unknown(missing: torch.Tensor | None) -> None:
    reading = GrowingText()
    reading.append_ids(torch.tensor([1, 2]), start=0)
    reading.append_ids(missing, start=3)
    reading.append_ids(torch.tensor([4]), start=4)
    assert reading.text(5).ids is None


def test_a_part_of_a_text_is_a_text() -> None:
    part = Text(torch.tensor([4, 5, 6]), ["a", "b", "c"], [True, False, False], [None, " ", ""]).slice_tokens(1, 3)
    assert (part.ids.tolist(), part.tokens, part.special) == ([5, 6], ["b", "c"], [False, False])  # type: ignore[union-attr]
    assert part.gaps == [" ", ""]
    assert Text().slice_tokens(0, 2).length == 0


def test_a_tokenizer_names_the_tokens_of_all_texts() -> None:
    record = read(torch.tensor([[7, 3], [4, 4]]))
    assert [text.tokens for text in record.texts] == [None, None]
    record.name_tokens(Tokenizer())
    assert [text.tokens for text in record.texts] == [["<s>", "3"], ["4", "4"]]
    assert [text.special for text in record.texts] == [[True, False], [False, False]]


def test_the_gap_before_a_word_is_unknown_and_pieces_of_words_have_none() -> None:
    class Pieces(Tokenizer):
        def convert_ids_to_tokens(self, id_: int) -> str:
            return "##ll" if id_ == 3 else super().convert_ids_to_tokens(id_)

        def decode(self, many: list[int]) -> str:
            return super().decode(many).replace(" 3", "ll")

    record = read(torch.tensor([[7, 4, 3, 5]]))
    record.name_tokens(Pieces())
    assert (record.texts[0].tokens, record.texts[0].gaps) == (["<s>", "4", "ll", "5"], [None, "", "", None])
    record.name_tokens(Tokenizer())
    assert (record.texts[0].tokens, record.texts[0].gaps) == (["<s>", "4", "3", "5"], [None, "", None, None])


def test_a_tokenizer_given_to_observe_names_them_and_tells_its_marks() -> None:
    record = read(torch.tensor([[7, 3]]), tokenizer=Tokenizer())
    assert record.texts[0].tokens == ["<s>", "3"]
    sample = record.layers[0].sample()
    torch.testing.assert_close(sample.statistics["special_mass"], sample.weights()[..., 0])


def test_special_ids_alone_mark_the_tokens() -> None:
    record = read(torch.tensor([[7, 3, 7]]), special_ids=[7])
    assert record.texts[0].special == [True, False, True]


def test_a_text_may_be_given_where_ids_are_not_known() -> None:
    with mh.observe(layer := mh.MultiHeadAttention(8, 2)) as seen:
        layer(torch.randn(1, 2, 8))
    seen.set_text(Text(tokens=["a", "b"]))
    assert seen.texts[0].tokens == ["a", "b"]
    with pytest.raises(ArgumentError) as caught:
        seen.set_text(Text(tokens=["a"]))
    assert str(caught.value) == (
        "The text has 1 tokens, and no layer has as many keys in sample 0. "
        "Give the text that the model read, one token per key."
    )


def test_two_batches_are_texts_one_after_the_other() -> None:
    record = read(ids(2, 5), ids(1, 3))
    assert [text.length for text in record.texts] == [5, 5, 3]
