"""The multi-head attention layer: project, split, place, attend, merge, output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, DtypeError, ShapeError, refuse_unless_integer, refuse_unless_share
from multihead.functional import attend, request_of
from multihead.heads import head_counts, head_dim_of, merge_heads, split_heads
from multihead.masks import Full, Mask
from multihead.packing import Padding, can_stay_packed

_FULL = Full()


class MultiHeadAttention(nn.Module):
    """Multi-head attention with any mask and any head shape.

    output = merge_h(softmax(scale * (x W_q)_h (memory W_k)_h^T) (memory W_v)_h) W_out

    Args:
        embed_dim: width of the input, features.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads; num_heads if None.
        head_dim: width of a query and a key; embed_dim / num_heads if None.
        value_head_dim: width of a value; head_dim if None.
        key_dim: width of the memory; embed_dim if None.
        value_dim: width of separate values; key_dim if None.
        output_dim: width of the output; embed_dim if None.
        bias: whether the four projections add a bias.
        dropout: share of the weights dropped in training, 0 to 1.
        scale: what q . k is multiplied by; 1 / sqrt(head_dim) if None.
        merge: "concat" sets the heads side by side, "mean" averages them.
        output_projection: whether W_out follows; without it the merged heads are the output.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ArgumentError: a size that does not fit; the sentence lists those that would.

    Source: arXiv:1706.03762, section 3.2.2; grouped heads arXiv:2305.13245.

    >>> from multihead import masks
    >>> layer = MultiHeadAttention(embed_dim=512, num_heads=8, num_kv_heads=2)
    >>> layer(torch.randn(2, 10, 512), mask=masks.Causal()).shape
    torch.Size([2, 10, 512])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        output_dim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        scale: float | None = None,
        merge: Literal["concat", "mean"] = "concat",
        output_projection: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim = _size("embed_dim", embed_dim)
        self.num_heads = _size("num_heads", num_heads)
        self.num_kv_heads = _kv_heads(num_heads, num_kv_heads)
        self.head_dim = head_dim_of(embed_dim, num_heads) if head_dim is None else _size("head_dim", head_dim)
        self.value_head_dim = _size("value_head_dim", self.head_dim if value_head_dim is None else value_head_dim)
        self.key_dim = _size("key_dim", embed_dim if key_dim is None else key_dim)
        self.value_dim = _size("value_dim", self.key_dim if value_dim is None else value_dim)
        refuse_unless_share("dropout", dropout)
        if merge not in ("concat", "mean"):
            raise ArgumentError(f"merge is {merge!r}.", 'Give "concat" or "mean".')
        self.dropout, self.scale = float(dropout), scale
        self.merge: Literal["concat", "mean"] = merge
        merged_dim = self.value_head_dim * (num_heads if merge == "concat" else 1)
        if not output_projection and output_dim not in (None, merged_dim):
            raise ArgumentError(
                f"output_dim is {output_dim}, and without an output projection the merged heads are {merged_dim} wide.",
                "Leave output_dim out, or keep output_projection=True.",
            )
        self.output_dim = merged_dim if not output_projection else _size("output_dim", output_dim or embed_dim)

        def linear(width_in: int, width_out: int) -> nn.Linear:
            return nn.Linear(width_in, width_out, bias=bias, device=device, dtype=dtype)

        self.q_proj = linear(embed_dim, num_heads * self.head_dim)
        self.k_proj = linear(self.key_dim, self.num_kv_heads * self.head_dim)
        self.v_proj = linear(self.value_dim, self.num_kv_heads * self.value_head_dim)
        self.out_proj = linear(merged_dim, self.output_dim) if output_projection else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew (Xavier uniform, a matrix a projection) and set the biases to 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask = _FULL,
        bias: Tensor | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        memory_lengths: Sequence[int] | Tensor | None = None,
        query_start: int | Tensor | str | None = None,
    ) -> Tensor:
        """Attend from x to memory, or to x itself.

        Args:
            x: (batch, queries, embed_dim).
            memory: (batch, keys, key_dim), what keys and values are made of; x if None.
            values: (batch, keys, value_dim), where values are made of something else than the keys; memory if None.
            mask: which keys each query may see.
            bias: added to the scores, broadcasting to (batch, heads, queries, keys).
            lengths: (batch,) tokens a sample of x; what lies behind is padding: it is skipped, and its output is 0.
            memory_lengths: (batch,) tokens a sample of memory; what lies behind is padding and is skipped.
            query_start: where the first query stands among the keys, see `attention`.

        Returns: (batch, queries, output_dim).

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: in words, before anything is computed.
        """
        self._refuse_unless_fitting(x, memory, values, lengths, memory_lengths)
        memory = x if memory is None else memory
        values = memory if values is None else values
        # Where only differences of positions matter, all samples stay in one row of tokens, as documents.
        together = memory is x and bias is None and not query_start and can_stay_packed(mask)
        padding = Padding.of(x, memory, lengths, memory_lengths, together=together)
        x_tokens, memory_tokens, value_tokens = padding.without(x, memory, values)  # (batch, length, features) each
        q, k, v = self.q_proj(x_tokens), self.k_proj(memory_tokens), self.v_proj(value_tokens)
        q, k, v = padding.placed(q, k, v)  # (batch, length, heads * head_dim)
        q = split_heads(q, self.num_heads)  # (batch, heads, queries, head_dim)
        k = split_heads(k, self.num_kv_heads)  # (batch, kv_heads, keys, head_dim)
        v = split_heads(v, self.num_kv_heads)  # (batch, kv_heads, keys, value_head_dim)
        dropout = self.dropout if self.training else 0.0
        request = request_of(q, k, v, padding.hiding(mask), bias, None, None, self.scale, dropout, query_start)
        attended = attend(replace(request, owner=self, packed_lengths=padding.packed_lengths))
        merged = merge_heads(attended.output, merge=self.merge)  # (batch, queries, heads * value_head_dim)
        merged = padding.taken(merged)
        output = merged if self.out_proj is None else self.out_proj(merged)  # (batch, queries, output_dim)
        return padding.restored(output)

    def extra_repr(self) -> str:
        """Say the head counts and what else is not told by the projections."""
        heads = f"num_heads={self.num_heads}, head_dim={self.head_dim}"
        if self.num_kv_heads != self.num_heads:
            heads += f", num_kv_heads={self.num_kv_heads}"
        if self.merge != "concat":
            heads += f", merge={self.merge!r}"
        return heads + (f", dropout={self.dropout}" if self.dropout else "")

    def _refuse_unless_fitting(
        self, x: Tensor, memory: Tensor | None, values: Tensor | None, lengths: object, memory_lengths: object
    ) -> None:
        """Refuse inputs of the wrong shape or dtype, in the words of the layer and not of its projections."""
        given = (("x", x, self.embed_dim), ("memory", memory, self.key_dim), ("values", values, self.value_dim))
        for name, tensor, width in given:
            if tensor is None:
                continue
            if tensor.dim() != 3 or tensor.shape[2] != width:
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}.", f"Give (batch, length, features) with {width} features."
                )
            if tensor.dtype != self.q_proj.weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
                raise DtypeError(
                    f"{name} has dtype {tensor.dtype}, and the layer has {self.q_proj.weight.dtype}.",
                    f"Convert one of them, for example {name}.to({self.q_proj.weight.dtype}).",
                )
        if memory is None and (self.key_dim != self.embed_dim or values is not None):
            raise ShapeError(
                f"There is no memory, and the layer's keys are made of {self.key_dim} features"
                + (" beside separate values." if values is not None else f", its queries of {self.embed_dim}."),
                "Give memory: layer(x, memory).",
            )
        for name, tensor in (("memory", memory), ("values", values)):
            if tensor is not None and tensor.shape[0] != x.shape[0]:
                raise ShapeError(
                    f"x has {x.shape[0]} samples and {name} has {tensor.shape[0]}.", "Give both the same batch."
                )
        if memory is not None and values is not None and values.shape[1] != memory.shape[1]:
            raise ShapeError(
                f"memory has {memory.shape[1]} keys and values has {values.shape[1]}.", "Give every key its one value."
            )
        if memory is None and memory_lengths is not None and lengths is not None:
            raise ArgumentError(
                "lengths and memory_lengths are both given, and there is no memory.",
                "Give lengths alone: in self-attention they speak of queries and keys.",
            )


def _size(name: str, value: int) -> int:
    refuse_unless_integer(name, value)
    return value


def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    count = _size("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
    if num_heads % count:
        fitting = ", ".join(str(n) for n in head_counts(num_heads))
        raise ArgumentError(
            f"num_kv_heads is {count}, and num_heads is {num_heads}, which is not a multiple of it.",
            f"Give one of {fitting} (grouped-query attention, arXiv:2305.13245).",
        )
    return count
