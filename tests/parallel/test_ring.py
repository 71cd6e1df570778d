"""The ring: what it sends, when it sends it, and how much it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import multihead as mh
from multihead import masks
from multihead.parallel import context_parallel, exchange, ring
from tests.parallel.processes import Processes


def drawn(tokens: int, *, heads: int = 2, kv_heads: int = 1, value_dim: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((heads, 4), (kv_heads, 4), (kv_heads, value_dim))
    return [torch.randn(1, count, tokens, dim).requires_grad_() for count, dim in sizes]


def watched(group: Any, rank: int, tokens: int, mask: masks.Mask) -> dict[str, Any]:
    """Train one call, and record messages, computations and waits in their order."""
    events: list[str] = []
    sent: list[int] = []
    transfer, wait, attend, of_piece = (
        dist.batch_isend_irecv,
        exchange.Transfer.wait,
        ring.attend,
        ring._RingBackward.compute_piece,
    )

    def starting(operations: list[dist.P2POp]) -> Any:
        events.append("start")
        sent.append(sum(each.tensor.nbytes for each in operations if each.op is dist.isend))
        return transfer(operations)

    def waiting(self: exchange.Transfer) -> Any:
        if self._works:  # a transfer of nothing waits for nothing
            events.append("wait")
        return wait(self)

    def attending(*args: Any, **options: Any) -> Any:
        events.append("compute")
        return attend(*args, **options)

    def differentiating(*args: Any) -> Any:
        events.append("gradient")
        return of_piece(*args)

    dist.batch_isend_irecv, exchange.Transfer.wait = starting, waiting  # type: ignore[method-assign]
    ring.attend, ring._RingBackward.compute_piece = attending, differentiating  # type: ignore[assignment, method-assign]
    try:
        with context_parallel(group, strategy="ring"):
            q, k, v = drawn(tokens)
            output = mh.attention(q, k, v, mask=mask)
            forward, forward_bytes = len(events), sum(sent)
            output.sum().backward()
    finally:
        dist.batch_isend_irecv, exchange.Transfer.wait = transfer, wait  # type: ignore[method-assign]
        ring.attend, ring._RingBackward.compute_piece = attend, of_piece  # type: ignore[method-assign]
    return {"forward": events[:forward], "backward": events[forward:], "bytes": forward_bytes}


def test_a_ring_of_a_window_sends_the_keys_at_the_borders_only(four: Processes) -> None:
    found = four.results(watched, 2048, masks.Causal() & masks.Window(256))
    one_border = 255 * 1 * (4 + 3) * 4  # keys x kv_heads x (head_dim + value_dim) x itemsize
    assert [each["bytes"] for each in found] == [one_border, one_border, one_border, 0]


def test_documents_on_single_ranks_send_nothing(four: Processes) -> None:
    for found in four.results(watched, 8, masks.Documents((8, 8, 8, 8))):
        assert found == {"forward": ["compute"], "backward": ["gradient"], "bytes": 0}


def test_keys_travel_while_the_rank_computes(four: Processes) -> None:
    """The transfer of a step starts before the computation of the step before it."""
    for found in four.results(watched, 8, masks.Full()):
        assert found["forward"] == ["start", "compute", *["start", "wait", "compute"] * 5, "wait", "compute"]


def test_gradients_travel_while_the_rank_computes_the_next_step(four: Processes) -> None:
    for found in four.results(watched, 8, masks.Full()):
        of_keys, of_gradients = "start", ["start"]
        assert found["backward"] == [
            *[of_keys, "gradient"],
            *[of_keys, "wait", "gradient", *of_gradients],
            *[of_keys, "wait", "gradient", "wait", *of_gradients] * 4,
            *["wait", "gradient", "wait", *of_gradients],
            "wait",
        ]


class Largest(TorchDispatchMode):
    """Records the largest tensor that an operation returns."""

    size = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for each in found if isinstance(found, (list, tuple)) else (found,):
            if isinstance(each, Tensor):
                self.size = max(self.size, each.untyped_storage().nbytes())
        return found


def largest(group: Any, rank: int, strategy: Any) -> tuple[int, int]:
    """Return the bytes of the largest tensor in training, and those of the keys and values of a rank."""
    q, k, v = drawn(512, heads=1, value_dim=4)
    with context_parallel(group, strategy=strategy, layout="contiguous"):
        mh.attention(q, k, v, mask=masks.Causal() & masks.Window(600))  # plans are 16 bytes per token, once
        with Largest() as mode:
            mh.attention(q, k, v, mask=masks.Causal() & masks.Window(600)).sum().backward()
    return mode.size, k.nbytes + v.nbytes


@pytest.mark.skipif(
    mh.kernels.native.library.reason_of_absence() is not None, reason="the reference kernel holds the weights"
)
def test_no_rank_holds_the_keys_of_the_whole_sequence(four: Processes) -> None:
    assert all(held <= own for held, own in four.results(largest, "ring"))
    assert all(held > own for held, own in four.results(largest, "gather"))


def test_parts_are_merged_by_their_logsumexp() -> None:
    q, k, v = (x.detach().double() for x in drawn(6, kv_heads=2))
    expected, expected_logsumexp = mh.functional.attention_with_logsumexp(q, k, v)
    output, logsumexp = torch.zeros_like(expected), torch.full_like(expected_logsumexp, -torch.inf)
    for keys in (slice(0, 1), slice(1, 4), slice(4, 6)):
        part = mh.functional.attention_with_logsumexp(q, k[:, :, keys], v[:, :, keys])
        ring.merge_outputs(output, logsumexp, *part)
    torch.testing.assert_close((output, logsumexp), (expected, expected_logsumexp))


def test_parts_without_keys_change_nothing() -> None:
    output, logsumexp = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    ring.merge_outputs(output, logsumexp, torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf))
    assert not output.any()
    assert (logsumexp == -torch.inf).all()


def second_derivative(group: Any, rank: int) -> None:
    with context_parallel(group, strategy="ring"):
        q, k, v = drawn(4)
        (first,) = torch.autograd.grad(mh.attention(q, k, v).square().sum(), q, create_graph=True)
    first.sum().backward()


def test_a_second_derivative_is_rejected(four: Processes) -> None:
    for found in four.run(second_derivative):
        assert isinstance(found, RuntimeError)
        assert "once_differentiable" in str(found)
