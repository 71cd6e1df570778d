"""Rows into which a caller of a Hugging Face model packed several texts: found, separated, or reported.

Collators describe such a row in two ways. `cu_seq_lens_q` and `cu_seq_lens_k` are keyword arguments that transformers
passes through the model to the attention: the row's mask gets a text per length (`separate_texts`). `position_ids` that
restart separate the texts in transformers' own masks, but in some families only, and only without a cache and without
an attention mask. Otherwise the texts see each other, as in every attention of transformers, and a warning says so.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.kernels.sequence_split import reject_split_sequence
from multihead.masks import Documents, Mask
from multihead.models.lazy_mask import BooleanMask
from multihead.models.pretrained import is_cross_attention, signature_without_self
from multihead.tensors.tracing import can_read_values, is_traced
from multihead.tensors.undo import Undo

TEXT_EDGES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens")
"""Names of keyword arguments with the edges of the texts of a row: 0, and the tokens up to the end of each text."""

_ROWS = "Give each text as a row of its own, padded, with an attention_mask."
_SEPARATED = "use_cache=False and no attention_mask, or each text as a row of its own, padded, with an attention_mask."


class _Pass(threading.local):
    """The running forward pass of this thread.

    Attributes:
        model: id of the outermost model; None if no pass runs.
        finding: what the arguments of the model say about the row, see `_PackedRows`; None if nothing.
        masks: number of masks that transformers made so far.
        separated: number of masks with several texts in a row, and of calls whose texts `separate_texts` separated.
    """

    def __init__(self) -> None:
        self.model: int | None = None
        self.finding: tuple[str, str | None] | None = None
        self.masks = self.separated = 0


_pass = _Pass()


def count_mask(mask: Mask | None) -> None:
    """Count a mask that transformers made for a forward pass; None is a mask that is not recognised."""
    if _pass.finding is not None:
        _pass.masks += 1
        _pass.separated += mask is not None and mask.row_texts is not None


def separate_texts(mask: Mask, module: nn.Module, options: Mapping[str, Any], query: Tensor, key: Tensor) -> Mask:
    """Return the mask of a call with the texts whose edges are given.

    Args:
        mask: the mask without them.
        module: the layer that makes the call.
        options: the arguments of the attention in `TEXT_EDGES`.
        query: (batch, heads, queries, head_dim).
        key: (batch, kv_heads, keys, head_dim).

    Raises:
        ModelError: the edges are not those of the row's tokens.
    """
    given = {name: edges for name, edges in options.items() if edges is not None}
    if not given or is_cross_attention(module):
        return mask
    name, edges = next(iter(given.items()))
    reject_split_sequence(name, "Give the texts to context_parallel(..., mask=masks.Documents(lengths)).")
    _pass.separated += 1
    finding = _refusal(given, query.shape[0], query.shape[2], key.shape[2])
    if finding is not None:
        raise ModelError(
            f"{type(module).__name__} was given {name}, and {finding}.",
            "Give one row of texts without a cache, and edges from 0 to its number of tokens.",
        )
    if is_traced() or not can_read_values(edges.device):
        return _mask_of_device(mask, edges)
    return _mask_of_lengths(mask, tuple(edges.diff().tolist()))


def _refusal(given: Mapping[str, Any], batch: int, queries: int, keys: int) -> str | None:
    """Return why the edges of texts cannot be those of a call, or None; values on accelerators are not read."""
    if batch != 1:
        return f"the batch has {batch} rows"
    if queries != keys:
        return f"its {queries} queries continue a cache of {keys - queries} keys"
    one = next(iter(given.values()))
    for name, edges in given.items():
        if not isinstance(edges, Tensor) or edges.dim() != 1 or edges.is_floating_point() or not len(edges):
            return f"{name} is no row of integers"
        if is_traced() or not can_read_values(edges.device):
            continue
        found = edges.tolist()
        if found[0] != 0 or found[-1] != keys or any(first > stop for first, stop in pairwise(found)):
            return f"{name} does not rise from 0 to its {keys} tokens"
        if found != one.tolist():
            return f"{name} gives other texts"
    return None


@lru_cache(maxsize=4)
def _mask_of_lengths(mask: Mask, lengths: tuple[int, ...]) -> Mask:
    """Return a mask with the texts of a row; cached, so that the layers of a pass share it."""
    return mask.without_documents() & Documents(lengths)


_newest_on_device: dict[str, Any] = {}


def _mask_of_device(mask: Mask, edges: Tensor) -> Mask:
    """Return a mask with the texts of a row, whose lengths are not read; the newest is kept for the next layers."""
    if is_traced():
        return mask.without_documents() & Documents(edges.diff())
    newest = _newest_on_device.get("edges")
    if newest is not edges:
        _newest_on_device.update(edges=edges, documents=Documents(edges.diff()), masks={})
    masks = _newest_on_device["masks"]
    return masks.setdefault(mask, mask.without_documents() & _newest_on_device["documents"])  # type: ignore[no-any-return]


@dataclass(eq=False)
class _PackedRows:
    """What is known about the packed rows of a model that is used, observed or ablated.

    Attributes:
        warned: whether the warning was given.
        devices: the types of devices, other than the CPU, whose values were read; they are read in one pass.
        inner: id of a model -> the ids of the models in it.
    """

    inner: dict[int, frozenset[int]]
    warned: bool = False
    devices: frozenset[str] = frozenset()

    def begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Forward pre-hook of each model."""
        if torch.compiler.is_compiling() or kwargs is None:
            return
        # A pass that ended with an error did not reach `end`, so another pass may begin before it.
        if _pass.model is not None and id(model) in self.inner.get(_pass.model, ()):
            return
        _pass.model = _pass.finding = None
        inputs = kwargs
        if args:
            inputs = dict(zip(signature_without_self(type(model).forward).parameters, args, strict=False)) | kwargs
        edges = next((name for name in TEXT_EDGES if inputs.get(name) is not None), None)
        if edges is not None:
            _pass.finding = edges, None
        elif not self.warned:
            _pass.finding = self._finding(model, inputs)
        if _pass.finding is not None:
            _pass.model, _pass.masks, _pass.separated = id(model), 0, 0

    def end(self, model: Any, *_: object) -> None:
        """Forward hook of each model."""
        if torch.compiler.is_compiling() or _pass.model != id(model):
            return
        finding, separated, made = _pass.finding, _pass.separated, _pass.masks
        _pass.model = _pass.finding = None
        if finding is None or separated:
            return
        name, way_out = finding
        if way_out is None:
            raise ModelError(f"{type(model).__name__} was given {name}, and does not pass it to its attention.", _ROWS)
        if made and not self.warned:
            self.warned = True
            warnings.warn(f"{name} {way_out}", UserWarning, stacklevel=2)

    def _finding(self, model: Any, inputs: Mapping[str, Any]) -> tuple[str, str] | None:
        """Return that the texts of a row will see each other, and the way out; None if nothing says so."""
        mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        mask = None if isinstance(mask, BooleanMask) else mask
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
            return None  # the caller made the whole mask
        if mask is not None and mask.dtype != torch.bool and self._may_read(mask) and mask.numel() and mask.max() > 1:
            finding = (
                f"The attention_mask of {type(model).__name__} has numbers above 1, which transformers reads as 1, so "
                "the texts of a row see each other."
            )
            return finding, f"Give position_ids that restart, {_SEPARATED}"
        if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
            return None
        if not self._may_read(positions) or not _restart(positions, mask):
            return None
        separable = mask is None and not _has_cache(model, inputs)
        return (
            f"The position_ids of {type(model).__name__} restart within a row, and its texts see each other.",
            _ROWS if separable else f"Give {_SEPARATED}",
        )

    def _may_read(self, values: Tensor) -> bool:
        """Whether the values of an input may be read: on the CPU always, on another device in one pass only."""
        if is_traced() or values.is_meta:
            return False
        if values.is_cpu:
            return True
        first = (kind := values.device.type) not in self.devices
        if first:
            self.devices |= {kind}
        return first


