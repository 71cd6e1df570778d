"""The multi-head attention layer: project, split, place, attend, merge, output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from multihead.cache import KeyValueCache
from multihead.cache.reach import mask_behind
from multihead.call import AttentionRequest
from multihead.errors import ArgumentError, refuse_unless_integer, refuse_unless_share
from multihead.functional import attend, request_of
from multihead.heads import head_counts, head_dim_of, merge_heads, split_heads
from multihead.layer.inputs import (
    Widths,
    batched,
    dtype_of,
    refuse_unless_cache_fits,
    refuse_unless_fitting,
    refuse_unless_packing_fits,
)
from multihead.layer.terms import gated, in_front
from multihead.masks import Full, Mask
from multihead.masks.behind import Behind
from multihead.masks.values import refuse_unless_mask
from multihead.packing import Packing, Padding, Side, can_stay_packed
from multihead.scores.bias import Bias, added, shifted
from multihead.scores.softcap import refuse_unless_softcap
from multihead.shapes import resolved_query_start

if TYPE_CHECKING:
    from multihead.qk_norm import QKNorm
    from multihead.rotary import Rotary

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
        rotary: how queries and keys are turned by their positions.
        qk_norm: how queries and keys are normalised, before they are turned.
        position_bias: a module whose `forward(queries, keys, query_start=, device=, dtype=)` gives what is added to
            the scores, such as `scores.Alibi`; layers may share one.
        softcap: c of c * tanh(scores / c), before the bias.
        sinks: whether each head has a learned logit that takes weight and gives no value.
        head_gates: whether each head has a learned factor on what it gives, before the merge.
        add_bias_kv: whether there is a learned key, with a value, that every query sees.
        add_zero_attn: whether there is a key of 0, with a value of 0, that every query sees: a sink whose logit is 0.
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
        rotary: Rotary | None = None,
        qk_norm: QKNorm | None = None,
        position_bias: nn.Module | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        head_gates: bool = False,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
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
        if softcap is not None:
            refuse_unless_softcap(softcap)
        if add_bias_kv and position_bias is not None:
            raise ArgumentError(
                "add_bias_kv and position_bias are both given, and the learned key stands at no position.",
                "Leave one of them out.",
            )
        self.rotary, self.softcap, self.position_bias, self.add_zero_attn = (
            rotary,
            softcap,
            position_bias,
            add_zero_attn,
        )
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        self.qk_norm = None if qk_norm is None else qk_norm.made(*heads, device=device, dtype=dtype)

        def learned(wanted: bool, *size: int) -> nn.Parameter | None:  # noqa: FBT001 - named at each call below
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if wanted else None

        self.sinks = learned(sinks, num_heads)
        self.head_gates = learned(head_gates, num_heads)
        self.bias_k = learned(add_bias_kv, self.num_kv_heads, self.head_dim)
        self.bias_v = learned(add_bias_kv, self.num_kv_heads, self.value_head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew (Xavier uniform, a matrix a projection), set biases and sinks to 0 and gates to 1.

        A `position_bias` was given and stays as it is: it has a `reset_parameters` of its own.
        """
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if projection is not None:
                nn.init.xavier_uniform_(projection.weight)
                if projection.bias is not None:
                    nn.init.zeros_(projection.bias)
        if self.qk_norm is not None:
            self.qk_norm.reset_parameters()
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)
        if self.head_gates is not None:
            nn.init.ones_(self.head_gates)
        for row in (self.bias_k, self.bias_v):
            if row is not None:
                nn.init.xavier_normal_(row)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        values: Tensor | None = None,
        *,
        mask: Mask = _FULL,
        bias: Bias | None = None,
        lengths: Sequence[int] | Tensor | None = None,
        memory_lengths: Sequence[int] | Tensor | None = None,
        padding_side: Side = "right",
        packing: Packing | None = None,
        cache: KeyValueCache | None = None,
        head_gates: Tensor | None = None,
        query_start: int | Tensor | str | None = None,
    ) -> Tensor:
        """Attend from x to memory, or to x itself.

        Args:
            x: (batch, queries, embed_dim), or (queries, embed_dim).
            memory: (batch, keys, key_dim), what keys and values are made of; x if None.
            values: (batch, keys, value_dim), where values are made of something else than the keys; memory if None.
            mask: which keys each query may see.
            bias: added to the scores, broadcasting to (batch, heads, queries, keys), or `scores.Relative`.
            lengths: (batch,) tokens a sample of x; the others are padding: they are skipped, and their output is 0.
            memory_lengths: (batch,) tokens a sample of memory; the others are padding and are skipped.
            padding_side: on which side of a sample's tokens its padding stands, "right" or "left".
            packing: where the tokens of x, which is (1, tokens, embed_dim), stood before `pack`; each sample attends
                to itself, and the mask speaks of each sample alone.
            cache: keeps the keys and values of earlier calls, which come first; the mask then speaks of the whole
                text. In cross-attention the memory is projected in the first call only.
            head_gates: (heads,), or broadcasting to (batch, heads, queries): a factor on what each head gives.
            query_start: where the first query stands among the keys, see `attention`; a cache says it itself.

        Returns: (batch, queries, output_dim), as many dimensions as x has.

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: in words, before anything is computed.
        """
        refuse_unless_mask(mask)
        x, memory, values, single = batched(x, memory, values)
        self._refuse_unless_fitting(x, memory, values, lengths, memory_lengths, packing, cache, query_start, mask)
        memory = x if memory is None else memory
        values = memory if values is None else values
        # Where only differences of positions matter, all samples stay in one row of tokens, as documents.
        alone = bias is None and cache is None and (head_gates is None or head_gates.dim() == 1)
        alone = alone and not isinstance(query_start, Tensor) and not query_start
        together = memory is x and alone and self._can_stay_packed and can_stay_packed(mask)
        if packing is None:
            padding = Padding.of(x, memory, lengths, memory_lengths, together=together, side=padding_side)
        else:
            padding = Padding.of_packed(packing, together=together)
        q, k, v, start, mask = self._split(x, memory, values, padding, cache, mask, query_start)
        request = self._request(q, k, v, mask, bias, start, checked=cache is None)
        attended = attend(replace(request, owner=self, packed_lengths=padding.packed_lengths))
        output = attended.output  # (batch, heads, queries, value_head_dim)
        for gates in (self.head_gates, head_gates):
            output = output if gates is None else gated(output, gates)
        merged = merge_heads(output, merge=self.merge)  # (batch, queries, heads * value_head_dim)
        merged = padding.taken(merged)
        output = merged if self.out_proj is None else self.out_proj(merged)  # (batch, queries, output_dim)
        output = padding.restored(output)
        return output[0] if single else output

    def _split(
        self,
        x: Tensor,
        memory: Tensor,
        values: Tensor,
        padding: Padding,
        cache: KeyValueCache | None,
        mask: Mask,
        query_start: int | Tensor | str | None,
    ) -> tuple[Tensor, Tensor, Tensor, int | Tensor, Mask]:
        """Project and place: q, k and v with their heads apart, where the first query stands, and what may be seen."""
        remembered = cache.memory if cache is not None and memory is not x else None
        x_tokens, memory_tokens, value_tokens = padding.without(x, memory, values)  # (batch, length, features) each
        q = self.q_proj(x_tokens)  # (batch, length, heads * head_dim)
        if remembered is None:
            q, k, v = padding.placed(q, self.k_proj(memory_tokens), self.v_proj(value_tokens))
            k = split_heads(k, self.num_kv_heads)  # (batch, kv_heads, keys, head_dim)
            v = split_heads(v, self.num_kv_heads)  # (batch, kv_heads, keys, value_head_dim)
        else:
            q, k, v = padding.placed_queries(q), remembered.k, remembered.v
        q = split_heads(q, self.num_heads)  # (batch, heads, queries, head_dim)
        speaks = mask.speaks_of_positions or self._speaks_of_positions
        if cache is not None and (memory is x or (speaks and query_start is None)):
            start = cache.query_start
        else:
            sizes = {"batch": q.shape[0], "queries": q.shape[2], "keys": k.shape[2]}
            start = resolved_query_start(query_start, speaks_of_positions=speaks, **sizes)
        q, k = self._turned(q, k, start, padding.positions, within=memory is x, remembered=remembered is not None)
        if cache is None:
            return q, k, v, start, padding.hiding(mask)
        rows = None if padding.rows is None else padding.rows.lengths
        if memory is x:
            held = cache.extended(k, v, lengths=rows)
            mask = padding.hiding(mask_behind(mask, held.key_start), held.lengths, held.k.shape[2])
            return q, held.k, held.v, held.query_start, mask
        if remembered is None:
            remembered = cache.remember(k, v, None if padding.columns is None else padding.columns.lengths)
        cache.advance(q.shape[2], lengths=rows)
        mask = padding.hiding(mask, remembered.lengths, remembered.k.shape[2])
        return q, remembered.k, remembered.v, start, mask

    def _turned(
        self, q: Tensor, k: Tensor, start: int | Tensor, positions: Tensor | None, *, within: bool, remembered: bool
    ) -> tuple[Tensor, Tensor]:
        """Normalise queries and keys, and turn them by their positions; keys that are remembered are already."""
        if self.qk_norm is not None:
            q_normed, k_normed = self.qk_norm(q, k)
            q, k = q_normed, k if remembered else k_normed
        if self.rotary is None:
            return q, k
        if positions is not None:
            return self.rotary.turned(q, positions), self.rotary.turned(k, positions)
        if isinstance(start, Tensor):
            of_queries: int | Tensor = start[:, None] + torch.arange(q.shape[2], device=start.device)
        else:
            of_queries = start
        # The keys of x stand beside its queries where there is a cache, and from 0 on where there is none.
        of_keys = of_queries if within and q.shape[2] == k.shape[2] else 0
        return self.rotary.turned(q, of_queries), k if remembered else self.rotary.turned(k, of_keys)

    def _request(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Bias | None, start: int | Tensor, *, checked: bool
    ) -> AttentionRequest:
        """Say what is asked of the attention: the keys that are added, the biases and all that is done to scores."""
        if self.position_bias is not None:
            given = self.position_bias(q.shape[2], k.shape[2], query_start=start, device=q.device, dtype=q.dtype)
            bias = given if bias is None else added(bias, given, q.shape[2], k.shape[2])
        if self.bias_k is not None and self.bias_v is not None:
            k, v = in_front(self.bias_k, k), in_front(self.bias_v, v)
            mask, start = Behind(1, mask), start + 1
            bias = None if bias is None else shifted(bias, q.shape[2], k.shape[2] - 1)
        sinks: Tensor | None = self.sinks
        if self.add_zero_attn:
            zero = q.new_zeros(self.num_heads)
            sinks = zero if sinks is None else torch.logaddexp(sinks, zero.to(sinks.dtype))
        dropout = self.dropout if self.training else 0.0
        return request_of(q, k, v, mask, bias, self.softcap, sinks, self.scale, dropout, start, to_come=not checked)

    def extra_repr(self) -> str:
        """Say the head counts and what else is not told by the projections."""
        heads = f"num_heads={self.num_heads}, head_dim={self.head_dim}"
        if self.num_kv_heads != self.num_heads:
            heads += f", num_kv_heads={self.num_kv_heads}"
        if self.merge != "concat":
            heads += f", merge={self.merge!r}"
        for name in ("rotary", "softcap"):
            value = getattr(self, name)
            heads += "" if value is None else f", {name}={value!r}"
        for name in ("sinks", "head_gates", "bias_k"):
            heads += "" if getattr(self, name) is None else f", {'add_bias_kv' if name == 'bias_k' else name}=True"
        heads += ", add_zero_attn=True" if self.add_zero_attn else ""
        return heads + (f", dropout={self.dropout}" if self.dropout else "")

    @property
    def _speaks_of_positions(self) -> bool:
        """Whether it matters where queries and keys stand, whatever the mask says."""
        return self.rotary is not None or self.position_bias is not None

    @property
    def _can_stay_packed(self) -> bool:
        """Whether samples may stand one behind the other: only their own tokens' distances matter."""
        return self.bias_k is None and getattr(self.position_bias, "of_distance", True)

    def _refuse_unless_fitting(
        self,
        x: Tensor,
        memory: Tensor | None,
        values: Tensor | None,
        lengths: object,
        memory_lengths: object,
        packing: Packing | None,
        cache: KeyValueCache | None,
        query_start: object,
        mask: Mask,
    ) -> None:
        """Refuse what does not fit the layer, before anything is computed or kept."""
        widths = Widths(self.embed_dim, self.key_dim, self.value_dim, dtype_of(self.q_proj))
        refuse_unless_fitting(widths, x, memory, values, lengths, memory_lengths)
        if packing is not None:
            refuse_unless_packing_fits(packing, x, memory, lengths, cache)
        if cache is not None:
            within = memory is None or memory is x
            absolute = self.position_bias is not None and not getattr(self.position_bias, "of_distance", True)
            refuse_unless_cache_fits(cache, query_start, absolute_bias=absolute, within=within)
            if within:
                cache.refuse_unless_remembered(mask)
            elif memory is not None:
                cache.refuse_unless_same_memory(memory)


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
