"""What is measured on a GPU arrives on the CPU without a wait of the model, and is what the CPU measures."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multihead as mh
from multihead import masks
from multihead.counting.batches import TextBatch
from multihead.counting.tally import CensusTally, census_probes, replace_attention
from multihead.kernels.proven import UNPROVEN_VARIABLE
from multihead.observation import host_copies
from multihead.observation.host_copies import HostCopies
from multihead.record import running_summary
from tests.simulated_gpu import calls
from tests.simulated_gpu.device import Gpu, begin_to_count, simulated_gpu, skip_where_not_simulated, to_cpu, to_gpu

skip_where_not_simulated(module=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv(UNPROVEN_VARIABLE, "statistics")
    calls.import_models()
    with simulated_gpu() as gpu, torch.no_grad():
        yield gpu


def seen_by(model: Any, ids: Any, keep: Any, padding: Tensor | None = None, *, steps: int = 0) -> mh.Record:
    """Record a text, and steps of decoding after it; specials are known, whose weights are measured in the same way."""
    caches = importlib.import_module("transformers.cache_utils")
    cache = caches.DynamicCache(config=model.config) if steps else None
    with mh.observe(model, keep=keep, special_ids=(3, 5, 7)) as seen:
        model(ids, attention_mask=padding, past_key_values=cache, use_cache=steps > 0)
        for step in range(steps):
            one = torch.ones(len(ids), 1, dtype=torch.int64, device=ids.device)
            padding = None if padding is None else torch.cat([padding, one], 1)
            model(ids[:, step : step + 1], attention_mask=padding, past_key_values=cache)
    return seen


def given(*, padded: bool) -> tuple[Tensor, Tensor | None]:
    """The ids of two texts, one of which has special tokens, and the padding before the other."""
    ids = torch.randint(10, 100, (2, 30), generator=torch.Generator().manual_seed(0))
    ids[1, [4, 9]] = torch.tensor([3, 5])
    return ids, (torch.arange(30) >= torch.tensor([[10], [0]])).long() if padded else None


def check_close(got: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert got.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(to_cpu(got[name]).double(), value.double(), atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("keep", "padded"), [("statistics", True), ("cpu", False), ("cpu", True), ("device", True)])
def test_a_record_of_decoding_is_that_of_the_cpu(gpu: Gpu, keep: str, padded: bool) -> None:
    ids, padding = given(padded=padded)
    right = seen_by(calls.llama(1, lambda values: values), ids, keep, padding, steps=3)
    model = calls.llama(1)
    seen_by(model, to_gpu(ids), keep, to_gpu(padding), steps=1)  # plans
    begin_to_count()
    seen = seen_by(model, to_gpu(ids), keep, to_gpu(padding), steps=3)
    assert gpu.counts.launches["measure_queries"] == 4
    assert gpu.counts.reads["event"] == 0
    for sample, of_cpu in zip(seen.layers[0].samples, right.layers[0].samples, strict=True):
        check_close(sample.statistics, of_cpu.statistics)
        assert sample.text.ids is not None
        assert torch.equal(sample.text.ids, of_cpu.text.ids)
        check_close({"logsumexp": sample.logsumexp.all_rows()}, {"logsumexp": of_cpu.logsumexp.all_rows()})
        if keep != "statistics":
            check_close({"weights": sample.weights()}, {"weights": of_cpu.weights()})


class Layers(nn.Module):
    """Two layers, each with a cache of its own, or with a memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(mh.MultiHeadAttention(32, 2).eval() for _ in range(2))

    def forward(self, x: Any, caches: Any = (None, None), **options: Any) -> Any:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache=cache, **options)
        return x


