"""Make a Hugging Face model call this library's attention, and restore it.

transformers selects a model's attention by name: `AttentionInterface` registers the function that computes it, and
`AttentionMaskInterface` the function that makes its mask. Both are needed: without the second one transformers passes
no mask at all, and padding and causality are silently ignored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from multihead.call import CallOrigin
from multihead.errors import ModelError
from multihead.functional import attend, request_of
from multihead.hooks.coverage import looks_up, require_coverage
from multihead.hooks.lazy_mask import LazyMask
from multihead.hooks.mask_functions import Extent, padding_of_keys, recognised
from multihead.masks import Causal, Full, Keep, Mask
from multihead.models import quiet

NAME = "multihead"
_ADDITIVE = frozenset({"deepseek_v4"})  # model types whose layers append numbers to the mask, so it must not be Boolean
_CHOICE = "_attn_implementation_internal"  # the attribute of a configuration that names its attention


@dataclass(frozen=True, eq=False)
class Origin:
    """What is known of a call from its mask only.

    Attributes:
        key_offset: position of the first key in the sequence, tokens; more than 0 where a cache dropped keys.
        padding: (batch, keys) bool, True = no padding; None where padding is unknown.
    """

    key_offset: int = 0
    padding: Tensor | None = None


origin: ContextVar[Origin | None] = ContextVar("origin", default=None)
"""The origin of the call that listeners are receiving; None if no Hugging Face model made it."""


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the Hugging Face models in a module, itself included, by qualified name."""
    if "transformers" not in sys.modules:
        return {}  # then there cannot be one
    from transformers import PreTrainedModel

    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


@contextmanager
def installed(model: nn.Module) -> Iterator[None]:
    """Make all Hugging Face models in a module call this library's attention while the context is active.

    Raises:
        ModelError: a model computes attention inside its layers, so that it cannot be observed.
    """
    models = pretrained_models(model)
    if not models:
        yield
        return
    _register()
    copies = _copies(model)
    before = [(config, getattr(config, _CHOICE, None)) for config in [*_configurations(models), *copies]]
    try:
        for module in _outermost(models):
            _install(module)
        for config in copies:
            setattr(config, _CHOICE, NAME)
        unchanged = [module for module in models.values() if getattr(module.config, _CHOICE, None) != NAME]
        if unchanged:
            raise _refusal(type(unchanged[0]).__name__)
        require_coverage(model)
        yield
    finally:
        for config, choice in before:
            setattr(config, _CHOICE, choice)


