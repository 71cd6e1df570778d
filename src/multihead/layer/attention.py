"""The multi-head attention layer: project, split, normalise, rotate, cache, attend, gate, merge, output."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy, deepcopy
from typing import Any, Literal, Never, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook

from multihead import sequence_split
from multihead.cache import KeyValueCache
from multihead.call import AttentionRequest, CallOrigin, listeners
from multihead.errors import (
    ArgumentError,
    check_integer,
    check_scale,
    check_share,
    reject_scripting,
)
from multihead.explanation import Explanation, explained
from multihead.functional import attend, request_of
from multihead.heads import head_counts, head_dim_of
from multihead.kernels.native import eager
from multihead.layer.checks import (
    Widths,
    check_cache,
    check_inputs,
    check_is_cache,
    check_packing,
    check_position_bias,
    check_split,
    check_takes_positions,
    dtype_of,
)
from multihead.layer.gates import gate, prepend
from multihead.layer.positions import extend, first_position, map_lengths, normalise, padding_of_rank, rotate
from multihead.layer.sharding import LayerPart, local_part
from multihead.masks import Full, Mask
from multihead.masks.leading_keys import LeadingKeys
from multihead.packing import NO_PADDING, Packing, Padding, Side
from multihead.qk_norm import QKNorm
from multihead.quantised import Scales, expand
from multihead.rotary import Rotary
from multihead.scores.bias import Bias, added, shifted
from multihead.scores.softcap import check_softcap
from multihead.spelling import OF_CONSTRUCTORS, OF_LAYERS, reject_unknown
from multihead.tracing import intercepted

_FULL = Full()
_NOTHING = nullcontext()
_LINEAR = nn.Linear.forward


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
        scale: factor of q . k; 1 / sqrt(head_dim) if None.
        merge: "concat" concatenates the heads, "mean" averages them.
        output_projection: whether W_out follows; without it the merged heads are the output.
        rotary: how queries and keys are rotated by their positions.
        qk_norm: how queries and keys are normalised, before they are rotated.
        position_bias: a module whose `forward(queries, keys, query_start=, device=, dtype=)` returns what is added to
            the scores, such as `scores.ALiBi`: a tensor, or a `scores.RelativeBias` if only the distance matters, which
            a cache with a window needs. With `of_distance = True` samples with lengths are packed in one row. Layers
            may share a module.
        softcap: c of c * tanh(scores / c), before the bias.
        sinks: whether each head has a learned logit that takes weight and has no value.
        head_gates: whether each head has a learned factor on its output, before the merge.
        add_bias_kv: whether there is a learned key, with a value, that every query sees.
        add_zero_attn: whether there is a key of 0, with a value of 0, that every query sees: a sink whose logit is 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
        unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

    Raises:
        ArgumentError: a size does not fit; the error lists those that would.

    Source: arXiv:1706.03762, section 3.2.2; grouped heads arXiv:2305.13245.

    >>> from multihead import masks
    >>> layer = MultiHeadAttention(embed_dim=512, num_heads=8, num_kv_heads=2)
    >>> layer(torch.randn(2, 10, 512), mask=masks.Causal()).shape
    torch.Size([2, 10, 512])
    """

    __prepare_scriptable__ = reject_scripting

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
            reject_unknown(MultiHeadAttention, unknown, OF_CONSTRUCTORS)
        self.embed_dim = _size("embed_dim", embed_dim)
        self.num_heads = _size("num_heads", num_heads)
        self.num_kv_heads = _kv_heads(num_heads, num_kv_heads)
        self.head_dim = head_dim_of(embed_dim, num_heads) if head_dim is None else _size("head_dim", head_dim)
        self.value_head_dim = _size("value_head_dim", self.head_dim if value_head_dim is None else value_head_dim)
        self.key_dim = _size("key_dim", embed_dim if key_dim is None else key_dim)
        self.value_dim = _size("value_dim", self.key_dim if value_dim is None else value_dim)
        check_share("dropout", dropout)
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
            check_softcap(softcap)
        if add_bias_kv and position_bias is not None:
            raise ArgumentError(
                "add_bias_kv and position_bias are both given, and the learned key has no position.",
                "Leave one of them out.",
            )
        for name, flag in (("sinks", sinks), ("head_gates", head_gates)):
            if isinstance(flag, Tensor):
                raise ArgumentError(f"{name} is a tensor.", f"Give {name}=True, and copy the values to layer.{name}.")
        _check_kinds(rotary, qk_norm, position_bias, scale)
        if rotary is not None:
            rotary.check_turning(self.head_dim)
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
        """Initialise the weights (Xavier uniform per projection), set biases and sinks to 0 and gates to 1.

        A `position_bias` keeps its parameters: it has a `reset_parameters` of its own.
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
            memory: (batch, keys, key_dim), from which keys and values are projected; x if None.
            values: (batch, keys, value_dim), from which values are projected; memory if None.
            mask: which keys each query may see.
            bias: added to the scores, broadcasting to (batch, heads, queries, keys), or `scores.RelativeBias`.
            lengths: (batch,) tokens of each sample of x; the others are padding: they are skipped, their output is 0.
            memory_lengths: (batch,) tokens of each sample of memory; the others are padding and are skipped.
            padding_side: on which side of a sample's tokens its padding is, "right" or "left".
            packing: the places of the tokens of x, which is (1, tokens, embed_dim), as `pack` returns them; each sample
                attends to itself, and the mask applies to each sample alone.
            cache: keeps the keys and values of earlier calls, which come first; the mask then applies to the whole
                sequence. In cross-attention the memory is projected in the first call only.
            head_gates: (heads,), or broadcasting to (batch, heads, queries): a factor on the output of each head.
            query_start: position of the first query among the keys, see `attention`; a cache knows it itself.
            unknown: none; names of other libraries, such as is_causal, are rejected with the name here.

        Returns:
            (batch, queries, output_dim), with as many dimensions as x.

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: an argument does not fit, before anything is computed.
        """
        if unknown:
            reject_unknown(MultiHeadAttention.forward, unknown, OF_LAYERS)
        if cache is not None:
            check_is_cache(cache)
        if lengths is not None and (sequence := sequence_split.active) is not None:
            hidden, mask = padding_of_rank(sequence, x, mask, lengths, padding_side)
            options: Any = {"memory_lengths": memory_lengths, "packing": packing, "cache": cache}
            options |= {"bias": bias, "head_gates": head_gates, "query_start": query_start}
            output = self.forward(x.masked_fill(hidden, 0), memory, values, mask=mask, **options)
            return output.masked_fill(hidden, 0)
        # A tracer, a hook of all modules or a replaced method of the class expects that the modules are called.
        expected = intercepted() or has_any_global_hook() or nn.Linear.forward is not _LINEAR
        project = self._call_module if expected else self._project
        with _NOTHING if cache is None else cache.rollback_on_error():
            given = (mask, bias, lengths, memory_lengths, padding_side, packing, cache, head_gates, query_start)
            x, memory, values, padding, batched = self._inputs(x, memory, values, *given)
            within = memory is x  # self-attention
            cached = None if cache is None or within else cache.memory  # keys and values of an earlier call
            fresh = cached is None
            # A cache knows the position, which only a rotation needs before the keys are cached.
            plain = within and query_start is None and (cache is None or self.rotary is None)

            q = project("q_proj", x)  # (batch, queries, heads * head_dim)
            k = project("k_proj", memory) if cached is None else cached.k  # (batch, keys, kv_heads * head_dim)
            v = project("v_proj", values) if cached is None else cached.v  # (batch, keys, kv_heads * value_head_dim)
            if padding is not NO_PADDING:
                q, k, v = padding.place(x, q, memory, k, v, fresh=fresh)
            part: MultiHeadAttention | LayerPart = self
            if not self._holds_all_heads(q, k, v, fresh=fresh):  # other processes hold the others
                part, k, v, mask, bias, head_gates = local_part(self, q, k, v, mask, bias, head_gates, fresh=fresh)

            q = _split(q, part.num_heads, self.head_dim)  # (batch, heads, queries, head_dim)
            if fresh:
                k = _split(k, part.num_kv_heads, self.head_dim)  # (batch, kv_heads, keys, head_dim)
                v = _split(v, part.num_kv_heads, self.value_head_dim)  # (batch, kv_heads, keys, value_head_dim)
            if part.qk_norm is not None:
                q, k = normalise(part.qk_norm, q, k, fresh=fresh)
            start = 0 if plain else self._first_position(query_start, cache, mask, q, k, within=within)
            if self.rotary is not None:
                same = padding.documents is not None or (within and cache is not None)
                q, k = rotate(self.rotary, q, k, start, padding.positions, same=same, fresh=fresh)
            scales: Scales | None = None  # of k and v, where the cache holds int8
            if cache is None:
                mask = padding.hide(mask)
            else:
                k, v, scales, mask, start = extend(cache, q, k, v, mask, start, padding, within=within)

            # Queries of another tensor that have a position may be the newest tokens of the keys' sequence.
            crosses = not within if within or query_start is None else None
            output = self._attend(part, q, k, v, scales, mask, bias, start, padding, cache, crosses=crosses)
            for gates in (part.head_gates, head_gates):
                if gates is not None:
                    output = gate(output, gates)  # (batch, heads, queries, value_head_dim)
        # (batch, queries, heads * value_head_dim), or (batch, queries, value_head_dim)
        merged = output.transpose(1, 2).flatten(2) if self.merge == "concat" else output.mean(1)
        merged = padding.drop_rows(merged)
        output = merged if self._modules.get("out_proj") is None else project("out_proj", merged)
        output = padding.restore(output)  # (batch, queries, output_dim)
        return output if batched else output[0]

    def _inputs(
        self,
        x: Tensor,
        memory: Tensor | None,
        values: Tensor | None,
        mask: Mask,
        bias: Bias | None,
        lengths: Sequence[int] | Tensor | None,
        memory_lengths: Sequence[int] | Tensor | None,
        padding_side: Side,
        packing: Packing | None,
        cache: KeyValueCache | None,
        head_gates: Tensor | None,
        query_start: int | Tensor | str | None,
    ) -> tuple[Tensor, Tensor, Tensor, Padding, bool]:
        """Check the arguments of a call and drop its padding.

        Returns:
            x, memory and values, (batch, length, features) or packed (1, tokens, features); the padding; whether
            x has a batch.
        """
        weight = self._modules["q_proj"]._parameters.get("weight")  # type: ignore[union-attr]  # noqa: SLF001
        plain = memory is None and values is None and memory_lengths is None and packing is None
        usual = plain and type(x) is Tensor and isinstance(mask, Mask) and weight is not None
        batched = True
        if not (
            usual and x.dim() == 3 and x.shape[2] == self.embed_dim == self.key_dim and x.dtype is weight.dtype  # type: ignore[union-attr]
        ):
            widths = Widths(self.embed_dim, self.key_dim, self.value_dim, dtype_of(self.q_proj))
            x, memory, values, batched = check_inputs(widths, mask, x, memory, values, lengths, memory_lengths)
        within = memory is None or memory is x
        if sequence_split.active is not None:
            check_split(memory_lengths, packing, cache, within=within, added_key=self.bias_k is not None)
        if packing is not None:
            check_packing(packing, x, memory, lengths, cache)
        if cache is not None:
            check_cache(cache, mask, query_start, None if within else memory)
        memory = x if memory is None else memory
        values = memory if values is None else values
        if lengths is None and memory_lengths is None and packing is None:
            return x, memory, values, NO_PADDING, batched
        # Where only differences of positions matter, all samples stay in one row of tokens, as documents.
        together = (
            within
            and bias is None
            and cache is None
            and (query_start is None or (isinstance(query_start, int) and query_start == 0))
            and (head_gates is None or head_gates.dim() == 1)
            and self.bias_k is None
            and (self.position_bias is None or getattr(self.position_bias, "of_distance", False))
            and mask.translation_invariant
            and mask.defines_interval  # else the whole row would be evaluated cell by cell
        )
        if packing is None:
            padding = Padding.of(x, memory, lengths, memory_lengths, together=together, side=padding_side)
        else:
            padding = Padding.of_packed(packing, together=together)
        return *padding.drop(x, memory, values), padding, batched

    def _call_module(self, name: str, x: Tensor) -> Tensor:
        """Project tokens by a call of the projection."""
        projection: Any = self._modules[name]  # saves half a microsecond over nn.Module.__getattr__
        return projection(x)  # type: ignore[no-any-return]

    def _project(self, name: str, x: Tensor) -> Tensor:
        """Project tokens: (batch, length, features) -> (batch, length, width).

        A linear projection that nothing hooks into is computed without calling the module, which takes 3 microseconds.
        """
        projection: Any = self._modules[name]
        state = projection.__dict__
        if (
            type(projection) is nn.Linear
            and state["_parameters"].get("weight") is not None
            and not (
                state["_forward_pre_hooks"]
                or state["_forward_hooks"]
                or state["_backward_pre_hooks"]
                or state["_backward_hooks"]
                or "forward" in state
                or "_compiled_call_impl" in state
            )
        ):
            return F.linear(x, state["_parameters"]["weight"], state["_parameters"].get("bias"))
        return self._call_module(name, x)

    def _holds_all_heads(self, q: Tensor, k: Tensor, v: Tensor, *, fresh: bool) -> bool:
        """Whether the projections (batch, length, width) of this process hold all heads of the layer."""
        return (
            type(q) is Tensor
            and q.shape[2] == self.num_heads * self.head_dim
            and (not fresh or k.shape[2] == self.num_kv_heads * self.head_dim)
            and (not fresh or v.shape[2] == self.num_kv_heads * self.value_head_dim)
        )

    def _first_position(
        self,
        query_start: int | Tensor | str | None,
        cache: KeyValueCache | None,
        mask: Mask,
        q: Tensor,
        k: Tensor,
        *,
        within: bool,
    ) -> int | Tensor:
        """Return the position of the first query among the keys."""
        matters = mask.uses_positions or self.rotary is not None or self.position_bias is not None
        if cache is not None and query_start is None and (within or matters):
            return cache.query_start
        return first_position(query_start, q, k.shape[2]) if matters or query_start is not None else 0

    def _request(
        self,
        part: MultiHeadAttention | LayerPart,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: Scales | None,
        mask: Mask,
        bias: Bias | None,
        start: int | Tensor,
        padding: Padding,
        cache: KeyValueCache | None,
        *,
        crosses: bool | None,
    ) -> AttentionRequest:
        """Build the request: add the position bias, the learned key and the sinks of the layer."""
        if part.position_bias is not None:
            queries, keys = map_lengths(q, k, v)
            own = part.position_bias(queries, keys, query_start=start, device=q.device, dtype=q.dtype)
            check_position_bias(own, packed=padding.documents is not None, cache=cache)
            bias = own if bias is None else added(bias, own, queries, keys)
        if part.bias_k is not None and part.bias_v is not None:
            if scales is not None:
                k, v, scales = expand(k, scales.k, q.dtype), expand(v, scales.v, q.dtype), None
            k, v = prepend(part.bias_k, k), prepend(part.bias_v, v)  # (batch, kv_heads, 1 + keys, dim)
            mask, start = LeadingKeys(1, mask), start + 1
            bias = None if bias is None else shifted(bias, q.shape[2], k.shape[2] - 1)
        sinks: Tensor | None = part.sinks
        if self.add_zero_attn:
            # A key of 0 has the score 0, and its value is 0: that is a sink.
            zero = q.new_zeros(q.shape[1])
            sinks = zero if sinks is None else torch.logaddexp(sinks, zero.to(sinks.dtype))
        origin = None
        if listeners():
            continued = None if cache is None else cache.continued
            lengths = padding.packed_lengths
            origin = CallOrigin(self, lengths, continued, crosses, fresh=cache is None, real=padding.real)
        return request_of(
            q,
            k,
            v,
            mask,
            bias,
            self.softcap,
            sinks,
            self.scale,
            self.dropout if self.training else 0.0,
            start,
            to_come=cache is not None,
            mask_fits=padding.documents is not None,
            origin=origin,
            scales=scales,
        )

    def _attend(
        self,
        part: MultiHeadAttention | LayerPart,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: Scales | None,
        mask: Mask,
        bias: Bias | None,
        start: int | Tensor,
        padding: Padding,
        cache: KeyValueCache | None,
        *,
        crosses: bool | None,
    ) -> Tensor:
        """Compute the attention: (batch, heads, queries, value_head_dim)."""
        extended = part.position_bias is not None or part.bias_k is not None or self.add_zero_attn  # by the layer
        if not extended and padding.documents is None:
            dropout = self.dropout if self.training else 0.0
            attended = eager.attend(q, k, v, mask, bias, self.softcap, part.sinks, self.scale, dropout, start, scales)
            if attended is not None:
                return attended[0]
        return attend(self._request(part, q, k, v, scales, mask, bias, start, padding, cache, crosses=crosses)).output

    def _stop(self, *given: Any, **options: Any) -> NoReturn:
        raise _StoppedError(self._request(*given, **options))

    def explain(
        self, x: Tensor, memory: Tensor | None = None, values: Tensor | None = None, **call: Any
    ) -> Explanation:
        """Explain a call without its attention: the kernel, why others refuse it, the share it skips and its memory.

        The arguments are those of a call. It projects, and leaves a cache unchanged.

        >>> layer = MultiHeadAttention(embed_dim=32, num_heads=4)
        >>> print(layer.explain(torch.zeros(2, 100, 32), lengths=(100, 20)))
        kernel   native
        skipped  ...% of the score matrix; its intervals hide 27.8%
        memory   about ... besides q, k and v
        """
        call["cache"] = deepcopy(call.get("cache"))
        stopping = copy(self)  # shares the parameters
        stopping.__dict__["_attend"] = stopping._stop  # noqa: SLF001 - a copy of this layer
        try:
            MultiHeadAttention.forward(stopping, x, memory, values, **call)
        except _StoppedError as stopped:
            request = stopped.request
        on_device = [name for name in ("lengths", "memory_lengths") if isinstance(call.get(name), Tensor)]
        far = [f"{name} on {call[name].device}" for name in on_device if call[name].device.type not in ("cpu", "meta")]
        waits = f"the host reads how many tokens there are, from {' and '.join(far)}" if far else None
        return explained(request, waits=waits)

    def extra_repr(self) -> str:
        """Return the head counts and the options that the projections do not show."""
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


def _split(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Split projected tokens into heads: (batch, length, heads * head_dim) -> (batch, heads, length, head_dim)."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, head_dim).transpose(1, 2)


class _StoppedError(Exception):
    """Ends a call before its attention, for `explain`; carries the request."""

    def __init__(self, request: AttentionRequest) -> None:
        super().__init__()
        self.request = request


def _size(name: str, value: int) -> int:
    check_integer(name, value)
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


def _check_kinds(rotary: object, qk_norm: object, position_bias: object, scale: object) -> None:
    for name, given, kind, example in (
        ("rotary", rotary, Rotary, "mh.Rotary()"),
        ("qk_norm", qk_norm, QKNorm, 'mh.QKNorm("rms")'),
        ("position_bias", position_bias, nn.Module, "mh.scores.ALiBi(num_heads)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ArgumentError(f"{name} is {given!r}.", f"Give for example {name}={example}, or None.")
    if isinstance(position_bias, nn.Module):
        check_takes_positions(position_bias)
    check_scale(scale)
