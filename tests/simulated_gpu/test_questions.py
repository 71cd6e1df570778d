"""What tools/cuda.py asks a GPU, asked on the simulated one: its answers are the assumptions of `operators.py`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multihead import contract, masks
from tests.simulated_gpu import operators
from tests.simulated_gpu.device import simulated_gpu, skip_where_not_simulated
from tools.on_gpu import compiling, fuzzing, measuring, questions
from tools.on_gpu import contract as contract_part
from tools.on_gpu.worker import run_case

skip_where_not_simulated(module=True)

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _on_the_gpu() -> Iterator[None]:
    with simulated_gpu():
        yield


def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The answer of each question, or its error; whether it is what is assumed, where there is an assumption."""
    monkeypatch.setattr(questions, "LENGTHS", (20, 9, 3))
    monkeypatch.setattr(questions, "PADDED", 20)
    monkeypatch.setattr(questions, "ROUNDS", 1)
    monkeypatch.setattr(questions, "SHAPES", ((1, 16, 64), (2, 8, 64)))
    rows = [run_case(name, case) for name, case in questions.cases(10).items()]
    return {str(row["case"]): row.get("holds", row.get("error", "answered")) for row in rows}


def test_every_question_has_the_answer_that_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answers(monkeypatch)
    assert {name: answer for name, answer in found.items() if answer is not True} == {
        "Q6 FLASH": "answered",
        "Q6 CUDNN": "answered",
        "Q7": "answered",
    }
    assert {name.split()[0] for name in found} == {f"Q{n}" for n in range(1, 9)}
    assert questions.rows_without_keys()["answer"] == (
        "without keys: output 0, logsumexp inf; NaN query: output nan, logsumexp inf; "
        "NaN key: output nan, logsumexp inf"
    )


def test_a_gpu_that_computes_something_else_gives_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_end_aligned", lambda q, k, causal, *_: operators._start_aligned(q, k, causal))
    monkeypatch.setitem(operators.OPERATORS, "_fused_sdp_choice", lambda **_: operators.EFFICIENT)
    backward = operators.ragged_backward
    not_written = lambda **given: tuple(each.where(each != 0, torch.nan) for each in backward(**given))
    monkeypatch.setitem(operators.OPERATORS, "_flash_attention_backward", not_written)
    found = answers(monkeypatch)
    assert {name for name, answer in found.items() if answer is False} >= {"Q1", "Q2", "Q4", "Q6"}


def test_the_kernels_pass_the_contract_forward_and_one_that_waits_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert contract.kernels_on(CUDA) == ("ragged", "sdpa", "flex", "statistics")
    # tests/cli/test_doctor.py has causal calls, and NaN in padding is a call of lengths.
    for name in ("documents", "relative bias", "queries without keys", "NaN in padding"):
        call = replace(next(call for call in contract.CALLS if call.name == name), trains=False)
        for kernel in ("ragged", "sdpa", "flex", "statistics"):
            if contract.accepts(kernel, call, CUDA):
                assert contract.check(kernel, call, CUDA) < 1
    attend = contract.KERNELS["sdpa"].attend
    monkeypatch.setattr(contract.KERNELS["sdpa"], "attend", lambda *given: (given[0].q.sum().item(), attend(*given))[1])
    causal = replace(next(call for call in contract.CALLS if call.name == "causal"), trains=False)
    with pytest.raises(RuntimeError, match=r"^called a synchronizing CUDA operation$"):
        contract.check("sdpa", causal, CUDA)


def test_the_cases_of_the_other_parts_are_found_and_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = list(compiling.cases(1))
    assert compiled[0] == "flex: full, bfloat16"
    assert not any(name.startswith("sdpa") for name in compiled)
    monkeypatch.delitem(sys.modules, contract_part.TESTS, raising=False)  # pytest keeps it, skipped and half empty
    checked = list(contract_part.cases(1))
    assert {"sdpa: causal, float16", "flex: sinks, float32"} < set(checked)
    assert "test_every_head_of_a_model_is_measured_as_on_the_cpu[summary]" in checked
    monkeypatch.setattr(measuring, "ROUNDS", 4)
    monkeypatch.setattr(measuring, "PAIRS", 2)
    window = measuring.Case("window", masks.Causal() & masks.Window(8), "dense", 1, 32, 32, 16)
    row = run_case("window", lambda: measuring.measure(window))
    assert (row["state"], row["cells"]) == ("passed", ("window", "1 x 32", "16/16, D 16", "SDPA, dense mask"))
    ratios = row["ratios"]
    assert isinstance(ratios, dict)
    assert set(ratios) == {"wall", "host", "device", "graph"}


@pytest.mark.parametrize("kinds", [0, 1])
def test_a_kind_of_failure_of_the_fuzzer_is_the_error_of_its_case(kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Search:
        def __init__(self, entries: dict[str, Any], report: Any) -> None:
            outcome = SimpleNamespace(shape="Mismatch: the output is # off")
            case = SimpleNamespace(command=lambda: "python -m tests.fuzz --only attention --case 17 --device cuda")
            self.kinds = [SimpleNamespace(count=3, outcome=outcome, case=case)] * kinds
            self.tallies = {name: SimpleNamespace(cases=5) for name in entries}

        def for_seconds(self, seconds: float, jobs: int) -> None:
            assert (seconds, jobs) == (48, 4)

    monkeypatch.setattr("tests.fuzz.search.Search", Search)
    monkeypatch.setenv("MULTIHEAD_FUZZ_DEVICE", "cpu")
    (name,), (case,) = zip(*fuzzing.cases(60).items(), strict=True)
    row = run_case(name, case)
    if kinds:
        command = "python -m tests.fuzz --only attention --case 17 --device cuda"
        assert row["state"] == "failed"
        assert str(row["error"]).endswith(f"cases: 3 x Mismatch: the output is # off; {command}")
    else:
        assert str(row["answer"]).endswith("entry points, no failure")