def report_packed_rows(undo: Undo, models: Collection[nn.Module]) -> None:
    """Warn once if texts that were packed into one row of a model see each other; raise if text edges are ignored.

    Args:
        undo: stores how to remove the hooks.
        models: the models of transformers.
    """
    named = {id(model): frozenset(map(id, model.modules())) for model in models}
    rows = _PackedRows({model: frozenset(named) & inside - {model} for model, inside in named.items()})
    for model in models:
        undo.hook_before_forward(model, rows.begin, with_kwargs=True)
        undo.hook_after_forward(model, rows.end)


def _restart(positions: Tensor, mask: Tensor | None) -> bool:
    """Whether positions (batch, tokens) rise by 1 from token to token, but for some that start again; without padding.

    Positions that change otherwise, such as random ones, say nothing about texts.
    """
    before, after = positions[:, :-1], positions[:, 1:]
    begins = (after <= before) & ((after == 0) | (after == positions[:, :1]))
    rises = after == before + 1
    if mask is not None:
        real = mask[:, -positions.shape[1] :] != 0
        if real.shape != positions.shape:
            return False
        both = real[:, 1:] & real[:, :-1]
        begins, rises = begins & both, rises | ~both
    return bool(begins.any()) and bool((begins | rises).all())


def _has_cache(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a model fills or continues a cache."""
    given = inputs.get("use_cache")
    fills = getattr(model.config, "use_cache", False) if given is None else given
    return bool(fills) or inputs.get("past_key_values") is not None
