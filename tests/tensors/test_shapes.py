"""Reading the shape of a call, and refusing what does not fit, in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.tensors.shapes import AttentionShape, resolve_query_start


def qkv(
    q: tuple[int, ...] = (2, 8, 5, 64), k: tuple[int, ...] = (2, 2, 7, 64), v: tuple[int, ...] = (2, 2, 7, 32)
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(q), torch.zeros(k), torch.zeros(v)


def test_the_sizes_are_read_off_q_k_and_v() -> None:
    shape = AttentionShape.from_tensors(*qkv())
    assert (shape.batch, shape.num_heads, shape.num_kv_heads, shape.query_length, shape.key_length) == (2, 8, 2, 5, 7)
    assert (shape.head_dim, shape.value_dim, shape.dtype, shape.device.type) == (64, 32, torch.float32, "cpu")
    assert shape.heads_per_kv_head == 4
    assert shape.num_cells == 2 * 8 * 5 * 7


UNFIT = {
    "three axes in q": (
        {"q": (2, 5, 64)},
        (
            "q has shape (2, 5, 64), and attention takes (batch, heads, queries, head_dim). "
            "Split the heads first: mh.split_heads(x, num_heads)."
        ),
    ),
    "five axes in k": (
        {"k": (1, 2, 2, 7, 64)},
        (
            "k has shape (1, 2, 2, 7, 64), and attention takes (batch, kv_heads, keys, head_dim). "
            "Split the heads first: mh.split_heads(x, num_heads)."
        ),
    ),
    "three axes in v": (
        {"v": (2, 7, 64)},
        (
            "v has shape (2, 7, 64), and attention takes (batch, kv_heads, keys, value_dim). "
            "Split the heads first: mh.split_heads(x, num_heads)."
        ),
    ),
    "another batch": (
        {"k": (3, 2, 7, 64)},
        "q, k and v have batches of 2, 3 and 2 samples. Give all three the same batch.",
    ),
    "another head_dim": (
        {"k": (2, 2, 7, 63)},
        "q has head_dim 64 and k has head_dim 63. Project both to the same head_dim.",
    ),
    "no heads": (
        {"q": (2, 0, 5, 64)},
        (
            "q has shape (2, 0, 5, 64), k (2, 2, 7, 64) and v (2, 2, 7, 32). "
            "Give at least one head, and at least one feature per head."
        ),
    ),
    "no key heads": (
        {"k": (2, 0, 7, 64), "v": (2, 0, 7, 32)},
        (
            "q has shape (2, 8, 5, 64), k (2, 0, 7, 64) and v (2, 0, 7, 32). "
            "Give at least one head, and at least one feature per head."
        ),
    ),
    "no features": (
        {"v": (2, 2, 7, 0)},
        (
            "q has shape (2, 8, 5, 64), k (2, 2, 7, 64) and v (2, 2, 7, 0). "
            "Give at least one head, and at least one feature per head."
        ),
    ),
    "k and v of different heads": (
        {"k": (2, 2, 7, 64), "v": (2, 4, 7, 32)},
        "k has 2 heads and v has 4. Give k and v the same number of heads.",
    ),
    "k and v of different lengths": (
        {"v": (2, 2, 9, 32)},
        "k has 7 keys and v has 9. Give one value per key.",
    ),
    "heads that are no multiple": (
        {"k": (2, 3, 7, 64), "v": (2, 3, 7, 32)},
        (
            "k has 3 heads and q has 8, and 8 is not a multiple of 3. "
            "Give k and v 1, 2, 4 or 8 heads (grouped-query attention, arXiv:2305.13245)."
        ),
    ),
    "more key heads than heads": (
        {"q": (2, 1, 5, 64)},
        (
            "k has 2 heads and q has 1, and 1 is not a multiple of 2. "
            "Give k and v 1 head (grouped-query attention, arXiv:2305.13245)."
        ),
    ),
}


@pytest.mark.parametrize("case", UNFIT)
def test_sizes_that_do_not_fit_are_refused(case: str) -> None:
    given, sentence = UNFIT[case]
    with pytest.raises(ShapeError) as refusal:
        AttentionShape.from_tensors(*qkv(**given))
    assert str(refusal.value) == sentence


def test_integer_tensors_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(DtypeError) as refusal:
        AttentionShape.from_tensors(q, k.long(), v)
    assert str(refusal.value) == (
        "k has dtype torch.int64, and attention needs floating point. Convert it, for example k.float()."
    )


def test_different_dtypes_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(DtypeError) as refusal:
        AttentionShape.from_tensors(q, k.double(), v.half())
    assert str(refusal.value) == (
        "q, k and v have dtypes torch.float32, torch.float64 and torch.float16. "
        "Convert them to one dtype, for example k.to(q.dtype)."
    )


def test_different_devices_are_refused() -> None:
    q, k, v = qkv()
    with pytest.raises(DtypeError) as refusal:
        AttentionShape.from_tensors(q, k.to("meta"), v)
    assert str(refusal.value) == (
        "q, k and v are on cpu, meta and cpu. Move them to one device, for example k.to(q.device)."
    )


def test_what_is_no_tensor_is_refused() -> None:
    q, k, _ = qkv()
    nothing: Any = None
    with pytest.raises(DtypeError) as refusal:
        AttentionShape.from_tensors(q, k, nothing)
    assert str(refusal.value) == "v is a NoneType, and must be a tensor. Give torch tensors."


def resolve(query_start: Any, *, speaks: bool = True, queries: int = 3, keys: int = 5) -> int | Tensor:
    return resolve_query_start(query_start, torch.zeros(2, 1, queries, 4), queries, keys, uses_positions=speaks)


def test_the_first_query_stands_where_it_is_said() -> None:
    assert resolve(4) == 4
    assert resolve("end") == 2
    assert resolve("end", queries=5, keys=3) == -2
    start = torch.tensor([1, -2])
    assert resolve(start) is start


def test_left_out_it_is_zero_where_nothing_depends_on_it() -> None:
    assert resolve(None, speaks=False) == 0
    assert resolve(None, queries=5) == 0


def test_left_out_where_the_mask_uses_positions_it_is_refused_with_both_spellings() -> None:
    with pytest.raises(ArgumentError) as refusal:
        resolve(None)
    assert str(refusal.value) == (
        "There are 3 queries and 5 keys, and the mask depends on positions. "
        'Give the position of the first query: query_start=0 (as torch\'s is_causal) or query_start="end" (decoding).'
    )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("start", "query_start is 'start'. Give an int, a tensor with one int per sample, or \"end\"."),
        (-1, 'query_start is -1. Give an int of 0 or more, a tensor with one per sample, or "end".'),
        (True, 'query_start is True. Give an int of 0 or more, a tensor with one per sample, or "end".'),
        (1 << 41, "query_start is 2199023255552. Give at most 1099511627776."),
        (10**30, f"query_start is {10**30}. Give at most 1099511627776."),
        (torch.tensor([0, 2**63 - 1]), f"query_start is {2**63 - 1}. Give at most 1099511627776."),
        (
            torch.zeros(2, dtype=torch.int64, device="meta"),
            (
                "query_start is on the meta device, where it has no values, and q is on cpu. "
                "Give one int per sample, on any other device."
            ),
        ),
        (1.5, 'query_start is 1.5. Give an int of 0 or more, a tensor with one per sample, or "end".'),
        (
            torch.tensor([1.0, 2.0]),
            "query_start is a torch.float32 tensor of shape (2,). Give one int per sample: shape (2,).",
        ),
        (
            torch.tensor([1, 2, 3]),
            "query_start is a torch.int64 tensor of shape (3,). Give one int per sample: shape (2,).",
        ),
        (
            torch.tensor([True, False]),
            "query_start is a torch.bool tensor of shape (2,). Give one int per sample: shape (2,).",
        ),
    ],
    ids=str,
)
def test_a_start_out_of_range_is_refused(given: Any, sentence: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        resolve(given)
    assert str(refusal.value) == sentence
