"""The split of a sequence that is active."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import multihead as mh
from multihead import masks
from multihead.errors import ArgumentError
from multihead.kernels import sequence_split
from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.tensors.shapes import AttentionShape


class Recorded:
    """Computes nothing, and remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[AttentionRequest] = []

    def positions_of_rank(self, tokens: int, device: torch.device) -> torch.Tensor:
        return torch.arange(tokens, device=device)[None] + 100

    def whole_shape(self, shape: AttentionShape) -> AttentionShape:
        return shape._replace(query_length=2 * shape.query_length, key_length=2 * shape.key_length)

    def attend(self, request: AttentionRequest, *, kernel: str | None) -> AttentionResult:
        self.requests.append(request)
        return AttentionResult(request.q + 1, request.q[..., 0])

    rank_and_world_size = (0, 1)

    def chunks_of_rank(self, length: int) -> tuple[tuple[int, int], ...]:
        return ((0, length),)

    def gather_tokens(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor

    def estimate_rank_work(self, request: AttentionRequest, *, kernel: str | None) -> sequence_split.RankWork:
        parts = [request, replace(request, mask=masks.Causal())]
        return sequence_split.RankWork(parts, 2 * request.shape.num_cells, 9, 1024, (("ranks", "two"),))


def test_calls_and_layers_are_computed_by_the_active_split() -> None:
    split = Recorded()
    x = torch.randn(1, 2, 3, 4)
    layer = mh.MultiHeadAttention(4, 2)
    mask = masks.Lengths((6,))  # of the whole sequence
    with sequence_split.use_split(split):
        assert torch.equal(mh.attention(x, x, x, mask=mask), x + 1)
        layer(torch.zeros(1, 3, 4), mask=mask)
    assert [each.mask for each in split.requests] == [mask, mask]
    assert sequence_split.active_split is None


def test_masks_and_biases_are_checked_against_the_whole_sequence() -> None:
    x = torch.randn(1, 2, 3, 4)
    with sequence_split.use_split(Recorded()), pytest.raises(mh.errors.MaskError):
        mh.attention(x, x, x, mask=masks.Lengths((7,)))


def test_an_explanation_is_that_of_the_calls_of_a_rank() -> None:
    x = torch.randn(1, 2, 3, 4)
    with sequence_split.use_split(Recorded()):
        found = mh.explain(x, x, x, kernel="reference")
    assert str(found).splitlines() == [
        "kernel   reference",
        "skipped  0.0% of the score matrix; its intervals hide 75.0%",
        "memory   about 1.2 KiB besides q, k and v",
        "ranks    two",
    ]


def test_the_split_ends_where_an_error_leaves_it() -> None:
    def fail() -> None:
        with sequence_split.use_split(Recorded()):
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert sequence_split.active_split is None


def test_nothing_is_rejected_outside_of_a_split() -> None:
    sequence_split.reject_split_sequence("A cache", "Decode outside of context_parallel.")
    with sequence_split.use_split(Recorded()), pytest.raises(ArgumentError) as error:
        sequence_split.reject_split_sequence("A cache", "Decode outside of context_parallel.")
    assert str(error.value) == (
        "A cache cannot be used in context_parallel, where a rank has part of the tokens. Decode outside of "
        "context_parallel."
    )


def test_compiled_calls_notice_a_split() -> None:
    """A graph that was made outside of the context must not compute the part of a rank as a whole sequence."""
    compiled: Any = torch.compile(lambda x: mh.attention(x, x, x), backend="eager")
    x = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(compiled(x), mh.attention(x, x, x))
    with sequence_split.use_split(Recorded()):
        assert torch.equal(compiled(x), x + 1)
    torch.testing.assert_close(compiled(x), mh.attention(x, x, x))
