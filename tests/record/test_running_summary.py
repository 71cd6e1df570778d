"""Sums over many texts take the same memory for any number of them, and say what single texts say."""

from __future__ import annotations

import itertools
import pickle
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import multihead as mh
from multihead.errors import ProbeError
from multihead.kernels.native import library
from multihead.layer.cache import KeyValueCache
from multihead.observation.record import Record
from multihead.probes import PROBES, Probe
from multihead.record.running_summary import (
    MAX_BINNED_VALUE,
    MIN_BINNED_VALUE,
    NUM_BINS,
    RunningSummary,
    quantile_of_bins,
)
from tests.kernel_names import needs_native
from tests.observation.recorded import Reader, ids, read
from tests.record.measured_rows import add_to_summary

BATCHES = [ids(2, 9, seed=1), ids(3, 5, seed=2), ids(1, 14, seed=3)]


@pytest.mark.parametrize("of", ["mean", "median", "p95", "max"])
def test_the_summary_is_that_of_the_texts(of: str) -> None:
    found, expected = read(*BATCHES, keep="summary"), read(*BATCHES)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert (layer.num_heads, layer.num_samples) == (other.num_heads, other.num_samples)
        one, another = layer.summary(of), other.summary(of)  # type: ignore[arg-type]
        assert one.keys() == another.keys()
        for name in another:
            if of == "mean":
                torch.testing.assert_close(one[name], another[name])
        assert layer.samples == []


def test_a_percentile_is_one_of_the_values_within_a_hundredth() -> None:
    values = torch.rand(3, 1000, generator=torch.Generator().manual_seed(0)).double() ** 9 * 1e4
    values[1] *= -1
    values[2, ::3] *= -1
    for numbers in (values, values.float()):
        summary = RunningSummary(3)
        add_to_summary(summary, {"one": (numbers, torch.ones(3, 1000, dtype=torch.bool))})
        for again in (summary, pickle.loads(pickle.dumps(summary))):
            for share in (0.0, 0.3, 0.5, 0.95, 1.0):
                expected = numbers.double().quantile(share, dim=-1, interpolation="lower")
                expected = expected.where(expected.abs() > MIN_BINNED_VALUE, 0.0)
                found = quantile_of_bins(again.bins, again.sums, share)
                torch.testing.assert_close(found, expected, rtol=0.0101, atol=MIN_BINNED_VALUE)
            assert torch.equal(again.summary("max")["one"], numbers.double().amax(-1))


def test_statistics_that_only_some_calls_have_keep_exact_extremes_without_what_is_not_finite() -> None:
    summary = RunningSummary(2)
    values = torch.tensor([[-3.0, 5.25, 7.125, 9.0], [1.0, 2.0, torch.nan, 0.0]])  # (heads, rows)
    counted = torch.tensor([[True, True, True, False], [True, True, False, True]])
    for _ in range(2):
        add_to_summary(summary, {"other": (values, counted)}, lengths=[2, 2])
        add_to_summary(summary, {"largest_score": (values, counted), "other": (values, counted)}, lengths=[2, 2])
        add_to_summary(summary, {"largest_score": (values[:, :2], counted[:, :2])})
    assert summary.summary("max")["largest_score"].tolist() == [7.125, 2.0]
    add_to_summary(summary, {"largest_score": (values, torch.ones_like(counted))})
    assert summary.summary("max")["largest_score"].tolist() == [9.0, 2.0]
    rows = summary.rows_of_statistics()["largest_score"]
    assert (summary.sums.num_nonfinite[rows].tolist(), summary.sums.num_queries[rows].tolist()) == ([0, 1], [14, 13])
    assert summary.sums.num_queries[summary.rows_of_statistics()["other"]].tolist() == [12, 12]
    add_to_summary(summary, {"none": (values * torch.inf, counted)})
    assert summary.summary("mean")["none"].isnan().tolist() == [True, True]
    assert (RunningSummary(2).summary("max"), summary.num_samples) == ({}, 12)


def test_the_smallest_and_the_largest_are_counted_too() -> None:
    summary = RunningSummary(2)
    values = torch.tensor([[0.0, 1e-30, 1e30], [1.0, torch.nan, 1.0]])
    add_to_summary(summary, {"one": (values, torch.ones(2, 3, dtype=torch.bool))})
    assert int(summary.bins.sum()) == 5
    assert summary.summary("median")["one"].tolist() == [0, 1]
    assert float(summary.summary("max")["one"][0]) == float(torch.tensor(1e30))


