"""Name what was given in place of a text, a model, a tokenizer, batches or a path, and state how to use it.

This module imports no package that defines such objects, so it recognises them by their attributes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from multihead.errors import ArgumentError, ModelError

_IN_OBSERVE = "with mh.observe(model) as seen: model({})"

PIXELS = "pixel_values"
"""Name of the input of a Hugging Face model that has pictures."""


def name_given(value: object) -> str:
    """Return a phrase for a value that was given: what it holds where that is known, else its type.

    >>> name_given(["The cat.", "The dog."]), name_given({"input_ids": [[5, 6]]}), name_given(3)
    ('a list of 2 texts', 'a batch of a tokenizer', 'a value of type int')
    """
    kind = type(value).__name__
    if value is None:
        return "None"
    if isinstance(value, (str, bytes, bytearray)):
        return "a string" if isinstance(value, str) else kind
    if isinstance(value, os.PathLike):
        return "a path"
    if _is_image(value):
        return "an image"
    if is_batch(value):
        return "a batch of a tokenizer" if "input_ids" in value else "a batch of an image processor"  # type: ignore[operator]
    if is_chat(value):
        return "chat messages"
    if isinstance(value, Mapping):
        return "a dict"
    if is_array(value):
        shape = tuple(value.shape)  # type: ignore[attr-defined]
        return f"{'a tensor' if kind in ('Tensor', 'Parameter') else 'an array'} of shape {shape}"
    if _is_module(value):
        return f"a module ({kind})"
    items = items_of(value)
    if items is None:
        return f"a value of type {kind}"
    noun = "item"
    if items:
        noun = "text" if isinstance(items[0], str) else "image" if _is_image(items[0]) else noun
        noun = "token id" if _are_ids(items) else noun
    container = kind if kind in ("list", "tuple") else "column"
    return f"a {container} of {len(items)} {noun}{'' if len(items) == 1 else 's'}"


def reject_as_text(name: str, value: object, expected: str = "one text (str)") -> NoReturn:
    """Raise an ArgumentError for a value that is given in place of one text, or of what else is `expected`.

    >>> reject_as_text("text", b"The cat.")
    Traceback (most recent call last):
    multihead.errors.ArgumentError: text is bytes, and must be one text (str). Decode it, such as text.decode("utf-8").
    """
    items = items_of(value)
    if isinstance(value, (bytes, bytearray)):
        mend = f'Decode it, such as {name}.decode("utf-8").'
    elif isinstance(value, os.PathLike):
        mend = f'Give what the file contains, such as {name}.read_text(encoding="utf-8").'
    elif is_batch(value):
        mend = f"Give the text itself, or record your own call: {_IN_OBSERVE.format('**batch')}."
    elif is_chat(value):
        mend = "Record the model's call on tokenizer.apply_chat_template(messages, return_dict=True, "
        mend += f'return_tensors="pt"): {_IN_OBSERVE.format("**batch")}.'
    elif _is_image(value) or (items and _is_image(items[0])):
        mend = f"Prepare it with the image processor of the model, and record a call: {_IN_OBSERVE.format('**batch')}."
    elif is_array(value) or (items and _are_ids(items)):
        mend = f"Give the text itself, or record your own call: {_IN_OBSERVE.format('tensor')}."
    elif items and isinstance(items[0], str):
        mend = "Give one of them per call"
        mend += f", or record a batch of them: {_IN_OBSERVE.format('**batch')}." if len(items) > 1 else "."
    else:
        mend = 'Give a string, such as "The cat sat on the mat.".'
    reject_given(name, value, expected, mend)


def reject_given(name: str, value: object, expected: str, mend: str) -> NoReturn:
    """Raise an ArgumentError for an argument of another type than expected."""
    raise ArgumentError(f"{name} is {name_given(value)}, and must be {expected}.", mend)


def check_module(model: object) -> None:
    """Reject what is no module.

    >>> check_module("bert")
    Traceback (most recent call last):
    multihead.errors.ModelError: The model is a string, not a module. Load it: multihead.models.load(name).model.
    """
    if _is_module(model):
        return
    if _is_module(getattr(model, "model", None)):
        mend = "Give the module in it: .model."  # what `multihead.models.load` returns, or a pipeline of transformers
    elif isinstance(model, (str, os.PathLike)):
        mend = "Load it: multihead.models.load(name).model."
    else:
        mend = "Give a torch.nn.Module."
    raise ModelError(f"The model is {name_given(model)}, not a module.", mend)


def check_tokenizer(tokenizer: object, *, calls: bool = True) -> None:
    """Reject what is no tokenizer of transformers; `calls` is whether texts are encoded with it."""
    names = ("all_special_ids", "convert_ids_to_tokens", "decode", *(["__call__", "get_vocab"] if calls else []))
    if all(hasattr(tokenizer, name) for name in names):
        return
    mend = "Give transformers.AutoTokenizer.from_pretrained(folder)."
    if type(tokenizer).__module__.partition(".")[0] == "tokenizers":
        mend = "Give transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)."
    reject_given("tokenizer", tokenizer, "a tokenizer of transformers", mend)


def check_batch(name: str, batch: object) -> None:
    """Reject a batch that no model can be called with: a text, ids in a list, an image, a path and the like."""
    items = items_of(batch)
    if isinstance(batch, (str, bytes, os.PathLike)) or (items and isinstance(items[0], str)) or is_chat(batch):
        mend = 'Encode the texts first, such as tokenizer(texts, padding=True, return_tensors="pt").'
    elif batch is None or _is_image(batch) or isinstance(batch, (int, float, list)) or _is_foreign_array(batch):
        mend = "Give what the model is called with: a dict of arguments, a tuple of them, or a tensor."
    else:
        return
    reject_given(name, batch, "what the model is called with", mend)


def check_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Return token ids as integers; reject what are none.

    >>> check_ids("special_ids", [101, 102])
    (101, 102)
    """
    found = ids.tolist() if is_array(ids) else ids
    if isinstance(found, (str, bytes, Mapping)) or not isinstance(found, Iterable):
        found = None
    numbers = [] if found is None else list(found)
    if found is None or not all(is_integer(each) for each in numbers):
        reject_given(name, ids, "a list of token ids", "Give integers, such as tokenizer.all_special_ids.")
    return tuple(numbers)


