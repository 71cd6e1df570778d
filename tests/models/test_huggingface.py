"""A Hugging Face model is watched with its own masks and the user's, and put back as it was."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.errors import ModelError
from multihead.kernels import reference
from multihead.kernels.call import listen, listeners
from multihead.models import huggingface
from multihead.models.config_in_use import configurations_of
from tests.families import DECODER, ENCODER, LENGTH, TEXT, VOCABULARY, batch_of, family
from tests.watched import eager, watched

LOWEST = torch.finfo(torch.float32).min


class TestMasksOfTheUser:
    """A 4-D mask is never dropped, whatever its dtype."""

    def kept(self) -> Tensor:
        """(2, 1, queries, keys): causal, with a hole that is no interval."""
        kept = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
        kept[1, :, 6:, 2] = False
        return kept

    @pytest.mark.parametrize("form", ["bool", "lowest", "minus infinity", "bias"])
    @pytest.mark.parametrize("name", ["bert", "llama"])
    def test_a_mask_of_four_dimensions_hides_what_it_hides_for_eager(self, name: str, form: str) -> None:
        model, kept = family(name), self.kept()
        added = torch.zeros(kept.shape).masked_fill(~kept, LOWEST)
        given = {
            "bool": kept,
            "lowest": added,
            "minus infinity": added.masked_fill(~kept, -torch.inf),
            "bias": added + torch.randn(kept.shape) * kept,
        }[form]
        ids = batch_of(name)["input_ids"]
        expected = eager(model, {"input_ids": ids, "attention_mask": added if form == "bool" else given})
        output, seen = watched(model, {"input_ids": ids, "attention_mask": given})
        torch.testing.assert_close(output[0], expected[0], atol=2e-5, rtol=2e-5)
        for layer, weights in zip(seen.layers, expected.attentions, strict=True):
            for sample in range(2):
                torch.testing.assert_close(layer.weights(sample=sample), weights[sample], atol=1e-5, rtol=0)
                assert torch.equal(layer.sample(sample).visible(), kept[sample, 0])

    def test_one_value_a_key_is_padding(self) -> None:
        mask, bias = huggingface.mask_of_tensor(torch.tensor([[1, 1, 0]]), 3)
        assert masks.picture(mask, queries=2, keys=3) == "■ ■ ·\n■ ■ ·"
        assert bias is None

    def test_keys_beyond_those_at_hand_are_cut_off_a_mask(self) -> None:
        mask, _ = huggingface.mask_of_tensor(torch.ones(1, 2, 5, dtype=torch.bool), 3)
        assert masks.picture(mask, queries=2, keys=3) == "■ ■ ■\n■ ■ ■"


@pytest.mark.parametrize("asked", [None, True])
def test_without_a_mask_only_the_argument_of_the_call_hides_later_keys(asked: bool | None) -> None:
    """Eager attention does not read `is_causal` of the module, which is True for the images of BridgeTower."""
    module = nn.Module()
    module.is_causal = True
    q, k, v = torch.randn(3, 1, 2, 5, 8).unbind()
    output, _ = huggingface.transformers_attention(module, q, k, v, None, is_causal=asked)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=asked is True
    )
    torch.testing.assert_close(output.transpose(1, 2).double(), expected, atol=1e-6, rtol=0)


def test_sequences_packed_by_their_positions_see_only_themselves() -> None:
    model = family("llama")
    batch = {
        "input_ids": batch_of("llama")["input_ids"][:1],
        "position_ids": torch.tensor([[*range(5), *range(LENGTH - 5)]]),
        "use_cache": False,
    }
    expected = eager(model, batch)
    output, seen = watched(model, batch)
    torch.testing.assert_close(output[0], expected[0], atol=2e-5, rtol=2e-5)
    for index, text in enumerate((slice(5), slice(5, LENGTH))):
        weights = seen.layers[0].samples[index].weights()
        torch.testing.assert_close(weights, expected.attentions[0][0, :, text, text], atol=1e-5, rtol=0)
    assert not seen.layers[0].sample().visible()[5:, :5].any()


def test_a_model_that_is_told_to_read_both_ways_is_seen_reading_both_ways() -> None:
    config = hf.LlamaConfig(**DECODER, **TEXT)
    config.is_causal = False
    model = hf.LlamaForCausalLM(config).eval()
    batch = batch_of("llama")
    expected = eager(model, batch)
    output, seen = watched(model, batch)
    torch.testing.assert_close(output[0], expected[0], atol=2e-5, rtol=2e-5)
    assert seen.layers[0].sample().visible().all()


def test_dropout_is_applied_in_training_and_not_in_evaluation() -> None:
    heard: list[float] = []

    class Ear:
        requested_statistics: frozenset[str] = frozenset()

        def receive(self, call: Any) -> None:
            heard.append(call.request.dropout)

    model = hf.BertModel(hf.BertConfig(**ENCODER, vocab_size=VOCABULARY, attention_probs_dropout_prob=0.25))
    with listen(Ear()), huggingface.install(model):
        model.train()(**batch_of("bert"))
        model.eval()(**batch_of("bert"))
    assert heard == [0.25, 0.25, 0.0, 0.0]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_kernel_of_ones_own_computes_each_layer_and_is_explained(name: str) -> None:
    model, batch = family(name), batch_of(name)
    with mh.use(model) as used, torch.no_grad():
        expected = model(**batch)[0]
        native = {each.kernel for each in used.explain(**batch).values()}
        with mh.kernels.add("own", reference):  # type: ignore[arg-type]
            assert {each.kernel for each in used.explain(**batch).values()} == {"own"}
            torch.testing.assert_close(model(**batch)[0], expected, atol=2e-5, rtol=2e-5)
        assert {each.kernel for each in used.explain(**batch).values()} == native


class TestTheModelIsPutBack:
    def implementations(self, model: Any) -> list[str]:
        return [config._attn_implementation for config in configurations_of(model)]

    def test_after_the_context(self) -> None:
        model = family("bert")
        model.set_attn_implementation("eager")
        watched(model, batch_of("bert"))
        assert model.config._attn_implementation == "eager"
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert listeners() == ()

    def test_after_an_exception_in_the_context(self) -> None:
        model = family("bert")
        within: list[str] = []

        def fail() -> None:
            within.append(model.config._attn_implementation)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), mh.observe(model):
            fail()
        assert within == ["multihead"]
        assert model.config._attn_implementation == "sdpa"
        assert listeners() == ()

    def test_after_an_exception_in_the_model(self) -> None:
        model = family("bert")
        with pytest.raises(IndexError), mh.observe(model):
            model(input_ids=torch.tensor([[VOCABULARY]]))
        assert model.config._attn_implementation == "sdpa"
        assert not model._forward_hooks

    def test_with_the_models_inside_it_each_as_it_was(self) -> None:
        text = {**ENCODER, **TEXT}
        visibility = {name: value for name, value in ENCODER.items() if name != "max_position_embeddings"}
        visibility |= {"image_size": 8, "patch_size": 4}
        model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=visibility, projection_dim=8)).eval()
        model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
        before = self.implementations(model)
        assert set(before) == {"sdpa", "eager"}
        batch = {"input_ids": batch_of("bert")["input_ids"], "pixel_values": torch.randn(2, 3, 8, 8)}
        with mh.observe(model) as seen:
            assert set(self.implementations(model)) == {"multihead"}
            model(**batch)
        assert self.implementations(model) == before
        towers = {layer.name.split("_model")[0] for layer in seen.layers}
        assert towers == {"text", "vision"}


REFUSED = {
    "BloomModel": lambda: hf.BloomModel(hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=1, n_head=4)),
    "DebertaV2Model": lambda: hf.DebertaV2Model(hf.DebertaV2Config(**ENCODER, vocab_size=VOCABULARY)),
}
REFUSED_LAYERS = {
    "BloomModel": "h.0.self_attention. BloomAttention computes its weights itself, without transformers' "
    "AttentionInterface.",
    "DebertaV2Model": "encoder.layer.0.attention.self (and 1 more). DisentangledSelfAttention computes its weights "
    "itself, without transformers' AttentionInterface.",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_would_silently_stay_eager_is_rejected(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = REFUSED[name]()
    before = model.config._attn_implementation
    with pytest.raises(ModelError) as caught, mh.observe(model):
        pytest.fail("it was not refused")
    assert str(caught.value) == (
        f"{name} computes attention where it cannot be replaced: {REFUSED_LAYERS[name]} "
        "Use a family that supports transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5."
    )
    assert model.config._attn_implementation == before
    assert capfd.readouterr() == ("", "")


def test_two_models_watched_at_once_are_told_apart() -> None:
    first, second = family("bert"), family("llama")
    with torch.no_grad(), mh.observe(first) as of_first:
        first(**batch_of("bert"))
        with mh.observe(second) as of_second:
            second(**batch_of("llama"))
            first(**batch_of("bert"))
        assert second.config._attn_implementation == "sdpa"
        assert first.config._attn_implementation == "multihead"
    assert [layer.num_samples for layer in of_first.layers] == [4, 4]
    assert [layer.num_samples for layer in of_second.layers] == [2, 2]


def test_one_model_watched_twice_is_heard_by_both() -> None:
    model = family("bert")
    with torch.no_grad(), mh.observe(model) as outer, mh.observe(model, layers=0) as inner:
        model(**batch_of("bert"))
    assert (len(outer.layers), len(inner.layers)) == (2, 1)
    assert model.config._attn_implementation == "sdpa"


def test_another_thread_computes_as_ever_and_is_not_heard() -> None:
    model, batch = family("bert"), batch_of("bert", padding="right")
    with torch.no_grad():
        expected = model(**batch)[0]
    found: list[Tensor] = []

    def run() -> None:
        with torch.no_grad():
            found.append(model(**batch)[0])

    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    torch.testing.assert_close(found[0], expected, atol=2e-5, rtol=2e-5)
    assert seen.layers[0].num_samples == 2


def test_a_model_inside_a_module_of_ones_own_is_observed() -> None:
    class Sentence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reader = family("bert")

        def forward(self, **batch: Tensor) -> Tensor:
            return self.reader(**batch)[0].mean(1)

    model = Sentence()
    with torch.no_grad(), mh.observe(model) as seen:
        model(**batch_of("bert", padding="right"))
    assert seen.layers[0].name == "reader.encoder.layer.0.attention.self"
    assert [seen.layers[0].sample(index).num_queries for index in range(2)] == [12, 7]


def test_pages_of_continuous_batching_are_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError) as caught:
        huggingface.transformers_attention(nn.Module(), q, q, q, None, cache=object())
    assert str(caught.value) == (
        "The model runs with continuous batching, which this library does not support. "
        "Call model(...) or model.generate(...)."
    )
