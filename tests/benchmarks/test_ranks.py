"""The measurement of ranks: its inputs, its rows, and the scenes and the plot of the simulation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import ranks
from benchmarks.simulated_ranks import Heads, Machine, simulate


def test_each_rank_reads_its_part_of_one_input() -> None:
    whole = ranks.input_of(64, range(ranks.LAYOUT.chunk_count))
    assert whole.shape == (1, 64, ranks.WIDTH)
    for rank in range(ranks.RANKS):
        own = [first // 8 for first, _ in ranks.LAYOUT.chunks(rank, 64)]
        assert torch.equal(ranks.input_of(64, own), ranks.LAYOUT.select_tokens_of_rank(whole, rank, 1))


@pytest.mark.parametrize("training", [False, True])
def test_a_run_returns_what_is_compared(training: bool) -> None:
    found = ranks.run(ranks.layer_of(), ranks.input_of(16, range(8)), training=training)
    assert set(found) == ({"output", "gradient"} if training else {"output"})
    assert all(each.shape == (1, 16, ranks.WIDTH) for each in found.values())


def test_a_row_names_the_share_of_the_largest_rank() -> None:
    measured = ranks.Memory("forward", 0.45, 200 << 20, [80 << 20, 100 << 20], 1e-7)
    assert measured.row() == ["forward", "200 MiB", "80, 100 MiB", "0.50 (at most 0.45, not met)", "1.0e-07"]


def test_every_scene_is_simulated_and_drawn(tmp_path: Path) -> None:
    machine = Machine(1e9, 5e8, 1e-5, 1e9, 1e-5)
    found = {}
    for scene in ranks.scenes(1 << 13):
        found[scene.name] = [
            simulate(scene.mask, 1 << 13, count, scene.kind, machine, Heads(), gathered=scene.gathered)
            for count in (2, 4)
        ]
        assert all(0 < each.efficiency <= 1 for each in found[scene.name])
    ranks.write_plot(found, 1 << 13, tmp_path / "plot.svg")
    assert "Simulated, not measured" in (tmp_path / "plot.svg").read_text(encoding="utf-8")


def test_medians_of_interleaved_rounds_leave_out_what_else_runs() -> None:
    """A busy time slows every part of some rounds."""
    quiet = {"forward": 2.0, "backward": 4.0, "call": 1e-5, "message": 1.0, "exchange": 3.0}
    slowed = [1, 1, 9, 1, 1, 7, 1]
    found = ranks.Calibration(8, 100, {name: [each * by for by in slowed] for name, each in quiet.items()})
    assert found.machine == Machine(4, 2, 1e-5, bandwidth=50, latency=1)
    assert str(found).startswith("7 rounds; quartiles by median: forward 1.00 to 7.00, ")


def test_the_parts_of_the_model_are_measured() -> None:
    cells, measure = ranks.measured_work(Heads(4, 2, 8), 16)
    assert cells == 4 * 16**2
    assert set(measure()) == {"forward", "backward", "call"}
