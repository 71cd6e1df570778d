"""The multi-head attention layer: project, split, normalise, rotate, cache, attend, gate, merge, output.

A projection that nothing hooks into is computed by `F.linear` (`MultiHeadAttention._project`), without
`nn.Module.__call__`, which takes about 3 microseconds per projection. These calls took most of the extra time of a
decoding step compared with hand-written code. A projection of another class, hooks of any kind, a replaced `forward`,
`compile()`, and every tracer or dispatch mode use `nn.Module.__call__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any, Literal, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook as has_any_global_hook

from multihead.errors import ArgumentError
from multihead.errors.arguments import (
    CONSTRUCTOR_REPLACEMENTS,
    LAYER_REPLACEMENTS,
    check_fraction,
    check_integer,
    check_scale,
    raise_unknown_keywords,
    reject_scripting,
    rejects_unknown_keywords,
)
from multihead.functional import attend, request_of
from multihead.kernels import head_changes, sequence_split
from multihead.kernels.call import AttentionArguments, AttentionRequest, CallOrigin, Surroundings, find_surroundings
from multihead.kernels.explanation import Explanation, explain_request
from multihead.kernels.native import short_call
from multihead.layer.arguments import (
    KeysOfCall,
    LayerCall,
    LayerInputs,
    LayerInputWidths,
    PreparedAttention,
    check_bias_signature,
    check_is_cache,
    check_position_bias,
    projection_dtype,
)
from multihead.layer.cache import KeyValueCache
from multihead.layer.heads import head_counts, head_dim_of
from multihead.layer.packing import NO_PADDING, Packing, Padding, PaddingSide
from multihead.layer.qk_norm import QKNorm
from multihead.layer.sharding import CallOfHeads, LayerOfLocalHeads, ShardableLayer
from multihead.layer.steps import (
    add_learned_key,
    apply_gates,
    attention_map_size,
    extend_cache,
    find_query_start,
    hold_memory,
    normalise_qk,
    rotate,
)
from multihead.masks import Full, Mask
from multihead.rotary import Rotary
from multihead.scores.bias import Bias, add_biases, prepend_zero_column
from multihead.scores.terms import check_softcap

_FULL = Full()
_NO_CONTEXT = nullcontext()
_LINEAR_FORWARD = nn.Linear.forward


class MultiHeadAttention(nn.Module):
    """Multi-head attention with any mask and any head shape.

    output = merge_h(softmax(scale * (x W_q)_h (memory W_k)_h^T) (memory W_v)_h) W_out

    Heads may be split over processes: `parallelize_module` with `ColwiseParallel()` for q_proj, k_proj and v_proj and
    `RowwiseParallel()` for out_proj. All other parameters and the per-head arguments of a call are not sharded.

    Args:
        embed_dim: number of features of x.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads, a divisor of num_heads; num_heads if None.
        head_dim: number of features of a query and a key per head; embed_dim / num_heads if None.
        value_head_dim: number of features of a value per head; head_dim if None.
        key_dim: number of features of the memory; embed_dim if None.
        value_dim: number of features of `values`; key_dim if None.
        output_dim: number of features of the output; embed_dim if None.
        bias: whether the four projections add a bias.
        dropout: fraction of the attention weights dropped in training, 0 to 1.
        scale: factor of q . k; 1 / sqrt(head_dim) if None.
        merge: "concat" concatenates the heads, "mean" averages them.
        output_projection: whether the merged heads are multiplied by W_out; otherwise they are the output.
        rotary: the rotary embedding of queries and keys, or None.
        qk_norm: the normalisation of queries and keys before rotation, or None.
        position_bias: a module whose `forward(queries, keys, query_start=, device=, dtype=)` returns a bias of the
            scores, such as `scores.ALiBi`: a tensor, or a `scores.RelativeBias` if it depends only on the distance
            (required for a cache with a window). If its attribute `of_distance` is True, samples with lengths are
            packed into one row. Layers may share the module.
        softcap: c of c * tanh(scores / c), before the bias.
        sinks: whether each head has a learned logit that takes part in the softmax and has no value.
        head_gates: whether the output of each head is multiplied by a learned factor before the heads are merged.
        add_bias_kv: whether a learned key and value are added that every query sees.
        add_zero_attn: whether a key and value of 0 are added that every query sees: a sink with the logit 0.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ArgumentError: a size is invalid (the error lists valid sizes), or an argument name is of another library, such
            as d_model (the error names the argument to use).

    Source: arXiv:1706.03762, section 3.2.2; grouped heads arXiv:2305.13245.

    >>> from multihead import masks
    >>> layer = MultiHeadAttention(embed_dim=512, num_heads=8, num_kv_heads=2)
    >>> layer(torch.randn(2, 10, 512), mask=masks.Causal()).shape
    torch.Size([2, 10, 512])
    """

    __prepare_scriptable__ = reject_scripting

    @rejects_unknown_keywords(CONSTRUCTOR_REPLACEMENTS)
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
        self.embed_dim = _check_size("embed_dim", embed_dim)
        self.num_heads = _check_size("num_heads", num_heads)
        self.num_kv_heads = _check_kv_heads(num_heads, num_kv_heads)
        self.head_dim = head_dim_of(embed_dim, num_heads) if head_dim is None else _check_size("head_dim", head_dim)
        self.value_head_dim = _check_size("value_head_dim", self.head_dim if value_head_dim is None else value_head_dim)
        self.key_dim = _check_size("key_dim", embed_dim if key_dim is None else key_dim)
        self.value_dim = _check_size("value_dim", self.key_dim if value_dim is None else value_dim)
        check_fraction("dropout", dropout)
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
        self.output_dim = merged_dim if not output_projection else _check_size("output_dim", output_dim or embed_dim)

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
        _check_option_types(rotary, qk_norm, position_bias, scale)
        if rotary is not None:
            rotary.check_head_dim(self.head_dim)
        self.rotary, self.position_bias = rotary, position_bias
        self.softcap, self.add_zero_attn = softcap, add_zero_attn
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        self.qk_norm = None if qk_norm is None else qk_norm.build(*heads, device=device, dtype=dtype)

        def parameter_if(wanted: bool, *size: int) -> nn.Parameter | None:  # noqa: FBT001 - the calls below are clear
            return nn.Parameter(torch.empty(size, device=device, dtype=dtype)) if wanted else None

        self.sinks = parameter_if(sinks, num_heads)
        self.head_gates = parameter_if(head_gates, num_heads)
        self.bias_k = parameter_if(add_bias_kv, self.num_kv_heads, self.head_dim)
        self.bias_v = parameter_if(add_bias_kv, self.num_kv_heads, self.value_head_dim)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weights (Xavier uniform per projection), set biases and sinks to 0 and gates to 1.

        The parameters of a `position_bias` are not changed; call its own `reset_parameters`.
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
        padding_side: PaddingSide = "right",
        packing: Packing | None = None,
        cache: KeyValueCache | None = None,
        head_gates: Tensor | None = None,
        query_start: int | Tensor | str | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Compute attention from x to memory (cross-attention), or to x itself.

        Args:
            x: (batch, queries, embed_dim), or (queries, embed_dim).
            memory: (batch, keys, key_dim), from which keys and values are projected; x if None.
            values: (batch, keys, value_dim), from which values are projected; memory if None.
            mask: which keys each query may see.
            bias: added to the scores, broadcasting to (batch, heads, queries, keys), or `scores.RelativeBias`.
            lengths: (batch,) number of tokens of each sample of x; the rest is padding, which is skipped, with output
                0.
            memory_lengths: (batch,) number of tokens of each sample of memory; the rest is padding, which is skipped.
            padding_side: whether padding comes after ("right") or before ("left") the tokens of a sample.
            packing: the second result of `pack`, if x is packed (1, tokens, embed_dim); each sample attends only to
                itself, and the mask applies to each sample separately.
            cache: stores keys and values, which precede those of later calls; the mask applies to the whole sequence.
                In cross-attention the memory is projected in the first call only.
            head_gates: (heads,), or broadcasting to (batch, heads, queries): factors of the heads' outputs.
            query_start: position of the first query among the keys, see `attention`; None with a cache, which counts
                positions.
            unknown: must be empty; an argument name of another library, such as is_causal, raises an error with its
                replacement.

        Returns:
            (batch, queries, output_dim), with as many dimensions as x.

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: an argument does not fit; raised before anything is
                computed.
        """
        if unknown:
            raise_unknown_keywords(MultiHeadAttention.forward, unknown, LAYER_REPLACEMENTS)
        call = LayerCall(
            x,
            mask,
            memory,
            values,
            bias,
            lengths,
            memory_lengths,
            padding_side,
            packing,
            cache,
            head_gates,
            query_start,
        )
        if cache is not None:
            check_is_cache(cache)
        around = find_surroundings()
        # A tracer, a global module hook and a replaced nn.Linear.forward work only if the modules are called.
        calls_modules = around.intercepted or has_any_global_hook() or nn.Linear.forward is not _LINEAR_FORWARD
        with _NO_CONTEXT if cache is None else cache.rollback_on_error():
            ready = self._prepare_attention(call, around, calls_modules=calls_modules)
            q, (k, v, _, _, scales), terms, padding, *_ = ready
            # The output is (batch, heads, queries, value_head_dim).
            output = short_call.attend(q, k, v, terms, around, self._attend_by_plan, ready, scales)[0]
            if ready.local_layer.head_gates is not None:
                output = apply_gates(output, ready.local_layer.head_gates)
            if ready.head_gates is not None:
                output = apply_gates(output, ready.head_gates)
        # (batch, queries, heads * value_head_dim), or (batch, queries, value_head_dim)
        merged = output.transpose(1, 2).flatten(2) if self.merge == "concat" else output.mean(1)
        if padding.right_padded_query_packing is not None:
            merged = padding.right_padded_query_packing.pack(merged)  # (1, tokens, width): no padding is projected
        if self._modules.get("out_proj") is not None:
            merged = self._project("out_proj", merged, calls_modules)
        output = padding.restore_padding(merged)  # (batch, queries, output_dim)
        return output if ready.has_batch_dim else output[0]

    def _prepare_attention(self, call: LayerCall, around: Surroundings, *, calls_modules: bool) -> PreparedAttention:
        """Compute queries, keys and values of a call: project, split into heads, normalise, rotate, extend the cache.

        Args:
            call: the arguments of the call.
            around: what runs around the call.
            calls_modules: whether the modules of the projections must be called.
        """
        inputs, padding = self._check_and_drop_padding(call, around)
        x, memory, values, _ = inputs  # (batch, length, features), or (1, tokens, features) without padding
        is_self_attention, cache = memory is x, call.cache
        cached = None if cache is None or is_self_attention else cache.memory  # projected in an earlier call
        is_new = cached is None

        q = self._project("q_proj", x, calls_modules)  # (batch, queries, heads * head_dim)
        # (batch, keys, kv_heads * head_dim), or as the cache holds them
        k = self._project("k_proj", memory, calls_modules) if cached is None else cached.k
        v = self._project("v_proj", values, calls_modules) if cached is None else cached.v
        if padding is not NO_PADDING:
            q, k, v = padding.unpack_projected(x, q, memory, k, v, keys_are_new=is_new)
        local: ShardableLayer | LayerOfLocalHeads = self
        mask, bias, head_gates = call.mask, call.bias, call.head_gates
        if not self._holds_all_heads(q, k, v, keys_are_new=is_new):  # heads are split over processes
            of_all = CallOfHeads(self, k, v, mask, bias, head_gates)
            local, k, v, mask, bias, head_gates = of_all.slice_to_local_heads(self, q, keys_are_new=is_new)

        q = _split_into_heads(q, local.num_heads, self.head_dim)  # (batch, heads, queries, head_dim)
        if is_new:
            k = _split_into_heads(k, local.num_kv_heads, self.head_dim)  # (batch, kv_heads, keys, head_dim)
            v = _split_into_heads(v, local.num_kv_heads, self.value_head_dim)  # (batch, kv_heads, keys, value_head_dim)
        if local.qk_norm is not None:
            q, k = normalise_qk(local.qk_norm, q, k, keys_are_new=is_new)
        start: int | Tensor = 0
        # Other calls start at position 0, or `extend_cache` finds the position, which is too late for a rotation.
        if not is_self_attention or call.query_start is not None or (cache is not None and self.rotary is not None):
            matters = self.rotary is not None or self.position_bias is not None or mask.uses_positions
            start = find_query_start(call, q, k, is_self_attention=is_self_attention, matters=matters)
        if self.rotary is not None:
            packed = padding.positions  # (1, tokens) for packed samples
            same = packed is not None or (is_self_attention and cache is not None)
            places = start if packed is None else packed
            q, k = rotate(self.rotary, q, k, places, same_tokens=same, keys_are_new=is_new)
        if cache is None:
            mask = mask if padding is NO_PADDING else padding.hide_in_mask(mask)
            keys = KeysOfCall(k, v, mask, start)
        elif is_self_attention:
            keys = extend_cache(cache, k, v, mask, padding)
        else:
            keys = hold_memory(cache, q, KeysOfCall(k, v, mask, start), padding)
        keys, terms = self._add_bias_and_sinks(local, q, keys, bias, padding, cache)
        # If x and memory differ and query_start is given, x may hold the newest tokens of the sequence in memory.
        crosses = not is_self_attention if is_self_attention or call.query_start is None else None
        return PreparedAttention(q, keys, terms, padding, cache, crosses, local, head_gates, inputs.has_batch_dim)

    def _check_and_drop_padding(self, call: LayerCall, around: Surroundings) -> tuple[LayerInputs, Padding]:
        """Check a call, and return its padding, and x, memory and values without it.

        They are (batch, length, features) each, or (1, tokens, features) if there is padding.
        """
        x, packing, cache = call.x, call.packing, call.cache
        weight = self._modules["q_proj"]._parameters.get("weight")  # type: ignore[union-attr]  # noqa: SLF001
        alone = call.memory is None and call.values is None and call.memory_lengths is None and packing is None
        usual = alone and type(x) is Tensor and isinstance(call.mask, Mask) and weight is not None
        if usual and x.dim() == 3 and x.shape[2] == self.embed_dim == self.key_dim and x.dtype is weight.dtype:  # type: ignore[union-attr]
            inputs = LayerInputs(x, x, x)
        else:
            widths = LayerInputWidths(self.embed_dim, self.key_dim, self.value_dim, projection_dtype(self.q_proj))
            inputs = call.check_inputs(widths)
        if sequence_split.active_split is not None:
            call.check_sequence_split(inputs, added_key=self.bias_k is not None)
        if packing is not None:
            call.check_packing(packing, inputs.x)
        if cache is not None:
            call.check_cache(cache, inputs)
            cache.check_same_heads(self)
        if call.lengths is None and call.memory_lengths is None and packing is None:
            return inputs, NO_PADDING
        padding = call.find_padding(inputs, self, intercepted=around.intercepted)
        tokens = padding.drop_padding(inputs.x, inputs.memory, inputs.values)
        return LayerInputs(*tokens, inputs.has_batch_dim), padding

    def _project(self, name: str, x: Tensor, calls_modules: bool) -> Tensor:  # noqa: FBT001 - positions are faster
        """Project tokens: (batch, length, features) -> (batch, length, width).

        An nn.Linear without hooks is computed by F.linear, because calling the module takes 3 microseconds more.
        """
        projection: Any = self._modules[name]  # half a microsecond faster than nn.Module.__getattr__
        if calls_modules:
            return projection(x)  # type: ignore[no-any-return]
        state = projection.__dict__
        parameters = state["_parameters"]
        weight = parameters.get("weight")
        if (
            weight is None
            or type(projection) is not nn.Linear
            or state["_forward_pre_hooks"]
            or state["_forward_hooks"]
            or state["_backward_pre_hooks"]
            or state["_backward_hooks"]
            or "forward" in state
            or "_compiled_call_impl" in state
        ):
            return projection(x)  # type: ignore[no-any-return]
        return F.linear(x, weight, parameters.get("bias"))

    def _holds_all_heads(self, q: Tensor, k: Tensor, v: Tensor, *, keys_are_new: bool) -> bool:
        """Whether projected q, k and v (batch, length, width) contain all heads, and not only those of this process."""
        if type(q) is not Tensor or q.shape[2] != self.num_heads * self.head_dim:
            return False
        return not keys_are_new or (
            k.shape[2] == self.num_kv_heads * self.head_dim and v.shape[2] == self.num_kv_heads * self.value_head_dim
        )

    def _add_bias_and_sinks(
        self,
        local: ShardableLayer | LayerOfLocalHeads,
        q: Tensor,
        keys: KeysOfCall,
        bias: Bias | None,
        padding: Padding,
        cache: KeyValueCache | None,
    ) -> tuple[KeysOfCall, AttentionArguments]:
        """Prepend the learned key to the keys of a call, and return them and the other arguments of the attention."""
        if local.position_bias is not None:
            count = attention_map_size(q, keys.k, keys.v)
            own = local.position_bias(*count, query_start=keys.query_start, device=q.device, dtype=q.dtype)
            check_position_bias(own, padding, cache)
            bias = own if bias is None else add_biases(bias, own, *count)
        if local.bias_k is not None and local.bias_v is not None:
            keys = add_learned_key(keys, local.bias_k, local.bias_v, q.dtype)
            bias = None if bias is None else prepend_zero_column(bias, q.shape[2], keys.k.shape[2] - 1)
        sinks: Tensor | None = local.sinks
        if self.add_zero_attn:
            # A key of 0 with a value of 0 is a sink whose logit is 0.
            zero = q.new_zeros(q.shape[1])
            sinks = zero if sinks is None else torch.logaddexp(sinks, zero.to(sinks.dtype))
        dropout = self.dropout if self.training else 0.0
        return keys, (keys.mask, bias, self.softcap, sinks, self.scale, dropout, keys.query_start)

    def _attend_by_plan(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        terms: AttentionArguments,
        around: Surroundings,
        ready: PreparedAttention,
    ) -> tuple[Tensor]:
        """Compute the attention of a prepared call by its request: the output."""
        return (attend(self._request_of(ready, around)).output,)

    def _request_of(self, ready: PreparedAttention, around: Surroundings) -> AttentionRequest:
        """Build the attention request of a call, with its origin if a listener or a change of heads needs it."""
        q, (k, v, _, _, scales), terms, padding, cache, crosses, *_ = ready
        origin = None
        if around.listeners or head_changes.active_changes:
            origin = CallOrigin(
                self,
                None if cache is None else cache.last_call_position,
                crosses,
                qk_computed_for_call=cache is None,
                unpadded_queries=padding.unpadded_queries,
                input_places=padding.input_places,
            )
        more, fits = cache is not None, padding.documents is not None
        return request_of(q, k, v, *terms, around, more_keys_later=more, mask_fits=fits, origin=origin, scales=scales)

    def explain(
        self, x: Tensor, memory: Tensor | None = None, values: Tensor | None = None, **arguments: Any
    ) -> Explanation:
        """Explain a call without computing its attention: kernel, why other kernels refuse, fraction skipped, memory.

        The arguments are those of `forward`. The inputs are projected, and a cache is not changed.

        >>> layer = MultiHeadAttention(embed_dim=32, num_heads=4)
        >>> print(layer.explain(torch.zeros(2, 100, 32), lengths=(100, 20)))
        kernel   native
        skipped  ...% of the score matrix; its intervals hide 27.8%
        memory   about ... besides q, k and v
        """
        arguments = {"mask": _FULL, **arguments}
        unknown = {name: given for name, given in arguments.items() if name not in LayerCall._fields}
        if unknown:
            raise_unknown_keywords(MultiHeadAttention.forward, unknown, LAYER_REPLACEMENTS)
        call = LayerCall(x, memory=memory, values=values, **arguments)
        if call.cache is not None:
            check_is_cache(call.cache)
            call = call._replace(cache=deepcopy(call.cache))
        around = find_surroundings()
        ready = self._prepare_attention(call, around, calls_modules=True)
        request = self._request_of(ready, around)
        given = {"lengths": call.lengths, "memory_lengths": call.memory_lengths}
        devices = {name: each.device for name, each in given.items() if isinstance(each, Tensor)}
        far = [f"{name} on {device}" for name, device in devices.items() if device.type not in ("cpu", "meta")]
        waits = f"the host reads how many tokens there are, from {' and '.join(far)}" if far else None
        return explain_request(request, waits=waits)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        """Explain the state of an nn.MultiheadAttention, whose projections of q, k and v are one parameter."""
        super()._load_from_state_dict(state_dict, prefix, *others)
        if f"{prefix}in_proj_weight" in state_dict or f"{prefix}q_proj_weight" in state_dict:
            others[-1].append(
                "The state is that of an nn.MultiheadAttention: multihead.compat.torch_nn.from_torch(module) converts "
                "one to this layer."
            )

    def extra_repr(self) -> str:
        """Return the head counts and options that `print(layer)` shows."""
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


