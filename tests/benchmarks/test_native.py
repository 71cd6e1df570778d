"""The native kernel's cases compare equal computations, and no measured row is lost."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import click
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import in_process
from benchmarks.machine import machine_line
from benchmarks.measure import Duel, Ratio
from benchmarks.native import __main__ as native
from benchmarks.native import contenders, kernel_choice
from benchmarks.native import page as page_module
from benchmarks.native import rows as rows_module
from benchmarks.native.cases import CASES, Accuracy, Case
from benchmarks.native.definition import defined, defined_gradients
from benchmarks.native.rows import Row
from benchmarks.resume import read_rows
from multihead import masks
from multihead.kernels.choose import (
    MEASURED_SPEEDS,
    REQUEST_CLASSES,
    TRAINING_SUFFIX,
    MeasuredSpeed,
    benchmark_class_of,
)
from multihead.kernels.plan.bounds import bounds_of
from multihead.masks.positions import TilePositions
from tests.kernel_names import needs_native

FASTER = Case("a line", "a case", "a rival", lambda: pytest.fail("not set up"), least=2.0, wide=3.0)
COST = dataclasses.replace(FASTER, name="a cost", least=None, most=1.1, wide=None)
NUMBER = Accuracy("a number", 2e-5, lambda: 1e-6)


def row(case: Case | Accuracy, median: float = 2.5) -> Row:
    ratio = Ratio(median, median - 0.5, median + 0.5, 7)
    if isinstance(case, Accuracy):
        return Row(case.name, "", error=median, commit="c0ffee")
    return Row(case.name, case.rival, ratio, 1e-6, commit="c0ffee")


@pytest.mark.parametrize("mask", [masks.Full(), masks.Causal(), masks.Window(5)], ids=str)
def test_the_definition_is_that_of_attention_and_its_gradients(mask: masks.Mask) -> None:
    q, k, v, of_output = torch.randn(4, 2, 3, 20, 8, dtype=torch.float64).unbind()
    k, v = k[:, :1], v[:, :1]
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    shown = mask.tile(TilePositions.from_sizes(20, 20))
    output = scaled_dot_product_attention(*leaves, attn_mask=shown, enable_gqa=True)
    scores = (q @ k.mT / 8**0.5).masked_fill(~shown, -torch.inf)
    found = defined(q, k, v, mask)
    torch.testing.assert_close(found.output, output.detach())
    torch.testing.assert_close(found.logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(found.entropy, torch.special.entr(scores.softmax(-1)).sum(-1))
    torch.testing.assert_close(found.received, scores.softmax(-1).sum(2))
    assert torch.equal(found.largest_key, scores.argmax(-1))
    gradients = torch.autograd.grad(output, leaves, of_output)
    torch.testing.assert_close(defined_gradients(q, k, v, of_output, mask), tuple(gradients))


def test_a_window_in_blocks_is_a_window() -> None:
    q, k, v = torch.randn(3, 2, 3, 32, 8).unbind()
    shown = masks.Window(8).tile(TilePositions.from_sizes(32, 32))
    right = scaled_dot_product_attention(q, k, v, attn_mask=shown)
    torch.testing.assert_close(contenders.window_in_blocks(q, k, v, size=8), right)


@needs_native
@pytest.mark.parametrize(
    "make",
    [
        lambda: contenders.prefill(48, 8, "fp32", causal=True, value_dim=12),
        lambda: contenders.prefill(48, 8, "bf16", causal=False),
        lambda: contenders.few_queries(5, 48, 8, "fp32"),
        lambda: contenders.matrix_product(8, size=64),
        lambda: contenders.masked("documents and causal", "loop", 8, "fp32"),
        lambda: contenders.masked("half padded", "dense bool", 8, "fp32"),
        lambda: contenders.decoding(64, 8, "fp32", stream=False),
        lambda: contenders.decoding(64, 8, "fp32", stream=True),
        lambda: contenders.statistics("causal", 128, 8, "fp32", rising=True),
        lambda: contenders.statistics_alone(128, "bf16", causal=True),
        lambda: contenders.received("full", 128, 8),
        lambda: contenders.backward("causal", "SDPA", 64, 8, "fp32"),
        lambda: contenders.backward_bf16_over_fp32("causal", 64, 8),
        lambda: contenders.overhead(grad=True),
    ],
)
def test_ours_and_the_rival_are_right(make: Callable[[], Duel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "COLD", 1 << 16)
    monkeypatch.setattr(contenders, "HEADS", 2)
    torch.manual_seed(0)
    with torch.no_grad():
        duel = make()
        assert rows_module.checked(FASTER, duel)[0] == ""


def test_a_wrong_result_is_reported_and_not_timed() -> None:
    duel = Duel(lambda: 1.0, lambda: 0.0, float, float, tolerance=0.5)
    assert rows_module.checked(FASTER, duel) == ("ours differs from the definition by 1.0e+00, more than 5e-01", 1.0)


def test_every_case_has_a_unique_name() -> None:
    assert [each for each, count in Counter(map(rows_module.identity, CASES)).items() if count > 1] == []


@pytest.mark.parametrize(
    ("case", "instruction_set", "words"),
    [
        (FASTER, "avx2", "at least 2 x"),
        (FASTER, "avx512_bf16", "at least 3 x"),
        (COST, "avx2", "at most 1.1 x"),
        (NUMBER, "avx512", "at most 2e-05"),
    ],
)
def test_a_target_depends_on_the_instruction_set(case: Case, instruction_set: str, words: str) -> None:
    condition = rows_module.requirement(case, instruction_set)
    assert condition is not None
    assert condition[0] == words


def test_other_instruction_sets_have_no_target() -> None:
    assert rows_module.requirement(FASTER, "scalar") is None
    assert rows_module.requirement(COST, "avx512_bf16") is None
    assert rows_module.is_met(row(FASTER), FASTER, "scalar") is None


def test_a_ratio_is_compared_with_its_target() -> None:
    assert rows_module.is_met(row(FASTER, 2.0), FASTER, "avx2") is True
    assert rows_module.is_met(row(FASTER, 1.9), FASTER, "avx2") is False
    assert rows_module.is_met(row(COST, 1.2), COST, "avx2") is False
    assert rows_module.is_met(Row("a case", "a rival", note="not measured: a package"), FASTER, "avx2") is None


def test_a_stored_row_is_read_again(tmp_path: Path) -> None:
    rows = [row(FASTER), Row("another", "", error=1.0, note="failed: a reason")]
    journal = tmp_path / "rows.jsonl"
    cut_off = '{"name": "a third", "riv'
    journal.write_text(
        "".join(json.dumps(dataclasses.asdict(each)) + "\n" for each in rows) + cut_off, encoding="utf-8"
    )
    assert read_rows(journal, Row.from_dict) == rows


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Two cases that are listed instead of measured; rows and pages are written to a folder of this test."""
    measured: list[str] = []

    def measure(case: Case | Accuracy, _seconds: float, _set: str) -> Row:
        measured.append(case.name)
        return row(case, 1.0)

    for module in (native, page_module):
        monkeypatch.setattr(module, "CASES", [FASTER, NUMBER])
    monkeypatch.setattr(native, "_measured", measure)
    monkeypatch.setattr(native, "JOURNALS", tmp_path / "journals")
    monkeypatch.setattr(native, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(native, "PAGES", [])
    return measured


def test_an_interrupted_run_is_resumed(two_cases: list[str], tmp_path: Path) -> None:
    (tmp_path / "journals").mkdir()
    (tmp_path / "journals" / "native-avx2.jsonl").write_text(
        json.dumps(dataclasses.asdict(row(FASTER))) + "\n", encoding="utf-8"
    )
    rows = native.compare("avx2", only="", seconds=1.0, resume=True, save=True)
    assert two_cases == ["a number"]
    assert rows == [row(FASTER), row(NUMBER, 1.0)]
    (page,) = (tmp_path / "results").glob("*-native-avx2.md")
    lines = page.read_text(encoding="utf-8").splitlines()
    assert "| a line | at least 2 x | 2.50-2.50 x | met |" in lines
    assert "| a case | a rival | 2.50 x (2.00-3.00) | at least 2 x | 7 | 1.0e-06 | mh.attention |" in lines
    assert "| a number | 1 | at most 2e-05, not met |" in lines


def test_a_whole_run_starts_a_new_journal_and_a_part_replaces_its_rows(two_cases: list[str], tmp_path: Path) -> None:
    for only in ("", "", "case"):
        native.compare("avx2", only=only, seconds=1.0, resume=False, save=True)
    assert two_cases == ["a case", "a number", "a case", "a number", "a case"]
    assert len(read_rows(tmp_path / "journals" / "native-avx2.jsonl", Row.from_dict)) == 3


def test_without_saving_nothing_is_written(two_cases: list[str], tmp_path: Path) -> None:
    native.compare("avx2", only="case", seconds=1.0, resume=False, save=False)
    assert two_cases == ["a case"]
    assert list(tmp_path.iterdir()) == []


def test_the_summary_is_written_into_a_page_that_has_its_mark(two_cases: list[str]) -> None:
    rows = native.compare("avx2", only="", seconds=1.0, resume=False, save=False)
    page = "before\n| head | | |\n|---|---|---|\n| old | row | here |\n<!-- made by make bench, avx2 -->\nbehind"
    limits = "`ATEN_CPU_CAPABILITY=avx2` `MKL_ENABLE_INSTRUCTIONS=AVX2` `ONEDNN_MAX_CPU_ISA=AVX2`"
    machine = f"| measured on | {limits} | {machine_line(['c0ffee'])} |"
    expected = page.replace("| old | row | here |", f"| a line | at least 2 x | 1.00-1.00 x |\n{machine}")
    assert page_module.summary_replaced(page, rows, "avx2") == expected
    assert page_module.summary_replaced(page, rows, "scalar") == page
    with_next = page.replace("behind", page_module.NEXT_SET)
    first = page_module.summary_replaced(with_next, rows, "avx512")
    added = (
        "### avx512\n\n| head | | |\n|---|---|---|\n| a line |  | 1.00-1.00 x |\n| measured on | `ATEN_CPU_CAPABILITY="
    )
    assert added in first
    assert first.endswith(f"<!-- made by make bench, avx512 -->\n\n{page_module.NEXT_SET}")
    assert page_module.summary_replaced(first, rows, "avx512") == first
    assert two_cases == ["a case", "a number"]


def test_a_name_that_matches_no_case_is_rejected() -> None:
    with pytest.raises(click.UsageError, match=r"^No case's name or rival contains 'nothing'\.$"):
        native.compare("avx2", only="nothing", seconds=1.0, resume=False, save=False)


@needs_native
def test_an_unknown_instruction_set_is_rejected_with_the_list_of_all() -> None:
    with pytest.raises(click.UsageError, match=r"^There is no instruction set 'mmx'\. Give one of scalar, "):
        native.main.main(["--set", "mmx"], standalone_mode=False)


@needs_native
def test_a_case_runs_in_a_process_that_is_limited_to_its_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    found = {
        name: in_process.in_new_process(os.getenv, name, instruction_set="avx2")
        for name in ("MULTIHEAD_CPU", *in_process.TORCH_LIMITS["avx2"])
    }
    assert found == {"MULTIHEAD_CPU": "avx2", **in_process.TORCH_LIMITS["avx2"]}
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default"
    assert "ONEDNN_MAX_CPU_ISA" not in os.environ


@pytest.mark.parametrize("training", ["", TRAINING_SUFFIX])
@pytest.mark.parametrize("name", REQUEST_CLASSES)
def test_the_sample_requests_of_a_class_belong_to_it(name: str, training: str) -> None:
    found = {
        benchmark_class_of(each, bounds_of(each))
        for each in kernel_choice.requests(name, "fp32", trains=bool(training))
    }
    assert found == {name + training}


@needs_native
def test_the_table_of_the_rules_is_written_as_it_is_read() -> None:
    old, other = (
        MeasuredSpeed("scalar", "float32", "then", {"full": 2.0}),
        MeasuredSpeed("scalar", "bfloat16", "then", {"few": 0.5}),
    )
    new = MeasuredSpeed("scalar", "float32", "now", {"full" + TRAINING_SUFFIX: 0.25})
    table = kernel_choice.updated([old, other], new)
    assert table == [other, new]
    assert [MeasuredSpeed(**row) for row in json.loads(kernel_choice.written(table))] == table
    assert kernel_choice.TARGET.read_text(encoding="utf-8") == kernel_choice.written(MEASURED_SPEEDS)
