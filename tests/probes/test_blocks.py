"""Blocks of a rectangle of a map: the sums and counts of the dense weights, whatever the mask and the kernel."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.errors import ArgumentError
from multihead.functional import attention_with_logsumexp, request_of
from multihead.kernels.call import AttentionRequest
from multihead.masks.positions import TilePositions
from multihead.probes import blocks as module
from multihead.probes.blocks import BlockSums, CancelledError, sum_weights_over_blocks
from multihead.scores.bias import RelativeBias

QUERIES, KEYS, HEADS, START = 150, 170, 4, 20
DRAWN = torch.Generator().manual_seed(5)
MASKS = {
    "full": masks.Full(),
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(31),
    "documents": masks.Documents((60, 50, 40)),
    "padded": masks.Lengths((90,)),
    "gaps": masks.Window(9) | masks.Prefix(3),
    "a head of its own": masks.Keep(torch.rand(1, HEADS, QUERIES, KEYS, generator=DRAWN) < 0.3),
}
BIASES = {
    "no bias": None,
    "bias": torch.randn(1, HEADS, 1, KEYS, generator=DRAWN, dtype=torch.float64),
    "hiding bias": torch.randn(1, 1, QUERIES, KEYS, generator=DRAWN, dtype=torch.float64).masked_fill(
        torch.rand(1, 1, QUERIES, KEYS, generator=DRAWN) < 0.2, -torch.inf
    ),
    "relative": RelativeBias(torch.randn(1, HEADS, QUERIES + KEYS - 1, generator=DRAWN, dtype=torch.float64)),
}


def call(mask: masks.Mask, dtype: torch.dtype, *, bias: str = "no bias") -> tuple[AttentionRequest, Tensor, Tensor]:
    """Return a request, its logsumexp, and its dense weights and cells that may be seen, stacked, in float64."""
    drawn = torch.Generator().manual_seed(1)
    q = torch.randn(1, HEADS, QUERIES, 16, generator=drawn).to(dtype)
    k = torch.randn(1, 2, KEYS, 16, generator=drawn).to(dtype)
    given = BIASES[bias]
    wide = given
    if isinstance(given, RelativeBias):
        given = RelativeBias(given.values.to(dtype))
    elif given is not None:
        given = given.to(dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).to(dtype)
    request = request_of(q, k, k, mask, bias=given, sinks=sinks, softcap=8.0, query_start=START)
    options = {"mask": mask, "sinks": sinks, "softcap": 8.0, "query_start": START}
    _, logsumexp = attention_with_logsumexp(q, k, k, bias=given, kernel="reference", **options)
    scores = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    scores = 8.0 * (scores / 8.0).tanh()
    shown = mask.tile(TilePositions.from_sizes(QUERIES, KEYS, query_start=START)).expand(1, HEADS, QUERIES, KEYS)
    if wide is not None:
        added = wide.tile(QUERIES, KEYS) if isinstance(wide, RelativeBias) else wide
        shown = shown & (added != -torch.inf)
        scores = scores + added
    scores = scores.masked_fill(~shown, -torch.inf)
    row = torch.cat([scores, sinks.double()[None, :, None, None].expand(1, -1, QUERIES, 1)], -1)
    weights = row.softmax(-1)[..., :-1]
    return request, logsumexp, torch.stack([weights[0], shown[0].double()])


def cut(
    dense: Tensor, heads: list[int], rows: tuple[int, int], columns: tuple[int, int], block: tuple[int, int]
) -> BlockSums:
    """Sum weights and cells over the rows and then over the keys of each block."""
    lines = torch.stack(
        [part.sum(-2) for part in dense[:, heads, slice(*rows), slice(*columns)].split(block[0], -2)], -2
    )
    both = torch.stack([part.sum(-1) for part in lines.split(block[1], -1)], -1)
    return BlockSums(both[0], both[1].long())


def compare(found: BlockSums, wanted: BlockSums, tolerance: float) -> None:
    assert torch.equal(found.counts, wanted.counts)
    torch.testing.assert_close(found.sums, wanted.sums, atol=tolerance, rtol=tolerance)


REGIONS = {"in PyTorch": 1 << 18, "by the native kernel": 0}


@pytest.fixture(params=REGIONS.values(), ids=REGIONS.keys())
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make regions of this size go to PyTorch or to the native kernel, in strips of a few rows of blocks."""
    monkeypatch.setattr(module, "MIN_NATIVE_SCORES", request.param)
    monkeypatch.setattr(module, "SCORES_PER_STRIP", 4000)
    monkeypatch.setattr(module, "SCORES_PER_DENSE_STRIP", 4000)


# float64 is computed in PyTorch, whatever the size of a region, so each mask and bias meets PyTorch in float64 and the
# kernel in float32; of PyTorch in float32 and of float64 where the kernel is asked for, a mask with a bias is enough.
FLOAT64, FLOAT32 = (torch.float64, 1e-12), (torch.float32, 2e-5)
DENSE = [
    *product(["in PyTorch"], [FLOAT64], MASKS, BIASES),
    *product(["by the native kernel"], [FLOAT32], MASKS, BIASES),
    *(("in PyTorch", FLOAT32, mask, bias) for mask, bias in zip(MASKS, cycle(BIASES), strict=False)),
    ("by the native kernel", FLOAT64, "causal", "relative"),
]


