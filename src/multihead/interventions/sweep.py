"""Switch off every head of a model once, and measure the effect of each on one text or batch.

All heads of a layer are switched off in one forward pass, each in a copy of the batch, and the blocks before the layer
are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from multihead.interventions.ablate import scale_heads
from multihead.interventions.heads import HeadKey
from multihead.interventions.replay import Replay, repeat_batch
from multihead.record.layer import LayerRecord
from multihead.tensors.undo import Undo

BatchInputs = Mapping[str, Tensor]


@dataclass(frozen=True)
class LayerSweep:
    """The results of a sweep over the heads of one layer, of which each was switched off once.

    Attributes:
        layer: number of the layer.
        result_per_head: (heads, ...), the result of `measure` with each head switched off.
        seconds: time of all forward passes of the layer's sweep.
        seconds_after_layer: the part of `seconds` after the attention of the layer, which every sweep takes.
    """

    layer: int
    result_per_head: Tensor
    seconds: float
    seconds_after_layer: float


def sweep_layers(
    replay: Replay,
    batch: BatchInputs,
    layers: Sequence[LayerRecord],
    measure: Callable[[BatchInputs, int], Tensor],
    *,
    most_copies: int,
) -> Iterator[LayerSweep]:
    """Switch off each head of some layers once, and yield what is measured without it, layer by layer.

    Args:
        replay: the stored blocks of the model.
        batch: the inputs of the model, (batch, ...) each.
        layers: the layers, recorded in an earlier run.
        measure: runs the model on a batch of `copies` copies, and returns (copies, ...); its second argument is
            `copies`.
        most_copies: largest number of copies in one forward pass.

    Raises:
        ModelError: a layer was not reached.
    """
    for layer in layers:
        name, _, call = layer.name.partition("#")
        attention = replay.model.get_submodule(name)
        found: list[Tensor] = []
        seconds = floor = 0.0
        for heads in torch.arange(layer.num_heads).split(most_copies):
            begun, copies, rows = perf_counter(), len(heads), len(next(iter(batch.values())))
            one_off = 1 - functional.one_hot(heads, layer.num_heads).float()  # (copies, heads)
            ended_calls: list[float] = []
            first = replay.block_of(layer.name) if replay.is_exact else 0
            with (
                torch.no_grad(),
                Undo() as undo,
                scale_heads(replay.model, {HeadKey(layer.name, None): one_off.repeat_interleave(rows, 0)}),
                replay.start_at_block(first, copies),
            ):
                undo.hook_after_forward(attention, lambda *_: ended_calls.append(perf_counter()))  # noqa: B023
                found.append(measure(repeat_batch(dict(batch), copies), copies))
            ended = perf_counter()
            seconds, floor = seconds + ended - begun, floor + ended - ended_calls[int(call or 1) - 1]
        yield LayerSweep(layer.number, torch.cat(found), seconds, floor)