def check_path(name: str, path: object) -> None:
    """Reject what is neither a string nor a path object."""
    if not isinstance(path, str) and not (isinstance(path, os.PathLike) and isinstance(os.fspath(path), str)):
        reject_given(name, path, "the name of a file or folder", "Give a string or a pathlib.Path.")


def items_of(value: object) -> Sequence[Any] | None:
    """Return the items of a list, a tuple or a column of a table; None for any other value."""
    if isinstance(value, (list, tuple)):
        return value
    to_list = getattr(value, "to_list", None) or getattr(value, "to_pylist", None)  # pandas and polars; pyarrow
    found = to_list() if callable(to_list) else None
    if found is None and isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray)):
        found = list(value)
    return found if isinstance(found, list) else None


def _is_module(value: object) -> bool:
    return callable(getattr(value, "named_modules", None))


def is_batch(value: object) -> bool:
    """Whether a value is a batch of a tokenizer or an image processor."""
    return hasattr(value, "keys") and any(key in value for key in ("input_ids", PIXELS))  # type: ignore[operator]


def is_chat(value: object) -> bool:
    """Whether a value is a chat message, a list of them, a batch of such lists, or a dict with such a list."""
    if isinstance(value, Mapping):
        return "role" in value or is_chat(value.get("messages"))
    return isinstance(value, (list, tuple)) and bool(value) and is_chat(value[0])


def _is_image(value: object) -> bool:
    return any(each.__module__.partition(".")[0] == "PIL" for each in type(value).__mro__)


def is_array(value: object) -> bool:
    """Whether a value is a tensor or an array."""
    is_column = hasattr(value, "to_list")
    return hasattr(value, "dtype") and isinstance(getattr(value, "shape", None), tuple) and not is_column


def _is_foreign_array(value: object) -> bool:
    """Whether a value is an array, or a scalar of one, of another library than PyTorch."""
    return type(value).__module__.partition(".")[0] in ("numpy", "pyarrow", "pandas", "polars", "jax", "tensorflow")


def _are_ids(items: Sequence[Any]) -> bool:
    """Whether the items are integers, or lists of integers."""
    first = items[0]
    if isinstance(first, (list, tuple)):
        return bool(first) and _are_ids(first)
    return is_integer(first)


def is_integer(value: object) -> bool:
    """Whether a value is an integer, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
