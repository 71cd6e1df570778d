"""A lazy mask keeps its value while a model passes it on, and becomes a tensor where it is computed with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from multihead import masks
from multihead.hooks.lazy_mask import LazyMask

PADDING = torch.tensor([[True] * 5, [True, True, True, False, False]])


def carried(mask: masks.Mask | None = None) -> LazyMask:
    meant = masks.Causal() & masks.Keep(PADDING, "batch keys") if mask is None else mask
    return LazyMask((2, 1, 4, 5), meant, query_start=1, key_offset=0, padding=PADDING, device=torch.device("cpu"))


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
    assert torch.equal(cut.dense(), carried().dense()[..., :keys])
    assert cut.padding is not None
    assert cut.padding.shape == (2, keys)


def test_a_mask_that_counts_on_all_keys_means_the_same_with_fewer() -> None:
    mask = carried(masks.Causal() & masks.Documents((2, 3)))
    assert torch.equal(mask[..., :4].dense(), mask.dense()[..., :4])


@pytest.mark.parametrize(
    "operation",
    [
        lambda mask: mask.float() + 1,
        lambda mask: ~mask,
        lambda mask: mask[:, :, 1:],
        lambda mask: mask[..., -2:],
        lambda mask: mask[:, :, :, ::2],
        lambda mask: mask[1],
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: torch.cat([mask, torch.ones(2, 1, 4, 1, dtype=torch.bool)], -1),
        lambda mask: mask.expand(2, 3, 4, 5),
        lambda mask: mask.to(torch.float64),
        lambda mask: torch.zeros(2, 1, 4, 5).masked_fill(mask, 1),
        lambda mask: mask.clone(),
        lambda mask: mask.all(),
    ],
)
def test_any_other_operation_is_made_on_what_it_means(operation: object) -> None:
    assert callable(operation)
    found: Tensor = operation(carried())
    assert not isinstance(found, LazyMask)
    assert torch.equal(found, operation(carried().dense()))


def test_detaching_it_keeps_the_meaning() -> None:
    assert isinstance(carried().detach(), LazyMask)
