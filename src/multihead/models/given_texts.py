"""Recognise the texts that a user gives in one of many forms, and encode each of them as tokens of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from multihead.errors import ArgumentError
from multihead.errors.given import is_array, is_batch, is_chat, is_integer, items_of, reject_as_text, reject_given
from multihead.models.loading import (
    DescribedModel,
    EncodedText,
    check_length,
    check_text,
    encode,
    encode_ids,
    encode_template,
    no_tokenizer_error,
    silence_transformers,
)

EXPECTED = "a text, a list of texts, chat messages, token ids or a batch of a tokenizer"
_BATCH_ARGUMENTS = ("input_ids", "attention_mask", "token_type_ids")
# what tokenizers return besides, which says nothing about the call of the model
_NOT_READ = ("special_tokens_mask", "offset_mapping", "length", "overflow_to_sample_mapping", "num_truncated_tokens")


@dataclass(frozen=True)
class GivenText:
    """One text as it was given; one of the first three attributes is not None.

    Attributes:
        name: the argument or the item of a list that holds the text, such as "text[1]".
        text: the text itself.
        messages: the messages of a chat.
        ids: token ids, without padding.
        token_types: the segment of each token, for a pair of texts; None for one text.
        may_be_padded: whether `ids` are a row of a rectangle without a mask, so that its ends may be padding.
    """

    name: str
    text: str | None = None
    messages: list[Mapping[str, Any]] | None = None
    ids: list[int] | None = None
    token_types: list[int] | None = None
    may_be_padded: bool = False


def recognise_texts(given: object, name: str = "text") -> list[GivenText]:
    """Return the texts that a user gives, before anything is loaded or encoded.

    Args:
        given: a text, a chat (a list of messages, each a dict with "role"), token ids (a list, or a tensor of shape
            (tokens,) or (texts, tokens)), a list of such texts, or a batch of a tokenizer, whose `attention_mask` says
            what is padding.
        name: the argument that was given, for errors.

    Raises:
        ArgumentError: `given` is none of these; the sentence names what it is.
        InputError: a text is empty, or cannot be encoded as UTF-8.

    >>> [each.text for each in recognise_texts(["The cat.", "The dog."])]
    ['The cat.', 'The dog.']
    >>> [each.ids for each in recognise_texts({"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]]})]
    [[5, 6]]
    """
    if is_batch(given) and isinstance(given, Mapping) and "input_ids" in given:
        return list(_rows_of_batch(given, name))
    value: Any = given
    if is_array(given):
        value = value.tolist()
        if isinstance(value, list) and value and isinstance(value[0], list):
            rows = [_ids_of(row, name, given) for row in value]
            several = len(rows) > 1
            return [replace(row, name=f"{name}[{place}]", may_be_padded=several) for place, row in enumerate(rows)]
    items = items_of(value)
    if isinstance(value, str) or is_chat_of_messages(value) or not items or is_integer(items[0]):
        return [_recognise_text(value, name, given)]
    called = names_of_texts(len(items))
    return [_recognise_text(item, f"{name}[{place}]", item, called[place]) for place, item in enumerate(items)]


def encode_texts(loaded: DescribedModel, given: Sequence[GivenText], *, tokens: int | None = None) -> list[EncodedText]:
    """Encode texts as the tokens of a model; each is the text alone, without padding.

    A chat is written by the template of the tokenizer, which has the special tokens, so none are added.

    Args:
        loaded: the model, whose weights need not be loaded yet.
        given: the result of `recognise_texts`.
        tokens: truncate each text to this many tokens, special tokens included; None does not truncate.

    Raises:
        InputError: a text has no token, or is longer than the model accepts.
        ArgumentError: `tokens` is too small, the tokenizer has no chat template or rejects a chat, or ids are padded.
        ModelError: the model has no tokenizer.
    """
    if loaded.tokenizer is None:
        raise no_tokenizer_error(loaded)
    called = names_of_texts(len(given))
    return [_encode_text(loaded, each, tokens, phrase) for each, phrase in zip(given, called, strict=True)]


def names_of_texts(number: int) -> list[str]:
    """Return the phrases with which errors name each of some texts, from "Text 1"; "The text" if there is one."""
    return ["The text"] if number == 1 else [f"Text {place}" for place in range(1, number + 1)]


def _recognise_text(value: object, name: str, given: object, called: str = "The text") -> GivenText:
    """Recognise one text; an error names `given`, or the text `called`."""
    if isinstance(value, str):
        check_text(value, name, called)
        return GivenText(name, text=value)
    if is_chat_of_messages(value):
        return GivenText(name, messages=_messages_of(value, name))
    if is_array(value):
        value = value.tolist()  # type: ignore[attr-defined]
    return _ids_of(list(items_of(value) or []), name, given)


def is_chat_of_messages(value: object) -> bool:
    """Whether a value is one chat: a message, a list of messages, or a dict with such a list."""
    if isinstance(value, (list, tuple)):
        return bool(value) and isinstance(value[0], Mapping) and "role" in value[0]
    return isinstance(value, Mapping) and is_chat(value)


def _messages_of(value: Any, name: str) -> list[Mapping[str, Any]]:
    """Return the messages of a chat.

    Raises:
        ArgumentError: an item is not a message.
    """
    messages = value.get("messages", [value]) if isinstance(value, Mapping) else value
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            reject_given(
                f"{name}[{place}]",
                message,
                "a message of the chat",
                'Give dicts such as {"role": "user", "content": "Hello"}.',
            )
    return list(messages)


def _ids_of(row: object, name: str, given: object) -> GivenText:
    if not isinstance(row, list) or not row or not all(map(is_integer, row)):
        reject_as_text(name, given, EXPECTED)
    return GivenText(name, ids=row)


def _rows_of_batch(batch: Mapping[str, Any], name: str) -> Iterator[GivenText]:
    """Yield the texts of a batch of a tokenizer, without its padding.

    Raises:
        ArgumentError: the batch has other arguments of a model, or its tensors do not fit together.
    """
    others = [key for key in batch if key not in (*_BATCH_ARGUMENTS, *_NOT_READ)]
    if others:
        raise ArgumentError(
            f"{name} is a batch with {' and '.join(map(str, others))}, which would not be read.",
            "Record your own call: with mh.observe(model) as seen: model(**batch).",
        )
    ids, masks, types = (_rows(batch.get(key)) for key in _BATCH_ARGUMENTS)
    if not ids:
        _reject_batch(name, "input_ids are not rows of token ids")
    for place, row in enumerate(ids):
        called = name if len(ids) == 1 else f"{name}[{place}]"
        mask, of_type = (None if rows is None else rows[place : place + 1] for rows in (masks, types))
        known = [each for each in (mask, of_type) if each is not None]
        if any(not each or len(each[0]) != len(row) for each in known):
            _reject_batch(name, "attention_mask and token_type_ids have other shapes than input_ids")
        read = [bool(each) for each in mask[0]] if mask else [True] * len(row)
        first, stop = (read.index(True), len(read) - read[::-1].index(True)) if any(read) else (0, 0)
        if first == stop or not all(read[first:stop]):
            _reject_batch(called, "attention_mask hides " + ("all tokens" if first == stop else "tokens inside a text"))
        found = _ids_of(row[first:stop], called, batch)
        segments = of_type[0][first:stop] if of_type and any(of_type[0][first:stop]) else None
        yield replace(found, token_types=segments, may_be_padded=mask is None and len(ids) > 1)


def _rows(value: Any) -> list[list[Any]] | None:
    """Return a tensor or a list of shape (tokens,) or (texts, tokens) as rows; [] for another shape."""
    if value is None:
        return None
    rows = value.tolist() if is_array(value) else [each.tolist() if is_array(each) else each for each in value]
    if rows and not isinstance(rows[0], list):
        rows = [rows]
    return (
        rows if all(isinstance(row, list) and not any(isinstance(each, list) for each in row) for row in rows) else []
    )


def _reject_batch(name: str, finding: str) -> NoReturn:
    raise ArgumentError(
        f"{name} is a batch of a tokenizer whose {finding}.",
        'Give what tokenizer(texts, padding=True, return_tensors="pt") returns, or the texts themselves.',
    )


def _encode_text(loaded: DescribedModel, given: GivenText, tokens: int | None, called: str) -> EncodedText:
    if given.text is not None:
        return encode(loaded, given.text, tokens=tokens, called=called)
    if given.messages is not None:
        encoded = encode_template(loaded, _write_chat(loaded, given), tokens=tokens)
    else:
        assert given.ids is not None
        _check_unpadded(loaded, given)
        encoded = encode_ids(loaded, given.ids[:tokens])
        if given.token_types is not None:
            encoded = replace(encoded, token_types=torch.tensor([given.token_types[:tokens]]))
    check_length(loaded, encoded.ids.shape[1], called)
    return encoded


def _write_chat(loaded: DescribedModel, given: GivenText) -> str:
    """Write a chat as one text by the template of the tokenizer.

    Raises:
        ArgumentError: the tokenizer has no template, or its template rejects the messages.
    """
    tokenizer = loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise ArgumentError(
            f"{given.name} is chat messages, and the tokenizer of {loaded.title} has no chat template.",
            "Give a text, or set tokenizer.chat_template.",
        )
    try:
        with silence_transformers():
            return str(tokenizer.apply_chat_template(given.messages, tokenize=False))
    except Exception as error:  # a template is code of a model's author, and may raise anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ArgumentError(
            f"The chat template of {loaded.title} rejects {given.name}: {reason}.",
            'Give messages such as {"role": "user", "content": "Hello"}, in an order that the template allows.',
        ) from error


def _check_unpadded(loaded: DescribedModel, given: GivenText) -> None:
    """Reject a row of several that ends or begins with padding which no mask marks.

    Raises:
        ArgumentError: there is such padding.
    """
    tokenizer, ids = loaded.tokenizer, given.ids or []
    pad = getattr(tokenizer, "pad_token_id", None)
    if not given.may_be_padded or pad is None:
        return
    # The padding token of many language models is also their end or start token, which a text has once.
    number = 2 if pad in (tokenizer.eos_token_id, tokenizer.bos_token_id) else 1
    if [pad] * number in (ids[:number], ids[-number:]):
        raise ArgumentError(
            f"{given.name} begins or ends with the padding token, id {pad}, and no attention_mask says so.",
            "Give the batch of the tokenizer, which has attention_mask, or lists of ids without padding.",
        )
