"""The costs of observing: peaks, ratios, and viewers that show the same weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import pytest
import torch

from benchmarks.measure import Ratio
from benchmarks.peak_memory import peak
from benchmarks.watching import __main__ as program
from benchmarks.watching import cases as watching
from benchmarks.watching import smollm, viewers
from tests.families import family

needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the high-water mark is Linux's")


SIZE = 16 << 20


def peak_of_three() -> int:
    """Return the peak of a run that holds three tensors at once, after one that held more."""
    torch.ones(4 * SIZE, dtype=torch.uint8).sum()

    def run() -> torch.Tensor:
        first = torch.ones(SIZE, dtype=torch.uint8)
        return first + torch.ones(SIZE, dtype=torch.uint8)

    return peak(run)


@needs_linux
def test_the_peak_of_a_run_excludes_memory_of_earlier_runs() -> None:
    assert 2.9 * SIZE < peak_of_three() < 3.5 * SIZE


def test_the_bytes_of_the_weights_of_a_long_text_are_counted() -> None:
    assert smollm.bytes_of_weights(8192) == 30 * 9 * 8192 * 8192 * 4
    assert smollm.bytes_of_q_and_k(8192) == 30 * (9 + 3) * 64 * 8192 * 4


def test_the_text_is_long_enough_for_all_lengths() -> None:
    assert len(smollm.text()) > 8 * 8192


class TestWatching:
    def test_cases_have_unique_names(self) -> None:
        names = [case.name for case in watching.CASES]
        assert len(set(names)) == len(names)

    def test_a_stored_row_is_read_again(self) -> None:
        row = watching.Row(watching.CASES[0].name, Ratio(0.9, 0.8, 0.95, 5), 0.9, 3.1, 2e-5, commit="c0ffee")
        assert watching.Row.from_dict(json.loads(json.dumps(dataclasses.asdict(row)))) == row

    @pytest.mark.parametrize(("found", "met"), [(0.94, True), (0.96, False), (None, None)])
    def test_a_ratio_is_compared_with_its_target(self, found: float | None, met: bool | None) -> None:
        assert program.is_met(watching.Row(watching.CASES[0].name, found=found)) is met

    def test_a_page_has_one_line_per_case_with_the_reason_if_it_was_not_measured(self) -> None:
        first, *others = watching.CASES
        rows = [watching.Row(first.name, Ratio(1.2, 1.1, 1.3, 5), 1.2, 3.1, 2e-5, commit="c0ffee")]
        rows += [watching.Row(case.name, note="not measured: no model", commit="c0ffee") for case in others]
        lines = program.page(rows)
        assert sum(line.startswith("| ") for line in lines) == len(watching.CASES) + 1
        line = f"| {first.name} | 1.20 x (1.10-1.30) | at most 0.95, not met | 3.1 s unobserved | 2.0e-05 |"
        assert line in lines

    def test_without_the_native_kernel_another_one_takes_the_calls(self) -> None:
        import multihead as mh

        q = torch.randn(1, 2, 600, 16)
        with watching._kernels(native=False):
            assert mh.explain(q, q, q).kernel != "native"

    @needs_linux
    def test_the_peak_of_a_layer_is_measured_observed_and_not(self) -> None:
        unobserved, observed = (watching.layer_peak(keep, 1024, False) for keep in (None, "cpu"))
        assert unobserved > 1024 * watching.EMBED_DIM * 4  # the output at least
        assert observed > unobserved

    def test_a_name_that_matches_no_case_is_rejected(self) -> None:
        with pytest.raises(click.UsageError, match=r"^No case's name contains 'nothing'\. There are: SmolLM2"):
            program.main.main(["--only", "nothing"], standalone_mode=False)


class TestViewers:
    @pytest.fixture(scope="class")
    @classmethod
    def loaded(cls) -> viewers.Loaded:
        torch.manual_seed(0)
        model = family("bert").eval()
        model.set_attn_implementation("eager")
        return viewers.Loaded(model, torch.arange(3, 15)[None], [f"t{each}" for each in range(12)])

    @pytest.mark.parametrize("name", ["multihead, report", "multihead, record", "eager output_attentions"])
    def test_a_viewer_returns_the_size_of_the_file_it_writes(
        self, name: str, loaded: viewers.Loaded, tmp_path: Path
    ) -> None:
        size = viewers.VIEWERS[name](loaded, tmp_path)
        files = list(tmp_path.iterdir())
        assert [file.stat().st_size for file in files] == ([] if name.startswith("eager") else [size])
        assert size > 0

    def test_all_have_the_same_weights(self, loaded: viewers.Loaded) -> None:
        with torch.no_grad():
            assert viewers.difference(loaded) < 1e-5  # rounding of float32, layer upon layer

    def test_the_row_of_a_viewer_that_stops_has_the_reason(self) -> None:
        row = viewers.Row("BertViz, head view", viewers.SMOLLM2, 2048, note="stops: no memory within 12 GiB")
        assert viewers.cells(row) == (
            *("SmolLM2-135M-Instruct, 30 x 9 heads", "2,048", "BertViz, head view", "stops: no memory within 12 GiB"),
            *("", ""),
        )
        measured = dataclasses.replace(row, seconds=2.0, memory=3_400_000_000, size=1_500_000, note="")
        assert viewers.cells(measured)[3:] == ("2.00", "3.40 GB", "1.5 MB")

    def test_a_viewer_that_fails_gets_a_row_and_the_run_continues(self) -> None:
        row = viewers.measured("no viewer", viewers.MINILM, "many")  # type: ignore[arg-type]
        assert row.seconds is None
        assert row.note == "ValueError: invalid literal for int() with base 10: 'many'"
