"""Packed rows and padded batches are measured as each text alone."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import multihead as mh
from multihead import probes
from multihead.counting.batches import TextBatch
from multihead.counting.tally import CensusTally, census_probes, replace_attention
from multihead.errors import ModelError, ProbeError
from multihead.kernels.choose import PLAN_CACHE
from multihead.kernels.plan.bounds import BOUNDS_CACHE
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.measuring import StatisticsMeasurer
from multihead.record.chance import error_of_mean
from tests.counting.tiny import bert
from tests.families import DECODER, TEXT, family

LENGTHS = 5, 1, 9, 3
CHOSEN = (*probes.DEFAULT[:10], "duplicate_mass", "induction_mass", "contribution", "largest_score")
OWN = probes.Probe("own", lambda parts: parts["offset_mass", 2], {("offset_mass", 2)}, counted="offset +2")
PLACE = probes.Probe("place", lambda parts: parts["position"], {"position"})
MADE = probes.tokens_mass("few", ids=(5, 6)), probes.offset_mass(-2), probes.first_keys_mass(3), OWN, PLACE
PROBES = census_probes([*CHOSEN, *MADE])
SPECIAL = (1, 2)


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return hf.LlamaModel(hf.LlamaConfig(**DECODER, **TEXT, **options)).eval()


def t5_encoder() -> Any:
    return family("t5").encoder.eval()


def gpt2() -> Any:
    return family("gpt2").eval()


MODELS = {"bert": bert, "llama": llama, "gpt2, which runs padded": gpt2, "t5": t5_encoder}


def texts_of(lengths: tuple[int, ...] = LENGTHS) -> TextBatch:
    draw = np.random.default_rng(0)
    ids = [np.concatenate([[1], draw.integers(3, 8, length - 1)]).astype(np.int64) for length in lengths]
    return TextBatch.pad_texts(dict(enumerate(ids)), range(len(lengths)))


def tallied(model: Any, batch: TextBatch, **options: Any) -> CensusTally:
    with (
        replace_attention(model),
        CensusTally.measure_model(model, options.pop("probes", PROBES), SPECIAL, 3, **options) as tally,
    ):
        tally.add_batch(batch)
    return tally


@pytest.mark.parametrize("name", MODELS)
def test_sums_of_a_batch_are_those_of_its_texts_observed_alone(name: str) -> None:
    model, batch = MODELS[name]().double(), texts_of()
    tally = tallied(model, batch)
    with mh.observe(model, keep="statistics", probes=PROBES, special_ids=SPECIAL) as record:
        for row, length in zip(batch.ids, batch.lengths.tolist(), strict=True):
            with torch.no_grad():
                model(input_ids=row[None, :length], attention_mask=torch.ones(1, length, dtype=torch.int64))
    assert len(record.layers) == len(tally.layers) == 2
    for layer in record.layers:
        found = tally.layers[layer.number]
        assert (found.name, set(found.names)) == (layer.name, set(layer.means()))
        for at, statistic in enumerate(found.names):
            values = [sample.measured()[statistic] for sample in layer.samples]
            for head in range(found.num_heads):
                alone = torch.cat([each.values[head][each.counted[head]] for each in values])
                row = at * found.num_heads + head
                assert found.sums.num_queries[row] == len(alone), statistic
                total = float(found.sums.mean[row] * found.sums.num_queries[row])
                assert total == pytest.approx(float(alone.sum()), abs=1e-9), statistic


@pytest.mark.parametrize("name", MODELS)
def test_chance_and_the_error_of_a_difference_from_it_are_those_of_a_record_of_the_same_texts(name: str) -> None:
    model, batch = MODELS[name]().double(), texts_of()
    tally = tallied(model, batch)
    with mh.observe(model, keep="statistics", probes=PROBES, special_ids=SPECIAL) as record, torch.no_grad():
        for row, length in zip(batch.ids, batch.lengths.tolist(), strict=True):
            model(input_ids=row[None, :length], attention_mask=torch.ones(1, length, dtype=torch.int64))
    for profile in record.profiles():
        found = tally.layers[profile.number]
        for at, statistic in enumerate(found.names):
            rows = slice(at * found.num_heads, (at + 1) * found.num_heads)
            if statistic not in profile.evidence:
                assert statistic in ("contribution", "largest_score")  # what is no matter of where a query looks
                assert bool(found.sums.chance[rows].isnan().all())
                continue
            expected = profile.evidence[statistic]
            torch.testing.assert_close(found.sums.chance[rows], expected.chance, rtol=1e-11, atol=1e-13, msg=statistic)
            error = error_of_mean(found.sums.num_texts[rows], found.sums.excess_squares[rows])
            torch.testing.assert_close(error, expected.standard_error, rtol=1e-9, atol=1e-12, msg=statistic)


def test_chance_in_single_precision_agrees_with_double() -> None:
    model, batch = bert(), texts_of()
    single, double = tallied(model, batch), tallied(model.double(), batch)
    for number, layer in single.layers.items():
        torch.testing.assert_close(
            layer.sums.chance, double.layers[number].sums.chance, rtol=1e-5, atol=1e-6, equal_nan=True
        )


def test_chance_is_measured_once_for_layers_whose_queries_see_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    spread_evenly = StatisticsMeasurer.spread_evenly

    def counted(self: StatisticsMeasurer, call: Any) -> Any:
        calls.append(call)
        return spread_evenly(self, call)

    monkeypatch.setattr(StatisticsMeasurer, "spread_evenly", counted)
    alternating = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 3}
    torch.manual_seed(0)
    options = {**DECODER, **TEXT, "num_hidden_layers": 4, "use_sliding_window": True, **alternating}
    for model, masks in ((bert(), 1), (t5_encoder(), 1), (hf.Qwen2Model(hf.Qwen2Config(**options)).eval(), 2)):
        calls.clear()
        tallied(model, texts_of())
        assert len(calls) == masks, type(model)


def test_the_sums_are_those_of_a_summary_of_the_same_texts() -> None:
    model, batch = bert(), texts_of()
    tally = tallied(model, batch)
    with torch.no_grad(), mh.observe(model, keep="summary", probes=PROBES, special_ids=SPECIAL) as record:
        model(input_ids=batch.ids, attention_mask=batch.mask.long())
    for layer in record.layers:
        found = tally.layers[layer.number]
        for of in ("mean", "median", "max"):
            torch.testing.assert_close(found.summary(of), layer.summary(of), atol=1e-5, rtol=0.03)


def test_the_native_kernel_and_tiles_agree_on_packed_rows() -> None:
    model, batch = bert(), texts_of()
    single, double = tallied(model, batch), tallied(model.double(), batch)
    for number, layer in single.layers.items():
        assert torch.allclose(layer.sums.mean, double.layers[number].sums.mean, atol=1e-5, rtol=1e-4)


def test_the_key_of_an_example_is_a_position_of_its_own_text() -> None:
    model, batch = bert(), texts_of()
    tally = tallied(model, batch, probes=census_probes("largest_weight"))
    with mh.observe(model, keep="statistics", probes="largest_key") as record, torch.no_grad():
        for row, length in zip(batch.ids, batch.lengths.tolist(), strict=True):
            model(input_ids=row[None, :length], attention_mask=torch.ones(1, length, dtype=torch.int64))
    best = tally.layers[1].strongest
    for head in range(4):
        for place in range(3):
            sample = record.layers[1].samples[int(best.text_index[head, place])]
            expected = sample.statistics["largest_key"][head, int(best.query_position[head, place])]
            assert best.largest_key[head, place] == expected


def test_plans_of_a_batch_are_dropped_after_it_because_its_lengths_do_not_recur() -> None:
    before = PLAN_CACHE.nbytes, BOUNDS_CACHE.nbytes
    tallied(bert(), texts_of((3, 14, 15, 9)))
    assert (PLAN_CACHE.nbytes, BOUNDS_CACHE.nbytes) == before


def test_layers_are_chosen_as_in_observe() -> None:
    assert list(tallied(bert(), texts_of(), layer_filter=LayerFilter.from_argument([1])).layers) == [1]
    missed = tallied(bert(), texts_of(), layer_filter=LayerFilter.from_argument([7]))
    names = "0: encoder.layer.0.attention.self, 1: encoder.layer.1.attention.self"
    sentence = f"No layer that ran matches 7. Choose among {names}."
    with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
        missed.check_complete()


def test_a_model_without_captured_attention_is_an_error() -> None:
    with (
        CensusTally.measure_model(bert(), PROBES, (), 1) as tally,
        pytest.raises(ModelError, match=r"^No attention call of BertModel was captured: "),
    ):
        tally.check_complete()


def test_a_layer_that_reads_something_else_than_the_tokens_is_an_error() -> None:
    model, batch = family("t5").eval(), texts_of()
    mask = batch.mask.long()
    given = {"input_ids": batch.ids, "attention_mask": mask, "decoder_input_ids": batch.ids}
    sentence = (
        "decoder.block.0.layer.1.EncDecAttention attends from 9 queries to 9 keys, which are not the tokens of the "
        "texts. Give a model whose layers read each token of a text once, or choose other layers."
    )
    with replace_attention(model), CensusTally.measure_model(model, PROBES, (), 1) as tally:
        tally.current.batch = batch
        with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):
            model(**given, decoder_attention_mask=mask)
    sentence = (
        "decoder.block.0.layer.0.SelfAttention reads 36 tokens, and the texts of the batch have 18. Give a model whose "
        "layers read each token of a text once, or choose other layers."
    )
    with replace_attention(model), CensusTally.measure_model(model, PROBES, (), 1) as tally:
        tally.current.batch = batch
        with pytest.raises(ModelError, match=f"^{re.escape(sentence)}$"):  # padding that nothing hides
            model(**given)


@pytest.mark.parametrize("name", ["received", "pooled_map", "largest_key"])
def test_a_probe_without_a_number_per_query_is_an_error(name: str) -> None:
    sentence = f'{name} has no number per query that can be added up. Give probes such as "entropy".'
    with pytest.raises(ProbeError, match=f"^{re.escape(sentence)}$"):
        census_probes(name)


def test_a_set_of_tokens_without_ids_is_an_error() -> None:
    with pytest.raises(ProbeError, match=r"^few_mass needs a set of tokens\. Give their ids: "):
        census_probes(probes.tokens_mass("few"))
