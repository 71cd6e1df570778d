"""Ranks that do not make the same call, or stop, end all ranks with an error, and no rank waits for ever."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import RankError
from multihead.parallel import context_parallel
from multihead.parallel.exchange import (
    Ranks,
    by_token,
    gather,
    heads_for_tokens,
    of_ranges,
    tokens_for_heads,
)
from multihead.parallel.layout import Layout
from tests.parallel.processes import Processes, processes


def exchanged(group: Any, rank: int, layout: Layout) -> dict[str, Tensor]:
    ranks = Ranks.of(group)
    torch.manual_seed(0)
    whole = torch.randn(2, 4, 16, 3, dtype=torch.float64)
    own = layout.take(whole, rank, 2).requires_grad_()
    joined = gather(own, ranks, layout, 2)
    heads = heads_for_tokens(own, ranks, layout)
    count = 4 // ranks.size
    torch.testing.assert_close(joined, whole)
    torch.testing.assert_close(heads, whole[:, rank * count : (rank + 1) * count])
    torch.testing.assert_close(tokens_for_heads(heads, ranks, layout), own)
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
    for found, (first, stop) in zip(by_token((projected,), ((1, 3), (6, 8))), ((1, 3), (6, 8)), strict=True):
        assert found.is_contiguous()
        assert found.untyped_storage().data_ptr() == projected.untyped_storage().data_ptr()
        assert torch.equal(found.permute(1, 2, 0, 3), projected[:, :, first:stop])
    (copied,) = by_token((torch.randn(2, 3, 8, 4),), ((1, 3),))
    assert copied.is_contiguous()


def test_ranges_that_follow_one_another_are_a_view() -> None:
    x = torch.randn(2, 3, 8, 4)
    assert of_ranges(x, ((1, 3), (3, 6)))._is_view()
    assert torch.equal(of_ranges(x, ((1, 3), (3, 6))), x[:, :, 1:6])
    assert torch.equal(of_ranges(x, ((1, 3), (6, 8))), x[:, :, [1, 2, 6, 7]])


def of_other_sizes(group: Any, rank: int, strategy: Any) -> None:
    q = torch.zeros(1, 2, 4 if rank else 6, 8)
    with context_parallel(group, strategy=strategy):
        mh.attention(q, q, q)


@pytest.mark.parametrize("strategy", ["gather", "ulysses", "ring", "auto"])
def test_a_wrong_length_on_one_rank_is_an_error_on_all(four: Processes, strategy: str) -> None:
    for found in four.run(of_other_sizes, strategy, ranks=2):
        assert type(found) is RankError
        assert str(found) == (
            "The number of tokens differs between ranks: 6 on rank 0, 4 on rank 1. Give all ranks equal sizes and "
            "options."
        )


def of_other_masks(group: Any, rank: int) -> None:
    q = torch.zeros(1, 2, 4, 8)
    with context_parallel(group, strategy="ring"):
        mh.attention(q, q, q, mask=masks.Causal() if rank else masks.Full())


def test_another_mask_on_one_rank_is_an_error_on_all(four: Processes) -> None:
    for found in four.run(of_other_masks, ranks=2):
        assert type(found) is RankError
        assert str(found).startswith("The mask, as a checksum, differs between ranks: ")


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
            connection.send((one_rank_dies, (strategy,), 4))
        found = [connection.recv() for connection in started.connections[:3] if connection.poll(60)]
    assert [type(each) for each in found] == [RankError] * 3
    assert all("another rank stopped" in str(each) for each in found)
