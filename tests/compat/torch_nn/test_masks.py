"""Conversion of the original's masks: those that hide become mask values, those that add become a bias."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from multihead.compat.torch_nn.masks import Sizes, visible
from multihead.errors import DtypeError, MaskError, MultiheadError
from multihead.masks import Causal, Drop, Full, Lengths
from multihead.masks.place import Place

SIZES = Sizes(batch=2, heads=3, queries=4, keys=5, extra=0)
CAUSAL = torch.ones(4, 5, dtype=torch.bool).triu(1)
PAST_END = torch.arange(5) >= torch.tensor([[5], [2]])


def as_float(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


@pytest.mark.parametrize("form", [torch.Tensor.bool, as_float])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_causal_tensor_is_causal_with_the_hint_and_without(form: object, *, is_causal: bool) -> None:
    shown = visible(form(CAUSAL), None, SIZES, is_causal=is_causal)  # type: ignore[operator]
    assert (shown.mask, shown.bias, shown.query_start) == (Causal(), None, 0)


def test_is_causal_without_a_mask_is_the_causal_mask() -> None:
    assert visible(None, None, SIZES, is_causal=True).mask == Causal()


def test_a_wrong_hint_is_ignored_where_the_mask_can_be_read() -> None:
    hidden = CAUSAL.clone()
    hidden[1, 0] = True
    mask = visible(hidden, None, SIZES, is_causal=True).mask
    assert isinstance(mask, Drop)
    assert torch.equal(mask.tensor, hidden)


@pytest.mark.parametrize("form", [torch.Tensor.bool, as_float])
def test_padding_after_the_tokens_is_lengths(form: object) -> None:
    mask = visible(None, form(PAST_END), SIZES, is_causal=False).mask  # type: ignore[operator]
    assert isinstance(mask, Lengths)
    assert isinstance(mask.lengths, Tensor)
    assert mask.lengths.tolist() == [5, 2]


def test_no_padding_is_no_mask() -> None:
    assert visible(None, torch.zeros(2, 5, dtype=torch.bool), SIZES, is_causal=False).mask == Full()


def test_scattered_padding_is_dropped_key_by_key() -> None:
    hidden = PAST_END.flip(1)
    mask = visible(None, hidden, SIZES, is_causal=False).mask
    assert isinstance(mask, Drop)
    assert mask.axes == "batch keys"


def test_floats_that_do_more_than_hide_are_added_and_those_of_both_masks_together() -> None:
    of_query, of_key = torch.randn(6, 4, 5), torch.randn(2, 5)
    shown = visible(of_query, of_key, SIZES, is_causal=False)
    assert shown.mask == Full()
    assert shown.bias is not None
    torch.testing.assert_close(shown.bias, of_query.view(2, 3, 4, 5) + of_key[:, None, None])


def test_a_float_mask_that_requires_a_gradient_stays_a_bias() -> None:
    added = as_float(CAUSAL).requires_grad_()
    shown = visible(added, None, SIZES, is_causal=False)
    assert shown.mask == Full()
    assert shown.bias is not None
    assert shown.bias.requires_grad


@pytest.mark.parametrize("extra", [0, 1, 2])
def test_added_keys_come_first_and_every_query_sees_them(extra: int) -> None:
    sizes = Sizes(2, 3, 4, 5, extra)
    per_head = torch.rand(6, 4, 5) < 0.5
    for attn_mask, hidden in ((CAUSAL, CAUSAL[None, None]), (per_head, per_head.view(2, 3, 4, 5))):
        for padding in (PAST_END, PAST_END.flip(1)):
            shown = visible(attn_mask, padding, sizes, is_causal=False)
            shown = shown.mask.tile(Place.of(4, 5 + extra, query_start=shown.query_start)).expand(2, 3, -1, -1)
            assert shown[..., :extra].all()
            assert torch.equal(shown[..., extra:], ~(hidden | padding[:, None, None]).expand(2, 3, -1, -1))
    added = visible(torch.randn(4, 5), None, sizes, is_causal=False).bias
    assert added is not None
    assert (added[..., :extra] == 0).all()


@pytest.mark.parametrize(
    ("attn_mask", "padding", "error", "sentence"),
    [
        (
            torch.ones(4, 5, dtype=torch.int64),
            None,
            DtypeError,
            (
                "attn_mask has dtype torch.int64. Give a boolean tensor, True = hidden (attn_mask.bool() if 1 hides), "
                "or floats to add to the scores."
            ),
        ),
        (
            torch.ones(5, 4),
            None,
            MaskError,
            "attn_mask has shape (5, 4). Give (queries, keys) = (4, 5) or (batch * heads, ...) = (6, 4, 5).",
        ),
        (
            None,
            torch.ones(5, 2, dtype=torch.bool),
            MaskError,
            "key_padding_mask has shape (5, 2). Give (batch, keys) = (2, 5).",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(
    attn_mask: Tensor | None, padding: Tensor | None, error: type[MultiheadError], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(sentence)}$"):
        visible(attn_mask, padding, SIZES, is_causal=False)
