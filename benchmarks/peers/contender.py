"""A contender: a layer with the weights of a trial, called in the fastest way that it offers for the case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers.cases import Trial


class CannotError(Exception):
    """A contender cannot compute a case, or is not installed; the message says why."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A layer that is ready to run.

    Attributes:
        forward: maps (batch, queries, features) to the same shape.
        parameters: the tensors that get a gradient in training, besides the input.
    """

    forward: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...] = ()


def contender(forward: Callable[[Tensor], Tensor], module: torch.nn.Module, trial: Trial) -> Contender:
    """Make a contender of a module, in training mode if the case trains, else in evaluation mode."""
    module.train(trial.case.training)
    return Contender(forward, tuple(module.parameters()))


def run_of(trial: Trial, made: Contender) -> Callable[[], Tensor]:
    """Return the function to time: it returns the output or, in training, the gradient of the input."""
    of_output = trial.of_output
    if of_output is None:
        return lambda: made.forward(trial.x)
    x = trial.x.clone().requires_grad_()
    leaves = (x, *made.parameters)

    def step() -> Tensor:
        with torch.enable_grad():
            return torch.autograd.grad(made.forward(x), leaves, of_output)[0]

    return step


def load(linears: Iterable[torch.nn.Linear], trial: Trial) -> None:
    """Copy the q, k, v and output projections into four linear layers; a layer without a bias gets one."""
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, trial.weights, strict=True):
            linear.weight.copy_(weight)
            linear.bias = torch.nn.Parameter(bias.clone())


def added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as an additive one: 0, or the lowest number of the dtype if hidden."""
    return torch.zeros(shown.shape, dtype=dtype).masked_fill_(~shown, torch.finfo(dtype).min)
