"""Measure what the number of heads changes in a layer: parameters, shapes, outputs, gradients, features read."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.functional import attention_weights
from multihead.layer import MultiHeadAttention
from multihead.layer.heads import head_dim_of, merge_heads, split_heads

__all__ = [
    "HeadCountComparison",
    "IntermediateTensor",
    "LayerWithHeadCount",
    "ParameterComparison",
    "ParameterShape",
    "compare_parameters",
]

PACKED_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class ParameterShape:
    """The name and the shape of one parameter tensor."""

    name: str
    shape: tuple[int, ...]

    @property
    def num_values(self) -> int:
        """Number of values of the parameter tensor."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class LayerWithHeadCount:
    """What is counted and measured of a layer with one number of heads.

    Attributes:
        num_heads, head_dim: number of heads, and columns per head.
        packed_parameters: the parameters with the projections of q, k and v stacked, as in `nn.MultiheadAttention`.
        torch_parameters: the parameters of `nn.MultiheadAttention` itself.
        features_read_by_head: per head, the number of input features with a non-zero derivative.
        features_read_by_head_of_split_input: per head, the number of input features with a non-zero derivative if each
            head reads only its own part of the input.
        parameters_with_split_input: number of parameters of a layer whose heads each read only their own part.
        difference_from_single_head_layers: largest difference between the layer's output and that of as many
            single-head layers, each built from its rows of the packed projection.
    """

    num_heads: int
    head_dim: int
    packed_parameters: tuple[ParameterShape, ...]
    torch_parameters: tuple[ParameterShape, ...]
    features_read_by_head: tuple[int, ...]
    features_read_by_head_of_split_input: tuple[int, ...]
    parameters_with_split_input: int
    difference_from_single_head_layers: float

    @property
    def num_parameters(self) -> int:
        """Number of trained parameters of the layer."""
        return sum(parameter.num_values for parameter in self.packed_parameters)


@dataclass(frozen=True)
class IntermediateTensor:
    """One intermediate tensor: its name, the code that computes it, its axes and its shape."""

    name: str
    code: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HeadCountComparison:
    """How two layers with the same weights and different numbers of heads differ.

    Attributes:
        first_num_heads, second_num_heads: the numbers of heads.
        output_difference: norm of the difference of the outputs, as a share of the norm of the first.
        gradient_difference: norm of the difference of the gradients of all weights, as a share of the norm of the
            first.
        score_difference: largest difference between the sums of q . k over heads, which are equal up to rounding.
    """

    first_num_heads: int
    second_num_heads: int
    output_difference: float
    gradient_difference: float
    score_difference: float


@dataclass(frozen=True)
class ParameterComparison:
    """What `compare_parameters` counted and measured.

    Attributes:
        embed_dim, length: width and tokens of the input, (1, length, embed_dim).
        layers: one result per number of heads.
        num_heads_of_tensors: the number of heads whose shapes are listed.
        intermediate_tensors: every tensor from input to output.
        comparisons: one result per pair of numbers of heads, in the order of `layers`.
    """

    embed_dim: int
    length: int
    layers: tuple[LayerWithHeadCount, ...]
    num_heads_of_tensors: int
    intermediate_tensors: tuple[IntermediateTensor, ...]
    comparisons: tuple[HeadCountComparison, ...]


