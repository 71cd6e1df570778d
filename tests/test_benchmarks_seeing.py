"""What seeing costs is measured as it is said: peaks, ratios, and viewers that see the same weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest
import torch

from benchmarks import smollm, viewers, watching
from benchmarks.alone import alone
from benchmarks.measure import Ratio
from benchmarks.peak import peak
from tests.families import family

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")


SIZE = 64 << 20


def peak_of_three() -> int:
    """Return the peak of a run that holds three tensors at once, after one that held more."""
    torch.ones(4 * SIZE, dtype=torch.uint8).sum()

    def run() -> torch.Tensor:
        first = torch.ones(SIZE, dtype=torch.uint8)
        return first + torch.ones(SIZE, dtype=torch.uint8)

    return peak(run)


@needs_linux
def test_the_peak_of_a_run_is_what_it_holds_at_once_and_not_what_others_held_before() -> None:
    # In a process of its own: what other tests have left in the heap of this one would be held already.
    assert 2.9 * SIZE < alone(peak_of_three) < 3.5 * SIZE


def test_what_the_weights_of_a_long_text_would_take_is_counted() -> None:
    assert smollm.bytes_of_weights(8192) == 30 * 9 * 8192 * 8192 * 4
    assert smollm.bytes_of_q_and_k(8192) == 30 * (9 + 3) * 64 * 8192 * 4


def test_there_is_text_for_all_lengths() -> None:
    assert len(smollm.text()) > 8 * 8192


class TestWatching:
    def test_cases_are_told_apart_by_their_names(self) -> None:
        names = [case.name for case in watching.CASES]
        assert len(set(names)) == len(names)

    def test_a_row_is_kept_and_read_again(self) -> None:
        row = watching.Row(watching.CASES[0].name, Ratio(0.9, 0.8, 0.95, 5), 0.9, 3.1, 2e-5, commit="c0ffee")
        assert watching.Row.from_dict(json.loads(json.dumps(dataclasses.asdict(row)))) == row

    @pytest.mark.parametrize(("found", "met"), [(0.94, True), (0.96, False), (None, None)])
    def test_a_ratio_is_held_to_what_is_meant(self, found: float | None, met: bool | None) -> None:
        assert watching.is_met(watching.Row(watching.CASES[0].name, found=found)) is met

    def test_a_page_has_a_line_a_case_and_says_what_is_missing(self) -> None:
        first, *others = watching.CASES
        rows = [watching.Row(first.name, Ratio(1.2, 1.1, 1.3, 5), 1.2, 3.1, 2e-5, commit="c0ffee")]
        rows += [watching.Row(case.name, note="not measured: no model", commit="c0ffee") for case in others]
        lines = watching.page(rows)
        assert sum(line.startswith("| ") for line in lines) == len(watching.CASES) + 1
        told = f"| {first.name} | 1.20 x (1.10-1.30) | at most 0.95, not met | 3.1 s unwatched | 2.0e-05 |"
        assert told in lines

    def test_where_the_native_kernel_is_left_out_another_takes_the_calls(self) -> None:
        import multihead as mh

        q = torch.randn(1, 2, 600, 16)
        with watching._kernels(native=False):
            assert mh.explain(q, q, q).kernel != "native"

    @needs_linux
    def test_a_layers_peak_is_measured_watched_and_unwatched(self) -> None:
        unwatched, watched = (alone(watching.layer_peak, keep, 4096, False) for keep in (None, "cpu"))
        assert unwatched > 4096 * watching.EMBED_DIM * 4  # the output at least
        assert watched > unwatched

    def test_a_name_that_fits_no_case_is_refused(self) -> None:
        with pytest.raises(click.UsageError, match=r"^No case's name holds 'nothing'\. There are: SmolLM2"):
            watching.main.main(["--only", "nothing"], standalone_mode=False)


class TestViewers:
    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> viewers.Loaded:
        torch.manual_seed(0)
        model = family("bert").eval()
        model.set_attn_implementation("eager")
        return viewers.Loaded(model, torch.arange(3, 15)[None], [f"t{each}" for each in range(12)])

    @pytest.mark.parametrize("name", ["multihead, report", "multihead, record", "eager output_attentions"])
    def test_what_is_timed_makes_what_its_size_is_told_of(
        self, name: str, loaded: viewers.Loaded, tmp_path: Path
    ) -> None:
        size = viewers.VIEWERS[name](loaded, tmp_path)
        files = list(tmp_path.iterdir())
        assert [file.stat().st_size for file in files] == ([] if name.startswith("eager") else [size])
        assert size > 0

    def test_all_see_the_same_weights(self, loaded: viewers.Loaded) -> None:
        with torch.no_grad():
            assert viewers.difference(loaded) < 1e-5  # rounding of float32, layer upon layer

    def test_where_a_viewer_stops_is_told_in_its_line(self) -> None:
        row = viewers.Row("BertViz, head view", viewers.SMOLLM2, 2048, note="stops: no memory within 12 GiB")
        assert viewers.cells(row) == (
            *("SmolLM2-135M, 30 x 9 heads", "2,048", "BertViz, head view", "stops: no memory within 12 GiB"),
            *("", ""),
        )
        measured = dataclasses.replace(row, seconds=2.0, memory=3_400_000_000, size=1_500_000, note="")
        assert viewers.cells(measured)[3:] == ("2.00", "3.40 GB", "1.5 MB")

    def test_a_viewer_that_fails_is_a_row_and_no_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(viewers, "VIEWERS", {})
        row = viewers.measured("no viewer", viewers.MINILM, 16)
        assert row.seconds is None
        assert row.note
