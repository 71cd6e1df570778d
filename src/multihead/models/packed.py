"""Leave padding out of a Hugging Face model: the tokens of a padded batch run as one row.

A hook before the model packs its inputs (token ids, token types, positions, embeddings) into one row, (1, tokens), and
passes a mask with which each sample sees only itself. Embeddings, projections, attention and MLPs then compute tokens
alone. Hooks after the model, and after the part of it that its own pooler reads, restore the padded batch, padding 0.

Nothing is stored between the hooks: the mask carries the packing through the model. So a model with these hooks can be
copied, pickled, checkpointed and called from several threads.

Hooks before and after the model, and after the encoder that a pooler reads, replace ids, positions and the mask, and
restore outputs, hidden states and the cache. Wrapping layers instead would recompute the packing under activation
checkpointing, and need the name of each argument of each layer. T5 gets its bias by distance, since its own would hold
tokens x tokens of the whole row.

What cannot be packed runs padded, with the same result, instead of raising: decoding, returned weights, graphs. T5's
decoder is not packed: its queries and keys would be two rows, and it is rarely given padding, since it is causal and
its padding is on the right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.layer.packing import Packing
from multihead.masks import Causal, Documents, Full, Mask, Window
from multihead.models.huggingface import NAME, install
from multihead.models.lazy_mask import LazyMask
from multihead.models.pretrained import is_within, pretrained_models
from multihead.scores.bias import RelativeBias, offsets
from multihead.scores.position_biases import distance_buckets
from multihead.tensors.tracing import is_traced
from multihead.tensors.undo import Undo

_PER_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")  # arguments with a value per token


@dataclass(frozen=True)
class PackedFamily:
    """How models of a class run on one packed row of tokens.

    Attributes:
        name: the family, for the documentation and errors.
        masks: returns the mask of each token within its own sample, from the configuration; a dict where the layers
            of a model have different masks.
        positions: returns the position ids of a padded batch, (batch or 1, length), where the caller gives none; None
            where the model takes none.
        read_by_model: the part whose output the model itself reads as a padded batch (its pooler); "" for none.
        relative: the layer that computes a bias from distances; "" for none.
    """

    name: str
    masks: Callable[[Any], Mask | dict[str, Mask]]
    positions: Callable[[Any, dict[str, Any], Tensor], Tensor] | None
    read_by_model: str = ""
    relative: str = ""


def _columns_in_padded_row(_: Any, __: dict[str, Any], real: Tensor) -> Tensor:
    """Return the index of each token in its padded row."""
    return torch.arange(real.shape[1], device=real.device)[None]


def _roberta_positions(model: Any, inputs: dict[str, Any], real: Tensor) -> Tensor:
    """Return the positions that RoBERTa counts from its token ids, or from the length if it is given embeddings."""
    embeddings, ids = model.embeddings, inputs.get("input_ids")
    if ids is None:
        return _columns_in_padded_row(model, inputs, real) + 1 + int(embeddings.padding_idx)
    return embeddings.create_position_ids_from_input_ids(ids, embeddings.padding_idx)  # type: ignore[no-any-return]


def _full_mask(_: Any) -> Mask:
    return Full()


def _causal_mask(config: Any) -> Mask:
    return Causal() if getattr(config, "is_causal", True) else Full()


def _two_sided_window(config: Any) -> Mask:
    width = config.sliding_window  # keys on each side
    return Window(width + 1, after=width)


def _causal_window(config: Any) -> Mask:
    if config.sliding_window is None:
        return _causal_mask(config)
    return Window(config.sliding_window) if getattr(config, "is_causal", True) else _two_sided_window(config)


def _causal_masks_by_layer(config: Any) -> dict[str, Mask]:
    return {"full_attention": _causal_mask(config), "sliding_attention": _causal_window(config)}


def _full_masks_by_layer(config: Any) -> dict[str, Mask]:
    return {"full_attention": Full(), "sliding_attention": _two_sided_window(config)}


FAMILIES = {
    "BertModel": PackedFamily("BERT", _full_mask, _columns_in_padded_row, read_by_model="encoder"),
    "RobertaModel": PackedFamily("RoBERTa", _full_mask, _roberta_positions, read_by_model="encoder"),
    "XLMRobertaModel": PackedFamily("XLM-RoBERTa", _full_mask, _roberta_positions, read_by_model="encoder"),
    "DistilBertModel": PackedFamily("DistilBERT", _full_mask, _columns_in_padded_row),
    "ElectraModel": PackedFamily("ELECTRA", _full_mask, _columns_in_padded_row),
    "ModernBertModel": PackedFamily("ModernBERT", _full_masks_by_layer, _columns_in_padded_row),
    "LlamaModel": PackedFamily("Llama", _causal_mask, _columns_in_padded_row),
    "MistralModel": PackedFamily("Mistral", _causal_window, _columns_in_padded_row),
    "Qwen2Model": PackedFamily("Qwen2", _causal_masks_by_layer, _columns_in_padded_row),
    "Qwen3Model": PackedFamily("Qwen3", _causal_masks_by_layer, _columns_in_padded_row),
    "T5Stack": PackedFamily("T5", _full_mask, None, relative="block.0"),
}
"""The supported families, by the class of transformers that holds their layers."""


_padded: ContextVar[frozenset[object]] = ContextVar("padded", default=frozenset())  # a key per open `run_models_padded`


class _PackedRowMask(LazyMask):
    """The mask of a packed row.

    Attributes:
        packing: the places of its tokens in the padded batch.
    """

    packing: Packing


def leave_out_padding(model: nn.Module) -> Undo:
    """Leave padding out of all Hugging Face models in a module, and run their attention on this library's kernels.

    Outputs at tokens are those of the padded batch up to rounding, and 0 at padding. A call is packed if it has an
    attention mask (batch, length) with padding. It runs padded, as without this function, if it

    - continues a cache, or fills one of another kind than `DynamicCache` or one with windows,
    - returns attention weights, is observed, or is traced by a compiler or a transform,
    - belongs to a decoder of BERT's kind or of T5, which may see another sequence too,
    - has padding between the tokens of a sample, where a window or a bias counts distances, as in ModernBERT and T5,
    - computes feed-forward layers in chunks, or rotary frequencies from the length ("dynamic", "longrope").

    Args:
        model: a model of transformers, or a module that contains some.

    Returns:
        the handle that undoes it.

    Raises:
        ModelError: it contains no model of transformers, or one of a family that is not supported.
    """
    stacks = _modules_to_pack(model)
    return Undo.run_change(partial(_add_hooks, model, stacks))


def _add_hooks(model: nn.Module, stacks: list[tuple[nn.Module, PackedFamily]], undo: Undo) -> None:
    used = install(model)
    undo.callback(used.close)
    for module, family in stacks:
        undo.hook_before_forward(module, partial(_pack_inputs, family), with_kwargs=True)
        read = [module.get_submodule(family.read_by_model)] if family.read_by_model else []
        for part in (module, *read):
            undo.hook_after_forward(part, _unpack_outputs, with_kwargs=True)
        if family.relative:
            undo.hook_before_forward(module.get_submodule(family.relative), _add_relative_bias, with_kwargs=True)


@contextmanager
def run_models_padded() -> Iterator[None]:
    """Run packed models padded in this context, and in no other thread: a record finds samples by their rows."""
    user = object()
    with Undo() as undo:
        undo.callback(lambda: _padded.set(_padded.get() - {user}))
        _padded.set(_padded.get() | {user})
        yield


def _modules_to_pack(model: nn.Module) -> list[tuple[nn.Module, PackedFamily]]:
    """Return the modules to pack and their families; every model of transformers must be, contain or lie in one."""
    models = pretrained_models(model)
    found = {name: family for name, module in models.items() if (family := _family_of_class(type(module))) is not None}
    for name, module in models.items():
        if not any(is_within(name, other) or is_within(other, name) for other in found):
            raise _refusal_error(f"{type(module).__name__} cannot leave out padding.")
    if not found:
        raise _refusal_error(f"{type(model).__name__} contains no model of transformers.")
    return [(models[name], family) for name, family in found.items()]


def _refusal_error(finding: str) -> ModelError:
    names = ", ".join(family.name for family in FAMILIES.values())
    return ModelError(finding, f"Give a model of one of these families: {names}; or use packed=False.")


def _family_of_class(kind: type[nn.Module]) -> PackedFamily | None:
    """Return the family of a class of transformers, or of a subclass that runs the same forward pass."""
    for parent in kind.__mro__:
        if parent.__module__.startswith("transformers.") and parent.__name__ in FAMILIES:
            return FAMILIES[parent.__name__] if kind.forward is parent.forward else None  # type: ignore[attr-defined]
    return None


@cache
def _names_of_arguments(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the arguments of a class's forward pass, in order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _pack_inputs(
    family: PackedFamily, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Pack the inputs of a model; runs before its forward pass. None leaves them as they are."""
    if is_traced():
        return None  # the number of tokens is not known
    inputs = {**dict(zip(_names_of_arguments(type(model)), args, strict=False)), **kwargs}  # type: ignore[arg-type] # a class is hashable
    real = _real_tokens(inputs)
    if real is None or not _can_pack(model, inputs):
        return None
    lengths = real.sum(1)
    counts = tuple(lengths.tolist())
    tokens, (batch, length) = sum(counts), real.shape
    if tokens in (0, real.numel()):
        return None
    masks = family.masks(model.config)
    windows = any(mask.lookback is not None for mask in (masks.values() if isinstance(masks, dict) else (masks,)))
    if (windows and _fills_cache(model, inputs)) or ((windows or family.relative) and _has_inner_padding(real, tokens)):
        return None
    packing = Packing(lengths, real.flatten().nonzero().flatten(), batch, length)
    if family.positions is not None and inputs.get("position_ids") is None:
        inputs["position_ids"] = family.positions(model, inputs, real)
    for name in _PER_TOKEN:
        if isinstance(value := inputs.get(name), Tensor):
            inputs[name] = packing.pack(value.expand(batch, *value.shape[1:]))
    documents = Documents(counts)
    if isinstance(masks, dict):
        inputs["attention_mask"] = {
            name: _mask_of_packed_row(mask & documents, packing) for name, mask in masks.items()
        }
    else:
        inputs["attention_mask"] = _mask_of_packed_row(masks & documents, packing)
    return (), inputs


