"""Let a Hugging Face model call this library's attention, and put it back as it was.

transformers lets a model's attention be exchanged by name: `AttentionInterface` says who computes it, and
`AttentionMaskInterface` who makes its mask. Both are needed: without the second the library passes no mask at
all, and padding and causality vanish without a word.
"""

from __future__ import annotations

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
from multihead.hooks.lazy_mask import LazyMask
from multihead.hooks.mask_functions import Extent, padding_of_keys, recognised
from multihead.masks import Causal, Full, Keep, Mask
from multihead.models import quiet

NAME = "multihead"
_CHOICE = "_attn_implementation_internal"  # where a configuration keeps the name of its attention


@dataclass(frozen=True, eq=False)
class Origin:
    """What a mask told about a call beyond what the call itself says.

    Fields:
        key_offset: position of the first key in the sequence, tokens; more than 0 where a cache dropped keys.
        padding: (batch, keys) bool, True = no padding; None where nothing is known of padding.
    """

    key_offset: int = 0
    padding: Tensor | None = None


_origin: ContextVar[Origin | None] = ContextVar("origin", default=None)


def origin() -> Origin | None:
    """Return where the call that is being heard came from; None if it was no Hugging Face model's."""
    return _origin.get()


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Find the Hugging Face models in a module, itself included: from qualified name to module."""
    if "transformers" not in sys.modules:
        return {}  # then nobody can have made one
    from transformers import PreTrainedModel

    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


@contextmanager
def installed(model: nn.Module) -> Iterator[None]:
    """Let all Hugging Face models in a module call this library's attention while the context lasts.

    Raises:
        ModelError: a family that has its attention written into its layers, and cannot be watched.
    """
    found = pretrained_models(model)
    if not found:
        yield
        return
    _register()
    before = [(config, getattr(config, _CHOICE, None)) for config in _configurations(found)]
    try:
        for module in _outermost(found):
            _install(module)
        refused = [module for module in found.values() if getattr(module.config, _CHOICE, None) != NAME]
        if refused:
            raise _refusal(type(refused[0]).__name__)
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
    is_causal: bool | None = None,  # noqa: FBT001 - the library says how it is called
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: object = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute one attention call of a Hugging Face model; registered in `AttentionInterface`.

    Args:
        module: the layer that asks.
        query: (batch, heads, queries, head_dim), after rotary embedding.
        key: (batch, kv_heads, keys, head_dim), after rotary embedding and cache.
        value: (batch, kv_heads, keys, value_dim).
        attention_mask: what `mask_for` made, or a tensor of the model's or user's own, or None.
        scaling: what q . k is multiplied by.
        dropout: share of the weights dropped.
        is_causal: whether to hide later keys; it counts only where there is no mask and more than one query.
        softcap: c of c * tanh(scores / c).
        s_aux: (heads,), sinks.
        position_bias: (batch or 1, heads, queries, keys), added to the scores.
        cache: continuous batching's pages; refused.

    Returns: (batch, queries, heads, value_dim), contiguous; and None, since the weights are never written down.
    """
    if cache is not None:
        raise ModelError("The model runs in continuous batches.", "Watch it with model(...) or model.generate(...).")
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
    elif queries > 1 and (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        mask, start = Causal(), 0  # as in the library: counted from the first key
    if position_bias is not None:
        position_bias = position_bias[..., :keys]
        bias = position_bias if bias is None else position_bias + bias
    terms = (mask, bias, softcap, s_aux, scaling, dropout, start)
    request = request_of(query, key, value, *terms, origin=CallOrigin(module))
    token = _origin.set(place)
    try:
        output = attend(request).output
    finally:
        _origin.reset(token)
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
        mask_function: what a query may see, by indices.
        attention_mask: (batch, tokens), 1 or True = no padding.
        device: where the model computes.
        options: what else the library's own mask function takes.

    Returns: a mask that holds no queries x keys tensor, where the mask function is one of those known.
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
    return LazyMask(
        (batch_size, 1, q_length, kv_length),
        mask,
        query_start=extent.query_start,
        key_offset=extent.key_offset,
        padding=padding,
        device=extent.device,
    )


def mask_of_tensor(given: Tensor, keys: int) -> tuple[Mask, Tensor | None]:
    """Say a mask tensor of a model or a user as a mask, and a bias where it is more than that.

    Args:
        given: (batch or 1, heads or 1, queries or 1, keys or more), or (batch, queries, keys), or (batch, keys);
            bool, True = may be seen; integers, 1 = may be seen; or floating point, added to the scores.
        keys: number of keys.

    Returns: the mask; and what is added to the scores, or None where it is 0 for every key that may be seen.
    """
    given = given[..., :keys]
    if given.dim() == 2:
        given = given[:, None, None]
    elif given.dim() == 3:
        given = given[:, None]
    if not given.is_floating_point():
        return Keep(given.bool()), None
    # Half of the lowest number: two masks may have been added, and rounding to another dtype moves the lowest.
    hidden = given <= torch.finfo(given.dtype).min / 2
    bias = given.masked_fill(hidden, 0)
    return Keep(~hidden), bias if bool((bias != 0).any()) or given.requires_grad else None


def crosses(module: nn.Module, name: str = "") -> bool:
    """Whether an attention layer's keys are another sequence than its queries, told by flag or by name."""
    if isinstance(flag := getattr(module, "is_cross_attention", None), bool):
        return flag
    known_as = f"{name}.{type(module).__name__}".lower()
    return any(mark in known_as for mark in ("cross", "encdec", "encoder_attn"))


@cache
def _register() -> None:
    """Make the name known to transformers, once a process."""
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
        f"{family} computes attention inside its layers, where it cannot be exchanged, so it cannot be watched.",
        "Take a family that uses transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5.",
    )


def _outermost(found: dict[str, nn.Module]) -> list[nn.Module]:
    return [
        module
        for name, module in found.items()
        if not any(other == "" or name.startswith(f"{other}.") for other in found if other != name)
    ]


def _configurations(found: dict[str, nn.Module]) -> list[Any]:
    """List every configuration of the models, those inside others too, each once."""
    waiting: list[Any] = [module.config for module in found.values()]
    listed: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if id(config) in listed:
            continue
        listed[id(config)] = config
        parts = (getattr(config, key, None) for key in getattr(config, "sub_configs", {}))
        waiting += [part for part in parts if part is not None]
    return list(listed.values())
