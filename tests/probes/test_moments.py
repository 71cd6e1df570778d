"""Mean and spread of the distance, joined tile by tile."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from multihead.probes.moments import DistanceMoments


@pytest.mark.parametrize("cuts", [(0, 200), (0, 1, 77, 130, 200), (0, 100, 110, 200)])
def test_tiles_joined_are_the_whole(cuts: tuple[int, ...]) -> None:
    weights, positions = torch.rand(2, 5, 200, dtype=torch.float64), torch.arange(100, 105)
    moments = DistanceMoments.zero(torch.zeros(2, 5, dtype=torch.float64))
    for first, behind in pairwise(cuts):
        side = 1 if behind <= 101 else -1 if first >= 104 else 0
        moments.add(weights[..., first:behind], positions, (first, behind), side)
    distance = (positions[:, None] - torch.arange(200)).abs().double()
    share = weights / weights.sum(-1, keepdim=True)
    mean = (share * distance).sum(-1)
    torch.testing.assert_close(moments.mean(), mean, atol=1e-11, rtol=0)
    spread = (share * (distance - mean[..., None]).square()).sum(-1).sqrt()
    torch.testing.assert_close(moments.spread(), spread, atol=1e-11, rtol=0)


def test_of_nothing_seen_both_are_zero() -> None:
    moments = DistanceMoments.zero(torch.zeros(1, 2, dtype=torch.float64))
    moments.add(torch.zeros(1, 2, 40), torch.tensor([50, 51]), (0, 40), 1)
    assert moments.mean().tolist() == moments.spread().tolist() == [[0, 0]]