@needs_native
@pytest.mark.parametrize("lengths", [(7, 41, 0, 12), (41,), (0, 0), ()])
def test_the_native_library_adds_the_same_values_to_the_same_sums(lengths: tuple[int, ...]) -> None:
    generator, shape = torch.Generator().manual_seed(0), (3, sum(lengths))
    # from below MIN_BINNED_VALUE to above MAX_BINNED_VALUE, of both signs
    values = torch.exp(8 * torch.randn(shape, generator=generator)) * torch.randn(shape, generator=generator).sign()
    extremes = torch.tensor([0.0, -0.0, -2.5, 1e-42, MIN_BINNED_VALUE, MAX_BINNED_VALUE, torch.inf, -torch.inf])
    values.view(-1)[: len(extremes)] = extremes[: values.numel()]
    if values.numel():
        values[..., -1] = torch.nan
    counted = torch.rand(shape, generator=generator) < 0.7
    # A tensor in another order than the kernel's, and one of which a part is used.
    strided = values.mT.contiguous().mT, torch.cat([counted, counted], -1)[..., : shape[-1]]
    found, with_tensors = RunningSummary(3), RunningSummary(3)
    for _ in range(2):
        add_to_summary(found, {"one": strided}, lengths)
        with patch.object(library, "_library_or_reason", lambda: "it is hidden"):
            add_to_summary(with_tensors, {"one": (values, counted)}, lengths)
    assert torch.equal(found.bins, with_tensors.bins)
    for name, one in found.sums._asdict().items():
        other = getattr(with_tensors.sums, name)
        torch.testing.assert_close(one, other, equal_nan=True, rtol=1e-12, atol=0, msg=name)


@pytest.mark.parametrize("reason", [None, "it is hidden"])
def test_a_summary_without_quantiles_has_the_same_means_and_extremes(reason: str | None) -> None:
    values, counted = torch.randn(3, 20), torch.rand(3, 20) < 0.7
    whole, bare = RunningSummary(3), RunningSummary(3, keeps_quantiles=False)
    for summary in (whole, bare):
        with patch.object(library, "_library_or_reason", lambda: reason) if reason else nullcontext():
            add_to_summary(summary, {"one": (values, counted)}, [12, 8])
    assert bare.bins.shape == (3, 2)
    for again in (bare, pickle.loads(pickle.dumps(bare))):
        assert all(map(torch.equal, again.summary("mean").values(), whole.summary("mean").values()))
        assert all(map(torch.equal, again.summary("max").values(), whole.summary("max").values()))


@needs_native
def test_a_sum_has_the_same_bits_for_any_number_of_threads() -> None:
    values, counted = torch.rand(5, 2709), torch.rand(5, 2709) < 0.8
    found = []
    threads = torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        try:
            summary = RunningSummary(5)
            add_to_summary(summary, {"one": (values, counted)}, [301] * 9)
        finally:
            torch.set_num_threads(threads)
        found.append(summary)
    assert all(torch.equal(each.sums.mean, found[0].sums.mean) for each in found)
    assert all(torch.equal(each.bins, found[0].bins) for each in found)


@pytest.mark.parametrize(("part", "axes"), [("received", "key"), ("pooled_map", "cell of a map")])
def test_a_probe_of_a_script_with_a_number_per_key_is_refused_before_the_model_runs(part: Any, axes: str) -> None:
    own = Probe("mine", lambda parts: parts[part] * 1.0, {part})
    layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    with pytest.raises(ProbeError) as caught, mh.observe(layer, probes=("entropy", own), keep="summary"):
        pass
    assert str(caught.value) == (
        f'mine has a number per {axes}, and keep="summary" adds up numbers per query. '
        'Leave it out, or give keep="statistics".'
    )


def test_more_texts_take_no_more_memory() -> None:
    def held(record: Record) -> int:
        assert record.calls == []
        summaries = [layer.running_summary for layer in record.layers if layer.running_summary is not None]
        return sum(each.bins.nbytes + sum(column.nbytes for column in each.sums) for each in summaries)

    few, many = read(ids(1, 8), keep="summary"), read(*[ids(4, 8, seed=seed) for seed in range(9)], keep="summary")
    assert held(few) == held(many)
    assert held(few) / len(few.layers) / 4 <= len(PROBES) * 8 * (2 * NUM_BINS + 10)
    assert all(len(layer.running_summary._open) <= 1 for layer in many.layers if layer.running_summary is not None)


