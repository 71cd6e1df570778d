"""Run a model's eager attention and watch it, and compute by hand what the watching should find."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import multihead as mh
from multihead.observation.record import Record
from multihead.probes import PROBES


def eager(model: Any, batch: dict[str, Tensor]) -> Any:
    """Run the library's own eager attention, which writes its weights down."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    model.set_attn_implementation(before)
    return output


def eager_weights(name: str, output: Any) -> list[Tensor]:
    """The weights of all attention calls in the order they run: (batch, heads, queries, keys) each."""
    if name not in ("t5", "whisper"):
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(each for pair in pairs for each in pair)]


def watched(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Any, Record]:
    options.setdefault("probes", tuple(PROBES))
    with torch.no_grad(), mh.observe(model, **options) as seen:
        output = model(**batch)
    return output, seen


def real(batch: dict[str, Tensor], sample: int, length: int, *, which: str = "attention_mask") -> Tensor:
    mask = batch.get(which)
    return torch.ones(length, dtype=torch.bool) if mask is None else mask[sample].bool()


def without_padding(weights: Tensor, name: str, layer: str, batch: dict[str, Tensor], sample: int) -> Tensor:
    """Cut a sample out of a layer's eager weights: (heads, queries, keys) of its real tokens."""
    in_decoder = name == "t5" and layer.startswith("decoder")
    crosses = "EncDec" in layer or "encoder_attn" in layer
    of_queries = "decoder_attention_mask" if in_decoder else "attention_mask"
    rows = real(batch, sample, weights.shape[-2], which=of_queries)
    columns = real(batch, sample, weights.shape[-1], which="attention_mask" if crosses else of_queries)
    return weights[sample][:, rows][:, :, columns]


def brute_force(weights: Tensor, query_start: int, visible: Tensor) -> dict[str, Tensor]:
    """Statistics by their definitions, from the whole map (heads, queries, keys)."""
    place = torch.arange(weights.shape[-1])
    offset = place - (torch.arange(weights.shape[-2]) + query_start)[:, None]
    mass = weights.sum(-1)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    distance = (weights * offset.abs()).sum(-1) / mass
    return {
        "entropy": entropy,
        "effective_keys": entropy.exp(),
        "mean_distance": distance,
        "self_mass": (weights * (offset == 0)).sum(-1),
        "previous_mass": (weights * (offset == -1)).sum(-1),
        "next_mass": (weights * (offset == 1)).sum(-1),
        "first_mass": weights[..., 0],
        "largest_weight": weights.amax(-1),
        "received": weights.sum(-2),
        "pooled_map": weights.masked_fill(~visible, torch.nan),  # one cell a block: the texts are short
    }
