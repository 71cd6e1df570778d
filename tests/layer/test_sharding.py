"""Layers whose projections return fewer heads than the layer has. Heads split over processes: tests/ecosystem."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from multihead import KeyValueCache, MultiHeadAttention, QKNorm, Rotary, masks, scores
from multihead.errors import ArgumentError, MultiheadError, ShapeError

HOW_TO_SPLIT = (
    "parallelize_module with ColwiseParallel() for q_proj, k_proj and v_proj and RowwiseParallel() for out_proj"
)


def narrowed(kept: dict[str, int], **options: Any) -> MultiHeadAttention:
    """Make a layer of 6 heads of 4 columns, and keep the first columns of some of its projections."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(12, 6, head_dim=4, **options).double()
    for name, width in kept.items():
        whole = layer.get_submodule(name)
        assert isinstance(whole, nn.Linear)
        part = nn.Linear(whole.in_features, width, dtype=torch.float64)
        part.load_state_dict({"weight": whole.weight[:width], "bias": whole.bias[:width]})
        setattr(layer, name, part)
    if layer.out_proj is not None and "v_proj" in kept:
        heads = kept["q_proj"] // layer.head_dim
        narrow = nn.Linear(heads * layer.value_head_dim, 12, dtype=torch.float64)
        columns = layer.out_proj.weight[:, : narrow.in_features]
        narrow.load_state_dict({"weight": columns, "bias": layer.out_proj.bias})
        layer.out_proj = narrow
    return layer


@pytest.mark.parametrize("num_kv_heads", [6, 3])
def test_a_layer_whose_last_heads_were_pruned_computes_the_others(num_kv_heads: int) -> None:
    """Heads are split by their width: the gates of the whole layer set the same heads to 0."""
    kv = 16 * num_kv_heads // 6
    options = {"num_kv_heads": num_kv_heads, "rotary": Rotary(), "qk_norm": QKNorm(), "add_zero_attn": True}
    whole = narrowed({}, **options)
    pruned = narrowed({"q_proj": 16, "k_proj": kv, "v_proj": kv}, **options)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    gates = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0])
    expected = whole(x, mask=masks.Causal(), head_gates=gates)
    torch.testing.assert_close(pruned(x, mask=masks.Causal()), expected, rtol=1e-12, atol=1e-12)
    memory = torch.randn(2, 3, 12, dtype=torch.float64)
    cache = KeyValueCache()
    for step, first in zip(x.split([3, 2], 1), (0, 3), strict=True):
        found = pruned(step, memory, cache=cache, query_start=first)
        expected = whole(step, memory, head_gates=gates, query_start=first)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sinks", {"sinks": True}),
        ("head_gates", {"head_gates": True}),
        ("add_bias_kv", {"add_bias_kv": True}),
        ("position_bias", {"position_bias": scores.ALiBi(6)}),
        ("qk_norm", {"qk_norm": QKNorm("l2")}),
        ("qk_norm", {"qk_norm": QKNorm(over="all")}),
        ('merge="mean"', {"merge": "mean"}),
    ],
)
def test_parameters_of_single_heads_are_rejected_where_it_is_unknown_which_heads_are_left(
    name: str, options: dict[str, Any]
) -> None:
    layer = narrowed({"q_proj": 16, "k_proj": 16, "v_proj": 16}, output_projection=False, **options)
    with pytest.raises(ArgumentError) as refusal:
        layer(torch.randn(2, 5, 12, dtype=torch.float64))
    assert str(refusal.value) == (
        f"The projections return fewer heads than the layer's 6, and {name} needs to know which heads they are. "
        f"Split the layer over processes with {HOW_TO_SPLIT}, or construct a layer with fewer heads."
    )


@pytest.mark.parametrize(
    ("kept", "error", "message"),
    [
        (
            {"q_proj": 18},
            ShapeError,
            (
                "q_proj returns 18 columns, and the layer has 6 heads of 4. "
                "Give a multiple of 4, at most 24; for another head_dim, construct another layer."
            ),
        ),
        (
            {"k_proj": 48},
            ShapeError,
            (
                "k_proj returns 48 columns, and the layer has 6 heads of 4. "
                "Give a multiple of 4, at most 24; for another head_dim, construct another layer."
            ),
        ),
        (
            {"q_proj": 12},
            ArgumentError,
            (
                "q_proj returns heads 0 to 2 here and k_proj heads 0 to 5, which do not match. "
                f"Split the layer with {HOW_TO_SPLIT}; k_proj and v_proj may both stay whole."
            ),
        ),
        (
            {"q_proj": 12, "k_proj": 12, "v_proj": 4},
            ArgumentError,
            (
                "q_proj returns heads 0 to 2 here and v_proj head 0, which do not match. "
                f"Split the layer with {HOW_TO_SPLIT}; k_proj and v_proj may both stay whole."
            ),
        ),
    ],
)
def test_projections_of_another_width_are_rejected(
    kept: dict[str, int], error: type[MultiheadError], message: str
) -> None:
    layer = narrowed({}, output_projection=False)
    for name, width in kept.items():
        setattr(layer, name, nn.Linear(12, width, dtype=torch.float64))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    for memory in (None, x.flip(1)):
        with pytest.raises(error) as refusal:
            layer(x, memory)
        assert str(refusal.value) == message
