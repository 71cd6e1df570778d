"""A text of `generate` is what it returned, recorded as one pass over it records it, however it was decoded."""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from transformers import GenerationMixin, LogitsProcessor, StoppingCriteriaList

import multihead as mh
from multihead.errors import ModelError
from multihead.observation.record import Record
from multihead.record.sample import SampleRecord

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "beam samples": {"num_beams": 3, "do_sample": True},
    "no cache": {"use_cache": False},
    "beams without a cache": {"num_beams": 3, "use_cache": False},
    "a static cache": {"cache_implementation": "static"},
    "the prompt in chunks": {"prefill_chunk_size": 4},
    "guidance": {"guidance_scale": 1.5},
}
OF_ONE_TEXT: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "early exit": {"assistant_early_exit": 1},
}
PADDED = ("greedy", "beams", "no cache", "a static cache", "the prompt in chunks")
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.4}
HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


@cache
def decoder(*, window: int | None = None, layers: int = 2) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, **HEADS, "num_hidden_layers": layers}
    config = hf.LlamaConfig(**sizes) if window is None else hf.MistralConfig(**sizes, sliding_window=window)
    kind: Any = hf.LlamaForCausalLM if window is None else hf.MistralForCausalLM
    return kind(config).double().eval()


def prompts(*, padded: bool = False) -> dict[str, Tensor]:
    ids = torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": ids}
    ids[1, :4] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@cache
def end_of_a_text() -> int:
    """A token that the first greedy text has early, and the second one has not."""
    first, second = decoder().generate(**prompts(), max_new_tokens=12, do_sample=False, eos_token_id=None).tolist()
    return next(token for token in first[10:15] if token not in second and token not in first[:10])


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(0)
    settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": end_of_a_text()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about arguments
        return model.generate(**inputs, **(settings | options))  # type: ignore[no-any-return]


def assert_same_text(found: SampleRecord, alone: SampleRecord) -> None:
    assert (found.num_queries, found.num_keys) == (alone.num_queries, alone.num_keys)
    assert found.query_start == 0
    assert found.text.ids is not None
    assert alone.text.ids is not None
    assert found.text.ids.tolist() == alone.text.ids.tolist()
    torch.testing.assert_close(found.statistics, alone.statistics, atol=1e-9, rtol=0, equal_nan=True)
    if found.keeps_weights:
        torch.testing.assert_close(found.weights(), alone.weights(), atol=1e-9, rtol=0)


def assert_texts_are_those_returned(model: Any, seen: Record, returned: Tensor, *, stop: int | None = None) -> None:
    """Judge each text by one pass over it alone: up to its end token, which a batch that goes on has read."""
    for index, row in enumerate(returned.tolist()):
        ids = row[next(place for place, token in enumerate(row) if token) :]  # without padding on the left
        if stop in ids:
            ids = ids[: ids.index(stop) + 1]
        read = seen.layers[0].samples[index].num_queries
        assert read in (len(ids), len(ids) - 1)
        with mh.observe(model) as alone:
            model(torch.tensor([ids[:read]]))
        for layer, expected in zip(seen.layers, alone.layers, strict=True):
            assert layer.num_samples == len(returned)
            assert_same_text(layer.samples[index], expected.samples[0])


@torch.no_grad()
@pytest.mark.parametrize(
    ("way", "padded", "window"),
    [
        *((way, way in PADDED, None) for way in (*WAYS, *OF_ONE_TEXT)),  # of two padded texts one has no padding
        *((way, True, 5) for way in ("beams", "a static cache", "the prompt in chunks")),
        ("prompt lookup", False, 5),
    ],
)
def test_a_text_is_recorded_as_one_pass_over_it_is(way: str, padded: bool, window: int | None) -> None:
    model, inputs = decoder(window=window), prompts(padded=padded)
    if way in OF_ONE_TEXT:
        inputs = {name: value[:1] for name, value in inputs.items()}
    with mh.observe(model) as seen:
        returned = generate(model, inputs, **(WAYS | OF_ONE_TEXT)[way])
    assert_texts_are_those_returned(model, seen, returned, stop=end_of_a_text())


