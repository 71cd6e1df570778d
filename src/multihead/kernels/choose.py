"""Choose the fastest kernel that does not refuse a request."""

from __future__ import annotations

from typing import NamedTuple, Protocol, cast

import torch

from multihead.call import Attended, AttentionRequest, Work
from multihead.errors import ArgumentError
from multihead.kernels import (
    flex,
    flops,  # noqa: F401 - PyTorch's counter finds the formulas registered
    reference,
    sdpa,
)
from multihead.kernels.native import (
    kernel,
    library,
    operator,  # noqa: F401 - a graph finds the operator registered
)
from multihead.kernels.native_vs_sdpa import slower
from multihead.kernels.slow_paths import refuse_if_strict
from multihead.masks.base import KeyBounds


class Kernel(Protocol):
    """What a kernel's module has to offer."""

    @property
    def HANDLES_NONFINITE(self) -> bool:  # noqa: N802 - a constant of the module
        """Whether NaN and inf that a query may not see can be handed to the kernel as they are, and autocast too."""
        ...

    def refusal(self, request: AttentionRequest, bounds: KeyBounds) -> str | None:
        """Say in one sentence why this kernel will not take a request, or None."""
        ...

    def attend(self, request: AttentionRequest, bounds: KeyBounds) -> Attended:
        """Compute a request that was not refused."""
        ...

    def work(self, request: AttentionRequest, bounds: KeyBounds) -> Work:
        """Estimate what a call computes and holds."""
        ...


# The fastest first.
KERNELS: dict[str, Kernel] = {
    "native": cast(Kernel, kernel),
    "sdpa": cast(Kernel, sdpa),
    "flex": cast(Kernel, flex),
    "reference": cast(Kernel, reference),
}


class Choice(NamedTuple):
    """The kernel that runs, and why others do not.

    Fields:
        name: the chosen kernel.
        refusals: for each kernel that would have come before it, its reason in one sentence.
    """

    name: str
    refusals: dict[str, str]


def choose(request: AttentionRequest, bounds: KeyBounds, *, kernel: str | None = None) -> Choice:
    """Choose the first kernel that neither refuses nor was measured to lose, or the one that the caller insists on.

    Raises:
        ArgumentError: the kernel asked for does not exist, or refuses.
    """
    if kernel is not None and kernel not in KERNELS:
        raise ArgumentError(f"There is no kernel {kernel!r}.", f"Give one of {', '.join(KERNELS)}, or None.")
    refusals: dict[str, str] = {}
    for name in KERNELS if kernel is None else (kernel,):
        reason = KERNELS[name].refusal(request, bounds)
        if reason is None and name == "native" and kernel is None and not torch.compiler.is_compiling():
            reason = slower(request, bounds, library.chosen().name)
        if reason is None:
            if name == "reference" and kernel is None:
                refuse_if_strict(
                    "The reference kernel would run, which holds queries x keys: "
                    + "; ".join(f"{other}: {why}" for other, why in refusals.items())
                    + ".",
                    "Change what a faster kernel refuses, or leave mh.strict().",
                )
            return Choice(name, refusals)
        refusals[name] = reason
    raise ArgumentError(f"Kernel {kernel!r} refuses: {refusals[str(kernel)]}.", "Leave kernel out to have one chosen.")
