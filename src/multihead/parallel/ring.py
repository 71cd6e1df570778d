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

from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias, cast

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
from multihead.tensors.shapes import AttentionShape

Gradients: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor | None]"  # of q, k, v and the values of the bias


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

    def first_keys(self, bias: Tensor | None) -> Tensor:
        """Return the first key of each sample that any query sees, (batch or 1,); a bias of -inf hides keys."""
        request = self.request
        if bias is not None and request.bias is not None:
            request = replace(request, bias=with_values(request.bias, bias))
        return self.plan.first_keys(request)

    def start_transfer(self, index: int, k: Tensor, v: Tensor) -> Transfer | None:
        """Start to send and receive the keys and values of step `index`; None if the step transfers nothing."""
        if index >= len(self.plan.steps):
            return None
        step = self.plan.steps[index]
        if not step.sent_ranges and not step.received_ranges:
            return None
        return self._exchange_ranges(
            slice_token_major((k, v), step.sent_ranges), (k, v), step.received_ranges, step.distance
        )

    def start_gradient_transfer(
        self, step: RingStep, gradients: tuple[Tensor, ...] | None, k: Tensor, v: Tensor
    ) -> Transfer | None:
        """Start to send the gradients of a step's keys and values back to their rank; None without a transfer."""
        if step.distance == 0 or not (step.sent_ranges or step.received_ranges):
            return None
        message = (
            ()
            if gradients is None
            else slice_token_major(tuple(x.to(k.dtype) for x in gradients), _concatenated_ranges(step.received_ranges))
        )
        return self._exchange_ranges(message, (k, v), step.sent_ranges, -step.distance)

    def _exchange_ranges(
        self, sent: tuple[Tensor, ...], like: tuple[Tensor, ...], ranges: tuple[TokenRange, ...], distance: int
    ) -> Transfer:
        """Start to send tensors to rank r + distance and to receive ranges from rank r - distance (this rank is r)."""
        rank, count = self.ranks.rank, self.ranks.size
        return Transfer(
            self.ranks, sent, (rank + distance) % count, like, _lengths_of_ranges(ranges), (rank - distance) % count
        )

    def wait_for_keys(
        self, step: RingStep, transfer: Transfer | None, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Wait for the keys and values of a step, and return them; None if the rank needs no keys in the step."""
        found = () if transfer is None else transfer.wait()
        if not step.received_ranges:
            return None
        if step.distance == 0:
            return slice_ranges(k, step.received_ranges), slice_ranges(v, step.received_ranges)
        return found[0], found[1]


def _lengths_of_ranges(ranges: tuple[TokenRange, ...]) -> tuple[int, ...]:
    return tuple(stop - first for first, stop in ranges)


def _concatenated_ranges(ranges: tuple[TokenRange, ...]) -> tuple[TokenRange, ...]:
    """Return where each range lies after the tokens of all ranges are concatenated."""
    ends = list(accumulate(_lengths_of_ranges(ranges), initial=0))
    return tuple(pairwise(ends))


class PieceTensors(NamedTuple):
    """The q, k, v and bias of one piece (rectangle) of the attention map.

    q is (batch, heads, rows, head_dim), k and v are (batch, kv_heads, keys, dim); the bias is sliced to the piece.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Bias | None

    def build_request(self, ring: Ring, piece: MapPiece) -> AttentionRequest:
        """Build the attention request for the piece."""
        q, k, v, bias = self
        shape = AttentionShape.from_tensors(q, k, v)
        part = dropout_of_piece(ring.request, query_start=piece.rows[0], key_start=piece.keys[0])
        # Only statistics of distances use the position of the queries.
        start = piece.rows[0] - piece.keys[0] if ring.request.requested_statistics else 0
        return replace(
            ring.request, q=q, k=k, v=v, shape=shape, mask=piece.mask, bias=bias, dropout_slice=part, query_start=start
        )


class _RingFunction(torch.autograd.Function):
    """Ring attention as an autograd function; second derivatives are not supported."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, ring: Ring
    ) -> tuple[Tensor, Tensor]:
        dtype = working_dtype(q.dtype)
        output = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=dtype)
        logsumexp = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        merged = MergedStatistics(ring.request.requested_statistics, logsumexp)
        transfer = None
        for index, step in enumerate(ring.plan.steps):
            following = ring.start_transfer(index + 1, k, v)  # runs during this step
            held = ring.wait_for_keys(step, transfer, k, v)
            if held is not None:
                for piece in step.pieces:
                    part = slice_piece(ring, piece, q, *held, bias).build_request(ring, piece)
                    with use_split(None):
                        found = attend(part, kernel=ring.kernel, published=False)
                    if part.requested_statistics:
                        measures = measure_over_keys(part, found, ring.first_keys(bias) - piece.keys[0])
                        merged.add(piece.query_slice, piece.keys[0], found.logsumexp, measures)
                    merge_outputs(
                        output[:, :, piece.query_slice],
                        logsumexp[:, :, piece.query_slice],
                        found.output,
                        found.logsumexp,
                    )
                    del part, found  # frees their memory before the next piece is computed
            transfer, held = following, None
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
        q, k, v, bias, sinks, output, logsumexp = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_output = torch.zeros_like(output) if grad_output is None else grad_output
        backward = _RingBackward(ring, (q, k, v), bias, output, logsumexp, grad_output, grad_logsumexp)
        backward.compute(bias_wanted=ctx.needs_input_grad[3])
        dq, dk, dv = (each.to(x.dtype) for each, x in zip(backward.gradient_sums, (q, k, v), strict=True))
        dsinks = None if sinks is None else backward.gradient_of_sinks(sinks)
        return dq, dk, dv, None if bias is None else backward.bias_gradient, dsinks, None


class _RingBackward:
    """Computes the gradients of ring attention, summed step by step.

    With the logsumexp L and the output O of a query over all keys, the weights of a piece are p = exp(s - L), and the
    gradient of the scores s is p (dO v - delta), where delta = dO . O - dL, (batch, heads, queries).
    """

    def __init__(
        self,
        ring: Ring,
        tensors: tuple[Tensor, Tensor, Tensor],
        bias: Tensor | None,
        output: Tensor,
        logsumexp: Tensor,
        grad_output: Tensor,
        grad_logsumexp: Tensor | None,
    ) -> None:
        self.ring, self.tensors, self.bias = ring, tensors, bias
        # A query with a NaN logsumexp and a gradient of 0 must not affect other gradients, so it gets no keys.
        unused = logsumexp.isnan() & (grad_output == 0).all(-1)
        if grad_logsumexp is not None:
            unused = unused & (grad_logsumexp == 0)
        logsumexp = logsumexp.masked_fill(unused, -torch.inf)
        self.output, self.logsumexp = output, logsumexp
        self.grad_output, self.grad_logsumexp = grad_output, grad_logsumexp
        dtype = logsumexp.dtype
        self.delta = (grad_output.to(dtype) * output.to(dtype)).sum(-1)
        if grad_logsumexp is not None:
            self.delta = self.delta - grad_logsumexp
        self.delta = self.delta.masked_fill(logsumexp == -torch.inf, 0)
        self.gradient_sums = tuple(torch.zeros_like(x, dtype=dtype) for x in tensors)
        self.bias_gradient: Tensor | None = None

    def compute(self, *, bias_wanted: bool) -> None:
        """Compute the gradients of all steps, and sum them in `gradient_sums` (of q, k, v) and `bias_gradient`."""
        _q, k, v = self.tensors
        if bias_wanted and self.bias is not None:
            self.bias_gradient = torch.zeros_like(self.bias)
        transfer: Transfer | None = None
        returning: Transfer | None = None
        before: RingStep | None = None
        for index, step in enumerate(self.ring.plan.steps):
            following = self.ring.start_transfer(index + 1, k, v)  # runs during this step
            held = self.ring.wait_for_keys(step, transfer, k, v)
            gradients = None if held is None else self.compute_step(step, *held)
            held = None
            self.add_returned_gradients(before, returning)
            returning, before = self.ring.start_gradient_transfer(step, gradients, k, v), step
            transfer, gradients = following, None
        self.add_returned_gradients(before, returning)

    def compute_step(self, step: RingStep, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of q and the bias in one step to their sums, and return the gradients of k and v.

        In the first step, whose keys are the rank's own, the gradients of k and v are also added to `gradient_sums`.
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
                _add_bias_gradient(self.bias_gradient, self.ring, piece, bias_gradient)
            del of_q, of_k, of_v, bias_gradient  # frees their memory before the next piece is computed
        if own and not at_once:
            self.add_local_gradients(step.received_ranges, (dk, dv))
        return dk, dv

    def compute_piece(self, piece: MapPiece, k: Tensor, v: Tensor) -> Gradients:
        """Compute the gradients of q, k, v and the values of the bias of one piece."""
        terms = slice_piece(self.ring, piece, self.tensors[0], k, v, self.bias)
        request = terms.build_request(self.ring, piece)
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
        return self._recompute_piece(terms, piece, logsumexp, grad_output)

    def _recompute_piece(
        self, terms: PieceTensors, piece: MapPiece, logsumexp: Tensor, grad_output: Tensor
    ) -> Gradients:
        """Recompute a piece with autograd, and return its gradients; its output has the weight exp(l - L)."""
        values = None if terms.bias is None else values_of(terms.bias)
        inputs = [x.detach().requires_grad_() for x in terms[:3]]
        if values is not None and self.bias_gradient is not None:
            values = values.detach().requires_grad_()
            inputs.append(values)
        bias = None if terms.bias is None or values is None else with_values(terms.bias, values)
        q, k, v = inputs[:3]
        with torch.enable_grad(), use_split(None):
            found = attend(
                PieceTensors(q, k, v, bias).build_request(self.ring, piece), kernel=self.ring.kernel, published=False
            )
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
        """Add gradients of k and v at some ranges of this rank's keys to `sums`."""
        for total, part in zip(self.gradient_sums[1:], gradients, strict=True):
            first = 0
            for start, stop in ranges:
                total[:, :, start:stop] += part[:, :, first : first + stop - start]
                first += stop - start

    def add_returned_gradients(self, step: RingStep | None, transfer: Transfer | None) -> None:
        """Wait for the gradients that another rank computed for this rank's keys and values, and add them to `sums`."""
        found = () if transfer is None else transfer.wait()
        if step is not None and found:
            self.add_local_gradients(step.sent_ranges, found)

    def gradient_of_sinks(self, sinks: Tensor) -> Tensor:
        """Return the gradient of the sinks: the sum of -p delta over this rank's queries, p = exp(sink - L)."""
        weight = (sinks.to(self.logsumexp.dtype)[:, None] - self.logsumexp).exp()
        return -torch.where(self.delta == 0, 0, weight * self.delta).sum((0, 2)).to(sinks.dtype)


def merge_outputs(output: Tensor, logsumexp: Tensor, part: Tensor, part_logsumexp: Tensor) -> None:
    """Merge `part`, an output over other keys, into `output`, both (batch, heads, queries, value_dim), in place.

    An output with the logsumexp l has the weight exp(l - L), where L is the logsumexp over all keys.
    """
    total = torch.logaddexp(logsumexp, part_logsumexp)
    empty = total == -torch.inf
    before, added = ((each - total).exp().masked_fill(empty, 0)[..., None] for each in (logsumexp, part_logsumexp))
    output.mul_(before).addcmul_(part.to(output.dtype), added)
    logsumexp.copy_(total)


def slice_piece(ring: Ring, piece: MapPiece, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> PieceTensors:
    """Slice q, k, v and the bias to one piece of the attention map."""
    part = None
    if bias is not None and ring.request.bias is not None:
        part = slice_bias(with_values(ring.request.bias, bias), ring.plan.length, piece.rows, piece.keys)
    return PieceTensors(q[:, :, piece.query_slice], k[:, :, piece.key_slice], v[:, :, piece.key_slice], part)


def dropout_of_piece(request: AttentionRequest, **place: int) -> DropoutSlice | None:
    """Return the dropout of a piece that starts at `place` (the fields of `DropoutOffset`); None without dropout."""
    return None if request.dropout_slice is None else DropoutSlice(request.dropout_slice.seed, DropoutOffset(**place))


def _add_bias_gradient(total: Tensor, ring: Ring, piece: MapPiece, gradient: Tensor) -> None:
    """Add the bias gradient of a piece to the gradient `total` of the whole bias, whose key axis may have size 1."""
    part = with_values(ring.request.bias, total)  # type: ignore[arg-type]
    target = values_of(slice_bias(part, ring.plan.length, piece.rows, piece.keys))  # a view
    target += gradient.sum_to_size(target.shape).to(target.dtype)


def _drop_bias_values(bias: Bias | None) -> Bias | None:
    """Return a bias of the same class with an empty tensor of values."""
    return None if bias is None else with_values(bias, values_of(bias).new_empty((0,) * values_of(bias).dim()))
