"""Under autocast: half precision outside, float32 parameters, and results within what half precision loses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import multihead as mh
from tests.ecosystem.ways import WAYS, inputs, layer, results
from tests.kernel_names import EACH

HALVES = (torch.bfloat16, torch.float16)


def by_hand_in_half(way: str, given: tuple[Tensor, ...], ours: mh.MultiHeadAttention, dtype: torch.dtype) -> Tensor:
    """What a layer of that dtype, by the reference kernel's float32 scores, gives: the yardstick of what is lost."""
    return copy.deepcopy(ours).to(dtype)(*(each.to(dtype) for each in given), **WAYS[way])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_outputs_are_half_and_no_further_from_the_truth_than_a_layer_in_half_precision(
    way: str, dtype: torch.dtype
) -> None:
    ours, given = layer(), inputs(way)
    exact = copy.deepcopy(ours).double()(*(each.double() for each in given), **WAYS[way])
    with torch.autocast("cpu", dtype=dtype):
        output = ours(*given, **WAYS[way])
    assert output.dtype == dtype
    lost = (by_hand_in_half(way, given, ours, dtype).double() - exact).abs().max()
    assert (output.double() - exact).abs().max() <= 2 * (lost + torch.finfo(dtype).eps)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_float32_like_the_parameters_and_near_those_without_autocast(way: str) -> None:
    ours, given = layer(), inputs(way)
    exact = results(ours, way, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(ours, way, given)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}
    assert {name: each.dtype for name, each in found.items() if name != "output"} == {
        name: torch.float32 for name in exact if name != "output"
    }
    for name, value in exact.items():
        # Ten roundings of bfloat16; the gradient of the keys' bias is 0, and what cancels there was around 1.
        allowed = 10 * torch.finfo(torch.bfloat16).eps * max(1.0, float(value.abs().max()))
        assert float((found[name].float() - value).abs().max()) <= allowed, name


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_in_half_precision_takes_float32_under_autocast_and_the_other_way_round(way: str) -> None:
    ours, given = layer(), inputs(way)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = ours(*given, **WAYS[way])
        assert torch.equal(ours(*(each.bfloat16() for each in given), **WAYS[way]), expected)
        assert torch.equal(copy.deepcopy(ours).bfloat16()(*given, **WAYS[way]), expected)


@pytest.mark.parametrize("way", ["causal", "padded", "padded cross-attention"])
def test_watching_changes_no_bit_and_its_statistics_are_those_of_the_scores_that_were_used(way: str) -> None:
    ours, given = layer(), inputs(way)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone = ours(*given, **WAYS[way])
        with mh.observe(ours) as seen:
            watched = ours(*given, **WAYS[way])
    assert torch.equal(alone, watched)
    sample = seen.layers[0].sample(1)
    weights = sample.weights().double()
    assert sample.statistics["entropy"].dtype == torch.float32
    entropy = -torch.xlogy(weights, weights).sum(-1)
    torch.testing.assert_close(sample.statistics["entropy"].double(), entropy, atol=1e-5, rtol=1e-5)


def test_training_under_autocast_with_a_gradient_scaler_lowers_the_loss() -> None:
    ours, (x,) = layer(dropout=0.1), inputs("padded")
    target = torch.randn_like(x)
    optimizer, scaler = torch.optim.AdamW(ours.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (ours(x, **WAYS["padded"]).float() - target).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("kernel", EACH)
def test_attention_of_float32_tensors_is_computed_in_float32_by_every_kernel(kernel: str) -> None:
    """Autocast would make the matrix products of a kernel that is written in PyTorch half precision."""
    q, k, v = torch.randn(3, 2, 3, 40, 8).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = mh.attention(q, k, v, mask=mh.masks.Causal(), kernel=kernel)
    assert torch.equal(output, mh.attention(q, k, v, mask=mh.masks.Causal(), kernel=kernel))
