"""Sums over many texts take the same memory for any number of them, and say what single texts say."""

from __future__ import annotations

import itertools
import pickle
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
    QuantileSketch,
    RunningSummary,
)
from multihead.record.summaries import MeasuredStatistic
from tests.kernel_names import needs_native
from tests.observation.recorded import Reader, ids, read

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
        sketch = QuantileSketch.empty(3)
        sketch.add(numbers, torch.ones(3, 1000, dtype=torch.bool))
        for again in (sketch, QuantileSketch.from_tensors(**sketch.tensors()), pickle.loads(pickle.dumps(sketch))):
            for share in (0.0, 0.3, 0.5, 0.95, 1.0):
                expected = numbers.double().quantile(share, dim=-1, interpolation="lower")
                expected = expected.where(expected.abs() > MIN_BINNED_VALUE, 0.0)
                torch.testing.assert_close(again.quantile(share), expected, rtol=0.0101, atol=MIN_BINNED_VALUE)
            assert torch.equal(again.quantile(1.0), numbers.double().amax(-1))


def test_the_maximum_of_the_largest_score_is_exact_and_may_be_negative() -> None:
    summary = RunningSummary(2)
    values = torch.tensor([[[-3.0, 5.25], [1.0, 2.0]], [[7.125, 9.0], [torch.nan, 0.0]]])  # (batch, heads, queries)
    counted = torch.tensor([[[True, True], [True, True]], [[True, False], [False, True]]])
    for _ in range(2):
        summary.add(
            {"largest_score": MeasuredStatistic(values, counted), "other": MeasuredStatistic(values, counted)},
            samples=2,
        )
        summary.add({"largest_score": MeasuredStatistic(values[0], counted[0])}, samples=1)
    assert summary.summary("max", ("largest_score",))["largest_score"].tolist() == [7.125, 2.0]
    summary.add({"largest_score": MeasuredStatistic(values, torch.ones_like(counted))}, samples=2)
    assert summary.summary("max", ("largest_score",))["largest_score"].isnan().tolist() == [False, True]
    assert RunningSummary(2).summary("max") == {}


def test_the_smallest_the_largest_and_what_is_no_number_are_counted_too() -> None:
    sketch = QuantileSketch.empty(2)
    sketch.add(torch.tensor([[0.0, 1e-30, 1e30], [1.0, torch.nan, 1.0]]), torch.ones(2, 3, dtype=torch.bool))
    assert int(sketch.bins.sum()) == 6
    assert sketch.quantile(0.5).isnan().tolist() == [False, True]
    assert float(sketch.quantile(0.5)[0]) == 0
    assert float(sketch.quantile(1.0)[0]) == float(torch.tensor(1e30))
    assert torch.equal(QuantileSketch.empty(2).quantile(0.5), torch.zeros(2, dtype=torch.float64))


