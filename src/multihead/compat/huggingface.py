"""Take the attention modules of BERT, GPT-2 and Llama out of a Hugging Face model, with equal outputs.

A query that sees no key gives 0 before the output projection; the originals give it the mean of all values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from multihead.call import AttentionRequest
from multihead.errors import ModelError, ShapeError
from multihead.functional import attend, request_of
from multihead.heads import merge_heads, split_heads
from multihead.layer import MultiHeadAttention
from multihead.masks import Causal, Mask

_CAUSAL = Causal()
# Families whose attention is BERT's, copied.
_LIKE_BERT = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")


def from_bert(module: nn.Module) -> MultiHeadAttention:
    """Make our layer of a BERT attention.

    Of a `BertSelfAttention` (or `BertCrossAttention`) come the heads side by side, without an output projection. Of a
    `BertAttention`, which holds it, comes `output.dense` as well; its dropout, residual and LayerNorm stay outside.
    The same classes of RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA are taken too. Padding is `lengths=`, or
    `mask=masks.Keep(attention_mask.bool(), "batch keys")`; a decoder's causality is `mask=masks.Causal()`.

    Args:
        module: the attention of one layer, for example `model.encoder.layer[0].attention`.

    Returns: a layer with copies of the weights, in train or eval mode as the module.

    Raises:
        ModelError: another class.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=5, hidden_size=12, num_attention_heads=3, num_hidden_layers=1)
    >>> bert = BertModel(config).eval()
    >>> x = torch.randn(2, 4, 12)
    >>> attention = bert.encoder.layer[0].attention
    >>> torch.allclose(from_bert(attention.self)(x), attention.self(x)[0], atol=1e-6)
    True
    """
    heads = ("SelfAttention", "CrossAttention")
    bare = {f"{family}{kind}" for family in _LIKE_BERT for kind in heads}
    whole = {f"{family}Attention" for family in _LIKE_BERT}
    _refuse_unless_named(module, bare | whole, "from_bert", "the attention of a BERT layer, or its .self")
    source: Any = module
    attention = source.self if type(module).__name__ in whole else source
    dense = source.output.dense if type(module).__name__ in whole else None
    query, key, value = attention.query, attention.key, attention.value
    layer = MultiHeadAttention(
        embed_dim=query.in_features,
        num_heads=attention.num_attention_heads,
        head_dim=attention.attention_head_size,
        key_dim=key.in_features,
        output_dim=None if dense is None else dense.out_features,
        dropout=float(attention.dropout.p),
        output_projection=dense is not None,
        device=query.weight.device,
        dtype=query.weight.dtype,
    )
    for projection, linear in ((layer.q_proj, query), (layer.k_proj, key), (layer.v_proj, value)):
        _copy(projection, linear.weight, linear.bias)
    if layer.out_proj is not None and dense is not None:
        _copy(layer.out_proj, dense.weight, dense.bias)
    return layer.train(module.training)


def from_gpt2(module: nn.Module) -> MultiHeadAttention:
    """Make our layer of a GPT-2 attention.

    GPT-2 is causal: call the layer with `mask=masks.Causal()`. One made for cross-attention takes memory instead. Its
    dropout behind the output projection stays outside.

    Args:
        module: a `GPT2Attention`, for example `model.h[0].attn`.

    Returns: a layer with copies of the weights, in train or eval mode as the module.

    Raises:
        ModelError: another class.

    >>> from transformers import GPT2Config, GPT2Model
    >>> gpt2 = GPT2Model(GPT2Config(vocab_size=5, n_embd=12, n_head=3, n_layer=1)).eval()
    >>> x = torch.randn(2, 4, 12)
    >>> torch.allclose(from_gpt2(gpt2.h[0].attn)(x, mask=_CAUSAL), gpt2.h[0].attn(x)[0], atol=1e-6)
    True
    """
    _refuse_unless_named(module, {"GPT2Attention"}, "from_gpt2", "the attention of a GPT-2 layer")
    source: Any = module
    # Its Conv1D multiplies from the right: weight (features in, features out).
    weight, bias = source.c_attn.weight.mT, source.c_attn.bias
    if source.is_cross_attention:
        weight = torch.cat([source.q_attn.weight.mT, weight])
        bias = torch.cat([source.q_attn.bias, bias])
    scale = source.head_dim**-0.5 if source.scale_attn_weights else 1.0
    if source.scale_attn_by_inverse_layer_idx:
        scale /= source.layer_idx + 1
    layer = MultiHeadAttention(
        embed_dim=source.embed_dim,
        num_heads=source.num_heads,
        head_dim=source.head_dim,
        dropout=float(source.attn_dropout.p),
        scale=scale,
        device=weight.device,
        dtype=weight.dtype,
    )
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    for projection, rows, numbers in zip(projections, weight.chunk(3), bias.chunk(3), strict=True):
        _copy(projection, rows, numbers)
    assert layer.out_proj is not None
    _copy(layer.out_proj, source.c_proj.weight.mT, source.c_proj.bias)
    return layer.train(module.training)


class RotaryAttention(nn.Module):
    """Grouped attention whose queries and keys are turned by their positions, as Llama does; made by `from_llama`.

    The turn depends on the position, so that no weights of a `MultiHeadAttention` could hold it: it is given with
    each call. The state_dict is that of the original: q_proj, k_proj, v_proj, o_proj.

    Source: rotary position embedding, arXiv:2104.09864, in the form of Llama: the halves of a head's columns are
        turned against each other.
    """

    def __init__(self, projections: dict[str, nn.Linear], *, head_dim: int, scale: float, dropout: float) -> None:
        super().__init__()
        self.q_proj, self.k_proj = projections["q_proj"], projections["k_proj"]
        self.v_proj, self.o_proj = projections["v_proj"], projections["o_proj"]
        self.num_heads = self.q_proj.out_features // head_dim
        self.num_kv_heads = self.k_proj.out_features // head_dim
        self.head_dim, self.scale, self.dropout = head_dim, scale, dropout

    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        *,
        mask: Mask = _CAUSAL,
    ) -> Tensor:
        """Attend within x.

        Args:
            x: (batch, length, features).
            position_embeddings: cosine and sine of each position's angles, (batch or 1, length, head_dim) each, such
                as `model.rotary_emb(x, position_ids)` gives.
            mask: which keys each query may see.

        Returns: (batch, length, features).

        Raises:
            ShapeError, DtypeError, MaskError: what does not fit, in words.
        """
        if x.dim() != 3 or x.shape[2] != self.q_proj.in_features:
            raise ShapeError(
                f"x has shape {tuple(x.shape)}.",
                f"Give (batch, length, features) with {self.q_proj.in_features} features.",
            )
        cosine, sine = position_embeddings
        for name, angles in (("cosine", cosine), ("sine", sine)):
            if (
                angles.dim() != 3
                or angles.shape[0] not in (1, len(x))
                or angles.shape[1:] != (x.shape[1], self.head_dim)
            ):
                raise ShapeError(
                    f"The {name} has shape {tuple(angles.shape)}.",
                    f"Give (batch or 1, length, head_dim) = {(len(x), x.shape[1], self.head_dim)}.",
                )
        q = _turned(split_heads(self.q_proj(x), self.num_heads), cosine, sine)  # (batch, heads, length, head_dim)
        k = _turned(split_heads(self.k_proj(x), self.num_kv_heads), cosine, sine)  # (batch, kv_heads, length, head_dim)
        v = split_heads(self.v_proj(x), self.num_kv_heads)  # (batch, kv_heads, length, head_dim)
        dropout = self.dropout if self.training else 0.0
        request: AttentionRequest = request_of(q, k, v, mask, scale=self.scale, dropout=dropout)
        output = attend(replace(request, owner=self)).output
        return self.o_proj(merge_heads(output))  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Say the head counts."""
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


