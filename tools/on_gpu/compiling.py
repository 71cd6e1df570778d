"""Whether each kind of kernel compiles on this card, and how long its first call takes."""

from __future__ import annotations

import time
from functools import partial

import torch

import multihead as mh
from multihead import contract
from tools.on_gpu.worker import Cases

CUDA = torch.device("cuda")


def cases(seconds: float) -> Cases:
    """Return the first call of each kind of compiled kernel: those that compile nothing are left out."""
    compiled = [name for name in contract.kernels_on(CUDA) if name != "sdpa"]
    return {
        f"{kernel}: {call}": partial(first_call, kernel, call)
        for call in sorted(contract.CALLS, key=lambda call: call.dtype != torch.bfloat16)
        for kernel in compiled
        if contract.accepts(kernel, call, CUDA)
    }


def first_call(kernel: str, call: contract.Call) -> dict[str, object]:
    """Call a kernel twice, forward and, if the call trains, backward; return the seconds of both."""
    (q, k, v), options = contract.arguments(call, CUDA)
    took = []
    for _ in range(2):
        began = time.perf_counter()
        if kernel == contract.STATISTICS:
            contract.measure_statistics(call, CUDA)
        else:
            output = mh.attention(q, k, v, kernel=kernel, **options)
            if call.trains:
                torch.autograd.grad(output.sum(), (q, k, v))
        torch.cuda.synchronize()
        took.append(round(time.perf_counter() - began, 4))
    return {"answer": f"first call {took[0]:.1f} s", "first": took[0], "second": took[1]}
