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
from multihead.counting.batches import CurrentBatch, TextBatch
from multihead.counting.tally import CensusTally, LayerSums, census_probes, replace_attention
from multihead.errors import ModelError, ProbeError
from multihead.kernels.choose import PLAN_CACHE
from multihead.kernels.plan.bounds import BOUNDS_CACHE
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.measuring import StatisticsMeasurer
from multihead.record.chance import error_of_mean
from multihead.record.running_summary import RunningSummary
from tests.counting.tiny import bert
from tests.families import DECODER, TEXT, family
from tests.record.measured_rows import add_to_summary, drawn_rows

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


HEADS, EXAMPLES = 3, 4


def batch_of(texts: list[int], lengths: list[int]) -> TextBatch:
    return TextBatch.pad_texts({text: np.arange(length) for text, length in zip(texts, lengths, strict=True)}, texts)


def sums_of(heads: int, examples: int) -> LayerSums:
    return LayerSums(heads, name="layer", examples=examples, current_batch=CurrentBatch())


def add(
    sums: LayerSums,
    batch: TextBatch,
    values: torch.Tensor,
    counted: torch.Tensor | None = None,
    chance: torch.Tensor | None = None,
) -> None:
    """Add values of statistics, (statistics, heads, tokens) of a packed row; the key is the query's own.

    The chance is that of the first statistic, (heads or 1, tokens).
    """
    sums.current_batch.batch = batch
    taken = torch.ones_like(values, dtype=torch.bool) if counted is None else counted
    named = dict(zip(("one", "other"), zip(values, taken, strict=True), strict=False))
    keys = {"largest_key": batch.position_in_text.expand(sums.num_heads, -1)}
    measured = drawn_rows(named, batch.lengths.tolist(), {} if chance is None else {"one": chance}, keys)
    sums.add(measured, sums.begin_texts(len(batch.text_indices)))


@pytest.fixture(params=[torch.float32, torch.float64], ids=str)
def counted(request: pytest.FixtureRequest) -> tuple[LayerSums, torch.Tensor, torch.Tensor]:
    """Sums of three batches, with all values (2 * heads, tokens) and which of them count."""
    torch.manual_seed(0)
    sums = sums_of(HEADS, EXAMPLES)
    values, taken = [], []
    for batch in (batch_of([3, 5], [7, 4]), batch_of([0], [9]), batch_of([1, 2], [2, 30])):
        shape = 2, HEADS, batch.num_tokens
        value = torch.randn(shape, dtype=request.param).exp() - 0.5  # some are negative
        count = torch.rand(shape) < 0.8
        values.append(value.flatten(0, 1))
        taken.append(count.flatten(0, 1))
        add(sums, batch, value, count)
    return sums, torch.cat(values, 1), torch.cat(taken, 1)


def test_moments_and_extremes_are_those_of_all_values(
    counted: tuple[LayerSums, torch.Tensor, torch.Tensor],
) -> None:
    sums, values, taken = counted
    for row in range(2 * HEADS):
        of_row = values[row][taken[row]].double()
        assert sums.sums.num_queries[row] == len(of_row)
        assert float(sums.sums.mean[row]) == pytest.approx(float(of_row.mean()), abs=1e-12)
        assert float(sums.sums.squares[row]) == pytest.approx(float((of_row - of_row.mean()).square().sum()), abs=1e-11)
        assert (sums.sums.minimum[row], sums.sums.maximum[row]) == (of_row.min(), of_row.max())


def test_each_bin_holds_the_values_within_one_percent_of_its_own(
    counted: tuple[LayerSums, torch.Tensor, torch.Tensor],
) -> None:
    sums, values, taken = counted
    of_row, of_bins, numbers = map(torch.from_numpy, sums.filled_bins())
    assert bool((of_row.diff() >= 0).all())
    for row in range(2 * HEADS):
        mine = of_bins[of_row == row]
        assert bool((mine.diff() > 0).all())
        spread = mine.repeat_interleave(numbers[of_row == row])
        exact = values[row][taken[row]].double().sort().values
        assert torch.allclose(spread.double(), exact, rtol=0.01, atol=1e-9)


def test_they_are_a_running_summary_too(counted: tuple[LayerSums, torch.Tensor, torch.Tensor]) -> None:
    sums, values, taken = counted
    assert sums.num_samples == 5
    summary = RunningSummary(HEADS)
    for at, name in enumerate(("one", "other")):
        rows = slice(at * HEADS, (at + 1) * HEADS)
        add_to_summary(summary, {name: (values[rows], taken[rows])})
    for of in ("mean", "median", "p95"):
        torch.testing.assert_close(sums.summary(of), summary.summary(of), rtol=1e-12, atol=1e-12)


