"""Bring what a record needs of a call on a GPU to the CPU, without waiting for the GPU.

What a call measured is copied on a stream of its own (`HostCopies`). The call on the CPU has the same numbers, which
are there after `arrive`, so everything that is computed from them is computed when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from multihead.observation.samples import SamplesOfPass
from multihead.observation.text_slices import slice_text
from multihead.probes.probe import PartValues, Probe
from multihead.probes.statistics import statistic_from_parts
from multihead.record.batch import SampleSpans, copy_rows, has_arrived, warn_of_large_scores
from multihead.record.sample import RecordedCall
from multihead.record.segments import Segment
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
    def begin(
        call: AttentionCall, measured: tuple[PartValues, Tensor], request: AttentionRequest, copies: HostCopies
    ) -> CallOnItsWay:
        """Begin to copy the parts and the logsumexp of a call; `request` is that of the call on the CPU."""
        parts, of_device = measured
        copied = copies.copy([*parts.values(), of_device])
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

    def rows_of(self, span: SampleSpan, device: torch.device) -> tuple[LaterRows, dict[str, LaterRows]]:
        """Return the logsumexp of a text, on a device when it is read, and its statistics, (heads, queries) each."""
        place = span.sample, slice(None), slice(*span.queries)

        def read_logsumexp() -> Tensor:
            self.on_way.arrive()
            return self.on_way.call.result.logsumexp[place].to(device)

        def later(name: str) -> LaterRows:
            return RowsOnTheirWay(lambda: self._statistics[name][place])

        return RowsOnTheirWay(read_logsumexp), {probe.name: later(probe.name) for probe in self._measured}


def copy_measured(
    parts: PartValues, logsumexp: Tensor, device: torch.device, copies: HostCopies
) -> tuple[PartValues, Tensor, Callable[[], None]]:
    """Return parts on the CPU and a logsumexp on a device, and what waits until a GPU has copied them."""
    if logsumexp.device.type != "cuda":
        on_cpu = parts if logsumexp.device.type == "cpu" else {part: value.cpu() for part, value in parts.items()}
        return on_cpu, logsumexp.to(device), has_arrived
    stays = device == logsumexp.device
    copied = copies.copy([*parts.values(), *(() if stays else (logsumexp,))])
    on_cpu = dict(zip(parts, copied.tensors, strict=False))
    return on_cpu, logsumexp if stays else copied.tensors[-1], copied.arrive


def newest_keys(k: Tensor, stops: Sequence[int], count: int) -> Tensor:
    """Return the last keys of each row of a batch, (batch, kv_heads, count, head_dim), which end at `stops`."""
    if all(stop == k.shape[2] for stop in stops):
        return k[:, :, -count:]
    places = (torch.tensor(stops)[:, None] - count + torch.arange(count)).to(k.device, non_blocking=True)
    return k.gather(2, places[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))


class QkOnTheirWay(NamedTuple):
    """The queries and keys of a call, copied together.

    Attributes:
        q: (batch, heads, queries, head_dim), filled when `arrive` returns.
        k: (batch, kv_heads, keys, head_dim), likewise.
        arrive: waits for the copy.
    """

    q: Tensor
    k: Tensor
    arrive: Callable[[], None]

    @staticmethod
    def begin(q: Tensor, k: Tensor, device: torch.device, copies: HostCopies) -> QkOnTheirWay | None:
        """Begin to copy q and k to a device; None if one launch cannot copy both, as they are in memory."""
        joined = _join(q.detach(), k.detach()) if q.dtype == k.dtype else None
        if joined is None:
            return None
        rows, divide = joined
        if rows.device == device:
            return QkOnTheirWay(*divide(rows), lambda: None)
        copied = copies.copy([rows])
        return QkOnTheirWay(*divide(copied.tensors[0]), copied.arrive)

    def rows_of(self, text: int) -> tuple[LaterRows, LaterRows]:
        """Return the rows of q and k of a text of the batch, (heads, rows, head_dim)."""
        return self._read(lambda: self.q[text]), self._read(lambda: self.k[text])

    def rows_at(self, places: Callable[[], Tensor | None], *, keys: bool) -> LaterRows:
        """Return rows of q or k, (heads, rows, head_dim); `places` as in `KeptRows`."""
        rows = self.k if keys else self.q
        return self._read(lambda: copy_rows(rows, places(), rows.device))

    def _read(self, select: Callable[[], Tensor]) -> LaterRows:
        def read() -> Tensor:
            self.arrive()
            return select()

        return RowsOnTheirWay(read)


def _join(q: Tensor, k: Tensor) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]] | None:
    """Copy q and k into one tensor, because the model may overwrite them; also return what divides it into both."""
    if q.shape[2] == k.shape[2]:
        heads = q.shape[1]
        return torch.cat([q, k], 1), lambda rows: (rows[:, :heads], rows[:, heads:])
    tokens = [each.transpose(1, 2) for each in (q, k)]
    if not all(each.is_contiguous() for each in tokens):  # as they are after projections
        return None
    (of_q, of_k), count = (each.shape for each in tokens), q.numel()

    def divide(numbers: Tensor) -> tuple[Tensor, Tensor]:
        return numbers[:count].view(of_q).transpose(1, 2), numbers[count:].view(of_k).transpose(1, 2)

    return torch.cat([each.reshape(-1) for each in tokens]), divide


def record_step(
    request: AttentionRequest,
    step: StepOnItsWay,
    found: SamplesOfPass,
    spans: SampleSpans,
    device: torch.device,
    copies: HostCopies,
) -> Iterator[RecordedCall]:
    """Return what a record keeps of each text of a step on a GPU, whose numbers are read later.

    Args:
        request: the call on the GPU.
        step: the call on the CPU.
        found: finds the samples of the pass.
        spans: the positions of the texts.
        device: device of the record.
        copies: the copies that are under way.
    """
    texts, new, kept = step.texts, request.shape.query_length, None
    if found.keeps_qk:
        newest = newest_keys(request.k, [text.span.keys[1] for text in texts], new)
        kept = QkOnTheirWay.begin(request.q, newest, device, copies)
    for text in texts:
        alone, start = slice_text(step.on_way.without_parts, spans, text)
        segment = Segment(found.request_without_tensors(alone.request, device), start)
        q, k = (None, None) if kept is None else kept.rows_of(text.span.sample)
        yield RecordedCall(segment, *step.rows_of(text.span, device), q, k, segment.key_stop - new, device)
