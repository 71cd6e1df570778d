"""What a layer refuses of the newer ways to call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ShapeError
from multihead.packing import Packing

X = torch.randn(2, 5, 12)
TOKENS, PACKING = mh.pack(X, (5, 2))


class Absolute(nn.Module):
    """A position bias that speaks of absolute places."""

    of_distance = False

    def forward(self, queries: int, keys: int, **_: Any) -> torch.Tensor:
        return torch.zeros(1, 3, queries, keys)


REFUSED: dict[str, tuple[dict[str, Any], tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "a memory with a batch": (
        {},
        (X[0], X),
        {},
        ShapeError,
        "x has shape (5, 12) and memory has shape (2, 5, 12). Give all of them a batch, or none.",
    ),
    "other tokens than were packed": (
        {},
        (X,),
        {"packing": PACKING},
        ShapeError,
        "x has shape (2, 5, 12), and 7 tokens were packed. Give (1, 7, features), as mh.pack does.",
    ),
    "packed tokens with lengths": (
        {},
        (TOKENS,),
        {"packing": PACKING, "lengths": (7,)},
        ArgumentError,
        (
            "packing and lengths are both given. "
            "Packed tokens attend within their own samples: give packing alone, or unpack them first."
        ),
    ),
    "packed tokens with a memory": (
        {},
        (TOKENS, TOKENS.clone()),
        {"packing": PACKING},
        ArgumentError,
        (
            "packing and memory are both given. "
            "Packed tokens attend within their own samples: give packing alone, or unpack them first."
        ),
    ),
    "packed tokens with a cache": (
        {},
        (TOKENS,),
        {"packing": PACKING, "cache": mh.KeyValueCache()},
        ArgumentError,
        (
            "packing and cache are both given. "
            "Packed tokens attend within their own samples: give packing alone, or unpack them first."
        ),
    ),
    "a place that the cache knows": (
        {},
        (X,),
        {"cache": mh.KeyValueCache(), "query_start": 3},
        ArgumentError,
        "query_start is 3, and a cache is given, which knows the position of the next token. Leave query_start out.",
    ),
    "absolute places behind a window": (
        {"position_bias": Absolute()},
        (X,),
        {"cache": mh.KeyValueCache(window=4), "mask": masks.Causal() & masks.Window(4)},
        ArgumentError,
        (
            "The layer's position_bias depends on absolute positions, and a cache with a window drops the first ones. "
            "Give a cache that keeps all keys: KeyValueCache()."
        ),
    ),
    "another side": (
        {},
        (X,),
        {"lengths": (5, 2), "padding_side": "top"},
        ArgumentError,
        'padding_side is \'top\'. Give "right" or "left".',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_words(name: str) -> None:
    options, inputs, call, kind, sentence = REFUSED[name]
    with pytest.raises(kind) as refusal:
        mh.MultiHeadAttention(12, 3, **options)(*inputs, **call)
    assert str(refusal.value) == sentence


def test_one_sample_needs_no_batch() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    one, memory = X[0], torch.randn(4, 12)
    assert torch.equal(layer(one, mask=masks.Causal()), layer(one[None], mask=masks.Causal())[0])
    assert torch.equal(layer(one, memory), layer(one[None], memory[None])[0])
    assert torch.equal(layer(one, memory, memory * 2), layer(one[None], memory[None], memory[None] * 2)[0])
    assert torch.equal(layer(one, lengths=(3,)), layer(one[None], lengths=(3,))[0])


def test_packed_tokens_may_be_given_as_their_own_memory() -> None:
    layer = mh.MultiHeadAttention(12, 3)
    assert torch.equal(layer(TOKENS, TOKENS, packing=PACKING), layer(TOKENS, packing=PACKING))
    assert isinstance(PACKING, Packing)
