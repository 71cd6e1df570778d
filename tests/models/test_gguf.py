"""What a GGUF file says about attention and positions reaches the model, or the file is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from torch import Tensor

from multihead.errors import ModelError
from multihead.models.loading import encode, load
from tests.gguf_file import saved

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False}
SHARED = {"attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 10000.0}


class Case(NamedTuple):
    """A model, the name of its architecture, and entries and tensors of its file."""

    config: Any
    architecture: str
    entries: dict[str, Any]
    tensors: Mapping[str, Tensor] = MappingProxyType({})


def scaled(**parameters: Any) -> dict[str, Any]:
    return {"rope_theta": 10000.0, "rope_type": "default", **parameters}


def llama(**more: Any) -> Any:
    return hf.LlamaConfig(**{**GROUPED, "rms_norm_eps": 1e-6, "head_dim": 8, **more})


def gemma3(**more: Any) -> Any:
    return hf.Gemma3TextConfig(
        **{**GROUPED, "num_hidden_layers": 3, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 5, **more},
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        },
    )


def llama3_factors() -> Tensor:
    """The divisors that llama.cpp's converter writes for Llama 3.1: factor 8, low 1, high 4, original length 64."""
    length = 2 * math.pi * 10000 ** (torch.arange(0, 8, 2).double() / 8)
    smooth = ((64 / length - 1) / (4 - 1)).clamp(0, 1)
    return 1 / ((1 - smooth) / 8 + smooth)


