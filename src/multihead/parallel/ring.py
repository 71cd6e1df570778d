"""Ring attention: each rank receives the keys that its queries see from the other ranks, step by step.

Rank r computes with its own keys, then with the keys of rank r - 1, r - 2 and so on, two messages for each; while it
computes with one message, it receives the next. The outputs are merged by their logsumexp. The backward pass is another
ring: keys and values are sent again, and their gradients are sent back, so that a rank stores two messages of keys at a
time and never the keys of the whole sequence.

Source: Ring Attention, arXiv:2310.01889; outputs are merged by equation 2 of arXiv:2205.14135.

Each rank gets the keys that its queries see directly from the rank that owns them; blocks are not passed from neighbour
to neighbour. If every key is visible, both ways send the same number of bytes, and hidden keys are simply not sent.
Every rank plans its sends and its receives from the intervals of the whole sequence (16 bytes per token), so no message
announces sizes. For a mask without intervals all keys are sent.

In the backward pass the native kernel computes the gradients of each part of the keys from the logsumexp over all keys,
as in one process. With other kernels the attention to each part is computed again, and the merge of the parts is
differentiated.

Dropout over ranks runs on the native kernel only, whose dropped weights are a function of the seed and of the position
of each weight in the whole call (`AttentionRequest.dropout_slice`). In every call with dropout, rank 0 sends its
seed in the message by which the ranks compare their arguments, so that their random generators may differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from multihead.functional import attend
from multihead.kernels.call import AttentionRequest, AttentionResult, DropoutOffset, DropoutSlice
from multihead.kernels.choose import plan_call
from multihead.kernels.dense_tile import without_qkv, working_dtype
from multihead.kernels.native import kernel as native
from multihead.kernels.parts import PartName
from multihead.kernels.sequence_split import use_split
from multihead.parallel.exchange import Ranks, Transfer, slice_ranges, slice_token_major
from multihead.parallel.layout import TokenRange
from multihead.parallel.measuring import MergedStatistics, measure_over_keys
from multihead.parallel.plan import MapPiece, RingPlan, RingStep
from multihead.scores.bias import Bias, slice_bias, values_of, with_values
from multihead.scores.terms import add_sinks

Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor | None]"  # gradients of q, k, v and the bias values


@dataclass(frozen=True, eq=False)
class Ring:
    """Ring attention for one request, with q, k and v of this rank, and mask and bias of the whole sequence."""

    ranks: Ranks
    plan: RingPlan
    request: AttentionRequest
    kernel: str | None
    statistics: dict[PartName, Tensor] = field(default_factory=dict, init=False)  # filled by the forward pass

    def attend(self) -> AttentionResult:
        """Compute the attention of this rank's queries, and the `requested_statistics` of the request."""
        request = self.request
        # Tensors must be arguments of the autograd function, so this copy of the ring has no bias values and no sinks.
        ring = replace(self, request=replace(request, bias=_drop_bias_values(request.bias), sinks=None))
        inputs = (request.q, request.k, request.v, request.bias_values, request.sinks)
        output, logsumexp = _RingFunction.apply(*inputs, ring)  # type: ignore[no-untyped-call]
        return AttentionResult(output, logsumexp, ring.statistics)

    def request_with_bias(self, values: Tensor | None) -> AttentionRequest:
        """Return the request with the values of its bias, which the autograd function receives as an argument."""
        bias = self.request.bias
        return self.request if bias is None or values is None else replace(self.request, bias=with_values(bias, values))

    def steps_with_keys(self, k: Tensor, v: Tensor) -> Iterator[tuple[RingStep, tuple[Tensor, ...]]]:
        """Yield each step with its keys and values, while those of the next step are received."""
        transfer: Transfer | None = None
        for step, following in pairwise((*self.plan.steps, RingStep(0, (), (), ()))):  # the last transfer is empty
            sent, received = following.sent_ranges, following.received_ranges
            next_transfer = Transfer(self.ranks, slice_token_major((k, v), sent), (k, v), received, following.distance)
            yield step, transfer.wait() if transfer else tuple(slice_ranges(x, step.received_ranges) for x in (k, v))
            transfer = next_transfer