@torch.no_grad()
def test_a_text_that_has_ended_early_is_recorded_without_the_fillers_after_it() -> None:
    with mh.observe(decoder()) as seen:
        returned = generate(decoder(), prompts())
    end = returned[0].tolist().index(end_of_a_text(), 9) + 1
    assert [sample.num_queries for sample in seen.layers[0].samples] == [end, returned.shape[1] - 1]


@torch.no_grad()
def test_drafts_of_an_assistant_and_its_own_passes_are_in_no_text() -> None:
    model = nn.ModuleDict({"main": decoder(), "assistant": decoder(layers=1)})
    inputs = {name: value[:1] for name, value in prompts().items()}
    with mh.observe(model) as seen:
        returned = generate(model["main"], inputs, assistant_model=model["assistant"])
    assert {layer.name.split(".")[0] for layer in seen.layers} == {"main"}
    assert_texts_are_those_returned(decoder(), seen, returned, stop=end_of_a_text())


@torch.no_grad()
@pytest.mark.parametrize(
    ("keep", "way"),
    [("statistics", "beams"), ("summary", "greedy"), ("summary", "beams"), ("summary", "no cache")],
)
def test_statistics_and_summaries_of_texts_are_those_of_one_pass_over_them(keep: Any, way: str) -> None:
    model = decoder()
    with mh.observe(model, keep=keep) as seen:
        returned = generate(model, prompts(), eos_token_id=None, **WAYS[way])
    with mh.observe(model, keep=keep) as alone:
        model(returned[:, :-1])
    assert seen.kinds() == alone.kinds()
    for found, expected in zip(seen.layers, alone.layers, strict=True):
        assert found.num_samples == expected.num_samples
        torch.testing.assert_close(found.means(), expected.means(), atol=1e-9, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("way", ["greedy", "beams", "no cache", "a static cache", "samples"])
def test_a_decoder_with_an_encoder_reads_one_text_per_returned_sequence(way: str) -> None:
    torch.manual_seed(3)
    sizes = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    model: Any = hf.T5ForConditionalGeneration(
        hf.T5Config(**sizes, decoder_start_token_id=0, pad_token_id=0, initializer_factor=3.0)
    )
    model = model.double().eval()
    source, mask = prompts()["input_ids"][:, :7], torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = mask[1, 5:] = 0
    with mh.observe(model) as seen:
        returned = generate(model, {"input_ids": source, "attention_mask": mask}, eos_token_id=None, **WAYS[way])
    for index, row in enumerate(returned):
        prompt = index * 2 // len(returned)
        read = seen["decoder.block.0.layer.0.SelfAttention"].samples[index].num_queries
        with mh.observe(model) as alone:
            model(input_ids=source[prompt][mask[prompt] == 1][None], decoder_input_ids=row[None, :read])
        for layer in seen.layers:
            sample = layer.samples[index if layer.name.startswith("decoder") else prompt]
            assert_same_text(sample, alone[layer.name].samples[0])


@torch.no_grad()
def test_a_prompt_of_embeddings_and_one_in_a_cache_begin_their_texts_where_they_were_read() -> None:
    model, ids = decoder(), prompts()["input_ids"]
    with mh.observe(model) as seen:
        generate(model, {"inputs_embeds": model.get_input_embeddings()(ids)}, max_new_tokens=4, eos_token_id=None)
    assert [sample.num_queries for sample in seen.layers[0].samples] == [12, 12]
    assert seen.layers[0].samples[0].text.ids is None
    cached = model(ids[:, :6], use_cache=True).past_key_values
    with mh.observe(model) as seen:
        generate(model, {"input_ids": ids, "past_key_values": cached}, max_new_tokens=4, eos_token_id=None)
    assert [(each.query_start, each.num_queries, each.num_keys) for each in seen.layers[0].samples] == [(6, 6, 12)] * 2


@torch.no_grad()
@pytest.mark.parametrize("observed", ["the model inside", "a module around", "two records"])
def test_generate_is_followed_wherever_the_observed_module_is(observed: str) -> None:
    model = decoder()

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Tensor:
            return generate(self.inner, {"input_ids": ids}, num_beams=2)

    around = Around()
    root: nn.Module = {"the model inside": model.model, "a module around": around}.get(observed, model)
    with mh.observe(root) as seen, mh.observe(model, keep="summary") as summary:
        returned = around(prompts()["input_ids"])
    assert_texts_are_those_returned(model, seen, returned, stop=end_of_a_text())
    assert summary.layers[0].num_samples == len(returned)


class Interrupting(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 11:
            raise KeyboardInterrupt
        return scores


@torch.no_grad()
def test_an_interrupted_generate_leaves_no_text_and_the_model_as_it_was() -> None:
    model, before = decoder(), (GenerationMixin.generate, StoppingCriteriaList.__call__)
    with mh.observe(model) as seen:
        with pytest.warns(UserWarning, match="ended with an error") as told, pytest.raises(KeyboardInterrupt):
            model.generate(**prompts(), max_new_tokens=9, logits_processor=[Interrupting()], pad_token_id=0)
        model(**prompts())
    sentence = "generate of LlamaForCausalLM ended with an error, so its texts are not in the record."
    assert sentence in [str(each.message) for each in told]
    assert [sample.num_queries for sample in seen.layers[0].samples] == [9, 9]
    assert (GenerationMixin.generate, StoppingCriteriaList.__call__) == before
    assert "prepare_inputs_for_generation" not in vars(model)


@torch.no_grad()
def test_a_way_of_decoding_that_cannot_be_followed_is_an_error_that_names_a_way_out() -> None:
    def invented(model: Any, input_ids: Tensor, **_: Any) -> Tensor:
        model(input_ids)
        return torch.cat([input_ids, input_ids], 1)

    with pytest.raises(ModelError) as caught, mh.observe(decoder()):
        decoder().generate(**prompts(), max_new_tokens=9, pad_token_id=0, custom_generate=invented)
    assert str(caught.value) == (
        "generate of LlamaForCausalLM returned tokens that no forward pass which could be followed has read. Call "
        "generate before, and observe one pass over what it returns: model(sequences)."
    )


@torch.no_grad()
@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
def test_rows_of_a_cache_that_become_others_by_hand_begin_texts_at_their_position(change: str) -> None:
    model, ids = decoder(), prompts()["input_ids"]
    with mh.observe(model) as seen:
        cached = model(ids[:, :6], use_cache=True).past_key_values
        getattr(cached, change)(torch.tensor([1, 0]))
        model(ids[:, 6:], past_key_values=cached)
    found = [(each.query_start, each.num_queries) for each in seen.layers[0].samples]
    assert found == [(0, 6), (0, 6), (6, 3), (6, 3)]


@torch.no_grad()
@pytest.mark.parametrize("positions", [slice(0, None, 2), slice(12, None), 3])
def test_positions_and_texts_of_heads_off_are_the_same_in_each_cache(positions: Any) -> None:
    model, found = decoder(window=5), []
    for way in ("greedy", "a static cache", "no cache"):
        with mh.ablate(model, "L0 H1", positions=positions):
            found.append(
                torch.stack(
                    model.generate(
                        **prompts(padded=True),
                        max_new_tokens=9,
                        do_sample=False,
                        pad_token_id=0,
                        eos_token_id=None,
                        output_logits=True,
                        return_dict_in_generate=True,
                        **WAYS[way],
                    ).logits
                )
            )
    torch.testing.assert_close(found[1], found[0], atol=1e-9, rtol=0)
    torch.testing.assert_close(found[2], found[0], atol=1e-9, rtol=0)


@torch.no_grad()
def test_samples_of_heads_off_are_prompts_not_beams() -> None:
    model, inputs = decoder(), prompts()
    options: dict[str, Any] = {"num_beams": 3, "eos_token_id": None}
    with mh.ablate(model, "L0 H1", samples=[1]):
        found = generate(model, inputs, **options)
    with mh.ablate(model, "L0 H1"):
        off = generate(model, {"input_ids": inputs["input_ids"][1:]}, **options)
    on = generate(model, {"input_ids": inputs["input_ids"][:1]}, **options)
    assert found.tolist() == [*on.tolist(), *off.tolist()]
