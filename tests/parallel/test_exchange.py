"""Ranks that do not make the same call, or stop, end all ranks with an error, and no rank waits for ever."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import multihead as mh
from multihead import masks, scores
from multihead.errors import RankError
from multihead.parallel import context_parallel, shard, unshard
from multihead.parallel.exchange import (
    Ranks,
    comparable_value,
    gather_sequence,
    reshard_heads_to_tokens,
    reshard_tokens_to_heads,
    slice_ranges,
    slice_token_major,
)
from multihead.parallel.layout import Layout
from tests.parallel.processes import Processes, processes, receive, send


def exchanged(group: Any, rank: int, layout: Layout) -> dict[str, Tensor]:
    ranks = Ranks.of_mesh(group)
    torch.manual_seed(0)
    whole = torch.randn(2, 4, 16, 3, dtype=torch.float64)
    own = layout.select_tokens_of_rank(whole, rank, 2).requires_grad_()
    joined = gather_sequence(own, ranks, layout, 2)
    heads = reshard_tokens_to_heads(own, ranks, layout)
    count = 4 // ranks.size
    torch.testing.assert_close(joined, whole)
    torch.testing.assert_close(heads, whole[:, rank * count : (rank + 1) * count])
    torch.testing.assert_close(reshard_heads_to_tokens(heads, ranks, layout), own)
    (of_joined,) = torch.autograd.grad((joined * whole).sum(), own)
    (of_heads,) = torch.autograd.grad((heads * heads.detach()).sum(), own)
    return {"gathered": of_joined / ranks.size - own.detach(), "heads": of_heads - own.detach()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["contiguous", "balanced"])
def test_gathered_and_exchanged_tokens_have_their_gradients(four: Processes, kind: Any, ranks: int) -> None:
    for found in four.results(exchanged, Layout(kind, ranks), ranks=ranks):
        for difference in found.values():
            torch.testing.assert_close(difference, torch.zeros_like(difference))


def test_tokens_of_one_projected_sample_are_sent_without_a_copy() -> None:
    projected = torch.randn(1, 8, 3, 4).transpose(1, 2)  # (batch, heads, tokens, dim)
    for found, (first, stop) in zip(slice_token_major((projected,), ((1, 3), (6, 8))), ((1, 3), (6, 8)), strict=True):
        assert found.is_contiguous()
        assert found.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()
        assert torch.equal(found.permute(1, 2, 0, 3), projected[:, :, first:stop])
    (copied,) = slice_token_major((torch.randn(2, 3, 8, 4),), ((1, 3),))
    assert copied.is_contiguous()


def test_ranges_that_follow_one_another_are_a_view() -> None:
    x = torch.randn(2, 3, 8, 4)
    assert slice_ranges(x, ((1, 3), (3, 6)))._is_view()
    assert torch.equal(slice_ranges(x, ((1, 3), (3, 6))), x[:, :, 1:6])
    assert torch.equal(slice_ranges(x, ((1, 3), (6, 8))), x[:, :, [1, 2, 6, 7]])


def attended(batch: int = 1, heads: int = 4, length: int = 4, head_dim: int = 8, **options: Any) -> Tensor:
    """Call attention on this rank's tokens: zeros of some sizes."""
    options = dict(options)
    dtype, value_dim = options.pop("dtype", torch.float32), options.pop("value_dim", head_dim)
    kv_heads, learned = options.pop("kv_heads", heads), options.pop("learned", False)
    q = torch.zeros(batch, heads, length, head_dim, dtype=dtype, requires_grad=learned)
    k = torch.zeros(batch, kv_heads, length, head_dim, dtype=dtype)
    v = torch.zeros(batch, kv_heads, length, value_dim, dtype=dtype)
    if options.pop("observed", False):
        with mh.observe(torch.nn.Identity()):
            return mh.attention(q, k, v, **options)
    return mh.attention(q, k, v, **options)


def cells(*hidden: int) -> masks.Mask:
    """Return a mask in which every query sees the first and the last of 8 keys."""
    shown = torch.ones(8, 8, dtype=torch.bool)
    shown[:, list(hidden)] = False
    return masks.Keep(shown, "queries keys")


