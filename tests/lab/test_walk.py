"""The steps of the walk, against the numbers known beforehand and against PyTorch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from multihead import attention, masks
from multihead.errors import ArgumentError
from multihead.layer.heads import merge_heads, split_heads
from multihead_lab.walk import CHAPTERS, Walk, walk

SIZES: list[dict[str, Any]] = [
    {},
    {"batch": 1, "length": 4, "model_dim": 8, "num_heads": 2},
    {"batch": 3, "length": 2, "model_dim": 5, "num_heads": 5, "bias": "none"},
    {"batch": 2, "length": 5, "model_dim": 6, "num_heads": 1, "lengths": (0, 4)},
    {"batch": 2, "length": 1, "model_dim": 32, "num_heads": 4, "seed": 9},
]


def test_the_split_of_the_default_walk_is_the_one_known_by_heart() -> None:
    steps = walk()
    assert [tuple(steps[name].tensor.shape) for name in ("x", "grouped", "by_head", "flat")] == [
        (2, 3, 6),
        (2, 3, 3, 2),
        (2, 3, 3, 2),
        (6, 3, 2),
    ]
    assert steps["x"].tensor.flatten().tolist() == list(range(36))
    assert steps["by_head"].tensor[0, 0].tolist() == [[0, 1], [6, 7], [12, 13]]
    assert steps["by_head"].tensor[1, 2].tolist() == [[22, 23], [28, 29], [34, 35]]
    assert steps["flat"].tensor[5].tolist() == [[22, 23], [28, 29], [34, 35]]


def test_the_two_middle_shapes_look_alike_and_name_other_axes() -> None:
    steps = walk()
    assert steps["grouped"].tensor.shape == steps["by_head"].tensor.shape
    assert steps["grouped"].axes == ("batch", "length", "heads", "head_dim")
    assert steps["by_head"].axes == ("batch", "heads", "length", "head_dim")


@pytest.mark.parametrize("options", SIZES)
def test_the_way_back_ends_at_the_input(options: dict[str, Any]) -> None:
    steps = walk(**options)
    assert torch.equal(steps["unflat"].tensor, steps["by_head"].tensor)
    assert torch.equal(steps["ungrouped"].tensor, steps["grouped"].tensor)
    assert torch.equal(steps["merged"].tensor, steps["x"].tensor)


@pytest.mark.parametrize("options", SIZES)
def test_each_line_of_code_gives_the_tensor_shown_below_it(options: dict[str, Any]) -> None:
    """What the reader is shown as code is run, on the tensors of the steps before."""
    steps = walk(**options)
    known: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "split_heads": split_heads,
        "merge_heads": merge_heads,
        "seeded": torch.Generator().manual_seed(steps.sizes.seed),
    }
    for step in steps:
        known[step.name] = eval(step.code, known)
        assert known[step.name].shape == step.tensor.shape, step.name
        assert torch.equal(known[step.name].double(), step.tensor.double()), step.name


@pytest.mark.parametrize("options", SIZES)
def test_every_axis_has_a_name_and_every_entry_along_the_heads_its_head(options: dict[str, Any]) -> None:
    steps = walk(**options)
    for step in steps:
        assert len(step.axes) == step.tensor.dim()
        if step.head_axis is None:
            assert step.head_of_entry == ()
        else:
            assert len(step.head_of_entry) == step.tensor.shape[step.head_axis]
            assert set(step.head_of_entry) == set(range(steps.sizes.num_heads))


def test_the_head_of_a_column_or_block_is_the_head_that_its_numbers_came_from() -> None:
    steps = walk(batch=2, length=4, model_dim=6, num_heads=3)
    head_of_number = steps["x"].tensor % 6 // 2
    for name in ("x", "grouped", "by_head", "flat", "unflat", "ungrouped", "merged"):
        step = steps[name]
        assert step.head_axis is not None
        for index, head in enumerate(step.head_of_entry):
            numbers = step.tensor.select(step.head_axis, index)
            assert set(head_of_number.flatten()[numbers.flatten()].tolist()) == {head}


@pytest.mark.parametrize("options", SIZES)
def test_the_wrong_reshape_is_traced_to_the_positions_and_heads_it_mixes(options: dict[str, Any]) -> None:
    steps = walk(**options)
    sizes = steps.sizes
    inside = steps["wrong"].tensor[0]  # of sample 0 the number shows its position and column
    for head in range(sizes.num_heads):
        for row in range(sizes.length):
            numbers = inside[head, row]
            assert set((numbers // sizes.model_dim).tolist()) == {int(steps["wrong_position"].tensor[head, row])}
            columns = numbers % sizes.model_dim
            assert set((columns // sizes.head_dim).tolist()) == {int(steps["wrong_head"].tensor[head, row])}


def test_the_wrong_reshape_gives_head_0_the_columns_of_one_position() -> None:
    steps = walk()
    assert steps["wrong"].tensor[0, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert steps["wrong_position"].tensor[0].tolist() == [0, 0, 0]
    assert steps["wrong_head"].tensor[0].tolist() == [0, 1, 2]


def test_each_length_is_repeated_once_a_head() -> None:
    assert walk()["lengths"].tensor.tolist() == [3, 2]
    assert walk()["lengths_per_head"].tensor.tolist() == [3, 3, 3, 2, 2, 2]


@pytest.mark.parametrize("options", SIZES)
def test_the_joined_heads_are_those_of_torch_sdpa(options: dict[str, Any]) -> None:
    steps = walk(**options)
    heads = steps.sizes.num_heads
    seen = torch.arange(steps.sizes.length) < torch.tensor(steps.sizes.lengths)[:, None, None, None]
    added = torch.zeros(1, heads, steps.sizes.length, steps.sizes.length, dtype=torch.float64)
    if options.get("bias") != "none":
        added = steps["bias"].tensor[None].double()
    q, k, v = (split_heads(steps[name].tensor, heads) for name in "qkv")
    mask = added.masked_fill(~seen, -torch.inf)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.allclose(merge_heads(theirs), steps["concat"].tensor, rtol=0, atol=1e-12)
    assert steps.sdpa_difference < 1e-12


@pytest.mark.parametrize("options", [options for options in SIZES if 0 not in options.get("lengths", ())])
def test_the_output_and_the_weights_are_those_of_torch_multihead_attention(options: dict[str, Any]) -> None:
    """Samples without any token are left out: there the stock layer gives NaN."""
    steps = walk(**options)
    sizes = steps.sizes
    stock = torch.nn.MultiheadAttention(
        sizes.model_dim, sizes.num_heads, bias=False, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        stock.in_proj_weight.copy_(torch.cat([steps[f"w_{letter}"].tensor.T for letter in "qkv"]))
        stock.out_proj.weight.copy_(steps["w_o"].tensor.T)
    padded = torch.arange(sizes.length) >= torch.tensor(sizes.lengths)[:, None]
    hidden = torch.zeros(padded.shape, dtype=torch.float64).masked_fill(padded, -torch.inf)
    bias = None
    if options.get("bias") != "none":
        bias = steps["bias"].tensor.double().repeat(sizes.batch, 1, 1)
    inputs = steps["inputs"].tensor
    output, weights = stock(inputs, inputs, inputs, key_padding_mask=hidden, attn_mask=bias, average_attn_weights=False)
    assert torch.allclose(output, steps["output"].tensor, rtol=0, atol=1e-12)
    assert torch.allclose(weights.flatten(0, 1), steps["weights"].tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", SIZES)
def test_the_joined_heads_are_those_of_the_package(options: dict[str, Any]) -> None:
    """The walk shows each step; `attention` hides them in a kernel."""
    steps = walk(**options)
    q, k, v = (split_heads(steps[name].tensor, steps.sizes.num_heads) for name in "qkv")
    bias = None if options.get("bias") == "none" else steps["bias"].tensor[None].double()
    output = attention(q, k, v, mask=masks.Lengths(steps.sizes.lengths), bias=bias)
    assert torch.allclose(merge_heads(output), steps["concat"].tensor, rtol=0, atol=1e-12)


def test_a_sample_without_tokens_gets_weights_and_results_of_zero() -> None:
    steps = walk(lengths=(3, 0))
    assert torch.equal(steps["weights"].tensor[3:], torch.zeros(3, 3, 3, dtype=torch.float64))
    assert torch.equal(steps["concat"].tensor[1], torch.zeros(3, 6, dtype=torch.float64))
    assert torch.isfinite(steps["output"].tensor).all()


def test_without_a_bias_its_steps_are_left_out() -> None:
    names = {step.name for step in walk(bias="none")}
    assert not names & {"slopes", "bias", "biased"}


def test_the_lengths_given_by_default_fall_by_one_a_sample() -> None:
    assert walk(batch=5).sizes.lengths == (3, 2, 1, 3, 2)


def test_a_seed_fixes_the_projections() -> None:
    first, again, other = walk(seed=4), walk(seed=4), walk(seed=5)
    assert torch.equal(first["output"].tensor, again["output"].tensor)
    assert not torch.equal(first["w_q"].tensor, other["w_q"].tensor)


@pytest.mark.parametrize("options", [{}, {"length": 100, "model_dim": 64, "num_heads": 4}])
def test_the_numbers_stay_small_enough_to_show_more_than_all_or_nothing(options: dict[str, Any]) -> None:
    assert walk(**options)["scores"].tensor.abs().max() < 100


def test_a_step_that_is_not_there_is_a_missing_key() -> None:
    with pytest.raises(KeyError, match="nothing"):
        walk()["nothing"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 0}, "batch is 0, and must be at least 1. Give 1 or more."),
        ({"length": -3}, "length is -3, and must be at least 1. Give 1 or more."),
        ({"model_dim": 0}, "model_dim is 0, and must be at least 1. Give 1 or more."),
        ({"model_dim": -9999}, "model_dim is -9999, and must be at least 1. Give 1 or more."),
        ({"num_heads": -1}, "num_heads is -1, and must be at least 1. Give 1 or more."),
        (
            {"num_heads": 4},
            (
                "model_dim is 6, and 4 heads do not divide it. "
                "Give 1, 2, 3 or 6 heads, or a width that is a multiple of 4."
            ),
        ),
        (
            {"lengths": (3, 2, 1)},
            "lengths has 3 entries, and the batch has 2 samples. Give 2 lengths, one per sample.",
        ),
        (
            {"batch": 1, "lengths": ()},
            "lengths has 0 entries, and the batch has 1 sample. Give 1 length, one per sample.",
        ),
        (
            {"lengths": (3, 4)},
            (
                "The length of sample 1 is 4, and must be from 0 to 3, the length of the sequence. "
                "Give a length in that range."
            ),
        ),
        (
            {"lengths": (-1, 2)},
            (
                "The length of sample 0 is -1, and must be from 0 to 3, the length of the sequence. "
                "Give a length in that range."
            ),
        ),
        (
            {"bias": "alibi"},
            (
                "bias is 'alibi', and must be 'distance' or 'none'. "
                "Give 'distance' for a bias that grows with distance, or 'none'."
            ),
        ),
        ({"seed": -1}, "seed is -1, and must be from 0 to 2**63 - 1. Give 0 or another such number."),
        (
            {"length": 4096},
            (
                "These sizes need a tensor of 100,663,296 values, and a walk allows at most 4,194,304. "
                "Give a smaller batch, length, model_dim or number of heads."
            ),
        ),
    ],
)
def test_sizes_out_of_range_are_refused_in_words(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        walk(**options)
    assert str(refusal.value) == sentence


def test_every_step_is_shown_in_one_chapter() -> None:
    steps: Walk = walk()
    shown = [name for chapter in CHAPTERS for name in chapter.step_names]
    assert sorted([*shown, "wrong_position", "wrong_head"]) == sorted(step.name for step in steps)


def test_a_walk_has_every_tensor_that_the_chapters_tell_of_in_their_order() -> None:
    shown = [step for chapter in CHAPTERS for step in chapter.step_names]
    assert len(shown) == len(set(shown))
    assert [step.name for step in walk() if step.name in shown] == shown


def test_the_split_is_told_before_the_attention() -> None:
    parts = [chapter.part for chapter in CHAPTERS]
    assert parts == sorted(parts, key=("split", "attention").index)
