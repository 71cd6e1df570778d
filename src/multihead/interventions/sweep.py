"""Switch off heads of a model one by one, and measure the model's output on one text or batch without each of them.

Several heads of a layer are switched off in one forward pass, each in a copy of the batch, and the blocks before the
layer are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from multihead.interventions.ablate import Intervention, Positions
from multihead.interventions.heads import HeadKey
from multihead.interventions.replacements import Replacement, ScaledOutput, gated
from multihead.interventions.replay import Replay, repeat_batch

_MAX_BYTES = 1 << 29  # of what all copies of a batch need in one forward pass: 512 MiB


@dataclass(frozen=True)
class SweptLayer:
    """A layer whose heads are switched off one by one.

    Attributes:
        number: number of the layer.
        name: name of the layer.
        num_heads: number of its heads.
        heads: the heads that are switched off.
        texts: number of texts of the batch, as the layer counts them; None if which token belongs to which text is
            unknown, so that each head needs a forward pass of its own.
    """

    number: int
    name: str
    num_heads: int
    heads: Sequence[int]
    texts: int | None


def cost_of_layer(layers: Sequence[SweptLayer], layer: SweptLayer, *, replayed: bool) -> int:
    """Return how many layers run for the heads of one of some layers: a replay runs the layers from it on."""
    return len(layer.heads) * (len(layers) - layers.index(layer) * replayed)


def copies_per_pass(layers: Sequence[SweptLayer], bytes_per_copy: int) -> int:
    """Return how many heads are switched off in one forward pass: as few passes per layer as memory allows."""
    heads = max((len(layer.heads) for layer in layers), default=1)
    if any(layer.texts is None for layer in layers):
        return 1
    passes = -(-heads // max(1, _MAX_BYTES // max(bytes_per_copy, 1)))
    return -(-heads // max(passes, 1)) or 1


def sweep_layers(
    replay: Replay,
    batch: Any,
    layers: Sequence[SweptLayer],
    measure: Callable[[Any, int], Tensor],
    *,
    copies: int,
    stored_copies: int = 1,
    replacement: Replacement | None = None,
    positions: Positions = None,
) -> Iterator[tuple[SweptLayer, Tensor]]:
    """Switch off each head of some layers once; yield layer by layer what is measured without each, (heads, ...).

    Args:
        replay: the stored blocks of the model.
        batch: what the model is called with.
        layers: the layers, found in an earlier run.
        measure: runs the model on a batch of `copies` copies, and returns (copies, ...); its second argument is
            `copies`.
        copies: number of copies of the batch in each forward pass; all heads are on in those that are left over.
        stored_copies: how many of these copies the stored outputs of blocks have.
        replacement: what replaces the output of a head; None is 0. It must count the texts of all copies.
        positions: the tokens whose output is replaced, see `ablate`.

    Raises:
        ModelError: a layer was not reached.
    """
    for layer in layers:
        first = replay.block_of(layer.name) if replay.is_exact else 0
        found: list[Tensor] = []
        for place in range(0, len(layer.heads), copies):
            chosen = layer.heads[place : place + copies]
            with (
                torch.no_grad(),
                _one_off_per_copy(replay.model, layer, chosen, copies, replacement or ScaledOutput(), positions),
                replay.start_at_block(first, copies // stored_copies),
            ):
                found.append(measure(repeat_batch(batch, copies), copies)[: len(chosen)])
        yield layer, torch.cat(found)


def _one_off_per_copy(
    model: nn.Module,
    layer: SweptLayer,
    heads: Sequence[int],
    copies: int,
    replacement: Replacement,
    positions: Positions,
) -> Intervention:
    """Return the context in which each copy of the batch has another one of some heads off."""
    if copies == 1:
        return Intervention(model, {HeadKey(layer.name, heads[0]): 0.0}, replacement, positions)
    assert layer.texts is not None
    on = torch.ones(copies, layer.num_heads)
    on[range(len(heads)), list(heads)] = 0
    gates = {HeadKey(layer.name, None): on.repeat_interleave(layer.texts, 0)}
    return Intervention(model, gates, gated(replacement), positions)
