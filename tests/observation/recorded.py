"""Records to save, search and show: of one layer asked for anything, and of a small model that reads token ids."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.functional import attend, request_of
from multihead.kernels.call import CallOrigin
from multihead.observation.record import Record
from multihead.probes import PROBES


class Asking(nn.Module):
    """Asks for whatever attention it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return attend(replace(request_of(q, k, v, **options), origin=CallOrigin(self))).output


def asked(
    *,
    queries: int = 9,
    keys: int = 9,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    watch: dict[str, Any] | None = None,
    **options: Any,
) -> Record:
    """A record of one call with random q, k and v."""
    made = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads, queries, 8, generator=made).to(dtype)
    k, v = torch.randn(2, 1, kv_heads, keys, 8, generator=made).to(dtype).unbind()
    with mh.observe(model := Asking(), **{"probes": tuple(PROBES), "map_size": 4} | (watch or {})) as seen:
        model(q, k, v, **options)
    return seen


class Reader(nn.Module):
    """Reads token ids in two causal layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.layers = nn.ModuleList(mh.MultiHeadAttention(16, 4, num_kv_heads=2) for _ in range(layers))
        with torch.no_grad():
            for layer in self.layers:
                layer.q_proj.weight.mul_(4)  # type: ignore[operator, union-attr]

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, mask=masks.Causal(), **options)
        return x  # type: ignore[no-any-return]


def read(*texts: Tensor, **options: Any) -> Record:
    """A record of a reader's texts, (batch, tokens) int64 each."""
    torch.manual_seed(0)
    with torch.no_grad(), mh.observe(model := Reader().eval(), **{"probes": tuple(PROBES)} | options) as seen:
        for each in texts:
            model(each)
    return seen


def ids(*shape: int, seed: int = 0) -> Tensor:
    """Token ids at random."""
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(seed))


class Tokenizer:
    """Names token 7 "<s>", and every other one by its number."""

    all_special_ids = (7,)

    def convert_ids_to_tokens(self, id_: int) -> str:
        return "<s>" if id_ == 7 else str(id_)

    def decode(self, many: list[int]) -> str:
        return " ".join(str(each) for each in many)


def same(found: Record, expected: Record, *, weights: bool = True) -> None:
    """Compare two records bit by bit."""
    assert (found.title, [each.name for each in found.layers]) == (
        expected.title,
        [each.name for each in expected.layers],
    )
    for layer, other in zip(found.layers, expected.layers, strict=True):
        for one, another in zip(layer.samples, other.samples, strict=True):
            assert (one.num_queries, one.num_keys, one.query_start, one.cross_attention, one.calls) == (
                another.num_queries,
                another.num_keys,
                another.query_start,
                another.cross_attention,
                another.calls,
            )
            assert torch.equal(one.visible(), another.visible())
            assert list(one.statistics) == list(another.statistics)
            for name, value in another.statistics.items():
                assert torch.equal(one.statistics[name].nan_to_num(-7), value.nan_to_num(-7)), name
            if weights:
                assert torch.equal(one.weights().nan_to_num(-7), another.weights().nan_to_num(-7))
