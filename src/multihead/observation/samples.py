"""Find the samples of the calls of a forward pass, their token ids, and their requests as a record keeps them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from multihead.kernels.call import AttentionRequest
from multihead.models.pretrained import InputTracker
from multihead.observation.measuring import StatisticsMeasurer
from multihead.record.batch import CallTokenIds, SampleSpans, is_among
from multihead.record.segments import copy_contiguous
from multihead.record.shared import SharedByLayers
from multihead.scores.bias import values_of, with_values


@dataclass(eq=False)
class SamplesOfPass:
    """Finds the samples of the calls of one forward pass, whose layers mostly have the same.

    Attributes:
        measurer: the statistics of the model's layers.
        inputs: the token inputs of the model.
        keeps_qk: whether the record keeps q and k, so that tiles of the maps can be computed later.
        shared: what the layers of the pass share.
    """

    measurer: StatisticsMeasurer
    inputs: InputTracker
    keeps_qk: bool
    shared: SharedByLayers = field(default_factory=SharedByLayers)
    _newest: SampleSpans | None = None  # the samples of the previous call

    def find(self, request: AttentionRequest, *, cross_attention: bool) -> SampleSpans:
        """Find the spans of the samples in a call; reuse the spans of the previous call if they are equal."""
        keys, on_cpu = None if request.origin is None else request.origin.key_places, self.shared.on_cpu
        real, padding = None, None
        if keys is not None and request.known_origin.input_places is not None:
            keys = None  # the model has left padding out
        if request.position_in_sequence is not None and request.position_in_sequence.lengths is not None:
            real = torch.arange(request.shape.query_length) < on_cpu(request.position_in_sequence.lengths)[:, None]
        elif request.origin is not None and request.origin.unpadded_queries is not None:
            real = on_cpu(request.origin.unpadded_queries)
            if request.origin.is_cross_attention is False and request.shape.key_length == request.shape.query_length:
                padding = real
        elif keys is not None:
            padding = None if keys.padding is None else on_cpu(keys.padding)
            before = self.inputs.tokens_until_query(self.measurer.module_name(request), request, keys.offset, on_cpu)
            unseen = 0 if before is None else before.shape[1] - request.shape.query_length
            real = before[:, unseen:] if before is not None and unseen else before
        return self.spans_of(request, real, padding, one_text=cross_attention)

    def spans_of(
        self,
        request: AttentionRequest,
        real: Tensor | None = None,
        padding: Tensor | None = None,
        *,
        one_text: bool = False,
    ) -> SampleSpans:
        """Return the spans of the newest call if they are valid for this call, else the spans of this call.

        Args:
            request: the call.
            real: (batch, queries) bool on the CPU, False for padding; None if unknown.
            padding: (batch, keys) bool on the CPU, False for padding; None if unknown.
            one_text: whether a row is one text, whatever the mask separates: keys are not the tokens of the queries.
        """
        newest = self._newest
        if newest is None or not newest.fits_call(request, real, padding, one_text=one_text):
            of_device = self.request_without_tensors(request, request.shape.device)
            bare = of_device if request.shape.device.type == "cpu" else self._request_on_cpu(of_device)
            texts = None if one_text else bare.mask.row_texts
            newest = SampleSpans(bare, texts, real, padding, one_text=one_text)
            if bare is not of_device:
                newest.of_device = of_device
            self._newest = newest
        return newest

    def ids_of(self, request: AttentionRequest, sample_spans: SampleSpans, *, cross_attention: bool) -> CallTokenIds:
        """Return the token ids of a call, from inputs that fit its shape and belong to the model around its layer."""
        shape, continued = request.shape, request.position_in_sequence
        name = self.measurer.module_name(request)
        queries = keys = None
        lengths = None if continued is None else continued.lengths
        # else it is unknown which are padding
        if lengths is None or not bool((self.shared.on_cpu(lengths) < shape.query_length).any()):
            queries = self.inputs.inputs_of_queries(name).ids
            keys = self.inputs.encoder_inputs(name).ids if cross_attention else None
        if queries is not None:
            queries = sample_spans.ids_of_queries(queries, request)
        if keys is not None:  # `generate` repeats the encoder's output for the beams or samples of a prompt
            keys = keys.repeat_interleave(self.inputs.rows_per_prompt(name, shape.batch), 0)
        if keys is not None and keys.shape != (shape.batch, shape.key_length):
            keys = None
        return CallTokenIds(queries, keys, cross_attention, sample_spans.request.query_start)

    def special_keys(self, ids: CallTokenIds, request: AttentionRequest) -> Tensor | None:
        """Return which keys of a call are special tokens, (batch, keys) bool on its device; None if unknown."""
        read = ids.key_ids(request) if self.measurer.special_ids else None
        if read is None:
            return None
        special = self.measurer.special_ids
        return self.shared.once("special", read, lambda: is_among(read, special).to(request.shape.device))

    def request_without_tensors(self, request: AttentionRequest, device: torch.device) -> AttentionRequest:
        """Return a copy of a request without q, k, v and the origin, on the device of the record."""
        bias, keeps = request.bias, self.keeps_qk
        if bias is not None and not keeps:  # only hidden keys matter of it
            bias = bias if self._hides_keys(values_of(bias)) else None
        nothing, start = torch.empty(0), request.query_start
        mask = request.mask
        if request.shape.device != device:
            mask = self.shared.mask_on_cpu(mask)
        return replace(
            request,
            mask=mask,
            query_start=start.to(device, copy=True) if isinstance(start, Tensor) else start,  # a cache may overwrite it
            q=nothing,
            k=nothing,
            v=nothing,
            requested_statistics=frozenset(),
            shape=request.shape._replace(device=device),
            bias=None if bias is None else with_values(bias, values_of(bias).detach().to(device)),
            sinks=None if request.sinks is None or not keeps else copy_contiguous(request.sinks, device),
            origin=None,
        )

    def _request_on_cpu(self, request: AttentionRequest) -> AttentionRequest:
        """Return a request without q, k and v whose other tensors are on the CPU."""
        start, bias = request.query_start, request.bias
        return replace(
            request,
            mask=self.shared.mask_on_cpu(request.mask),
            query_start=self.shared.on_cpu(start) if isinstance(start, Tensor) else start,
            bias=None if bias is None else with_values(bias, values_of(bias).cpu()),
            sinks=None if request.sinks is None else request.sinks.cpu(),
            shape=request.shape._replace(device=torch.device("cpu")),
        )

    def _hides_keys(self, bias: Tensor) -> bool:
        """Whether a bias hides a key; layers that share one on another device wait for that once."""
        if bias.is_cpu:
            return bool((bias == -torch.inf).any())
        return self.shared.once("hides", bias, lambda: bool((bias == -torch.inf).any()))
