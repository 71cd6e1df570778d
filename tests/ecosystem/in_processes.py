"""What each of two processes does in the distributed tests, for test_distributed.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import multihead as mh
from multihead import masks
from tests.ecosystem import in_shards
from tests.families import batch_of, family
from tests.parallel.whole import whole

PROCESSES, EMBED, HEADS, LENGTH = 2, 16, 4, 6
LENGTHS = (6, 3, 0, 4)
MEMORY_LENGTHS = (2, 5, 6, 1)


class Model(nn.Module):
    """Self-attention over a padded batch, then cross-attention to a padded memory."""

    def __init__(self) -> None:
        super().__init__()
        self.within = mh.MultiHeadAttention(EMBED, HEADS, num_kv_heads=2, dtype=torch.float64)
        self.across = mh.MultiHeadAttention(EMBED, HEADS, dtype=torch.float64)

    def forward(self, x: Tensor, memory: Tensor, lengths: Tensor, memory_lengths: Tensor) -> Tensor:
        x = x + self.within(x, lengths=lengths, mask=masks.Causal())
        return x + self.across(x, memory, lengths=lengths, memory_lengths=memory_lengths)  # type: ignore[no-any-return]


def batch() -> tuple[Tensor, ...]:
    """Four samples: two a process."""
    torch.manual_seed(2)
    x, memory = torch.randn(2, 4, LENGTH, EMBED, dtype=torch.float64).unbind()
    return x, memory, torch.tensor(LENGTHS), torch.tensor(MEMORY_LENGTHS)


def model() -> Model:
    torch.manual_seed(1)
    return Model()


def steps(training: nn.Module, given: tuple[Tensor, ...], *, share: float = 1.0) -> dict[str, Tensor]:
    """Train two steps; return the gradients of the first, and the parameters after the second."""
    optimizer = torch.optim.SGD(training.parameters(), lr=0.05)
    found: dict[str, Tensor] = {}
    for step in range(2):
        optimizer.zero_grad()
        (training(*given).square().sum() * share).backward()
        if step == 0:
            found |= {f"gradient of {name}": whole(each.grad) for name, each in training.named_parameters()}
        optimizer.step()
    return found | {name: whole(each) for name, each in training.named_parameters()}


def alone() -> dict[str, Tensor]:
    """Train on the whole batch in one process."""
    return steps(model(), batch())


def mine(rank: int) -> tuple[Tensor, ...]:
    """Take this process's half of the batch: samples of other lengths than the other's."""
    return tuple(each[2 * rank : 2 * rank + 2] for each in batch())


def by_ddp(group: Any, rank: int) -> dict[str, Tensor]:
    """Train with DistributedDataParallel, which averages gradients: the loss counts twice."""
    found = steps(DistributedDataParallel(model(), process_group=group), mine(rank), share=PROCESSES)
    return {name.replace("module.", ""): each for name, each in found.items()}


def by_ddp_watched(group: Any, rank: int) -> dict[str, Tensor]:
    """The same while it is watched: only the samples of this process are seen."""
    training = DistributedDataParallel(model(), process_group=group)
    with mh.observe(training) as seen:
        found = steps(training, mine(rank), share=PROCESSES)
    found = {name.replace("module.", ""): each for name, each in found.items()}
    return found | {"samples seen": torch.tensor([each.num_samples for each in seen.layers])}


def by_fsdp(group: Any, rank: int) -> dict[str, Tensor]:
    """Train with every layer's parameters sharded over the processes."""
    training = copy.deepcopy(model())
    mesh = DeviceMesh.from_group(group, "cpu")
    for each in (training.within, training.across, training):
        fully_shard(each, mesh=mesh)
    assert all(isinstance(each, DTensor) for each in training.parameters())
    return steps(training, mine(rank), share=PROCESSES)


def used(group: Any, rank: int | None, implementation: str) -> dict[str, Tensor]:
    """Return the gradients of a Hugging Face model: by DistributedDataParallel, or in one process without a rank."""
    training: nn.Module = family("llama").double()
    training.set_attn_implementation(implementation)
    batch = batch_of("llama", padding="right")
    batch["labels"] = batch["input_ids"]
    if rank is not None:
        training = DistributedDataParallel(training, process_group=group)
        batch = {name: each[rank:][:1] for name, each in batch.items()}
    training(**batch).loss.backward()
    return {name.replace("module.", ""): whole(each.grad) for name, each in training.named_parameters()}


WAYS: dict[str, Callable[[Any, int], dict[str, Tensor]]] = {
    "DDP": by_ddp,
    "DDP, watched": by_ddp_watched,
    "FSDP2": by_fsdp,
}


def run(group: Any, rank: int, folder: Path) -> None:
    """Train in every way, and write what came out."""
    for way, train in WAYS.items():
        torch.save(train(group, rank), folder / f"{way}, {rank}.pt")
    mh.use()
    torch.save(used(group, rank, "multihead"), folder / f"used, {rank}.pt")
    torch.save(in_shards.everything(group, rank), folder / f"heads, {rank}.pt")