def from_llama(module: nn.Module) -> RotaryAttention:
    """Make a layer with equal outputs of a Llama attention, its rotation included.

    `MultiHeadAttention` has no rotation, and without it outputs would not be equal: what comes is a
    `RotaryAttention`, which takes the position embeddings with each call, as the original does. It keeps no cache.

    Args:
        module: a `LlamaAttention`, for example `model.layers[0].self_attn`.

    Returns: a layer with copies of the weights, in train or eval mode as the module; causal unless told otherwise.

    Raises:
        ModelError: another class.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
    >>> llama = LlamaModel(LlamaConfig(vocab_size=5, num_hidden_layers=1, **sizes)).eval()
    >>> x = torch.randn(2, 5, 16)
    >>> turns = llama.rotary_emb(x, torch.arange(5)[None])
    >>> expected = llama.layers[0].self_attn(x, position_embeddings=turns, attention_mask=None)[0]
    >>> torch.allclose(from_llama(llama.layers[0].self_attn)(x, turns), expected, atol=1e-6)
    True
    """
    _refuse_unless_named(module, {"LlamaAttention"}, "from_llama", "the attention of a Llama layer")
    source: Any = module
    projections = {}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        linear = getattr(source, name)
        projections[name] = nn.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            device=linear.weight.device,
            dtype=linear.weight.dtype,
        )
        _copy(projections[name], linear.weight, linear.bias)
    made = RotaryAttention(
        projections, head_dim=source.head_dim, scale=source.scaling, dropout=float(source.attention_dropout)
    )
    return made.train(module.training)


def _turned(x_heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn each pair (column c, column c + head_dim / 2) by its position's angle."""
    left, right = x_heads.chunk(2, -1)
    return x_heads * cosine[:, None] + torch.cat([-right, left], -1) * sine[:, None]


def _copy(projection: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        projection.weight.copy_(weight)
        if bias is not None:
            projection.bias.copy_(bias)


def _refuse_unless_named(module: object, names: set[str], function: str, what: str) -> None:
    """Tell by the exact class, because a subclass may compute something else under the same parameters."""
    if type(module).__name__ not in names:
        raise ModelError(
            f"{function} was given a {type(module).__name__}, and takes {what}: {', '.join(sorted(names))}.",
            "Give that module of the model; to watch a whole model of any family use mh.observe(model).",
        )