def _real_tokens(inputs: dict[str, Any]) -> Tensor | None:
    """Return which tokens are no padding, (batch, length) bool; None where the inputs have no mask of that shape."""
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
    """Whether a padded batch may run as one row."""
    config = model.config
    rotary = getattr(getattr(model, "rotary_emb", None), "rope_type", "default")
    return not (
        _padded.get()
        or getattr(config, "_attn_implementation", None) != NAME  # another attention was chosen since
        or getattr(config, "is_decoder", False)
        or inputs.get("encoder_hidden_states") is not None
        or inputs.get("output_attentions", getattr(config, "output_attentions", False))
        or not _is_empty_cache(inputs.get("past_key_values"))
        or getattr(config, "chunk_size_feed_forward", 0)
        or {"dynamic", "longrope"} & set(rotary.values() if isinstance(rotary, dict) else (rotary,))
    )


def _has_inner_padding(real: Tensor, tokens: int) -> bool:
    """Whether there is padding between the tokens of a sample: then there are fewer pairs of neighbours."""
    neighbours = (real[:, 1:] & real[:, :-1]).sum()
    return bool(neighbours + real.any(1).sum() != tokens)


def _fills_cache(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether a call of a model returns a cache of its keys and values."""
    given = inputs.get("use_cache")
    return bool(getattr(model.config, "use_cache", False) if given is None else given)


def _is_empty_cache(store: Any) -> bool:
    """Whether a cache is absent, or one without tokens whose keys and values can be padded afterwards."""
    if store is None:
        return True
    from transformers.cache_utils import DynamicCache, DynamicLayer

    plain = type(store) is DynamicCache and all(type(layer) is DynamicLayer for layer in store.layers)
    return plain and store.get_seq_length() == 0


def _mask_of_packed_row(mask: Mask, packing: Packing) -> _PackedRowMask:
    tokens = len(packing.index)
    made = _PackedRowMask(
        (1, 1, tokens, tokens), mask, query_start=0, key_offset=0, padding=None, device=packing.index.device
    )
    made.packing, made.packed_lengths = packing, packing.lengths
    return made


def _packing_in_arguments(kwargs: dict[str, Any]) -> Packing | None:
    """Return the packing that the mask among the arguments of a part of the model carries."""
    mask = kwargs.get("attention_mask")
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    return mask.packing if isinstance(mask, _PackedRowMask) else None


def _unpack_outputs(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Restore the padded batch in everything that a model, or a part of it, returns; runs after its forward pass."""
    packing = _packing_in_arguments(kwargs)
    return output if packing is None else _unpack_tensors(output, packing)


def _unpack_tensors(output: Any, packing: Packing) -> Any:
    """Unpack all tensors (1, tokens, features) in an output, and the keys and values of a cache."""
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
    """Unpack the keys or values of a cache: (1, kv_heads, tokens, dim) -> (batch, kv_heads, length, dim)."""
    heads, dim = x.shape[1], x.shape[3]
    padded = packing.unpack(x.transpose(1, 2).flatten(2))  # (batch, length, kv_heads * dim)
    return padded.view(packing.batch, packing.length, heads, dim).transpose(1, 2)


def _add_relative_bias(
    block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give the first block of T5 its bias by distance in linear memory; runs before its forward pass.

    The block itself computes a bias of tokens x tokens. Distances within a document are the same in the packed row and
    in the padded batch.
    """
    hidden_states, mask, *others = args
    if not isinstance(mask, _PackedRowMask):
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
