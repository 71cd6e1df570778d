"""Families of models: observing does not change the output, and the maps are those of the eager attention.

Ten families are tested in every way, with hand-made configurations. Thirty others, each with its own kind of
attention, are compared by the tool that compares all of them (`python -m tools.families`).
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import multihead as mh
from multihead.errors import ModelError
from multihead.probes import PROBES
from multihead.record.sample import SampleRecord
from tests.families import CALLS, DECODERS, FAMILIES, LENGTH, PADDED, VOCABULARY, batch_of, family
from tests.watched import brute_force, eager, eager_weights, watched, without_padding
from tools.families.catalogue import model_classes
from tools.families.comparison import SHARP, Result, compare
from tools.families.detours import DETOURS, detour

CASES = [(name, "none") for name in FAMILIES] + [(name, side) for name in PADDED for side in ("right", "left")]


@pytest.mark.parametrize(("name", "padding"), CASES)
def test_weights_and_statistics_are_those_of_the_eager_attention_and_the_output_is_that_without_observation(
    name: str, padding: str
) -> None:
    model, batch = family(name), batch_of(name, padding=padding)
    with torch.no_grad():
        unobserved = model(**batch)[0]
    expected = eager_weights(name, eager(model, batch))
    output, seen = watched(model, batch)
    assert len(seen.layers) == len(expected) == CALLS.get(name, 2)
    for layer, weights in zip(seen.layers, expected, strict=True):
        assert layer.num_samples == 2
        for sample in range(2):
            trimmed = without_padding(weights, name, layer.name, batch, sample)
            torch.testing.assert_close(layer.weights(sample=sample), trimmed, atol=1e-5, rtol=0)
            piece = layer.sample(sample)
            by_hand = brute_force(trimmed.double(), piece.query_start, piece.visible())
            found = {statistic: piece.statistics[statistic].double() for statistic in by_hand}
            # Sharp scores: the eager weights themselves are 1.6e-5 off those in float64, and so are ours.
            torch.testing.assert_close(found, by_hand, atol=1e-5, rtol=4e-5, equal_nan=True)
    rows = comparable_rows(name, padding, batch, unobserved)
    torch.testing.assert_close(output[0][rows], unobserved[rows], atol=2e-5, rtol=2e-5)


def comparable_rows(name: str, padding: str, batch: dict[str, Tensor], output: Tensor) -> Tensor:
    """Return which rows of an output have the same meaning in every attention, (batch, queries)."""
    mask = batch.get("decoder_attention_mask" if name == "t5" else "attention_mask")
    if mask is None:
        return torch.ones(output.shape[:2], dtype=torch.bool)
    if name in ("bert", "albert"):
        return torch.ones_like(mask, dtype=torch.bool)  # padding too: it sees the keys that are none
    if padding == "right" and name in ("gpt2", "llama", "t5"):
        return torch.ones_like(mask, dtype=torch.bool)
    return mask.bool()  # padding that sees no key is 0 here, and some mean of values there


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
        return model.generate(**batch, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0, **options)


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


# Without padding nothing is left out of the keys of a cache: that is tried with one family, and each with padding.
@pytest.mark.parametrize(
    ("name", "padding", "cache"),
    [
        *((name, "left", "dynamic") for name in DECODERS),
        *(("gemma2", "none", cache) for cache in ("dynamic", "static")),
        *((name, "left", "static") for name in ("llama", "gemma2")),
    ],
)
def test_a_decoding_is_one_record_equal_to_that_of_a_single_pass(name: str, padding: str, cache: str) -> None:
    model, batch = family(name), batch_of(name, padding=padding)
    batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
    special = range(VOCABULARY // 2)
    with mh.observe(model, special_ids=special, probes=tuple(PROBES)) as seen:
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
    target = batch.pop("decoder_input_ids")[:, :6]
    with torch.no_grad(), mh.observe(model, special_ids=range(50), probes=tuple(PROBES)) as seen:
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


# Family: model class. What is special about the attention of some is in the comment.
THIRTY = {
    "align": "AlignTextModel",
    "bart": "BartModel",
    "bert_generation": "BertGenerationDecoder",
    "biogpt": "BioGptForCausalLM",
    "blip_2": "Blip2QFormerModel",  # cross-attention from learned queries
    "cohere": "CohereForCausalLM",
    "data2vec": "Data2VecTextForMaskedLM",
    "deepseek_v2": "DeepseekV2Model",  # values are narrower than keys
    "deepseek_v32": "DeepseekV32Model",  # the keys of each query are selected by index
    "detr": "DetrModel",
    "doge": "DogeForCausalLM",  # a mask tensor with a bias
    "electra": "ElectraForMaskedLM",
    "esm": "EsmModel",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "granite": "GraniteForCausalLM",  # a scale of its own
    "minimax_m3_vl": "MiniMaxM3VLTextModel",  # the keys of each query are selected in blocks
    "mistral": "MistralForCausalLM",
    "mobilebert": "MobileBertModel",
    "mt5": "MT5EncoderModel",
    "olmo2": "Olmo2Model",  # norms of queries and keys
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "qwen2_moe": "Qwen2MoeModel",  # a window of 0 keys that no layer uses
    "roberta": "RobertaForMaskedLM",
    "splinter": "SplinterModel",
    "stablelm": "StableLmForCausalLM",
    "swin": "SwinModel",  # windows of an image as rows of a batch
    "vit_mae": "ViTMAEForPreTraining",  # its decoder has a copy of the configuration
    "wav2vec2": "Wav2Vec2Model",
}
# One class for each part of attention that could be lost.
WITH = {
    "mask": ("opt", "OPTModel"),
    "scale": ("granite", "GraniteForCausalLM"),
    "softcap": ("gemma2", "Gemma2ForCausalLM"),
    "sinks": ("gpt_oss", "GptOssModel"),
    "bias": ("t5", "T5EncoderModel"),
    "window": ("mistral", "MistralForCausalLM"),
}


def compared(family: str, name: str, mutation: str | None = None) -> Result:
    return compare(family, next(each for each in model_classes(family) if each.__name__ == name), mutation)


@pytest.mark.parametrize("family", THIRTY)
def test_thirty_families_agree_with_eager_attention_where_it_is_sharp(family: str) -> None:
    result = compared(family, THIRTY[family])
    assert (result.outcome, result.reason) == ("equal", "")
    assert result.calls > 0
    assert result.weights > 0
    assert result.entropy <= SHARP


@pytest.mark.parametrize("part", WITH)
def test_the_comparison_finds_attention_without_one_of_its_parts(part: str) -> None:
    family, name = WITH[part]
    assert part in compared(family, name).features
    assert compared(family, name, part).outcome == "different"


def by_use(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with mh.use(model):
        return model(**batch)[0]  # type: ignore[no-any-return]


def by_name(model: Any, batch: dict[str, Tensor]) -> Tensor:
    mh.use()
    model.set_attn_implementation("multihead")
    return model(**batch)[0]  # type: ignore[no-any-return]


def by_observing(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with mh.observe(model):
        return model(**batch)[0]  # type: ignore[no-any-return]


REPLACED = "LlamaForCausalLM computes attention where it cannot be replaced: model.layers.1.self_attn. "
BOOLEAN = "The model computes add of its attention mask, which is Boolean with this library's attention"
REFUSALS = {
    "softmax of its own": f"{REPLACED}Outside computes its weights itself",
    "softmax of its own, named attention": f"{REPLACED}OutsideAttention computes its weights itself",
    "eager function in one layer": BOOLEAN,
    "eager function of the module": f"{REPLACED}AlwaysEagerAttention calls eager_attention_forward itself.",
    "exponentials and their sum": f"{REPLACED}MixerAttention replaces the forward of LlamaAttention, which calls",
    "bias added to the mask": BOOLEAN,
    "replaced forward": f"{REPLACED}The forward of this LlamaAttention was replaced. LlamaAttention computes its",
    "tensor for the eager function": "ScaledAttention passes the tensor 'head_scale' to its attention, which this",
    "bias of the eager function": f"{REPLACED}The eager attention of SlopedAttention, _sloped, computes something else",
}


@pytest.mark.parametrize(
    ("road", "padding"), [(by_use, "none"), (by_use, "right"), (by_name, "right"), (by_observing, "none")]
)
@pytest.mark.parametrize("name", DETOURS)
def test_a_layer_that_bypasses_our_attention_is_rejected(name: str, road: Any, padding: str) -> None:
    """Accepted, its output would be 0.8 to 2.5 off that of eager attention."""
    model, batch = family("llama"), batch_of("llama", padding=padding)
    detour(model, name)
    assert eager(model, batch)[0].isfinite().all()
    with torch.no_grad(), pytest.raises(ModelError, match=re.escape(REFUSALS[name])):
        road(model, batch)


@pytest.mark.parametrize("name", DETOURS)
def test_the_comparison_of_all_families_finds_each_detour(name: str) -> None:
    assert compared("llama", "LlamaModel", name).outcome == "rejected"


@pytest.mark.parametrize(
    ("family", "name", "reason"),
    [
        ("mpt", "MptForCausalLM", "MptAttention computes its weights itself"),
        ("longformer", "LongformerModel", "LongformerSelfAttention computes its weights itself"),
        ("luke", "LukeModel", "LukeSelfAttention computes its weights itself"),
    ],
)
def test_families_with_attention_of_their_own_are_rejected(family: str, name: str, reason: str) -> None:
    result = compared(family, name)
    assert result.outcome == "rejected"
    assert reason in result.reason


def test_the_pooling_head_of_siglip_runs_as_our_drop_in_and_is_observed() -> None:
    result = compared("siglip", "SiglipVisionModel")
    assert (result.outcome, result.reason) == ("equal", "")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=4)
    model = transformers.SiglipVisionModel(config).eval().double()
    (head,) = (module for module in model.modules() if isinstance(module, nn.MultiheadAttention))
    weights: list[Tensor] = []
    plain = head.forward

    def returning(*args: Any, **options: Any) -> Any:
        weights.append(plain(*args, **options | {"average_attn_weights": False})[1])
        return plain(*args, **options)

    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        head.forward = returning
        expected = model(images).pooler_output
        del head.forward
        with mh.observe(model) as seen:
            found = model(images).pooler_output
    assert type(head) is nn.MultiheadAttention
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    layer = seen.layers[-1]
    assert layer.name.endswith("head.attention")
    for sample in range(2):
        torch.testing.assert_close(layer.weights(sample=sample), weights[0][sample], atol=1e-12, rtol=0)
