"""The coarse levels of a map: exact at every level, whatever the mask, and kept in a file of the record's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch.testing import assert_close

from multihead import masks
from multihead.viewer import levels
from multihead.viewer.levels import LayerMapLevels, number_of_levels
from tests.viewer.watching import block_means, watch

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Causal() & masks.Window(9)},
    "documents": {"mask": masks.Causal() & masks.Documents((13, 20, 4))},
    "padded": {"mask": masks.Causal(), "lengths": (37, 21)},
    "cross": {"memory": 53},
    "grouped": {"mask": masks.Causal(), "heads": 4, "kv_heads": 2},
    "heads apart": {"mask": masks.Keep(torch.rand(1, 2, 37, 37, generator=torch.Generator().manual_seed(3)) < 0.4)},
    "one query": {"length": 1, "memory": 70},
}
OF = {"record": "0123", "layer": "0", "sample": "0"}


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep blocks of 2 x 2 and up, so that short texts have levels, and take few scores at a time."""
    monkeypatch.setattr(levels, "FINEST_STORED_LEVEL", 1)
    monkeypatch.setattr(levels, "MAX_COARSEST_SIDE", 2)
    monkeypatch.setattr(levels, "SCORES_PER_STRIP", 300)


def build(kept: LayerMapLevels, *heads: int) -> list[float]:
    return [share for head in heads for share in kept.build_head(head)]


@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_every_level_is_the_mean_over_what_may_be_seen(kind: str, sink: bool) -> None:
    record = watch(dtype=torch.float64, **KINDS[kind])
    layer = record.layers[0]
    for index in range(layer.num_samples):
        sample = layer.sample(index)
        kept = LayerMapLevels(sample, None, OF)
        build(kept, *range(sample.num_heads))
        assert kept.num_levels >= (2 if kind == "documents" else 4)  # each document is a text of its own
        for head in range(sample.num_heads):
            for level in range(1, kept.num_levels):
                expected = block_means(sample, head, level, sink=sink)
                found = torch.from_numpy(kept.block_means(head, level, sink=sink))
                assert_close(found.double(), expected, rtol=1e-7, atol=1e-12, equal_nan=True)


@pytest.mark.usefixtures("shallow")
def test_what_is_kept_of_a_record_in_float64_is_float64() -> None:
    sample = watch(dtype=torch.float64, mask=masks.Causal()).layers[0].sample()
    kept = LayerMapLevels(sample, None, OF)
    build(kept, 0)
    sums = sum(kept._read_cells(f"{name}.{kept.num_levels - 1}", 0).sum() for name in ("sums", "first_sums"))
    assert sums == pytest.approx(37, abs=1e-12)


