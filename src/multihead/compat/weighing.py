"""The weights of a call beside its output, for the classes that hand them out."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn.functional import dropout

from multihead.call import Attended, AttentionRequest
from multihead.functional import attend
from multihead.kernels.quarantine import poisoned, quarantined
from multihead.kernels.reference import softmax
from multihead.kernels.tile import scores, seen, without_autocast
from multihead.plan.bounds import key_bounds


def attend_with_weights(request: AttentionRequest) -> tuple[Tensor, Tensor]:
    """Attend, and return the weights that the output was made of, both differentiable.

    Under dropout the weights are those after it, and the output is made of the very same ones; the call is then
    published without dropout, as statistics are of weights before it.

    Args:
        request: a checked call with as many key/value heads as query heads.

    Returns: the output (batch, heads, queries, value_dim), and the weights (batch, heads, queries, keys), both in
        the dtype of q; a query that sees no key has 0 in both.

    >>> import torch
    >>> from multihead.functional import request_of
    >>> output, weights = attend_with_weights(request_of(*torch.randn(3, 1, 2, 4, 8).unbind()))
    >>> weights.shape, torch.allclose(weights.sum(-1), torch.ones(1, 2, 4))
    (torch.Size([1, 2, 4, 4]), True)
    """
    attended = attend(replace(request, dropout=0.0))
    weights, cleaned = _weights(request)
    if not request.dropout:
        return attended.output, weights.to(request.q.dtype)
    dropped = dropout(weights, request.dropout)
    with without_autocast(request.shape.device):
        output = (dropped @ cleaned.v.to(dropped.dtype)).to(request.q.dtype)
    return output, dropped.to(request.q.dtype)


class Remembered:
    """What is left of a layer's last call, from which its weights are computed when somebody asks for them.

    It keeps q and k, and no queries x keys tensor. A copied or unpickled layer remembers nothing: what belongs to a
    graph cannot be copied.
    """

    def __init__(self) -> None:
        self._request: AttentionRequest | None = None
        self._weights: Tensor | None = None

    def __reduce__(self) -> tuple[type[Remembered], tuple[()]]:
        return Remembered, ()

    def call(self, request: AttentionRequest) -> None:
        """Remember a call, in place of the last one; its owner is left out, so that no circle is made."""
        self._request, self._weights = replace(request, owner=None), None

    def given(self, weights: Tensor) -> None:
        """Remember weights that had to be computed already: (batch, heads, queries, keys)."""
        self._request, self._weights = None, weights

    def weights(self) -> Tensor | None:
        """Return the weights before dropout, or those that were given; (batch, heads, queries, keys), or None."""
        if self._request is None:
            return self._weights
        return _weights(self._request)[0].to(self._request.q.dtype)


def _weights(request: AttentionRequest) -> tuple[Tensor, AttentionRequest]:
    """Compute softmax(scores) where the mask shows the key, and the request without what is not finite."""
    shape = request.shape
    bounds = key_bounds(
        request.mask,
        queries=shape.query_length,
        keys=shape.key_length,
        query_start=request.query_start,
        device=shape.device,
    )
    with without_autocast(shape.device):
        cleaned, bad_rows = quarantined(request, bounds)
        hidden = ~seen(cleaned)
        weights, logsumexp = softmax(scores(cleaned).masked_fill(hidden, float("-inf")), request.sinks)
        if bad_rows is not None:
            weights = poisoned(Attended(weights, logsumexp), bad_rows).output.masked_fill(hidden, 0)
    return weights, cleaned
