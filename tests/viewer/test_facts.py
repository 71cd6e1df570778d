"""The sentences and facts at the top of a page: every one is read off the record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.record.layer import layer_profiles
from multihead.viewer.facts import facts_of_record, readable_size
from tests.dense_record import DenseRecord, random_weights, record_of


def facts_of(record: Any, *others: int) -> dict[str, str]:
    return dict(facts_of_record(record, layer_profiles(record.layers), [30, *others], sample=0, lang="en"))


def masked(seen: Tensor) -> DenseRecord:
    return record_of(random_weights(2, 30, 30, seen=seen), seen=seen)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (torch.ones(30, 30, dtype=torch.bool), "full, both ways"),
        (torch.ones(30, 30, dtype=torch.bool).tril(), "causal"),
        (torch.ones(30, 30, dtype=torch.bool).tril().triu(-4), "causal, 4 tokens back"),
        (torch.ones(30, 30, dtype=torch.bool).tril(2).triu(-4), "window, 4 back and 2 ahead"),
        (torch.rand(30, 30) > 0.5, "masked"),
    ],
    ids=["full", "causal", "causal window", "window", "other"],
)
def test_the_attention_is_read_off_the_mask(seen: Tensor, expected: str) -> None:
    assert facts_of(masked(seen))["Attention"] == expected


def test_layers_with_different_masks_are_counted() -> None:
    full = masked(torch.ones(30, 30, dtype=torch.bool))
    causal = masked(torch.ones(30, 30, dtype=torch.bool).tril())
    record = DenseRecord([*causal.layers, *full.layers, *causal.layers])
    assert facts_of(record)["Attention"] == "causal in 2 layers; full, both ways in 1 layer"


def test_layers_with_different_heads_are_counted_apart() -> None:
    found = facts_of(record_of(random_weights(2, 30, 30), random_weights(5, 30, 30)))
    assert (found["Layers"], found["Heads"]) == ("2", "7")
    assert facts_of(record_of(random_weights(2, 30, 30)))["Layers × heads"] == "1 × 2"


def test_cross_attention_is_called_so() -> None:
    found = facts_of(record_of(random_weights(2, 30, 50)), 50)
    assert found["Attention"] == "cross-attention"
    assert found["Key tokens"] == "50"


@pytest.mark.parametrize(("value", "text"), [(20_000_000, "20 MB"), (1_250_000, "1.2 MB"), (80_000, "80 kB")])
def test_sizes_are_short(value: int, text: str) -> None:
    assert readable_size(value, "en") == text