def attend_for(
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
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    cache: object = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute one attention call of a Hugging Face model; registered in `AttentionInterface`.

    Args:
        module: the layer that makes the call.
        query: (batch, heads, queries, head_dim), after rotary embedding.
        key: (batch, kv_heads, keys, head_dim), after rotary embedding and cache.
        value: (batch, kv_heads, keys, value_dim).
        attention_mask: the mask from `mask_for`, or a tensor made by the model or the user, or None.
        scaling: factor of q . k.
        dropout: share of the weights dropped.
        is_causal: whether to hide later keys; used only where there is no mask and more than one query.
        softcap: c of c * tanh(scores / c).
        s_aux: (heads,), sinks.
        position_bias: (batch or 1, heads, queries, keys), added to the scores.
        indices: (batch, queries, selected) int, the keys that each query sees, of those that the mask shows.
        block_indices: (batch, groups, queries, selected) int, the same as blocks of keys, -1 = none; a group of heads
            shares them, and the layer's `indexer` holds the size of a block.
        sinks: (batch, heads, queries, 1), a sink per query; rejected.
        cache: the pages of continuous batching; rejected.

    Returns:
        (batch, queries, heads, value_dim), contiguous; and None, since the weights are never materialised.
    """
    if cache is not None:
        raise ModelError(
            "The model runs with continuous batching, which cannot be observed.",
            "Call model(...) or model.generate(...).",
        )
    if sinks is not None:
        raise ModelError(
            f"{type(module).__name__} computes a sink per query, and our kernels have a sink per head.",
            "Use this model with attn_implementation='eager'.",
        )
    queries, keys = query.shape[2], key.shape[2]
    place, bias = Origin(), None
    start = 0 if crosses(module) else max(keys - queries, 0)
    mask: Mask = Full()
    if isinstance(attention_mask, LazyMask):
        if attention_mask.shape[3] != keys:
            attention_mask = attention_mask.first_keys(keys)
        mask, start = attention_mask.mask, attention_mask.query_start
        place = Origin(attention_mask.key_offset, attention_mask.padding)
    elif attention_mask is not None:
        mask, bias = mask_of_tensor(attention_mask, keys)
    elif queries > 1 and (getattr(module, "is_causal", not crosses(module)) if is_causal is None else is_causal):
        mask, start = Causal(), 0  # as in transformers: the first query is at the first key
    if indices is not None:
        mask = mask & Keep(_selected(indices.long(), keys)[:, None])
    if block_indices is not None:
        mask = mask & Keep(_selected_blocks(module, block_indices, query.shape[1], keys))
    if position_bias is not None:
        position_bias = position_bias[..., :keys]
        bias = position_bias if bias is None else position_bias + bias
    terms = (mask, bias, softcap, s_aux, scaling, dropout, start)
    request = request_of(query, key, value, *terms, origin=CallOrigin(module))
    token = origin.set(place)
    try:
        output = attend(request).output
    finally:
        origin.reset(token)
    return output.transpose(1, 2).contiguous(), None


def mask_for(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Any = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor:
    """Make the mask of a Hugging Face model's call; registered in `AttentionMaskInterface`.

    Args:
        batch_size: number of samples.
        q_length: number of queries.
        kv_length: number of keys.
        q_offset: position of the first query in the sequence.
        kv_offset: position of the first key in the sequence.
        mask_function: returns whether a query may see a key, from their indices.
        attention_mask: (batch, tokens), 1 or True = no padding.
        device: device of the model.
        options: other arguments of transformers' own mask function.

    Returns:
        a mask that stores no queries x keys tensor if the mask function is recognised.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = causal_mask_function if mask_function is None else mask_function
    extent = Extent(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
    padding = None if attention_mask is None else padding_of_keys(attention_mask, extent)
    mask = recognised(function, extent)
    if mask is None:
        dense = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=extent.query_offset,
            kv_offset=extent.key_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            **options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
        )
        mask = Keep(dense)
    elif padding is not None and not bool(padding.all()):
        mask = mask & Keep(padding, "batch keys")
    made = LazyMask(
        (batch_size, 1, q_length, kv_length),
        mask,
        query_start=extent.query_start,
        key_offset=extent.key_offset,
        padding=padding,
        device=extent.device,
    )
    if getattr(options.get("config"), "model_type", "") in _ADDITIVE:
        dtype = options.get("dtype") or torch.float32
        return torch.zeros((), dtype=dtype).where(made.dense(), torch.finfo(dtype).min)
    return made


def mask_of_tensor(tensor: Tensor, keys: int) -> tuple[Mask, Tensor | None]:
    """Convert a mask tensor of a model or a user to a mask, and to a bias if it also changes visible scores.

    Args:
        tensor: (batch or 1, heads or 1, queries or 1, keys or more), or (batch, queries, keys), or (batch, keys);
            bool, True = visible; integers, 1 = visible; or floating point, added to the scores.
        keys: number of keys.

    Returns:
        the mask; and the bias, or None where it is 0 for every visible key.
    """
    tensor = tensor[..., :keys]
    if tensor.dim() == 2:
        tensor = tensor[:, None, None]
    elif tensor.dim() == 3:
        tensor = tensor[:, None]
    if not tensor.is_floating_point():
        return Keep(tensor.bool()), None
    # Half of the lowest number: two masks may have been added, and rounding to another dtype changes the lowest.
    hidden = tensor <= torch.finfo(tensor.dtype).min / 2
    bias = tensor.masked_fill(hidden, 0)
    return Keep(~hidden), bias if bool((bias != 0).any()) or tensor.requires_grad else None


def _selected(indices: Tensor, count: int) -> Tensor:
    """Return which of some keys are among the indices of each query, bool (..., queries, count); -1 is no key."""
    seen = indices.new_zeros((*indices.shape[:-1], count + 1), dtype=torch.bool)
    return seen.scatter(-1, indices.where(indices >= 0, count), value=True)[..., :count]


def _selected_blocks(module: Any, indices: Tensor, heads: int, keys: int) -> Tensor:
    """Return the keys in the blocks that each query selected: bool (batch, heads, queries, keys)."""
    size = module.indexer.block_size
    blocks = _selected(indices.long(), -(-keys // size))
    return blocks.repeat_interleave(size, -1)[..., :keys].repeat_interleave(heads // indices.shape[1], 1)


def crosses(module: nn.Module, name: str = "") -> bool:
    """Whether the keys of an attention layer come from another sequence than its queries, by its flag or its names."""
    if isinstance(flag := getattr(module, "is_cross_attention", None), bool):
        return flag
    names = f"{name}.{type(module).__name__}"
    return re.search("cross|encdec|encoder_attn", names, re.IGNORECASE) is not None


@cache
def _register() -> None:
    """Register the name in transformers, once per process."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend_for)
    AttentionMaskInterface.register(NAME, mask_for)


def _install(module: Any) -> None:
    try:
        with quiet():
            module.set_attn_implementation(NAME)
    except (ValueError, KeyError) as error:
        raise _refusal(type(module).__name__) from error


def _refusal(family: str) -> ModelError:
    return ModelError(
        f"{family} computes attention inside its layers, where it cannot be replaced, so it cannot be observed.",
        "Use a family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5.",
    )


def _outermost(models: dict[str, nn.Module]) -> list[nn.Module]:
    return [
        module
        for name, module in models.items()
        if not any(other == "" or name.startswith(f"{other}.") for other in models if other != name)
    ]


def _copies(model: nn.Module) -> list[Any]:
    """Return the configurations of attention layers; some models give their layers a copy of their own."""
    found = (getattr(each, "config", None) for each in model.modules() if looks_up(each.__class__))
    return list({id(config): config for config in found if hasattr(config, _CHOICE)}.values())


def _configurations(models: dict[str, nn.Module]) -> list[Any]:
    """Return every configuration of the models, nested ones included, each once."""
    waiting: list[Any] = [module.config for module in models.values()]
    listed: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) in listed:
            continue
        listed[id(config)] = config
        parts = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
        waiting += [part for part in parts if part is not None]
    return list(listed.values())
