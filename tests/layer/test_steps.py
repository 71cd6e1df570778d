"""The steps around the attention, against rotations, caches and gates by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multihead import KeyValueCache, QKNorm, Rotary, masks
from multihead.errors import ArgumentError, ShapeError
from multihead.layer.arguments import KeysOfCall
from multihead.layer.packing import NO_PADDING, Padding
from multihead.layer.steps import (
    apply_gates,
    extend_cache,
    hold_memory,
    normalise_qk,
    position_of_first_query,
    prepend_learned_keys,
    rotate,
)

Q, K = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)


def padded(lengths: Any, *, in_one_row: bool) -> Padding:
    """Return the padding of 2 samples of 3 tokens."""
    x = torch.zeros(2, 3, 1)
    return Padding.of_call(x, x, lengths, None, in_one_row=in_one_row, intercepted=False)


def test_the_end_of_fewer_keys_than_queries_is_a_negative_position_of_each_sample() -> None:
    assert position_of_first_query("end", Q, 5) == 2
    assert torch.equal(position_of_first_query("end", Q, 1), torch.tensor([-2, -2]))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError) as refusal:
        position_of_first_query(None, Q, 5)
    assert str(refusal.value) == (
        "There are 3 queries and 5 keys, and the mask depends on positions. Give the position of the first query: "
        'query_start=0 (as torch\'s is_causal) or query_start="end" (decoding).'
    )


def test_keys_are_rotated_from_the_first_position_unless_they_are_the_same_tokens_as_the_queries() -> None:
    rotary, start = Rotary(), torch.tensor([4, 1])
    rows = start[:, None] + torch.arange(3)
    q, k = rotate(rotary, Q, K, start, same_tokens=False, keys_are_new=True)
    assert torch.equal(q, rotary.rotate(Q, rows))
    assert torch.equal(k, rotary.rotate(K, 0))
    _, k = rotate(rotary, Q, K, 4, same_tokens=True, keys_are_new=True)
    assert torch.equal(k, rotary.rotate(K, 4))
    places = padded((2, 1), in_one_row=True).positions
    assert places is not None
    assert places.tolist() == [[0, 1, 0]]
    q, k = rotate(rotary, Q, K, places, same_tokens=True, keys_are_new=True)
    assert torch.equal(q, rotary.rotate(Q, places))
    assert torch.equal(k, rotary.rotate(K, places))


def test_keys_of_a_cache_are_neither_normalised_nor_rotated_again() -> None:
    norms = QKNorm("rms").build(4, 2, 8)
    q, k = normalise_qk(norms, Q, K, keys_are_new=False)
    assert k is K
    assert torch.equal(q, norms(Q, K)[0])
    assert rotate(Rotary(), Q, K, 4, same_tokens=False, keys_are_new=False)[1] is K


def test_a_cache_returns_all_keys_and_the_mask_for_them() -> None:
    cache, lengths = KeyValueCache(), torch.tensor([3, 2])
    first = extend_cache(cache, K, K, masks.Causal(), padded(lengths, in_one_row=False))
    assert first.scales is None
    assert not torch.as_tensor(first.query_start).any()
    assert masks.picture(first.mask, queries=3, keys=3) == "■ · ·   ■ · ·\n■ ■ ·   ■ ■ ·\n■ ■ ■   · · ·"
    then = extend_cache(cache, 2 * K, K, masks.Causal(), NO_PADDING)
    assert torch.equal(torch.as_tensor(then.query_start), lengths)
    assert torch.equal(then.k[1, :, 2:5], 2 * K[1])
    assert then.v.shape == then.k.shape


def test_a_cache_keeps_the_memory_of_a_cross_attention() -> None:
    cache, keys = KeyValueCache(), KeysOfCall(K, K, masks.Full(), 0)
    first, again = (hold_memory(cache, Q, keys, NO_PADDING) for _ in range(2))
    assert (first.query_start, again.query_start) == (0, 0)
    assert again.k is first.k
    assert cache.query_start == 6


OUTPUT = torch.randn(2, 3, 4, 5)


@pytest.mark.parametrize("size", [(3,), (2, 3, 4), (1, 3, 1), (2, 1, 1)])
def test_a_gate_multiplies_what_its_head_gives(size: tuple[int, ...]) -> None:
    gates = torch.randn(size)
    expected = torch.einsum(
        "bhqd,bhq->bhqd", OUTPUT, gates.view(1, 3, 1).expand(2, 3, 4) if len(size) == 1 else gates.expand(2, 3, 4)
    )
    assert torch.allclose(apply_gates(OUTPUT, gates), expected)


def test_a_gate_keeps_the_dtype_of_what_it_multiplies() -> None:
    assert apply_gates(OUTPUT.bfloat16(), torch.ones(3)).dtype == torch.bfloat16


@pytest.mark.parametrize("size", [(2,), (3, 4), (2, 3, 5)])
def test_gates_that_do_not_fit_are_refused(size: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as refusal:
        apply_gates(OUTPUT, torch.ones(size))
    assert str(refusal.value) == (
        f"head_gates has shape {size}, and there are 3 heads. "
        "Give one factor per head: shape (3,), or one that broadcasts to (batch, heads, queries) = (2, 3, 4)."
    )


def test_a_learned_row_stands_before_all_others_in_each_sample() -> None:
    key = torch.randn(3, 5)
    whole = prepend_learned_keys(key, OUTPUT)
    assert torch.equal(whole[:, :, 1:], OUTPUT)
    assert torch.equal(whole[:, :, 0], key.expand(2, 3, 5))