@needs_native
@pytest.mark.parametrize("shape", [(7, 3, 41), (3, 41), (2, 3, 0), (0, 3, 4)])
def test_the_native_library_adds_the_same_values_to_the_same_bins(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    # from below MIN_BINNED_VALUE to above MAX_BINNED_VALUE, of both signs
    values = torch.exp(8 * torch.randn(shape, generator=generator)) * torch.randn(shape, generator=generator).sign()
    extremes = torch.tensor([0.0, -0.0, -2.5, 1e-42, MIN_BINNED_VALUE, MAX_BINNED_VALUE, torch.inf, -torch.inf])
    values.view(-1)[: len(extremes)] = extremes[: values.numel()]
    if values.numel():
        values[..., -1, -1] = torch.nan
    counted = torch.rand(shape, generator=generator) < 0.7
    # A tensor in another order than the kernel's, and one of which a part is used.
    strided = (
        values.transpose(-1, -2).contiguous().transpose(-1, -2),
        torch.cat([counted, counted], -1)[..., : shape[-1]],
    )
    found, with_tensors = QuantileSketch.empty(3), QuantileSketch.empty(3)
    for _ in range(2):
        found.add(*strided)
        with patch.object(library, "_library_or_reason", lambda: "it is hidden"):
            with_tensors.add(values, counted)
    assert torch.equal(found.bins, with_tensors.bins)
    assert torch.equal(found.count, with_tensors.count)
    torch.testing.assert_close(found.total, with_tensors.total, equal_nan=True, rtol=1e-13, atol=0)


@needs_native
def test_a_sum_has_the_same_bits_for_any_number_of_threads() -> None:
    values, counted = torch.rand(9, 5, 301), torch.rand(9, 5, 301) < 0.8
    found = []
    threads = torch.get_num_threads()
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        try:
            sketch = QuantileSketch.empty(5)
            sketch.add(values, counted)
        finally:
            torch.set_num_threads(threads)
        found.append(sketch)
    assert all(torch.equal(each.total, found[0].total) for each in found)
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
        return sum(
            each.total.nbytes + each.count.nbytes + each.bins.nbytes
            for layer in record.layers
            if layer.running_summary is not None
            for each in layer.running_summary.statistics.values()
        )

    few, many = read(ids(1, 8), keep="summary"), read(*[ids(4, 8, seed=seed) for seed in range(9)], keep="summary")
    assert held(few) == held(many)
    assert held(few) / len(few.layers) / 4 <= len(PROBES) * 8 * (2 * NUM_BINS + 2)


def test_a_pickled_summary_takes_the_memory_of_its_statistics() -> None:
    """Ranks send their summaries to each other, and the sketches are views of one tensor."""
    few, many = (
        len(pickle.dumps(read(*BATCHES, keep="summary", probes=names).layers[0].running_summary))
        for names in (("entropy",), ("entropy", "largest_weight", "mean_distance", "first_mass"))
    )
    assert many < 4.1 * few


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
    counting = patch.object(QuantileSketch, "add", autospec=True, side_effect=QuantileSketch.add)
    with torch.no_grad(), counting as sums, mh.observe(model, keep="summary") as found:
        model(texts, lengths=lengths, **options)
    # whatever the number of texts
    assert sums.call_count == sum(
        len(layer.running_summary.statistics) for layer in found.layers if layer.running_summary
    )
    with torch.no_grad(), mh.observe(model, keep="statistics") as expected:
        model(texts, lengths=lengths, **options)
    for layer, other in zip(found.layers, expected.layers, strict=True):
        assert layer.num_samples == other.num_samples == 5
        torch.testing.assert_close(layer.summary(), other.summary(), atol=1e-12, rtol=1e-12)
        assert layer.running_summary is not None
        for name, sketch in layer.running_summary.statistics.items():
            alone = QuantileSketch.empty(4)
            for sample in other.samples:
                measured = sample.measured()[name]
                alone.add(measured.values, measured.counted)
            assert torch.equal(sketch.bins, alone.bins)
            assert torch.equal(sketch.count, alone.count)
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
    next_key, previous_key = mh.probes.offset_mass(1), mh.probes.offset_mass(-1)
    with torch.no_grad(), mh.observe(layer, keep=keep, probes=[next_key, previous_key]) as found:
        for first, stop in ((0, 3), (3, 5), (5, 6)):
            layer(x[:, first:stop], cache=cache)
    call = torch.tensor([0, 0, 0, 1, 1, 2])
    with torch.no_grad(), mh.observe(layer) as whole:
        layer(x, mask=mh.masks.Keep((call[:, None] >= call)[None, None]))
    weights, means = whole.layers[0].sample().weights().double(), found.layers[0].means()
    for probe, offset in ((next_key, 1), (previous_key, -1)):
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
        assert layer.running_summary.statistics["special_mass"].count.tolist() == [18.0] * 4
        torch.testing.assert_close(layer.means(), other.means(), atol=1e-5, rtol=1e-5)
