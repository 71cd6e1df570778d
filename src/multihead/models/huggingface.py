"""Make a Hugging Face model call this library's attention, and restore it.

transformers selects a model's attention by name: `AttentionInterface` registers the function that computes it, and
`AttentionMaskInterface` the function that makes its mask. Both are needed: without a function that makes the mask,
transformers passes no mask at all, and padding and causality are silently ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.compat.torch_nn.replace import replace_until_undone
from multihead.errors import ModelError
from multihead.functional import attend, request_of
from multihead.kernels import head_changes, sequence_split
from multihead.kernels.call import (
    AttentionArguments,
    AttentionRequest,
    CallOrigin,
    KeyPlaces,
    Surroundings,
    find_surroundings,
)
from multihead.kernels.native import short_call
from multihead.kernels.sequence_split import reject_split_sequence
from multihead.layer.sharding import slice_to_rank
from multihead.masks import Causal, Full, Keep, Mask
from multihead.models import output_attentions
from multihead.models.bypass import ReportBypass, call_counts, raise_bypass_error, report_bypassing_modules
from multihead.models.config_in_use import is_none_mask_causal, select_in_passes
from multihead.models.coverage import IMPLEMENTATION_NAME, names_in_eager_attention, require_attention_interface
from multihead.models.lazy_mask import BooleanMask, LazyMask
from multihead.models.mask_functions import MaskExtent, mask_of_function, padding_mask, padding_of_keys
from multihead.models.packed_rows import TEXT_EDGES, count_mask, report_packed_rows, separate_texts
from multihead.models.pretrained import is_cross_attention, pretrained_models
from multihead.models.rejection import reject_unsupported_models
from multihead.scores.bias import Bias, add_biases
from multihead.tensors.tracing import constant_in_graphs, is_traced
from multihead.tensors.undo import Undo

_FULL_MASK, _CAUSAL_MASK = Full(), Causal()
_TEXT_EDGES = frozenset(TEXT_EDGES)
# Most queries of a step of decoding, with assisted generation too. `generate` makes the mask of a step with a static
# cache, whose length is a tensor, outside of the compiled forward.
_MOST_DECODED_TOKENS = 32
# types of models whose layers concatenate numbers to the mask, which must therefore be additive
_ADDITIVE_MASK_MODEL_TYPES = frozenset({"deepseek_v4"})


def install(model: nn.Module, report: ReportBypass = raise_bypass_error) -> Undo:
    """Make all Hugging Face models in a module call this library's attention; nn.MultiheadAttention is replaced too.

    Args:
        model: any module.
        report: receives a sentence for each module that bypasses this library's attention; raises by default.

    Returns:
        the handle that restores the model.

    Raises:
        ModelError: a model computes attention without transformers' AttentionInterface.
    """
    return Undo.run_change(partial(install_until_undone, model, report))


def install_until_undone(model: nn.Module, report: ReportBypass, undo: Undo) -> None:
    """Do what `install` does, until `undo` restores the model; arguments are those of `install`."""
    models = pretrained_models(model)
    if not models:
        return
    register_in_transformers()
    replace_until_undone(undo, model)
    require_attention_interface(model)
    select_in_passes(undo, model, models.values(), IMPLEMENTATION_NAME)
    report_bypassing_modules(undo, model, models, report)
    report_packed_rows(undo, models.values())


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,  # noqa: FBT001 - the signature is that of transformers
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Bias | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    cache: object = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Compute one attention call of a Hugging Face model; registered in `AttentionInterface`.

    Args:
        module: the layer that makes the call.
        query: (batch, heads, queries, head_dim), after rotary embedding.
        key: (batch, kv_heads, keys, head_dim), after rotary embedding and cache.
        value: (batch, kv_heads, keys, value_dim).
        attention_mask: the mask from `transformers_mask`, or a tensor made by the model or the user, or None.
        scaling: factor of the dot products q . k; None: 1 / sqrt(head_dim).
        dropout: probability that a weight is set to 0.
        is_causal: whether to hide later keys; used only without a mask and with more than one query.
        softcap: the c in c * tanh(scores / c), which limits scores; None: no limit.
        s_aux: (heads,), an attention sink per head: a logit in the softmax without a value.
        position_bias: (batch or 1, heads, queries, keys), added to the scores; or a RelativeBias.
        indices: (batch, queries, selected) int, the keys that each query of sparse attention selects; -1 = none.
        block_indices: (batch, groups, queries, selected) int, the blocks of keys that each query selects, per group
            of heads; -1 = none. The layer's `indexer.block_size` is the number of keys in a block.
        sinks: (batch, heads, queries, 1), a sink per query, which is not supported.
        cache: the paged cache of continuous batching, which is not supported.
        options: further arguments that transformers passes to attention functions.

    Returns:
        (batch, queries, heads, value_dim), contiguous; and the attention weights if the model returns them, else None.
    """
    if not torch.compiler.is_compiling():
        call_counts.count += 1
    has_edges = not _TEXT_EDGES.isdisjoint(options)
    edges = {name: options.pop(name) for name in TEXT_EDGES if name in options} if has_edges else None
    _check_arguments(module, cache, sinks, options)
    if query.dtype != value.dtype and torch.is_autocast_enabled(query.device.type):
        query, key = query.to(value.dtype), key.to(value.dtype)  # rotary embedding converted them to float32
    if "rank_heads" in module.__dict__:  # `parallelize` split the layer
        key, value, s_aux = slice_to_rank(module, query, key, value, s_aux)
    keys = key.shape[2]
    attention_mask = _mask_of_first_keys(attention_mask, keys)
    mask, bias, start = _mask_of_call(module, attention_mask, query.shape[2], keys, is_causal=is_causal)
    if edges:
        mask, start = separate_texts(mask, module, edges, query, key), start or 0
    if indices is not None or block_indices is not None:
        mask = mask & _mask_of_selection(module, indices, block_indices, query.shape[1], keys)
    if isinstance(position_bias, Tensor):
        position_bias = position_bias[..., :keys]
    if position_bias is not None:
        bias = position_bias if bias is None else add_biases(position_bias, bias, query.shape[2], keys)
    terms, around = (mask, bias, softcap, s_aux, scaling, float(dropout), start), find_surroundings()
    call = (query, key, value, terms, around)
    weights = None
    if output_attentions.are_weights_wanted(options):
        reject_split_sequence("output_attentions=True", "Compute the weights outside, from all tokens.")
        request = _request_of_call(*call, (module, attention_mask))
        output, logsumexp, *_ = short_call.attend(*call, _attend_request, request, logsumexp=True)
        weights = output_attentions.weights_of(request, logsumexp)
    else:
        output = short_call.attend(*call, _attend_by_plan, (module, attention_mask))[0]
    # Usually no copy: the output has the strides of q, which is a transposed (batch, queries, heads, head_dim).
    return output.transpose(1, 2).contiguous(), weights


