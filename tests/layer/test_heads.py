"""The split of heads and its way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multihead.errors import ArgumentError, ShapeError
from multihead.layer.heads import head_counts, head_dim_of, merge_heads, split_heads


def counted() -> torch.Tensor:
    return torch.arange(36).reshape(2, 3, 6)


def test_each_head_takes_its_own_columns() -> None:
    x_heads = split_heads(counted(), 3)
    assert x_heads.shape == (2, 3, 3, 2)
    assert x_heads[0, 0].tolist() == [[0, 1], [6, 7], [12, 13]]
    assert x_heads[1, 2].tolist() == [[22, 23], [28, 29], [34, 35]]


def test_a_split_copies_nothing() -> None:
    x = counted()
    assert split_heads(x, 3).data_ptr() == x.data_ptr()


def test_heads_laid_next_to_samples_run_fastest() -> None:
    flat = split_heads(counted(), 3).reshape(6, 3, 2)
    assert flat[1].tolist() == [[2, 3], [8, 9], [14, 15]]
    assert flat[5].tolist() == [[22, 23], [28, 29], [34, 35]]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 5), st.integers(1, 4)),
    turned=st.booleans(),
)
def test_merging_undoes_splitting(sizes: tuple[int, int, int, int], turned: bool) -> None:
    """Whatever the sizes, and also for a tensor that is not contiguous."""
    batch, length, num_heads, head_dim = sizes
    x = torch.randn(batch, length, num_heads * head_dim)
    if turned:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    x_heads = split_heads(x, num_heads)
    assert torch.equal(merge_heads(x_heads), x)
    for head in range(num_heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        assert torch.equal(x_heads[:, head], x[:, :, columns])


def test_merging_by_mean_averages_the_heads() -> None:
    x_heads = torch.tensor([[[[1.0, 2.0]], [[3.0, 6.0]]]])  # (1, 2, 1, 2)
    assert merge_heads(x_heads, merge="mean").tolist() == [[[2.0, 4.0]]]


def test_gradients_pass_through_both_ways() -> None:
    x = torch.randn(2, 3, 6, requires_grad=True)
    merge_heads(split_heads(x, 3)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(2, 3, 6))


def test_the_head_counts_of_a_width_are_its_divisors() -> None:
    assert head_counts(1) == (1,)
    assert head_counts(7) == (1, 7)
    assert head_counts(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert head_dim_of(36, 9) == 4


def test_heads_that_do_not_divide_are_refused_with_the_counts_that_fit() -> None:
    with pytest.raises(ArgumentError) as refusal:
        split_heads(torch.zeros(2, 3, 6), 4)
    assert str(refusal.value) == (
        "The last axis of x is 6, and 4 heads do not divide it. "
        "Give 1, 2, 3 or 6 heads, or a width that is a multiple of 4."
    )


def test_a_width_of_one_takes_one_head() -> None:
    with pytest.raises(ArgumentError) as refusal:
        head_dim_of(1, 2)
    assert str(refusal.value) == (
        "embed_dim is 1, and 2 heads do not divide it. Give 1 head, or a width that is a multiple of 2."
    )


def test_a_width_with_many_divisors_lists_the_nearest() -> None:
    with pytest.raises(ArgumentError) as refusal:
        head_dim_of(5040, 11)
    assert str(refusal.value) == (
        "embed_dim is 5040, and 11 heads do not divide it. "
        "Give 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16 or 18 heads (the nearest that fit), "
        "or a width that is a multiple of 11."
    )


@pytest.mark.parametrize("num_heads", [0, -2, 2.0])
def test_a_number_of_heads_below_one_or_not_whole_is_refused(num_heads: int) -> None:
    with pytest.raises(ArgumentError) as refusal:
        split_heads(torch.zeros(2, 3, 6), num_heads)
    assert str(refusal.value) == (
        f"num_heads is {num_heads!r}, and must be a whole number of at least 1. Give 1 or more."
    )


def test_a_tensor_without_three_axes_is_not_split() -> None:
    with pytest.raises(ShapeError) as refusal:
        split_heads(torch.zeros(3, 6), 3)
    assert str(refusal.value) == (
        "x has the shape (3, 6), and must be (batch, length, heads * head_dim). Give a tensor with three axes."
    )


def test_a_tensor_without_four_axes_is_not_merged() -> None:
    with pytest.raises(ShapeError) as refusal:
        merge_heads(torch.zeros(3, 6, 2))
    assert str(refusal.value) == (
        "x_heads has the shape (3, 6, 2), and must be (batch, heads, length, head_dim). "
        "Give a tensor with four axes, such as split_heads returns."
    )


def test_an_unknown_way_to_merge_is_refused() -> None:
    with pytest.raises(ArgumentError) as refusal:
        merge_heads(torch.zeros(2, 3, 3, 2), merge="sum")  # type: ignore[arg-type]
    assert str(refusal.value) == (
        "merge is 'sum', and must be 'concat' or 'mean'. "
        "Give 'concat' to join the heads' columns, or 'mean' to average the heads."
    )
