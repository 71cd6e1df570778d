"""Padding is left out and put back: tokens keep their order, and gradients their places."""

from __future__ import annotations

import re
from typing import Literal

import pytest
import torch

from multihead import masks
from multihead.errors import ArgumentError, ShapeError
from multihead.layer.packing import Packing, Padding
from multihead.masks.positions import TilePositions

LENGTHS = (3, 0, 5)


def test_packing_and_unpacking_keeps_the_tokens_and_puts_zeros_for_padding() -> None:
    x = torch.randn(3, 5, 2)
    packing = Packing.of(LENGTHS, batch=3, length=5)
    packed = packing.pack(x)
    assert torch.equal(packed[0], torch.cat([row[:length] for row, length in zip(x, LENGTHS, strict=True)]))
    restored = packing.unpack(packed)
    for row, back, length in zip(x, restored, LENGTHS, strict=True):
        assert torch.equal(back[:length], row[:length])
        assert (back[length:] == 0).all()


def test_gradients_pass_through_packing_to_the_tokens_alone() -> None:
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    packing = Packing.of(torch.tensor(LENGTHS), batch=3, length=5)
    assert torch.autograd.gradcheck(lambda t: packing.unpack(packing.pack(t).square()), (x,))


@pytest.mark.parametrize(
    ("mask", "stays"),
    [
        (masks.Full(), True),
        (masks.Causal() & masks.Window(3, after=1), True),
        (masks.Causal() | masks.Window(3, after=1), True),
        (masks.Lengths((1, 2)), False),
        (masks.Causal() | masks.Prefix(2), False),
        (masks.Documents((2, 3)), False),
        (masks.Keep(torch.ones(1, 2, dtype=torch.bool), "batch keys"), False),
    ],
)
def test_only_masks_of_differences_of_positions_let_samples_share_a_row(mask: masks.Mask, *, stays: bool) -> None:
    assert mask.translation_invariant is stays


def test_padding_joins_the_mask_with_the_lengths_of_queries_and_keys() -> None:
    x, memory = torch.zeros(2, 3, 1), torch.zeros(2, 4, 1)
    both = Padding.of_call(x, memory, (2, 3), (4, 1), in_one_row=False, intercepted=False)
    assert masks.picture(both.hide_in_mask(masks.Full()), queries=3, keys=4) == (
        "■ ■ ■ ■   ■ · · ·\n■ ■ ■ ■   ■ · · ·\n· · · ·   ■ · · ·"
    )
    together = Padding.of_call(x, x, (2, 3), None, in_one_row=True, intercepted=False)
    picture = masks.picture(together.hide_in_mask(masks.Causal()))
    assert picture == ("■ · · · ·\n■ ■ · · ·\n· · ■ · ·\n· · ■ ■ ·\n· · ■ ■ ■")


@pytest.mark.parametrize(
    ("error", "lengths", "sentence"),
    [
        (ArgumentError, (1.5, 2), "lengths is (1.5, 2). Give integers, one per sample."),
        (ArgumentError, (2, 9), "lengths holds 9, and the batch is padded to 5 tokens. Give lengths from 0 to 5."),
        (
            ShapeError,
            (2, 3, 4),
            "lengths has shape (3,), and the batch has 2 samples. Give one length per sample: shape (2,).",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused_in_words(
    error: type[Exception], lengths: tuple[float, ...], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        Packing.of(lengths, batch=2, length=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_first_token_of_every_sample_stands_at_0_whatever_its_padding(side: Literal["right", "left"]) -> None:
    packing = Packing.of((2, 0, 3), batch=3, length=3, side=side)
    assert packing.positions.tolist() == [[0, 1, 0, 1, 2]]


def test_all_layers_share_the_padding_of_equal_lengths() -> None:
    x = torch.zeros(2, 3, 1)
    first = Padding.of_call(x, x, (2, 3), None, in_one_row=True, intercepted=False)
    assert Padding.of_call(x, x, [2, 3], None, in_one_row=True, intercepted=False) is first
    assert Padding.of_call(x, x, (3, 3), None, in_one_row=True, intercepted=False) is not first
    assert Padding.of_call(x, x, (2, 3), None, in_one_row=True, intercepted=False, side="left") is not first
    with pytest.raises(ArgumentError) as refusal:
        Padding.of_call(x, x, (2, True), None, in_one_row=True, intercepted=False)
    assert str(refusal.value) == "lengths is (2, True). Give integers, one per sample."


def test_all_layers_share_the_padding_of_a_tensor_of_lengths_until_it_changes() -> None:
    x, lengths = torch.zeros(2, 3, 1), torch.tensor([2, 3], dtype=torch.int32)
    first = Padding.of_call(x, x, lengths, None, in_one_row=True, intercepted=False)
    assert Padding.of_call(x, x, lengths, None, in_one_row=True, intercepted=False) is first
    lengths[1] = 1
    assert first.documents == masks.Documents((2, 3))
    changed = Padding.of_call(x, x, lengths, None, in_one_row=True, intercepted=False)
    assert changed.documents == masks.Documents((2, 1))
    for wrong in (torch.tensor([2.0, 3.0]), torch.tensor([True, True])):
        with pytest.raises(ArgumentError, match="Give integers, one per sample"):
            Padding.of_call(x, x, wrong, None, in_one_row=True, intercepted=False)
    with pytest.raises(ShapeError, match=r"Give one length per sample: shape \(2,\)"):
        Padding.of_call(x, x, torch.tensor([[2, 3]]), None, in_one_row=True, intercepted=False)


def test_a_padding_found_in_inference_mode_serves_training() -> None:
    x = torch.randn(2, 7, 2, requires_grad=True)
    with torch.inference_mode():
        Padding.of_call(x, x, (7, 3), None, in_one_row=True, intercepted=False)
    padding = Padding.of_call(x, x, (7, 3), None, in_one_row=True, intercepted=False)
    padding.restore_padding(padding.drop_padding(x, x, x)[0]).sum().backward()
    assert x.grad is not None
    assert x.grad[1, :, 0].tolist() == [1, 1, 1, 0, 0, 0, 0]


class SecondOfTwo:
    """A sequence whose second half is held here."""

    rank_and_world_size = (1, 2)

    def positions_of_rank(self, tokens: int, device: torch.device) -> torch.Tensor:
        return torch.arange(tokens, 2 * tokens, device=device)[None]


def test_the_padding_of_a_rank_is_computed_as_zeros_and_hidden_on_all_ranks() -> None:
    x = torch.ones(2, 3, 1)
    x[1, 1:] = torch.nan
    padding = Padding.of_split_sequence(SecondOfTwo(), x, (6, 4), "right")  # type: ignore[arg-type]
    tokens, memory, values = padding.drop_padding(x, x, x)
    assert tokens is memory is values
    assert tokens[..., 0].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert padding.drop_padding(x, x, 2 * x)[2][..., 0].tolist() == [[2, 2, 2], [2, 0, 0]]
    assert torch.equal(padding.restore_padding(tokens + 1), 2 * tokens)
    seen = padding.hide_in_mask(masks.Causal()).tile(TilePositions.from_sizes(6, 6))
    expected = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    expected[1, 4:] = False
    assert torch.equal(seen[:, 0], expected)