def _attend_by_plan(*call: Any) -> tuple[Tensor]:
    """Compute a call whose arguments are those of `_request_of_call`: the output."""
    return (attend(_request_of_call(*call)).output,)


def _attend_request(*call: Any) -> tuple[Tensor, Tensor]:
    """Compute a call by its request, the last argument: output and logsumexp."""
    result = attend(call[-1])
    return result.output, result.logsumexp


def _request_of_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: AttentionArguments,
    around: Surroundings,
    context: tuple[nn.Module, Tensor | None],
) -> AttentionRequest:
    """Build the request of a call; the context is the module and the attention mask of `transformers_attention`."""
    mask, bias, softcap, sinks, scale, dropout, start = terms
    module, attention_mask = context
    if start is None:  # the mask does not need the position of the first query, but listeners do
        later = (around.listeners or head_changes.active_changes) and not is_cross_attention(module)
        start = max(key.shape[2] - query.shape[2], 0) if later else 0
    origin = _origin_of_call(module, attention_mask)
    return request_of(query, key, value, mask, bias, softcap, sinks, scale, dropout, start, around, origin=origin)


def _mask_of_first_keys(attention_mask: Tensor | None, keys: int) -> Tensor | None:
    """Slice the mask of a call to the first `keys` keys if it is lazy; a compiled graph takes a step's plain tensor."""
    if not isinstance(attention_mask, LazyMask):
        return attention_mask
    if is_traced() and attention_mask.decoded is not None:
        return attention_mask.decoded
    return attention_mask if attention_mask.extent.keys == keys else attention_mask.select_first_keys(keys)