def compare_parameters(
    *, embed_dim: int = 512, length: int = 12, heads: Sequence[int] = (1, 2, 4, 8), shapes_of: int = 2, seed: int = 0
) -> ParameterComparison:
    """Build layers that differ only in their number of heads, and compare them in float64.

    Args:
        embed_dim: width of the input.
        length: tokens of the input.
        heads: the numbers of heads; each must divide `embed_dim`.
        shapes_of: the number of heads whose shapes are listed.
        seed: the seed of the input and the weights.

    Returns:
        What was counted of each layer, and how the layers differ.

    Raises:
        ArgumentError: heads is empty, or a number of heads does not divide `embed_dim`.

    Source: arXiv:1706.03762, section 3.2.2.

    >>> found = compare_parameters(embed_dim=8, length=3, heads=(1, 2))
    >>> [layer.num_parameters for layer in found.layers]
    [288, 288]
    >>> [layer.features_read_by_head for layer in found.layers]
    [(8,), (8, 8)]
    """
    if not heads:
        raise ArgumentError("heads is empty.", "Give at least one number of heads, such as (1, 2).")
    for num_heads in (*heads, shapes_of):
        head_dim_of(embed_dim, num_heads)
    x = torch.randn(1, length, embed_dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    # Building a layer draws weights; this must not change the caller's random state.
    with torch.random.fork_rng(devices=[]):
        layers = [_build_layer(embed_dim, num_heads, seed) for num_heads in heads]
        measured = [_measure_layer(layer, x, seed) for layer in layers]
        return ParameterComparison(
            embed_dim=embed_dim,
            length=length,
            layers=tuple(_describe_layer(layer, x, seed) for layer in layers),
            num_heads_of_tensors=shapes_of,
            intermediate_tensors=_list_intermediate_tensors(_build_layer(embed_dim, shapes_of, seed), x),
            comparisons=tuple(itertools.starmap(_compare_layers, itertools.combinations(measured, 2))),
        )


def _build_layer(embed_dim: int, num_heads: int, seed: int, *, output_projection: bool = True) -> MultiHeadAttention:
    """Build a layer in float64 whose weights depend on the seed but not on the number of heads."""
    layer = MultiHeadAttention(embed_dim, num_heads, output_projection=output_projection, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed + 1)
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        if projection is not None:
            nn.init.xavier_uniform_(projection.weight, generator=generator)
            nn.init.normal_(projection.bias, std=0.1, generator=generator)
    return layer


def _describe_layer(layer: MultiHeadAttention, x: Tensor, seed: int) -> LayerWithHeadCount:
    heads, head_dim, embed_dim = layer.num_heads, layer.head_dim, layer.embed_dim
    separate = dict(layer.named_parameters())
    packed = {
        "in_proj_weight": torch.cat([separate[f"{name}.weight"] for name in PACKED_PROJECTIONS]),
        "in_proj_bias": torch.cat([separate[f"{name}.bias"] for name in PACKED_PROJECTIONS]),
        "out_proj.weight": separate["out_proj.weight"],
        "out_proj.bias": separate["out_proj.bias"],
    }
    bare, cut = (_build_layer(embed_dim, heads, seed, output_projection=False) for _ in range(2))
    theirs = nn.MultiheadAttention(embed_dim, heads, device="meta")
    single_heads = _concatenate_single_head_layers(bare, packed, x)
    own = torch.block_diag(*[torch.ones(head_dim, head_dim, dtype=x.dtype)] * heads)
    with torch.no_grad():
        for projection in (cut.q_proj, cut.k_proj, cut.v_proj):
            projection.weight *= own
    lost = 3 * int((own == 0).sum())
    return LayerWithHeadCount(
        num_heads=heads,
        head_dim=head_dim,
        packed_parameters=_list_parameter_shapes(packed),
        torch_parameters=_list_parameter_shapes(dict(theirs.named_parameters())),
        features_read_by_head=_count_features_read(bare, x, seed),
        features_read_by_head_of_split_input=_count_features_read(cut, x, seed),
        parameters_with_split_input=sum(tensor.numel() for tensor in packed.values()) - lost,
        difference_from_single_head_layers=float((single_heads - bare(x)).abs().max().detach()),
    )


def _list_parameter_shapes(tensors: Mapping[str, Tensor]) -> tuple[ParameterShape, ...]:
    return tuple(ParameterShape(name, tuple(tensor.shape)) for name, tensor in tensors.items())


def _count_features_read(layer: MultiHeadAttention, x: Tensor, seed: int) -> tuple[int, ...]:
    """Count, for each head, the input features that the result of the head depends on."""
    x = x.clone().requires_grad_()
    z_heads = split_heads(layer(x), layer.num_heads)  # (batch, heads, length, head_dim)
    # A random combination of the Jacobian's rows is 0 in a column only if the whole column is 0.
    mix = torch.randn(z_heads.shape, generator=torch.Generator().manual_seed(seed + 2), dtype=x.dtype)
    found = []
    for head in range(layer.num_heads):
        (slope,) = torch.autograd.grad((z_heads[:, head] * mix[:, head]).sum(), x, retain_graph=True)
        found.append(int((slope != 0).flatten(0, 1).any(0).sum()))
    return tuple(found)


def _concatenate_single_head_layers(layer: MultiHeadAttention, packed: dict[str, Tensor], x: Tensor) -> Tensor:
    """Compute every head with its own single-head layer from its rows of the packed projection; concatenate them."""
    heads, head_dim = layer.num_heads, layer.head_dim
    # (3 * embed_dim, embed_dim): the rows of q, then of k, then of v; within each, head after head.
    weight = packed["in_proj_weight"].view(3, heads, head_dim, layer.embed_dim)
    bias = packed["in_proj_bias"].view(3, heads, head_dim)
    joined = []
    for head in range(heads):
        alone = MultiHeadAttention(layer.embed_dim, 1, head_dim=head_dim, output_projection=False, dtype=x.dtype)
        with torch.no_grad():
            for row, projection in enumerate((alone.q_proj, alone.k_proj, alone.v_proj)):
                projection.weight.copy_(weight[row, head])
                projection.bias.copy_(bias[row, head])
        joined.append(alone(x))  # (batch, length, head_dim)
    return torch.cat(joined, -1)  # (batch, length, heads * head_dim)


@dataclass(frozen=True, eq=False)
class _MeasuredLayer:
    """What is compared of a layer: its output, the gradient of all its weights, and its scores summed over heads."""

    num_heads: int
    output: Tensor
    gradient: Tensor
    score_sums: Tensor  # (batch, queries, keys): sum_h q_h . k_h


def _measure_layer(layer: MultiHeadAttention, x: Tensor, seed: int) -> _MeasuredLayer:
    """Measure a layer; the gradient is of a loss that has the same goal for every number of heads."""
    output = layer(x)
    goal = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed + 3), dtype=x.dtype)
    gradients = torch.autograd.grad((output - goal).square().mean(), list(layer.parameters()))
    gradient = torch.cat([each.flatten() for each in gradients])
    q, k = (split_heads(projection(x), layer.num_heads) for projection in (layer.q_proj, layer.k_proj))
    return _MeasuredLayer(layer.num_heads, output.detach(), gradient, (q @ k.transpose(2, 3)).sum(1).detach())


