"""How far the native kernel is from float64, each as one number that has a limit."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.functional import scaled_dot_product_attention

from benchmarks.definition import Defined, defined
from benchmarks.duels import inputs, misplaced
from multihead import masks
from multihead.call import Attended
from multihead.functional import request_of
from multihead.kernels.native import kernel
from multihead.plan.bounds import bounds_of

STATISTICS = frozenset({"entropy", "largest_key"})


def largest_difference(what: str, length: int, dim: int, *, causal: bool) -> float:
    """Return the largest difference of the float32 output, logsumexp or entropy from float64."""
    found, right = _both(length, dim, causal=causal)
    mine = {"output": found.output, "logsumexp": found.logsumexp, "entropy": found.statistics["entropy"]}[what]
    return float((mine.double() - getattr(right, what)).abs().max())


def misplaced_keys(length: int, dim: int, *, causal: bool) -> float:
    """Count the queries whose largest key is not that of float64, ties left out."""
    found, right = _both(length, dim, causal=causal)
    return misplaced(found.statistics["largest_key"], right)


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


def _both(length: int, dim: int, *, causal: bool) -> tuple[Attended, Defined]:
    """Compute one call both ways."""
    q, k, v = inputs(1, length, dim, "fp32")
    mask = masks.Causal() if causal else masks.Full()
    request = replace(request_of(q, k, v, mask), wanted=STATISTICS)
    return kernel.attend(request, bounds_of(request)), defined(q, k, v, mask)
