"""Distributed training: two processes that see half of a batch each learn what one that sees it whole does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import Tensor

from tests.ecosystem import in_processes

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this build of PyTorch has no gloo",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, Tensor]]:
    """Start the two processes once; each trains in every way and leaves what came out in a folder."""
    folder: Path = tmp_path_factory.mktemp("trained")
    torch.multiprocessing.spawn(in_processes.run, args=(folder,), nprocs=in_processes.PROCESSES)
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
def test_a_watched_process_sees_its_own_samples(trained: dict[tuple[str, int], dict[str, Tensor]], rank: int) -> None:
    two_steps_of_two_samples = [4, 4]
    assert trained["DDP, watched", rank]["samples seen"].tolist() == two_steps_of_two_samples
