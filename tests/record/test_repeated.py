"""What was measured on repeated random tokens is part of a layer's means, and of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import multihead as mh
from multihead.errors import InputError
from multihead.observation.record import Record
from multihead.record.repeated import RepeatedTokens
from tests.record.test_loading import changed

NAMES = ("repeated_induction", "repeated_first")


def measured(heads: int = 2, texts: int = 4) -> RepeatedTokens:
    torch.manual_seed(0)
    shares = {name: torch.rand(texts, heads, dtype=torch.float64) for name in NAMES}
    return RepeatedTokens(64, 3, True, shares, {name: torch.full((heads,), 0.01).double() for name in NAMES}, "<s>")


def a_record(keep: Any = "cpu") -> Record:
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with mh.observe(layer, keep=keep) as seen:
        layer(torch.randn(1, 5, 8))
    seen.layers[0].repeated = measured()
    return seen


@pytest.mark.parametrize("keep", ["cpu", "statistics", "summary"])
def test_it_is_part_of_the_means_and_comes_back_from_a_file(keep: str, tmp_path: Path) -> None:
    seen = a_record(keep)
    expected = measured().means()
    assert seen.table().rows[1]["repeated_first"] == float(expected["repeated_first"][1])
    assert "repeated_first" not in seen.layers[0].summary("p95")
    seen.save(tmp_path / "run.safetensors")
    found = Record.load(tmp_path / "run.safetensors").layers[0].repeated
    assert found is not None
    assert (found.length, found.times, found.start, found.start_token) == (64, 3, True, "<s>")
    for name in NAMES:
        assert torch.equal(found.shares[name], measured().shares[name])
        assert torch.equal(found.chance[name], measured().chance[name])


def test_a_file_of_an_earlier_version_opens_without_the_name_of_the_start_token(tmp_path: Path) -> None:
    a_record().save(file := tmp_path / "whole.safetensors")
    old = changed(file, tmp_path, lambda data, tensors: data["layers"][0]["repeated"].pop("start_token"))
    found = Record.load(old).layers[0].repeated
    assert found is not None
    assert (found.start, found.start_token) == (True, "")


def test_a_file_without_it_still_opens(tmp_path: Path) -> None:
    a_record().save(file := tmp_path / "whole.safetensors")
    without = Record.load(changed(file, tmp_path, lambda data, tensors: data["layers"][0].pop("repeated")))
    assert without.layers[0].repeated is None
    assert "repeated_first" not in without.table().rows[0]


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda one, tensors: one.update(length=0), "the length of repeated tokens is 0"),
        (lambda one, tensors: one.update(times=1 << 29), "the times of repeated tokens is 536870912"),
        (lambda one, tensors: one.update(start=1), "start should be true or false, and is an integer"),
        (
            lambda one, tensors: one.update(shares=[]),
            "the shares of repeated tokens should be an object, and is a list",
        ),
        (
            lambda one, tensors: one["shares"].update(entropy="0.repeated_first.shares"),
            "there is an unknown statistic of repeated tokens",
        ),
        (
            lambda one, tensors: one["chance"].pop("repeated_first") and one["shares"].pop("repeated_induction"),
            "the statistics of repeated tokens are inconsistent",
        ),
        (
            lambda one, tensors: tensors.update({"0.repeated_first.shares": torch.zeros(3, 2).double()}),
            "the statistics of repeated tokens are inconsistent",
        ),
        (
            lambda one, tensors: tensors.update({f"0.{name}.shares": torch.zeros(0, 2).double() for name in NAMES}),
            "no text of repeated tokens was read",
        ),
        (
            lambda one, tensors: tensors.update({"0.repeated_first.shares": torch.zeros(4, 3).double()}),
            "repeated_first is a torch.float64 tensor of shape (4, 3)",
        ),
        (
            lambda one, tensors: tensors.update({"0.repeated_first.chance": torch.zeros(2)}),
            "repeated_first is a torch.float32 tensor of shape (2,)",
        ),
        (
            lambda one, tensors: tensors.update({"0.repeated_first.shares": torch.full((4, 2), 1.2).double()}),
            "repeated_first is not a share",
        ),
        (
            lambda one, tensors: tensors.update({"0.repeated_first.chance": torch.full((2,), -0.1).double()}),
            "repeated_first is not a share",
        ),
        (lambda one, tensors: one["shares"].update(repeated_first="nowhere"), "its contents are inconsistent"),
    ],
)
def test_what_does_not_hold_together_is_refused(change: Any, finding: str, tmp_path: Path) -> None:
    a_record().save(file := tmp_path / "whole.safetensors")
    damaged = changed(file, tmp_path, lambda data, tensors: change(data["layers"][0]["repeated"], tensors))
    with pytest.raises(InputError) as caught:
        Record.load(damaged)
    assert str(caught.value) == f"{str(damaged)!r} is damaged: {finding}. Save the record again."
