"""What each of two processes computes of layers whose heads are split over them, for test_distributed.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

import multihead as mh
from multihead import masks, scores
from multihead.errors import MultiheadError
from tests.parallel.whole import whole

PROCESSES, EMBED, HEADS, HEAD_DIM, LENGTH = 2, 12, 8, 4, 6
HIDDEN = torch.rand(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) > 0.6
BIAS = torch.randn(1, HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
GATES = torch.randn(2, HEADS, LENGTH, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
Plan = dict[str, ParallelStyle]
Call = Callable[[nn.Module, Tensor], Tensor]


def columns(**options: Any) -> ParallelStyle:
    return ColwiseParallel(**options)


def split(**options: Any) -> Plan:
    """Return PyTorch's own plan for an attention layer."""
    of_heads = {name: ColwiseParallel(**options) for name in ("q_proj", "k_proj", "v_proj")}
    return {**of_heads, "out_proj": RowwiseParallel()}


def keys_whole() -> Plan:
    """Leave the projections of keys and values whole, as is needed where they have fewer heads than processes."""
    return {"q_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}


def causal(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x, mask=masks.Causal())  # type: ignore[no-any-return]


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    tokens, packing = mh.pack(x, (LENGTH, 3))
    return layer(tokens, packing=packing)  # type: ignore[no-any-return]


def in_steps(layer: nn.Module, x: Tensor) -> Tensor:
    cache = mh.KeyValueCache()
    steps = x.split([4, 1, 1], 1)
    return torch.cat([layer(step, mask=masks.Causal(), cache=cache) for step in steps], 1)


def across_in_steps(layer: nn.Module, x: Tensor) -> Tensor:
    cache = mh.KeyValueCache()
    return torch.cat([layer(step, x.flip(1), cache=cache) for step in x.split([4, 2], 1)], 1)


def per_head_arguments(layer: nn.Module, x: Tensor) -> Tensor:
    mask = masks.Causal() | masks.Drop(HIDDEN)
    return layer(x, mask=mask, bias=BIAS.to(x.dtype), head_gates=GATES.to(x.dtype))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Case:
    """A layer, how it is split, and what it is called with."""

    options: Callable[[], dict[str, Any]] = dict
    plan: Callable[[], Plan] = split
    call: Call = causal
    num_heads: int = HEADS
    dtype: torch.dtype = torch.float64

    def layer(self) -> nn.Module:
        torch.manual_seed(1)
        options = {"head_dim": HEAD_DIM, **self.options(), "dtype": self.dtype}
        layer = mh.MultiHeadAttention(EMBED, self.num_heads, **options).to(self.dtype)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        return layer

    def x(self) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        return torch.randn(2, LENGTH, EMBED, generator=generator, dtype=torch.float64).to(self.dtype)


def _terms() -> dict[str, Any]:
    return {
        "num_kv_heads": 4,
        "rotary": mh.Rotary(),
        "qk_norm": mh.QKNorm("l2"),
        "position_bias": scores.T5Bias(HEADS),
        "softcap": 3.0,
        "sinks": True,
        "head_gates": True,
        "add_zero_attn": True,
    }


EQUAL = {
    "plain": Case(),
    "grouped heads": Case(lambda: {"num_kv_heads": 2, "value_head_dim": 3}),
    "grouped heads, keys whole": Case(lambda: {"num_kv_heads": 2}, keys_whole),
    "one key head, keys whole": Case(
        lambda: {"num_kv_heads": 1, "qk_norm": mh.QKNorm(), "add_bias_kv": True}, keys_whole
    ),
    "one key head, keys gathered": Case(
        lambda: {"num_kv_heads": 1},
        lambda: {**split(), **{name: columns(output_layouts=Replicate()) for name in ("k_proj", "v_proj")}},
    ),
    "all terms": Case(_terms),
    "all terms, keys whole": Case(_terms, keys_whole),
    "all terms, float32": Case(_terms, dtype=torch.float32),
    "rms norm": Case(lambda: {"qk_norm": mh.QKNorm("rms")}),
    "slopes": Case(lambda: {"position_bias": scores.ALiBi(HEADS)}),
    "learned bias": Case(lambda: {"position_bias": scores.LearnedBias(HEADS, LENGTH, LENGTH)}),
    "added keys": Case(lambda: {"num_kv_heads": 4, "add_bias_kv": True, "sinks": True}),
    "arguments per head": Case(call=per_head_arguments),
    "padding": Case(lambda: {"rotary": mh.Rotary()}, call=lambda layer, x: layer(x, lengths=(LENGTH, 3))),
    "packed": Case(_terms, call=packed),
    "cache": Case(_terms, call=in_steps),
    "memory": Case(lambda: {"sinks": True}, call=lambda layer, x: layer(x, x.flip(1)[:, :4], memory_lengths=(4, 2))),
    "memory in a cache": Case(lambda: {"qk_norm": mh.QKNorm("l2"), "num_kv_heads": 2}, keys_whole, across_in_steps),
}

REFUSED = {
    "heads that do not divide": (
        Case(num_heads=5),
        (
            "q_proj is split over 2 processes and returns 10 columns here, and it has 5 heads of 4 columns. Split"
            " it over a number of processes that divides its heads: 1, 5."
        ),
    ),
    "key heads that do not divide": (
        Case(lambda: {"num_kv_heads": 1}),
        (
            "k_proj is split over 2 processes and returns 2 columns here, and it has 1 head of 4 columns. Split "
            "it over a number of processes that divides its heads: 1, or leave k_proj and v_proj whole."
        ),
    ),
    "groups that do not divide": (
        Case(lambda: {"num_kv_heads": 3}, keys_whole, num_heads=6),
        (
            "q_proj returns heads 0 to 2 here, which share key/value heads 0 to 1 unevenly: 2 query heads belong "
            "to each. Split q_proj over a number of processes that divides num_kv_heads: 1, 3."
        ),
    ),
    "only the keys": (
        Case(plan=lambda: {"k_proj": columns()}),
        (
            "q_proj returns heads 0 to 7 here and k_proj heads 0 to 3, which do not match. Split the "
            "layer with parallelize_module with ColwiseParallel() for q_proj, k_proj and v_proj and "
            "RowwiseParallel() for out_proj; k_proj and v_proj may both stay whole."
        ),
    ),
    "the mean of heads": (
        Case(lambda: {"merge": "mean"}),
        ('merge="mean" averages all heads, and the heads are split over 2 processes. Leave the projections whole.'),
    ),
    "a norm over all heads": (
        Case(lambda: {"qk_norm": mh.QKNorm(over="all")}),
        (
            'QKNorm(over="all") normalises all heads together, and the heads are split over 2 processes. Leave '
            "the projections whole."
        ),
    ),
    "a whole output projection": (
        Case(plan=lambda: {name: columns() for name in ("q_proj", "k_proj", "v_proj")}),
        (
            "out_proj takes the columns of all 8 heads, and q_proj is split over 2 processes. Split it too: "
            "RowwiseParallel() for out_proj."
        ),
    ),
    "distributed outputs": (
        Case(plan=lambda: split(use_local_output=False)),
        (
            "q_proj returns a DTensor, and attention computes the heads of one process. Leave "
            "use_local_output=True in its parallel style."
        ),
    ),
    "a bias for the heads of one process": (
        Case(call=lambda layer, x: layer(x, bias=BIAS[:, :4])),
        (
            "bias is for 4 heads, and the layer has 8, of which this process computes heads 0 to 3. Give it for "
            "all 8 heads: each process slices its own heads."
        ),
    ),
    "padding and a part of the tokens": (
        Case(plan=lambda: split(input_layouts=Shard(1)), call=lambda layer, x: layer(x[:, :3], lengths=(3, 2))),
        (
            "q_proj was given 5 tokens and returns 10, and the padding is known only for 5. Give every process all "
            "tokens where lengths or packing are given, or hide the padding with mask=masks.Lengths(...)."
        ),
    ),
}
"""Rejected in the first of the processes with these words."""


def gradients(layer: nn.Module) -> dict[str, Tensor]:
    return {f"gradient of {name}": whole(each.grad) for name, each in layer.named_parameters()}


def trained(case: Case, layer: nn.Module) -> dict[str, Tensor]:
    """Call a layer; return its output and all gradients."""
    x = case.x().requires_grad_()
    output = case.call(layer, x)
    output.square().sum().backward()
    return {"output": output.detach().clone(), "gradient of x": whole(x.grad), **gradients(layer)}


def by_tokens(rank: int, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Split the tokens between the layers and the heads within them (sequence parallelism)."""
    case = Case(_terms)
    layer = case.layer()
    tokens = {name: columns(input_layouts=Shard(1)) for name in ("q_proj", "k_proj", "v_proj")}
    parallelize_module(layer, mesh, {**tokens, "out_proj": RowwiseParallel(output_layouts=Shard(1))})
    output = causal(layer, case.x().chunk(PROCESSES, 1)[rank])
    output.square().sum().backward()
    return {"output": output.detach().clone(), **gradients(layer)}


def watched(mesh: DeviceMesh) -> dict[str, Tensor]:
    """Watch a layer that is split: each process sees its own heads."""
    case = EQUAL["all terms"]
    layer = case.layer()
    parallelize_module(layer, mesh, case.plan())
    with mh.observe(layer, probes=("entropy", "received")) as seen:
        case.call(layer, case.x())
    return {"weights": seen.layers[0].weights(), **seen.layers[0].means()}


def refusal(case: Case, mesh: DeviceMesh) -> str:
    layer = case.layer()
    parallelize_module(layer, mesh, case.plan())
    try:
        case.call(layer, case.x())
    except MultiheadError as error:
        return str(error)
    return "nothing"


def everything(group: Any, rank: int) -> dict[str, Any]:
    """Compute all cases; return what came out of each."""
    mesh = DeviceMesh.from_group(group, "cpu")
    found: dict[str, Any] = {}
    for name, case in EQUAL.items():
        layer = case.layer()
        parallelize_module(layer, mesh, case.plan())
        found[name] = trained(case, layer)
    found |= {name: refusal(case, mesh) for name, (case, _) in REFUSED.items()}
    return found | {"by tokens": by_tokens(rank, mesh), "watched": watched(mesh)}
