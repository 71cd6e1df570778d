"""Measure what an int8 cache changes in the perplexity of SmolLM2: python -m benchmarks.int8_cache."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Literal

import click
import torch
from torch import Tensor, nn

from benchmarks.watching import smollm
from multihead.functional import attend, request_of
from multihead.layer.cache import KeyValueCache
from multihead.masks import Causal

NAME = "cached"
LIMIT = 0.005  # relative change of the perplexity


def negative_log_likelihood(model: Any, ids: Tensor, chunk: int, dtype: Literal["int8"] | None) -> float:
    """Return the mean negative log-likelihood per token, nats, with a cache in each layer.

    Args:
        model: a language model of transformers; its attention is replaced.
        ids: (1, tokens).
        chunk: number of tokens of one call; the cache keeps those of earlier calls.
        dtype: of the caches.
    """
    from transformers import AttentionInterface

    caches: dict[nn.Module, KeyValueCache] = defaultdict(lambda: KeyValueCache(dtype=dtype))

    def attention(
        layer: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: object, *, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        held = caches[layer].extend(k, v)
        request = request_of(
            q, held.k, held.v, Causal(), scale=scaling, query_start=held.query_start, scales=held.scales
        )
        return attend(request).output.transpose(1, 2), None

    AttentionInterface.register(NAME, attention)
    model.set_attn_implementation(NAME)
    total = 0.0
    for start in range(0, ids.shape[1] - 1, chunk):
        positions = torch.arange(start, min(start + chunk, ids.shape[1] - 1))[None]
        logits = model(ids[:, positions[0]], position_ids=positions, use_cache=False).logits[0]
        total += float(nn.functional.cross_entropy(logits, ids[0, positions[0] + 1], reduction="sum"))
    return total / (ids.shape[1] - 1)


@click.command()
@click.option("--tokens", default=2048, show_default=True, help="Length of the text, part of Python's help.")
@click.option("--chunk", default=512, show_default=True, help="Tokens per call of the model; 1 decodes token by token.")
@torch.no_grad()
def main(tokens: int, chunk: int) -> None:
    """Print the perplexity of SmolLM2-135M-Instruct with caches in float32 and in int8."""
    model, ids, _ = smollm.loaded(tokens)
    logits = model(ids[:, :-1]).logits[0]
    stock = float(nn.functional.cross_entropy(logits, ids[0, 1:]))
    exact, rounded = (negative_log_likelihood(model, ids, chunk, dtype) for dtype in (None, "int8"))
    if abs(exact - stock) > 1e-4:
        raise click.ClickException(f"With float32 caches the loss is {exact}, and without caches {stock}.")
    change = math.expm1(rounded - exact)
    print(f"{tokens:,} tokens in calls of {chunk}")
    print(f"perplexity with caches in float32 {math.exp(exact):.4f}, in int8 {math.exp(rounded):.4f}")
    print(f"change {change:+.3%}, at most {LIMIT:.1%} wanted")
    if abs(change) > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
