"""Find, for each query of an attention call, its text and its position in the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from multihead.errors import ModelError
from multihead.kernels.call import AttentionRequest, PositionInSequence
from multihead.kernels.dense_tile import positions_of_queries
from multihead.layer import MultiHeadAttention
from multihead.models.pretrained import KNOWN_TEXTS, WHOLE_MASK, InputTracker, is_cross_attention_call


class QueryTokens(NamedTuple):
    """The tokens that are the queries of a call.

    Attributes:
        text_index: (batch, queries) int64, index of the query's text, or image; of its prompt in `generate`.
        position: (batch, queries) int64, index of the query among the tokens of its text, padding not counted; -1 for
            padding. The windows of an image follow each other.
    """

    text_index: Tensor
    position: Tensor

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        return int(self.text_index.max()) + 1 if self.text_index.numel() else 0

    def rows(self) -> Tensor:
        """Return the index of each token in the flattened (batch * queries): (texts, tokens) int64, -1 for none."""
        text, position = (each.flatten() for each in self)
        real = (position >= 0).nonzero()[:, 0]
        text, position = text[real], position[real]
        sizes = [int(each.max()) + 1 if len(real) else 0 for each in (text, position)]
        rows = torch.full(sizes, -1, dtype=torch.int64, device=text.device)
        rows[text, position] = real
        return rows


class _ModuleCall(NamedTuple):
    """An attention call of a module.

    Attributes:
        request: the call.
        name: qualified name of the module.
    """

    request: AttentionRequest
    name: str

    @property
    def is_cross_attention(self) -> bool | None:
        """Whether the call is cross-attention; None if unknown, as for a drop-in with other keys than queries."""
        origin = self.request.known_origin
        if is_cross_attention_call(origin, self.name):
            return True
        return None if origin.key_places is None and origin.is_cross_attention is None else False


@dataclass(eq=False)
class TokenFinder:
    """Finds the tokens that are the queries of a model's attention calls.

    The queries of a cross-attention have the positions of the queries of the self-attention before it.
    """

    inputs: InputTracker
    _newest_self_attention: _ModuleCall | None = None  # the newest self-attention in this forward pass
    _forward_pass: int = -1  # number of the forward pass of that self-attention

    def follow(self, request: AttentionRequest, name: str) -> None:
        """Store a self-attention call for the cross-attention after it; `name` is the name of the call's module."""
        if self.inputs.num_passes != self._forward_pass:
            self._forward_pass, self._newest_self_attention = self.inputs.num_passes, None
        call = _ModuleCall(request, name)
        if call.is_cross_attention is False:
            self._newest_self_attention = call

    def find(self, request: AttentionRequest, name: str) -> QueryTokens:
        """Return the queries of a call; `name` is the qualified name of its module."""
        return self._tokens(_ModuleCall(request, name))

    def _tokens(self, call: _ModuleCall) -> QueryTokens:
        """Return the queries of a call."""
        request, batch, device = call.request, call.request.shape.batch, call.request.shape.device
        if not call.is_cross_attention and (texts := request.mask.row_texts) is not None:
            text, position = texts.number_of_tokens(positions_of_queries(request), batch)
            real = _real_queries(request)
            return QueryTokens(text, position if real is None else position.masked_fill(~real, -1))
        if (before := self._call_with_same_queries(call)) is not None:
            return self._tokens(before)
        if not call.is_cross_attention and not self.inputs.are_texts_known(call.name, request):
            raise ModelError(f"Which token of {call.name} belongs to which text is unknown: {WHOLE_MASK}.", KNOWN_TEXTS)
        position = self._positions(call)
        text = torch.arange(batch, device=device)[:, None].expand(batch, request.shape.query_length)
        windows = 1 if request.position_in_sequence is not None else self.inputs.rows_per_sample(call.name, batch)
        if windows > 1:
            position = position + text % windows * request.shape.query_length
        return QueryTokens(text // windows // self.inputs.rows_per_prompt(call.name, batch), position)

    def _call_with_same_queries(self, call: _ModuleCall) -> _ModuleCall | None:
        """Return the self-attention before a call whose keys are other tokens, if its queries are the same tokens."""
        request, newest = call.request, self._newest_self_attention
        known = request.position_in_sequence is not None or _real_queries(request) is not None
        if known or call.is_cross_attention is False or newest is None or newest.request is request:
            return None
        same, shape = newest.request.shape, request.shape
        alike = (same.batch, same.query_length) == (shape.batch, shape.query_length)
        return newest if alike and _keeps_batch_columns(newest.request) else None

    def _positions(self, call: _ModuleCall) -> Tensor:
        """Return the positions of the queries of a call: (batch, queries) int64, -1 for padding."""
        request, place, shape = call.request, call.request.known_origin.key_places, call.request.shape
        if request.position_in_sequence is not None:
            return _positions_in_cache(request, request.position_in_sequence)
        if (unpadded := request.known_origin.unpadded_queries) is not None:
            return _count_tokens(unpadded)
        index = torch.arange(shape.query_length, device=shape.device)
        crosses, offset = call.is_cross_attention, 0 if place is None else place.offset
        if crosses is False and place is not None:
            tokens = self.inputs.tokens_until_query(call.name, request, offset)
            if tokens is not None:
                return _count_tokens(tokens)[:, tokens.shape[1] - shape.query_length :]
        elif crosses:
            return index.expand(shape.batch, -1)
        start = _first_query_position(request).to(shape.device).view(-1, 1) + offset
        return (start + index).expand(shape.batch, -1)


def _positions_in_cache(request: AttentionRequest, place: PositionInSequence) -> Tensor:
    """Return the positions of queries whose keys are in a cache of this library: (batch, queries) int64."""
    shape = request.shape
    start = _first_query_position(request) + torch.as_tensor(place.key_start)
    if place.first_query is not None:  # cross-attention counts its queries
        start = torch.as_tensor(place.first_query)
    index = torch.arange(shape.query_length, device=shape.device)
    position = (start.to(shape.device).view(-1, 1) + index).expand(shape.batch, -1)
    real = _real_queries(request)
    return position if real is None else position.masked_fill(~real, -1)


def _real_queries(request: AttentionRequest) -> Tensor | None:
    """Return which queries of a layer of this library are not padding, (batch, queries) bool; None if all are."""
    place, shape = request.position_in_sequence, request.shape
    if place is None or place.lengths is None:
        return request.known_origin.unpadded_queries
    return torch.arange(shape.query_length, device=shape.device) < place.lengths.to(shape.device)[:, None]


def _first_query_position(request: AttentionRequest) -> Tensor:
    """Return the position of the first query, () or (batch,) int64; added keys come first, and are no tokens."""
    layer, added = request.known_origin.layer, 0
    if isinstance(layer, MultiHeadAttention):
        added = int(layer.bias_k is not None)
    elif isinstance(layer, nn.MultiheadAttention):
        added = (layer.bias_k is not None) + layer.add_zero_attn
    return torch.as_tensor(request.query_start) - added


def _keeps_batch_columns(request: AttentionRequest) -> bool:
    """Whether query i is token i of its row in the model's batch; our own layers move padding right, or drop it."""
    return request.known_origin.input_places is None


def _count_tokens(real: Tensor) -> Tensor:
    """Return the index of each token in its text, -1 for padding: (batch, tokens) bool -> int64."""
    return (real.long().cumsum(1) - 1).masked_fill(~real, -1)
