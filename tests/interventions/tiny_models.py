"""Tiny random models of all kinds of attention, in float64, with a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from tests.families import DECODER, ENCODER, TEXT, batch_of, family
from tests.families import FAMILIES as SHARED
from tests.interventions.changed_eager import compute_in_float64


def _deepseek_v3() -> Any:
    sizes = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,  # not the width of q and k
        "first_k_dense_replace": 2,
    }
    config = hf.DeepseekV3Config(**{**ENCODER, "num_key_value_heads": 4}, **TEXT, **sizes)
    return hf.DeepseekV3ForCausalLM(config)


def _phi3() -> Any:
    return hf.Phi3ForCausalLM(hf.Phi3Config(**{**ENCODER, "num_key_value_heads": 2}, **TEXT, sliding_window=None))


def _swin() -> Any:
    sizes = {"embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 2, "initializer_range": 0.4}
    return hf.SwinModel(hf.SwinConfig(**sizes, image_size=16, patch_size=2))


_OWN: dict[str, Callable[[], Any]] = {
    "deepseek_v3": _deepseek_v3,
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, **TEXT, sliding_window=5)),
    "phi3": _phi3,
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**ENCODER, **TEXT)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, **TEXT)),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            **TEXT,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            decoder_start_token_id=1,
            init_std=0.4,
        )
    ),
    "swin": _swin,
}
IMAGES = ("vit", "swin")
FAMILIES = (*SHARED, *_OWN)
PADDED = ("bert", "albert", "modernbert", "gpt2", "llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral", "t5", "bart")
DECODERS = ("gpt2", "llama", "gemma2", "gpt_oss", "deepseek_v3", "mistral", "phi3", "gpt_neox", "qwen3")


def double(name: str, patch: pytest.MonkeyPatch) -> Any:
    """Make a tiny model of a family, whose whole computation is in float64, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = family(name) if name in SHARED else _OWN[name]()
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # grouped products have no float64
    return compute_in_float64(model, patch)


def batch(name: str, *, padding: str = "none") -> dict[str, Tensor]:
    """Make a batch of two samples; with padding the second has 5 tokens less."""
    shared = batch_of({"swin": "vit", "bart": "t5"}.get(name, name), padding=padding)
    return {key: each.double() if each.is_floating_point() else each for key, each in shared.items()}


def real_queries(name: str, inputs: dict[str, Tensor], call: int, output: Tensor) -> Tensor:
    """Find the queries of a call that are not padding, (batch, queries) bool, from its output (batch, queries, ...)."""
    in_decoder = "decoder_input_ids" in inputs and call >= 2
    mask = inputs.get("decoder_attention_mask" if in_decoder else "attention_mask")
    return torch.ones(output.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
