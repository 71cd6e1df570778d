"""Simulate training attention over many ranks: a cost model of work, bytes and latency, from the plan of each rank.

In a step of a ring a rank computes the cells that its queries see among the keys of another rank, which arrive in one
or two messages, while the keys of the next step arrive. All ranks wait for the slowest one in every step, so that the
simulated time is never too short by an overlap of different steps. With gathered keys every rank waits for all keys,
and then computes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from multihead.kernels.plan.bounds import key_bounds
from multihead.masks import Mask
from multihead.masks.base import KeyBounds
from multihead.parallel.layout import Layout, LayoutName


@dataclass(frozen=True)
class Machine:
    """The measured parts of the model.

    Attributes:
        cells_forward: cells of the map, of one head, that a rank computes per second in the forward pass.
        cells_backward: the same in the backward pass.
        call: seconds that a call takes besides its cells.
        bandwidth: bytes per second that a rank sends, while it receives as many.
        latency: seconds that a message takes besides its bytes.
    """

    cells_forward: float
    cells_backward: float
    call: float
    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Heads:
    """The heads of a layer, whose numbers have four bytes."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128

    @property
    def bytes_per_key(self) -> int:
        """The bytes of a key and its value, of all key/value heads."""
        return 2 * self.kv_heads * self.head_dim * 4


@dataclass(frozen=True)
class Simulated:
    """What was simulated of one training step.

    Attributes:
        ranks: how many ranks.
        seconds: of the slowest rank, in the forward and in the backward pass.
        efficiency: the share of this time that all ranks would take if each had the mean work and sent nothing.
        imbalance: the work of the busiest rank by the mean.
        bytes_sent: by the rank that sends most, in both passes.
    """

    ranks: int
    seconds: float
    efficiency: float
    imbalance: float
    bytes_sent: int


def simulate(
    mask: Mask, length: int, ranks: int, kind: LayoutName, machine: Machine, heads: Heads, *, gathered: bool = False
) -> Simulated:
    """Simulate one training step of a layer.

    Args:
        mask: the mask of the whole sequence, made of intervals.
        length: number of tokens.
        ranks: how many ranks share them.
        kind: which tokens each rank holds.
        machine: the measured parts.
        heads: the sizes of the layer.
        gathered: whether every rank gets all keys, instead of a ring.
    """
    layout = Layout(kind, ranks)
    cells, keys, calls, messages = _work_of(mask, length, layout)
    of_rank = cells.sum(1).double() * heads.heads
    ideal = float(of_rank.mean()) * (1 / machine.cells_forward + 1 / machine.cells_backward)
    if gathered:
        sent = (ranks - 1) * (length // ranks) * heads.bytes_per_key
        transfer = sent / machine.bandwidth + (ranks - 1) * machine.latency
        seconds = 2 * transfer + 2 * machine.call * layout.chunk_count // ranks
        seconds += float(of_rank.max()) * (1 / machine.cells_forward + 1 / machine.cells_backward)
        most = 2 * sent
    else:
        seconds, most = 0.0, 0
        # The backward pass sends the keys again, and their gradients back.
        for rate, times in ((machine.cells_forward, 1), (machine.cells_backward, 2)):
            computing = cells.double() * heads.heads / rate + calls * machine.call  # (ranks, steps)
            nbytes = keys * heads.bytes_per_key * times
            moving = nbytes / machine.bandwidth + messages * machine.latency * times
            arriving = torch.cat([moving[:, 1:], torch.zeros(ranks, 1)], 1)  # while a step is computed
            seconds += float(torch.maximum(computing, arriving).amax(0).sum())
            most += int(nbytes[:, 1:].sum(1).max())
    return Simulated(ranks, seconds, ideal / seconds, float(of_rank.max() / of_rank.mean()), most)


@lru_cache
def _work_of(mask: Mask, length: int, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `work_per_step` of a mask; it takes minutes for a million tokens on a thousand ranks."""
    return work_per_step(key_bounds(mask, queries=length, keys=length), layout)


def work_per_step(bounds: KeyBounds, layout: Layout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what each rank does with the keys of each other rank of a ring.

    Returns:
        (ranks, steps) each: the cells that it computes; the keys that it receives (its own in step 0); the calls, at
        most; the messages.
    """
    length, parts, ranks = bounds.start.shape[1], layout.chunk_count, layout.ranks
    size = length // parts
    first = torch.arange(parts, dtype=torch.int32) * size
    cells = torch.zeros(parts, parts, dtype=torch.int64)
    low, high = torch.zeros_like(cells), torch.zeros_like(cells)
    for chunk in range(parts):
        rows = slice(chunk * size, (chunk + 1) * size)
        start, stop = bounds.start[0, rows].int(), bounds.stop[0, rows].int()  # half the memory to read
        touched = torch.arange(int(start.min()) // size, -(-int(stop.max()) // size))
        whole = (first[touched] >= start.max()) & (first[touched] + size <= stop.min())
        of_whole, touched = touched[whole], touched[~whole]  # seen by all queries of the chunk, or by some
        cells[chunk, of_whole], low[chunk, of_whole] = size**2, first[of_whole].long()
        high[chunk, of_whole] = first[of_whole].long() + size
        edges = first[touched]
        begin = torch.maximum(start[:, None], edges)
        end = torch.minimum(stop[:, None], edges + size)
        shown = end > begin
        cells[chunk, touched] = ((end - begin) * shown).sum(0)
        low[chunk, touched] = begin.masked_fill(~shown, length).amin(0).long()
        high[chunk, touched] = end.masked_fill(~shown, 0).amax(0).long()
    own = torch.tensor([[each[0] // size for each in layout.chunks(rank, length)] for rank in range(ranks)])
    of_step = (torch.arange(ranks)[:, None] - torch.arange(ranks)) % ranks  # whose keys a rank has in a step
    found = [torch.zeros(ranks, ranks, dtype=torch.int64) for _ in range(3)]
    for of_keys in range(own.shape[1]):
        theirs = own[of_step, of_keys]  # (ranks, steps), a chunk of keys
        pairs = [(own[:, index][:, None].expand_as(theirs), theirs) for index in range(own.shape[1])]
        found[0] += sum(cells[pair] for pair in pairs)
        lows = torch.stack([low[pair].masked_fill(cells[pair] == 0, length) for pair in pairs]).amin(0)
        highs = torch.stack([high[pair].masked_fill(cells[pair] == 0, 0) for pair in pairs]).amax(0)
        found[1] += (highs - lows).clamp(min=0)
        found[2] += sum((cells[pair] > 0).long() for pair in pairs)
    of_cells, of_keys_received, pairs = found
    messages = (of_keys_received > 0).long() + (of_keys_received > length // ranks // 4)
    messages[:, 0] = 0  # its own keys
    return of_cells, of_keys_received, pairs * messages.clamp(min=1), messages
