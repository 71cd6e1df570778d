"""How many bytes each strategy sends and holds, from the sizes of a call and its plan."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

from multihead.kernels.dense_tile import working_dtype
from multihead.parallel.plan import RingPlan
from multihead.tensors.shapes import AttentionShape

Strategy = Literal["gather", "ulysses", "ring"]


class Traffic(NamedTuple):
    """What one rank sends in a call, in bytes, after the 16 bytes to each other rank that compare their calls.

    What it keeps for itself is not counted.

    Attributes:
        forward: in the forward pass.
        backward: in the backward pass.
        held: of other ranks' tensors that it holds at once in the forward pass.
    """

    forward: int
    backward: int
    held: int


def traffic(strategy: Strategy, shape: AttentionShape, planned: RingPlan, ranks: int) -> Traffic:
    """Return what a rank sends.

    Args:
        strategy: how the ranks compute the attention.
        shape: the sizes of a rank's call.
        planned: its plan as a ring.
        ranks: how many ranks there are.
    """
    own = bytes_of_keys(shape, shape.key_length)
    others = ranks - 1
    if strategy == "gather":  # keys and values to each other rank, and their gradients back
        return Traffic(own * others, own * others, own * others)
    if strategy == "ulysses":
        copies = copies_for_ulysses(shape, ranks) or 1
        features = shape.num_heads * (shape.head_dim + shape.value_dim)  # of q and of the output
        of_logsumexp = shape.batch * shape.num_heads * shape.query_length * working_dtype(shape.dtype).itemsize
        inputs = shape.batch * shape.query_length * features * shape.dtype.itemsize + copies * own
        heads = inputs * others // ranks  # a rank keeps the part of its own heads
        return Traffic(heads + of_logsumexp * others // ranks, heads, heads)
    sent, received = planned.keys_sent, [step.keys_received for step in planned.steps[1:]]
    at_once = max((sum(pair) for pair in pairwise([0, *received, 0])), default=0)  # those of a step and of the next
    # The backward pass sends the keys again, and the gradients of those that it received.
    return Traffic(
        bytes_of_keys(shape, sent), bytes_of_keys(shape, sent + sum(received)), bytes_of_keys(shape, at_once)
    )


def bytes_of_keys(shape: AttentionShape, keys: int) -> int:
    """Return the bytes of some keys and their values, of all samples and key/value heads."""
    return shape.batch * shape.num_kv_heads * keys * (shape.head_dim + shape.value_dim) * shape.dtype.itemsize


def copies_for_ulysses(shape: AttentionShape, ranks: int) -> int | None:
    """Return how many copies of each key/value head Ulysses needs; None where the heads cannot be divided.

    >>> import torch
    >>> q, k = torch.zeros(1, 8, 4, 2), torch.zeros(1, 2, 4, 2)
    >>> copies_for_ulysses(AttentionShape.of(q, k, k), 4)
    2
    """
    if shape.num_heads % ranks:
        return None
    for copies in range(1, shape.group + 1):
        if shape.num_kv_heads * copies % ranks == 0 and shape.group % copies == 0:
            return copies
    return None
