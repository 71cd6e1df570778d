"""Double backward for the fused kernels, computed by the reference kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels import reference
from multihead.kernels.call import AttentionRequest
from multihead.kernels.nonfinite import restore_nan, without_nonfinite
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.masks.base import KeyBounds
from multihead.scores.bias import values_of


def differentiable_gradients(
    kernel: str,
    request: AttentionRequest,
    bounds: KeyBounds,
    of_output: Tensor | None,
    of_logsumexp: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of q, k, v, bias and sinks so that they can be differentiated again.

    Args:
        kernel: name of the kernel that computed the call, for the warning.
        request: the call, with the tensors that autograd saved.
        bounds: the key interval of each query.
        of_output: gradient of the output, or None.
        of_logsumexp: gradient of the logsumexp, or None.

    Returns:
        the gradients of q, k, v, bias and sinks; None for each that does not require one.

    Raises:
        ArgumentError: the call has dropout, whose random choice cannot be repeated.
    """
    if request.dropout:
        raise ArgumentError(
            f"Kernel {kernel!r} has no second derivative with dropout, and create_graph=True requires one.",
            "Set dropout to 0, or give kernel='reference'.",
        )
    warn_of_slow_path(
        f"Kernel {kernel!r} has no second derivative, and create_graph=True requires one: "
        "the reference kernel computes the call again, and holds queries x keys.",
        "Give kernel='reference' to compute the call only once.",
    )
    bias = None if request.bias is None else values_of(request.bias)
    tensors = (request.q, request.k, request.v, bias, request.sinks)
    wanted = [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]
    with torch.enable_grad():
        cleaned, bad_rows = without_nonfinite(replace(request, wanted=frozenset()), bounds)
        attended = reference.attend(cleaned, bounds)
        attended = attended if bad_rows is None else restore_nan(attended, bad_rows)
        pairs = ((attended.output, of_output), (attended.logsumexp, of_logsumexp))
        outputs, gradients = zip(*((out, of) for out, of in pairs if of is not None), strict=True)
        results = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=True, materialize_grads=True))
    return tuple(next(results) if tensor is not None and tensor.requires_grad else None for tensor in tensors)
