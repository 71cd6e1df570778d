"""The attention of BERT, GPT-2, Llama and Qwen 3 against the originals: outputs, gradients, and errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen3Config
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.camembert.modeling_camembert import CamembertAttention
from transformers.models.electra.modeling_electra import ElectraAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.roberta.modeling_roberta import RobertaAttention
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaAttention

import multihead as mh
from multihead import masks
from multihead.compat.huggingface import from_bert, from_gpt2, from_llama, from_qwen3
from multihead.errors import ModelError
from tests.compat.originals import BOUNDS

LIKE_BERT = (BertAttention, RobertaAttention, XLMRobertaAttention, CamembertAttention, ElectraAttention)
BATCH, LENGTH, KEYS = 2, 6, 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
SEEN = torch.arange(LENGTH) < torch.tensor([LENGTH, 4])[:, None]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def prepared(module: nn.Module, dtype: torch.dtype) -> Any:
    """Fill every parameter with random numbers, the biases too."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.to(dtype).eval()


def bert(kind: type[nn.Module] = BertAttention, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    config = BertConfig(hidden_size=12, num_attention_heads=3, attn_implementation="eager")
    return prepared(kind(config, **options), dtype)


def gpt2(dtype: torch.dtype = torch.float64, *, cross: bool = False, **options: Any) -> Any:
    config = GPT2Config(n_embd=12, n_head=3, attn_implementation="eager", **options)
    return prepared(GPT2Attention(config, is_cross_attention=cross, layer_idx=2), dtype)


def llama(dtype: torch.dtype = torch.float64, *, heads: int = 4, kv_heads: int = 2, **options: Any) -> Any:
    options = {"hidden_size": 16, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **options}
    config = LlamaConfig(attn_implementation="sdpa", **options)  # its eager softmax is float32 for any dtype
    return prepared(LlamaAttention(config, layer_idx=0), dtype)


def qwen3(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    config = Qwen3Config(attn_implementation="sdpa", num_hidden_layers=1, **{**sizes, **options})
    return prepared(Qwen3Attention(config, layer_idx=0), dtype)


def turns_of(original: Any, layer: mh.MultiHeadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and sines from transformers, or exact ones for float64, because it computes them in float32."""
    cosine, sine = LlamaRotaryEmbedding(original.config)(x, torch.arange(x.shape[1])[None])
    if x.dtype == torch.float32:
        return cosine, sine
    assert layer.rotary is not None
    frequencies = torch.tensor(layer.rotary.frequencies(layer.head_dim), dtype=torch.float64).repeat(2)
    angles = torch.arange(x.shape[1])[None, :, None] * frequencies
    gain = layer.rotary.scaling.gain if layer.rotary.scaling else 1.0
    exact = angles.cos() * gain, angles.sin() * gain
    torch.testing.assert_close((cosine, sine), exact, rtol=0, atol=5e-6)
    return exact


def additive(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a mask to that of the eager attention of transformers: 0, or the lowest number."""
    return torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, torch.finfo(dtype).min)


def assert_equal(theirs: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Compare two outputs, and the gradients with respect to their input."""
    found = []
    cotangent = torch.randn(x.shape, dtype=x.dtype)
    for call in (theirs, ours):
        given = x.clone().requires_grad_()
        output = call(given)
        found.append((output, torch.autograd.grad((output * cotangent).sum(), given)[0]))
    bound = BOUNDS[x.dtype]
    torch.testing.assert_close(found[1], found[0], rtol=bound, atol=bound)


@dtypes
@pytest.mark.parametrize("kind", LIKE_BERT)
def test_berts_attention_and_its_copies_are_equal(kind: type[nn.Module], dtype: torch.dtype) -> None:
    original, x = bert(kind, dtype), torch.randn(BATCH, LENGTH, 12, dtype=dtype)
    whole, heads = from_bert(original), from_bert(original.self)
    assert heads.out_proj is None
    assert not whole.training
    shown, mask = SEEN[:, None, None], masks.Keep(SEEN, "batch keys")
    for hidden, said in ((None, masks.Full()), (additive(shown, dtype), mask)):
        theirs = lambda x, hidden=hidden: original.self(x, attention_mask=hidden)[0]
        assert_equal(theirs, lambda x, said=said: heads(x, mask=said), x)
        assert_equal(lambda x, t=theirs: original.output.dense(t(x)), lambda x, said=said: whole(x, mask=said), x)


def test_berts_cross_attention_takes_memory() -> None:
    original = bert(is_cross_attention=True).self
    layer, memory = from_bert(original), torch.randn(BATCH, KEYS, 12, dtype=torch.float64)
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    assert_equal(lambda x: original(x, encoder_hidden_states=memory)[0], lambda x: layer(x, memory), x)


@dtypes
@pytest.mark.parametrize("options", [{}, {"scale_attn_weights": False}, {"scale_attn_by_inverse_layer_idx": True}])
def test_gpt2s_attention_is_equal(options: dict[str, bool], dtype: torch.dtype) -> None:
    original = gpt2(dtype, **options)
    layer, hidden = from_gpt2(original), additive(CAUSAL, dtype)
    x = torch.randn(BATCH, LENGTH, 12, dtype=dtype)
    theirs = lambda x: original(x, attention_mask=hidden)[0]
    assert_equal(theirs, lambda x: layer(x, mask=masks.Causal()), x)


def test_gpt2s_cross_attention_takes_memory() -> None:
    original = gpt2(cross=True)
    layer, memory = from_gpt2(original), torch.randn(BATCH, KEYS, 12, dtype=torch.float64)
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    assert_equal(lambda x: original(x, encoder_hidden_states=memory)[0], lambda x: layer(x, memory), x)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0},
    "yarn of its lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16},
    "yarn with one scale of two": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
    },
    "yarn with both": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
}


def roped(name: str) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **ROPES[name]}, "max_position_embeddings": 64}


LLAMAS = [{}, {"kv_heads": 4}, {"kv_heads": 1}, {"attention_bias": True}, {"head_dim": 6}]


@dtypes
@pytest.mark.parametrize("options", [*LLAMAS, *(roped(name) for name in ROPES)], ids=str)
def test_llamas_attention_is_equal_including_its_rotation(options: dict[str, Any], dtype: torch.dtype) -> None:
    original = llama(dtype, **options)
    layer = from_llama(original)
    x = torch.randn(BATCH, LENGTH, 16, dtype=dtype)
    turns = turns_of(original, layer, x)
    hidden = additive(CAUSAL & SEEN[:, None, None], dtype)
    theirs = lambda x: original(x, position_embeddings=turns, attention_mask=hidden)[0]
    assert_equal(theirs, lambda x: layer(x, mask=masks.Causal() & masks.Lengths((LENGTH, 4))), x)
    hidden_behind = additive(CAUSAL, dtype)
    theirs = lambda x: original(x, position_embeddings=turns, attention_mask=hidden_behind)[0]
    assert_equal(theirs, lambda x: layer(x, mask=masks.Causal()), x)


@dtypes
@pytest.mark.parametrize("options", [{}, {"attention_bias": True}, {"rms_norm_eps": 0.3}, roped("yarn")], ids=str)
def test_qwen3s_attention_is_equal_including_its_norms_and_rotation(options: Any, dtype: torch.dtype) -> None:
    original = qwen3(dtype, **options)
    layer = from_qwen3(original)
    x = torch.randn(BATCH, LENGTH, 16, dtype=dtype)
    if dtype == torch.float64:  # its norm rounds to float32
        for norm in (original.q_norm, original.k_norm):
            norm.forward = lambda x, norm=norm: nn.functional.rms_norm(
                x, norm.weight.shape, norm.weight, norm.variance_epsilon
            )
    turns, hidden = turns_of(original, layer, x), additive(CAUSAL, dtype)
    theirs = lambda x: original(x, position_embeddings=turns, attention_mask=hidden)[0]
    assert_equal(theirs, lambda x: layer(x, mask=masks.Causal()), x)


def test_a_window_of_qwen3_is_a_mask() -> None:
    options = {
        "use_sliding_window": True,
        "sliding_window": 2,
        "max_window_layers": 0,
        "layer_types": ["sliding_attention"],
    }
    original = qwen3(torch.float32, **options)
    layer, x = from_qwen3(original), torch.randn(BATCH, LENGTH, 16)
    near = CAUSAL & torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(-1)
    theirs = lambda x: original(
        x, position_embeddings=turns_of(original, layer, x), attention_mask=additive(near, torch.float32)
    )[0]
    assert_equal(theirs, lambda x: layer(x, mask=masks.Causal() & masks.Window(original.sliding_window)), x)


def test_llama_decodes_step_by_step() -> None:
    layer = from_llama(llama())
    x, cache = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64), mh.KeyValueCache()
    whole = layer(x, mask=masks.Causal())
    steps = [layer(x[:, i : i + 1], mask=masks.Causal(), cache=cache) for i in range(LENGTH)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-12)


def test_a_query_that_sees_no_key_results_in_zero_where_the_originals_return_the_mean_of_all_values() -> None:
    original = bert().self
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    lengths = torch.tensor([0, 3])
    shown = (torch.arange(LENGTH) < lengths[:, None])[:, None, None]
    expected = original(x, attention_mask=additive(shown, torch.float64))[0]
    actual = from_bert(original)(x, mask=masks.Lengths(lengths))
    assert (actual[0] == 0).all()
    torch.testing.assert_close(expected[0], original.value(x[0]).mean(0).expand(LENGTH, 12), rtol=0, atol=1e-12)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-12)
    x = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64)
    assert (from_llama(llama())(x, mask=masks.Lengths(lengths))[0] == 0).all()


def test_dropout_and_mode_are_kept_and_the_weights_are_copies() -> None:
    original = bert()
    original.train()
    layer = from_bert(original)
    assert layer.training
    assert layer.dropout == original.self.dropout.p == 0.1
    nn.init.zeros_(layer.q_proj.weight)
    assert (original.self.query.weight != 0).any()
    for made, share in ((from_gpt2(gpt2(attn_pdrop=0.2)), 0.2), (from_llama(llama(attention_dropout=0.3)), 0.3)):
        assert made.dropout == share
        assert not made.training


def test_a_converted_layer_can_be_observed() -> None:
    layer, x = from_llama(llama(torch.float32)), torch.randn(1, LENGTH, 16)
    with mh.observe(layer) as seen:
        layer(x, mask=masks.Causal())
    assert seen["MultiHeadAttention"].num_heads == 4
    assert "rotary=Rotary(base=10000.0, dim=None, interleaved=False, scaling=None)" in str(layer)


@pytest.mark.parametrize(
    ("parameters", "finding"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "its frequencies change as the text grows, and keys that were rotated before would be wrong",
        ),
        (
            {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 2.0]},
            "its frequencies change at a length, and keys that were rotated before would be wrong",
        ),
        ({"rope_type": "proportional"}, "this scaling is not implemented"),
    ],
    ids=["dynamic", "longrope", "proportional"],
)
def test_other_rope_types_are_rejected(parameters: dict[str, Any], finding: str) -> None:
    original = llama()
    original.config.rope_parameters = {"rope_theta": 10_000.0, **parameters}
    sentence = (
        f"from_llama got a layer whose rope_type is {parameters['rope_type']!r}: {finding}. Give one with "
        '"default", "linear", "llama3" or "yarn"; to observe any model use mh.observe(model).'
    )
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        from_llama(original)


def test_a_partial_rotation_of_llama_is_rejected() -> None:
    original = llama()
    original.config.rope_parameters = {**original.config.rope_parameters, "partial_rotary_factor": 0.5}
    sentence = (
        "from_llama got a layer whose partial_rotary_factor is 0.5, and its class rotates all columns. "
        "Set partial_rotary_factor to 1.0 in the config of the model."
    )
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        from_llama(original)


def test_other_classes_are_rejected() -> None:
    mend = "Give that module of the model; to observe a whole model of any family use mh.observe(model)."
    names = "GPT2Attention"

    def refused(error: type[Exception], sentence: str) -> object:
        return pytest.raises(error, match=f"^{re.escape(sentence)}$")

    with refused(
        ModelError, f"from_gpt2 got a BertAttention, and converts the attention of a GPT-2 layer: {names}. {mend}"
    ):
        from_gpt2(bert())
    with refused(
        ModelError, f"from_llama got a Linear, and converts the attention of a Llama layer: LlamaAttention. {mend}"
    ):
        from_llama(nn.Linear(2, 2))
    with refused(
        ModelError, f"from_qwen3 got a Linear, and converts the attention of a Qwen 3 layer: Qwen3Attention. {mend}"
    ):
        from_qwen3(nn.Linear(2, 2))
    families = ("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta")
    names = ", ".join(sorted(f + kind for f in families for kind in ("Attention", "CrossAttention", "SelfAttention")))
    finding = f"from_bert got a GPT2Attention, and converts the attention of a BERT layer, or its .self: {names}."
    with refused(ModelError, f"{finding} {mend}"):
        from_bert(gpt2())
