"""Run a Hugging Face model without padding: the tokens of a padded batch are packed into one row.

A hook before the model packs its inputs (token ids, token types, positions, embeddings) into one row, (1, tokens), and
passes a mask that restricts attention to each sample. So embeddings, projections, attention and MLPs compute no
padding. Hooks after the model, and after the submodule whose output its pooler reads, restore the padded batch, with 0
at padding.

Nothing is stored between the hooks: the mask carries the packing through the model. So a model with these hooks can be
copied, pickled, checkpointed and called from several threads.

The hooks also restore hidden states and the cache. Hooks on layers instead of the model would recompute the packing
under activation checkpointing, and would have to know the argument names of each layer. T5's position bias is passed as
one number per distance (`RelativeBias`), because its own dense bias would have tokens x tokens elements for the whole
row.

Calls that cannot be packed (decoding, returned weights, graphs) run padded, with the same result, instead of raising an
error. T5's decoder is not packed: its queries and keys would be two rows, and its input rarely has padding, since the
decoder is causal and pads on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.layer.packing import Packing
from multihead.masks import Causal, Documents, Full, Mask, Window
from multihead.models.bypass import raise_bypass_error
from multihead.models.huggingface import install_until_undone
from multihead.models.lazy_mask import LazyMask
from multihead.models.mask_functions import MaskExtent
from multihead.models.pretrained import (
    first_layer_type_mask,
    is_submodule_of,
    pretrained_models,
    signature_without_self,
)
from multihead.models.rejection import selects_our_attention
from multihead.scores.bias import RelativeBias, offsets
from multihead.scores.position_biases import distance_buckets
from multihead.tensors.tracing import is_traced
from multihead.tensors.undo import Undo

_PER_TOKEN_ARGUMENTS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")  # (batch, tokens, ...)


def _columns_in_padded_row(_: Any, __: dict[str, Any], real: Tensor) -> Tensor:
    """Return the column of each token of a padded batch, (1, length)."""
    return torch.arange(real.shape[1], device=real.device)[None]


def _roberta_positions(model: Any, inputs: dict[str, Any], real: Tensor) -> Tensor:
    """Return the default position ids of RoBERTa, (batch or 1, length), from token ids, or the length of embeddings."""
    embeddings, ids = model.embeddings, inputs.get("input_ids")
    if ids is None:
        return _columns_in_padded_row(model, inputs, real) + 1 + int(embeddings.padding_idx)
    return embeddings.create_position_ids_from_input_ids(ids, embeddings.padding_idx)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PackedFamily:
    """Settings for running models of one class of transformers on a packed row of tokens.

    Attributes:
        name: name of the family in the documentation and in errors.
        default_positions: function that returns the default position ids of a padded batch, (batch or 1, length); None
            for models without them.
        pooler_input: name of the submodule whose output the model's pooler reads as a padded batch; "" for none.
        relative_bias_module: name of the submodule that computes a relative position bias; "" for none.
        is_decoder: whether attention is causal, unless `is_causal` of a model's configuration is False.
        attention_types: types of attention, in transformers' words, that the model's layers may have.
    """

    name: str
    default_positions: Callable[[Any, dict[str, Any], Tensor], Tensor] | None = _columns_in_padded_row
    pooler_input: str = ""
    relative_bias_module: str = ""
    is_decoder: bool = False
    attention_types: tuple[str, ...] = ("full_attention",)

    def sample_masks(self, config: Any) -> dict[str, Mask]:
        """Return the mask within one sample for each type of attention: type -> mask."""
        causal = self.is_decoder and getattr(config, "is_causal", True)
        masks: dict[str, Mask] = {"full_attention": Causal() if causal else Full()}
        width = config.sliding_window if "sliding_attention" in self.attention_types else None
        if width is not None:  # in a causal window the query is one of the `width` keys; else they are on each side
            masks["sliding_attention"] = Window(width) if causal else Window(width + 1, after=width)
        return {name: masks.get(name, masks["full_attention"]) for name in self.attention_types}


_BY_LAYER_TYPE = ("full_attention", "sliding_attention")
PACKED_FAMILIES = {
    "BertModel": PackedFamily("BERT", pooler_input="encoder"),
    "RobertaModel": PackedFamily("RoBERTa", _roberta_positions, pooler_input="encoder"),
    "XLMRobertaModel": PackedFamily("XLM-RoBERTa", _roberta_positions, pooler_input="encoder"),
    "DistilBertModel": PackedFamily("DistilBERT"),
    "ElectraModel": PackedFamily("ELECTRA"),
    "ModernBertModel": PackedFamily("ModernBERT", attention_types=_BY_LAYER_TYPE),
    "LlamaModel": PackedFamily("Llama", is_decoder=True),
    "MistralModel": PackedFamily("Mistral", is_decoder=True, attention_types=("sliding_attention",)),
    "Qwen2Model": PackedFamily("Qwen2", is_decoder=True, attention_types=_BY_LAYER_TYPE),
    "Qwen3Model": PackedFamily("Qwen3", is_decoder=True, attention_types=_BY_LAYER_TYPE),
    "T5Stack": PackedFamily("T5", None, relative_bias_module="block.0"),
}
"""Name of the transformers class that has the layers -> how its models are packed."""


_padded_contexts: ContextVar[frozenset[object]] = ContextVar("padded", default=frozenset())
"""One object per active context of `run_models_padded`."""


def leave_out_padding(model: nn.Module) -> Undo:
    """Leave padding out of all Hugging Face models in a module, and run their attention on this library's kernels.

    Outputs equal those of the padded batch up to rounding, and are 0 at padding. A call is packed if it has an
    attention mask (batch, length) with padding. A call still runs padded if it

    - continues a cache, or fills a cache that is not a `DynamicCache`, or has sliding windows,
    - returns attention weights, is observed, or is traced by a compiler or a transform,
    - belongs to a decoder of BERT's kind or of T5, which may have cross-attention,
    - has padding between the tokens of a sample, and a mask or bias by distance, as in ModernBERT and T5,
    - computes feed-forward layers in chunks, or rotary frequencies from the length ("dynamic", "longrope").

    Args:
        model: a model of transformers, or a module that contains some.

    Returns:
        the handle that restores the model.

    Raises:
        ModelError: `model` contains no model of transformers, or one of a family that is not supported.
    """
    stacks = _modules_to_pack(model)
    return Undo.run_change(partial(_add_hooks, model, stacks))


def _add_hooks(model: nn.Module, stacks: list[tuple[nn.Module, PackedFamily]], undo: Undo) -> None:
    # The hooks that unpack are added first. So they are removed last, and run before a model is restored at the end of
    # its last pass.
    for module, family in stacks:
        for name in {"", family.pooler_input}:  # "" is the module itself
            undo.hook_after_forward(module.get_submodule(name), _unpack_outputs, with_kwargs=True)
    install_until_undone(model, raise_bypass_error, undo)
    for module, family in stacks:
        if family.relative_bias_module:
            block = module.get_submodule(family.relative_bias_module)
            undo.hook_before_forward(block, _add_relative_bias, with_kwargs=True)
        undo.hook_before_forward(module, partial(_pack_inputs, family), with_kwargs=True)


@contextmanager
def run_models_padded() -> Iterator[None]:
    """Disable packing in this context and thread, because a record expects one row per sample."""
    user = object()
    with Undo() as undo:
        undo.add_step(lambda: _padded_contexts.set(_padded_contexts.get() - {user}))
        _padded_contexts.set(_padded_contexts.get() | {user})
        yield


def _modules_to_pack(model: nn.Module) -> list[tuple[nn.Module, PackedFamily]]:
    """Return the modules to pack and their families; reject a model of transformers that has no such module."""
    models = pretrained_models(model)
    found = {name: family for name, module in models.items() if (family := _family_of_class(type(module))) is not None}
    for name, module in models.items():
        if not any(is_submodule_of(name, other) or is_submodule_of(other, name) for other in found):
            raise _unsupported_error(f"{type(module).__name__} cannot leave out padding.")
    if not found:
        raise _unsupported_error(f"{type(model).__name__} contains no model of transformers.")
    return [(models[name], family) for name, family in found.items()]


def _unsupported_error(finding: str) -> ModelError:
    names = ", ".join(family.name for family in PACKED_FAMILIES.values())
    return ModelError(finding, f"Give a model of one of these families: {names}; or use packed=False.")


def _family_of_class(kind: type[nn.Module]) -> PackedFamily | None:
    """Return the family of a class; None if it is not supported, or a subclass with its own forward."""
    for parent in kind.__mro__:
        if parent.__module__.startswith("transformers.") and parent.__name__ in PACKED_FAMILIES:
            return PACKED_FAMILIES[parent.__name__] if kind.forward is parent.forward else None  # type: ignore[attr-defined]
    return None


def _pack_inputs(
    family: PackedFamily, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a model that packs its inputs; None leaves the inputs unchanged.

    torch calls hooks of this file without `kwargs` while another thread adds or removes them.
    """
    if kwargs is None or is_traced():
        return None  # the number of tokens is unknown in a compiled graph
    inputs = dict(zip(signature_without_self(type(model).forward).parameters, args, strict=False)) | kwargs
    real = _non_padding_tokens(inputs)
    if real is None or not _can_pack(model, inputs):
        return None
    lengths = real.sum(1)
    counts = tuple(lengths.tolist())
    tokens, (batch, length) = sum(counts), real.shape
    if tokens in (0, real.numel()):
        return None
    masks = family.sample_masks(model.config)
    windows = any(mask.lookback is not None for mask in masks.values())
    if (windows and _fills_cache(model, inputs)) or (
        (windows or family.relative_bias_module) and _has_inner_padding(real, tokens)
    ):
        return None
    packing = Packing(lengths, real.flatten().nonzero().flatten(), batch, length)
    if family.default_positions is not None and inputs.get("position_ids") is None:
        inputs["position_ids"] = family.default_positions(model, inputs, real)
    for name in _PER_TOKEN_ARGUMENTS:
        if isinstance(value := inputs.get(name), Tensor):
            inputs[name] = packing.pack(value.expand(batch, *value.shape[1:]))
    documents, extent = Documents(counts), MaskExtent(1, tokens, tokens, 0, 0, packing.index.device)
    rows = {name: LazyMask(mask & documents, extent, packing=packing) for name, mask in masks.items()}
    inputs["attention_mask"] = rows if len(rows) > 1 else rows[family.attention_types[0]]
    return (), inputs


