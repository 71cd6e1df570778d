"""Rotated queries and keys against transformers and the reference of ONNX."""

from __future__ import annotations

from typing import Any

import onnx.reference.ops.op_rotary_embedding as onnx_rotary
import pytest
import torch
from torch import Tensor
from transformers import CohereConfig, GPTNeoXConfig, LlamaConfig
from transformers.models.cohere import modeling_cohere
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gptj import modeling_gptj
from transformers.models.llama import modeling_llama

from multihead.rotary import Linear, Llama3, Rotary, Yarn
from tests.oracle import difference
from tests.rotary.turning import HEAD_DIM, HEADS, POSITIONS, both_forms, drawn, oracle


class TestBesideOthers:
    """Their angles are computed in float32, so they are compared at near positions."""

    def turns(self, embedding: Any, config: Any, x: Tensor, positions: Tensor) -> Any:
        return embedding(config)(x, positions)

    @pytest.mark.parametrize(
        ("rotary", "parameters"),
        [
            (Rotary(), {"rope_type": "default", "rope_theta": 10_000.0}),
            (Rotary(base=500_000.0), {"rope_type": "default", "rope_theta": 500_000.0}),
            (Rotary(scaling=Linear(4.0)), {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}),
            (
                Rotary(scaling=Llama3(8.0, original_length=64)),
                {
                    "rope_type": "llama3",
                    "rope_theta": 10_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
            (
                Rotary(scaling=Yarn(4.0, 64)),
                {
                    "rope_type": "yarn",
                    "rope_theta": 10_000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            ),
        ],
        ids=["default", "another base", "linear", "llama3", "yarn"],
    )
    def test_llama(self, rotary: Rotary, parameters: dict[str, Any]) -> None:
        sizes = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "max_position_embeddings": 256}
        config = LlamaConfig(**sizes, rope_parameters=parameters)
        q, k = drawn(torch.float32), drawn(torch.float32)
        turns = self.turns(modeling_llama.LlamaRotaryEmbedding, config, q, POSITIONS)
        theirs = modeling_llama.apply_rotary_pos_emb(q, k, *turns)
        ours = rotary.rotate_both(q, k, POSITIONS)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)

    def test_gpt_neox_rotates_some_columns(self) -> None:
        parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
        config = GPTNeoXConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, rope_parameters=parameters)
        q, k = drawn(torch.float32), drawn(torch.float32)
        turns = self.turns(modeling_gpt_neox.GPTNeoXRotaryEmbedding, config, q, POSITIONS)
        theirs = modeling_gpt_neox.apply_rotary_pos_emb(q, k, *turns)
        torch.testing.assert_close(Rotary(dim=4).rotate_both(q, k, POSITIONS), theirs, rtol=0, atol=2e-5)

    def test_gpt_j_rotates_adjacent_columns(self) -> None:
        x = drawn(torch.float32)
        sine, cosine = modeling_gptj.create_sinusoidal_positions(100, 4)[POSITIONS].chunk(2, -1)
        theirs = modeling_gptj.apply_rotary_pos_emb(x[..., :4].transpose(1, 2), sine, cosine).transpose(1, 2)
        ours = Rotary(dim=4, interleaved=True).rotate(x, POSITIONS)
        torch.testing.assert_close(ours[..., :4], theirs, rtol=0, atol=2e-5)
        assert torch.equal(ours[..., 4:], x[..., 4:])

    def test_cohere_rotates_adjacent_columns(self) -> None:
        config = CohereConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS)
        q, k = drawn(torch.float32), drawn(torch.float32)
        turns = self.turns(modeling_cohere.CohereRotaryEmbedding, config, q, POSITIONS)
        theirs = modeling_cohere.apply_rotary_pos_emb(q, k, *turns)
        ours = Rotary(base=config.rope_parameters["rope_theta"], interleaved=True).rotate_both(q, k, POSITIONS)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)

    @both_forms
    @pytest.mark.parametrize("dim", [4, 8])
    def test_onnx(self, dim: int, interleaved: bool) -> None:
        x, rotary = drawn(), Rotary(dim=dim, interleaved=interleaved)
        angles = torch.arange(100)[:, None] * torch.tensor(rotary.frequencies(HEAD_DIM), dtype=torch.float64)
        theirs = onnx_rotary.rotary_embedding(
            x.numpy(),
            angles.cos().numpy(),
            angles.sin().numpy(),
            POSITIONS.numpy(),
            interleaved=int(interleaved),
            rotary_embedding_dim=dim,
        )
        torch.testing.assert_close(rotary.rotate(x, POSITIONS), torch.tensor(theirs), rtol=0, atol=1e-14)

    def test_far_positions_are_more_exact_than_theirs(self) -> None:
        x, far = drawn(torch.float32), POSITIONS + 60_000
        config = LlamaConfig(hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS)
        turns = self.turns(modeling_llama.LlamaRotaryEmbedding, config, x, far)
        theirs, _ = modeling_llama.apply_rotary_pos_emb(x, x, *turns)
        exact = oracle(Rotary(), x, far)
        assert difference(theirs, exact) > 1e-4
        assert difference(Rotary().rotate(x, far), exact) < 1e-6
