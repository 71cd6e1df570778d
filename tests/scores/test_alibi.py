"""ALiBi against its formula, its authors' slopes and Bloom's bias."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from multihead import masks
from multihead.errors import ArgumentError
from multihead.functional import attention
from multihead.scores.alibi import ALiBi, slopes_of


def slopes_of_the_paper(n: int) -> list[float]:
    """The recursion of the authors' code."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return slopes_of_the_paper(closest) + slopes_of_the_paper(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [*range(1, 34), 40, 71, 112])
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    assert slopes_of(heads) == pytest.approx(slopes_of_the_paper(heads), rel=1e-12)
    assert len(slopes_of(heads)) == heads


@pytest.mark.parametrize("start", [0, 6, torch.tensor([3, 0])], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 7), (5, 1), (0, 3)])
def test_a_key_counts_less_by_the_slope_times_its_distance(queries: int, keys: int, start: int | Tensor) -> None:
    bias = ALiBi(6)(queries, keys, query_start=start, dtype=torch.float64)
    starts = start.tolist() if isinstance(start, Tensor) else [start]
    assert bias.values.shape == (len(starts), 6, queries + keys - 1)
    expected = [
        [[[-abs(j - i - at) * slope for j in range(keys)] for i in range(queries)] for slope in slopes_of(6)]
        for at in starts
    ]
    exact = torch.tensor(expected, dtype=torch.float64).reshape(len(starts), 6, queries, keys)
    torch.testing.assert_close(bias.tile(queries, keys), exact, rtol=1e-7, atol=0)


def test_under_a_causal_mask_weights_are_those_of_bloom() -> None:
    """Bloom adds slope * key, which differs from ours by a constant per row, to which the softmax is invariant."""
    q, k, v = torch.randn(3, 1, 5, 7, 8).unbind()
    theirs = build_alibi_tensor(torch.ones(1, 7), 5, torch.float32).view(1, 5, 1, 7)
    expected = attention(q, k, v, mask=masks.Causal(), bias=theirs)
    found = attention(q, k, v, mask=masks.Causal(), bias=ALiBi(5)(7, 7))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_bias_has_the_requested_dtype_and_device() -> None:
    bias = ALiBi(4)
    assert bias(3, 3).values.dtype == torch.float32
    values = bias(3, 3, device="meta", dtype=torch.bfloat16).values
    assert (values.device.type, values.dtype) == ("meta", torch.bfloat16)


def test_a_module_of_half_precision_keeps_its_distances_exact() -> None:
    """600 and 601 are one number in bfloat16, and the slope of the first of 8 heads is a half."""
    for device in (None, "cpu"):
        values = ALiBi(8).bfloat16()(1, 602, device=device).values[0, 0]
        assert values[600] - values[601] == 0.5


def test_it_has_no_parameters_and_nothing_to_save() -> None:
    bias = ALiBi(4)
    assert not list(bias.parameters())
    assert not bias.state_dict()
    assert str(bias) == "ALiBi(num_heads=4)"
    assert torch.equal(copy.deepcopy(bias)(2, 2).values, bias(2, 2).values)


def test_it_is_made_without_memory_and_filled_later() -> None:
    bias = ALiBi(4, device="meta")
    assert bias(3, 3).values.device.type == "meta"
    bias.to_empty(device="cpu").reset_parameters()
    assert torch.equal(bias(3, 3).values, ALiBi(4)(3, 3).values)


def test_it_compiles_once_for_all_lengths() -> None:
    bias = ALiBi(4)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, start: bias(q, k, query_start=start).values, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    compiled(4, 5, torch.tensor([1, 2]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for queries, keys in ((3, 9), (8, 7)):
            start = torch.tensor([4, 0])
            assert torch.equal(compiled(queries, keys, start), bias(queries, keys, query_start=start).values)


def test_a_number_of_heads_that_is_none_is_refused() -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape('num_heads is 0. Give an integer of at least 1.')}$"):
        ALiBi(0)
