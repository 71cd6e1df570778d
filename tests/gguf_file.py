"""Write a tiny language model as a GGUF file, as llama.cpp keeps them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import pre_tokenizers


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
