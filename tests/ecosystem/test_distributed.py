"""Distributed training: two processes with half of a batch each, or half of the heads, learn what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multihead as mh
from tests.ecosystem import in_processes, in_shards
from tests.parallel.processes import Processes


@pytest.fixture(scope="module")
def folder(four: Processes, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Let two processes compute everything once; each leaves what came out in a folder."""
    folder: Path = tmp_path_factory.mktemp("trained")
    four.results(in_processes.run, folder, ranks=in_processes.PROCESSES)
    return folder


@pytest.fixture(scope="module")
def sharded(folder: Path) -> list[dict[str, Any]]:
    """What each process computed of layers whose heads are split over both."""
    return [torch.load(folder / f"heads, {rank}.pt") for rank in range(in_processes.PROCESSES)]


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[tuple[str, int], dict[str, Tensor]]:
    return {
        (way, rank): torch.load(folder / f"{way}, {rank}.pt")
        for way in in_processes.WAYS
        for rank in range(in_processes.PROCESSES)
    }


@pytest.mark.parametrize("rank", range(in_processes.PROCESSES))
@pytest.mark.parametrize("way", in_processes.WAYS)
def test_gradients_and_parameters_are_those_of_one_process_with_the_whole_batch(
    trained: dict[tuple[str, int], dict[str, Tensor]], way: str, rank: int
) -> None:
    """No parameter goes without a gradient, though one process has a sample of nothing but padding."""
    expected = in_processes.alone()
    found = {name: each for name, each in trained[way, rank].items() if name != "samples seen"}
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", range(in_processes.PROCESSES))
def test_a_hugging_face_model_on_our_kernels_learns_what_it_learns_in_one_process(folder: Path, rank: int) -> None:
    expected = in_processes.used(None, None, "sdpa")
    torch.testing.assert_close(torch.load(folder / f"used, {rank}.pt"), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", range(in_processes.PROCESSES))
def test_a_watched_process_sees_its_own_samples(trained: dict[tuple[str, int], dict[str, Tensor]], rank: int) -> None:
    two_steps_of_two_samples = [4, 4]
    assert trained["DDP, watched", rank]["samples seen"].tolist() == two_steps_of_two_samples


@pytest.mark.parametrize("name", in_shards.EQUAL)
def test_heads_split_over_two_processes_give_the_outputs_and_gradients_of_one(
    sharded: list[dict[str, Any]], name: str
) -> None:
    """Each process has all of every gradient: parameters that are per head too, which are not distributed."""
    case = in_shards.EQUAL[name]
    expected = in_shards.trained(case, case.layer())
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-4
    for found in sharded:
        assert found[name].keys() == expected.keys()
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance)


def test_tokens_split_between_layers_and_heads_within_them_give_the_outputs_and_gradients_of_one_process(
    sharded: list[dict[str, Any]],
) -> None:
    case = in_shards.EQUAL["all terms"]
    expected = in_shards.trained(case, case.layer())
    parts = expected.pop("output").chunk(in_shards.PROCESSES, 1)
    del expected["gradient of x"]
    for found, part in zip((each["by tokens"] for each in sharded), parts, strict=True):
        torch.testing.assert_close(found, {"output": part, **expected}, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", in_shards.REFUSED)
def test_a_split_that_would_mix_heads_is_rejected(sharded: list[dict[str, Any]], name: str) -> None:
    assert sharded[0][name] == in_shards.REFUSED[name][1]
    assert sharded[1][name] not in ("nothing", "")


def test_a_watched_process_records_the_heads_that_it_computes(sharded: list[dict[str, Any]]) -> None:
    case = in_shards.EQUAL["all terms"]
    layer = case.layer()
    with mh.observe(layer, probes=("entropy", "received")) as seen:
        case.call(layer, case.x())
    expected = {"weights": seen.layers[0].weights(), **seen.layers[0].means()}
    for name, each in expected.items():
        together = torch.cat([found["watched"][name] for found in sharded])
        torch.testing.assert_close(together, each, rtol=1e-9, atol=1e-9)
