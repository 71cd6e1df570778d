"""Streaming over the tiles of a map."""

from __future__ import annotations

import pytest
import torch

from multihead import masks
from multihead.functional import request_of
from multihead.plan.bounds import key_bounds
from multihead.probes import sums
from multihead.probes.sums import of_sample


def summed(mask: masks.Mask, streams: set[str]) -> sums.Sums:
    q = torch.randn(1, 2, 20, 4, dtype=torch.float64)
    request = request_of(q, q, q, mask=mask)
    logsumexp = torch.zeros(2, 20, dtype=torch.float64)
    bounds = key_bounds(mask, queries=20, keys=20)
    return of_sample(request, bounds, logsumexp, 0, streams=frozenset(streams), special_keys=None, map_size=4)


def test_only_the_sums_that_are_needed_are_made() -> None:
    found = summed(masks.Full(), {"largest"})
    assert bool((found.largest > 0).all())
    assert bool((found.surprisal == 0).all() & (found.mass == 0).all() & (found.received == 0).all())
    assert bool((found.pooled.sums == 0).all())


def test_tiles_that_the_bounds_hide_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of 5 tokens in tiles of 5 queries: each tile takes the keys of one document."""
    monkeypatch.setattr(sums, "ROWS", 5)
    widths = []
    scores = sums.scores

    def noted(request: object, queries: slice, keys: slice) -> torch.Tensor:
        widths.append(keys.stop - keys.start)
        return scores(request, queries, keys)  # type: ignore[arg-type]

    monkeypatch.setattr(sums, "scores", noted)
    summed(masks.Documents((5, 5, 5)), {"received"})
    assert widths == [5, 5, 5]  # and the last five queries, which see nothing, cost nothing
