"""A mask or a bias that is written down means the same when it is read, and what is none is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from multihead import masks
from multihead.errors import InputError
from multihead.masks.base import UnknownMask
from multihead.record.serialization import TensorStore, bias_as_json, mask_as_json, read_bias, read_mask
from multihead.scores.bias import RelativeBias


def test_a_mask_is_read_as_it_was_written() -> None:
    tensors = TensorStore()
    mask = masks.Causal() & (masks.Window(3, after=1) | masks.Keep(torch.rand(4, 4) < 0.5, "queries keys"))
    said = json.loads(json.dumps(mask_as_json(mask, tensors, "mask")))
    assert read_mask(said, tensors.by_name) == mask  # tensors are compared by identity
    assert list(tensors.by_name) == ["mask.1.1"]


@pytest.mark.parametrize(
    "mask", [masks.Lengths((3, 2)), masks.Lengths(((1, 2), (2, 3))), masks.Prefix(2), masks.Full()]
)
def test_a_mask_of_numbers_needs_no_tensor(mask: masks.Mask) -> None:
    tensors = TensorStore()
    assert read_mask(json.loads(json.dumps(mask_as_json(mask, tensors, "mask"))), {}) == mask
    assert not tensors.by_name


def test_a_tensor_that_is_shared_is_written_once() -> None:
    tensors, shared = TensorStore(), torch.rand(3, 3)
    assert [tensors.add_tensor(name, shared[:]) for name in "ab"] == ["a", "a"]
    assert tensors.add_tensor("c", shared[:2]) == "c"
    assert list(tensors.by_name) == ["a", "c"]


@pytest.mark.parametrize("kind", [torch.Tensor, RelativeBias])
def test_a_bias_is_read_as_it_was_written(kind: Any) -> None:
    tensors, values = TensorStore(), torch.randn(1, 2, 5)
    bias = RelativeBias(values) if kind is RelativeBias else values[None]
    found = read_bias(bias_as_json(bias, tensors, "bias"), tensors.by_name)
    assert type(found) is kind
    assert read_bias(bias_as_json(None, tensors, "none"), {}) is None


@pytest.mark.parametrize(
    ("said", "finding"),
    [
        ({"kind": 3}, "3 is not the name of a mask."),
        ({"kind": "And", "parts": []}, "it combines no masks."),
        ({"kind": "Window", "size": 1 << 64, "after": 0}, f"{1 << 64} is not a number of tokens."),
        ({"kind": "Prefix", "length": True}, "Prefix length is True. Give an integer of at least 0."),
        (
            {"kind": "Window", "size": 0, "after": 0},
            "Window size is 0. Give an integer of at least 1.",
        ),
    ],
)
def test_what_is_no_mask_is_refused(said: Any, finding: str) -> None:
    with pytest.raises(InputError) as caught:
        read_mask(said, {})
    assert str(caught.value) == f"A mask of the file cannot be read: {finding} Save the record again."


def test_a_mask_whose_class_is_not_defined_here_keeps_its_name() -> None:
    found = read_mask({"kind": "And", "parts": [{"kind": "Causal"}, {"kind": "Lambda", "n": 3}]}, {})
    assert found == masks.Causal() & UnknownMask("Lambda")


@pytest.mark.parametrize("said", [{"kind": "Other", "tensor": "a"}, {"kind": "Tensor", "tensor": "a"}])
def test_what_is_no_bias_is_refused(said: Any) -> None:
    with pytest.raises(InputError) as caught:
        read_bias(said, {"a": torch.zeros(1, dtype=torch.int64)})
    assert str(caught.value) == "A bias of the file cannot be read. Save the record again."


def test_a_relative_bias_of_an_earlier_version_is_read() -> None:
    found = read_bias({"kind": "Relative", "tensor": "a"}, {"a": torch.zeros(1, 1, 9)})
    assert isinstance(found, RelativeBias)
