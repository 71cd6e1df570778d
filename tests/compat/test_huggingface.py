"""The attention of BERT, GPT-2 and Llama against the originals: outputs, gradients, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.camembert.modeling_camembert import CamembertAttention
from transformers.models.electra.modeling_electra import ElectraAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.roberta.modeling_roberta import RobertaAttention
from transformers.models.xlm_roberta.modeling_xlm_roberta import XLMRobertaAttention

import multihead as mh
from multihead import masks
from multihead.compat.huggingface import from_bert, from_gpt2, from_llama
from multihead.errors import ModelError, ShapeError
from tests.compat.originals import BOUNDS

LIKE_BERT = (BertAttention, RobertaAttention, XLMRobertaAttention, CamembertAttention, ElectraAttention)
BATCH, LENGTH, KEYS = 2, 6, 4
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
SEEN = torch.arange(LENGTH) < torch.tensor([LENGTH, 4])[:, None]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def prepared(module: nn.Module, dtype: torch.dtype) -> Any:
    """Give every parameter numbers of its own, the biases too."""
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
    config = LlamaConfig(attn_implementation="sdpa", **options)  # its eager softmax is float32 whatever the dtype
    return prepared(LlamaAttention(config, layer_idx=0), dtype), LlamaRotaryEmbedding(config)


def additive(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Write a mask as the eager attention of the library takes it: 0, or the lowest number there is."""
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
def test_berts_attention_and_those_copied_from_it_are_equal(kind: type[nn.Module], dtype: torch.dtype) -> None:
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


@dtypes
@pytest.mark.parametrize("options", [{}, {"kv_heads": 4}, {"kv_heads": 1}, {"attention_bias": True}, {"head_dim": 6}])
def test_llamas_attention_is_equal_its_rotation_included(options: dict[str, Any], dtype: torch.dtype) -> None:
    original, rotary = llama(dtype, **options)
    layer = from_llama(original)
    assert list(layer.state_dict()) == list(original.state_dict())
    original.load_state_dict(layer.state_dict())
    x = torch.randn(BATCH, LENGTH, 16, dtype=dtype)
    turns = rotary(x, torch.arange(LENGTH)[None])
    hidden = additive(CAUSAL & SEEN[:, None, None], dtype)
    theirs = lambda x: original(x, position_embeddings=turns, attention_mask=hidden)[0]
    assert_equal(theirs, lambda x: layer(x, turns, mask=masks.Causal() & masks.Lengths((LENGTH, 4))), x)
    hidden_behind = additive(CAUSAL, dtype)
    theirs = lambda x: original(x, position_embeddings=turns, attention_mask=hidden_behind)[0]
    assert_equal(theirs, lambda x: layer(x, turns), x)


def test_a_query_that_sees_no_key_gives_zero_where_the_originals_give_the_mean_of_all_values() -> None:
    original = bert().self
    x = torch.randn(BATCH, LENGTH, 12, dtype=torch.float64)
    lengths = torch.tensor([0, 3])
    shown = (torch.arange(LENGTH) < lengths[:, None])[:, None, None]
    expected = original(x, attention_mask=additive(shown, torch.float64))[0]
    actual = from_bert(original)(x, mask=masks.Lengths(lengths))
    assert (actual[0] == 0).all()
    torch.testing.assert_close(expected[0], original.value(x[0]).mean(0).expand(LENGTH, 12), rtol=0, atol=1e-12)
    torch.testing.assert_close(actual[1], expected[1], rtol=0, atol=1e-12)
    attention, rotary = llama()
    x = torch.randn(BATCH, LENGTH, 16, dtype=torch.float64)
    turns = rotary(x, torch.arange(LENGTH)[None])
    assert (from_llama(attention)(x, turns, mask=masks.Lengths(lengths))[0] == 0).all()


def test_dropout_and_mode_come_along_and_the_weights_are_copies() -> None:
    original = bert()
    original.train()
    layer = from_bert(original)
    assert layer.training
    assert layer.dropout == original.self.dropout.p == 0.1
    nn.init.zeros_(layer.q_proj.weight)
    assert (original.self.query.weight != 0).any()
    for made, share in ((from_gpt2(gpt2(attn_pdrop=0.2)), 0.2), (from_llama(llama(attention_dropout=0.3)[0]), 0.3)):
        assert made.dropout == share
        assert not made.training


def test_what_comes_out_can_be_watched() -> None:
    original, rotary = llama(torch.float32)
    layer, x = from_llama(original), torch.randn(1, LENGTH, 16)
    with mh.observe(layer) as seen:
        layer(x, rotary(x, torch.arange(LENGTH)[None]))
    assert seen["RotaryAttention"].num_heads == 4
    assert "num_heads=4, num_kv_heads=2, head_dim=4" in str(layer)


def test_other_classes_are_refused_in_words() -> None:
    mend = "Give that module of the model; to watch a whole model of any family use mh.observe(model)."
    names = "GPT2Attention"

    def refused(error: type[Exception], sentence: str) -> object:
        return pytest.raises(error, match=f"^{re.escape(sentence)}$")

    with refused(
        ModelError, f"from_gpt2 was given a BertAttention, and takes the attention of a GPT-2 layer: {names}. {mend}"
    ):
        from_gpt2(bert())
    with refused(
        ModelError, f"from_llama was given a Linear, and takes the attention of a Llama layer: LlamaAttention. {mend}"
    ):
        from_llama(nn.Linear(2, 2))
    families = ("Bert", "Camembert", "Electra", "Roberta", "XLMRoberta")
    names = ", ".join(sorted(f + kind for f in families for kind in ("Attention", "CrossAttention", "SelfAttention")))
    finding = f"from_bert was given a GPT2Attention, and takes the attention of a BERT layer, or its .self: {names}."
    with refused(ModelError, f"{finding} {mend}"):
        from_bert(gpt2())


def test_inputs_that_do_not_fit_llamas_layer_are_refused_in_words() -> None:
    original, rotary = llama()
    layer, x = from_llama(original), torch.randn(BATCH, LENGTH, 16, dtype=torch.float64)
    cosine, sine = rotary(x, torch.arange(LENGTH)[None])
    with pytest.raises(
        ShapeError, match=r"^x has shape \(2, 6, 15\)\. Give \(batch, length, features\) with 16 features\.$"
    ):
        layer(x[..., 1:], (cosine, sine))
    sentence = "The sine has shape (1, 5, 4). Give (batch or 1, length, head_dim) = (2, 6, 4)."
    with pytest.raises(ShapeError, match=f"^{re.escape(sentence)}$"):
        layer(x, (cosine, sine[:, 1:]))