def _check_arguments(module: nn.Module, cache: object, sinks: Tensor | None, options: dict[str, object]) -> None:
    """Reject arguments of a call that the layer's eager attention uses and ours would ignore."""
    if cache is not None:
        raise ModelError(
            "The model runs with continuous batching, which this library does not support.",
            "Call model(...) or model.generate(...).",
        )
    if sinks is not None:
        raise ModelError(
            f"{type(module).__name__} computes a sink per query, and our kernels have a sink per head.",
            "Use this model with attn_implementation='eager'.",
        )
    for name, value in options.items():
        if isinstance(value, Tensor) and _may_eager_use(type(module), name):
            raise ModelError(
                f"{type(module).__name__} passes the tensor {name!r} to its attention, which this library's attention "
                "does not know.",
                "Use this model with attn_implementation='eager'.",
            )


@constant_in_graphs
def _may_eager_use(kind: Any, name: str) -> bool:
    known = names_in_eager_attention(kind)
    return known is None or name in known


def _mask_of_call(
    module: nn.Module, attention_mask: Tensor | None, queries: int, keys: int, *, is_causal: bool | None
) -> tuple[Mask, Bias | None, int | None]:
    """Return the Mask of a call, the bias that its mask tensor adds to scores, and the index of the first query.

    The index of the first query counts from the first key; None if the mask does not depend on positions.
    """
    if attention_mask is None:
        # In a compiled graph None stands for a causal mask, see `transformers_mask`. Otherwise the model made no mask,
        # in which case eager attention hides nothing, whatever the module's `is_causal` is (BridgeTower), or a model
        # around the one in use made it with another attention.
        causal = is_causal
        if causal is None:
            causal = getattr(module, "is_causal", None if is_traced() else False)
            causal = causal if is_traced() else bool(causal) and is_none_mask_causal(module)
        if queries > 1 and (not is_cross_attention(module) if causal is None else causal):
            return _CAUSAL_MASK, None, 0  # as in transformers, the first query is at the position of the first key
        return _FULL_MASK, None, None
    if isinstance(attention_mask, LazyMask):
        return attention_mask.mask, None, attention_mask.extent.query_start
    if isinstance(attention_mask, BooleanMask):
        attention_mask = attention_mask.as_bool_tensor()
    return *mask_of_tensor(attention_mask, keys), None


