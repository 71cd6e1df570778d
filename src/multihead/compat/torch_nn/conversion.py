"""Turn an nn.MultiheadAttention into our own layer, and back."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.layer import MultiHeadAttention

_Made = TypeVar("_Made", bound=nn.Module)
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def from_torch(module: nn.MultiheadAttention) -> MultiHeadAttention:
    """Make our layer out of an nn.MultiheadAttention: equal outputs, weights of its own.

    Ours takes (batch, length, features) whatever the original's `batch_first` says, and masks of `multihead.masks`.
    Device, dtype, mode and requires_grad are kept.

    Args:
        module: the original, or its drop-in.

    >>> original = nn.MultiheadAttention(16, 2, batch_first=True)
    >>> x = torch.randn(3, 5, 16)
    >>> torch.allclose(from_torch(original)(x), original(x, x, x)[0], atol=1e-6)
    True
    """
    out = module.out_proj
    layer = MultiHeadAttention(
        module.embed_dim,
        module.num_heads,
        key_dim=module.kdim,
        value_dim=module.vdim,
        bias=out.bias is not None,
        dropout=module.dropout,
        add_bias_kv=module.bias_k is not None,
        add_zero_attn=module.add_zero_attn,
        device="meta",  # no random number is drawn for weights that are given
        dtype=out.weight.dtype,
    )
    separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    if module.in_proj_weight is None:
        sources = {f"{name}.weight": weight for name, weight in zip(_PROJECTIONS, separate, strict=True)}
    else:
        sources = _divided(module.in_proj_weight, "weight")
    sources["out_proj.weight"] = out.weight
    if out.bias is not None:
        sources |= {"out_proj.bias": out.bias, **_divided(module.in_proj_bias, "bias")}
    for name, row in (("bias_k", module.bias_k), ("bias_v", module.bias_v)):
        if row is not None:  # (1, 1, embed_dim) there, a row a head here
            sources[name] = row.detach().view(module.num_heads, -1).requires_grad_(row.requires_grad)
    return _filled(layer, sources).train(module.training)


def to_torch(layer: MultiHeadAttention, *, batch_first: bool = True) -> nn.MultiheadAttention:
    """Make an nn.MultiheadAttention out of our layer: equal outputs, weights of its own.

    Device, dtype and mode are kept; so is requires_grad, where a packed parameter learns if one of its parts does.

    Args:
        layer: our layer.
        batch_first: whether the original is to take (batch, length, features), as ours does.

    Raises:
        ArgumentError: the layer has what nn.MultiheadAttention cannot have, such as grouped heads.

    >>> layer = MultiHeadAttention(16, 2)
    >>> x = torch.randn(3, 5, 16)
    >>> torch.allclose(to_torch(layer)(x, x, x)[0], layer(x), atol=1e-6)
    True
    """
    _refuse_unless_sayable(layer)
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
        sources["in_proj_weight"] = _stacked([part.weight for part in projections])
    if layer.out_proj.bias is not None:
        sources |= {"out_proj.bias": layer.out_proj.bias, "in_proj_bias": _stacked([part.bias for part in projections])}
    for name, row in (("bias_k", layer.bias_k), ("bias_v", layer.bias_v)):
        if row is not None:
            sources[name] = row.detach().view(1, 1, -1).requires_grad_(row.requires_grad)
    return _filled(module, sources).train(layer.training)


def _divided(packed: Tensor, name: str) -> dict[str, Tensor]:
    """Cut a packed parameter into those of the three projections."""
    parts = (part.requires_grad_(packed.requires_grad) for part in packed.detach().chunk(3))
    return {f"{projection}.{name}": part for projection, part in zip(_PROJECTIONS, parts, strict=True)}


def _stacked(parts: list[Tensor]) -> Tensor:
    """Pack the parameters of the three projections."""
    return torch.cat([part.detach() for part in parts]).requires_grad_(any(part.requires_grad for part in parts))


def _filled(module: _Made, sources: dict[str, Tensor]) -> _Made:
    """Give a module without storage copies of tensors, which learn if their sources do."""
    for name, source in sources.items():
        owner, _, attribute = name.rpartition(".")
        parameter = nn.Parameter(source.detach().clone(), requires_grad=source.requires_grad)
        setattr(module.get_submodule(owner), attribute, parameter)
    return module


def _refuse_unless_sayable(layer: MultiHeadAttention) -> None:
    """Refuse what nn.MultiheadAttention has no word for."""
    usual = layer.head_dim**-0.5
    findings = (
        (layer.out_proj is None, "has no output projection", "output_projection=True"),
        (layer.merge != "concat", f"merges its heads by {layer.merge!r}", 'merge="concat"'),
        (layer.num_kv_heads != layer.num_heads, f"has {layer.num_heads} heads and {layer.num_kv_heads} key/value heads",
         "as many key/value heads as heads"),
        (layer.head_dim * layer.num_heads != layer.embed_dim or layer.value_head_dim != layer.head_dim,
         f"has heads of {layer.head_dim} features and values of {layer.value_head_dim}",
         f"heads and values of embed_dim / num_heads = {layer.embed_dim / layer.num_heads:g}"),
        (layer.output_dim != layer.embed_dim, f"has output_dim {layer.output_dim}", f"output_dim={layer.embed_dim}"),
        (layer.scale is not None and not math.isclose(layer.scale, usual), f"has the scale {layer.scale}",
         f"the scale 1 / sqrt(head_dim) = {usual:g}"),
        (layer.rotary is not None, "turns queries and keys (rotary)", "rotary=None"),
        (layer.qk_norm is not None, "normalises queries and keys", "qk_norm=None"),
        (layer.position_bias is not None, "has a position bias", "position_bias=None"),
        (layer.softcap is not None, f"has the softcap {layer.softcap}", "softcap=None"),
        (layer.sinks is not None, "has learned sinks", "sinks=False"),
        (layer.head_gates is not None, "has gates on its heads", "head_gates=False"),
    )  # fmt: skip
    for found, finding, mend in findings:
        if found:
            raise ArgumentError(
                f"The layer {finding}, which nn.MultiheadAttention cannot say.", f"Convert a layer with {mend}."
            )
    for name in (*_PROJECTIONS, "out_proj"):
        if type(layer.get_submodule(name)) is not nn.Linear:
            raise ArgumentError(
                f"The layer's {name} is a {type(layer.get_submodule(name)).__name__}, and no nn.Linear.",
                "Merge what was put around it (an adapter, a quantisation) into an nn.Linear first.",
            )
