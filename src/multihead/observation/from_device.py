"""Bring what a record needs of a call on a GPU to the CPU, without waiting for the GPU.

What a call measured is copied on a stream of its own (`HostCopies`). The call on the CPU has the same numbers, which
are there after `arrive`, so everything that is computed from them is computed when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from multihead.kernels.call import AttentionCall, AttentionRequest, AttentionResult
from multihead.kernels.parts import PartName, number_in_text
from multihead.masks.positions import SampleSpan
from multihead.observation.host_copies import Copied, HostCopies
from multihead.observation.measuring import TextInCall
from multihead.probes.probe import PartValues, Probe
from multihead.probes.statistics import statistic_from_parts
from multihead.record.batch import copy_rows, warn_of_large_scores
from multihead.record.text_table import LaterRows, RowsOnTheirWay
from multihead.tensors.shapes import AttentionShape


@dataclass(eq=False)
class CallOnItsWay:
    """A call of a GPU, whose numbers are copied to the CPU.

    Attributes:
        call: the call on the CPU, without the values of q, k and v; its logsumexp and statistics are filled by
            `arrive`.
        copied: its tensors.
    """

    call: AttentionCall
    copied: Copied
    _has_arrived: bool = False

    @staticmethod
    def begin(call: AttentionCall, parts: PartValues, request: AttentionRequest, copies: HostCopies) -> CallOnItsWay:
        """Begin to copy the logsumexp and parts of a call; `request` is that of the call on the CPU."""
        copied = copies.copy([*parts.values(), call.result.logsumexp.detach()])
        *values, logsumexp = copied.tensors
        return CallOnItsWay(
            _call_on_cpu(call.request, request, logsumexp, dict(zip(parts, values, strict=True))), copied
        )

    @property
    def without_parts(self) -> AttentionCall:
        """The call on the CPU without its statistics, whose slices are computed before they are filled."""
        return AttentionCall(self.call.request, replace(self.call.result, statistics={}))

    def awaited(self) -> AttentionCall:
        """Return the call after its numbers have arrived."""
        self.arrive()
        return self.call

    def arrive(self) -> None:
        """Wait until the numbers are there; warn if scores were too large for float32."""
        if not self._has_arrived:
            self.copied.arrive()
            self._has_arrived = True
            warn_of_large_scores(self.call.result.logsumexp)


def _call_on_cpu(
    of_device: AttentionRequest, request: AttentionRequest, logsumexp: Tensor, parts: Mapping[PartName, Tensor]
) -> AttentionCall:
    """Return a call on the CPU that has the sizes of another one, and no values of q, k and v."""
    shape = of_device.shape
    q, k, v = (each.expand(size) for each, size in zip(torch.zeros(3), _sizes(shape), strict=True))
    request = replace(request, q=q, k=k, v=v, sinks=of_device.sinks, origin=of_device.origin)
    output = torch.zeros(()).expand(*q.shape[:3], shape.value_dim)
    return AttentionCall(request, AttentionResult(output, logsumexp, dict(parts)))


def _sizes(shape: AttentionShape) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of q, k and v."""
    return (
        (shape.batch, shape.num_heads, shape.query_length, shape.head_dim),
        (shape.batch, shape.num_kv_heads, shape.key_length, shape.head_dim),
        (shape.batch, shape.num_kv_heads, shape.key_length, shape.value_dim),
    )


@dataclass(eq=False)
class StepOnItsWay:
    """The statistics of a step of decoding, computed when they are read.

    Attributes:
        on_way: the call.
        probes: the statistics; one is computed if its parts were measured.
        texts: the texts, each in a row of its own.
    """

    on_way: CallOnItsWay
    probes: Sequence[Probe]
    texts: Sequence[TextInCall]

    @cached_property
    def _statistics(self) -> dict[str, Tensor]:
        """Name of a statistic -> (batch, heads, queries)."""
        self.on_way.arrive()
        found = self.on_way.call.result
        starts = torch.tensor([text.start - text.span.keys[0] for text in self.texts])[:, None, None]
        parts = number_in_text(found.statistics, starts, found.logsumexp)
        regular = bool((found.logsumexp > -torch.inf).all())
        return {
            probe.name: statistic_from_parts(probe, parts, found.logsumexp, all_rows_regular=regular)
            for probe in self._measured
        }

    @cached_property
    def _measured(self) -> list[Probe]:
        measured = self.on_way.call.result.statistics.keys()
        return [probe for probe in self.probes if probe.parts <= measured]

    def rows_of(self, span: SampleSpan) -> tuple[LaterRows, dict[str, LaterRows]]:
        """Return the logsumexp of a text and its statistics, (heads, queries) each."""
        place = span.sample, slice(None), slice(*span.queries)

        def read_logsumexp() -> Tensor:
            self.on_way.arrive()
            return self.on_way.call.result.logsumexp[place]

        def later(name: str) -> LaterRows:
            return RowsOnTheirWay(lambda: self._statistics[name][place])

        return RowsOnTheirWay(read_logsumexp), {probe.name: later(probe.name) for probe in self._measured}


class QkOnTheirWay(NamedTuple):
    """The queries and keys of a call, copied together.

    Attributes:
        rows: (batch, heads + kv_heads, rows, head_dim), filled when `arrive` returns.
        heads: number of query heads.
        arrive: waits for the copy.
    """

    rows: Tensor
    heads: int
    arrive: Callable[[], None]

    @staticmethod
    def begin(q: Tensor, k: Tensor, device: torch.device, copies: HostCopies) -> QkOnTheirWay | None:
        """Begin to copy q and k to a device; None if they do not have equally many rows, so that one launch cannot."""
        if q.shape[2] != k.shape[2] or q.dtype != k.dtype:
            return None
        rows = torch.cat([q.detach(), k.detach()], 1)  # what the model overwrites later is not copied
        if rows.device == device:
            return QkOnTheirWay(rows, q.shape[1], lambda: None)
        copied = copies.copy([rows])
        return QkOnTheirWay(copied.tensors[0], q.shape[1], copied.arrive)

    def rows_of(self, text: int) -> tuple[LaterRows, LaterRows]:
        """Return the rows of q and k of a text of the batch, (heads, rows, head_dim)."""
        return self._read(lambda rows: rows[text], keys=False), self._read(lambda rows: rows[text], keys=True)

    def rows_at(self, places: Callable[[], Tensor | None], *, keys: bool) -> LaterRows:
        """Return rows of q or k, (heads, rows, head_dim); `places` as in `KeptRows`."""
        return self._read(lambda rows: copy_rows(rows, places(), rows.device), keys=keys)

    def _read(self, select: Callable[[Tensor], Tensor], *, keys: bool) -> LaterRows:
        of_heads = slice(self.heads, None) if keys else slice(self.heads)

        def read() -> Tensor:
            self.arrive()
            return select(self.rows[:, of_heads])

        return RowsOnTheirWay(read)