@pytest.mark.parametrize(
    ("small", "precision", "mask", "bias"),
    [(REGIONS[where], *others) for where, *others in DENSE],
    ids=[f"{where}-{precision[0]}-{mask}-{bias}" for where, precision, mask, bias in DENSE],
    indirect=["small"],
)
@pytest.mark.usefixtures("small")
def test_blocks_are_the_sums_of_the_dense_weights(mask: str, bias: str, precision: tuple[torch.dtype, float]) -> None:
    dtype, tolerance = precision
    request, logsumexp, dense = call(MASKS[mask], dtype, bias=bias)
    everything = sum_weights_over_blocks(request, logsumexp, block=(32, 16))
    compare(everything, cut(dense, [0, 1, 2, 3], (0, QUERIES), (0, KEYS), (32, 16)), tolerance)
    part = sum_weights_over_blocks(
        request, logsumexp, heads=(3, 1), queries=slice(37, 141), keys=slice(5, 169), block=(7, 11)
    )
    compare(part, cut(dense, [3, 1], (37, 141), (5, 169), (7, 11)), tolerance)
    single = sum_weights_over_blocks(
        request, logsumexp, heads=2, queries=slice(60, 80), keys=slice(50, 75), block=(1, 1)
    )
    compare(single, cut(dense, [2], (60, 80), (50, 75), (1, 1)), tolerance)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("mask", MASKS)
def test_without_the_first_key_it_counts_as_hidden(mask: str) -> None:
    request, logsumexp, dense = call(MASKS[mask], torch.float32)
    dense[..., 0] = 0
    found = sum_weights_over_blocks(request, logsumexp, block=(32, 32), without_first_key=True)
    compare(found, cut(dense, [0, 1, 2, 3], (0, QUERIES), (0, KEYS), (32, 32)), 2e-5)
    beyond = sum_weights_over_blocks(request, logsumexp, keys=slice(64, KEYS), block=(32, 32), without_first_key=True)
    compare(beyond, cut(dense, [0, 1, 2, 3], (0, QUERIES), (64, KEYS), (32, 32)), 2e-5)


def test_means_are_over_the_cells_that_may_be_seen_and_nan_where_none_may() -> None:
    request, logsumexp, dense = call(masks.Causal(), torch.float64)
    means = sum_weights_over_blocks(request, logsumexp, heads=0, block=(50, 50)).means()[0]
    weights, shown = dense[:, 0]
    assert means[0, 3].isnan()
    torch.testing.assert_close(means[1, 2], weights[50:100, 100:150].sum() / shown[50:100, 100:150].sum())


@pytest.mark.usefixtures("small")
def test_a_query_that_is_not_a_number_adds_nothing() -> None:
    request, logsumexp, dense = call(masks.Causal(), torch.float32)
    logsumexp[:, :, 3] = torch.nan
    shown = dense[1].clone()
    dense[0, :, 3] = 0
    found = sum_weights_over_blocks(request, logsumexp, block=(16, 16))
    compare(found, cut(torch.stack([dense[0], shown]), [0, 1, 2, 3], (0, QUERIES), (0, KEYS), (16, 16)), 2e-5)


def test_an_empty_rectangle_has_no_blocks() -> None:
    request, logsumexp, _ = call(masks.Causal(), torch.float32)
    assert sum_weights_over_blocks(request, logsumexp, queries=slice(9, 9), block=(4, 4)).sums.shape == (HEADS, 0, 43)


def test_work_ends_between_strips_once_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCORES_PER_STRIP", 4000)
    request, logsumexp, _ = call(masks.Causal(), torch.float32)
    asked = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(CancelledError):
        sum_weights_over_blocks(request, logsumexp, block=(8, 8), cancelled=cancelled)
    assert len(asked) == 3


def test_what_is_no_rectangle_is_refused() -> None:
    request, logsumexp, _ = call(masks.Causal(), torch.float32)
    with pytest.raises(ArgumentError) as raised:
        sum_weights_over_blocks(request, logsumexp, queries=slice(0, 9, 2), block=(4, 4))
    assert str(raised.value) == (
        "queries is slice(0, 9, 2), with steps. Give a slice of step 1, such as slice(0, 512)."
    )
    with pytest.raises(ArgumentError) as raised:
        sum_weights_over_blocks(request, logsumexp, block=(0, 4))
    assert str(raised.value) == "block is (0, 4). Give the numbers of queries and keys per block, at least 1 each."
    with pytest.raises(ArgumentError) as raised:
        sum_weights_over_blocks(request, logsumexp, heads=4, block=(4, 4))
    assert str(raised.value) == "There is no head 4. Give heads from 0 to 3."


def test_a_request_is_left_as_it_was() -> None:
    request, logsumexp, _ = call(masks.Causal(), torch.float32)
    before = replace(request, q=request.q.clone(), k=request.k.clone())
    sum_weights_over_blocks(request, logsumexp, block=(8, 8))
    assert torch.equal(before.q, request.q)
    assert torch.equal(before.k, request.k)
    assert request.mask == masks.Causal()
