"""Write a tiny language model as a GGUF file, as llama.cpp keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from torch import Tensor


def written(file: Path, *, heads: int = 4, kv_heads: int = 2, layers: int = 2) -> Path:
    """Write a Llama of random weights whose tokens are bytes and "at"; it takes 300 tokens."""
    from gguf import GGUFWriter, TokenType

    embed_dim, hidden, words = 32, 48, ["<|start|>", "<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "at"]
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(300)
    writer.add_embedding_length(embed_dim)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(words) - 2))
    writer.add_token_merges(["a t"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    seeded = torch.Generator().manual_seed(0)
    head_dim = embed_dim // heads
    sizes = {
        "attn_q": (embed_dim, embed_dim),
        "attn_k": (kv_heads * head_dim, embed_dim),
        "attn_v": (kv_heads * head_dim, embed_dim),
        "attn_output": (embed_dim, embed_dim),
        "ffn_gate": (hidden, embed_dim),
        "ffn_up": (hidden, embed_dim),
        "ffn_down": (embed_dim, hidden),
    }
    tensors = {"token_embd": torch.randn(len(words), embed_dim, generator=seeded), "output_norm": torch.ones(embed_dim)}
    for layer in range(layers):
        of_layer = {name: torch.randn(*size, generator=seeded) / 6 for name, size in sizes.items()}
        norms = {name: torch.ones(embed_dim) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{layer}.{name}": tensor for name, tensor in (of_layer | norms).items()}
    for name, tensor in tensors.items():
        writer.add_tensor(f"{name}.weight", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def saved(file: Path, model: Any, architecture: str, entries: Mapping[str, Any], **tensors: Tensor) -> Path:
    """Write a model of transformers as llama.cpp's converter does: sizes, some entries, and all parameters.

    Args:
        file: the file to write.
        model: the model.
        architecture: the name of its architecture in such files.
        entries: entry without the prefix -> value; an entry with a dot at its start has no prefix to add.
        tensors: further tensors, "__" in place of a dot in their names.
    """
    from gguf import MODEL_ARCH_NAMES, GGUFWriter, TokenType, get_tensor_name_map

    config, tokens = model.config, [*sorted(pre_tokenizers.ByteLevel.alphabet())][: model.config.vocab_size]
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    writer = GGUFWriter(file, architecture)
    sizes = {
        "context_length": getattr(config, "max_position_embeddings", 512),
        "embedding_length": config.hidden_size,
        "block_count": layers,
        "feed_forward_length": next(
            (getattr(config, name) for name in ("intermediate_size", "d_ff") if hasattr(config, name)),
            4 * config.hidden_size,
        ),
        "attention.head_count": heads,
        "vocab_size": config.vocab_size,
    }
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(["a t"])
    for name, value in {**sizes, **entries}.items():
        key = name[1:] if name.startswith(".") else f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    (number,) = (each for each, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, layers)
    for name, parameter in _with_split_experts(model):
        known = name.removeprefix("transformer.") if architecture == "bloom" else name
        found, tensor = names.get_name(known, try_suffixes=(".weight", ".bias")), parameter.detach().float()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = heads if "q_proj" in name else config.num_key_value_heads
            tensor = tensor.unflatten(0, (rows, 2, -1)).transpose(1, 2).flatten(0, 2)  # pairs side by side
        if architecture in ("gemma2", "gemma3", "nemotron") and "norm" in name and name.endswith(".weight"):
            tensor = tensor + 1
        if architecture == "gpt2" and tensor.dim() == 2 and ".h." in name:
            tensor = tensor.T
        if architecture == "bloom" and "query_key_value" in name:
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        if architecture == "lfm2" and "conv.conv" in name:
            tensor = tensor.squeeze(1)
        writer.add_tensor(found, tensor.contiguous().numpy())
    for name, tensor in tensors.items():
        writer.add_tensor(name.replace("__", "."), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _with_split_experts(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and parameters of a model; the gates of its experts and what they gate are two tensors."""
    for name, parameter in model.named_parameters():
        layer, is_joined, _ = name.partition("experts.gate_up_proj")
        if is_joined:
            yield from zip(
                (f"{layer}experts.{one}_proj.weight" for one in ("gate", "up")), parameter.chunk(2, dim=1), strict=True
            )
        else:
            yield f"{name}.weight" if name.endswith("experts.down_proj") else name, parameter
