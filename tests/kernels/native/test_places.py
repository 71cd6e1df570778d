"""The search for the tokens of a padded batch, as an operator of graphs."""

from __future__ import annotations

import pytest
import torch

from multihead.kernels.native.operator import indices_of_tokens


@pytest.mark.parametrize(("left", "expected"), [(False, [0, 1, 3]), (True, [1, 2, 5])])
def test_tokens_are_found_on_either_side(*, left: bool, expected: list[int]) -> None:
    lengths = torch.tensor([2, 1])
    assert indices_of_tokens(lengths, 3, left).tolist() == expected
    assert torch.ops.multihead.places(lengths, 3, left).tolist() == expected


def test_it_passes_the_checks_of_torch() -> None:
    torch.library.opcheck(torch.ops.multihead.places, (torch.tensor([2, 1]), 3, False))


def test_its_schema_is_that_of_exported_programs() -> None:
    found = str(torch.ops.multihead.places.default._schema)
    assert found == "multihead::places(Tensor lengths, SymInt length, bool left) -> Tensor"
