"""What is known beside q and k, refused where it does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from multihead.errors import ProbeError
from multihead.functional import statistics
from multihead.probes import ProbeContext, tokens_mass

Q = torch.zeros(1, 1, 2, 4)


def refusal_of(context: ProbeContext, *probes: Any, v: Tensor | None = None) -> str:
    with pytest.raises(ProbeError) as refusal:
        statistics(Q, Q, v=v, probes=probes, context=context)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (torch.ones(1, 3) > 0, "a torch.bool tensor of shape (1, 3)"),
        (torch.ones(2) > 0, "a torch.bool tensor of shape (2,)"),
        (torch.ones(1, 2), "a torch.float32 tensor of shape (1, 2)"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags: Tensor, said: str) -> None:
    mend = "Give booleans (batch, keys) = (1, 2)."
    assert refusal_of(ProbeContext(special_keys=flags), "special_mass") == f"special_keys is {said}. {mend}"
    assert refusal_of(ProbeContext(sets={"commas": flags}), tokens_mass("commas")) == f"commas is {said}. {mend}"


@pytest.mark.parametrize("ids", [torch.ones(1, 3).long(), torch.ones(1, 2), torch.ones(1, 2) > 0])
def test_ids_that_do_not_fit_are_refused(ids: Tensor) -> None:
    assert refusal_of(ProbeContext(ids=ids), "duplicate_mass") == (
        f"ids is a {ids.dtype} tensor of shape {tuple(ids.shape)}. Give integers (batch, keys) = (1, 2)."
    )


@pytest.mark.parametrize("weight", [torch.ones(3, 5), torch.ones(4), torch.ones(3, 4).long()])
def test_an_output_weight_that_does_not_fit_is_refused(weight: Tensor) -> None:
    assert refusal_of(ProbeContext(output_weight=weight), "contribution", v=Q) == (
        f"output_weight is a {weight.dtype} tensor of shape {tuple(weight.shape)}. Give floating point numbers "
        "(embed_dim, heads * value_dim), with 1 heads of 4: 4 columns."
    )


@pytest.mark.parametrize("map_size", [0, -3, 2.0, True])
def test_a_map_size_below_one_is_refused(map_size: Any) -> None:
    said = refusal_of(ProbeContext(map_size=map_size), "pooled_map")
    assert said == f"map_size is {map_size!r}. Give an integer of at least 1."


def test_a_pool_that_does_not_exist_is_refused() -> None:
    said = refusal_of(ProbeContext(map_pool="median"), "pooled_map")  # type: ignore[arg-type]
    assert said == 'map_pool is \'median\'. Give "mean" or "max".'
