"""Check token ids against the embeddings of a model, before PyTorch raises an IndexError inside of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from multihead.errors import InputError


def check_token_ids(model: nn.Module, ids: Tensor, title: str) -> None:
    """Reject token ids for which a model has no embedding; models without known embeddings of their input accept all.

    Args:
        model: a model of transformers, or its decoder.
        ids: token ids of any shape, integers.
        title: name of the model for the error message.

    Raises:
        InputError: an id is negative, or not below the number of embeddings.
    """
    count = _count_embeddings(model)
    if count is None or not ids.numel():
        return
    least, most = (int(each) for each in ids.aminmax())
    if least >= 0 and most < count:
        return
    wrong = most if most >= count else least
    raise InputError(
        f"A token has the id {wrong:,}, and {title} has embeddings for the ids 0 to {count - 1:,}.",
        "Use the tokenizer of this model; for tokens that were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)), train them and save the model again.",
    )


def _count_embeddings(model: Any) -> int | None:
    """Return the number of embeddings of input ids; None if the main input is another one, such as audio."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    try:
        return int(model.get_input_embeddings().num_embeddings)
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None  # a model without such embeddings: of images, of hashed characters, or of the user