def _compare_layers(first: _MeasuredLayer, second: _MeasuredLayer) -> HeadCountComparison:
    return HeadCountComparison(
        first.num_heads,
        second.num_heads,
        output_difference=_relative_difference(first.output, second.output),
        gradient_difference=_relative_difference(first.gradient, second.gradient),
        score_difference=float((second.score_sums - first.score_sums).abs().max()),
    )


def _relative_difference(first: Tensor, second: Tensor) -> float:
    return float((second - first).norm() / first.norm())


@torch.no_grad()
def _list_intermediate_tensors(layer: MultiHeadAttention, x: Tensor) -> tuple[IntermediateTensor, ...]:
    """Recompute the layer's forward pass step by step, and list the shape of every tensor."""
    heads = layer.num_heads
    wide, split = ("batch", "length", "heads*head_dim"), ("batch", "heads", "length", "head_dim")
    maps = ("batch", "heads", "queries", "keys")
    q, k, v = layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)
    q_heads, k_heads, v_heads = (split_heads(each, heads) for each in (q, k, v))
    weights = attention_weights(q_heads, k_heads)
    z_heads = weights @ v_heads
    listed: list[tuple[str, str, tuple[str, ...], Tensor]] = [
        ("x", "", ("batch", "length", "embed_dim"), x),
        ("q", "q_proj(x)", wide, q),
        ("k", "k_proj(x)", wide, k),
        ("v", "v_proj(x)", wide, v),
        ("q_heads", f"split_heads(q, {heads})", split, q_heads),
        ("k_heads", f"split_heads(k, {heads})", split, k_heads),
        ("v_heads", f"split_heads(v, {heads})", split, v_heads),
        ("scores", "q_heads @ k_heads.mT", maps, q_heads @ k_heads.mT),
        ("weights", f"softmax(scores / √{layer.head_dim})", maps, weights),
        ("z_heads", "weights @ v_heads", split, z_heads),
        ("merged", "merge_heads(z_heads)", wide, merge_heads(z_heads)),
        ("output", "out_proj(merged)", ("batch", "length", "embed_dim"), layer(x)),
    ]
    return tuple(IntermediateTensor(name, code, axes, tuple(each.shape)) for name, code, axes, each in listed)
