"""Positions of queries and keys, against rotations and caches by hand."""

from __future__ import annotations

import pytest
import torch

from multihead import KeyValueCache, QKNorm, Rotary, masks
from multihead.errors import ArgumentError
from multihead.layer.positions import extend, first_position, normalise, rotate
from multihead.packing import NO_PADDING, Padding

Q, K = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)


def test_the_end_of_fewer_keys_than_queries_is_a_negative_position_of_each_sample() -> None:
    assert first_position("end", Q, 5) == 2
    assert torch.equal(first_position("end", Q, 1), torch.tensor([-2, -2]))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError) as refusal:
        first_position(None, Q, 5)
    assert str(refusal.value) == (
        "There are 3 queries and 5 keys, and the mask depends on positions. Give the position of the first query: "
        'query_start=0 (as torch\'s is_causal) or query_start="end" (decoding).'
    )


def test_keys_are_rotated_from_the_first_position_unless_they_are_the_same_tokens_as_the_queries() -> None:
    rotary, start = Rotary(), torch.tensor([4, 1])
    rows = start[:, None] + torch.arange(3)
    q, k = rotate(rotary, Q, K, start, None, same=False, fresh=True)
    assert torch.equal(q, rotary.rotate(Q, rows))
    assert torch.equal(k, rotary.rotate(K, 0))
    _, k = rotate(rotary, Q, K, 4, None, same=True, fresh=True)
    assert torch.equal(k, rotary.rotate(K, 4))
    positions = torch.tensor([[0, 1, 0]])  # of two packed samples
    q, k = rotate(rotary, Q, K, 0, positions, same=True, fresh=True)
    assert torch.equal(q, rotary.rotate(Q, positions))
    assert torch.equal(k, rotary.rotate(K, positions))


def test_keys_of_a_cache_are_neither_normalised_nor_rotated_again() -> None:
    norms = QKNorm("rms").build(4, 2, 8)
    q, k = normalise(norms, Q, K, fresh=False)
    assert k is K
    assert torch.equal(q, norms(Q, K)[0])
    assert rotate(Rotary(), Q, K, 4, None, same=False, fresh=False)[1] is K


def test_a_cache_returns_all_keys_and_the_mask_for_them() -> None:
    cache, lengths = KeyValueCache(), torch.tensor([3, 2])
    x = torch.zeros(2, 3, 1)
    padding = Padding.of(x, x, lengths, None, together=False)
    k, v, scales, mask, start = extend(cache, Q, K, K, masks.Causal(), 0, padding, within=True)
    assert scales is None
    assert not torch.as_tensor(start).any()
    assert masks.picture(mask, queries=3, keys=3) == "■ · ·   ■ · ·\n■ ■ ·   ■ ■ ·\n■ ■ ■   · · ·"
    k, v, _, mask, start = extend(cache, Q, 2 * K, K, masks.Causal(), 0, NO_PADDING, within=True)
    assert torch.equal(torch.as_tensor(start), lengths)
    assert torch.equal(k[1, :, 2:5], 2 * K[1])
    assert v.shape == k.shape


def test_a_cache_keeps_the_memory_of_a_cross_attention() -> None:
    cache = KeyValueCache()
    k, _, _, _, start = extend(cache, Q, K, K, masks.Full(), 0, NO_PADDING, within=False)
    again, *_ = extend(cache, Q, k, k, masks.Full(), 0, NO_PADDING, within=False)
    assert start == 0
    assert again is k
    assert cache.query_start == 6