CASES = {
    "no scaling": Case(llama(), "llama", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
    "linear": Case(
        llama(rope_parameters=scaled(rope_type="linear", factor=4.0)),
        "llama",
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "linear, in the old entry": Case(
        llama(rope_parameters=scaled(rope_type="linear", factor=4.0)), "llama", {"rope.scale_linear": 4.0}
    ),
    "linear by default": Case(
        llama(rope_parameters=scaled(rope_type="linear", factor=2.0)), "llama", {"rope.scaling.factor": 2.0}
    ),
    "yarn": Case(
        llama(rope_parameters=scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)),
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    ),
    "yarn with all its entries": Case(
        llama(
            rope_parameters=scaled(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                attention_factor=1.5 * (0.1 * math.log(4) + 1),
                beta_fast=8.0,
                beta_slow=2.0,
            )
        ),
        "llama",
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.5,
            "rope.scaling.yarn_beta_fast": 8.0,
            "rope.scaling.yarn_beta_slow": 2.0,
            "rope.scaling.finetuned": True,
        },
    ),
    "Llama 3.1": Case(
        llama(
            rope_parameters=scaled(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
        "llama",
        {},
        {"rope_freqs__weight": llama3_factors()},
    ),
    "a head size of its own": Case(
        llama(head_dim=16), "llama", {"attention.key_length": 16, "attention.value_length": 16}
    ),
    "biases": Case(llama(attention_bias=True), "llama", {}),
    "Qwen 2": Case(
        hf.Qwen2Config(
            **GROUPED, rope_parameters=scaled(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
        ),
        "qwen2",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "Qwen 3": Case(hf.Qwen3Config(**GROUPED, head_dim=16), "qwen3", {"attention.key_length": 16}),
    "Phi 3": Case(
        hf.Phi3Config(
            **GROUPED,
            pad_token_id=0,
            rms_norm_eps=1e-6,
            sliding_window=6,
            original_max_position_embeddings=128,
            rope_parameters=scaled(
                rope_type="longrope",
                short_factor=[1.0, 2.0],
                long_factor=[3.0, 4.0],
                attention_factor=1.25,
                original_max_position_embeddings=128,
                partial_rotary_factor=0.5,
            ),
        ),
        "phi3",
        {
            ".tokenizer.ggml.padding_token_id": 0,
            "rope.dimension_count": 4,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": 1.25,
            "attention.sliding_window": 6,
        },
        {"rope_factors_short__weight": torch.tensor([1.0, 2.0]), "rope_factors_long__weight": torch.tensor([3.0, 4.0])},
    ),
    "Gemma 2": Case(
        hf.Gemma2Config(
            **{**GROUPED, "tie_word_embeddings": True},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=4,
            attn_logit_softcapping=20.0,
            final_logit_softcapping=10.0,
        ),
        "gemma2",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 4,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "Gemma 3": Case(
        gemma3(tie_word_embeddings=True),
        "gemma3",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.sliding_window": 5,
            "attention.sliding_window_pattern": [True, False, True],
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 20000.0,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "StarCoder 2": Case(
        hf.Starcoder2Config(**GROUPED, norm_epsilon=1e-3, sliding_window=5, rope_parameters=scaled(rope_theta=500.0)),
        "starcoder2",
        {"attention.layer_norm_epsilon": 1e-3, "rope.freq_base": 500.0, "attention.sliding_window": 5},
    ),
    "StableLM": Case(
        hf.StableLmConfig(
            **GROUPED, layer_norm_eps=1e-3, rope_parameters=scaled(rope_theta=500.0, partial_rotary_factor=0.5)
        ),
        "stablelm",
        {"attention.layer_norm_epsilon": 1e-3, "rope.freq_base": 500.0, "rope.dimension_count": 4},
    ),
    "Nemotron": Case(
        hf.NemotronConfig(
            **GROUPED, head_dim=8, norm_eps=1e-2, rope_parameters=scaled(rope_theta=500.0, partial_rotary_factor=1.0)
        ),
        "nemotron",
        {"attention.layer_norm_epsilon": 1e-2, "rope.freq_base": 500.0, "rope.dimension_count": 8},
    ),
    "GPT-2": Case(
        hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1),
        "gpt2",
        {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": 4},
    ),
    "Falcon": Case(
        hf.FalconConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512
        ),
        "falcon",
        {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": 1},
    ),
    "BLOOM": Case(
        hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
        "bloom",
        {"attention.layer_norm_epsilon": 1e-5, "attention.head_count_kv": 4},
    ),
    "T5": Case(
        hf.T5Config(
            vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=4, feed_forward_proj="gated-gelu"
        ),
        "t5",
        {
            "attention.head_count_kv": 4,
            "attention.key_length": 16,
            "attention.value_length": 16,
            "attention.layer_norm_epsilon": 1e-6,
            "attention.relative_buckets_count": 32,
        },
    ),
    "Qwen 3 with experts": Case(
        hf.Qwen3MoeConfig(**GROUPED, head_dim=16, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
        "qwen3moe",
        {"attention.key_length": 16, "attention.value_length": 16, "expert_count": 4, "expert_used_count": 2},
    ),
    "MiniMax-M2": Case(
        hf.MiniMaxM2Config(
            **GROUPED,
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters=scaled(partial_rotary_factor=0.5),
        ),
        "minimax-m2",
        {
            "attention.key_length": 16,
            "attention.value_length": 16,
            "rope.dimension_count": 8,
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_gating_func": 2,
        },
        {f"blk__{layer}__exp_probs_b__bias": torch.zeros(4) for layer in (0, 1)},
    ),
    "LFM2": Case(
        hf.Lfm2Config(
            **{**GROUPED, "tie_word_embeddings": True},
            layer_types=["conv", "full_attention"],
            norm_eps=1e-6,
            block_auto_adjust_ff_dim=False,
            rope_parameters=scaled(),
        ),
        "lfm2",
        {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3},
    ),
}


def written(case: Case, file: Path) -> Any:
    """Write the file of a case, and return the model that it holds, with eager attention."""
    torch.manual_seed(0)
    kind = hf.AutoModel if case.config.is_encoder_decoder else hf.AutoModelForCausalLM
    model = kind.from_config(case.config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and "ln_" not in name:
                parameter.mul_(8 if parameter.dim() > 1 else 1).add_(0.1 if parameter.dim() == 1 else 0)
    entries = {**(SHARED if case.architecture != "gpt2" else {}), **case.entries}
    if "attention.layer_norm_epsilon" in entries:
        entries.pop("attention.layer_norm_rms_epsilon", None)
    saved(file, model, case.architecture, entries, **case.tensors)
    return model


@pytest.mark.filterwarnings("ignore")  # of transformers about the ids of special tokens
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_one_that_the_file_describes(name: str, tmp_path: Path) -> None:
    model = written(CASES[name], tmp_path / "model.gguf")
    translates = model.config.is_encoder_decoder
    loaded = load(str(tmp_path / "model.gguf"), head=None if translates else "language").model
    ids = torch.randint(64, (2, 40), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": ids, **({"decoder_input_ids": ids} if translates else {})}
    for each in (loaded, model):
        each.set_experts_implementation("eager")  # PyTorch's product of experts has no float64
    with torch.no_grad():
        torch.testing.assert_close(loaded.double()(**given)[0], model.double()(**given)[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "frequencies", "magnitude"),
    [
        ("linear", lambda base: base / 4, 1.0),
        ("Llama 3.1", lambda base: base / llama3_factors(), 1.0),
        ("yarn", lambda base: base * (YARN_RAMP / 4 + (1 - YARN_RAMP)), 0.1 * math.log(4) + 1),
    ],
)
def test_the_rotary_frequencies_are_those_of_the_definition(
    name: str, frequencies: Any, magnitude: float, tmp_path: Path
) -> None:
    written(CASES[name], tmp_path / "model.gguf")
    rotary = load(str(tmp_path / "model.gguf")).model.rotary_emb
    base = 10000 ** -(torch.arange(0, 8, 2).double() / 8)
    torch.testing.assert_close(rotary.inv_freq.double(), frequencies(base), rtol=1e-6, atol=0)
    assert rotary.attention_scaling == pytest.approx(magnitude)


def _yarn_ramp() -> Tensor:
    """How far each frequency is interpolated, arXiv:2309.00071: between 32 and 1 rotations in 64 tokens."""

    def place(rotations: float) -> float:
        return 8 * math.log(64 / (rotations * 2 * math.pi)) / (2 * math.log(10000))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), 7)
    return ((torch.arange(4).double() - low) / (high - low)).clamp(0, 1)


YARN_RAMP = _yarn_ramp()


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("attention.sliding_window", 5),
        ("rope.dimension_count", 4),
        ("attention.scale", 0.5),
        ("attention.clamp_kqv", 8.0),
        ("attention.max_alibi_bias", 8.0),
        ("attention.value_length", 4),
        ("attention.causal", False),
        ("attn_logit_softcapping", 50.0),
        ("rope.scaling.type", "dynamic"),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("rope.dimension_sections", [1, 1, 2, 0]),
        ("rope.freq_base_swa", 100.0),
        ("GPT-2:attention.head_count_kv", 2),
        ("BLOOM:attention.head_count_kv", 2),
        ("Falcon:attention.head_count_kv", 2),
        ("T5:attention.value_length", 8),
    ],
)
def test_an_entry_of_attention_that_nobody_reads_is_refused(entry: str, value: Any, tmp_path: Path) -> None:
    name, _, of_family = entry.rpartition(":")
    case = CASES[name] if name else Case(llama(), "llama", {})
    written(case._replace(entries={**case.entries, of_family: value}), tmp_path / "model.gguf")
    with pytest.raises(ModelError) as caught:
        load(str(tmp_path / "model.gguf"))
    assert str(caught.value) == (
        f"model.gguf cannot be read: its entry {case.architecture}.{of_family} is {_as_read(value)!r}, "
        "which this model of transformers does not have. Give the model as a folder that model.save_pretrained wrote."
    )


def _as_read(value: Any) -> Any:
    """A number as float32 keeps it."""
    return float(torch.tensor(value)) if isinstance(value, float) else value


def test_a_tensor_of_attention_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    tensors = {f"blk__{layer}__attn_q_norm__weight": torch.ones(8) for layer in (0, 1)}
    written(Case(llama(), "llama", {}, tensors), tmp_path / "model.gguf")
    with pytest.raises(ModelError) as caught:
        load(str(tmp_path / "model.gguf"))
    assert str(caught.value) == (
        "model.gguf cannot be read: LlamaModel has no parameter for its tensor blk.0.attn_q_norm.weight and 1 more. "
        "Give the model as a folder that model.save_pretrained wrote."
    )


@pytest.mark.filterwarnings("ignore")  # of transformers about the ids of special tokens
def test_a_file_without_a_vocabulary_that_can_be_read_is_named(tmp_path: Path) -> None:
    written(CASES["linear"], tmp_path / "model.gguf")  # of the 256 bytes it has 64
    loaded = load(str(tmp_path / "model.gguf"))
    with pytest.raises(ModelError) as caught:
        encode(loaded, "the key")
    assert str(caught.value) == (
        f"{tmp_path / 'model.gguf'} has no vocabulary that transformers can read. "
        "Convert the model again; or in Python, give the loaded model and tokenizer=."
    )


def test_entries_of_other_kinds_and_those_that_change_nothing_are_no_reason_to_refuse(tmp_path: Path) -> None:
    entries = {
        ".general.anything": "new",
        ".tokenizer.ggml.anything": 3,
        "anything": 7,
        "attention.sliding_window": 512,  # as long as the context
        "attention.scale": 8**-0.5,
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "attention.value_length": 8,
        "rope.dimension_count": 8,
        "rope.scaling.factor": 1.0,
    }
    tensors = {"rope_freqs__weight": torch.ones(4), "blk__0__attn_rot_embd": torch.ones(4)}
    model = written(Case(llama(), "llama", entries, tensors), tmp_path / "model.gguf")
    loaded = load(str(tmp_path / "model.gguf"), head="language").model
    ids = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=2e-4, rtol=2e-4)
