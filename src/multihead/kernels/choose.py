"""Choose the fastest kernel that supports a request; the choice is cached for equal calls.

PyTorch's fused kernel is chosen where it was measured to be faster than the native one. The measurements are in
`measured.json`, which `python -m benchmarks.native.kernel_choice` writes. On CUDA a kernel must have run on some card
before it is chosen (`proven.py`).

`plan_call` finds the plan of the mask and the kernel in one cache. Its key consists of the mask, the sizes and a few
flags, which determine the plan and the kernel of a plain call on the CPU or CUDA. Calls with a bias, sinks, dropout,
tensors in the mask, a tracer or another device are planned each time. Decoding steps are planned each time too, because
their sizes do not repeat. `strict()` and listeners are not part of the key; they are handled in each call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels import (
    flex,
    flops,  # noqa: F401 - the import registers the operator's FLOP formulas
    fused_on_cuda,
    ragged,
    reference,
    sdpa,
)
from multihead.kernels.call import AttentionRequest, AttentionResult, WorkEstimate
from multihead.kernels.native import (
    kernel as native_kernel,
)
from multihead.kernels.native import (
    library,
    operator,  # noqa: F401 - the import registers the operator for graphs
)
from multihead.kernels.plan.bounds import BOUNDS_CACHE, CACHE_BYTES, PlanCache, bounds_of
from multihead.kernels.proven import GpuPath, reason_to_wait
from multihead.kernels.slow_paths import raise_if_strict
from multihead.masks import Causal
from multihead.masks.base import KeyBounds


class Kernel(Protocol):
    """Protocol of a kernel's module, or of another object: the functions and constants that it defines.

    >>> import multihead as mh
    >>> mh.kernels.add("empty", object())
    Traceback (most recent call last):
    multihead.errors.ArgumentError: The kernel 'empty' lacks HANDLES_NONFINITE, ...
    """

    @property
    def HANDLES_NONFINITE(self) -> bool:  # noqa: N802 - a constant of the module
        """Whether the kernel itself ignores autocast, and NaN and inf in hidden keys."""
        ...

    @property
    def GPU_PATH(self) -> GpuPath | None:  # noqa: N802 - a constant of the module
        """The code that must have run on a GPU before the kernel is a default there; None if it needs no such run."""
        ...

    def refusal(self, request: AttentionRequest, bounds: KeyBounds) -> str | None:
        """Return why this kernel refuses a request, in one sentence; None if it accepts the request."""
        ...

    def reads_int8(self, request: AttentionRequest) -> bool:
        """Whether the kernel reads the request's int8 k and v; otherwise they are dequantised before it runs."""
        ...

    def attend(self, request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
        """Compute a request that the kernel accepts."""
        ...

    def estimate_work(self, request: AttentionRequest, bounds: KeyBounds) -> WorkEstimate:
        """Estimate the number of scores that the kernel computes for a request, and its peak memory in bytes."""
        ...


# Name -> module of the kernel; the fastest kernel comes first.
KERNELS: dict[str, Kernel] = {
    "native": cast(Kernel, native_kernel),
    "ragged": cast(Kernel, ragged),
    "sdpa": cast(Kernel, sdpa),
    "flex": cast(Kernel, flex),
    "reference": cast(Kernel, reference),
}


@dataclass(frozen=True, eq=False)
class AddedKernel:
    """A kernel that was added, until `undo()` or the end of a `with` block.

    Attributes:
        name: its name.
        kernel: its module.

    >>> import multihead as mh
    >>> from multihead.kernels import reference
    >>> with mh.kernels.add("mine", reference) as added:
    ...     mh.explain(*torch.zeros(3, 1, 2, 4, 8)).kernel
    'mine'
    """

    name: str
    kernel: Kernel

    def undo(self) -> None:
        """Remove the kernel; do nothing if it was removed before."""
        if KERNELS.get(self.name) is self.kernel:
            del KERNELS[self.name]

    def __enter__(self) -> AddedKernel:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def add(name: str, kernel: Kernel, *, before: str | None = None) -> AddedKernel:
    """Add a kernel of your own, which runs every call that it does not refuse; `mh.explain` names it.

    Calls of functions, layers, drop-ins and Hugging Face models go to it, and calls whose plan is cached too. What a
    call does otherwise stays: NaN in hidden keys, autocast, listeners, heads that are switched off. Statistics are
    measured from q and k by the kernels of this library. An exported program keeps the kernels of its export.

    Args:
        name: its name, which `kernel=` of a call takes too.
        kernel: a module or another object with the functions and constants that `Kernel` declares.
        before: the name of the kernel before which it is asked; None: before all others.

    Returns:
        the handle whose `undo()` removes the kernel; a `with` block does so at its end. Kernels are added and removed
        while no other thread computes.

    Raises:
        ArgumentError: there is a kernel of this name, or none named `before`, or the kernel lacks a function.

    >>> import multihead as mh
    >>> from multihead.kernels import reference
    >>> added = mh.kernels.add("mine", reference)
    >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    >>> print(mh.explain(q, k, v).kernel, mh.attention(q, k, v).shape)
    mine torch.Size([1, 2, 4, 8])
    >>> added.undo()
    >>> mh.explain(q, k, v).kernel
    'native'
    """
    names = tuple(KERNELS)
    if not isinstance(name, str) or name in KERNELS:
        raise ArgumentError(
            f"There is a kernel {name!r} already." if isinstance(name, str) else f"The name of a kernel is {name!r}.",
            f"Give a text other than {', '.join(names)}.",
        )
    if before is not None and before not in KERNELS:
        raise ArgumentError(f"There is no kernel {before!r}.", f"Give one of {', '.join(names)}, or None.")
    missing = [each for each in _PARTS_OF_KERNEL if not hasattr(kernel, each)]
    if missing:
        raise ArgumentError(
            f"The kernel {name!r} lacks {', '.join(missing)}.",
            "Define them, as multihead.kernels.Kernel declares them.",
        )
    if kernel.GPU_PATH is not None:
        raise ArgumentError(
            f"The kernel {name!r} has the GPU_PATH {kernel.GPU_PATH!r}, which only kernels of this library have.",
            "Set GPU_PATH = None: a kernel that is added also runs on a GPU unless it refuses.",
        )
    place = 0 if before is None else names.index(before)
    later = {each: KERNELS.pop(each) for each in names[place:]}
    KERNELS.update({name: kernel, **later})
    return AddedKernel(name, kernel)


def is_kernel_added() -> bool:
    """Whether a kernel that is not of this library stands before all others."""
    return next(iter(KERNELS.values())) is not native_kernel


_PARTS_OF_KERNEL = ("HANDLES_NONFINITE", "GPU_PATH", "refusal", "reads_int8", "attend", "estimate_work")


class KernelChoice(NamedTuple):
    """The name of the chosen kernel, and why each faster kernel refuses, one sentence each."""

    name: str
    refusals: dict[str, str]


class CallPlan(NamedTuple):
    """Plan of a call: the keys that each query may see, and the module of the chosen kernel."""

    bounds: KeyBounds
    kernel: Kernel


class _CachedPlan(NamedTuple):
    """A plan, and the kernels among which it chose: their ids are in its key, and stay theirs while they are held."""

    plan: CallPlan
    kernels: tuple[Kernel, ...]


PLAN_CACHE: PlanCache[_CachedPlan] = PlanCache(CACHE_BYTES)


def plan_call(request: AttentionRequest, *, kernel: str | None = None) -> CallPlan:
    """Plan the mask of a request and choose its kernel, or return the cached plan of an equal call."""
    key = None if kernel is not None else _cache_key(request)
    known = None if key is None else PLAN_CACHE.entries.get(key)
    if known is not None:
        return known.plan
    bounds = bounds_of(request)
    name = choose_kernel(request, bounds, kernel=kernel).name
    made = CallPlan(bounds, KERNELS[name])
    # The reference kernel is not cached, because each of its calls must check `strict()`.
    if key is not None and name != "reference":
        PLAN_CACHE.add(key, _CachedPlan(made, tuple(KERNELS.values())), bounds)
    return made


@contextmanager
def drop_plans_at_end() -> Iterator[None]:
    """Remove plans cached in this context when it ends, for a batch whose lengths do not recur."""
    with PLAN_CACHE.drop_added_at_end(), BOUNDS_CACHE.drop_added_at_end():
        yield


def _cache_key(request: AttentionRequest) -> tuple[object, ...] | None:
    """Return the cache key of the plan of a call; None for calls without a cached plan, such as decoding steps."""
    shape = request.shape
    if (
        request.surroundings.intercepted
        # The number of keys is new in each decoding step, so a cached plan would not be used again.
        or shape.query_length == 1
        or request.bias is not None
        or request.sinks is not None
        or request.scales is not None
        or request.dropout
        or type(request.query_start) is not int
        or not type(request.q) is type(request.k) is type(request.v) is Tensor
    ):
        return None
    mask = request.mask.cache_key()
    if mask is None:
        return None
    if request.q.is_cpu:
        state: object = library.reason_of_absence() or library.chosen_instruction_set().index
    elif request.q.is_cuda:
        state = fused_on_cuda.state_of_choice()
    else:
        return None
    kernels = tuple(map(id, KERNELS.values()))
    return mask, shape, request.query_start, request.softcap is None, request.qkv_need_gradient, state, kernels


def choose_kernel(request: AttentionRequest, bounds: KeyBounds, *, kernel: str | None = None) -> KernelChoice:
    """Choose the fastest kernel that accepts the request, or check the one named `kernel`.

    Raises:
        ArgumentError: there is no kernel of that name, or it refuses the request.
        SlowPathError: the reference kernel would run, in a `strict()` context.
    """
    if kernel is not None and kernel not in KERNELS:
        raise ArgumentError(f"There is no kernel {kernel!r}.", f"Give one of {', '.join(KERNELS)}, or None.")
    refusals: dict[str, str] = {}
    for name in KERNELS if kernel is None else (kernel,):
        reason, path = None, KERNELS[name].GPU_PATH
        if kernel is None and path is not None and request.shape.device.type == "cuda" and not path.in_use_before_rows:
            reason = reason_to_wait(path)
        if reason is None:
            reason = KERNELS[name].refusal(request, bounds)
        measured = kernel is None and not torch.compiler.is_compiling() and request.scales is None
        if reason is None and name == "native" and measured:
            reason = reason_native_is_slower(request, bounds, library.chosen_instruction_set().name)
        if reason is None:
            if name == "reference" and kernel is None:
                raise_if_strict(
                    "The reference kernel would run, which holds queries x keys: "
                    + "; ".join(f"{other}: {why}" for other, why in refusals.items())
                    + ".",
                    "Change what a faster kernel refuses, or leave mh.strict().",
                )
            return KernelChoice(name, refusals)
        refusals[name] = reason
    raise ArgumentError(
        f"Kernel {kernel!r} refuses: {refusals[str(kernel)]}.",
        "Leave kernel out to use the fastest kernel that supports the call.",
    )


# ---- calls for which PyTorch's fused kernel was measured to be faster than the native kernel

FEW_QUERIES, SHORT_KEYS = 8, 128  # most queries of the class "few", most keys of the class "short"
MIN_SIGNIFICANT_SPEEDUP = 1.03  # PyTorch's kernel counts as faster only if the times differ by more than this factor

# Class of requests in `benchmarks.native.kernel_choice` -> description of the class.
REQUEST_CLASSES = {
    "full": "full attention",
    "causal": "causal attention",
    "intervals": "masks that are one interval of keys per query",
    "cells": "masks that are not intervals",
    "bias": "a bias on the scores",
    "few": f"at most {FEW_QUERIES} queries",
    "short": f"at most {SHORT_KEYS} keys",
    "unequal": "a value dim other than the head dim",
}
TRAINING_SUFFIX = ", training"


class MeasuredSpeed(NamedTuple):
    """Measured speed of the native kernel relative to PyTorch's fused kernel, for one instruction set and dtype.

    Attributes:
        instruction_set: instruction set of the native kernel, such as "avx2".
        dtype: dtype of q, k and v, such as "float32".
        where: date, CPU, threads and torch version of the measurement.
        ratios: class of requests -> time of PyTorch's kernel divided by the native kernel's time, of a forward pass; of
            forward and backward for classes with the suffix TRAINING_SUFFIX.
    """

    instruction_set: str
    dtype: str
    where: str
    ratios: Mapping[str, float]


def pytorch_speedups(measured: Iterable[MeasuredSpeed]) -> dict[tuple[str, torch.dtype], dict[str, float]]:
    """Return (instruction set, dtype) -> class of requests -> how many times faster PyTorch's kernel was, if it was.

    >>> pytorch_speedups((MeasuredSpeed("scalar", "float32", "", {"full": 0.5, "causal": 0.99, "few": 2.0}),))
    {('scalar', torch.float32): {'full': 2.0}}
    """
    result: dict[tuple[str, torch.dtype], dict[str, float]] = {}
    for each in measured:
        lost = {name: 1 / ratio for name, ratio in each.ratios.items() if ratio * MIN_SIGNIFICANT_SPEEDUP < 1}
        if lost:
            result[each.instruction_set, getattr(torch, each.dtype)] = lost
    return result


_MEASURED_JSON = files("multihead.kernels").joinpath("measured.json").read_text(encoding="utf-8")
MEASURED_SPEEDS = tuple(MeasuredSpeed(**row) for row in json.loads(_MEASURED_JSON))
PYTORCH_SPEEDUPS = pytorch_speedups(MEASURED_SPEEDS)
_CAUSAL = Causal()


def reason_native_is_slower(request: AttentionRequest, bounds: KeyBounds, set_name: str) -> str | None:
    """Return one sentence if PyTorch's kernel was measured to be faster for this class of request, else None."""
    lost = PYTORCH_SPEEDUPS.get((set_name, request.shape.dtype))  # None if the native kernel was faster in every class
    if lost is None:
        return None
    name = benchmark_class_of(request, bounds)
    if name not in lost or sdpa.refusal(request, bounds) is not None:
        return None
    plain = name.removesuffix(TRAINING_SUFFIX)
    training = "" if plain == name else "training with "
    dtype = str(request.shape.dtype).removeprefix("torch.")
    return (
        f"PyTorch's fused kernel was measured {lost[name]:.2f} times faster for {training}{REQUEST_CLASSES[plain]} in "
        f"{dtype} with the instruction set {set_name}"
    )


def benchmark_class_of(request: AttentionRequest, bounds: KeyBounds) -> str:
    """Return the benchmark class of a request, a key of `REQUEST_CLASSES` or one with the suffix TRAINING_SUFFIX."""
    shape, mask = request.shape, request.mask
    if shape.value_dim != shape.head_dim:
        name = "unequal"
    elif request.bias is not None:
        name = "bias"
    elif bounds.remainder is not None:
        name = "cells"
    elif shape.query_length <= FEW_QUERIES:
        name = "few"
    elif shape.key_length <= SHORT_KEYS:
        name = "short"
    elif mask.hides_nothing:
        name = "full"
    else:
        name = "causal" if mask == _CAUSAL else "intervals"
    return name + TRAINING_SUFFIX if request.qkv_need_gradient else name
