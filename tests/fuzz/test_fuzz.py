"""A fixed sample of the fuzzer's cases: each entry point against float64, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner

from multihead import masks
from multihead.scores.bias import RelativeBias
from tests.fuzz import ranks
from tests.fuzz.__main__ import main
from tests.fuzz.draw import Draw
from tests.fuzz.entries import ENTRIES, Entry
from tests.fuzz.on_device import moved
from tests.fuzz.search import Search
from tests.fuzz.worker import Case, Outcome, Worker, outcome
from tests.parallel.processes import Processes


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


class Here:
    """A worker that is this process."""

    def run(self, case: Case) -> Outcome:
        return outcome(case)


def assert_sample_agrees(name: str, worker: Worker | Here) -> None:
    search = Search(ENTRIES, report=lambda _: None)
    search.sample(name, ENTRIES[name].sample, worker)  # type: ignore[arg-type]
    assert not search.kinds, "\n".join(kind.text() for kind in search.kinds)


@pytest.mark.parametrize("name", [name for name in ENTRIES if name != "ranks"])
def test_a_fixed_sample_of_cases_agrees_with_float64(name: str, worker: Worker) -> None:
    assert_sample_agrees(name, worker)


def test_a_fixed_sample_over_ranks_agrees_with_float64(four: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processes of the other tests: a worker would start four of its own."""
    monkeypatch.setattr(ranks, "_started", [four])
    assert_sample_agrees("ranks", Here())


def test_a_case_is_the_same_for_a_seed_and_a_feature_that_is_left_out_changes_no_other() -> None:
    whole, again, less = Draw(17), Draw(17), Draw(17, without=("a",))
    features = [f"{letter}" for letter in "abcdefgh"]
    drawn = [[draw.has(each, 0.9) for each in features] for draw in (whole, again, less)]
    assert drawn[0] == drawn[1]
    assert drawn[0][1:] == drawn[2][1:]
    assert (drawn[0][0], drawn[2][0]) == (True, False)
    assert whole.normal("x", 3).equal(less.normal("x", 3))


def test_calls_on_another_device_get_all_tensors_there_those_of_masks_and_biases_too() -> None:
    there, q = torch.device("meta"), torch.randn(1, 2, 3, 4, requires_grad=True)
    mask = masks.Causal() & (masks.Keep(torch.ones(3, dtype=torch.bool), "keys") | masks.Lengths(torch.tensor([2])))
    given = {"q": q, "mask": mask, "bias": RelativeBias(torch.zeros(1, 2, 5)), "heads": slice(1), "lengths": [2]}
    found = moved(given, there)
    assert found["q"].device == found["bias"].values.device == there
    assert found["q"].requires_grad
    assert [tensor.device for tensor in found["mask"].tensors()] == [there, there]
    assert (found["heads"], found["lengths"]) == (slice(1), [2])


class Broken:
    """A worker whose cases fail while they have a feature."""

    def __init__(self, *needed: str) -> None:
        self.needed, self.runs = set(needed), 0

    def run(self, case: Case) -> Outcome:
        self.runs += 1
        features = [each for each in ("one", "two", "three") if each not in case.without]
        failure = "Mismatch: output is off: 3 instead of 4" if self.needed <= set(features) else None
        return Outcome(failure, features)


def test_a_failure_is_reduced_to_the_features_that_it_needs_and_printed_once() -> None:
    printed: list[str] = []
    search = Search({"attention": Entry(lambda _: None, 1, 1)}, report=printed.append)
    search.sample("attention", 5, Broken("two"))  # type: ignore[arg-type]
    (kind,) = search.kinds
    assert (kind.features, kind.count) == (frozenset({"two"}), 5)
    assert len(printed) == 1
    assert "python -m tests.fuzz --only 'attention' --case 0 --without \"three, one\" --most 1" in printed[0]


def test_a_known_fault_does_not_hide_another_one_in_the_same_case() -> None:
    search = Search({"attention": Entry(lambda _: None, 1, 1)}, report=lambda _: None)
    search.sample("attention", 1, Broken("two"))  # type: ignore[arg-type]
    search.sample("attention", 1, Broken("one"))  # type: ignore[arg-type]
    assert [kind.features for kind in search.kinds] == [frozenset({"two"}), frozenset({"one"})]


def test_a_process_that_dies_is_a_failure_and_the_next_case_has_a_new_one(worker: Worker) -> None:
    worker.run(Case("attention", 1))
    assert worker.process is not None
    worker.process.kill()
    ended = worker.run(Case("attention", 2))
    assert ended.failure == "Death: SIGKILL"
    assert worker.run(Case("attention", 2)).failure is None


def test_the_command_explains_itself_and_rejects_unknown_names() -> None:
    assert "python -m tests.fuzz --only attention --case 17" in CliRunner().invoke(main, ["--help"]).output
    listed = CliRunner().invoke(main, ["--list"]).output.splitlines()
    assert [line[:24].strip() for line in listed] == list(ENTRIES)
    result = CliRunner().invoke(main, ["--only", "nothing"])
    assert result.exit_code == 2
    assert "No entry point contains 'nothing'. There are: attention," in result.output
