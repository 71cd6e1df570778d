"""Position biases, against the code of their papers and plain loops."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

from multihead import masks
from multihead.errors import ArgumentError, ShapeError
from multihead.functional import attention
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias, alibi_slopes, distance_buckets
from tests.kernel_names import needs_native


def slopes_of_the_paper(n: int) -> list[float]:
    """The recursion of the authors' code."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]
    closest = 2 ** math.floor(math.log2(n))
    return slopes_of_the_paper(closest) + slopes_of_the_paper(2 * closest)[0::2][: n - closest]


@pytest.mark.parametrize("heads", [*range(1, 34), 40, 71, 112])
def test_slopes_are_those_of_the_paper(heads: int) -> None:
    assert alibi_slopes(heads) == pytest.approx(slopes_of_the_paper(heads), rel=1e-12)
    assert len(alibi_slopes(heads)) == heads


@pytest.mark.parametrize("start", [0, 6, torch.tensor([3, 0])], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (2, 7), (5, 1), (0, 3)])
def test_a_key_counts_less_by_the_slope_times_its_distance(queries: int, keys: int, start: int | Tensor) -> None:
    bias = ALiBi(6)(queries, keys, query_start=start, dtype=torch.float64)
    starts = start.tolist() if isinstance(start, Tensor) else [start]
    assert bias.values.shape == (len(starts), 6, queries + keys - 1)
    expected = [
        [[[-abs(j - i - at) * slope for j in range(keys)] for i in range(queries)] for slope in alibi_slopes(6)]
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


def test_alibi_has_the_requested_dtype_and_device() -> None:
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


def test_alibi_compiles_once_for_all_lengths() -> None:
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


def drawn(queries: int = 6, keys: int = 9) -> LearnedBias:
    bias = LearnedBias(2, queries, keys, dtype=torch.float64)
    nn.init.normal_(bias.weight)
    return bias


@pytest.mark.parametrize(
    ("queries", "keys", "start"), [(6, 9, 0), (2, 3, 0), (2, 9, 4), (1, 1, 5), (0, 3, 6), (2, 0, 1)]
)
def test_the_bias_of_a_call_is_cut_out_of_the_table(queries: int, keys: int, start: int) -> None:
    bias = drawn()
    found = bias(queries, keys, query_start=start)
    assert found.shape == (1, 2, queries, keys)
    assert torch.equal(found[0], bias.weight[:, start : start + queries, :keys])


def test_each_sample_uses_the_rows_of_its_own_positions() -> None:
    bias = drawn()
    found = bias(2, 7, query_start=torch.tensor([0, 4, 3]))
    assert found.shape == (3, 2, 2, 7)
    for sample, start in enumerate((0, 4, 3)):
        assert torch.equal(found[sample], bias.weight[:, start : start + 2, :7])


def test_padding_outside_the_table_uses_the_nearest_row() -> None:
    bias = drawn()
    found = bias(3, 9, query_start=torch.tensor([3, 5, -1]))
    assert torch.equal(found[1], bias.weight[:, [5, 5, 5]])
    assert torch.equal(found[2], bias.weight[:, [0, 0, 1]])


@pytest.mark.parametrize("start", [1, torch.tensor([1, 3])], ids=["one start", "two starts"])
def test_gradients_reach_the_table(start: int | Tensor) -> None:
    bias = drawn()
    q, k, v = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 8, 4), torch.randn(2, 2, 8, 4)

    def output(weight: Tensor) -> Tensor:
        found = torch.func.functional_call(bias, {"weight": weight}, (3, 8), {"query_start": start})
        return attention(q.double(), k.double(), v.double(), bias=found)

    assert torch.autograd.gradcheck(output, bias.weight)


def test_the_learned_bias_has_the_requested_dtype_and_device() -> None:
    assert drawn()(2, 2, dtype=torch.bfloat16).dtype == torch.bfloat16
    bias = LearnedBias(2, 6, 9, device="meta")
    assert bias(2, 2).device.type == "meta"
    assert bias(2, 2, query_start=torch.tensor([0, 1], device="meta")).shape == (2, 2, 2, 2)


def test_it_begins_as_no_bias_at_all() -> None:
    bias = LearnedBias(2, 6, 9, device="meta").to_empty(device="cpu")
    bias.reset_parameters()
    assert not bias.weight.any()
    assert list(bias.state_dict()) == ["weight"]
    assert str(bias) == "LearnedBias(num_heads=2, queries=6, keys=9)"


def test_it_compiles_once_for_all_starts() -> None:
    bias = drawn()

    def found(queries: int, start: Tensor) -> Tensor:
        return bias(queries, 9, query_start=start)

    torch._dynamo.reset()
    compiled = torch.compile(found, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(2, torch.tensor([1, 2]))
    with torch.compiler.set_stance("fail_on_recompile"):
        expected = bias.weight[:, torch.tensor([[4, 5, 5], [0, 1, 2]])].transpose(0, 1)
        assert torch.equal(compiled(3, torch.tensor([4, 0])), expected)


MEND = "Create it with larger sizes, or give fewer tokens."


@pytest.mark.parametrize(
    ("queries", "keys", "start", "reach"),
    [
        (7, 9, 0, "7 and 9"),
        (6, 10, 0, "6 and 10"),
        (1, 9, 6, "7 and 9"),
        (2, 9, torch.tensor([5, 5]), "7 and 9"),
        (1, 9, torch.tensor([0, 7]), "7 and 9"),
    ],
    ids=["queries", "keys", "start", "starts", "one start"],
)
def test_positions_outside_the_table_are_rejected(queries: int, keys: int, start: Any, reach: str) -> None:
    finding = f"The learned bias has 6 query positions and 9 key positions, and the call needs {reach}."
    with pytest.raises(ShapeError, match=f"^{re.escape(f'{finding} {MEND}')}$"):
        drawn()(queries, keys, query_start=start)


def test_a_size_out_of_range_is_rejected() -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape('keys is 0. Give an integer of at least 1.')}$"):
        LearnedBias(2, 6, 0)


def test_a_query_before_the_first_position_uses_the_first_row() -> None:
    """An int below 0 once cut rows from the end of the table."""
    bias = LearnedBias(1, 7, 7)
    nn.init.normal_(bias.weight)
    assert torch.equal(bias(3, 2, query_start=-1), bias(3, 2, query_start=torch.tensor([-1])))
    assert torch.equal(bias(3, 2, query_start=-1)[0, 0], bias.weight[0, [0, 0, 1], :2])


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
    found = distance_buckets(distances, num_buckets=buckets, max_distance=longest, both_ways=both_ways)
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


def test_t5_bias_has_the_requested_dtype_and_device() -> None:
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


def test_t5_bias_compiles_once_for_all_lengths() -> None:
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
