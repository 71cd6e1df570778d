"""What people give in place of a text, a model, a tokenizer, batches or a path is named, with the way to use it."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multihead as mh
from multihead.errors import MultiheadError
from multihead.errors.given import check_batch, check_ids, check_module, check_path, check_tokenizer, reject_as_text


class Column:
    """A column of a table, as pandas and polars have it."""

    dtype, shape = "object", (2,)

    def to_list(self) -> list[str]:
        return ["The cat.", "The dog."]


class Image:
    """An image of PIL."""


Image.__module__ = "PIL.Image"

MESSAGES = [{"role": "user", "content": "Hi"}]
OWN_CALL = "with mh.observe(model) as seen: model"
ALL_OF_THEM = f"Give one of them per call, or record a batch of them: {OWN_CALL}(**batch)."
TENSOR = f"Give the text itself, or record your own call: {OWN_CALL}(tensor)."
IMAGE = f"Prepare it with the image processor of the model, and record a call: {OWN_CALL}(**batch)."
CHAT = (
    'Record the model\'s call on tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt"): '
    f"{OWN_CALL}(**batch)."
)
NO_STRING = 'Give a string, such as "The cat sat on the mat.".'
NO_TEXT: list[tuple[object, str, str]] = [
    (["The cat.", "The dog."], "a list of 2 texts", ALL_OF_THEM),
    (("The cat.",), "a tuple of 1 text", "Give one of them per call."),
    (Column(), "a column of 2 texts", ALL_OF_THEM),
    (MESSAGES, "chat messages", CHAT),
    ([MESSAGES], "chat messages", CHAT),
    ({"messages": MESSAGES}, "chat messages", CHAT),
    (torch.tensor([[5, 6]]), "a tensor of shape (1, 2)", TENSOR),
    (np.zeros((1, 2)), "an array of shape (1, 2)", TENSOR),
    ([5, 6], "a list of 2 token ids", TENSOR),
    (UserDict(input_ids=[[5, 6]]), "a batch of a tokenizer", TENSOR.replace("tensor", "**batch")),
    (Image(), "an image", IMAGE),
    ([Image()], "a list of 1 image", IMAGE),
    (Path("a.txt"), "a path", 'Give what the file contains, such as text.read_text(encoding="utf-8").'),
    (b"The cat.", "bytes", 'Decode it, such as text.decode("utf-8").'),
    (None, "None", NO_STRING),
    ({"text": "The cat."}, "a dict", NO_STRING),
    ([], "a list of 0 items", NO_STRING),
    (3, "a value of type int", NO_STRING),
    (torch.nn.Linear(1, 1), "a module (Linear)", NO_STRING),
]


@pytest.mark.parametrize(("given", "called", "mend"), NO_TEXT, ids=lambda each: str(each)[:20])
def test_what_is_no_text_is_named_with_the_way_to_use_it(given: object, called: str, mend: str) -> None:
    with pytest.raises(MultiheadError) as caught:
        reject_as_text("text", given)
    assert str(caught.value) == f"text is {called}, and must be one text (str). {mend}"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("bert", "The model is a string, not a module. Load it: multihead.models.load(name).model."),
        (Path("bert"), "The model is a path, not a module. Load it: multihead.models.load(name).model."),
        (None, "The model is None, not a module. Give a torch.nn.Module."),
        (torch.zeros(2), "The model is a tensor of shape (2,), not a module. Give a torch.nn.Module."),
    ],
)
def test_every_function_of_a_model_rejects_what_is_no_module(given: Any, sentence: str) -> None:
    functions: list[Callable[[], object]] = [
        lambda: check_module(given),
        lambda: mh.observe(given).__enter__(),
        lambda: mh.ablate(given, "L0 H0"),
        lambda: mh.scale_heads(given, {"L0 H0": 0.5}),
        lambda: mh.head_means(given, []),
        lambda: mh.Watch(given),
        lambda: mh.compat.torch_nn.replace(given),
    ]
    for function in functions:
        with pytest.raises(MultiheadError) as caught:
            function()
        assert str(caught.value) == sentence


def test_a_wrapper_of_a_model_is_rejected_with_its_module() -> None:
    class Pipeline:
        model = torch.nn.Linear(1, 1)

    with pytest.raises(MultiheadError) as caught:
        check_module(Pipeline())
    sentence = "The model is a value of type Pipeline, not a module. Give the module in it: .model."
    assert str(caught.value) == sentence


def test_what_is_no_tokenizer_is_rejected() -> None:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    functions: list[Callable[[], object]] = [
        lambda: check_tokenizer("bert"),
        lambda: mh.observe(layer, tokenizer="bert").__enter__(),
        lambda: mh.Record().name_tokens("bert"),
    ]
    for function in functions:
        with pytest.raises(MultiheadError) as caught:
            function()
        assert str(caught.value) == (
            "tokenizer is a string, and must be a tokenizer of transformers. "
            "Give transformers.AutoTokenizer.from_pretrained(folder)."
        )
    from tokenizers import Tokenizer, models

    with pytest.raises(MultiheadError) as caught:
        check_tokenizer(Tokenizer(models.BPE()))
    assert str(caught.value) == (
        "tokenizer is a value of type Tokenizer, and must be a tokenizer of transformers. "
        "Give transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)."
    )


ENCODE = 'Encode the texts first, such as tokenizer(texts, padding=True, return_tensors="pt").'
CALL = "Give what the model is called with: a dict of arguments, a tuple of them, or a tensor."


@pytest.mark.parametrize(
    ("batches", "finding", "mend"),
    [
        ("The cat.", "batches is a string", ENCODE),
        (["The cat."], "A batch is a string", ENCODE),
        ([["The cat.", "The dog."]], "A batch is a list of 2 texts", ENCODE),
        ([MESSAGES], "A batch is chat messages", ENCODE),
        ([Path("a")], "A batch is a path", ENCODE),
        ([[5, 6]], "A batch is a list of 2 token ids", CALL),
        ([None], "A batch is None", CALL),
        ([Image()], "A batch is an image", CALL),
        ([np.zeros(2)], "A batch is an array of shape (2,)", CALL),
        (None, "batches is None", CALL),
    ],
)
def test_batches_that_no_model_can_be_called_with_are_rejected(batches: Any, finding: str, mend: str) -> None:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    for function in (
        lambda: mh.head_means(layer, batches),
        lambda: mh.ablate(layer, "L0 H0", by="mean", reference=batches),
    ):
        if batches is not None:  # ablate has a sentence of its own for no reference
            with pytest.raises(MultiheadError) as caught:
                function()
            assert str(caught.value) == f"{finding}, and must be what the model is called with. {mend}"


def test_one_batch_need_not_be_in_a_list() -> None:
    layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.randn(2, 5, 8)
    (first,), (second,) = (mh.head_means(layer, each).vectors.values() for each in (x, [x]))
    assert torch.equal(first, second)
    assert torch.equal(next(iter(mh.head_means(layer, {"x": x}).vectors.values())), first)
    check_batch("A batch", (x,))


def test_token_ids_are_integers() -> None:
    assert check_ids("special_ids", torch.tensor([5, 6])) == (5, 6)
    for given, called in (("[CLS]", "a string"), ([[5]], "a list of 1 token id"), (5, "a value of type int")):
        with pytest.raises(MultiheadError) as caught:
            check_ids("special_ids", given)
        assert str(caught.value) == (
            f"special_ids is {called}, and must be a list of token ids. "
            "Give integers, such as tokenizer.all_special_ids."
        )


def functions_of_a_path(path: Any) -> Iterator[Callable[[], object]]:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with mh.observe(layer) as seen:
        layer(torch.randn(1, 5, 8))
    yield lambda: check_path("path", path)
    yield lambda: seen.save(path)
    yield lambda: seen.report(path)
    yield lambda: mh.Record.load(path)
    yield lambda: mh.Census.load(path)
    yield lambda: mh.HeadMeans.load(path)
    yield lambda: mh.HeadMeans({}, {}).save(path)
    yield lambda: mh.export.onnx.save(layer, path)


def test_what_is_no_path_is_rejected_before_a_file_is_written() -> None:
    for function in functions_of_a_path(["a"]):
        with pytest.raises(MultiheadError) as caught:
            function()
        assert str(caught.value).partition(" is ")[2] == (
            "a list of 1 text, and must be the name of a file or folder. Give a string or a pathlib.Path."
        )


def test_other_arguments_of_a_record_are_named() -> None:
    text = "a multihead.record.texts.Text. Call record.name_tokens(tokenizer), which names the tokens of all texts."
    replaces = "Give such a layer; multihead.compat.torch_nn.replace(model) takes a model with many of them."
    writes = "Write the texts to a .txt file, one per line, or a .parquet file, one per row, and give its name."
    record = "a record. Give what mh.observe, mh.look or Record.load returned."
    functions: list[tuple[Callable[[Any], object], str]] = [
        (lambda given: mh.Record().set_text(given), f"text is a string, and must be {text}"),
        (lambda given: mh.Record().name_text(given), f"text is a string, and must be {text}"),
        (lambda given: mh.Record().changed(given), f"after is a string, and must be {record}"),
        (lambda given: mh.Record().view(given), f"A further argument is a string, and must be {record}"),
        (lambda given: mh.Record.joined([given]), f"records is a string, and must be {record}"),
        (
            mh.compat.torch_nn.from_torch,
            f"module is a string, and must be an nn.MultiheadAttention. {replaces}",
        ),
        (
            lambda given: mh.census("no-such-model", [given, 3], out="census"),  # type: ignore[list-item]
            f"texts is a list of 2 texts, and must be the name of a file, or a list of names. {writes}",
        ),
    ]
    for function, sentence in functions:
        with pytest.raises(MultiheadError) as caught:
            function("other")
        assert str(caught.value) == sentence
