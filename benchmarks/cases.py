"""The cases of `python -m benchmarks`: what runs, what it is compared with, and how much faster it must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import multihead as mh
from multihead import masks
from multihead.compat.torch_nn import replace
from multihead.masks.positions import TilePositions

EMBED, HEADS = 512, 8


@dataclass(frozen=True)
class Contest:
    """Two functions that compute the same result.

    Attributes:
        ours: computes (..., features) with multihead.
        rival: computes the same without it.
        compared: selects the part of an output that both define, such as the tokens that are not padding.
        memory: bytes that our call holds besides its inputs according to `explain`, or None for a whole layer.
    """

    ours: Callable[[], Tensor]
    rival: Callable[[], Tensor]
    compared: Callable[[Tensor], Tensor]
    memory: int | None = None


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: what is computed.
        rival: what it is compared with.
        least: how many times faster ours must be.
        make: sets it up.
        pairs: how many times each is run.
    """

    name: str
    rival: str
    least: float
    make: Callable[[], Contest]
    pairs: int = 21


def padded_layer(batch: int, length: int) -> Contest:
    """A batch whose lengths are spread evenly over 10 to 90 % of the padded length."""
    theirs, ours = _layers()
    x = torch.randn(batch, length, EMBED)
    lengths = torch.linspace(0.1 * length, 0.9 * length, batch).long()
    outside = torch.arange(length) >= lengths[:, None]
    return Contest(
        ours=lambda: ours(x, lengths=lengths),
        rival=lambda: theirs(x, x, x, key_padding_mask=outside, need_weights=False)[0],
        compared=lambda output: output[~outside],
    )


def whole_layer(batch: int, length: int) -> Contest:
    """The same layer without padding."""
    theirs, ours = _layers()
    x = torch.randn(batch, length, EMBED)
    return Contest(
        ours=lambda: ours(x),
        rival=lambda: theirs(x, x, x, need_weights=False)[0],
        compared=lambda output: output,
    )


def drop_in(batch: int, length: int, *, need_weights: bool) -> Contest:
    """The drop-in for PyTorch's layer, called like it, with or without attention weights."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    ours = replace(theirs).model
    x = torch.randn(batch, length, EMBED)

    def run(layer: nn.MultiheadAttention) -> Tensor:
        output, weights = layer(x, x, x, need_weights=need_weights)
        return output if weights is None else torch.cat([output, weights], -1)

    return Contest(ours=lambda: run(ours), rival=lambda: run(theirs), compared=lambda output: output)


@torch.inference_mode(mode=False)
def drop_in_training(batch: int, length: int, *, need_weights: bool, dropout: float = 0.0) -> Contest:
    """A training step through the drop-in, forward and backward; the gradients of the input are compared."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True, dropout=dropout)
    ours = replace(theirs).model
    x = torch.randn(batch, length, EMBED, requires_grad=True)
    of_output = torch.randn(batch, length, EMBED)

    @torch.inference_mode(mode=False)
    def run(layer: nn.MultiheadAttention) -> Tensor:
        torch.manual_seed(0)  # the same weights are dropped in both
        with torch.enable_grad():
            output, _ = layer(x, x, x, need_weights=need_weights)
        leaves = [x, *theirs.parameters()]
        return torch.autograd.grad(output, leaves, of_output)[0]

    return Contest(ours=lambda: run(ours), rival=lambda: run(theirs), compared=lambda gradient: gradient)


def masked(mask: masks.Mask, length: int) -> Contest:
    """A mask, against the same mask as a dense boolean tensor."""
    q, k, v = torch.randn(3, 1, HEADS, length, EMBED // HEADS).unbind()
    dense = mask.tile(TilePositions.from_sizes(length, length)).expand(1, 1, length, length).contiguous()
    return Contest(
        ours=lambda: mh.attention(q, k, v, mask=mask),
        rival=lambda: scaled_dot_product_attention(q, k, v, attn_mask=dense),
        compared=lambda output: output,
        memory=mh.explain(q, k, v, mask=mask).work.extra_memory_bytes,
    )


def _layers() -> tuple[nn.MultiheadAttention, mh.MultiHeadAttention]:
    """Return PyTorch's layer and ours with the same weights, in evaluation mode."""
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    ours = mh.MultiHeadAttention(EMBED, HEADS).eval()
    packed, out = theirs.in_proj_weight.detach().chunk(3), theirs.out_proj.weight.detach()
    state = dict(zip(("q_proj.weight", "k_proj.weight", "v_proj.weight"), packed, strict=True))
    ours.load_state_dict({**ours.state_dict(), **state, "out_proj.weight": out})
    return theirs, ours


CASES = [
    Case("layer, padded, 8 x 512", "nn.MultiheadAttention", 3.5, lambda: padded_layer(8, 512)),
    Case("layer, padded, 4 x 2,048", "nn.MultiheadAttention", 6.0, lambda: padded_layer(4, 2048), pairs=11),
    Case("layer, no padding, 4 x 512", "nn.MultiheadAttention", 1.2, lambda: whole_layer(4, 512)),
    Case("drop-in, 4 x 512", "nn.MultiheadAttention", 1.2, lambda: drop_in(4, 512, need_weights=False)),
    Case("drop-in with weights, 4 x 512", "nn.MultiheadAttention", 1.2, lambda: drop_in(4, 512, need_weights=True)),
    Case(
        "drop-in, training, 4 x 512",
        "nn.MultiheadAttention",
        1.0,
        lambda: drop_in_training(4, 512, need_weights=False),
    ),
    Case(
        "drop-in with weights, training, 4 x 512",
        "nn.MultiheadAttention",
        1.0,
        lambda: drop_in_training(4, 512, need_weights=True),
    ),
    Case(
        "drop-in, training, dropout, 4 x 512",
        "nn.MultiheadAttention",
        1.0,
        lambda: drop_in_training(4, 512, need_weights=False, dropout=0.1),
    ),
    Case("Window(256), 8,192 keys", "SDPA, dense mask", 8.0, lambda: masked(masks.Window(256), 8192), pairs=11),
    Case(
        "Documents, 8 x 1,024",
        "SDPA, dense mask",
        6.0,
        lambda: masked(masks.Documents((1024,) * 8), 8192),
        pairs=11,
    ),
]
