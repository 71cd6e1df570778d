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

from multihead.errors import ModelError
from multihead.interventions.followed import FollowedCall, follow_calls
from multihead.interventions.replay import Replay, repeat_batch
from multihead.record.layer import LayerRecord

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
        found: list[Tensor] = []
        seconds = floor = 0.0
        for heads in torch.arange(layer.num_heads).split(most_copies):
            begun = perf_counter()
            without = _OneHeadOffPerCopy(layer.name, heads)
            first = replay.block_of(layer.name) if replay.is_exact else 0
            with (
                torch.no_grad(),
                follow_calls(replay.model, without.change),
                replay.start_at_block(first, len(heads)),
            ):
                found.append(measure(repeat_batch(dict(batch), len(heads)), len(heads)))
            if without.time_of_attention is None:
                raise ModelError(
                    f"L{layer.number} was not reached.", "Run the same model on the same kind of inputs as before."
                )
            ended = perf_counter()
            seconds, floor = seconds + ended - begun, floor + ended - without.time_of_attention
        yield LayerSweep(layer.number, torch.cat(found), seconds, floor)


@dataclass(eq=False)
class _OneHeadOffPerCopy:
    """A change that switches off one head of a layer in each copy of a batch, another head in each copy.

    Attributes:
        layer: name of the layer.
        heads: (copies,) int64, the head of each copy.
        time_of_attention: time in seconds at which the layer's attention ran (`perf_counter`); None if it did not run.
    """

    layer: str
    heads: Tensor
    time_of_attention: float | None = None

    def change(self, call: FollowedCall, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Change the output of a call, (copies * rows, heads, queries, value_dim), see `HeadChange.change_output`."""
        if call.layer_name != self.layer:
            return output, None
        self.time_of_attention = perf_counter()
        rows = torch.arange(len(output), device=output.device)
        heads = self.heads.to(output.device).repeat_interleave(len(output) // len(self.heads))
        factors = output.new_ones(output.shape[:2]).index_put((rows, heads), output.new_zeros(()))
        return output.masked_fill((factors == 0)[:, :, None, None], 0), factors[:, :, None]