def request_of_piece(
    request: AttentionRequest, piece: MapPiece, length: int, q: Tensor, k: Tensor, v: Tensor
) -> AttentionRequest:
    """Return the request of one piece (rectangle) of the attention map.

    Args:
        request: the call, with the bias of the whole sequence.
        piece: the rectangle.
        length: number of tokens of the whole sequence.
        q: (batch, heads, tokens of this rank, head_dim).
        k: (batch, kv_heads, keys, head_dim), of which `piece.key_slice` are the keys of the piece.
        v: (batch, kv_heads, keys, value_dim).
    """
    first_query, first_key = piece.rows[0], piece.keys[0]
    return request.with_tensors(
        q[:, :, piece.query_slice],
        k[:, :, piece.key_slice],
        v[:, :, piece.key_slice],
        mask=piece.mask,
        bias=None if request.bias is None else slice_bias(request.bias, length, piece.rows, piece.keys),
        dropout_slice=dropout_of_piece(request, query_start=first_query, key_start=first_key),
        # Only statistics use the position of the queries.
        query_start=first_query - first_key if request.requested_statistics else 0,
    )


def attend_to_piece(
    request: AttentionRequest, piece: MapPiece, kernel: str | None, merged: MergedStatistics, first_keys: Tensor | int
) -> AttentionResult:
    """Compute the attention of one piece of the attention map, and merge its statistics into those of the queries.

    Args:
        request: the request of the piece.
        piece: the rectangle of the attention map.
        kernel: name of the kernel; None chooses it.
        merged: statistics of this rank's queries over the keys of the pieces so far.
        first_keys: (batch or 1,), the first visible key of each sample in the whole sequence.
    """
    with use_split(None):
        found = attend(request, kernel=kernel, published=False)
    if request.requested_statistics:
        parts = measure_over_keys(request, found, piece.keys[0], first_keys - piece.keys[0])
        merged.add(piece.query_slice, found.logsumexp.detach(), parts)
    return found