def test_infinite_and_missing_numbers_are_counted_and_are_in_no_sum() -> None:
    sums, batch = sums_of(1, 2), batch_of([0], [4])
    values = torch.tensor([[[1.0, torch.nan, torch.inf, 3.0]]])
    add(sums, batch, values)
    found = sums.sums
    assert (found.num_queries.tolist(), found.num_nonfinite.tolist(), found.mean.tolist()) == ([2], [2], [2.0])
    assert (found.maximum.tolist(), sums.strongest.largest_value.tolist()) == ([3.0], [[3.0, -torch.inf]])


@pytest.mark.parametrize("heads", [1, HEADS], ids=["one mask", "a mask per head"])
def test_chance_is_the_mean_over_the_queries_that_count_and_its_error_that_over_texts(heads: int) -> None:
    torch.manual_seed(0)
    sums, texts = sums_of(HEADS, EXAMPLES), []
    for batch in (batch_of([3, 5], [7, 4]), batch_of([0], [9]), batch_of([1, 2], [1, 30])):
        values = torch.rand(2, HEADS, batch.num_tokens, dtype=torch.float64)
        count = torch.rand(2, HEADS, batch.num_tokens) < 0.7
        count[0, 0, batch.text_of_token == 1] = False  # a head may have a text without a query that counts
        values[0, 1, 0], values[0, 1, 1] = torch.nan, torch.inf  # in no sum
        level = torch.rand(heads, batch.num_tokens, dtype=torch.float64)
        add(sums, batch, values.clone(), count, level)
        for text in batch.text_indices.tolist():
            of_text = batch.text_of_token == text
            texts.append([each[..., of_text] for each in (values[0], level.expand(HEADS, -1), count[0])])
    for head in range(HEADS):
        whole, means = [], []
        for values, level, count in texts:
            taken = count[head] & values[head].isfinite()
            whole.append(level[head][taken])
            if bool(taken.any()):
                means.append((values[head] - level[head])[taken].mean())
        assert float(sums.sums.chance[head]) == pytest.approx(float(torch.cat(whole).mean()), abs=1e-12)
        excess = torch.stack(means)
        assert sums.sums.num_texts[head] == len(excess) > 2
        assert float(sums.sums.excess[head]) == pytest.approx(float(excess.mean()), abs=1e-12)
        assert float(sums.sums.excess_squares[head]) == pytest.approx(
            float(excess.var() * (len(excess) - 1)), abs=1e-12
        )
    unknown = slice(HEADS, None)
    assert bool(sums.sums.chance[unknown].isnan().all() and sums.sums.excess[unknown].isnan().all())
    assert bool(sums.sums.mean[unknown].isfinite().all())


class TestStrongest:
    def test_they_are_the_largest_value_of_each_text_in_any_order_of_batches(
        self, counted: tuple[LayerSums, torch.Tensor, torch.Tensor]
    ) -> None:
        sums, values, taken = counted
        texts = [torch.where(taken, values, -torch.inf).split([7, 4, 9, 2, 30], 1)[at] for at in (2, 3, 4, 0, 1)]
        best = torch.stack([each.amax(1).double() for each in texts], 1)
        value, text = best.sort(dim=1, descending=True, stable=True)
        assert torch.equal(sums.strongest.largest_value, value[:, :EXAMPLES])
        assert torch.equal(sums.strongest.text_index, torch.tensor([0, 1, 2, 3, 5])[text[:, :EXAMPLES]])

    def test_ties_go_to_the_earlier_text_and_position(self) -> None:
        sums = sums_of(1, EXAMPLES)
        for texts in ([4, 6], [2, 5], [0, 7]):
            add(sums, batch_of(texts, [3, 3]), torch.ones(1, 1, 6))
        assert sums.strongest.text_index.tolist() == [[0, 2, 4, 5]]
        assert sums.strongest.query_position.tolist() == [[0, 0, 0, 0]]

    def test_the_values_around_an_example_end_with_its_text(self) -> None:
        sums = sums_of(1, 1)
        values = torch.tensor([[[0.1, 0.2, 0.3, 0.9, 0.4]]])
        add(sums, batch_of([0, 1], [2, 3]), values, torch.tensor([[[True, True, False, True, True]]]))
        around = sums.strongest.values_around[0, 0]
        assert around[around.isfinite()].tolist() == pytest.approx([0.9, 0.4])
        assert (sums.strongest.text_index.tolist(), sums.strongest.query_position.tolist()) == ([[1]], [[1]])

    def test_a_head_with_few_texts_that_count_has_few_examples(self) -> None:
        sums = sums_of(1, 3)
        add(sums, batch_of([0, 1], [2, 1]), torch.ones(1, 1, 3), torch.tensor([[[True, True, False]]]))
        assert sums.strongest.largest_value.tolist() == [[1.0, -torch.inf, -torch.inf]]
