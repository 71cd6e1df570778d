"""What a contender is: a layer with the weights of a trial, called in the best way it has for the case."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.peers_cases import Trial


class CannotError(Exception):
    """A contender that cannot do a case, or is not installed; says why in words."""


@dataclass(frozen=True, eq=False)
class Contender:
    """A layer that is ready to run.

    Fields:
        forward: (batch, queries, features) -> the same.
        parameters: what gets a gradient in training, beside the input.
    """

    forward: Callable[[Tensor], Tensor]
    parameters: tuple[Tensor, ...] = ()


def contender(forward: Callable[[Tensor], Tensor], module: torch.nn.Module, trial: Trial) -> Contender:
    """Make a contender of a module: in training mode where the case trains, else in eval."""
    module.train(trial.case.training)
    return Contender(forward, tuple(module.parameters()))


def run_of(trial: Trial, made: Contender) -> Callable[[], Tensor]:
    """Return what is timed: the output without grad; in training all gradients, of which it returns the input's."""
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
    """Copy the trial's q, k, v and output projection into four linear layers, which get a bias where they have none."""
    with torch.no_grad():
        for linear, (weight, bias) in zip(linears, trial.weights, strict=True):
            linear.weight.copy_(weight)
            linear.bias = torch.nn.Parameter(bias.clone())


def added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Write a bool mask as what is added to the scores: 0, or the lowest number where hidden."""
    return torch.zeros(shown.shape, dtype=dtype).masked_fill_(~shown, torch.finfo(dtype).min)
