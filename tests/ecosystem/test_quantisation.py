"""Dynamic quantisation exchanges the four projections by name, and attention runs between them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import multihead as mh
from tests.ecosystem.ways import PROJECTIONS, WAYS, inputs, layer

INT8 = torch.ao.nn.quantized.dynamic.Linear
pytestmark = pytest.mark.skipif(
    not torch.backends.quantized.supported_engines or torch.backends.quantized.engine == "none",
    reason="this build of PyTorch has no quantised matrix product",
)


def quantised(ours: mh.MultiHeadAttention, *names: str) -> mh.MultiHeadAttention:
    with warnings.catch_warnings():
        # torch.ao is about to leave PyTorch for a package of its own, and says so in two ways.
        warnings.filterwarnings("ignore", "torch.ao.quantization is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)
        return torch.ao.quantization.quantize_dynamic(ours, {*names} or {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_int8_gives_what_its_rounded_weights_give(way: str) -> None:
    """Weights are rounded to 1/127 of the largest of a matrix, inputs to 1/127 of theirs: two roundings a product."""
    ours, given = layer().eval(), inputs(way)
    eight_bits = quantised(ours)
    assert [type(getattr(eight_bits, name)) for name in PROJECTIONS] == [INT8] * 4
    with torch.no_grad():
        expected, found = ours(*given, **WAYS[way]), eight_bits(*given, **WAYS[way])
    scale = max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= 0.1 * scale
    rounded = copy.deepcopy(ours)
    for name in PROJECTIONS:
        rounded.get_submodule(name).load_state_dict(
            {"weight": getattr(eight_bits, name).weight().dequantize(), "bias": getattr(eight_bits, name).bias()}
        )
    with torch.no_grad():
        assert (found - rounded(*given, **WAYS[way])).abs().max() <= (found - expected).abs().max() + 0.05 * scale


def test_some_projections_alone_can_be_quantised_by_their_names() -> None:
    eight_bits = quantised(layer().eval(), "q_proj", "k_proj")
    assert [type(getattr(eight_bits, name)) for name in PROJECTIONS] == [INT8, INT8, nn.Linear, nn.Linear]
    assert eight_bits(*inputs("padded"), **WAYS["padded"]).isfinite().all()


def test_a_quantised_layer_is_watched() -> None:
    eight_bits = quantised(layer().eval())
    with torch.no_grad(), mh.observe(eight_bits) as seen:
        eight_bits(*inputs("padded"), **WAYS["padded"])
    torch.testing.assert_close(seen.layers[0].sample(0).weights().sum(-1), torch.ones(4, 7))
