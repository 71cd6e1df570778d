"""Explain a call before it runs: the kernel, the fraction of the scores that it skips, and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from multihead.kernels import sequence_split
from multihead.kernels.call import AttentionRequest, WorkEstimate
from multihead.kernels.choose import KERNELS, KernelChoice, choose_kernel
from multihead.kernels.native import short_call
from multihead.kernels.plan.bounds import bounds_of, fraction_within_bounds
from multihead.kernels.proven import has_run_on_hardware
from multihead.kernels.sequence_split import RankWork, use_split


@dataclass(frozen=True, repr=False)
class Explanation:
    """The kernel of a call, why it is chosen, and its work; `str()` formats these as lines.

    Attributes:
        kernel: the kernel that would run.
        refusals: for each faster kernel, why it refuses.
        hidden_share: fraction of the score matrix that the mask's intervals hide, 0 to 1.
        skipped_share: fraction of the score matrix that the kernel does not compute, 0 to 1.
        dense_remainder: whether the mask is not one interval of keys per query, so that the mask is also evaluated per
            (query, key) pair.
        work: number of scores computed, and peak memory in bytes.
        waits: why the host waits for the device, in one sentence, or None.
        unproven: that the kernel has not yet run on hardware, in one sentence, or None.
        over_ranks: lines on the work and communication of this rank; empty if the sequence is not split over ranks.
    """

    kernel: str
    refusals: dict[str, str]
    hidden_share: float
    skipped_share: float
    dense_remainder: bool
    work: WorkEstimate
    waits: str | None = None
    unproven: str | None = None
    over_ranks: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        """Return one line; `str()` returns all lines."""
        return f"<Explanation: kernel {self.kernel}, {self.skipped_share:.1%} of the score matrix skipped>"

    def _repr_html_(self) -> str:
        """Return the lines of `str()` as HTML, for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def __str__(self) -> str:
        lines = [f"kernel   {self.kernel}"]
        lines += [f"refused  {name}: {reason}" for name, reason in self.refusals.items()]
        lines.append(
            f"skipped  {self.skipped_share:.1%} of the score matrix; its intervals hide {self.hidden_share:.1%}"
            + (", and part of the mask is no interval: it is read cell by cell" if self.dense_remainder else "")
        )
        lines.append(f"memory   about {readable_bytes(self.work.extra_memory_bytes)} besides q, k and v")
        lines += [f"waits    {self.waits}"] if self.waits else []
        lines += [f"hardware {self.unproven}"] if self.unproven else []
        lines += [f"{name:8} {line}" for name, line in self.over_ranks]
        return "\n".join(lines)


def explain_request(request: AttentionRequest, *, kernel: str | None = None, waits: str | None = None) -> Explanation:
    """Plan a request and choose its kernel, without computing anything or sending anything to other ranks.

    `waits` is a sentence on why the host waits for the device outside the attention, or None.
    """
    sequence = sequence_split.active_split
    if sequence is not None:
        return _explain_rank(sequence.estimate_rank_work(request, kernel=kernel), kernel)
    bounds = bounds_of(request)
    short = kernel is None and short_call.takes_request(request)
    choice = KernelChoice("native", {}) if short else choose_kernel(request, bounds, kernel=kernel)
    work = KERNELS[choice.name].estimate_work(request, bounds)
    cells = request.shape.num_cells
    return Explanation(
        kernel=choice.name,
        refusals=choice.refusals,
        hidden_share=1 - fraction_within_bounds(bounds, keys=request.shape.key_length) if cells else 0.0,
        skipped_share=1 - work.computed_cells / cells if cells else 0.0,
        dense_remainder=bounds.remainder is not None,
        work=work,
        waits=waits,
        unproven=_unproven(choice.name) if request.shape.device.type == "cuda" else None,
    )


def _unproven(kernel: str) -> str | None:
    """Return that a kernel has not yet run on hardware, in one sentence, or None."""
    path = KERNELS[kernel].GPU_PATH
    if path is None or has_run_on_hardware(path):
        return None
    return f"{kernel} has not yet run on hardware; multihead doctor --gpu checks it on your card"


def _explain_rank(work: RankWork, kernel: str | None) -> Explanation:
    """Explain the attention calls of one rank of a split sequence: the kernel of the largest call, the work of all."""
    with use_split(None):
        parts = [explain_request(part, kernel=kernel) for part in work.requests]
    largest = max(parts, key=lambda part: part.work.computed_cells, default=None)
    cells = sum(part.work.computed_cells for part in parts)
    return Explanation(
        kernel="none, because the rank's queries see no key" if largest is None else largest.kernel,
        refusals={} if largest is None else largest.refusals,
        hidden_share=1 - work.visible_cells / work.computed_cells if work.computed_cells else 0.0,
        skipped_share=1 - cells / work.computed_cells if work.computed_cells else 0.0,
        dense_remainder=any(part.dense_remainder for part in parts),
        work=WorkEstimate(
            cells, max((part.work.extra_memory_bytes for part in parts), default=0) + work.received_bytes
        ),
        over_ranks=work.labelled_facts,
    )


def readable_bytes(count: int) -> str:
    """Format a number of bytes in the largest unit of which it has at least 1.

    >>> readable_bytes(1536)
    '1.5 KiB'
    """
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
