"""A watched Hugging Face model gives what it gave, and what is seen is what its eager attention computes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

import multihead as mh
from multihead import listening, masks
from multihead.errors import ModelError
from multihead.hooks import huggingface
from multihead.observation.record import Record, SampleRecord
from tests.families import (
    CALLS,
    DECODER,
    DECODERS,
    ENCODER,
    FAMILIES,
    LENGTH,
    PADDED,
    TEXT,
    VOCABULARY,
    batch_of,
    family,
)

CASES = [(name, "none") for name in FAMILIES] + [(name, side) for name in PADDED for side in ("right", "left")]
LOWEST = torch.finfo(torch.float32).min


def eager(model: Any, batch: dict[str, Tensor]) -> Any:
    """Run the library's own eager attention, which writes its weights down."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(**batch, output_attentions=True)
    model.set_attn_implementation(before)
    return output


def eager_weights(name: str, output: Any) -> list[Tensor]:
    """The weights of all attention calls in the order they run: (batch, heads, queries, keys) each."""
    if name not in ("t5", "whisper"):
        return list(output.attentions)
    pairs = zip(output.decoder_attentions, output.cross_attentions, strict=True)
    return [*output.encoder_attentions, *(each for pair in pairs for each in pair)]


def watched(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Any, Record]:
    with torch.no_grad(), mh.observe(model, **options) as seen:
        output = model(**batch)
    return output, seen


def real(batch: dict[str, Tensor], sample: int, length: int, *, which: str = "attention_mask") -> Tensor:
    mask = batch.get(which)
    return torch.ones(length, dtype=torch.bool) if mask is None else mask[sample].bool()


def without_padding(weights: Tensor, name: str, layer: str, batch: dict[str, Tensor], sample: int) -> Tensor:
    """Cut a sample out of a layer's eager weights: (heads, queries, keys) of its real tokens."""
    in_decoder = name == "t5" and layer.startswith("decoder")
    crosses = "EncDec" in layer or "encoder_attn" in layer
    of_queries = "decoder_attention_mask" if in_decoder else "attention_mask"
    rows = real(batch, sample, weights.shape[-2], which=of_queries)
    columns = real(batch, sample, weights.shape[-1], which="attention_mask" if crosses else of_queries)
    return weights[sample][:, rows][:, :, columns]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_weights_of_every_head_are_those_of_the_eager_attention(name: str, padding: str) -> None:
    model, batch = family(name), batch_of(name, padding=padding)
    expected = eager_weights(name, eager(model, batch))
    _, seen = watched(model, batch)
    assert len(seen.layers) == len(expected) == CALLS.get(name, 2)
    for layer, weights in zip(seen.layers, expected, strict=True):
        assert layer.num_samples == 2
        for sample in range(2):
            trimmed = without_padding(weights, name, layer.name, batch, sample)
            torch.testing.assert_close(layer.weights(sample=sample), trimmed, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_statistics_equal_brute_force_over_the_eager_weights(name: str, padding: str) -> None:
    model, batch = family(name), batch_of(name, padding=padding)
    expected = eager_weights(name, eager(model, batch))
    _, seen = watched(model, batch)
    for layer, weights in zip(seen.layers, expected, strict=True):
        for sample in range(2):
            trimmed = without_padding(weights, name, layer.name, batch, sample)
            told = layer.sample(sample)
            by_hand = brute_force(trimmed.double(), told.query_start, told.visible())
            found = {statistic: told.statistics[statistic].double() for statistic in by_hand}
            torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=1e-5, equal_nan=True)