def _split_into_heads(x: Tensor, num_heads: int, head_dim: int) -> Tensor:
    """Split projected tokens into heads: (batch, length, heads * head_dim) -> (batch, heads, length, head_dim)."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, head_dim).transpose(1, 2)


def _check_size(name: str, value: int) -> int:
    check_integer(name, value)
    return value


def _check_kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    count = _check_size("num_kv_heads", num_heads if num_kv_heads is None else num_kv_heads)
    if num_heads % count:
        fitting = ", ".join(str(n) for n in head_counts(num_heads))
        raise ArgumentError(
            f"num_kv_heads is {count}, and num_heads is {num_heads}, which is not a multiple of it.",
            f"Give one of {fitting} (grouped-query attention, arXiv:2305.13245).",
        )
    return count


def _check_option_types(rotary: object, qk_norm: object, position_bias: object, scale: object) -> None:
    for name, given, kind, example in (
        ("rotary", rotary, Rotary, "mh.Rotary()"),
        ("qk_norm", qk_norm, QKNorm, 'mh.QKNorm("rms")'),
        ("position_bias", position_bias, nn.Module, "mh.scores.ALiBi(num_heads)"),
    ):
        if given is not None and not isinstance(given, kind):
            raise ArgumentError(f"{name} is {given!r}.", f"Give for example {name}={example}, or None.")
    if isinstance(position_bias, nn.Module):
        check_bias_signature(position_bias)
    check_scale(scale)
