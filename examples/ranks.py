"""Train a small language model whose texts are split over processes, and look at its heads.

torchrun --nproc-per-node 2 examples/ranks.py

Every text is random tokens, twice: the second half can be predicted by looking back for the same token. On GPUs, DEVICE
is "cuda".
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import init_device_mesh

import multihead as mh
from multihead import masks
from multihead.parallel import context_parallel, shard

DEVICE, LENGTH, WIDTH, TOKENS, STEPS = "cpu", 64, 32, 16, 120
CAUSAL = masks.Causal()


class Model(nn.Module):
    """Two attention layers: it embeds tokens, and knows nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList(mh.MultiHeadAttention(WIDTH, 4, rotary=mh.Rotary()) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, TOKENS)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the scores of the next token: (batch, tokens, TOKENS)."""
        x = self.embed(input_ids)
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = x + layer(norm(x), mask=CAUSAL)
        return self.out(self.norms[2](x))


def main() -> None:
    """Train, and print the loss and a table of all heads."""
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),), mesh_dim_names=("cp",))
    torch.manual_seed(0)  # all ranks have the same parameters and the same texts
    model = Model().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        half = torch.randint(TOKENS, (8, LENGTH // 2), device=DEVICE)
        ids = half.repeat(1, 2)
        part = shard(mesh["cp"], mask=CAUSAL, input_ids=ids, labels=ids)
        with context_parallel(mesh["cp"], layout=part.layout):
            scores = model(part["input_ids"])
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), part["labels"].flatten(), reduction="sum")
            loss = loss / ids[:, 1:].numel()  # the share of this rank's tokens in the mean
            optimizer.zero_grad()
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=mesh["cp"].get_group())
        optimizer.step()
        dist.all_reduce(loss, group=mesh["cp"].get_group())
        if dist.get_rank() == 0 and step % 20 == 19:
            print(f"step {step + 1}: loss {loss.item():.3f} nats")
    ids = torch.randint(TOKENS, (1, LENGTH // 2), device=DEVICE).repeat(1, 2)
    part = shard(mesh["cp"], mask=CAUSAL, input_ids=ids)
    watched = ("previous_mass", "induction_mass", "effective_keys")
    with (
        mh.observe(model, probes=watched) as seen,
        torch.no_grad(),
        context_parallel(mesh["cp"], layout=part.layout),
    ):
        model(part["input_ids"])  # each rank measures its queries
    whole = seen.reduce(mesh["cp"])  # the record of all of them, on rank 0
    if whole is not None:
        print(whole.table())


if __name__ == "__main__":
    dist.init_process_group()
    main()
    dist.destroy_process_group()