@pytest.mark.usefixtures("shallow")
def test_a_tile_is_its_part_of_the_whole_and_only_the_first_holds_the_sink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "TILE_SIDE", 4)
    sample = watch(mask=masks.Causal()).layers[0].sample()
    kept = LayerMapLevels(sample, None, OF)
    build(kept, 0, 1)
    for sink in (True, False):
        whole = kept.block_means(1, 1, sink=sink)
        for row in range(5):
            for column in range(5):
                part = whole[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                np.testing.assert_array_equal(kept.tile(1, 1, row, column, sink=sink), part)


def test_a_long_text_has_levels_from_blocks_of_64_on() -> None:
    sample = watch(2100, mask=masks.Causal() & masks.Window(1500)).layers[0].sample()
    kept = LayerMapLevels(sample, None, OF)
    build(kept, 1)
    assert kept.is_built(1)
    assert not kept.is_built(0)
    found = torch.from_numpy(kept.block_means(1, 6))
    assert found.shape == (33, 33)
    assert_close(found.double(), block_means(sample, 1, 6), rtol=2e-5, atol=1e-8, equal_nan=True)


def test_the_last_level_has_at_most_64_cells_a_side() -> None:
    for length in (1, 63, 64, 65, 128, 129, 4096, 4097, 100_000, 1 << 20):
        last = number_of_levels(length, 5) - 1
        assert levels.cells_per_side(length, last) <= 64
        assert last == 0 or levels.cells_per_side(length, last - 1) > 64


@pytest.mark.usefixtures("shallow")
class TestTheFile:
    def test_it_is_a_safetensors_file_that_says_whose_it_is(self, tmp_path: Path) -> None:
        file = tmp_path / "run.levels" / "layer-0.safetensors"
        sample = watch(mask=masks.Causal()).layers[0].sample()
        kept = LayerMapLevels(sample, file, OF)
        shares = build(kept, 0)
        assert kept.is_in_file
        assert shares == sorted(shares)
        assert shares[-1] == 1
        assert len(shares) > 3
        with safe_open(file, "np") as read:
            assert read.metadata() == {"format": "multihead levels", "version": "1", **OF}
            assert read.get_tensor("done").tolist() == [1, 0]
            np.testing.assert_array_equal(read.get_tensor("sums.2")[0], kept._read_cells("sums.2", 0))
            assert read.get_tensor("counts.1").dtype == np.int32
        assert [each.name for each in file.parent.iterdir()] == [file.name]

    def test_it_is_read_again_and_not_built_twice(self, tmp_path: Path) -> None:
        file = tmp_path / "a.safetensors"
        sample = watch(mask=masks.Causal()).layers[0].sample()
        first = LayerMapLevels(sample, file, OF)
        build(first, 1)
        again = LayerMapLevels(sample, file, OF)
        assert [again.is_built(0), again.is_built(1)] == [False, True]
        assert build(again, 1) == []
        np.testing.assert_array_equal(first.block_means(1, 2), again.block_means(1, 2))

    @pytest.mark.parametrize("harm", ["foreign", "cut", "longer", "garbage", "empty"])
    def test_a_foreign_or_broken_file_is_built_anew(self, tmp_path: Path, harm: str) -> None:
        file = tmp_path / "a.safetensors"
        sample = watch(mask=masks.Causal()).layers[0].sample()
        build(LayerMapLevels(sample, file, OF if harm != "foreign" else {**OF, "record": "another"}), 0, 1)
        whole = file.read_bytes()
        harmed = {"cut": whole[:-1], "longer": whole + b"1", "garbage": b"\xff" * len(whole), "empty": b""}
        file.write_bytes(harmed.get(harm, whole))
        again = LayerMapLevels(sample, file, OF)
        assert again.is_in_file
        assert not again.is_built(0)
        build(again, 0)
        expected = block_means(sample, 0, 3)
        assert_close(torch.from_numpy(again.block_means(0, 3)).double(), expected, rtol=1e-5, atol=1e-8, equal_nan=True)

    def test_where_it_cannot_be_written_levels_stay_in_memory(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("no folder")
        sample = watch(mask=masks.Causal()).layers[0].sample()
        kept = LayerMapLevels(sample, tmp_path / "file" / "a.safetensors", OF)
        build(kept, 0)
        assert not kept.is_in_file
        assert kept.is_built(0)
        assert (tmp_path / "file").read_text() == "no folder"

    def test_a_finished_file_that_may_only_be_read_serves_and_an_unfinished_one_does_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        sample = watch(mask=masks.Causal()).layers[0].sample()
        build(LayerMapLevels(sample, tmp_path / "whole.safetensors", OF), 0, 1)
        build(LayerMapLevels(sample, tmp_path / "part.safetensors", OF), 0)
        monkeypatch.setattr(levels.os, "access", lambda file, mode: False)  # root may write everything
        whole = LayerMapLevels(sample, tmp_path / "whole.safetensors", OF)
        assert whole.is_in_file
        assert whole.is_built(1)
        part = LayerMapLevels(sample, tmp_path / "part.safetensors", OF)
        assert not part.is_in_file
        assert not part.is_built(0)

    def test_without_room_on_the_disk_nothing_half_made_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*given: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(levels.os, "posix_fallocate", full)
        kept = LayerMapLevels(watch(mask=masks.Causal()).layers[0].sample(), tmp_path / "a.safetensors", OF)
        assert not kept.is_in_file
        assert list(tmp_path.iterdir()) == []

    def test_its_head_is_json_that_ends_on_a_multiple_of_eight(self, tmp_path: Path) -> None:
        file = tmp_path / "a.safetensors"
        LayerMapLevels(watch(mask=masks.Causal()).layers[0].sample(), file, OF)
        whole = file.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        assert length % 8 == 0
        assert json.loads(whole[8 : 8 + length])["sums.1"]["dtype"] == "F32"
