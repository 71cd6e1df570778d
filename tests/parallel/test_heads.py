"""Layers whose heads are split over ranks compute what one process computes, also with a split sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import multihead as mh
from multihead import masks, scores
from multihead.errors import ArgumentError
from multihead.parallel import context_parallel, parallelize, shard, unshard
from tests.parallel.processes import Processes
from tests.parallel.whole import whole

MASK = masks.Causal() & masks.Lengths((8, 5))
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all terms": {"num_kv_heads": 4, "rotary": mh.Rotary(), "qk_norm": mh.QKNorm("l2"), "sinks": True, "softcap": 2.0},
    "fewer key/value heads than ranks": {"num_kv_heads": 2, "head_gates": True, "position_bias": scores.ALiBi},
}


def model(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(5)
    options = dict(LAYERS[name])
    if "position_bias" in options:
        options["position_bias"] = options["position_bias"](8)
    layer = mh.MultiHeadAttention(16, 8, **options).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    x, gradient = torch.randn(2, 2, 8, 16, dtype=torch.float64).unbind()
    return nn.Sequential(layer), x, gradient


def trained(module: nn.Module, x: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    output = module[0](x, mask=MASK)  # type: ignore[index]
    (output * gradient).sum().backward()
    found = {"output": output.detach(), "gradient of x": x.grad}
    return found | {name: each.grad for name, each in module.named_parameters() if each.grad is not None}  # type: ignore[return-value]


def by_heads(group: Any, rank: int, name: str) -> dict[str, Tensor]:
    module, x, gradient = model(name)
    parallelize(module, DeviceMesh.from_group(group, "cpu"))
    return {key: whole(each) for key, each in trained(module, x, gradient).items()}


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_outputs_and_gradients_are_those_of_one_process(four: Processes, name: str, ranks: int) -> None:
    expected = trained(*model(name))
    for found in four.results(by_heads, name, ranks=ranks):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def by_heads_and_tokens(group: Any, rank: int, name: str, strategy: Any) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    module, x, gradient = model(name)
    parallelize(module, mesh["tp"])
    part = shard(mesh["cp"], mask=MASK, x=x, gradient=gradient)
    with context_parallel(mesh["cp"], strategy=strategy, layout=part.layout):
        found = trained(module, part["x"], part["gradient"])
    joined = {}
    for key, each in found.items():
        own = whole(each).contiguous()
        if key in ("output", "gradient of x"):
            joined[key] = unshard(mesh["cp"], own, layout=part.layout)
        else:
            dist.all_reduce(own, group=mesh["cp"].get_group())
            joined[key] = own
    return joined


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("name", LAYERS)
def test_heads_and_tokens_are_split_together(four: Processes, name: str, strategy: str) -> None:
    expected = trained(*model(name))
    for found in four.results(by_heads_and_tokens, name, strategy):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


REFUSED: dict[str, tuple[Any, str]] = {
    "heads that do not divide": (
        lambda: mh.MultiHeadAttention(12, 6),
        (
            "MultiHeadAttention has 6 heads and 6 key/value heads, which cannot be divided over 4 ranks. Use one of "
            "these numbers of ranks: 1, 2, 3, 6."
        ),
    ),
    "key/value heads that do not divide": (
        lambda: nn.Sequential(mh.MultiHeadAttention(24, 12, num_kv_heads=6)),
        (
            "0 has 12 heads and 6 key/value heads, which cannot be divided over 4 ranks. Use one of these "
            "numbers of ranks: 1, 2, 3, 6, 12."
        ),
    ),
    "averaged heads": (
        lambda: mh.MultiHeadAttention(8, 4, merge="mean"),
        'merge="mean" averages all heads, and the heads are split over 4 processes. Leave the projections whole.',
    ),
    "no layer": (
        lambda: nn.Linear(2, 2),
        (
            "Linear contains no MultiHeadAttention, and no attention layer of transformers with q_proj, k_proj, v_proj "
            "and o_proj. Split the layers of other libraries with "
            "torch.distributed.tensor.parallel.parallelize_module."
        ),
    ),
}


def refused(group: Any, rank: int, name: str) -> None:
    parallelize(REFUSED[name][0](), DeviceMesh.from_group(group, "cpu"))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_split_is_rejected(four: Processes, name: str) -> None:
    for found in four.run(refused, name):
        assert type(found) is ArgumentError
        assert str(found) == REFUSED[name][1]


def of_group(group: Any, rank: int) -> None:
    parallelize(mh.MultiHeadAttention(8, 4), group)


def test_a_process_group_is_rejected(four: Processes) -> None:
    for found in four.run(of_group):
        assert str(found) == 'The ranks are a process group. Give a DeviceMesh, for example mesh["tp"].'