def brute_force(weights: Tensor, query_start: int, visible: Tensor) -> dict[str, Tensor]:
    """Statistics by their definitions, from the whole map (heads, queries, keys)."""
    place = torch.arange(weights.shape[-1])
    offset = place - (torch.arange(weights.shape[-2]) + query_start)[:, None]
    mass = weights.sum(-1)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    distance = (weights * offset.abs()).sum(-1) / mass
    return {
        "entropy": entropy,
        "effective_keys": entropy.exp(),
        "mean_distance": distance,
        "self_mass": (weights * (offset == 0)).sum(-1),
        "previous_mass": (weights * (offset == -1)).sum(-1),
        "next_mass": (weights * (offset == 1)).sum(-1),
        "first_mass": weights[..., 0],
        "largest_weight": weights.amax(-1),
        "received": weights.sum(-2),
        "pooled_map": weights.masked_fill(~visible, torch.nan),  # one cell a block: the texts are short
    }


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_the_output_is_the_same_with_and_without_observation(name: str, padding: str) -> None:
    model, batch = family(name), batch_of(name, padding=padding)
    with torch.no_grad():
        unobserved = model(**batch)[0]
    observed = watched(model, batch)[0][0]
    which = "decoder_attention_mask" if name == "t5" else "attention_mask"
    mask = batch.get(which)
    if mask is None:
        rows = torch.ones(unobserved.shape[:2], dtype=torch.bool)
    elif name in ("bert", "albert"):
        rows = torch.ones_like(mask, dtype=torch.bool)  # padding too: it sees the keys that are none
    elif padding == "right" and name in ("gpt2", "llama", "t5"):
        rows = torch.ones_like(mask, dtype=torch.bool)
    else:
        rows = mask.bool()  # padding that sees no key is 0 here, and some mean of values there
    torch.testing.assert_close(observed[rows], unobserved[rows], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["bert", "llama", "gemma2"])
def test_half_precision_loses_no_more_than_the_librarys_own_attention_does(name: str) -> None:
    model, batch = family(name).bfloat16(), batch_of(name, padding="right")
    rows = batch["attention_mask"].bool()
    exact = eager(family(name), batch)[0][rows]
    plain, observed = eager(model, batch)[0][rows], watched(model, batch)[0][0][rows]
    assert observed.dtype == torch.bfloat16
    budget = 2 * (plain - exact).abs().mean() + torch.finfo(torch.bfloat16).eps * exact.abs().mean()
    assert (observed - exact).abs().mean() <= budget


