"""What a layer refuses of the newer ways to call it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError, ShapeError
from multihead.kernels.call import AttentionCall, listen
from multihead.layer.packing import Packing
from multihead.scores import ALiBi, RelativeBias, T5Bias
from multihead.scores.bias import offsets


class Calls:
    """A listener that keeps what it hears."""

    requested_statistics: frozenset[Any] = frozenset()

    def __init__(self) -> None:
        self.heard: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.heard.append(call)


X = torch.randn(2, 5, 12)
TOKENS, PACKING = mh.pack(X, (5, 2))


class Absolute(nn.Module):
    """A position bias of one's own that depends on the position of the key, and does not mention it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 20) * 2)

    def forward(self, queries: int, keys: int, **_: Any) -> torch.Tensor:
        return self.weight[None, :, None, :keys].expand(1, -1, queries, -1)


class Distance(nn.Module):
    """A position bias of one's own that depends on the distance alone; of this it says nothing but its result."""

    def forward(self, queries: int, keys: int, *, query_start: int | torch.Tensor = 0, **_: Any) -> RelativeBias:
        return RelativeBias(-offsets(queries, keys, query_start=query_start)[:, None].abs().float() / 3)


class Mistaken(ALiBi):
    """A subclass that keeps `of_distance = True`, and returns a tensor."""

    def forward(self, queries: int, keys: int, **_: Any) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(1, 3, queries, keys)


class Bare(nn.Module):
    """A position bias without the keywords."""

    def forward(self, queries: int, keys: int) -> torch.Tensor:
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
            "The layer's position_bias returned a Tensor, which may depend on absolute positions, and a cache with a "
            "window drops the first ones. Return a scores.RelativeBias if only the distance matters, or give a cache "
            "that keeps all keys: KeyValueCache()."
        ),
    ),
    "a packed row with a bias that only says that it depends on the distance": (
        {"position_bias": Mistaken(3)},
        (X,),
        {"lengths": (5, 2)},
        ArgumentError,
        (
            "The layer's position_bias has of_distance = True, and returned a Tensor. "
            "Return a scores.RelativeBias, or set of_distance = False."
        ),
    ),
    "a position bias whose forward takes no keywords": (
        {"position_bias": Bare()},
        (X,),
        {},
        ArgumentError,
        (
            "position_bias is a Bare, whose forward does not take the positions of a call: "
            "got an unexpected keyword argument 'query_start'. "
            "Define forward(self, queries, keys, *, query_start=0, device=None, dtype=None)."
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


@pytest.mark.parametrize("packed", [False, True], ids=["lengths", "packing"])
@pytest.mark.parametrize("position_bias", [Absolute(), Distance(), ALiBi(3)], ids=lambda each: type(each).__name__)
def test_a_padded_sample_has_the_position_bias_that_it_has_alone(position_bias: nn.Module, packed: bool) -> None:
    layer = mh.MultiHeadAttention(12, 3, position_bias=position_bias)
    x, lengths = torch.randn(3, 12, 12), (12, 5, 8)
    if packed:
        tokens, packing = mh.pack(x, lengths)
        output = mh.unpack(layer(tokens, mask=masks.Causal(), packing=packing), packing)
    else:
        output = layer(x, mask=masks.Causal(), lengths=lengths)
    for sample, length in enumerate(lengths):
        alone = layer(x[sample : sample + 1, :length], mask=masks.Causal())[0]
        torch.testing.assert_close(output[sample, :length], alone, atol=1e-5, rtol=1e-5)


def test_a_bias_by_distance_works_in_a_cache_with_a_window() -> None:
    layer, x = mh.MultiHeadAttention(12, 3, position_bias=Distance()), torch.randn(2, 12, 12)
    mask, cache = masks.Causal() & masks.Window(4), mh.KeyValueCache(window=4)
    steps = [layer(step, mask=mask, cache=cache) for step in x.split(1, 1)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x, mask=mask), atol=1e-5, rtol=1e-5)


def test_samples_stay_in_one_row_where_the_bias_says_that_only_the_distance_matters() -> None:
    for position_bias, rows in ((ALiBi(3), 1), (T5Bias(3), 1), (Absolute(), 2)):
        layer = mh.MultiHeadAttention(12, 3, position_bias=position_bias)
        with listen(calls := Calls()):
            layer(X, mask=masks.Causal(), lengths=(5, 2))
        assert [call.request.shape.batch for call in calls.heard] == [rows]


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
