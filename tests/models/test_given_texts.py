"""Texts in every form in which people have them are recognised and encoded alike, and anything else is named."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import multihead as mh
from multihead.errors import ArgumentError, MultiheadError
from multihead.models.given_texts import encode_texts, recognise_texts
from multihead.models.loading import EncodedText, LoadedModel
from tests.errors.test_given import Column, Image
from tests.families import family

WORDS = ["<pad>", "<s>", "</s>", "<user>", "<reply>", "the", "key", "is", "under", "a", "door"]
TEMPLATE = "<s>{% for each in messages %} <{{ each.role }}> {{ each.content }}{% endfor %}"
CHAT = [{"role": "user", "content": "the key"}, {"role": "reply", "content": "a door"}]
TEXTS = ["the key", "the key is under a door"]
IDS = [[1, 5, 6], [1, 5, 6, 7, 8, 9, 10]]


def tokenizer(side: str = "right") -> Any:
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    marks = {"additional_special_tokens": ["<user>", "<reply>"]}
    found: Any = hf.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side=side, **marks
    )
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel("llama", "llama", family("llama"), tokenizer())


def encoded(loaded: LoadedModel, given: object) -> list[EncodedText]:
    return encode_texts(loaded, recognise_texts(given))


@pytest.mark.parametrize(
    "given",
    [
        TEXTS,
        tuple(TEXTS),
        np.array(TEXTS),
        IDS,
        [torch.tensor(each) for each in IDS],
        [TEXTS[0], IDS[1]],
        UserDict(input_ids=IDS),
        tokenizer("right")(TEXTS, padding=True, return_tensors="pt"),
        tokenizer("left")(TEXTS, padding=True, return_tensors="pt"),
        tokenizer("left")(TEXTS, padding=True),
    ],
    ids=lambda each: str(each)[:30],
)
def test_all_forms_of_two_texts_are_the_same_tokens(given: Any, loaded: LoadedModel) -> None:
    found = encoded(loaded, given)
    assert [each.ids.tolist() for each in found] == [[each] for each in IDS]
    assert [each.tokens[-1].strip() for each in found] == ["key", "door"]
    assert [each.special[0] for each in found] == [True, True]


def test_all_forms_of_one_text_are_one_text(loaded: LoadedModel) -> None:
    for given in (TEXTS[0], [TEXTS[0]], IDS[0], torch.tensor(IDS[0]), torch.tensor(IDS[:1]), {"input_ids": IDS[0]}):
        assert [each.ids.tolist() for each in encoded(loaded, given)] == [[IDS[0]]]


@pytest.mark.parametrize(
    ("given", "number"),
    [(CHAT, 1), ({"messages": CHAT}, 1), ([CHAT, CHAT[:1]], 2), ([{"messages": CHAT}, "the key"], 2), (CHAT[0], 1)],
)
def test_a_chat_is_written_by_the_template_with_one_start_token(given: Any, number: int, loaded: LoadedModel) -> None:
    found = encoded(loaded, given)
    assert len(found) == number
    assert found[0].ids[0].tolist()[:4] == [1, 3, 5, 6]
    assert found[0].special[:4] == [True, True, False, False]
    for chat, each in zip([given] if number == 1 else given, found, strict=True):
        assert each.ids[0].tolist().count(1) == 1, chat
    whole = loaded.tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    assert encoded(loaded, CHAT)[0].ids[0].tolist() == whole
    cut = encode_texts(loaded, recognise_texts(CHAT), tokens=4)[0]
    assert (cut.ids[0].tolist(), cut.text) == (whole[:4], "<s> <user> the key")


def test_the_segments_of_pairs_reach_the_model() -> None:
    loaded = LoadedModel("bert", "bert", family("bert"), tokenizer())
    batch = {"input_ids": [IDS[1], [*IDS[0], 0, 0, 0, 0]], "attention_mask": [[1] * 7, [1] * 3 + [0] * 4]}
    batch["token_type_ids"] = [[0] * 3 + [1] * 4, [0] * 7]
    first, second = map(loaded.arguments, encoded(loaded, batch))
    assert first["token_type_ids"].tolist() == [[0] * 3 + [1] * 4]
    assert "token_type_ids" not in second
    with torch.no_grad(), mh.observe(loaded.model) as right:
        loaded.model(**{name: torch.tensor(rows[:1]) for name, rows in batch.items()})
    seen = mh.look(loaded, batch, show=False)
    torch.testing.assert_close(seen.layers[0].weights(sample=0), right.layers[0].weights())


EXPECTED = "a text, a list of texts, chat messages, token ids or a batch of a tokenizer"
NO_STRING = 'Give a string, such as "The cat sat on the mat.".'
OWN_CALL = "with mh.observe(model) as seen: model"
BATCH = 'Give what tokenizer(texts, padding=True, return_tensors="pt") returns, or the texts themselves.'
IMAGE = f"Prepare it with the image processor of the model, and record a call: {OWN_CALL}(**batch)."


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (3, f"text is a value of type int, and must be {EXPECTED}. {NO_STRING}"),
        ([], f"text is a list of 0 items, and must be {EXPECTED}. {NO_STRING}"),
        (["a", None], f"text[1] is None, and must be {EXPECTED}. {NO_STRING}"),
        ([[5], []], f"text[1] is a list of 0 items, and must be {EXPECTED}. {NO_STRING}"),
        ({"text": "a"}, f"text is a dict, and must be {EXPECTED}. {NO_STRING}"),
        ((each for each in "ab"), f"text is a value of type generator, and must be {EXPECTED}. {NO_STRING}"),
        (b"a", f'text is bytes, and must be {EXPECTED}. Decode it, such as text.decode("utf-8").'),
        (
            Path("a.txt"),
            (
                f"text is a path, and must be {EXPECTED}. "
                'Give what the file contains, such as text.read_text(encoding="utf-8").'
            ),
        ),
        (Image(), f"text is an image, and must be {EXPECTED}. {IMAGE}"),
        ([Image()], f"text[0] is an image, and must be {EXPECTED}. {IMAGE}"),
        (
            torch.zeros(2, 3),
            (
                f"text is a tensor of shape (2, 3), and must be {EXPECTED}. "
                f"Give the text itself, or record your own call: {OWN_CALL}(tensor)."
            ),
        ),
        (
            UserDict(pixel_values=1),
            (
                f"text is a batch of an image processor, and must be {EXPECTED}. "
                f"Give the text itself, or record your own call: {OWN_CALL}(**batch)."
            ),
        ),
        (
            [CHAT[0], "a"],
            (
                "text[1] is a string, and must be a message of the chat. "
                'Give dicts such as {"role": "user", "content": "Hello"}.'
            ),
        ),
        (
            {"input_ids": [[5]], "position_ids": [[0]]},
            f"text is a batch with position_ids, which would not be read. Record your own call: {OWN_CALL}(**batch).",
        ),
        (
            {"input_ids": torch.zeros(1, 1, 2)},
            f"text is a batch of a tokenizer whose input_ids are not rows of token ids. {BATCH}",
        ),
        (
            {"input_ids": [[5, 6]], "attention_mask": [[1]]},
            (
                "text is a batch of a tokenizer whose attention_mask and token_type_ids have other shapes than "
                f"input_ids. {BATCH}"
            ),
        ),
        (
            {"input_ids": [[5, 6]], "attention_mask": [[0, 0]]},
            f"text is a batch of a tokenizer whose attention_mask hides all tokens. {BATCH}",
        ),
        (
            {"input_ids": [[5, 6, 7], [5, 6, 7]], "attention_mask": [[1, 1, 1], [1, 0, 1]]},
            f"text[1] is a batch of a tokenizer whose attention_mask hides tokens inside a text. {BATCH}",
        ),
        (" ", "The text is empty. Give at least one word."),
        (["a", " "], "Text 2 is empty. Give at least one word."),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else type(each).__name__,
)
def test_anything_else_is_one_sentence_before_any_work(given: Any, sentence: str) -> None:
    for function in (lambda: recognise_texts(given), lambda: mh.look("no-such-model", given, show=False)):
        with pytest.raises(MultiheadError) as caught:
            function()
        assert str(caught.value) == sentence


def test_without_a_text_and_a_picture_the_sentence_names_both() -> None:
    with pytest.raises(MultiheadError, match=r"^Neither text nor image was given\. Give text=, or image= to a model"):
        mh.look("no-such-model", None, show=False)
    with pytest.raises(MultiheadError, match=f"^text is None, and must be {EXPECTED}"):
        recognise_texts(None)


def test_a_column_of_a_table_is_a_list_of_texts() -> None:
    assert [each.text for each in recognise_texts(Column())] == ["The cat.", "The dog."]


def test_padding_without_a_mask_is_not_read_as_text(loaded: LoadedModel) -> None:
    for rows in ([[1, 5, 0], [1, 5, 6]], [[0, 1, 5], [1, 5, 6]]):
        with pytest.raises(ArgumentError) as caught:
            encoded(loaded, torch.tensor(rows))
        assert str(caught.value) == (
            "text[0] begins or ends with the padding token, id 0, and no attention_mask says so. "
            "Give the batch of the tokenizer, which has attention_mask, or lists of ids without padding."
        )
    ending = tokenizer()
    ending.pad_token = "</s>"  # as many language models have it: a text may end with it once
    model = LoadedModel("llama", "llama", loaded.model, ending)
    assert len(encoded(model, torch.tensor([[1, 5, 2], [1, 5, 6]]))) == 2
    with pytest.raises(ArgumentError, match="begins or ends with the padding token, id 2, and no attention_mask"):
        encoded(model, torch.tensor([[1, 2, 2], [1, 5, 6]]))


def test_a_chat_needs_a_template_that_takes_it(loaded: LoadedModel) -> None:
    bare = tokenizer()
    bare.chat_template = None
    with pytest.raises(ArgumentError) as caught:
        encoded(LoadedModel("llama", "llama", loaded.model, bare), CHAT)
    assert str(caught.value) == (
        "text is chat messages, and the tokenizer of llama has no chat template. "
        "Give a text, or set tokenizer.chat_template."
    )
    bare.chat_template = "{{ raise_exception('Roles must alternate.') }}"
    with pytest.raises(ArgumentError) as caught:
        encoded(LoadedModel("llama", "llama", loaded.model, bare), [CHAT, CHAT])
    assert str(caught.value) == (
        "The chat template of llama rejects text[0]: Roles must alternate. "
        'Give messages such as {"role": "user", "content": "Hello"}, in an order that the template allows.'
    )
