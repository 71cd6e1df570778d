"""T5's bias against the code of transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from multihead.errors import ArgumentError
from multihead.functional import attention
from multihead.scores.t5 import T5Bias, buckets_of
from tests.kernel_names import needs_native

both_ways = pytest.mark.parametrize("both_ways", [True, False], ids=["both ways", "one way"])


def theirs(bias: T5Bias) -> Any:
    config = T5Config(
        d_model=16,
        d_kv=4,
        num_heads=bias.num_heads,
        relative_attention_num_buckets=bias.num_buckets,
        relative_attention_max_distance=bias.max_distance,
        is_decoder=not bias.both_ways,
    )
    attention = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    attention.relative_attention_bias.weight = bias.weight
    return attention


@both_ways
@pytest.mark.parametrize(("buckets", "longest"), [(32, 128), (8, 20), (4, 16), (6, 100), (320, 800)])
def test_buckets_are_those_of_t5(buckets: int, longest: int, both_ways: bool) -> None:
    distances = torch.arange(-3000, 3001)
    expected = T5Attention._relative_position_bucket(distances, both_ways, buckets, longest)
    found = buckets_of(distances, num_buckets=buckets, max_distance=longest, both_ways=both_ways)
    assert torch.equal(found, expected)
    assert found.min() == 0
    assert found.max() == buckets - 1


@both_ways
@pytest.mark.parametrize(
    ("queries", "keys", "start"), [(6, 6, 0), (3, 40, 0), (40, 3, 0), (1, 300, 299), (5, 200, 195)]
)
def test_the_bias_is_that_of_t5(queries: int, keys: int, start: int, both_ways: bool) -> None:
    bias = T5Bias(3, both_ways=both_ways)
    expected = theirs(bias).compute_bias(queries, keys, past_seen_tokens=start)
    found = bias(queries, keys, query_start=start)
    assert torch.equal(found.tile(queries, keys), expected)


@both_ways
def test_each_sample_has_its_own_start(both_ways: bool) -> None:
    bias = T5Bias(3, both_ways=both_ways)
    found = bias(4, 50, query_start=torch.tensor([0, 46]))
    for sample, start in enumerate((0, 46)):
        expected = theirs(bias).compute_bias(4, 50, past_seen_tokens=start)
        assert torch.equal(found.tile(4, 50)[sample : sample + 1], expected)


@both_ways
@pytest.mark.parametrize("kernel", [pytest.param("native", marks=needs_native), "reference", None], ids=str)
def test_gradients_reach_the_weight(both_ways: bool, kernel: str | None) -> None:
    dtype, bound = (torch.float32, 1e-4) if kernel == "native" else (torch.float64, 1e-11)
    bias = T5Bias(3, num_buckets=8, max_distance=20, both_ways=both_ways, dtype=dtype)
    q, k, v = torch.randn(3, 2, 3, 30, 4, dtype=dtype).unbind()
    expected = gradient(bias, theirs(bias).compute_bias(30, 30), q, k, v, "reference")
    found = gradient(bias, bias(30, 30), q, k, v, kernel)
    torch.testing.assert_close(found, expected, rtol=bound, atol=bound)
    assert bool((expected != 0).any())


def gradient(bias: T5Bias, added: Any, q: Tensor, k: Tensor, v: Tensor, kernel: str | None) -> Tensor:
    """Of the sum of squares of an attention, with respect to the weight."""
    output = attention(q, k, v, bias=added, kernel=kernel)
    return torch.autograd.grad(output.pow(2).sum(), bias.weight)[0]


def test_the_bias_has_the_requested_dtype_and_device() -> None:
    bias = T5Bias(4)
    assert bias(3, 3).values.dtype == torch.float32
    assert bias(3, 3, dtype=torch.bfloat16).values.dtype == torch.bfloat16
    assert T5Bias(4, device="meta")(3, 3).values.device.type == "meta"


def test_it_is_made_without_memory_and_drawn_later() -> None:
    bias = T5Bias(4, device="meta").to_empty(device="cpu")
    nn.init.zeros_(bias.weight)
    bias.reset_parameters()
    assert 0.01 < bias.weight.std().item() < 0.03
    assert list(bias.state_dict()) == ["weight"]
    assert bias.weight.shape == (32, 4)
    assert str(bias) == "T5Bias(num_heads=4, num_buckets=32, max_distance=128, both_ways=True)"


def test_it_compiles_once_for_all_lengths() -> None:
    bias = T5Bias(4)

    def values(queries: int, keys: int, start: Tensor) -> Tensor:
        return bias(queries, keys, query_start=start).values

    torch._dynamo.reset()
    compiled = torch.compile(values, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(4, 5, torch.tensor([1, 2]))
    with torch.compiler.set_stance("fail_on_recompile"):
        for queries, keys in ((3, 9), (8, 7)):
            start = torch.tensor([4, 0])
            assert torch.equal(compiled(queries, keys, start), values(queries, keys, start))


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (lambda: T5Bias(0), "num_heads is 0. Give an integer of at least 1."),
        (lambda: T5Bias(2, num_buckets=2), "num_buckets is 2. Give an integer of at least 4."),
        (
            lambda: T5Bias(2, num_buckets=9),
            (
                "num_buckets is 9, and half of the buckets are for keys after the query. "
                "Give an even number, or both_ways=False."
            ),
        ),
        (lambda: T5Bias(2, max_distance=8), "max_distance is 8. Give an integer of at least 9."),
        (lambda: T5Bias(2, max_distance=16, both_ways=False), "max_distance is 16. Give an integer of at least 17."),
    ],
)
def test_arguments_out_of_range_are_rejected(made: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape(sentence)}$"):
        made()
