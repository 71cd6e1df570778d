"""Statistics that one launch on a GPU measures: on the simulated one, which computes a launch from its arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.errors import SlowPathWarning
from multihead.functional import request_of
from multihead.kernels.call import AttentionCall, listen
from multihead.kernels.parts import ENTROPY, LARGEST_KEY, OFFSET_MASS
from multihead.kernels.proven import UNPROVEN_VARIABLE
from multihead.kernels.triton import launch
from multihead.kernels.triton.statistics import refusal
from multihead.probes import ProbeContext
from multihead.scores import RelativeBias
from tests.simulated_gpu import operators, statistics_kernels
from tests.simulated_gpu.device import Gpu, simulated_gpu, skip_where_not_simulated, to_cpu, to_gpu

skip_where_not_simulated(module=True)
SUMS = ("received", "pooled_map", "coverage")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    monkeypatch.setenv(UNPROVEN_VARIABLE, "statistics")
    with simulated_gpu() as gpu, torch.no_grad():
        yield gpu


def drawn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes).to(dtype)


def check(q: Tensor, k: Tensor, **options: Any) -> dict[str, Tensor]:
    """Compare statistics on the GPU with those of the CPU in float64."""
    found = mh.statistics(to_gpu(q), to_gpu(k), **{name: on_gpu(each) for name, each in options.items()})
    exact = mh.statistics(q.double(), k.double(), **{name: doubled(each) for name, each in options.items()})
    assert found.keys() == exact.keys()
    for name, value in exact.items():
        got = to_cpu(found[name])
        assert got.dtype == (torch.int64 if name == "largest_key" else torch.float32), name
        torch.testing.assert_close(got.double(), value.double(), atol=1e-4, rtol=1e-4, equal_nan=True, msg=name)
    return found


def on_gpu(given: Any) -> Any:
    if isinstance(given, RelativeBias):
        return RelativeBias(to_gpu(given.values))
    if isinstance(given, ProbeContext):
        return ProbeContext(to_gpu(given.special_keys), map_size=given.map_size, map_pool=given.map_pool)
    return to_gpu(given)


def doubled(given: Any) -> Any:
    if isinstance(given, RelativeBias):
        return RelativeBias(given.values.double())
    return given.double() if isinstance(given, Tensor) and given.is_floating_point() else given


TERMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "more keys than queries": {"mask": masks.Causal(), "query_start": "end"},
    "a start per sample": {"mask": masks.Causal(), "query_start": torch.tensor([5, -2])},
    "lengths": {"mask": masks.Lengths((40, 0)) & masks.Causal()},
    "packed texts": {"mask": masks.Documents((13, 1, 20)) & masks.Causal()},
    "no interval": {"mask": masks.Window(9) | masks.Prefix(3)},
    "a mask per head": {"mask": masks.Keep(torch.rand(2, 4, 1, 40, generator=torch.Generator().manual_seed(0)) < 0.5)},
    "softcap": {"mask": masks.Causal(), "softcap": 2.0},
    "sinks": {"mask": masks.Causal(), "sinks": torch.tensor([1.0, -1.0, 0.0, 2.0])},
    "a bias": {"bias": torch.linspace(-2, 2, 40).view(1, 1, 1, 40)},
    "a bias that hides": {"bias": torch.zeros(2, 1, 34, 40).masked_fill(torch.eye(34, 40).bool(), -torch.inf)},
    "a relative bias": {"bias": RelativeBias(torch.linspace(-3, 1, 73).expand(1, 4, 73)), "mask": masks.Causal()},
    "a negative scale": {"scale": -0.3},
}


@pytest.mark.parametrize("name", TERMS)
def test_statistics_are_those_of_the_cpu(gpu: Gpu, name: str) -> None:
    q, k = drawn(2, 4, 34, 8), drawn(2, 2, 40, 8)
    given = {"mask": masks.Full(), "query_start": 0} | TERMS[name]
    special = ProbeContext(special_keys=torch.arange(40).remainder(6).eq(1).expand(2, -1), map_size=4)
    check(q, k, **given, context=special)
    check(q, k, **given, context=special, probes=SUMS)
    check(q, k, **given, context=ProbeContext(map_size=3, map_pool="max"), probes="pooled_map")
    assert gpu.counts.launches["sum_keys"] >= 2


def test_default_statistics_are_one_launch_and_no_call_waits(gpu: Gpu) -> None:
    q, k = drawn(2, 4, 34, 8, dtype=torch.bfloat16), drawn(2, 2, 34, 8, dtype=torch.bfloat16)
    for given in ({}, {"context": ProbeContext(special_keys=torch.zeros(2, 34).bool())}):
        check(q, k, mask=masks.Causal(), **given)
        gpu.counts.launches.clear()
        gpu.counts.reads.clear()
        mh.statistics(to_gpu(q), to_gpu(k), mask=masks.Causal(), **{name: on_gpu(each) for name, each in given.items()})
        assert gpu.counts.launches["measure_queries"] == 1
        assert gpu.counts.launches.total() == 1
        assert gpu.counts.reads.total() == 0


def test_a_query_that_sees_a_nan_is_nan_and_no_other(gpu: Gpu) -> None:
    q, k = drawn(1, 2, 30, 8), drawn(1, 2, 30, 8)
    q[:, :, 4], k[:, :, 20] = torch.nan, torch.nan
    found = check(q, k, mask=masks.Causal() & masks.Window(6), probes=("entropy", "largest_key", "received"))
    bad = to_cpu(found["entropy"]).isnan()[0, 0]
    assert bad.nonzero().flatten().tolist() == [4, *range(20, 26)]


def test_sets_of_tokens_and_first_keys_of_packed_texts(gpu: Gpu) -> None:
    q, k, ids = drawn(2, 2, 50, 16), drawn(2, 2, 50, 16), torch.arange(100).view(2, 50) % 7
    mask = masks.Documents((20, 3, 27)) & masks.Causal()
    probes = [mh.probes.tokens_mass(f"of_{n}", ids=(n, n + 1)) for n in range(5)]  # the fifth is no part of the launch
    names = [*probes, mh.probes.first_keys_mass(4), "first_mass"]
    found = mh.statistics(to_gpu(q), to_gpu(k), mask=mask, probes=names, context=ProbeContext(ids=to_gpu(ids)))
    exact = mh.statistics(q.double(), k.double(), mask=mask, probes=names, context=ProbeContext(ids=ids))
    for name, value in exact.items():
        torch.testing.assert_close(to_cpu(found[name]).double(), value, atol=1e-5, rtol=0, msg=name)


class Heard:
    """A listener that keeps the results of its calls."""

    requested_statistics = frozenset({ENTROPY.name, LARGEST_KEY.name, OFFSET_MASS(-1).name})

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def receive(self, call: AttentionCall) -> None:
        self.calls.append(call)


@pytest.mark.parametrize("kernel", ["sdpa", "flex", "ragged"])
def test_listeners_receive_statistics_with_every_kernel_of_the_output(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    q, k = (to_gpu(drawn(1, 30, 2, 16, dtype=torch.bfloat16).transpose(1, 2)) for _ in range(2))
    mask: masks.Mask = masks.Causal() if kernel == "sdpa" else masks.Documents((10, 20)) & masks.Causal()
    plain = mh.attention(q, k, k, mask=mask, kernel=kernel)
    heard = Heard()
    with listen(heard):
        output = mh.attention(q, k, k, mask=mask, kernel=kernel)
    (call,) = heard.calls
    assert call.result.statistics.keys() == Heard.requested_statistics
    assert torch.equal(to_cpu(output), to_cpu(plain))
    exact = mh.statistics(to_cpu(q).double(), to_cpu(k).double(), mask=mask, probes="entropy")["entropy"]
    torch.testing.assert_close(to_cpu(call.result.statistics[ENTROPY.name]).double(), exact, atol=1e-4, rtol=0)


def test_a_kernel_that_fails_warns_once_and_torch_operators_measure(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(programs: int, given: dict[str, Any]) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setitem(statistics_kernels.KERNELS, "measure_queries", fail)
    q, k = drawn(1, 2, 20, 8), drawn(1, 2, 20, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(SlowPathWarning, match="does not run here"):
            check(q, k, mask=masks.Causal())
    with pytest.warns(SlowPathWarning) as warned:  # a warning that was an error is not the one warning
        check(q, k, mask=masks.Causal())
    (warning,) = warned
    assert str(warning.message) == (
        "The kernel that measures statistics on the GPU does not run here: RuntimeError: PassManager::run failed. "
        "Statistics are measured by operators of PyTorch, which take longer; their numbers are the same."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(q, k, mask=masks.Causal())
    request = request_of(to_gpu(q), to_gpu(k), to_gpu(k), masks.Causal())
    assert refusal(request) == "it failed on this device (RuntimeError)"


def test_what_is_refused(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(q: Tensor, k: Tensor, **options: Any) -> str | None:
        return refusal(request_of(q, k, k, masks.Full(), **options))

    q = drawn(1, 2, 6, 8)
    assert reason(q, q) == "it needs CUDA, and the tensors are on cpu"
    assert reason(to_gpu(q), to_gpu(q)) is None
    assert reason(to_gpu(q.double()), to_gpu(q.double())) == "it measures float32, bfloat16 and float16"
    wide = to_gpu(drawn(1, 2, 6, 257))
    assert reason(wide, wide) == "it needs at least one query, and heads of at most 256 columns"
    far = reason(to_gpu(q), to_gpu(q), query_start=1 << 31)
    assert far == "it needs at least one key, and positions of at most 1073741824"
    monkeypatch.setattr(operators, "CAPABILITY", [7, 5])
    assert reason(to_gpu(q), to_gpu(q)) == (
        "it needs a GPU of compute capability 8.0, because older ones would compute without matrix instructions"
    )
    monkeypatch.setattr(launch, "is_triton_missing", lambda: True)
    assert reason(to_gpu(q), to_gpu(q)) == "it is compiled by Triton, which is not installed"
    monkeypatch.delenv(UNPROVEN_VARIABLE)
    assert reason(to_gpu(q), to_gpu(q)) == (
        "it has not yet run on hardware; MULTIHEAD_UNPROVEN=statistics uses it, multihead doctor --gpu checks it"
    )
