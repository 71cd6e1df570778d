"""Train a small language model, and list the steps at which its heads became induction heads.

python examples/training.py

Every text is random tokens, twice: the second half can be predicted by looking back for the same token. The page of all
heads over the steps is written to training.html.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks

LENGTH, WIDTH, TOKENS = 64, 64, 64


class Model(nn.Module):
    """Two attention layers, and nothing else between the embedding and the output."""

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
            x = x + layer(norm(x), mask=masks.Causal())
        return self.out(self.norms[2](x))


def train(steps: int = 150, every: int = 10) -> mh.Watch:
    """Train the model, and return the watch of its heads, which observed one step in `every`."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = mh.Watch(model, every=every, kinds=True)
    for step in range(steps):
        ids = torch.randint(TOKENS, (16, LENGTH // 2)).repeat(1, 2)
        optimizer.zero_grad()
        with watch:
            loss = nn.functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    return watch


if __name__ == "__main__":
    series = train().series
    print(*series.changes(), sep="\n")
    print(f"Written: {series.report('training.html')}")
