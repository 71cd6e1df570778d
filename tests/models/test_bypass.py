"""A layer that runs without our attention is named, by a warning of `observe` and an error of `use`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ModelError
from tests.families import LENGTH, batch_of, family
from tests.watched import eager
from tools.families.detours import detour


class Blend(nn.Module):
    """Attention of somebody's own that reads the Boolean mask rightly: only its weights are not ours."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, **_: Any) -> Any:
        q, k, v = (each(hidden_states) for each in (self.layer.q_proj, self.layer.k_proj, self.layer.v_proj))
        k, v = (torch.cat([each, each], -1) for each in (k, v))
        scores = q @ k.mT
        if attention_mask is not None and attention_mask.dtype != torch.bool:
            scores = scores + attention_mask[:, 0]
        elif attention_mask is not None:
            scores = scores.masked_fill(~attention_mask[:, 0], -1e9)
        return self.layer.o_proj(scores.softmax(-1) @ v), None


def blended() -> Any:
    model = family("llama")
    model.model.layers[1].self_attn = Blend(model.model.layers[1].self_attn)
    return model


SENTENCE = (
    "model.layers.1.self_attn (Blend) read the attention mask, and ran without a call of this library's attention."
)


def test_observing_warns_and_names_it() -> None:
    model, batch = blended(), batch_of("llama", padding="right")
    expected = eager(model, batch)[0]
    with (
        pytest.warns(UserWarning, match="The record is incomplete") as caught,
        torch.no_grad(),
        mh.observe(model) as seen,
    ):
        output = model(**batch)[0]
    assert str(caught[0].message) == (
        f"The record is incomplete. {SENTENCE} Let it call the function that transformers' AttentionInterface returns."
    )
    assert [layer.name for layer in seen.layers] == ["model.layers.0.self_attn"]
    kept = batch["attention_mask"].bool()
    torch.testing.assert_close(output[kept], expected[kept], atol=5e-5, rtol=5e-5)


def test_use_raises_and_names_it() -> None:
    model = blended()
    with mh.use(model), pytest.raises(ModelError) as caught:
        model(**batch_of("llama"))
    assert str(caught.value) == (
        f"{SENTENCE} Let it call the function that transformers' AttentionInterface returns, or run the model with "
        "attn_implementation='eager'."
    )


def test_a_layer_that_calls_eager_attention_with_a_mask_of_numbers_is_found_too() -> None:
    model, batch = family("llama"), batch_of("llama")
    detour(model, "eager function in one layer")
    hidden = torch.full((1, 1, LENGTH, LENGTH), torch.finfo(torch.float32).min).triu(1)
    with mh.use(model), pytest.raises(ModelError, match=r"layers\.1\.self_attn \(BranchAttention\) ran without a call"):
        model(input_ids=batch["input_ids"], attention_mask=hidden)


def test_a_model_that_runs_another_attention_again_is_left_alone() -> None:
    model, batch = blended(), batch_of("llama")
    mh.use(model)
    model.set_attn_implementation("eager")
    assert model(**batch)[0].isfinite().all()


def test_a_model_in_use_can_be_copied_and_pickled() -> None:
    model = family("llama")
    mh.use(model)
    batch = batch_of("llama")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(**batch)[0], model(**batch)[0])


class TestCompiled:
    """Calls in a graph raise no false alarm. tests/interventions/test_contexts.py compiles a whole model."""

    @pytest.mark.parametrize("part", ["self_attn", "layer", "forward of self_attn"])
    def test_a_layer_that_is_compiled_alone_is_accepted(self, part: str) -> None:
        torch._dynamo.reset()
        model, batch = family("llama"), batch_of("llama")
        layer = model.model.layers[1]
        if part == "forward of self_attn":
            layer.self_attn.forward = torch.compile(layer.self_attn.forward, backend="eager")
        else:
            (layer.self_attn if part == "self_attn" else layer).compile(backend="eager")
        expected = eager(family("llama"), batch)[0]
        with torch.no_grad(), mh.use(model):
            torch.testing.assert_close(model(**batch)[0], expected, atol=5e-5, rtol=5e-5)
