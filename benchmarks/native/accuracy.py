"""The native kernel's errors against float64, each one number with a limit."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.functional import scaled_dot_product_attention

from benchmarks.native.contenders import inputs, misplaced
from benchmarks.native.definition import Defined, defined
from multihead import masks
from multihead.functional import request_of
from multihead.kernels.call import AttentionResult
from multihead.kernels.native import kernel
from multihead.kernels.plan.bounds import bounds_of

STATISTICS = frozenset({"entropy", "largest_key"})


def largest_difference(what: str, length: int, dim: int, *, causal: bool) -> float:
    """Return the largest difference of the float32 output, logsumexp or entropy from float64."""
    ours, right = _both(length, dim, causal=causal)
    computed = {"output": ours.output, "logsumexp": ours.logsumexp, "entropy": ours.statistics["entropy"]}[what]
    return float((computed.double() - getattr(right, what)).abs().max())


def misplaced_keys(length: int, dim: int, *, causal: bool) -> float:
    """Return the number of queries whose largest key differs from that in float64, without ties."""
    ours, right = _both(length, dim, causal=causal)
    return misplaced(ours.statistics["largest_key"], right)


def rms_over_sdpa(length: int, dim: int, *, causal: bool) -> float:
    """Return the native kernel's RMS error in bfloat16 over that of PyTorch's fused kernel."""
    q, k, v = inputs(1, length, dim, "bf16")
    mask = masks.Causal() if causal else masks.Full()
    request = request_of(q, k, v, mask)
    right = defined(q, k, v, mask).output
    ours = kernel.attend(request, bounds_of(request)).output
    theirs = scaled_dot_product_attention(q, k, v, is_causal=causal)
    errors = [float((output.double() - right).square().mean().sqrt()) for output in (ours, theirs)]
    return errors[0] / errors[1]


def _both(length: int, dim: int, *, causal: bool) -> tuple[AttentionResult, Defined]:
    """Compute one call with the native kernel and in float64."""
    q, k, v = inputs(1, length, dim, "fp32")
    mask = masks.Causal() if causal else masks.Full()
    request = replace(request_of(q, k, v, mask), requested_statistics=STATISTICS)
    return kernel.attend(request, bounds_of(request)), defined(q, k, v, mask)
