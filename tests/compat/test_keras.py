"""The weights of Keras in our layer: against its formula in einsum, and against Keras itself where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from multihead import masks
from multihead.compat.keras import from_keras
from multihead.errors import ArgumentError, ShapeError
from tests.compat.originals import BOUNDS, dtypes

PARTS = ("query", "key", "value", "attention_output")


def some_weights(
    features: tuple[int, int, int], heads: tuple[int, int], dims: tuple[int, int], *, bias: bool, dtype: torch.dtype
) -> dict[str, np.ndarray[Any, Any]]:
    """Draw a Keras layer's arrays by name; heads are (query heads, key/value heads), dims (key_dim, value_dim)."""
    shapes = {
        "query": (features[0], heads[0], dims[0]),
        "key": (features[1], heads[1], dims[0]),
        "value": (features[2], heads[1], dims[1]),
        "attention_output": (heads[0], dims[1], 5),
    }
    found = {}
    for part, shape in shapes.items():
        found[f"{part}/kernel"] = torch.randn(shape, dtype=dtype).numpy()
        if bias:
            found[f"{part}/bias"] = torch.randn(shape[1:] if part != "attention_output" else (5,), dtype=dtype).numpy()
    return found


def rule(weights: dict[str, np.ndarray[Any, Any]], x: tuple[Tensor, Tensor, Tensor], shown: Tensor | None) -> Tensor:
    """Compute what Keras computes: one einsum per projection, hidden scores lowered by 1e9."""

    def projected(part: str, tensor: Tensor) -> Tensor:
        result = torch.einsum("bnf,fhd->bnhd", tensor, torch.from_numpy(weights[f"{part}/kernel"]))
        return result + torch.from_numpy(weights[f"{part}/bias"]) if f"{part}/bias" in weights else result

    query, key, value = (projected(part, tensor) for part, tensor in zip(PARTS[:3], x, strict=True))
    group = query.shape[2] // key.shape[2]
    key, value = key.repeat_interleave(group, 2), value.repeat_interleave(group, 2)
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(query.shape[-1])
    if shown is not None:
        scores = scores + (~shown[:, None]) * -1e9
    context = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)
    output = torch.einsum("bihd,hdo->bio", context, torch.from_numpy(weights["attention_output/kernel"]))
    bias = weights.get("attention_output/bias")
    return output if bias is None else output + torch.from_numpy(bias)


