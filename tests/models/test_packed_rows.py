"""Several texts in a row of a Hugging Face model are texts of their own, or a warning says that they see each other."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

import multihead as mh
from multihead.errors import ModelError
from multihead.observation.record import Record
from tests.families import DECODER, ENCODER, TEXT, VOCABULARY

LENGTHS = (7, 4, 9)
IDS = torch.randint(3, VOCABULARY, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(4))
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
EDGES = torch.tensor([0, 7, 11, 20], dtype=torch.int32)
RESTART = {"position_ids": POSITIONS, "use_cache": False}
MODELS = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, **TEXT)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, **TEXT, sliding_window=4)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, **TEXT, sliding_window=4)),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    ),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER, **TEXT)),
}
SEPARATED: dict[str, dict[str, Any]] = {
    "positions": RESTART,
    "edges, and a cache is filled": {"position_ids": POSITIONS, "cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES},
    "edges, and a mask of ones": {**RESTART, "cu_seqlens": EDGES.long(), "attention_mask": torch.ones_like(IDS)},
    "edges and positions": {**RESTART, "cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES, "max_length_q": 9},
}
ALONE = "use_cache=False and no attention_mask, or each text as a row of its own, padded, with an attention_mask."


def model_of(name: str) -> Any:
    torch.manual_seed(1)
    return MODELS[name]().eval()


def alone(model: Any) -> Tensor:
    return torch.cat([model(text, use_cache=False).logits for text in IDS.split(LENGTHS, 1)], 1)


def compare(rows: Record, texts: Record) -> None:
    for row, text in zip(rows.layers, texts.layers, strict=True):
        assert row.num_samples == len(LENGTHS)
        assert row.kinds == text.kinds
        for one, other in zip(row.samples, text.samples, strict=True):
            assert one.text.ids is not None
            assert other.text.ids is not None
            assert torch.equal(one.text.ids, other.text.ids)
            for name, value in other.per_query.items():
                torch.testing.assert_close(one.per_query[name], value, atol=2e-5, rtol=0, msg=name)


# transformers reads the texts of a row, and a family makes masks of them, with a window or without: one of each has
# every way, and the others two.
@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name in MODELS for way in (SEPARATED if name in ("llama", "gemma2") else [*SEPARATED][:2])],
)
@torch.no_grad()
def test_each_text_of_a_row_is_as_it_is_alone(name: str, way: str) -> None:
    model = model_of(name)
    expected = alone(model)
    with mh.observe(model) as rows:
        found = model(IDS, **SEPARATED[way]).logits
    with mh.observe(model) as texts:
        alone(model)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    compare(rows, texts)
    with mh.ablate(model, "L0 H1", positions=0, samples=[0, 2]):
        found = model(IDS, **SEPARATED[way]).logits
    parts = []
    for index, text in enumerate(IDS.split(LENGTHS, 1)):
        if index == 1:
            parts.append(model(text, use_cache=False).logits)
        else:
            with mh.ablate(model, "L0 H1", positions=0):
                parts.append(model(text, use_cache=False).logits)
    torch.testing.assert_close(found, torch.cat(parts, 1), atol=1e-3, rtol=1e-3)
    means = mh.head_means(model, [{"input_ids": IDS, **SEPARATED[way]}])
    assert {tuple(count.tolist()) for count in means.counts.values()} == {(3, 17)}


@torch.no_grad()
def test_rows_of_a_batch_have_texts_of_their_own() -> None:
    model, ids = model_of("mistral"), torch.cat([IDS, IDS.flip(1)])
    positions = torch.cat([POSITIONS, torch.arange(20)[None]])
    with mh.observe(model, keep="statistics") as rows:
        model(ids, position_ids=positions, use_cache=False)
    assert [sample.num_queries for sample in rows.layers[0].samples] == [*LENGTHS, 20]


@torch.no_grad()
def test_layers_of_a_pass_share_one_mask() -> None:
    model = model_of("llama")
    with mh.observe(model) as rows:
        model(IDS, cu_seq_lens_q=EDGES, cu_seq_lens_k=EDGES)
    first, second = (layer.samples[0].segments[0].request for layer in rows.layers)
    assert first.mask is second.mask


@pytest.mark.parametrize(
    ("arguments", "finding"),
    [
        ({"cu_seqlens": EDGES[:-1]}, "was given cu_seqlens, and cu_seqlens does not rise from 0 to its 20 tokens."),
        ({"cu_seqlens": EDGES.flip(0)}, "was given cu_seqlens, and cu_seqlens does not rise from 0 to its 20 tokens."),
        ({"cu_seqlens": EDGES.float()}, "was given cu_seqlens, and cu_seqlens is no row of integers."),
        (
            {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": torch.tensor([0, 20])},
            "was given cu_seq_lens_q, and cu_seq_lens_k gives other texts.",
        ),
        (
            {"cu_seqlens": EDGES, "input_ids": IDS.expand(2, -1)},
            "was given cu_seqlens, and the batch has 2 rows.",
        ),
    ],
)
def test_edges_that_are_not_those_of_the_row_are_an_error(arguments: dict[str, Any], finding: str) -> None:
    with mh.use(model := model_of("llama")), pytest.raises(ModelError) as refusal:
        model(**{"input_ids": IDS, **arguments})
    advice = "Give one row of texts without a cache, and edges from 0 to its number of tokens."
    assert str(refusal.value) == f"LlamaAttention {finding} {advice}"


@torch.no_grad()
def test_edges_that_continue_a_cache_are_an_error() -> None:
    with mh.use(model := model_of("llama")):
        cache = model(IDS).past_key_values
        with pytest.raises(ModelError) as refusal:
            model(IDS, past_key_values=cache, cu_seq_lens_q=EDGES)
    assert str(refusal.value).startswith(
        "LlamaAttention was given cu_seq_lens_q, and its 20 queries continue a cache of 20 keys."
    )


@torch.no_grad()
def test_edges_that_a_model_does_not_pass_to_its_attention_are_an_error() -> None:
    model = model_of("llama")
    model.model.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {name: each for name, each in kwargs.items() if name != "cu_seqlens"}),
        with_kwargs=True,
    )
    with mh.use(model), pytest.raises(ModelError) as refusal:
        model(IDS, cu_seqlens=EDGES)
    assert str(refusal.value) == (
        "LlamaForCausalLM was given cu_seqlens, and does not pass it to its attention. Give each text as a row of its "
        "own, padded, with an attention_mask."
    )


NUMBERED = (
    "The attention_mask of LlamaForCausalLM has numbers above 1, which transformers reads as 1, so the texts of a row "
    f"see each other. Give position_ids that restart, {ALONE}"
)
SEEING: dict[str, tuple[dict[str, Any], str]] = {
    "a cache is filled": (
        {"position_ids": POSITIONS},
        f"The position_ids of LlamaForCausalLM restart within a row, and its texts see each other. Give {ALONE}",
    ),
    "a mask of ones": (
        {**RESTART, "attention_mask": torch.ones_like(IDS)},
        f"The position_ids of LlamaForCausalLM restart within a row, and its texts see each other. Give {ALONE}",
    ),
    "a mask of numbers": ({"attention_mask": torch.tensor([[1] * 7 + [2] * 4 + [3] * 9])}, NUMBERED),
}


@pytest.mark.parametrize("case", SEEING)
@torch.no_grad()
def test_texts_that_see_each_other_stay_one_text_with_one_warning(case: str) -> None:
    model, (arguments, sentence) = model_of("llama"), SEEING[case]
    expected = model(IDS, **arguments).logits
    for context in (mh.use(model), mh.observe(model), mh.ablate(model, "L1 H1", positions=30)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                with context as seen:
                    found = [model(IDS, **arguments).logits for _ in range(2)]
            except ModelError:
                pass  # the text has no position 30
        assert [str(each.message) for each in caught] == [sentence]
        torch.testing.assert_close(found[0], expected, atol=1e-3, rtol=1e-3)
        if isinstance(seen, Record):
            assert [sample.num_queries for sample in seen.layers[0].samples] == [20, 20]


@torch.no_grad()
def test_a_family_that_separates_no_texts_names_rows_as_the_way_out() -> None:
    model = hf.BertModel(hf.BertConfig(**ENCODER, **TEXT))
    sentence = (
        "The position_ids of BertModel restart within a row, and its texts see each other. Give each text as a row of "
        "its own, padded, with an attention_mask."
    )
    with mh.use(model), pytest.warns(UserWarning, match=f"^{re.escape(sentence)}$"):
        model(IDS, **RESTART)


@pytest.mark.filterwarnings("error")
@torch.no_grad()
def test_padding_and_decoding_warn_of_nothing() -> None:
    mask = torch.tensor([[0] * 4 + [1] * 16, [1] * 20])
    with mh.use(model := model_of("llama")):
        model.generate(IDS.repeat(2, 1), attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model(IDS, attention_mask=torch.ones(1, 1, 20, 20).tril(), position_ids=POSITIONS)


def _whole_masks() -> dict[str, Tensor]:
    """Masks (2, 1, queries, keys): of one text, of padding, of two texts in a row."""
    causal, real = torch.ones(20, 20).tril().bool(), torch.ones(2, 1, 1, 20, dtype=torch.bool)
    real[1, ..., :4] = False
    left = causal & real
    blocks = torch.block_diag(torch.ones(7, 7), torch.ones(13, 13)).bool()
    return {
        "causal": causal.expand(2, 1, -1, -1),
        "window": (causal & ~causal.tril(-4)).expand(2, 1, -1, -1),
        "left padding": left,
        "left padding that sees all": left | ~left.any(-1, keepdim=True),
        "right padding": causal & real.flip(3),
        "two texts": (causal & blocks).expand(2, 1, -1, -1),
    }


@pytest.mark.parametrize("form", ["bool", "numbers"])
@pytest.mark.parametrize("case", _whole_masks())
@torch.no_grad()
def test_texts_are_unknown_where_only_values_of_a_mask_separate_or_hide_them(case: str, form: str) -> None:
    model, mask = model_of("llama"), _whole_masks()[case]
    ids, known = IDS.expand(2, -1), case in ("causal", "window")
    if form == "numbers":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    unknown = "attention_mask has a value per query and key, and hides padding or separates texts. Give an "
    unknown += "attention_mask of shape (batch, tokens), or position_ids that restart with use_cache=False and no "
    unknown += "attention_mask."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with mh.observe(model) as seen:
            model(ids, attention_mask=mask)
    left_out = "previous_mass, next_mass, first_mass, separator_mass, largest_key"
    finding = f"The record of model.layers.0.self_attn has no {left_out}, because its texts are unknown: {unknown}"
    assert [str(each.message) for each in caught] == ([] if known else [finding])
    assert ("first_mass" in seen.table().rows[0]) == known
    assert "entropy" in seen.table().rows[0]
    for change in (
        lambda: mh.ablate(model, "L0 H0", positions=0),
        lambda: mh.ablate(model, "L0 H0", samples=1),
        lambda: mh.ablate(model, "L0 H0", by="resample"),
        lambda: mh.ablate(model, "L0 H0", by="mean", reference=[{"input_ids": ids, "attention_mask": mask}]),
    ):
        if known:
            with change():
                model(ids, attention_mask=mask)
            continue
        with pytest.raises(ModelError) as refusal, change():
            model(ids, attention_mask=mask)
        assert str(refusal.value) == (
            f"Which token of model.layers.0.self_attn belongs to which text is unknown: {unknown}"
        )