def on_gpu(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(to_gpu(parameter.detach()), requires_grad=False)
    return model


TEXTS: dict[str, tuple[dict[str, Any], bool, int, int]] = {
    # options, whether steps of decoding follow, and the launches and reads of a layer in the last step, or the call
    "several texts in a row": ({"mask": masks.Causal() & masks.Documents((8, 16))}, True, 2, 0),
    "lengths, in one row": ({"mask": masks.Causal(), "lengths": (12, 5)}, False, 2, 0),
    "lengths, with a cache": ({"mask": masks.Causal(), "lengths": (12, 5)}, True, 6, 2),
    "a memory with lengths": ({"memory": torch.randn(2, 9, 32), "memory_lengths": (9, 3)}, False, 2, 0),
}


@pytest.mark.parametrize("keep", ["cpu", "summary"])
@pytest.mark.parametrize("name", TEXTS)
def test_layers_of_this_library_are_those_of_the_cpu(gpu: Gpu, name: str, keep: Any) -> None:
    options, decodes, most, reads = TEXTS[name]
    x, later = torch.randn(2, 15, 32, generator=torch.Generator().manual_seed(0)).split((12, 3), 1)
    records, counts = [], []
    for put in (Tensor.clone, to_gpu):
        model = Layers() if put is Tensor.clone else on_gpu(Layers())
        given = {key: put(each) if isinstance(each, Tensor) else each for key, each in options.items()}
        for observes in (True, False, True):
            with mh.observe(model, keep=keep) if observes else nullcontext() as seen:
                caches = [mh.KeyValueCache() for _ in range(2)] if decodes else (None, None)
                begin_to_count()
                model(put(x), caches, **given)
                for step in range(3 if decodes else 0):
                    begin_to_count()
                    model(put(later[:, step : step + 1]), caches, mask=given["mask"])
                counts.append(gpu.counts.totals)
        records.append(seen)
    plain, observed = counts[4:]
    assert observed["launches"] <= plain["launches"] + 2 * most + 1  # what is found once per pass
    assert observed["reads"] <= plain["reads"] + 2 * reads + 1
    for got, right in zip(records[1].layers, records[0].layers, strict=True):
        check_close(got.means(), right.means())
        for sample, of_cpu in zip(got.samples, right.samples, strict=True):
            check_close(sample.statistics, of_cpu.statistics)
            check_close({"weights": sample.weights()}, {"weights": of_cpu.weights()})


@pytest.mark.parametrize("padded", [False, True])
def test_a_summary_adds_what_has_arrived_and_is_that_of_the_cpu(
    gpu: Gpu,
    monkeypatch: pytest.MonkeyPatch,
    padded: bool,
) -> None:
    monkeypatch.setattr(host_copies, "MOST_COPIES", 3)
    monkeypatch.setattr(running_summary, "MIN_ADDED_ROWS", 40)
    ids, padding = given(padded=padded)
    right = seen_by(calls.llama(1, lambda values: values), ids, "summary", padding, steps=4).layers[0]
    seen = seen_by(calls.llama(1), to_gpu(ids), "summary", to_gpu(padding), steps=4).layers[0]
    summary, exact = seen.running_summary, right.running_summary
    assert summary is not None
    assert exact is not None
    assert len(summary._names) > 0  # some rows were added to make room
    assert len(summary._pending) > 0
    assert [each.device.type for each in (summary.bins, *summary.sums)] == ["cpu"] * 11
    for of in ("mean", "p95", "max"):
        check_close(seen.summary(of), right.summary(of))
    check_close(summary.sums._asdict(), exact.sums._asdict())
    assert seen.kinds == right.kinds


@pytest.mark.parametrize("keep", ["cpu", "summary"])
def test_generate_waits_for_no_step_and_is_that_of_the_cpu(gpu: Gpu, keep: Any) -> None:
    ids, padding = given(padded=True)
    waited = []

    def note(_: Tensor, scores: Tensor) -> Tensor:
        waited.append(gpu.counts.reads["event"])
        return scores

    seen = []
    for model, put in ((calls.llama(1, lambda values: values), Tensor.clone), (calls.llama(1), to_gpu)):
        options = {"attention_mask": put(padding), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        with mh.observe(model, keep=keep, special_ids=(3, 5)) as record:
            model.generate(put(ids), logits_processor=[note], **options)
        seen.append(record.layers[0])
    assert waited == [0] * 8
    check_close(seen[1].means(), seen[0].means())
    if keep == "cpu":
        for sample, of_cpu in zip(seen[1].samples, seen[0].samples, strict=True):
            check_close(sample.statistics, of_cpu.statistics)
            check_close({"weights": sample.weights()}, {"weights": of_cpu.weights()})


def test_a_watch_and_a_census_of_a_gpu_are_those_of_the_cpu(gpu: Gpu) -> None:
    ids, padding = given(padded=True)
    numbers, strongest = [], []
    for model, put in ((calls.llama(1, lambda values: values), Tensor.clone), (calls.llama(1), to_gpu)):
        watch = mh.Watch(model, every=1)
        for _ in range(2):
            with watch:
                model(put(ids), attention_mask=put(padding), use_cache=False)
        numbers.append({name: torch.tensor(number) for name, number in watch.numbers.items()})
        texts = {number: row.numpy() for number, row in enumerate((ids[0, 10:], ids[1], ids[0]))}
        probes = census_probes(("entropy", "previous_mass"))
        with replace_attention(model), CensusTally.measure_model(model, probes, (), 2) as tally:
            for batch in ([0, 1], [2]):
                tally.add_batch(TextBatch.pad_texts(texts, batch))
        strongest.append(tally.layers[0])
    check_close(numbers[1], numbers[0])
    check_close(strongest[1].sums._asdict(), strongest[0].sums._asdict())
    assert torch.equal(strongest[1].strongest.query_position, strongest[0].strongest.query_position)


def test_a_record_can_be_pickled_before_its_copies_have_arrived(gpu: Gpu) -> None:
    seen = seen_by(calls.llama(1), to_gpu(torch.randint(0, 100, (1, 9))), "statistics")
    again = pickle.loads(pickle.dumps(seen))
    assert torch.equal(
        again.layers[0].samples[0].statistics["entropy"], seen.layers[0].samples[0].statistics["entropy"]
    )


def test_tensors_side_by_side_are_one_copy_and_a_full_ring_waits_for_the_oldest(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_copies, "MOST_BYTES", 200)
    copies = HostCopies()
    whole = to_gpu(torch.arange(26.0))
    key = whole[2:6].view(torch.int64)
    gpu.counts.reads.clear()
    given = [whole[6:12].view(2, 3), key, whole[13:20:2]]
    found, _ = copied = copies.copy(given)
    assert len(copies._under_way) == 1
    assert gpu.counts.reads.total() == 0
    copies.copy([to_gpu(torch.ones(40))])
    assert gpu.counts.reads.total() == 1  # there was no room
    copied.arrive()
    assert gpu.counts.reads.total() == 1
    for tensor, copied in zip(given, found, strict=True):
        assert torch.equal(copied, to_cpu(tensor))