def _mask_of_selection(
    module: Any, indices: Tensor | None, block_indices: Tensor | None, heads: int, keys: int
) -> Mask:
    """Return the mask of the keys that sparse attention selects; arguments are those of `transformers_attention`."""
    mask: Mask = _FULL_MASK
    if indices is not None:
        mask = mask & Keep(_indices_to_mask(indices.long(), keys)[:, None])
    if block_indices is not None:
        size = module.indexer.block_size
        seen = _indices_to_mask(block_indices.long(), -(-keys // size)).repeat_interleave(size, -1)[..., :keys]
        mask = mask & Keep(seen.repeat_interleave(heads // block_indices.shape[1], 1))
    return mask


def _origin_of_call(module: nn.Module, attention_mask: Tensor | None) -> CallOrigin:
    """Return the origin of a call; the places of its keys are those of its mask."""
    if not isinstance(attention_mask, LazyMask):
        return CallOrigin(module, key_places=KeyPlaces())
    packing, places = attention_mask.packing, KeyPlaces(attention_mask.extent.key_offset, attention_mask.padding)
    return CallOrigin(module, key_places=places, input_places=None if packing is None else packing.input_places)


def transformers_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """Make the mask of a Hugging Face model's call; registered in `AttentionMaskInterface`.

    Args:
        batch_size: number of samples.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query in the sequence.
        kv_offset: position of the first key in the sequence.
        mask_function: returns whether a query may see a key, from the indices (batch, head, query, key).
        attention_mask: (batch, tokens), 1 or True = no padding.
        device: device of the model.
        options: further arguments that transformers passes to mask functions.

    Returns:
        a LazyMask, which stores no queries x keys tensor if the mask function is recognised. In a compiled graph a bool
        tensor, or None for a plain causal mask, which `transformers_attention` makes from `is_causal`.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function

    make_dense_mask = partial(
        sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    if is_traced():
        # A compiled graph must not depend on values of tensors, so every mask but a plain causal one is dense there.
        whole = function is causal_mask_function and attention_mask is None and q_length in (1, kv_length)
        if whole and options.get("allow_is_causal_skip", True):
            return None
        return _mask_in_model_format(make_dense_mask(), options)
    extent = MaskExtent(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
    padding = None if attention_mask is None else padding_of_keys(attention_mask, extent)
    mask = mask_of_function(function, extent)
    count_mask(mask)
    if sequence_split.active_split is not None:
        _check_mask_of_rank(mask, padding)
    if mask is None:
        mask = Keep(make_dense_mask(allow_is_causal_skip=False, allow_is_bidirectional_skip=False))
    elif padding is not None:
        mask = mask & padding_mask(padding)
    lazy = LazyMask(mask, extent, padding)
    lazy.is_token = None if attention_mask is None else attention_mask.to(torch.bool)
    if isinstance(q_offset, Tensor) and q_length <= _MOST_DECODED_TOKENS:
        lazy.decoded = lazy.as_bool_tensor()
    return _mask_in_model_format(lazy, options)


def _mask_in_model_format(mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Return a mask in the dtype that the model's layers expect: Boolean, or numbers that are added to scores."""
    if getattr(options.get("config"), "model_type", "") not in _ADDITIVE_MASK_MODEL_TYPES:
        return mask
    dtype = options.get("dtype") or torch.float32
    shown = mask.as_bool_tensor() if isinstance(mask, LazyMask) else mask
    return torch.zeros((), dtype=dtype, device=shown.device).where(shown, torch.finfo(dtype).min)


def _check_mask_of_rank(mask: Mask | None, padding: Tensor | None) -> None:
    """Check that a mask made from one rank's tokens can be applied to the whole sequence of all ranks.

    Args:
        mask: the mask, or None where it is unknown.
        padding: (batch, keys) bool, True = no padding; or None.
    """
    if padding is not None and not bool(padding.all()):
        raise ModelError(
            "attention_mask hides tokens of this rank, and in context_parallel masks are those of the whole sequence.",
            "Give attention_mask=torch.ones_like(input_ids), and context_parallel(..., mask=masks.Lengths(lengths)).",
        )
    if mask is None or mask.holds_tensors:  # made from document positions, chunks or an unknown mask function
        raise ModelError(
            f"The model's mask of this rank's tokens is {mask!r}, which does not determine the mask of the whole "
            "sequence.",
            "Give attention_mask=torch.ones_like(input_ids), so that the model reads no documents from positions, and "
            "the documents to context_parallel(..., mask=masks.Documents(lengths)).",
        )


def mask_of_tensor(tensor: Tensor, keys: int) -> tuple[Mask, Tensor | None]:
    """Convert a mask tensor of a model or a user to a mask, and to a bias if it also changes visible scores.

    Args:
        tensor: (batch or 1, heads or 1, queries or 1, keys or more), or (batch, queries, keys), or (batch, keys);
            bool, True = visible; integers, 1 = visible; floating point: added to the scores.
        keys: number of keys.

    Returns:
        the mask; and the bias, or None if it is 0 for every visible key.
    """
    tensor = tensor[..., :keys]
    if tensor.dim() == 2:
        tensor = tensor[:, None, None]
    elif tensor.dim() == 3:
        tensor = tensor[:, None]
    if not tensor.is_floating_point():
        return Keep(tensor.bool()), None
    # Scores below half of the lowest number are hidden: two masks may have been added, and rounding to another dtype
    # changes the lowest number.
    hidden = tensor <= torch.finfo(tensor.dtype).min / 2
    bias = tensor.masked_fill(hidden, 0)
    # A compiled graph cannot branch on the values of a tensor.
    added_to_scores = is_traced() or tensor.requires_grad or bool((bias != 0).any())
    return Keep(~hidden), bias if added_to_scores else None


def _indices_to_mask(indices: Tensor, count: int) -> Tensor:
    """Convert indices (..., queries, selected), -1 = none, to a mask, bool (..., queries, count)."""
    seen = indices.new_zeros((*indices.shape[:-1], count + 1), dtype=torch.bool)
    return seen.scatter(-1, indices.where(indices >= 0, count), value=True)[..., :count]


@cache
def register_in_transformers() -> None:
    """Register this library's attention and mask functions in transformers; cached, so once per process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION_NAME, transformers_attention)
    AttentionMaskInterface.register(IMPLEMENTATION_NAME, transformers_mask)
    reject_unsupported_models()
    output_attentions.allow_output_attentions()
