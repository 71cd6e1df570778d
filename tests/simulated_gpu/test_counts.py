"""What a call does on a GPU, counted without one: launches, host reads, copies to the device, frames of the library."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from multihead.kernels import fused_on_cuda
from tests.simulated_gpu import calls
from tests.simulated_gpu.calls import FRAMES, attention_calls, count_all, differences
from tests.simulated_gpu.device import _FILE_OF_LIBRARY, Gpu, simulated_gpu, skip_where_not_simulated

skip_where_not_simulated(module=True)

RECORDED = json.loads(calls.FILE.read_text(encoding="utf-8"))
SAME_TORCH = torch.__version__.split("+")[0] == RECORDED["torch"]
SAME_PYTHON = sys.version.split()[0].rpartition(".")[0] == RECORDED["python"].rpartition(".")[0]


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    calls.import_models()
    with simulated_gpu():
        return calls.measure_all()


@pytest.mark.skipif(not (SAME_TORCH and SAME_PYTHON), reason="counts.json is of another version of torch or Python")
def test_launches_reads_copies_and_frames_are_those_of_the_table(found: dict[str, dict[str, int]]) -> None:
    """If a change of the library is meant to change them, `python -m tests.simulated_gpu.calls --write` records it."""
    assert list(found) == list(RECORDED["calls"])
    assert differences(found, RECORDED["calls"]) == []


def test_no_second_call_of_attention_waits_for_a_value(found: dict[str, dict[str, int]]) -> None:
    waiting = [name for name, counts in RECORDED["calls"].items() if counts["reads"]]
    assert [name for name in waiting if "statistics" not in name and "observed" not in name] == []
    assert [name for name, counts in found.items() if counts["reads"] and name not in waiting] == []


def test_an_observed_layer_takes_at_most_two_launches_more_and_waits_for_nothing(
    found: dict[str, dict[str, int]],
) -> None:
    """In the first pass and in a step of decoding: one launch, and with q and k another one, which copies both."""
    for name in calls.observed_layer_calls():
        observed = found[f"kernels: {name}"]
        plain = name.partition(" observed")[0] + " used"
        plain += "".join(f", {each}" for each in name.split(", ") if each.startswith("padded"))
        most = 2 if "q and k" in name else 1
        assert observed["launches"] <= found[plain]["launches"] + most, name
        assert (observed["reads"], observed["copies"]) == (0, 0), name


def test_with_the_kernels_no_statistics_wait_for_a_value(found: dict[str, dict[str, int]]) -> None:
    of_kernels = {name: counts for name, counts in found.items() if name.startswith("kernels: statistics")}
    assert [counts["reads"] for counts in of_kernels.values()] == [0, 0, 0]
    assert [counts["launches"] for counts in of_kernels.values()] == [1, 1, 5]


class TestWhatIsPlantedIsSeen:
    @pytest.fixture(autouse=True)
    def _on_the_gpu(self) -> Iterator[None]:
        with simulated_gpu(), torch.no_grad():
            yield

    @staticmethod
    def sentences(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object]) -> list[str]:
        """What the table says of a causal call, in which the kernel also calls a function with q."""
        attend = fused_on_cuda.attend

        def changed(q: Any, *given: Any, **options: Any) -> Any:
            change(q)
            return attend(q, *given, **options)

        monkeypatch.setattr(fused_on_cuda, "attend", changed)
        call = attention_calls()["causal"]
        return differences({"causal": count_all(call)}, RECORDED["calls"])

    def test_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.sentences(monkeypatch, lambda q: None) == []

    def test_a_read_of_a_value(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = ["causal: 1 reads, and counts.json has 0."]
        assert self.sentences(monkeypatch, lambda q: q[0, 0, 0, 0].item()) == expected

    def test_a_launch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.sentences(monkeypatch, lambda q: q * 2) == ["causal: 2 launches, and counts.json has 1."]

    def test_a_copy_to_the_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        expected = ["causal: 1 copies, and counts.json has 0."]
        assert self.sentences(monkeypatch, lambda q: torch.tensor([1], device="cuda")) == expected

    def test_ten_frames_of_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        planted: dict[str, Any] = {}
        code = f"def planted(n={FRAMES}):\n    return n and planted(n - 1)\n"
        exec(compile(code, f"{_FILE_OF_LIBRARY}planted.py", "exec"), planted)
        (sentence,) = self.sentences(monkeypatch, lambda q: planted["planted"]())
        assert sentence.startswith("causal: ")
        assert " frames, and counts.json has " in sentence


def test_waiting_where_it_is_forbidden_is_an_error_and_the_simulation_ends_without_a_trace() -> None:
    available, make = torch.cuda.is_available, torch.tensor
    with simulated_gpu() as gpu:
        assert isinstance(gpu, Gpu)
        value = torch.ones(2, device="cuda")
        assert (value.device.type, torch.cuda.is_available()) == ("cuda", True)
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match=r"^called a synchronizing CUDA operation$"):
            value.tolist()
        on_cpu = torch.ones(2)
        for mix in (lambda: value + on_cpu, lambda: on_cpu.add_(value), lambda: on_cpu[value.long()]):
            with pytest.raises(RuntimeError, match=r"^Expected all tensors to be on the same device, but found "):
                mix()
        assert (value + torch.tensor(1.0)).device.type == value[torch.tensor([0])].device.type == "cuda"
    assert (torch.cuda.is_available, torch.tensor) == (available, make)
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(2, device="cuda")
