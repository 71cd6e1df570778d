"""Convert the attention modules of BERT, GPT-2, Llama and Qwen 3 in transformers to our layer, with equal outputs.

For a query that sees no key, the output projection receives 0 here, and the mean of all values in transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from multihead.compat.projections import copy_to_projections, reject_wrapped
from multihead.errors import ModelError
from multihead.layer import MultiHeadAttention
from multihead.layer.qk_norm import QKNorm
from multihead.masks import Causal
from multihead.rotary import Linear, Llama3, Rotary, Yarn

__all__ = ["from_bert", "from_gpt2", "from_llama", "from_qwen3"]

_CAUSAL = Causal()
# Families whose attention is a copy of BERT's.
_BERT_FAMILIES = ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra")


def from_bert(module: nn.Module) -> MultiHeadAttention:
    """Convert a BERT attention to our layer.

    A `BertSelfAttention` (or `BertCrossAttention`) becomes a layer that concatenates the heads, without an output
    projection. A `BertAttention` becomes a layer with the output projection `output.dense`, without its dropout,
    residual and LayerNorm. The same classes of RoBERTa, XLM-RoBERTa, CamemBERT and ELECTRA are accepted too. For
    padding, pass `lengths=`, or `mask=masks.Keep(attention_mask.bool(), "batch keys")`; for a decoder use
    `mask=masks.Causal()`.

    Args:
        module: the attention of one layer, for example `model.encoder.layer[0].attention`.

    Returns:
        a layer with copies of the weights, in the same mode (train or eval) as the module.

    Raises:
        ModelError: the module is of another class.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=5, hidden_size=12, num_attention_heads=3, num_hidden_layers=1)
    >>> bert = BertModel(config).eval()
    >>> x = torch.randn(2, 4, 12)
    >>> attention = bert.encoder.layer[0].attention
    >>> torch.allclose(from_bert(attention.self)(x), attention.self(x)[0], atol=1e-6)
    True
    """
    heads = ("SelfAttention", "CrossAttention")
    bare = {f"{family}{kind}" for family in _BERT_FAMILIES for kind in heads}
    whole = {f"{family}Attention" for family in _BERT_FAMILIES}
    _check_class_name(module, bare | whole, "from_bert", "the attention of a BERT layer, or its .self")
    source: Any = module
    attention, dense = (source.self, source.output.dense) if type(module).__name__ in whole else (source, None)
    query, key = attention.query, attention.key
    reject_wrapped(query=query, key=key, value=attention.value, dense=dense)
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
    linears = (query, key, attention.value, *([] if dense is None else [dense]))
    copy_to_projections(layer, ((linear.weight, linear.bias) for linear in linears))
    return layer.train(module.training)


def from_gpt2(module: nn.Module) -> MultiHeadAttention:
    """Convert a GPT-2 attention to our layer.

    GPT-2 is causal: call the layer with `mask=masks.Causal()`, or with a memory if the module is a cross-attention. The
    dropout after the output projection is not part of our layer.

    Args:
        module: a `GPT2Attention`, for example `model.h[0].attn`.

    Returns:
        a layer with copies of the weights, in the same mode (train or eval) as the module.

    Raises:
        ModelError: the module is of another class.

    >>> from transformers import GPT2Config, GPT2Model
    >>> gpt2 = GPT2Model(GPT2Config(vocab_size=5, n_embd=12, n_head=3, n_layer=1)).eval()
    >>> x = torch.randn(2, 4, 12)
    >>> torch.allclose(from_gpt2(gpt2.h[0].attn)(x, mask=_CAUSAL), gpt2.h[0].attn(x)[0], atol=1e-6)
    True
    """
    _check_class_name(module, {"GPT2Attention"}, "from_gpt2", "the attention of a GPT-2 layer")
    source: Any = module
    reject_wrapped(c_attn=source.c_attn, q_attn=getattr(source, "q_attn", None), c_proj=source.c_proj)
    # GPT-2's Conv1D computes x @ weight, with weight (features in, features out).
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
    of_heads = zip(weight.chunk(3), bias.chunk(3), strict=True)
    copy_to_projections(layer, [*of_heads, (source.c_proj.weight.mT, source.c_proj.bias)])
    return layer.train(module.training)


def from_llama(module: nn.Module) -> MultiHeadAttention:
    """Convert a Llama attention to our layer, including its rotary embedding.

    Llama is causal: call the layer with `mask=masks.Causal()`. The original receives cosines and sines that were
    computed in float32; our layer computes them in float64, which is more exact at large positions.

    Args:
        module: a `LlamaAttention`, for example `model.layers[0].self_attn`, whose config has the rope type "default",
            "linear", "llama3" or "yarn".

    Returns:
        a layer with copies of the weights, in the same mode (train or eval) as the module.

    Raises:
        ModelError: the module is of another class, or has another rope type.

    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
    >>> llama = LlamaModel(LlamaConfig(vocab_size=5, num_hidden_layers=1, **sizes)).eval()
    >>> x = torch.randn(2, 5, 16)
    >>> turns = llama.rotary_emb(x, torch.arange(5)[None])
    >>> expected = llama.layers[0].self_attn(x, position_embeddings=turns, attention_mask=None)[0]
    >>> torch.allclose(from_llama(llama.layers[0].self_attn)(x, mask=_CAUSAL), expected, atol=1e-6)
    True
    """
    _check_class_name(module, {"LlamaAttention"}, "from_llama", "the attention of a Llama layer")
    return _convert_with_rotary(module, "from_llama", None)


def from_qwen3(module: nn.Module) -> MultiHeadAttention:
    """Convert a Qwen 3 attention to our layer, including its rotary embedding and the norms of queries and keys.

    Qwen 3 is causal: call the layer with `mask=masks.Causal()`, and where the module has a `sliding_window`, with
    `mask=masks.Causal() & masks.Window(module.sliding_window)`.

    Args:
        module: a `Qwen3Attention`, for example `model.layers[0].self_attn`; rope types as in `from_llama`.

    Returns:
        a layer with copies of the weights, in the same mode (train or eval) as the module.

    Raises:
        ModelError: the module is of another class, or has another rope type.

    >>> from transformers import Qwen3Config, Qwen3Model
    >>> sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
    >>> qwen = Qwen3Model(Qwen3Config(vocab_size=5, num_hidden_layers=1, head_dim=8, **sizes)).eval()
    >>> from_qwen3(qwen.layers[0].self_attn)(torch.randn(2, 5, 16), mask=_CAUSAL).shape
    torch.Size([2, 5, 16])
    """
    _check_class_name(module, {"Qwen3Attention"}, "from_qwen3", "the attention of a Qwen 3 layer")
    source: Any = module
    layer = _convert_with_rotary(module, "from_qwen3", QKNorm("rms", eps=float(source.q_norm.variance_epsilon)))
    norms: Any = layer.qk_norm
    with torch.no_grad():
        norms.q_weight.copy_(source.q_norm.weight)
        norms.k_weight.copy_(source.k_norm.weight)
    return layer


def _convert_with_rotary(source: Any, function: str, qk_norm: QKNorm | None) -> MultiHeadAttention:
    """Convert an attention with a rotary embedding, and perhaps norms of queries and keys, to our layer."""
    projections = (source.q_proj, source.k_proj, source.v_proj, source.o_proj)
    reject_wrapped(**dict(zip(("q_proj", "k_proj", "v_proj", "o_proj"), projections, strict=True)))
    layer = MultiHeadAttention(
        embed_dim=source.q_proj.in_features,
        num_heads=source.q_proj.out_features // source.head_dim,
        num_kv_heads=source.k_proj.out_features // source.head_dim,
        head_dim=source.head_dim,
        bias=any(linear.bias is not None for linear in projections),
        dropout=float(source.attention_dropout),
        scale=source.scaling,
        rotary=_rotary_of_config(source.config, function),
        qk_norm=qk_norm,
        device=source.q_proj.weight.device,
        dtype=source.q_proj.weight.dtype,
    )
    copy_to_projections(layer, ((linear.weight, linear.bias) for linear in projections))
    return layer.train(source.training)


def _rotary_of_config(config: Any, function: str) -> Rotary:
    """Build the rotary embedding that the config of a model describes."""
    rope = config.rope_parameters
    kind, base = rope["rope_type"], float(rope["rope_theta"])
    if (share := rope.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(
            f"{function} got a layer whose partial_rotary_factor is {share}, and its class rotates all columns.",
            "Set partial_rotary_factor to 1.0 in the config of the model.",
        )
    length = rope.get("original_max_position_embeddings")
    scaling: Linear | Llama3 | Yarn | None = None
    if kind == "linear":
        scaling = Linear(rope["factor"])
    elif kind == "llama3":
        scaling = Llama3(rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], length)
    elif kind == "yarn":
        # transformers uses mscale and mscale_all_dim only if both are set.
        scales = {name: rope.get(name) for name in ("mscale", "mscale_all_dim")}
        scaling = Yarn(
            rope["factor"] or config.max_position_embeddings / length,
            length,
            beta_fast=rope.get("beta_fast") or 32.0,
            beta_slow=rope.get("beta_slow") or 1.0,
            attention_factor=rope.get("attention_factor"),
            truncate=rope.get("truncate", True),
            **(scales if all(scales.values()) else {}),
        )
    elif kind != "default":
        reason = {
            "dynamic": "its frequencies change as the text grows, and keys that were rotated before would be wrong",
            "longrope": "its frequencies change at a length, and keys that were rotated before would be wrong",
        }.get(kind, "this scaling is not implemented")
        raise ModelError(
            f"{function} got a layer whose rope_type is {kind!r}: {reason}.",
            'Give one with "default", "linear", "llama3" or "yarn"; to observe any model use mh.observe(model).',
        )
    return Rotary(base=base, scaling=scaling)


def _check_class_name(module: object, names: set[str], function: str, what: str) -> None:
    """Reject a module whose exact class is not in `names`: a subclass may compute something else."""
    if type(module).__name__ not in names:
        raise ModelError(
            f"{function} got a {type(module).__name__}, and converts {what}: {', '.join(sorted(names))}.",
            "Give that module of the model; to observe a whole model of any family use mh.observe(model).",
        )