@dataclass(frozen=True)
class Strided(masks.Mask):
    """A mask without intervals."""

    steps: tuple[int, ...]

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        return (queries - keys) % self.steps[0] == 0


# What rank 0 and rank 1 give, and the start of the error.
DIFFERENCES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "batch": ({"batch": 2}, {}, "The batch differs between ranks: 2 on rank 0, 1 on rank 1."),
    "length": ({"length": 6}, {}, "The number of tokens differs between ranks: 6 on rank 0, 4 on rank 1."),
    "transposed": (
        {"heads": 2, "length": 8},
        {"heads": 8, "length": 2},
        "The number of heads differs between ranks: 2 on rank 0, 8 on rank 1.",
    ),
    "kv_heads": ({"kv_heads": 2}, {}, "The number of key/value heads differs between ranks: 2 on rank 0, 4 on rank 1."),
    "head_dim": ({"head_dim": 4}, {}, "head_dim differs between ranks: 4 on rank 0, 8 on rank 1."),
    "value_dim": ({"value_dim": 4}, {}, "value_dim differs between ranks: 4 on rank 0, 8 on rank 1."),
    "dtype": (
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16},
        "The dtype differs between ranks: torch.bfloat16 on rank 0, torch.float16 on rank 1.",
    ),
    "intervals": ({"mask": masks.Causal()}, {}, "The mask, as a checksum, differs between ranks: "),
    "documents": (
        {"mask": masks.Documents((4, 4))},
        {"mask": masks.Documents((2, 6))},
        "The mask, as a checksum, differs between ranks: ",
    ),
    "cells": ({"mask": cells(3)}, {"mask": cells(4)}, "The mask, as a checksum, differs between ranks: "),
    "a mask of one's own": (
        {"mask": Strided((2, 1))},
        {"mask": Strided((3, 1))},
        "The mask, as a checksum, differs between ranks: ",
    ),
    "scale": ({"scale": 1.0}, {"scale": 0.5}, "scale differs between ranks: 1.0 on rank 0, 0.5 on rank 1."),
    "softcap": ({"softcap": 2.0}, {}, "softcap differs between ranks: 2.0 on rank 0, None on rank 1."),
    "bias": (
        {"bias": torch.zeros(1, 1, 8, 8)},
        {"bias": torch.eye(8)[None, None]},
        "The bias differs between ranks: float32 (1, 1, 8, 8) with checksum ",
    ),
    "relative bias": (
        {"bias": scores.RelativeBias(torch.zeros(1, 4, 15))},
        {},
        "The bias differs between ranks: RelativeBias of float32 (1, 4, 15) with checksum ",
    ),
    "sinks": (
        {"sinks": torch.zeros(4)},
        {"sinks": torch.ones(4)},
        "The tensor of the sinks differs between ranks: float32 (4,) with checksum ",
    ),
    "dropout": ({"dropout": 0.5}, {"dropout": 0.25}, "dropout differs between ranks: 0.5 on rank 0, 0.25 on rank 1."),
    "one rank in eval()": ({"dropout": 0.5}, {}, "dropout differs between ranks: 0.5 on rank 0, 0.0 on rank 1."),
    "gradients": ({"learned": True}, {}, "What needs a gradient differs between ranks: q on rank 0,  on rank 1."),
    "observed": (
        {"observed": True},
        {},
        "Whether the call is observed differs between ranks: True on rank 0, False on rank 1.",
    ),
}


def second_differs(group: Any, rank: int, strategy: Any, name: str) -> None:
    with context_parallel(group, strategy=strategy):
        attended()
        attended(**DIFFERENCES[name][rank])


