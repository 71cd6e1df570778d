"""What is measured on a GPU arrives on the CPU without a wait of the model, and is what the CPU measures."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead.kernels.proven import UNPROVEN_VARIABLE
from multihead.observation import host_copies
from multihead.observation.host_copies import HostCopies
from tests.simulated_gpu import calls
from tests.simulated_gpu.device import Gpu, simulated_gpu, skip_where_not_simulated, to_cpu, to_gpu

skip_where_not_simulated(module=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv(UNPROVEN_VARIABLE, "statistics")
    calls.import_models()
    with simulated_gpu() as gpu, torch.no_grad():
        yield gpu


def seen_by(model: Any, ids: Tensor, keep: str, padding: Tensor | None = None) -> mh.Record:
    with mh.observe(model, keep=keep) as seen:
        model(ids, attention_mask=padding, use_cache=False)
    return seen


@pytest.mark.parametrize("keep", ["statistics", "cpu", "device"])
def test_a_record_has_the_statistics_of_the_cpu(gpu: Gpu, keep: str) -> None:
    ids = torch.randint(0, 100, (2, 30))
    padding = torch.ones(2, 30, dtype=torch.int64)
    padding[0, 20:] = 0
    right = seen_by(calls.llama(2, lambda values: values), ids, keep, padding)
    model = calls.llama(2)
    seen_by(model, to_gpu(ids), keep, to_gpu(padding))  # plans
    gpu.counts.launches.clear()
    seen = seen_by(model, to_gpu(ids), keep, to_gpu(padding))
    assert gpu.counts.launches["measure_queries"] == 2
    for layer, exact in zip(seen.layers, right.layers, strict=True):
        for sample, of_cpu in zip(layer.samples, exact.samples, strict=True):
            assert sample.statistics.keys() == of_cpu.statistics.keys()
            for name, value in of_cpu.statistics.items():
                got = to_cpu(sample.statistics[name])
                if value.is_floating_point():
                    torch.testing.assert_close(got.double(), value.double(), atol=2e-2, rtol=2e-2, msg=name)
                else:  # two keys whose weights are equal in bfloat16 may change places
                    assert (got != value).double().mean() <= 0.05, name


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
    found, arrive = copies.copy(given)
    assert len(copies._under_way) == 1
    assert gpu.counts.reads.total() == 0
    copies.copy([to_gpu(torch.ones(40))])
    assert gpu.counts.reads.total() == 1  # there was no room
    arrive()
    assert gpu.counts.reads.total() == 1
    for tensor, copied in zip(given, found, strict=True):
        assert torch.equal(copied, to_cpu(tensor))
