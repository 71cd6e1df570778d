"""The definition of a case in float64, with which every contender is compared before it is timed."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.peers.cases import Linear, Trial


def right(trial: Trial) -> Tensor:
    """Compute softmax(q k' / sqrt(head_dim)) v, between the projections if the case has them.

    Returns:
        The output or, in training, the gradient of the input: (batch, compared queries, features), float64.
    """
    x = trial.x.double()
    if trial.of_output is None:
        return _output(trial, x)
    with torch.enable_grad():
        x.requires_grad_()
        return torch.autograd.grad(_output(trial, x), x, trial.of_output.double())[0]


def difference(trial: Trial, found: Tensor, expected: Tensor) -> float:
    """Return the largest error of an output, relative to the largest value."""
    found, expected = trial.compared(found.detach()[:, trial.rows].double()), trial.compared(expected)
    return float((found - expected).abs().max() / expected.abs().max())


def _output(trial: Trial, x: Tensor) -> Tensor:
    q, k, v = _q_k_v(trial, x)
    if trial.held is not None:
        k, v = (torch.cat([held.double(), new], 2) for held, new in zip(trial.held, (k, v), strict=True))
    scores = (q @ k.mT) * q.shape[3] ** -0.5  # (batch, heads, queries, keys)
    if (shown := trial.shown) is not None:
        shown = shown[:, :, trial.rows] if shown.shape[2] > 1 else shown
        scores = scores.masked_fill(~shown, -torch.inf)
    merged = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)  # (batch, queries, features)
    if trial.alone is not None:
        return merged
    return linear(merged, *(tensor.double() for tensor in trial.weights.out))


def _q_k_v(trial: Trial, x: Tensor) -> Iterator[Tensor]:
    """Project where there are projections, and split: (batch, heads, length, head_dim) each."""
    if trial.alone is None:
        memory = x if trial.memory is None else trial.memory.double()
        packed = map(_projected, (x[:, trial.rows], memory, memory), trial.weights[:3])
    else:
        packed = (x[:, trial.rows], *(tensor.double() for tensor in trial.alone))
    return (tensor.unflatten(2, (trial.heads, -1)).transpose(1, 2) for tensor in packed)


def _projected(x: Tensor, projection: Linear) -> Tensor:
    return linear(x, projection.weight.double(), projection.bias.double())
