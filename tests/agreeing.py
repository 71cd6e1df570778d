"""Compare a kernel's outputs and gradients with those of the oracle in float64."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from multihead.functional import attention_with_logsumexp
from multihead.kernels.native import library
from tests import oracle
from tests.drawing import Drawn

Results = dict[str, Tensor]
# The native kernel rounds scores and logsumexp as exponents of 2, which are 1.44 times those of e: of scores around 10
# with gradients that cancel, its gradients of q were seen 2.1 budgets off.
SLACK = {"native": 4}


def leaves(case: Drawn, dtype: torch.dtype, *, of_bias: bool = False) -> tuple[list[Tensor], dict[str, Any]]:
    """Copies of the case's tensors that collect gradients, their layout kept where the dtype is."""
    found = []
    for tensor in (case.q, case.k, case.v):
        same = tensor.dtype == dtype
        found.append((tensor.detach() if same else tensor.to(dtype).contiguous()).requires_grad_())
    options = dict(case.options)
    for name in ("bias", "sinks"):
        if name in options:
            options[name] = options[name].detach().to(dtype).clone().requires_grad_(of_bias or name == "sinks")
    return found, options


def loss(output: Tensor, logsumexp: Tensor) -> Tensor:
    """A number whose gradient gives every output and every finite logsumexp a cotangent of its own."""
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    finite = torch.where(logsumexp == -torch.inf, 0, logsumexp)
    of_logsumexp = torch.linspace(1, -2, logsumexp.numel(), dtype=logsumexp.dtype).view_as(logsumexp)
    return (output * weight).sum() + (finite * of_logsumexp).sum().to(output.dtype)


def with_gradients(
    case: Drawn, dtype: torch.dtype, kernel: str | None, *, of_bias: bool = False, seen: Tensor | None = None
) -> Results:
    """Run a case by a kernel, or by the oracle if None; `seen` is what its mask shows, where that is known."""
    (q, k, v), options = leaves(case, dtype, of_bias=of_bias)
    if kernel is None:
        if seen is None:
            seen = oracle.shown(case.mask, case.size.cells, case.query_start)
        dense = oracle.attend(q, k, v, seen, **options)
        output, logsumexp = dense.output, dense.logsumexp
    else:
        output, logsumexp = attention_with_logsumexp(
            q, k, v, mask=case.mask, query_start=case.query_start, kernel=kernel, **options
        )
    wanted = {"q": q, "k": k, "v": v}
    wanted |= {name: options[name] for name in ("bias", "sinks") if name in options and options[name].requires_grad}
    grads = torch.autograd.grad(loss(output, logsumexp), list(wanted.values()), allow_unused=True)
    found = {"output": output.detach(), "logsumexp": logsumexp.detach()}
    for (name, tensor), grad in zip(wanted.items(), grads, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(tensor) if grad is None else grad
    return found


def assert_within_budget(
    case: Drawn,
    kernel: str,
    *,
    of_bias: bool = False,
    seen: Tensor | None = None,
    instruction_sets: Iterable[str | None] = (None,),
) -> None:
    """Hold outputs and gradients to the oracle in float64, by what the oracle itself loses in the case's dtype."""
    dtype = case.q.dtype
    exact = with_gradients(case, torch.float64, None, of_bias=of_bias, seen=seen)
    plain = with_gradients(case, dtype, None, of_bias=of_bias, seen=seen)
    for each in instruction_sets:
        with nullcontext() if each is None else library.using_instruction_set(each):
            found = with_gradients(case, dtype, kernel, of_bias=of_bias)
        for name, value in found.items():
            allowed = SLACK.get(kernel, 1) * oracle.budget(exact[name], plain[name].to(dtype))
            error = oracle.difference(value, exact[name])
            assert error <= allowed, (
                f"{kernel}, {each}, {dtype}: {name} is {error:.3g} off, and {allowed:.3g} is allowed: "
                f"{case.size}, {case.mask}, query_start={case.query_start}, {case.options}"
            )