def test_a_pickled_summary_takes_the_memory_of_the_bins_that_have_values() -> None:
    """Ranks send their summaries to each other."""
    summary = read(*BATCHES, keep="summary").layers[0].running_summary
    assert summary is not None
    assert len(pickle.dumps(summary)) < summary.bins.nbytes / 10
    torch.testing.assert_close(pickle.loads(pickle.dumps(summary)).summary("p95"), summary.summary("p95"))


def test_a_text_in_steps_counts_once() -> None:
    layer, cache, x = mh.MultiHeadAttention(16, 4), KeyValueCache(), torch.randn(1, 9, 16)
    with torch.no_grad(), mh.observe(layer, keep="summary") as seen:
        for first, stop in itertools.pairwise((0, 5, 6, 9)):
            layer(x[:, first:stop], mask=mh.masks.Causal(), cache=cache)
    with torch.no_grad(), mh.observe(layer) as whole:
        layer(x, mask=mh.masks.Causal())
    assert seen.layers[0].num_samples == 1
    for name in ("entropy", "first_mass", "previous_mass", "mean_distance"):
        torch.testing.assert_close(seen.layers[0].means()[name], whole.layers[0].means()[name], atol=1e-5, rtol=1e-5)


def test_heads_are_found_and_shown_and_saved(tmp_path: Path) -> None:
    record = read(*BATCHES, keep="summary", special_ids=[7])
    record.save(tmp_path / "run.safetensors")
    found = Record.load(tmp_path / "run.safetensors")
    assert found.table(of="p95").rows == record.table(of="p95").rows
    assert [each.head for each in found.find(entropy=(0, None))] == [
        each.head for each in record.find(entropy=(0, None))
    ]
    assert "6 texts; sums only." in found._repr_html_()
    assert found.texts == []


def test_a_text_alone_is_refused() -> None:
    record = read(ids(1, 6), keep="summary")
    with pytest.raises(ProbeError) as caught:
        record.layers[0].sample()
    assert str(caught.value) == (
        'layers.0 was observed with keep="summary", so it has no single texts. '
        'Observe with keep="statistics" to keep each text.'
    )
    with pytest.raises(ProbeError):
        record.nearest(0, 0)


