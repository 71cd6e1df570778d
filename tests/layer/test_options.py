"""The layer's options, each against a plain computation of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError
from multihead.scores.bias import RelativeBias, offsets
from tests import oracle

EMBED, HEADS, KV_HEADS, DIM = 24, 4, 2, 6
X = torch.randn(2, 7, EMBED, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LEFT = X.clone()
LEFT[0, 3:], LEFT[0, :3] = X[0, :4], torch.nan  # the four tokens of the first sample, behind their padding
LENGTHS = (4, 7)


def layer(**options: Any) -> mh.MultiHeadAttention:
    torch.manual_seed(1)
    made = mh.MultiHeadAttention(EMBED, HEADS, num_kv_heads=KV_HEADS, dtype=torch.float64, **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def heads(of: mh.MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def split(projected: Tensor, count: int) -> Tensor:
        return projected.view(*projected.shape[:2], count, -1).transpose(1, 2)

    return split(of.q_proj(x), HEADS), split(of.k_proj(x), KV_HEADS), split(of.v_proj(x), KV_HEADS)


def merged(of: mh.MultiHeadAttention, output: Tensor) -> Tensor:
    assert of.out_proj is not None
    return of.out_proj(output.transpose(1, 2).flatten(2))


def shown(mask: masks.Mask, queries: int = 7, keys: int = 7) -> Tensor:
    return oracle.shown(mask, (2, HEADS, queries, keys))


def test_softcap_and_sinks_take_part_in_the_softmax() -> None:
    made = layer(softcap=1.5, sinks=True)
    assert made.sinks is not None
    q, k, v = heads(made, X)
    dense = oracle.attend(q, k, v, shown(masks.Causal()), softcap=1.5, sinks=made.sinks)
    assert torch.allclose(made(X, mask=masks.Causal()), merged(made, dense.output), atol=1e-12)


def test_a_key_of_zero_is_the_last_key_of_the_old_layer() -> None:
    made = layer(add_zero_attn=True)
    q, k, v = heads(made, X)
    zero = torch.zeros(2, KV_HEADS, 1, DIM, dtype=torch.float64)
    dense = oracle.attend(q, torch.cat([k, zero], 2), torch.cat([v, zero], 2), shown(masks.Full(), keys=8))
    assert torch.allclose(made(X), merged(made, dense.output), atol=1e-12)


def test_a_key_of_zero_stands_beside_learned_sinks() -> None:
    made = layer(add_zero_attn=True, sinks=True)
    assert made.sinks is not None
    q, k, v = heads(made, X)
    zero = torch.zeros(2, KV_HEADS, 1, DIM, dtype=torch.float64)
    whole = (q, torch.cat([k, zero], 2), torch.cat([v, zero], 2))
    dense = oracle.attend(*whole, shown(masks.Full(), keys=8), sinks=made.sinks)
    assert torch.allclose(made(X), merged(made, dense.output), atol=1e-12)


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Causal() & masks.Window(2)], ids=repr)
def test_the_learned_key_is_that_of_the_old_layer(mask: masks.Mask) -> None:
    theirs = nn.MultiheadAttention(EMBED, HEADS, add_bias_kv=True, batch_first=True, dtype=torch.float64)
    made = mh.MultiHeadAttention(EMBED, HEADS, add_bias_kv=True, dtype=torch.float64)
    assert made.bias_k is not None
    assert made.bias_v is not None
    assert made.out_proj is not None
    with torch.no_grad():
        for ours, weight in zip((made.q_proj, made.k_proj, made.v_proj), theirs.in_proj_weight.chunk(3), strict=True):
            ours.weight.copy_(weight)
        made.out_proj.weight.copy_(theirs.out_proj.weight)
        for added, given in ((made.bias_k, theirs.bias_k), (made.bias_v, theirs.bias_v)):
            assert given is not None
            added.copy_(given.view(HEADS, DIM))
    hidden = ~oracle.shown(mask, (1, 1, 7, 7))[0, 0]
    expected, _ = theirs(X, X, X, attn_mask=hidden)
    assert torch.allclose(made(X, mask=mask), expected, atol=1e-12)
    bias = torch.randn(1, 1, 7, 1, dtype=torch.float64)  # the same for all keys, but not for the learned one
    expected, _ = theirs(X, X, X, attn_mask=bias[0, 0].expand(7, 7).masked_fill(hidden, -torch.inf))
    assert torch.allclose(made(X, mask=mask, bias=bias), expected, atol=1e-12)


def test_head_gates_multiply_each_head_before_the_merge() -> None:
    made = layer(head_gates=True)
    assert made.head_gates is not None
    q, k, v = heads(made, X)
    output = oracle.attend(q, k, v, shown(masks.Full())).output
    gates = torch.randn(2, HEADS, 7, dtype=torch.float64)
    gated = output * made.head_gates[:, None, None]
    assert torch.allclose(made(X), merged(made, gated), atol=1e-12)
    assert torch.allclose(made(X, head_gates=gates), merged(made, gated * gates[..., None]), atol=1e-12)
    assert torch.allclose(made(X, head_gates=gates[0, :, 0]), merged(made, gated * gates[0, :, :1, None]), atol=1e-12)
    padded = made(X, head_gates=gates, lengths=LENGTHS)
    assert torch.allclose(padded[0, :4], made(X[:1, :4], head_gates=gates[:1, :, :4])[0], atol=1e-12)


class Nearness(nn.Module):
    """A position bias of the distance, and the same written out."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.written = written

    def forward(self, queries: int, keys: int, *, query_start: Any, device: Any, dtype: Any) -> RelativeBias | Tensor:
        bias = RelativeBias(-offsets(queries, keys, query_start=query_start, device=device).abs()[:, None].to(dtype))
        return bias.tile(queries, keys) if self.written else bias


