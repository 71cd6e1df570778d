"""What `explain` shows of a rank is what it sends and computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.kernels import explanation
from multihead.parallel import context_parallel
from tests.parallel.processes import Processes

MASKS = {"causal": masks.Causal(), "window": masks.Causal() & masks.Window(3), "documents": masks.Documents((5, 3, 8))}


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """Call a function; return its result, and the bytes that this rank sent to others meanwhile."""
    point, gathering, exchanging = dist.batch_isend_irecv, dist.all_gather, dist.all_to_all_single
    sent = 0

    def of_points(operations: list[dist.P2POp]) -> Any:
        nonlocal sent
        sent += sum(each.tensor.nbytes for each in operations if each.op is dist.isend)
        return point(operations)

    def of_gathering(found: list[Tensor], own: Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += own.nbytes * (len(found) - 1)
        return gathering(found, own, **options)

    def of_exchanging(received: Tensor, parts: Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += parts[1:].nbytes  # one part stays
        return exchanging(received, parts, **options)

    dist.batch_isend_irecv, dist.all_gather, dist.all_to_all_single = of_points, of_gathering, of_exchanging
    try:
        result = function()
    finally:
        dist.batch_isend_irecv, dist.all_gather, dist.all_to_all_single = point, gathering, exchanging
    return result, sent


def traffic_of(group: Any, rank: int, strategy: Any, layout: Any) -> list[tuple[str, str]]:
    """Return for each mask what `explain` shows, and what was sent."""
    found = []
    q = torch.randn(2, 4, 4, 8).requires_grad_()
    k, v = torch.randn(2, 2, 4, 8).requires_grad_(), torch.randn(2, 2, 4, 6).requires_grad_()
    for mask in MASKS.values():
        with context_parallel(group, strategy=strategy, layout=layout, check="first call"):
            shown, silent = counted(partial(mh.explain, q, k, v, mask=mask))
            assert silent == 0
            mh.attention(q, k, v, mask=mask)  # compares the calls, in a message of 16 bytes
            output, forward = counted(partial(mh.attention, q, k, v, mask=mask))
            _, backward = counted(output.sum().backward)
        readable = explanation.readable_bytes
        lines = dict(shown.over_ranks)
        assert str(shown).splitlines()[-4:] == [f"{name:8} {line}" for name, line in lines.items()]
        found.append((lines["sends"], f"{readable(forward)} forward, {readable(backward)} backward"))
    return found


@pytest.mark.parametrize("layout", ["contiguous", "balanced"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "gather"])
def test_explain_names_the_bytes_that_a_rank_sends(four: Processes, strategy: str, layout: str) -> None:
    for of_rank in four.results(traffic_of, strategy, layout):
        assert [shown for shown, _ in of_rank] == [sent for _, sent in of_rank]


def explained(group: Any, rank: int, heads: int, mask: masks.Mask) -> str:
    layer = mh.MultiHeadAttention(8 * heads, heads)
    with context_parallel(group, layout="balanced"):
        return str(layer.explain(torch.zeros(1, 1024, 8 * heads), mask=mask))


def test_explain_shows_why_a_strategy_was_chosen(four: Processes) -> None:
    window = masks.Causal() & masks.Window(16)
    assert four.results(explained, 2, window, ranks=2)[0].splitlines()[-4:] == [
        "ranks    ring: rank 0 of 2 computes its part in 3 calls; balanced layout",
        "sends    1.9 KiB forward, 3.8 KiB backward",
        "because  in a ring all ranks send 3.8 KiB, with Ulysses 264.0 KiB",
        "compile  outside of the graphs of torch.compile, so fullgraph=True raises an error",
    ]
    full = four.results(explained, 4, masks.Full())[1].splitlines()
    assert full[-6] == "skipped  0.0% of the score matrix; its intervals hide 0.0%"
    assert full[-4:-1] == [
        "ranks    ulysses: rank 1 of 4 computes its part in 1 call; balanced layout",
        "sends    396.0 KiB forward, 384.0 KiB backward",
        "because  in a ring all ranks send 3.0 MiB, with Ulysses 1.5 MiB",
    ]
    odd = four.results(explained, 3, masks.Causal(), ranks=2)[0].splitlines()
    assert odd[-2] == "because  3 heads cannot be divided over 2 ranks, as Ulysses needs it"