@needs_native
@pytest.mark.parametrize("options", [{}, {"padding_side": "left"}, {"query_start": 0}])
def test_a_padded_batch_is_summed_up_together(options: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, texts, lengths = Reader().eval(), ids(5, 11), (11, 2, 1, 7, 4)
    counting = patch.object(RunningSummary, "add", autospec=True, side_effect=RunningSummary.add)
    with torch.no_grad(), counting as sums, mh.observe(model, keep="summary") as found:
        model(texts, lengths=lengths, **options)
    assert sums.call_count == len(found.layers)  # whatever the numbers of texts and of statistics
    with torch.no_grad(), mh.observe(model, keep="statistics") as expected:
        model(texts, lengths=lengths, **options)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.num_samples == other.num_samples == 5
        torch.testing.assert_close(layer.summary(), other.summary(), atol=1e-12, rtol=1e-12)
        assert layer.running_summary is not None
        alone = RunningSummary(4)
        for sample in other.samples:
            alone.add(sample.measured_rows(), alone.begin_texts(1))
        for name, rows in layer.running_summary.rows_of_statistics().items():
            of_alone = alone.rows_of_statistics()[name]
            assert torch.equal(layer.running_summary.bins[rows], alone.bins[of_alone])
            assert torch.equal(layer.running_summary.sums.num_queries[rows], alone.sums.num_queries[of_alone])
    found.save(tmp_path / "run.safetensors")
    assert Record.load(tmp_path / "run.safetensors").table(of="p95").rows == found.table(of="p95").rows


@needs_native
def test_a_text_that_goes_on_from_a_batch_is_summed_up_too() -> None:
    layer, cache, x = mh.MultiHeadAttention(16, 4), KeyValueCache(), torch.randn(3, 7, 16)
    with torch.no_grad(), mh.observe(layer, keep="summary") as found:
        layer(x[:, :5], mask=mh.masks.Causal(), cache=cache)
        layer(x[:, 5:], mask=mh.masks.Causal(), cache=cache)
    with torch.no_grad(), mh.observe(layer) as whole:
        layer(x, mask=mh.masks.Causal())
    assert found.layers[0].num_samples == 3
    torch.testing.assert_close(found.layers[0].means(), whole.layers[0].means(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keep", ["summary", "statistics"])
def test_a_query_of_a_step_counts_if_the_text_has_the_key_at_the_offset(keep: Any) -> None:
    layer, cache, x = mh.MultiHeadAttention(16, 4), KeyValueCache(), torch.randn(1, 6, 16)
    next_key, later_key, previous_key = map(mh.probes.offset_mass, (1, 3, -1))
    with torch.no_grad(), mh.observe(layer, keep=keep, probes=[next_key, later_key, previous_key]) as found:
        for first, stop in ((0, 3), (3, 5), (5, 6)):
            layer(x[:, first:stop], cache=cache)
    call = torch.tensor([0, 0, 0, 1, 1, 2])
    with torch.no_grad(), mh.observe(layer) as whole:
        layer(x, mask=mh.masks.Keep((call[:, None] >= call)[None, None]))
    weights, means = whole.layers[0].sample().weights().double(), found.layers[0].means()
    for probe, offset in ((next_key, 1), (later_key, 3), (previous_key, -1)):
        expected = weights.diagonal(offset, -2, -1).mean(-1)
        torch.testing.assert_close(means[probe.name], expected, atol=1e-6, rtol=1e-6)


class Stepping(Reader):
    """A model whose layers see the last keys of a cache that keeps no others, or all keys."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.mask = mh.masks.Causal() if window is None else mh.masks.Causal() & mh.masks.Window(window)
        self.window = window
        self.begin()

    def begin(self) -> None:
        self.caches = [KeyValueCache(window=self.window) for _ in self.layers]

    def forward(self, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = layer(x, mask=self.mask, cache=cache)
        return x  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep", ["summary", "statistics"])
def test_the_token_before_the_keys_of_a_windowed_cache_counts_for_every_probe_of_induction(keep: Any) -> None:
    given = ids(2, 12) % 3
    own = Probe("own", itemgetter("induction_mass"), {"induction_mass"}, counted="repeated")
    torch.manual_seed(0)
    model = Stepping(4).eval()
    with torch.no_grad(), mh.observe(model, probes=("induction_mass", own)) as whole:
        model(given)
    model.begin()
    with torch.no_grad(), mh.observe(model, keep=keep, probes=("induction_mass", own)) as found:
        for first, stop in itertools.pairwise((0, 4, 5, 6, 8, 9, 12)):
            model(given[:, first:stop])
    for layer, other in zip(found.layers, whole.layers, strict=True):
        assert bool((other.means()["induction_mass"] > 0.05).all())
        for name in ("induction_mass", "own"):
            torch.testing.assert_close(layer.means()[name], other.means()["induction_mass"], atol=1e-5, rtol=1e-5)


@needs_native
def test_special_tokens_of_a_text_in_steps_are_known_in_every_step() -> None:
    given = ids(2, 9) % 4
    torch.manual_seed(0)
    model = Stepping().eval()
    with torch.no_grad(), mh.observe(model, keep="summary", probes=("special_mass",), special_ids=[3]) as found:
        for first, stop in itertools.pairwise((0, 4, 5, 6, 9)):
            model(given[:, first:stop])
    model.begin()
    with torch.no_grad(), mh.observe(model, probes=("special_mass",), special_ids=[3]) as whole:
        model(given)
    for layer, other in zip(found.layers, whole.layers, strict=True):
        assert layer.running_summary is not None
        assert layer.running_summary.sums.num_queries.tolist() == [18] * 4
        torch.testing.assert_close(layer.means(), other.means(), atol=1e-5, rtol=1e-5)


class TwoMasks(Reader):
    """A model whose second layer sees less."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer, window in zip(self.layers, (20, 2), strict=True):
            x = layer(x, mask=mh.masks.Causal() & mh.masks.Window(window), **options)
        return x  # type: ignore[no-any-return]


@needs_native
@pytest.mark.parametrize("batches", [[(11, 2, 1, 7, 4)], [(9,), (12,), (3, 4, 12)]], ids=str)
def test_the_kinds_of_a_summary_its_chance_and_its_standard_errors_are_those_of_the_texts(
    batches: list[tuple[int, ...]], tmp_path: Path
) -> None:
    probes = (*mh.probes.DEFAULT, "induction_mass", "separator_mass")
    torch.manual_seed(0)
    model, records = TwoMasks().eval(), []
    with torch.no_grad():
        model.layers[0].q_proj.weight[:4] = 0  # head 0 spreads evenly
    for keep in ("summary", "statistics"):
        with torch.no_grad(), mh.observe(model, keep=keep, probes=probes, special_ids=[7]) as record:  # type: ignore[arg-type]
            for lengths in batches:
                model(ids(len(lengths), max(lengths)) % 9, lengths=lengths)
        records.append(record)
    summary, texts = records
    summary.save(tmp_path / "run.safetensors")
    for found in (summary, Record.load(tmp_path / "run.safetensors"), pickle.loads(pickle.dumps(summary))):
        for one, other in zip(found.profiles(), texts.profiles(), strict=True):
            assert (one.kinds, one.evidence.keys()) == (other.kinds, other.evidence.keys())
            for name, expected in other.evidence.items():
                of_one = one.evidence[name]
                torch.testing.assert_close(of_one.mean, expected.mean, atol=1e-7, rtol=2e-6)
                torch.testing.assert_close(of_one.chance, expected.chance, atol=1e-7, rtol=2e-7, msg=name)
                torch.testing.assert_close(of_one.standard_error, expected.standard_error, atol=1e-6, rtol=1e-6)
                assert torch.equal(of_one.num_observations, expected.num_observations)
        assert [row["kind"] for row in found.table().rows] == [row["kind"] for row in texts.table().rows]
        assert found.findings() == summary.findings()
    assert summary.layers[0].kinds[0] == ("broad",)


@needs_native
@pytest.mark.parametrize("numbers", [1, 5])
def test_a_text_that_goes_on_counts_as_one_text_in_the_standard_error(numbers: int) -> None:
    layer, x = mh.MultiHeadAttention(16, 4), torch.randn(numbers, 30, 16)
    records = []
    for keep in ("summary", "statistics"):
        with torch.no_grad(), mh.observe(layer, keep=keep) as record:  # type: ignore[arg-type]
            for part in (x, x[:, :20]):  # two batches of texts
                cache = KeyValueCache()
                for first, stop in itertools.pairwise((0, 14, 15, 16, part.shape[1])):
                    layer(part[:, first:stop], mask=mh.masks.Causal(), cache=cache)
        records.append(record)
    for one, other in zip(*(each.profiles() for each in records), strict=True):
        for name, expected in other.evidence.items():
            torch.testing.assert_close(one.evidence[name].chance, expected.chance, atol=1e-7, rtol=2e-7, msg=name)
            # Of one text in two batches by blocks of its queries, as its calls are added together.
            error = one.evidence[name].standard_error
            torch.testing.assert_close(error, expected.standard_error, rtol=1e-5, atol=1e-7)


def test_a_summary_without_chance_levels_says_so_and_has_no_column_of_kinds(tmp_path: Path) -> None:
    record = read(*BATCHES, keep="summary", probes="largest_score")
    assert "kind" not in record.table().rows[0]
    with pytest.raises(ProbeError) as caught:
        record.kinds()
    assert str(caught.value) == (
        "layers.0 was summarised without chance levels, so no kinds of heads can be told. "
        'Observe it again with keep="summary"; where a sequence is split over ranks, with keep="statistics", '
        "and join the records with seen.reduce(group)."
    )


def test_integers_of_a_probe_of_a_script_are_averaged_and_queries_of_nan_are_left_out_and_counted() -> None:
    sure = Probe("sure", lambda parts: (parts["largest_weight"] > 0.2).long(), {"largest_weight"})
    layer, x = mh.MultiHeadAttention(16, 4).eval(), torch.randn(2, 9, 16)
    x[1, 4, 0] = torch.nan
    for keep in ("summary", "statistics"):
        with torch.no_grad(), mh.observe(layer, keep=keep, probes=("entropy", sure)) as record:  # type: ignore[arg-type]
            layer(x, mask=mh.masks.Causal())
        with torch.no_grad(), mh.observe(layer, probes=("entropy", sure)) as clean:
            layer(x[:1], mask=mh.masks.Causal())
            layer(x[1:, :4], mask=mh.masks.Causal())
        expected = clean.layers[0].means()
        torch.testing.assert_close(record.layers[0].means()["entropy"], expected["entropy"], atol=1e-6, rtol=1e-6)
        assert "sure" in expected
        assert [row["nonfinite"] for row in record.table().rows] == [5] * 4
        assert "nonfinite" in str(record.table()).splitlines()[0]
        assert "nonfinite" not in clean.table().rows[0]