@given(
    batch=st.integers(1, 3),
    lengths=st.tuples(st.integers(1, 5), st.integers(1, 6)),
    features=st.tuples(*[st.integers(1, 5)] * 3),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 3), (4, 2), (3, 1)]),
    dims=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    bias=st.booleans(),
    masked=st.booleans(),
    dtype=dtypes,
)
@settings(max_examples=40)
def test_outputs_are_those_of_keras_formula(
    batch: int, lengths: tuple[int, int], features: tuple[int, int, int], heads: tuple[int, int], dims: tuple[int, int],
    bias: bool, masked: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    weights = some_weights(features, heads, dims, bias=bias, dtype=dtype)
    rows = (lengths[0], lengths[1], lengths[1])
    x = [torch.randn(batch, length, width, dtype=dtype) for length, width in zip(rows, features, strict=True)]
    shown = torch.rand(batch, *lengths) < 0.5
    shown[..., 0] = True
    layer = from_keras(weights)
    mask: masks.Mask = masks.Keep(shown, "batch queries keys") if masked else masks.Full()
    expected = rule(weights, (x[0], x[1], x[2]), shown if masked else None)
    torch.testing.assert_close(layer(*x, mask=mask), expected, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


def test_a_list_in_the_order_of_get_weights_and_paths_of_a_model_mean_the_same() -> None:
    weights = some_weights((4, 4, 4), (2, 2), (3, 3), bias=True, dtype=torch.float64)
    ordered = [weights[f"{part}/{kind}"] for part in PARTS for kind in ("kernel", "bias")]
    expected = from_keras(weights, dropout=0.1)
    assert expected.dropout == 0.1
    for given_weights in (
        ordered,
        {f"model/multi_head_attention/{name}:0": array for name, array in weights.items()},
        {name: torch.from_numpy(array) for name, array in weights.items()},
    ):
        torch.testing.assert_close(dict(from_keras(given_weights).state_dict()), dict(expected.state_dict()))
    ordered[0][:] = 0  # the weights are copies
    assert (expected.q_proj.weight != 0).all()


def test_a_query_that_sees_no_key_results_in_zero_where_keras_returns_the_mean_of_all_values() -> None:
    weights = some_weights((4, 4, 4), (2, 2), (3, 3), bias=False, dtype=torch.float64)
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    shown = torch.tensor([[[True, False, False], [False, False, False], [True, True, True]]])
    expected = rule(weights, (x, x, x), shown)
    actual = from_keras(weights)(x, mask=masks.Keep(shown, "batch queries keys"))
    assert (actual[0, 1] == 0).all()
    assert (expected[0, 1] != 0).all()
    torch.testing.assert_close(actual[0, ::2], expected[0, ::2], rtol=0, atol=1e-10)


def test_outputs_are_those_of_keras_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = importlib.import_module("keras").layers
        x, memory, values = torch.randn(2, 4, 6), torch.randn(2, 5, 7), torch.randn(2, 5, 8)
        shown = torch.rand(2, 4, 5) < 0.5
        shown[..., 0] = True
        theirs = layers.MultiHeadAttention(num_heads=3, key_dim=4, value_dim=5, bias_initializer="normal")
        expected = theirs(x, values, memory, attention_mask=shown)
        grouped = layers.GroupQueryAttention(4, 4, 2, use_bias=False)
        of_groups = grouped(x, x, use_causal_mask=True)
        named = {weight.path: weight.numpy() for weight in theirs.weights}
        ordered, of_grouped = theirs.get_weights(), grouped.get_weights()
    keep = masks.Keep(shown, "batch queries keys")
    for weights in (ordered, named):
        torch.testing.assert_close(from_keras(weights)(x, memory, values, mask=keep), expected.cpu(), rtol=0, atol=2e-5)
    actual = from_keras(of_grouped)(x, mask=masks.Causal(), query_start=0)
    torch.testing.assert_close(actual, of_groups.cpu(), rtol=0, atol=2e-5)


def test_other_weights_than_those_of_keras_are_rejected() -> None:
    weights = some_weights((4, 4, 4), (2, 2), (3, 3), bias=True, dtype=torch.float32)

    def refused(error: type[Exception], sentence: str) -> object:
        return pytest.raises(error, match=f"^{re.escape(sentence)}$")

    with refused(ArgumentError, "weights has 3 arrays. Give layer.get_weights(): 8 arrays, or 4 without biases."):
        from_keras(list(weights.values())[:3])
    names = ", ".join([f"{part}/kernel" for part in PARTS] + [f"{part}/bias" for part in PARTS])
    missing = {name: array for name, array in weights.items() if name != "key/bias"} | {"gate/kernel": np.zeros(1)}
    with refused(ArgumentError, f"Among the weights: key/bias missing; gate/kernel unknown. Give {names}."):
        from_keras(missing)
    with refused(ShapeError, "value/kernel has shape (4, 6). Give (features, kv_heads, value_dim)."):
        from_keras(weights | {"value/kernel": np.zeros((4, 6))})
    shapes = "query/kernel (4, 2, 3), key/kernel (4, 2, 7), value/kernel (4, 2, 3), attention_output/kernel (2, 3, 5)"
    axes = (
        "query/kernel (features, heads, key_dim), key/kernel (features, kv_heads, key_dim), "
        "value/kernel (features, kv_heads, value_dim), attention_output/kernel (heads, value_dim, output_dim)"
    )
    with refused(ShapeError, f"The kernels do not fit each other: {shapes}. Give {axes}."):
        from_keras(weights | {"key/kernel": np.zeros((4, 2, 7), dtype=np.float32)})
    with refused(ShapeError, "key/bias has shape (5,). Give 6 numbers."):
        from_keras(weights | {"key/bias": np.zeros(5, dtype=np.float32)})


def test_what_is_no_collection_of_weights_is_rejected() -> None:
    with pytest.raises(
        ArgumentError, match=r"^weights is None, and must be weights of Keras\. Give layer\.get_weights"
    ):
        from_keras(None)  # type: ignore[arg-type]