@pytest.mark.parametrize("strategy", ["gather", "ulysses", "ring"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_call_that_differs_on_one_rank_is_an_error_on_all(four: Processes, strategy: str, name: str) -> None:
    """Not the first call of a context only: a later one differs where a rank's last batch is smaller."""
    for found in four.run(second_differs, strategy, name, ranks=2):
        assert type(found) is RankError
        assert str(found).startswith(DIFFERENCES[name][2])
        assert str(found).endswith(" on rank 1. Give all ranks equal sizes and options.")


def later_ones_differ(group: Any, rank: int) -> bool:
    with context_parallel(group, check="first call"):
        attended()
        return bool(attended(softcap=1.0 + rank).any())


def test_where_first_calls_are_compared_later_ones_may_differ(four: Processes) -> None:
    assert four.results(later_ones_differ, ranks=2) == [False, False]


def other_calls(group: Any, rank: int, name: str) -> None:
    ids = torch.arange(8).view(1, 8)
    if name == "ids":
        shard(group, input_ids=ids + rank, labels=ids)
    elif name == "layout":
        shard(group, mask=masks.Full() if rank else masks.Causal(), ids=torch.zeros(1, 64))
    elif name == "lengths":
        unshard(group, ids[:, : 4 + rank], layout="contiguous")
    elif rank:
        unshard(group, ids, layout="contiguous")
    else:
        shard(group, ids=ids)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("ids", "input_ids differs between ranks: int64 (1, 8) with checksum "),
        ("layout", "The layout differs between ranks: balanced on rank 0, contiguous on rank 1."),
        ("lengths", "The shape differs between ranks: (1, 4) on rank 0, (1, 5) on rank 1."),
        ("functions", "The call differs between ranks: shard on rank 0, unshard on rank 1."),
    ],
)
def test_shard_and_unshard_compare_what_they_are_given(four: Processes, name: str, start: str) -> None:
    """Ranks whose data loaders are not in step would train on parts of different texts."""
    for found in four.run(other_calls, name, ranks=2):
        assert type(found) is RankError
        assert str(found).startswith(start)


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_numbers_are_exchanged_on_the_cpu_whatever_the_backend_is_called(tmp_path: Path, backend: str | None) -> None:
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        assert Ranks.of_mesh(dist.init_device_mesh("cpu", (1,))).device_type == "cpu"
    finally:
        dist.destroy_process_group()


def test_values_are_described_alike_where_they_are_equal() -> None:
    """However they lie in memory; an expanded tensor is not written out."""
    x = torch.arange(6.0).view(2, 3)
    for same in (x.clone(), x.t().contiguous().t(), torch._neg_view(-x)):
        assert comparable_value(same) == comparable_value(x)
    assert comparable_value(torch.ones(1).expand(2, 3)) == comparable_value(torch.ones(1, 1).expand(2, 3))
    for other in (x + 1, x.double(), x.view(3, 2), x.flip(0)):
        assert comparable_value(other) != comparable_value(x)
    assert comparable_value([{"x": x}, None, "a"]) == [{"x": comparable_value(x)}, None, "a"]
    assert comparable_value(lambda: None) == "function"  # printed with an address, which differs between processes
    assert comparable_value(torch.zeros(0, 3)) == "float32 (0, 3) with checksum 00000000"


def one_rank_fails(group: Any, rank: int) -> None:
    q = torch.zeros(1, 2, 4, 8)
    with context_parallel(group, strategy="ring"):
        mh.attention(q, q, q, mask=masks.Lengths((99,) if rank else (8,)))


def test_an_error_on_one_rank_ends_the_other_within_the_timeout() -> None:
    with processes(timeout=1) as started:
        waited, failed = started.run(one_rank_fails, ranks=2)
    assert type(failed) is mh.errors.MaskError
    assert type(waited) is RankError
    assert str(waited).startswith(
        "Comparing the call of rank 0 with those of the 1 others failed: another rank stopped, is not in the same "
        "call, or took longer than the group's timeout ("
    )
    assert str(waited).endswith(
        "Read the first error of the other ranks: all of them must make the same calls, with the same sizes."
    )


def one_rank_dies(group: Any, rank: int, strategy: Any) -> None:
    q = torch.zeros(1, 4, 4, 8)
    with context_parallel(group, strategy=strategy):
        mh.attention(q, q, q)  # compares the calls
        if rank == 3:
            os._exit(1)
        mh.attention(q, q, q)
        mh.attention(q, q, q)


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_a_rank_that_dies_ends_the_others(strategy: str) -> None:
    with processes(timeout=2) as started:
        for connection in started.connections:
            send(connection, (one_rank_dies, (strategy,), 4))
        found = [receive(connection) for connection in started.connections[:3] if connection.poll(60)]
    assert [type(each) for each in found] == [RankError] * 3
    assert all("another rank stopped" in str(each) for each in found)