class _RingFunction(torch.autograd.Function):
    """Ring attention as an autograd function; second derivatives are not supported."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        dtype = working_dtype(q.dtype)
        output = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        logsumexp = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        request, length = ring.request_with_bias(bias), ring.plan.length
        merged = MergedStatistics(request.requested_statistics, logsumexp)
        first_keys = ring.plan.first_keys(request) if request.requested_statistics else 0
        for step, keys_and_values in ring.steps_with_keys(k, v):
            for piece in step.pieces:
                part = request_of_piece(request, piece, length, q, *keys_and_values)
                found = attend_to_piece(part, piece, ring.kernel, merged, first_keys)
                rows = piece.query_slice
                merge_outputs(output[:, :, rows], logsumexp[:, :, rows], found.output, found.logsumexp)
                del part, found  # frees their memory before the next piece is computed
            del keys_and_values  # frees their memory before the next transfer starts
        if sinks is not None:
            output, logsumexp = add_sinks(output, logsumexp, sinks)
        ring.statistics.update(merged.results(logsumexp))
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, sinks, output, logsumexp)
        ctx.ring = replace(ring, request=replace(without_qkv(ring.request), requested_statistics=frozenset()))
        ctx.set_materialize_grads(False)
        return output, logsumexp

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        backward = _RingBackward(ctx.ring, ctx.saved_tensors, grad_output, grad_logsumexp)
        return *backward.compute(bias_wanted=ctx.needs_input_grad[3]), None


class _RingBackward:
    """Computes the gradients of ring attention, summed step by step.

    With the logsumexp L and the output O of a query over all keys, the weights of a piece are p = exp(s - L), and the
    gradient of the scores s is p (dO v - delta), where delta = dO . O - dL, (batch, heads, queries).
    """

    def __init__(
        self, ring: Ring, saved: tuple[Any, ...], grad_output: Tensor | None, grad_logsumexp: Tensor | None
    ) -> None:
        q, k, v, bias, self.sinks, output, logsumexp = saved
        self.ring, self.tensors, self.request = ring, (q, k, v), ring.request_with_bias(bias)
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        # A query with a NaN logsumexp and a gradient of 0 must not affect other gradients, so it gets no keys.
        unused = logsumexp.isnan() & (grad_output == 0).all(-1)
        dtype = logsumexp.dtype
        delta = (grad_output.to(dtype) * output.to(dtype)).sum(-1)
        if grad_logsumexp is not None:
            unused = unused & (grad_logsumexp == 0)
            delta = delta - grad_logsumexp
        self.output, self.logsumexp = output, logsumexp.masked_fill(unused, -torch.inf)
        self.grad_output, self.grad_logsumexp = grad_output, grad_logsumexp
        self.delta = delta.masked_fill(self.logsumexp == -torch.inf, 0)
        self.gradient_sums = tuple(torch.zeros_like(x, dtype=dtype) for x in self.tensors)
        self.bias_gradient: Bias | None = None

    def compute(self, *, bias_wanted: bool) -> tuple[Tensor | None, ...]:
        """Compute the gradients of q, k, v, the values of the bias, and the sinks."""
        _q, k, v = self.tensors
        if bias_wanted and self.request.bias is not None:
            self.bias_gradient = with_values(self.request.bias, torch.zeros_like(values_of(self.request.bias)))
        returning = Transfer(self.ring.ranks, (), (k, v), (), 0)  # an empty transfer, as no gradients are computed yet
        for step, keys_and_values in self.ring.steps_with_keys(k, v):
            gradients = self.compute_step(step, *keys_and_values)
            del keys_and_values
            self.add_local_gradients(returning.ranges, returning.wait())
            ends = accumulate((stop - first for first, stop in step.received_ranges), initial=0)
            sent = slice_token_major(tuple(x.to(k.dtype) for x in gradients), tuple(pairwise(ends)))
            returning = Transfer(self.ring.ranks, sent, (k, v), step.sent_ranges, -step.distance)
            del gradients, sent
        self.add_local_gradients(returning.ranges, returning.wait())
        dq, dk, dv = (total.to(x.dtype) for total, x in zip(self.gradient_sums, self.tensors, strict=True))
        dbias = None if self.bias_gradient is None else values_of(self.bias_gradient)
        dsinks = None
        if self.sinks is not None:  # the sum of -p delta over this rank's queries, p = exp(sink - L)
            weight = (self.sinks.to(self.logsumexp.dtype)[:, None] - self.logsumexp).exp()
            dsinks = -torch.where(self.delta == 0, 0, weight * self.delta).sum((0, 2)).to(self.sinks.dtype)
        return dq, dk, dv, dbias, dsinks

    def compute_step(self, step: RingStep, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Add the gradients of q and the bias in one step to their sums, and return the gradients of k and v to send.

        In the first step, whose keys are the rank's own, they are added to `gradient_sums`, and () is returned.
        """
        dtype, own = self.logsumexp.dtype, step.distance == 0
        views = [slice_ranges(each, step.received_ranges) for each in self.gradient_sums[1:]] if own else []
        at_once = own and all(view._is_view() for view in views)  # noqa: SLF001 - adding to a copy would have no effect
        dk, dv = views if at_once else (torch.zeros_like(each, dtype=dtype) for each in (k, v))
        for piece in step.pieces:
            of_q, of_k, of_v, bias_gradient = self.compute_piece(piece, k, v)
            self.gradient_sums[0][:, :, piece.query_slice] += of_q
            dk[:, :, piece.key_slice] += of_k
            dv[:, :, piece.key_slice] += of_v
            if bias_gradient is not None and self.bias_gradient is not None:
                whole = slice_bias(self.bias_gradient, self.ring.plan.length, piece.rows, piece.keys)
                total = values_of(whole)  # a view, whose key axis may have size 1
                total += bias_gradient.sum_to_size(total.shape).to(total.dtype)
            del of_q, of_k, of_v, bias_gradient  # frees their memory before the next piece is computed
        if own and not at_once:
            self.add_local_gradients(step.received_ranges, (dk, dv))
        return () if own else (dk, dv)

    def compute_piece(self, piece: MapPiece, k: Tensor, v: Tensor) -> Gradients:
        """Compute the gradients of q, k, v and the values of the bias of one piece."""
        request = request_of_piece(self.request, piece, self.ring.plan.length, self.tensors[0], k, v)
        with use_split(None), torch.no_grad():
            ring_plan = plan_call(request, kernel=self.ring.kernel)
        logsumexp, grad_output = self.logsumexp[:, :, piece.query_slice], self.grad_output[:, :, piece.query_slice]
        if ring_plan.kernel is native:
            job = native.operator_call_of(request, ring_plan.bounds)
            outputs = self.output[:, :, piece.query_slice], logsumexp
            of_logsumexp = None if self.grad_logsumexp is None else self.grad_logsumexp[:, :, piece.query_slice]
            wanted = self.bias_gradient is not None
            with torch.no_grad():
                found = native.gradients(job, outputs, grad_output, of_logsumexp, bias_wanted=wanted)
            return cast(Gradients, found[:4])
        return self._recompute_piece(request, piece, logsumexp, grad_output)

    def _recompute_piece(
        self, request: AttentionRequest, piece: MapPiece, logsumexp: Tensor, grad_output: Tensor
    ) -> Gradients:
        """Recompute a piece with autograd, and return its gradients; its output has the weight exp(l - L)."""
        inputs, bias = [x.detach().requires_grad_() for x in (request.q, request.k, request.v)], request.bias
        if bias is not None and self.bias_gradient is not None:
            inputs.append(values_of(bias).detach().requires_grad_())
            bias = with_values(bias, inputs[3])
        request = replace(request, q=inputs[0], k=inputs[1], v=inputs[2], bias=bias)
        with torch.enable_grad(), use_split(None):
            found = attend(request, kernel=self.ring.kernel, published=False)
        part, dtype = found.logsumexp.detach(), self.logsumexp.dtype
        without_keys = (part == -torch.inf) | (logsumexp == -torch.inf)
        weight = (part - logsumexp).exp().masked_fill(without_keys, 0)
        wide = grad_output.to(dtype)
        of_part = ((wide * found.output.detach().to(dtype)).sum(-1) - self.delta[:, :, piece.query_slice]) * weight
        of_part = of_part.masked_fill(without_keys, 0)  # without keys the output of the piece may be NaN
        gradients = torch.autograd.grad(
            (found.output, found.logsumexp),
            inputs,
            ((wide * weight[..., None]).to(grad_output.dtype), of_part),
            allow_unused=True,
        )
        known = [torch.zeros_like(x) if each is None else each for x, each in zip(inputs, gradients, strict=True)]
        return known[0], known[1], known[2], known[3] if len(known) > 3 else None

    def add_local_gradients(self, ranges: tuple[TokenRange, ...], gradients: tuple[Tensor, ...]) -> None:
        """Add gradients of k and v at some ranges of this rank's keys to `gradient_sums`."""
        for total, part in zip(self.gradient_sums[1:], gradients, strict=True):
            first = 0
            for start, stop in ranges:
                total[:, :, start:stop] += part[:, :, first : first + stop - start]
                first += stop - start


def merge_outputs(output: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Merge `part`, an output over other keys, into `output`, both (batch, heads, queries, value_dim), in place.

    An output with the logsumexp l has the weight exp(l - L), where L is the logsumexp over all keys.
    """
    total = torch.logaddexp(logsumexp, part_logsumexp)
    empty = total == -torch.inf
    before, added = ((each - total).exp().masked_fill(empty, 0)[..., None] for each in (logsumexp, part_logsumexp))
    output.mul_(before).addcmul_(part.to(output.dtype), added)
    logsumexp.copy_(total)


def dropout_of_piece(request: AttentionRequest, **place: int) -> DropoutSlice | None:
    """Return the dropout of a piece that starts at `place` (the fields of `DropoutOffset`); None without dropout."""
    return None if request.dropout_slice is None else DropoutSlice(request.dropout_slice.seed, DropoutOffset(**place))


def _drop_bias_values(bias: Bias | None) -> Bias | None:
    """Return a bias of the same class with an empty tensor of values."""
    return None if bias is None else with_values(bias, values_of(bias).new_empty((0,) * values_of(bias).dim()))