@pytest.mark.parametrize("written", [False, True])
def test_a_position_bias_is_added_beside_that_of_the_call(written: bool) -> None:
    made = layer(position_bias=Nearness(written=written))
    q, k, v = heads(made, X)
    near = -(torch.arange(7) - torch.arange(7)[:, None]).abs().double()[None, None]
    given = torch.randn(2, 1, 7, 1, dtype=torch.float64)
    along = torch.randn(1, HEADS, 13, dtype=torch.float64)
    diagonal = torch.arange(7) - torch.arange(7)[:, None] + 6
    for bias, written_out in ((None, near), (given, near + given), (RelativeBias(along), near + along[:, :, diagonal])):
        dense = oracle.attend(q, k, v, shown(masks.Causal()), bias=written_out.expand(2, HEADS, 7, 7))
        assert torch.allclose(made(X, mask=masks.Causal(), bias=bias), merged(made, dense.output), atol=1e-12)


@pytest.mark.parametrize(
    "mask", [masks.Full(), masks.Causal(), masks.Causal() & masks.Window(2), masks.Causal() | masks.Prefix(2)], ids=repr
)
@pytest.mark.parametrize("option", [{}, {"rotary": mh.Rotary()}, {"position_bias": Nearness(written=False)}], ids=repr)
def test_padding_on_either_side_and_packed_tokens_give_what_each_sample_gives_alone(
    mask: masks.Mask, option: dict[str, Any]
) -> None:
    made = layer(**option)
    alone = [made(X[:1, :4], mask=mask)[0], made(X[1:], mask=mask)[0]]
    right = made(X, mask=mask, lengths=LENGTHS)
    left = made(LEFT, mask=mask, lengths=LENGTHS, padding_side="left")
    assert torch.allclose(right[0, :4], alone[0], atol=1e-12)
    assert torch.allclose(left[0, 3:], alone[0], atol=1e-12)
    for padded in (right, left):
        assert torch.allclose(padded[1], alone[1], atol=1e-12)
    assert bool((right[0, 4:] == 0).all())
    assert bool((left[0, :3] == 0).all())
    tokens, packing = mh.pack(LEFT, LENGTHS, padding_side="left")
    assert torch.allclose(mh.unpack(made(tokens, packing=packing, mask=mask), packing), left, atol=1e-12)


def test_a_learned_key_and_a_position_bias_are_refused_together() -> None:
    with pytest.raises(ArgumentError) as refusal:
        layer(add_bias_kv=True, position_bias=Nearness(written=False))
    assert str(refusal.value) == (
        "add_bias_kv and position_bias are both given, and the learned key has no position. Leave one of them out."
    )


def test_the_rotation_of_keys_is_counted_from_the_first_one_where_there_is_no_cache() -> None:
    """Keys were once turned as if they stood where the queries do."""
    made = layer(rotary=mh.Rotary())
    start = torch.tensor([3, 0])
    given = made(X, mask=masks.Full(), query_start=start)
    assert torch.allclose(given[1], made(X)[1], atol=1e-12)
    assert not torch.allclose(given[0], made(X)[0], atol=1e-3)


def test_what_is_learned_begins_as_if_it_were_not_there() -> None:
    plain, made = mh.MultiHeadAttention(EMBED, HEADS), mh.MultiHeadAttention(EMBED, HEADS, sinks=True, head_gates=True)
    made.load_state_dict(plain.state_dict(), strict=False)
    assert made.sinks is not None
    assert torch.equal(made.sinks, torch.zeros(HEADS))
    with torch.no_grad():
        made.sinks.fill_(-1e4)
    assert torch.allclose(made(X.float()), plain(X.float()), atol=1e-6)


def test_the_options_are_told() -> None:
    told = repr(layer(softcap=2.0, sinks=True, head_gates=True, add_bias_kv=True, add_zero_attn=True))
    for word in ("softcap=2.0", "sinks=True", "head_gates=True", "add_bias_kv=True", "add_zero_attn=True"):
        assert word in told
