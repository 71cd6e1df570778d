"""The multi-head attention layer: project, split, place, attend, merge, output."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, Literal, Never

import torch
from torch import Tensor, nn

from multihead.cache import KeyValueCache
from multihead.errors import (
    ArgumentError,
    refuse_scripting,
    refuse_unless_integer,
    refuse_unless_scale,
    refuse_unless_share,
)
from multihead.explanation import Explanation, explained
from multihead.functional import attend
from multihead.heads import head_counts, head_dim_of, merge_heads
from multihead.layer.checks import refuse_unless_cache
from multihead.layer.gates import gated
from multihead.layer.prepare import asked
from multihead.masks import Full, Mask
from multihead.packing import Packing, Side
from multihead.qk_norm import QKNorm
from multihead.rotary import Rotary
from multihead.scores.bias import Bias
from multihead.scores.softcap import refuse_unless_softcap
from multihead.spelling import OF_CONSTRUCTORS, OF_LAYERS, refuse_unknown

_FULL = Full()
_NOTHING = nullcontext()  # may be entered again and again


class MultiHeadAttention(nn.Module):
    """Multi-head attention with any mask and any head shape.

    output = merge_h(softmax(scale * (x W_q)_h (memory W_k)_h^T) (memory W_v)_h) W_out

    Heads may be split over processes: `parallelize_module` with `ColwiseParallel()` for q_proj, k_proj and v_proj and
    `RowwiseParallel()` for out_proj. All other parameters stay whole, and so do the per-head arguments of a call.

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
            the scores, such as `scores.ALiBi`; layers may share one.
        softcap: c of c * tanh(scores / c), before the bias.
        sinks: whether each head has a learned logit that takes weight and gives no value.
        head_gates: whether each head has a learned factor on what it gives, before the merge.
        add_bias_kv: whether there is a learned key, with a value, that every query sees.
        add_zero_attn: whether there is a key of 0, with a value of 0, that every query sees: a sink whose logit is 0.
        device: where the parameters are made.
        dtype: of the parameters.
        unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

    Raises:
        ArgumentError: a size that does not fit; the sentence lists those that would.

    Source: arXiv:1706.03762, section 3.2.2; grouped heads arXiv:2305.13245.

    >>> from multihead import masks
    >>> layer = MultiHeadAttention(embed_dim=512, num_heads=8, num_kv_heads=2)
    >>> layer(torch.randn(2, 10, 512), mask=masks.Causal()).shape
    torch.Size([2, 10, 512])
    """

    __prepare_scriptable__ = refuse_scripting

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
        **unknown: Never,
    ) -> None:
        super().__init__()
        if unknown:
            refuse_unknown(MultiHeadAttention, unknown, OF_CONSTRUCTORS)
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
        for name, flag in (("sinks", sinks), ("head_gates", head_gates)):
            if isinstance(flag, Tensor):
                raise ArgumentError(f"{name} is a tensor.", f"Give {name}=True, and copy the values to layer.{name}.")
        _refuse_unless_kinds(rotary, qk_norm, position_bias, scale)
        if rotary is not None:
            rotary.refuse_unless_turning(self.head_dim)
        self.rotary, self.position_bias = rotary, position_bias
        self.softcap, self.add_zero_attn = softcap, add_zero_attn
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        self.qk_norm = None if qk_norm is None else qk_norm.build(*heads, device=device, dtype=dtype)

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
        **unknown: Never,
    ) -> Tensor:
        """Attend from x to memory, or to x itself.

        Args:
            x: (batch, queries, embed_dim), or (queries, embed_dim).
            memory: (batch, keys, key_dim), what keys and values are made of; x if None.
            values: (batch, keys, value_dim), where values are made of something else than the keys; memory if None.
            mask: which keys each query may see.
            bias: added to the scores, broadcasting to (batch, heads, queries, keys), or `scores.RelativeBias`.
            lengths: (batch,) tokens a sample of x; the others are padding: they are skipped, and their output is 0.
            memory_lengths: (batch,) tokens a sample of memory; the others are padding and are skipped.
            padding_side: on which side of a sample's tokens its padding stands, "right" or "left".
            packing: where the tokens of x, which is (1, tokens, embed_dim), stood before `pack`; each sample attends
                to itself, and the mask speaks of each sample alone.
            cache: keeps the keys and values of earlier calls, which come first; the mask then speaks of the whole
                text. In cross-attention the memory is projected in the first call only.
            head_gates: (heads,), or broadcasting to (batch, heads, queries): a factor on what each head gives.
            query_start: where the first query stands among the keys, see `attention`; a cache says it itself.
            unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

        Returns: (batch, queries, output_dim), as many dimensions as x has.

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: in words, before anything is computed.
        """
        if unknown:
            refuse_unknown(MultiHeadAttention.forward, unknown, OF_LAYERS)
        if cache is not None:
            refuse_unless_cache(cache)
        with _NOTHING if cache is None else cache.rollback_on_error():
            request, padding, single, local = asked(
                self,
                x,
                memory,
                values,
                mask=mask,
                bias=bias,
                lengths=lengths,
                memory_lengths=memory_lengths,
                padding_side=padding_side,
                packing=packing,
                cache=cache,
                head_gates=head_gates,
                query_start=query_start,
            )
            output = attend(request).output  # (batch, heads, queries, value_head_dim)
            for gates in (self.head_gates, head_gates):
                if gates is not None:
                    output = gated(output, gates if local is None else local.of_gates(gates))
        merged = merge_heads(output, merge=self.merge)  # (batch, queries, heads * value_head_dim)
        merged = padding.taken(merged)
        out_proj = self._modules.get("out_proj")  # as an attribute it is looked for half a microsecond longer
        output = merged if out_proj is None else out_proj(merged)  # (batch, queries, output_dim)
        output = padding.restored(output)
        return output[0] if single else output

    def explain(
        self, x: Tensor, memory: Tensor | None = None, values: Tensor | None = None, **call: Any
    ) -> Explanation:
        """Say which kernel a call of this layer would run, why others refuse it, what it skips and what it holds.

        Takes what a call takes, projects, and attends to nothing; a cache stays as it is.

        >>> layer = MultiHeadAttention(embed_dim=32, num_heads=4)
        >>> print(layer.explain(torch.zeros(2, 100, 32), lengths=(100, 20)))
        kernel   native
        skipped  ...% of the score matrix; its intervals hide 27.8%
        memory   about ... beside q, k and v
        """
        unknown = inspect.signature(self.forward).bind(x, memory, values, **call).arguments.get("unknown")
        if unknown:
            refuse_unknown(MultiHeadAttention.forward, unknown, OF_LAYERS)
        call["cache"] = deepcopy(call.get("cache"))
        request = asked(self, x, memory, values, **call).request
        read = [name for name in ("lengths", "memory_lengths") if isinstance(call.get(name), Tensor)]
        far = [f"{name} on {call[name].device}" for name in read if call[name].device.type not in ("cpu", "meta")]
        waits = f"the host reads how many tokens there are, from {' and '.join(far)}" if far else None
        return explained(request, waits=waits)

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


def _refuse_unless_kinds(rotary: object, qk_norm: object, position_bias: object, scale: object) -> None:
    for name, given, kind, example in (
        ("rotary", rotary, Rotary, "mh.Rotary()"),
        ("qk_norm", qk_norm, QKNorm, 'mh.QKNorm("rms")'),
        ("position_bias", position_bias, nn.Module, "mh.scores.ALiBi(num_heads)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ArgumentError(f"{name} is {given!r}.", f"Give for example {name}={example}, or None.")
    refuse_unless_scale(scale)
