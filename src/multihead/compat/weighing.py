"""The weights of a call beside its output, for the classes that hand them out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import dropout

from multihead.call import Attended, AttentionRequest
from multihead.functional import attend
from multihead.kernels.dense_tile import scores, seen, without_autocast
from multihead.kernels.nonfinite import restore_nan, without_nonfinite
from multihead.plan.bounds import bounds_of
from multihead.tracing import traced


def attend_with_weights(request: AttentionRequest) -> tuple[Tensor, Tensor]:
    """Attend, and return the weights that the output was made of, both differentiable.

    Under dropout the weights are those after it, and the output is made of the very same ones; the call is then
    published without dropout, as statistics are of weights before it.

    Args:
        request: a checked call without sinks, with as many key/value heads as query heads.

    Returns: the output (batch, heads, queries, value_dim), and the weights (batch, heads, queries, keys), both in
        the dtype of q; a query that sees no key has 0 in both.

    >>> from multihead.functional import request_of
    >>> output, weights = attend_with_weights(request_of(*torch.randn(3, 1, 2, 4, 8).unbind()))
    >>> weights.shape, torch.allclose(weights.sum(-1), torch.ones(1, 2, 4))
    (torch.Size([1, 2, 4, 4]), True)
    """
    attended = attend(replace(request, dropout=0.0))
    weights, v = _weights(request, attended.logsumexp.detach())
    if not request.dropout:
        return attended.output, weights.to(request.q.dtype)
    dropped = dropout(weights, request.dropout)
    with without_autocast(request.shape.device):
        output = (dropped @ v.to(dropped.dtype)).to(request.q.dtype)
    return output, dropped.to(request.q.dtype)


class Remembered:
    """What is left of a layer's last call, from which its weights are computed when somebody asks for them.

    It keeps the call and its logsumexp, and no queries x keys tensor. A copied or unpickled layer remembers nothing:
    what belongs to a graph cannot be copied.
    """

    def __init__(self) -> None:
        self._call: tuple[AttentionRequest, Tensor] | None = None
        self._weights: Tensor | None = None

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()

    def call(self, request: AttentionRequest, attended: Attended) -> None:
        """Remember a call, in place of the last one; its owner is left out, so that no circle is made."""
        self._call, self._weights = (replace(request, origin=None), attended.logsumexp.detach()), None

    def given(self, weights: Tensor) -> None:
        """Remember weights that had to be computed already: (batch, heads, queries, keys)."""
        self._call, self._weights = None, weights

    def weights(self) -> Tensor | None:
        """Return the weights before dropout, or those that were given; (batch, heads, queries, keys), or None."""
        if self._call is None:
            return self._weights
        request, logsumexp = self._call
        return _weights(request, logsumexp)[0].to(request.q.dtype)


def _weights(request: AttentionRequest, logsumexp: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the weights of a call that has run, in the working dtype; and its values, cleaned of hidden NaN."""
    shape = request.shape
    bounds = bounds_of(request)
    with without_autocast(shape.device):
        cleaned, bad_rows = without_nonfinite(request, bounds)
        cells = scores(cleaned)
        hidden = None if request.mask.hides_nothing else ~seen(cleaned)
        cells = cells if hidden is None else cells.masked_fill(hidden, -torch.inf)
        empty = (logsumexp == -torch.inf)[..., None]  # (batch, heads, queries, 1)
        if traced() or bool(empty.any()):  # the softmax of nothing is 0 / 0, in its gradient too
            weights = cells.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
        else:
            weights = cells.softmax(-1)
        if bad_rows is not None:
            weights = restore_nan(Attended(weights, logsumexp), bad_rows).output
            weights = weights if hidden is None else weights.masked_fill(hidden, 0)
    return weights, cleaned.v
