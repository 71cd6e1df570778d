"""Tiny random models of Hugging Face families, made the same each time, and sharp enough for attention to vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCABULARY, LENGTH = 100, 12
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
}
DECODER = {**ENCODER, "num_key_value_heads": 2, "head_dim": 8}


def _bert() -> Any:
    return hf.BertModel(hf.BertConfig(**ENCODER, vocab_size=VOCABULARY))


def _albert() -> Any:
    sizes = {**ENCODER, "num_hidden_layers": 3}
    return hf.AlbertModel(hf.AlbertConfig(**sizes, **TEXT, embedding_size=16))


def _modernbert() -> Any:
    config = hf.ModernBertConfig(
        **{**ENCODER, "num_hidden_layers": 4},
        **TEXT,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=6,
        global_attn_every_n_layers=3,
    )
    return hf.ModernBertModel(config)


def _gpt2() -> Any:
    config = hf.GPT2Config(**TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.4)
    return hf.GPT2LMHeadModel(config)


def _llama() -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **TEXT))


def _gemma2() -> Any:
    config = hf.Gemma2Config(**DECODER, **TEXT, sliding_window=5, attn_logit_softcapping=3.0, query_pre_attn_scalar=8)
    return hf.Gemma2ForCausalLM(config)


def _gpt_oss() -> Any:
    config = hf.GptOssConfig(
        **DECODER,
        **TEXT,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = hf.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _t5() -> Any:
    config = hf.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=20,
    )
    model = hf.T5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            torch.nn.init.normal_(parameter)
    return model


def _whisper() -> Any:
    config = hf.WhisperConfig(
        **TEXT,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=32,
        decoder_start_token_id=1,
        init_std=0.4,
    )
    return hf.WhisperForConditionalGeneration(config)


def _vit() -> Any:
    sizes = {name: value for name, value in ENCODER.items() if name != "max_position_embeddings"}
    return hf.ViTModel(hf.ViTConfig(**sizes, image_size=16, patch_size=4))


FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": _bert,
    "albert": _albert,
    "modernbert": _modernbert,
    "gpt2": _gpt2,
    "llama": _llama,
    "gemma2": _gemma2,
    "gpt_oss": _gpt_oss,
    "t5": _t5,
    "whisper": _whisper,
    "vit": _vit,
}
DECODERS = ("gpt2", "llama", "gemma2", "gpt_oss")
PADDED = ("bert", "albert", "modernbert", *DECODERS, "t5")
CALLS = {"albert": 3, "modernbert": 4, "t5": 6, "whisper": 6}  # attention calls a pass; 2 where not said


def family(name: str) -> Any:
    """Make a tiny model of a family, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FAMILIES[name]().eval()


def of_one_layer(model: Any) -> Any:
    """Leave a BERT or a Llama one of its equal layers, for tests that compile it: another takes as long again."""
    stack = model.encoder if hasattr(model, "encoder") else model.model
    name = "layer" if hasattr(stack, "layer") else "layers"
    setattr(stack, name, getattr(stack, name)[:1])
    model.config.num_hidden_layers = 1
    return model


def batch_of(name: str, *, padding: str = "none") -> dict[str, torch.Tensor]:
    """Make a batch of two samples; with padding on the "right" or "left" the second has 5 tokens less."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    if name == "whisper":
        sound = torch.randn(2, 8, 20, generator=generator)
        return {"input_features": sound, "decoder_input_ids": ids[:, :7]}
    batch = {"input_ids": ids}
    if name == "t5":
        batch["decoder_input_ids"] = ids.flip(1)[:, :9]
    if padding != "none":
        mask = torch.ones_like(ids)
        mask[1, slice(7, None) if padding == "right" else slice(0, 5)] = 0
        batch["attention_mask"] = mask
        if name == "t5":
            target = torch.ones_like(batch["decoder_input_ids"])
            target[1, slice(6, None) if padding == "right" else slice(0, 3)] = 0
            batch["decoder_attention_mask"] = target
    return batch