def _non_padding_tokens(inputs: dict[str, Any]) -> Tensor | None:
    """Return which tokens are not padding, (batch, length) bool; None if there is no attention mask of that shape."""
    mask, first = inputs.get("attention_mask"), inputs.get("input_ids")
    first = inputs.get("inputs_embeds") if first is None else first
    if not isinstance(mask, Tensor) or not isinstance(first, Tensor):
        return None
    if mask.dim() != 2 or mask.shape != first.shape[:2]:
        return None
    positions = inputs.get("position_ids")
    if isinstance(positions, Tensor) and (positions.dim() != 2 or positions.shape[0] not in (1, len(mask))):
        return None
    return (mask if mask.dtype == torch.bool else mask != 0).to(first.device)


def _can_pack(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether a call of a model may run on a packed row; `leave_out_padding` lists the calls that may not."""
    config = model.config
    rotary = getattr(getattr(model, "rotary_emb", None), "rope_type", "default")
    return not (
        _padded_contexts.get()
        or not selects_our_attention(config)  # the user has chosen another attention
        or getattr(config, "is_decoder", False)
        or inputs.get("encoder_hidden_states") is not None
        or inputs.get("output_attentions", getattr(config, "output_attentions", False))
        or not _is_empty_cache(inputs.get("past_key_values"))
        or getattr(config, "chunk_size_feed_forward", 0)
        or {"dynamic", "longrope"} & set(rotary.values() if isinstance(rotary, dict) else (rotary,))
    )


def _has_inner_padding(real: Tensor, tokens: int) -> bool:
    """Whether there is padding between the tokens of a sample, found by counting pairs of adjacent tokens."""
    neighbours = (real[:, 1:] & real[:, :-1]).sum()
    return bool(neighbours + real.any(1).sum() != tokens)


def _fills_cache(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether a call of a model fills a cache with keys and values (`use_cache`)."""
    given = inputs.get("use_cache")
    return bool(getattr(model.config, "use_cache", False) if given is None else given)


def _is_empty_cache(store: Any) -> bool:
    """Whether there is no cache, or an empty DynamicCache, whose keys and values can be padded later."""
    if store is None:
        return True
    from transformers.cache_utils import DynamicCache, DynamicLayer

    plain = type(store) is DynamicCache and all(type(layer) is DynamicLayer for layer in store.layers)
    return plain and store.get_seq_length() == 0


def _packing_of_mask(mask: Any) -> Packing | None:
    """Return the packing that the mask of a packed row carries; None for any other mask."""
    return mask.packing if isinstance(mask, LazyMask) else None


def _unpack_outputs(_: nn.Module, __: tuple[Any, ...], *given: Any) -> Any:
    """Forward hook of a model or submodule that restores the padded batch in its outputs."""
    kwargs, output = given if len(given) > 1 else ({}, *given)
    packing = _packing_of_mask(first_layer_type_mask(kwargs.get("attention_mask")))
    return output if packing is None else _unpack_tensors(output, packing)


def _unpack_tensors(output: Any, packing: Packing) -> Any:
    """Restore the padded batch in all tensors (1, tokens, features) of an output, and in the layers of a cache."""
    if isinstance(output, Tensor):
        in_row = output.dim() == 3 and output.shape[:2] == (1, len(packing.index))
        return packing.unpack(output) if in_row else output
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = _unpack_tensors(value, packing)
        return output
    if isinstance(output, tuple):
        return tuple(_unpack_tensors(value, packing) for value in output)
    for layer in getattr(output, "layers", ()):
        if layer.is_initialized and layer.keys.shape[-2] == len(packing.index):
            layer.keys, layer.values = (_unpack_cached_heads(each, packing) for each in (layer.keys, layer.values))
    return output


def _unpack_cached_heads(x: Tensor, packing: Packing) -> Tensor:
    """Restore the padded batch of cached keys: (1, kv_heads, tokens, dim) -> (batch, kv_heads, length, dim)."""
    rows = packing.unpack(x.transpose(1, 2).flatten(2))  # (batch, length, kv_heads * dim)
    return rows.view(*rows.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)


def _add_relative_bias(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook that passes a relative position bias in linear memory to the first block of T5.

    Without this bias, the block computes one of tokens x tokens numbers. Distances within a sample are the same in the
    packed row as in the padded batch.
    """
    hidden_states, mask, *others = args
    if kwargs is None or _packing_of_mask(mask) is None:
        return None
    layer, tokens = block.layer[0].SelfAttention, hidden_states.shape[1]
    weight = layer.relative_attention_bias.weight
    buckets = distance_buckets(
        offsets(tokens, tokens, device=weight.device),
        num_buckets=layer.relative_attention_num_buckets,
        max_distance=layer.relative_attention_max_distance,
        both_ways=not layer.is_decoder,
    )
    bias = RelativeBias(nn.functional.embedding(buckets, weight).mT)
    return (hidden_states, mask, bias, *others[1:]), kwargs
