"""Convert an nn.MultiheadAttention to our own layer, and back."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from multihead.compat.projections import reject_wrapped
from multihead.compat.torch_nn.replace import can_replace
from multihead.errors import ArgumentError
from multihead.errors.given import reject_given
from multihead.layer import MultiHeadAttention

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Convert an nn.MultiheadAttention to our layer, with equal outputs and copies of the parameters.

    Our layer takes (batch, length, features) for any `batch_first` of the original, and masks of `multihead.masks`.
    Device, dtype, mode and requires_grad are kept.

    Args:
        module: an nn.MultiheadAttention or its drop-in.

    >>> original = nn.MultiheadAttention(16, 2, batch_first=True)
    >>> x = torch.randn(3, 5, 16)
    >>> torch.allclose(from_torch(original)(x), original(x, x, x)[0], atol=1e-6)
    True
    """
    if not can_replace(module):  # a subclass may compute something else
        reject_given(
            "module",
            module,
            "an nn.MultiheadAttention",
            "Give such a layer; multihead.compat.torch_nn.replace(model) takes a model with many of them.",
        )
    out = module.out_proj
    reject_wrapped(out_proj=out)
    layer = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        bias=out.bias is not None,
        dropout=module.dropout,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        device="meta",  # so that no random numbers are drawn for parameters that are copied
        dtype=out.weight.dtype,
    )
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is None:
        sources = {f"{name}.weight": weight for name, weight in zip(_PROJECTIONS, separate, strict=True)}
    else:
        sources = _split_into_projections(module.in_proj_weight, "weight")
    sources["out_proj.weight"] = out.weight
    if out.bias is not None:
        sources |= {"out_proj.bias": out.bias, **_split_into_projections(module.in_proj_bias, "bias")}
    for name, row in (("bias_k", module.bias_k), ("bias_v", module.bias_v)):
        if row is not None:  # (1, 1, embed_dim) -> (heads, head_dim)
            sources[name] = row.detach().view(module.num_heads, -1).requires_grad_(row.requires_grad)
    return _fill_with_copies(layer, sources).train(module.training)


def to_torch(layer: MultiHeadAttention, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """Convert our layer to an nn.MultiheadAttention, with equal outputs and copies of the parameters.

    Device, dtype and mode are kept, and so is requires_grad: in_proj_weight requires a gradient if that of q, k or v
    does.

    Args:
        layer: our layer.
        batch_first: whether the result takes (batch, length, features), as our layer does.

    Raises:
        ArgumentError: the layer has options that nn.MultiheadAttention lacks, such as grouped heads.

    >>> layer = MultiHeadAttention(16, 2)
    >>> x = torch.randn(3, 5, 16)
    >>> torch.allclose(to_torch(layer)(x, x, x)[0], layer(x), atol=1e-6)
    True
    """
    _check_convertible(layer)
    assert layer.out_proj is not None
    module = nn.MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        bias=layer.out_proj.bias is not None,
        kdim=layer.key_dim,
        vdim=layer.value_dim,
        add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn,
        batch_first=batch_first,
        device="meta",
        dtype=layer.out_proj.weight.dtype,
    )
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    sources: dict[str, Tensor] = {"out_proj.weight": layer.out_proj.weight}
    if module.in_proj_weight is None:
        sources |= {f"{name}_weight": part.weight for name, part in zip(_PROJECTIONS, projections, strict=True)}
    else:
        sources["in_proj_weight"] = _pack_projections([part.weight for part in projections])
    if layer.out_proj.bias is not None:
        sources |= {
            "out_proj.bias": layer.out_proj.bias,
            "in_proj_bias": _pack_projections([part.bias for part in projections]),
        }
    for name, row in (("bias_k", layer.bias_k), ("bias_v", layer.bias_v)):
        if row is not None:
            sources[name] = row.detach().view(1, 1, -1).requires_grad_(row.requires_grad)
    return _fill_with_copies(module, sources).train(layer.training)


def _split_into_projections(packed: Tensor, name: str) -> dict[str, Tensor]:
    """Split in_proj_weight or in_proj_bias into the parameters of q_proj, k_proj and v_proj, by name."""
    parts = (part.requires_grad_(packed.requires_grad) for part in packed.detach().chunk(3))
    return {f"{projection}.{name}": part for projection, part in zip(_PROJECTIONS, parts, strict=True)}


def _pack_projections(parts: list[Tensor]) -> Tensor:
    """Concatenate the weights or biases of q_proj, k_proj and v_proj to in_proj_weight or in_proj_bias."""
    return torch.cat([part.detach() for part in parts]).requires_grad_(any(part.requires_grad for part in parts))


def _fill_with_copies(module: _ModuleT, sources: dict[str, Tensor]) -> _ModuleT:
    """Set the parameters of a module on the meta device to copies of `sources`, with their requires_grad."""
    for name, source in sources.items():
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(source.detach().clone(), requires_grad=source.requires_grad)
        setattr(module.get_submodule(owner), attribute, parameter)
    return module


def _check_convertible(layer: MultiHeadAttention) -> None:
    """Reject a layer with options that nn.MultiheadAttention lacks."""
    usual = layer.head_dim**-0.5
    differences = (
        (layer.out_proj is None, "has no output projection", "output_projection=True"),
        (layer.merge != "concat", f"merges its heads by {layer.merge!r}", 'merge="concat"'),
        (layer.num_kv_heads != layer.num_heads, f"has {layer.num_heads} heads and {layer.num_kv_heads} key/value heads",
         "one key/value head per head"),
        (layer.head_dim * layer.num_heads != layer.embed_dim or layer.value_head_dim != layer.head_dim,
         f"has heads of {layer.head_dim} features and values of {layer.value_head_dim}",
         f"heads and values of embed_dim / num_heads = {layer.embed_dim / layer.num_heads:g}"),
        (layer.output_dim != layer.embed_dim, f"has output_dim {layer.output_dim}", f"output_dim={layer.embed_dim}"),
        (layer.scale is not None and not math.isclose(layer.scale, usual), f"has the scale {layer.scale}",
         f"the scale 1 / sqrt(head_dim) = {usual:g}"),
        (layer.rotary is not None, "rotates queries and keys (rotary)", "rotary=None"),
        (layer.qk_norm is not None, "normalises queries and keys", "qk_norm=None"),
        (layer.position_bias is not None, "has a position bias", "position_bias=None"),
        (layer.softcap is not None, f"has the softcap {layer.softcap}", "softcap=None"),
        (layer.sinks is not None, "has learned sinks", "sinks=False"),
        (layer.head_gates is not None, "has gates on its heads", "head_gates=False"),
    )  # fmt: skip
    for differs, difference, remedy in differences:
        if differs:
            raise ArgumentError(
                f"The layer {difference}, which nn.MultiheadAttention does not support.",
                f"Convert a layer with {remedy}.",
            )
    reject_wrapped(**{name: layer.get_submodule(name) for name in (*_PROJECTIONS, "out_proj")})
