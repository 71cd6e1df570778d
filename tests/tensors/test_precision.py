"""On a device without float64 everything is measured in float32, near what float64 gives.

The device is a simulated one, which raises an error for each tensor in float64, as PyTorch does on Apple's GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.counting.batches import TextBatch
from multihead.counting.tally import CensusTally, census_probes, replace_attention
from tests.simulated_gpu import calls
from tests.simulated_gpu.device import MPS, Gpu, simulated_gpu, skip_where_not_simulated, to_cpu, to_gpu

skip_where_not_simulated(module=True)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    calls.import_models()
    with simulated_gpu(MPS) as gpu, torch.no_grad():
        yield gpu


def test_the_device_refuses_float64_however_a_tensor_is_made(gpu: Gpu) -> None:
    single = to_gpu(torch.ones(2))
    makers = (
        single.double,
        lambda: torch.arange(3, dtype=torch.float64, device="mps"),
        lambda: torch.ones(3, dtype=torch.float64).to("mps"),
        lambda: torch.tensor([1.0], dtype=torch.float64, device="mps"),
        lambda: single.sum(dtype=torch.float64),
        lambda: torch.zeros_like(single, dtype=torch.complex128),
    )
    for make in makers:
        with pytest.raises(TypeError, match="which the MPS framework doesn't support"):
            make()
    assert single.device.type == "mps"


@pytest.mark.parametrize("mask", [masks.Causal(), masks.Lengths((70, 30)), masks.Window(8) | masks.Prefix(3)], ids=str)
def test_statistics_are_near_those_of_float64(gpu: Gpu, mask: masks.Mask) -> None:
    q, k = torch.randn(2, 4, 70, 16), torch.randn(2, 2, 70, 16)
    names = [
        "entropy",
        "effective_keys",
        "mean_distance",
        "distance_spread",
        "previous_mass",
        "near_mass",
        "first_mass",
    ]
    names += ["largest_weight", "largest_key", "largest_score", "received", "pooled_map"]
    found = mh.statistics(to_gpu(q), to_gpu(k), mask=mask, probes=names)
    exact = mh.statistics(q.double(), k.double(), mask=mask, probes=names)
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        torch.testing.assert_close(to_cpu(found[name]).to(value.dtype), value, atol=1e-4, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize("keep", ["cpu", "device", "statistics", "summary"])
def test_a_record_has_the_means_of_the_cpu(gpu: Gpu, keep: Any) -> None:
    ids, padding = torch.randint(0, 100, (2, 20)), torch.ones(2, 20, dtype=torch.int64)
    padding[0, 15:] = 0
    right, seen = (
        means(model, keep, move(ids), move(padding))
        for model, move in (
            (calls.llama(1, lambda tensor: tensor.float()), lambda tensor: tensor),
            (calls.llama(1, lambda tensor: to_gpu(tensor.float())), to_gpu),
        )
    )
    assert seen.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(seen[name], value, atol=1e-4, rtol=1e-4, equal_nan=True, msg=name)


def means(model: Any, keep: Any, ids: Tensor, padding: Tensor) -> dict[str, Tensor]:
    """Observe a padded batch and a step that continues its cache; return the means of the first layer."""
    with mh.observe(model, keep=keep) as seen:
        first = model(ids, attention_mask=padding)
        longer = torch.cat([padding, torch.ones_like(padding[:, :1])], 1)
        model(ids[:, :1], attention_mask=longer, past_key_values=first.past_key_values)
    return {name: to_cpu(value) for name, value in seen.layers[0].means().items()}


def test_a_census_and_generated_texts_have_the_means_of_the_cpu(gpu: Gpu) -> None:
    ids = torch.randint(1, 100, (2, 12))
    texts = {number: row.numpy() for number, row in enumerate(ids)}
    found: list[dict[str, Tensor]] = []
    for model, move in (
        (calls.llama(1, lambda tensor: tensor.float()), lambda tensor: tensor),
        (calls.llama(1, lambda tensor: to_gpu(tensor.float())), to_gpu),
    ):
        with mh.observe(model, keep="statistics") as seen:
            model.generate(move(ids), max_new_tokens=2, do_sample=False, pad_token_id=0)
        probes = census_probes(("entropy", "previous_mass"))
        with replace_attention(model), CensusTally.measure_model(model, probes, (), examples=1) as tally:
            tally.add_batch(TextBatch.pad_texts(texts, [0, 1]))
        sums = tally.layers[0]
        of_census = {f"census: {name}": value for name, value in sums.summary("mean").items()}
        found.append({**seen.layers[0].means(), **of_census, "text": sums.strongest.text_index.double()})
    assert found[1].keys() == found[0].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, atol=1e-4, rtol=1e-4, msg=name)


def test_a_watch_has_the_numbers_of_the_cpu(gpu: Gpu) -> None:
    ids = torch.randint(0, 100, (2, 20))
    right = numbers(calls.llama(1, lambda tensor: tensor.float()), ids)
    assert numbers(calls.llama(1, lambda tensor: to_gpu(tensor.float())), to_gpu(ids)) == {
        name: pytest.approx(value, abs=1e-4) for name, value in right.items()
    }


def numbers(model: Any, ids: Tensor) -> dict[str, float]:
    """Return the numbers of one step of a watch."""
    watch = mh.Watch(model, probes=("entropy", "first_mass"), per_head=True)
    with watch:
        model(ids, use_cache=False)
    return dict(watch.numbers)


def test_the_effects_of_heads_are_those_of_the_cpu(gpu: Gpu) -> None:
    ids, padding = torch.randint(0, 100, (3, 12)), torch.ones(3, 12, dtype=torch.int64)
    padding[0, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": padding}
    right = effects(calls.llama(1, lambda tensor: tensor.float()), batch)
    found = effects(
        calls.llama(1, lambda tensor: to_gpu(tensor.float())), {name: to_gpu(each) for name, each in batch.items()}
    )
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)


def effects(model: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """Return the effects of all heads by zero and by the mean, and what patching changes."""
    means = mh.head_means(model, [batch])
    other = {**batch, "input_ids": batch["input_ids"].flip(1)}
    return [
        mh.importance(model, [batch]).effects,
        mh.importance(model, [batch], by="mean", reference=means).effects,
        mh.patch(model, batch, other, mh.logit_difference(3, 4)).changes,
    ]
