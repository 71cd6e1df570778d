"""A lazy mask keeps its value while a model passes it on, and becomes a tensor where it is computed with."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from multihead import masks
from multihead.errors import ModelError
from multihead.models.lazy_mask import BooleanMask, LazyMask
from multihead.models.mask_functions import MaskExtent

PADDING = torch.tensor([[True] * 5, [True, True, True, False, False]])


def carried(mask: masks.Mask | None = None) -> LazyMask:
    meant = masks.Causal() & masks.Keep(PADDING, "batch keys") if mask is None else mask
    return LazyMask(meant, MaskExtent(2, 4, 5, 1, 0, torch.device("cpu")), PADDING)


def test_it_looks_like_the_boolean_mask_a_model_expects() -> None:
    mask = carried()
    assert (mask.shape, mask.dtype, mask.device.type, mask.dim()) == ((2, 1, 4, 5), torch.bool, "cpu", 4)


def test_it_says_what_it_means() -> None:
    assert repr(carried()) == (
        "LazyMask((2, 1, 4, 5), Causal() & Keep(<bool tensor (2, 5)>, 'batch keys'), query_start=1)"
    )


@pytest.mark.parametrize("keys", [5, 3])
def test_cutting_keys_off_its_end_keeps_the_meaning(keys: int) -> None:
    cut = carried()[:, :, :, :keys]
    assert isinstance(cut, LazyMask)
    assert cut.shape == (2, 1, 4, keys)
    assert torch.equal(cut.as_bool_tensor(), carried().as_bool_tensor()[..., :keys])
    assert cut.padding is not None
    assert cut.padding.shape == (2, keys)


def test_a_mask_that_counts_on_all_keys_means_the_same_with_fewer() -> None:
    mask = carried(masks.Causal() & masks.Documents((2, 3)))
    cut = mask[..., :4]
    assert isinstance(cut, LazyMask)
    assert torch.equal(cut.as_bool_tensor(), mask.as_bool_tensor()[..., :4])


PLAIN = torch.ones(2, 1, 4, 1, dtype=torch.bool)
QUERY, KEY = torch.arange(32.0).view(2, 1, 4, 4).sin(), torch.arange(40.0).view(2, 1, 5, 4).cos()


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: ~mask,
        lambda mask: mask & PLAIN,
        lambda mask: mask | PLAIN,
        lambda mask: mask[:, :, 1:],
        lambda mask: mask[..., -2:],
        lambda mask: mask[:, :, :, ::2],
        lambda mask: mask[1],
        lambda mask: mask[:, :, torch.tensor([0, 2])],
        lambda mask: torch.cat([mask, PLAIN], -1),
        lambda mask: mask.expand(2, 3, 4, 5),
        lambda mask: mask.to(torch.bool),
        lambda mask: mask.clone(),
        lambda mask: mask.split(3, -1)[0],
        lambda mask: (~mask).detach(),
        lambda mask: mask.expand(2, 3, 4, 5)[:, 1:].transpose(0, 1),
        lambda mask: mask.masked_fill(PLAIN, value=True),
        lambda mask: nn.functional.pad(mask, (1, 0), value=True),
        lambda mask: torch.minimum(mask, PLAIN),
        torch.tril,
    ],
)
def test_what_is_made_of_it_by_shape_and_logic_is_a_mask_too(operation: Any) -> None:
    found, expected = operation(carried()), operation(carried().as_bool_tensor())
    assert isinstance(found, BooleanMask)
    assert torch.equal(found.as_bool_tensor(), expected)
    with pytest.raises(ModelError, match="The model computes add of its attention mask"):
        torch.zeros(expected.shape) + found


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: torch.zeros(2, 1, 4, 5).masked_fill(mask, 1),
        lambda mask: torch.zeros(2, 1, 4, 5).masked_fill_(~mask, 1),
        lambda mask: torch.arange(40.0).view(2, 1, 4, 5)[mask],
        lambda mask: nn.functional.scaled_dot_product_attention(QUERY, KEY, KEY, attn_mask=mask),
        lambda mask: mask.all(),
        lambda mask: torch.zeros_like(mask, dtype=torch.float32),
        lambda mask: torch.ones_like(mask, dtype=torch.bool),
        lambda mask: mask == True,  # noqa: E712
        lambda mask: mask != PLAIN,
        lambda mask: mask == mask.clone(),
    ],
)
def test_it_may_choose_between_numbers(operation: Any) -> None:
    found = operation(carried())
    assert not isinstance(found, BooleanMask)
    assert torch.equal(found, operation(carried().as_bool_tensor()))


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("add", lambda mask: torch.zeros(2, 1, 4, 5) + mask),
        ("add", lambda mask: mask + torch.zeros(2, 1, 4, 5)),
        ("add", lambda mask: mask + PLAIN),
        ("add_", lambda mask: torch.zeros(2, 1, 4, 5).add_(mask)),
        ("sub", lambda mask: torch.zeros(2, 1, 4, 5) - mask),
        ("rsub", lambda mask: 1.0 - mask),
        ("mul", lambda mask: torch.ones(2, 1, 4, 5) * mask),
        ("_to_copy", lambda mask: mask.float()),
        ("_to_copy", lambda mask: mask.to(torch.float64)),
        ("_to_copy", lambda mask: (~mask).long()),
        ("sum", lambda mask: mask.sum(-1)),
        ("lt", lambda mask: mask < -1),
        ("lt", lambda mask: mask[1] < -1e30),
        ("gt", lambda mask: torch.gt(torch.zeros(2, 1, 4, 5), mask)),
        ("eq", lambda mask: mask == 0),
        ("ne", lambda mask: mask.ne(0.0)),
        ("le", lambda mask: (~mask).le(0)),
        ("ge", lambda mask: torch.ge(mask, torch.tensor(0.0))),
        ("eq", lambda mask: torch.zeros(2, 1, 4, 5) == mask),
        ("eq", lambda mask: mask == torch.zeros(2, 1, 4, 5, dtype=torch.int64)),
        ("eq_", lambda mask: mask.clone().eq_(0)),
        ("ne", lambda mask: mask != mask),
        ("isfinite", torch.isfinite),
        ("isinf", torch.isinf),
        ("isnan", torch.isnan),
        ("isneginf", torch.isneginf),
        ("isposinf", torch.isposinf),
        ("signbit", torch.signbit),
        ("sign", torch.sign),
        ("amax", lambda mask: mask.amax(-1)),
        ("amin", lambda mask: mask.amin()),
        ("max", lambda mask: mask.max(-1).values),
        ("min", lambda mask: mask.min()),
        ("item", lambda mask: mask[0, 0, 0, 0].item()),
        ("ge", lambda mask: torch.ge(mask, torch.tensor(-1.0), out=torch.empty(2, 1, 4, 5, dtype=torch.bool))),
        ("equal", lambda mask: torch.equal(mask, torch.zeros(2, 1, 4, 5))),
        ("abs", torch.abs),
        ("nan_to_num", torch.nan_to_num),
        ("logical_or", lambda mask: mask.logical_or(torch.zeros(4, 5))),
        ("masked_fill", lambda mask: mask.masked_fill(PLAIN, -1e9)),
        ("fill_", lambda mask: mask.clone().fill_(-torch.inf)),
        ("copy_", lambda mask: mask.copy_(torch.zeros(4, 5))),
        ("setitem", lambda mask: mask.__setitem__((..., 0), 0.0)),
        ("constant_pad_nd", lambda mask: nn.functional.pad(mask, (1, 0))),
        ("full_like", lambda mask: torch.full_like(mask, -1e9)),
        ("zeros_like", torch.zeros_like),
        ("new_zeros", lambda mask: mask.new_zeros(4, 5)),
    ],
)
def test_it_is_never_read_or_changed_as_numbers(name: str, operation: Any) -> None:
    with pytest.raises(ModelError) as caught:
        operation(carried())
    assert str(caught.value) == (
        f"The model computes {name} of its attention mask, which is Boolean with this library's attention: True = "
        "visible, not a number added to the scores. Use mask.where(0.0, -inf), scores.masked_fill(~mask, -inf), or "
        "attn_implementation='eager'."
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.__setitem__((..., 0), PLAIN[..., 0]),
        lambda mask: mask.logical_and_(~PLAIN),
        lambda mask: mask.masked_fill_(PLAIN, value=True),
    ],
)
def test_a_change_in_place_reaches_every_layer_that_reads_it(change: Any) -> None:
    mask, expected = carried(), carried().as_bool_tensor().clone()
    change(mask)
    change(expected)
    assert isinstance(mask, LazyMask)
    assert torch.equal(mask.as_bool_tensor(), expected)


def test_among_scores_a_mask_that_hides_nothing_is_0() -> None:
    scores = torch.arange(40.0).view(2, 1, 4, 5)
    assert torch.equal(scores + carried(masks.Full()), scores)
    assert torch.equal(carried(masks.Full()) + scores, scores)
    with pytest.raises(ModelError, match="computes add"):
        carried(masks.Full()) + PLAIN


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        lambda mask: pickle.loads(pickle.dumps(mask)),
        lambda mask: pytree.tree_map(copy.deepcopy, {"mask": [mask]})["mask"][0],
        lambda mask: copy.deepcopy({"kwargs": (mask,)})["kwargs"][0],
    ],
)
def test_a_copy_for_later_is_a_plain_boolean_tensor(copied: Any) -> None:
    for mask in (carried(), ~carried()):
        assert isinstance(mask, BooleanMask)
        found = copied(mask)
        assert type(found) is torch.Tensor
        assert torch.equal(found, mask.as_bool_tensor())


def test_detaching_it_keeps_the_meaning() -> None:
    assert isinstance(carried().detach(), LazyMask)