def test_double_precision_stays_double() -> None:
    model, batch = family("bert").double(), batch_of("bert", padding="right")
    expected = eager(model, batch)
    output, seen = watched(model, batch)
    torch.testing.assert_close(output[0], expected[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(seen.layers[1].weights(), expected.attentions[1][0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["bert", "llama", "gpt_oss"])
def test_gradients_are_the_same_with_and_without_observation(name: str) -> None:
    batch = batch_of(name, padding="right")
    rows = batch["attention_mask"].bool()

    def gradients(model: Any) -> dict[str, Tensor]:
        model(**batch)[0][rows].square().mean().backward()
        return {key: value.grad for key, value in model.named_parameters() if value.grad is not None}

    plain = family(name)
    plain.set_attn_implementation("eager")
    expected = gradients(plain)
    model = family(name)
    with mh.observe(model):
        found = gradients(model)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, atol=1e-4 * float(value.abs().max()) + 1e-6, rtol=1e-3)


def decoded(model: Any, batch: dict[str, Tensor], **options: Any) -> Tensor:
    with torch.no_grad():
        return model.generate(
            **batch, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0, **options
        )


def assert_same(found: SampleRecord, expected: SampleRecord) -> None:
    """Compare two records of one sample, one decoded token by token, one from a single pass."""
    assert (found.num_queries, found.num_keys, found.query_start) == (
        expected.num_queries,
        expected.num_keys,
        expected.query_start,
    )
    torch.testing.assert_close(found.weights(), expected.weights(), atol=1e-5, rtol=0)
    assert torch.equal(found.visible(), expected.visible())
    assert found.statistics.keys() == expected.statistics.keys()
    for name, value in expected.statistics.items():
        torch.testing.assert_close(found.statistics[name], value, atol=3e-5, rtol=3e-5, equal_nan=True)
    for name, value in expected.means.items():
        torch.testing.assert_close(found.means[name], value, atol=3e-5, rtol=3e-5)


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_decoding_is_one_record_equal_to_that_of_a_single_pass(name: str, padding: str, cache: str) -> None:
    model, batch = family(name), batch_of(name, padding=padding)
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    special = range(VOCABULARY // 2)
    with mh.observe(model, special_ids=special) as seen:
        ids = decoded(model, batch, cache_implementation=cache)
    assert torch.equal(ids, decoded(model, batch, cache_implementation=cache))
    read = ids[:, :-1]  # the last token was written and not read
    mask = nn.functional.pad(batch["attention_mask"], (0, read.shape[1] - LENGTH), value=1)
    single = {"input_ids": read, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    _, whole = watched(model, single, special_ids=special)
    assert [layer.name for layer in seen.layers] == [layer.name for layer in whole.layers]
    for found, expected in zip(seen.layers, whole.layers, strict=True):
        assert found.num_samples == expected.num_samples == 2
        for sample in range(2):
            assert_same(found.sample(sample), expected.sample(sample))


@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_a_decoders_self_and_cross_attention_are_joined_over_its_steps(name: str) -> None:
    model = family(name)
    batch = batch_of(name, padding="right" if name == "t5" else "none")
    batch.pop("decoder_attention_mask", None)
    target = batch.pop("decoder_input_ids")
    with torch.no_grad(), mh.observe(model, special_ids=range(50)) as seen:
        keys = {"input_ids", "input_features", "attention_mask"} & batch.keys()
        encoded = model.get_encoder()(**{key: batch[key] for key in keys})
        rest = {key: value for key, value in batch.items() if key == "attention_mask"}
        cache = None
        for step in range(target.shape[1]):
            token = target[:, step : step + 1]
            output = model(**rest, encoder_outputs=encoded, decoder_input_ids=token, past_key_values=cache)
            cache = output.past_key_values
    _, whole = watched(model, {**batch, "decoder_input_ids": target}, special_ids=range(50))
    for found, expected in zip(seen.layers, whole.layers, strict=True):
        assert (found.name, found.num_samples) == (expected.name, 2)
        for sample in range(2):
            assert_same(found.sample(sample), expected.sample(sample))


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
    torch.testing.assert_close(seen.layers[0].weights(), expected.attentions[0][0], atol=1e-5, rtol=0)
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
        wanted: frozenset[str] = frozenset()

        def hear(self, call: Any) -> None:
            heard.append(call.request.dropout)

    model = hf.BertModel(hf.BertConfig(**ENCODER, vocab_size=VOCABULARY, attention_probs_dropout_prob=0.25))
    with listening.listen(Ear()), huggingface.installed(model):
        model.train()(**batch_of("bert"))
        model.eval()(**batch_of("bert"))
    assert heard == [0.25, 0.25, 0.0, 0.0]


class TestTheModelIsPutBack:
    def implementations(self, model: Any) -> list[str]:
        found = huggingface.pretrained_models(model)
        return [config._attn_implementation for config in huggingface._configurations(found)]

    def test_after_the_context(self) -> None:
        model = family("bert")
        model.set_attn_implementation("eager")
        watched(model, batch_of("bert"))
        assert model.config._attn_implementation == "eager"
        assert not model._forward_hooks
        assert not model._forward_pre_hooks
        assert listening.listeners() == ()

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
        assert listening.listeners() == ()

    def test_after_an_exception_in_the_model(self) -> None:
        model = family("bert")
        with pytest.raises(IndexError), mh.observe(model):
            model(input_ids=torch.tensor([[VOCABULARY]]))
        assert model.config._attn_implementation == "sdpa"
        assert not model._forward_hooks

    def test_with_the_models_inside_it_each_as_it_was(self) -> None:
        text = {**ENCODER, **TEXT}
        sight = {name: value for name, value in ENCODER.items() if name != "max_position_embeddings"}
        sight |= {"image_size": 8, "patch_size": 4}
        model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=sight, projection_dim=8)).eval()
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_would_silently_stay_eager_is_refused_in_words(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = REFUSED[name]()
    before = model.config._attn_implementation
    with pytest.raises(ModelError) as caught, mh.observe(model):
        pytest.fail("it was not refused")
    assert str(caught.value) == (
        f"{name} computes attention inside its layers, where it cannot be exchanged, so it cannot be watched. "
        "Take a family that uses transformers' AttentionInterface, such as BERT, GPT-2, Llama or T5."
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


def test_a_model_inside_a_module_of_ones_own_is_watched() -> None:
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
        huggingface.attend_for(nn.Module(), q, q, q, None, cache=object())
    assert str(caught.value) == (
        "The model runs in continuous batches. Watch it with model(...) or model.generate(...)."
    )
