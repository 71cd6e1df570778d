"""The library of the native kernel: how it is found, which instruction set is used, and what it refuses."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from multihead.errors import ArgumentError, SlowPathWarning
from multihead.kernels.native import library
from multihead.kernels.native.library import InstructionSet

WITHOUT = """
from multihead.kernels.native import library
library.LIBRARY_NAME = "missing.so"
import torch, multihead as mh
q = torch.randn(1, 2, 3, 4, requires_grad=True)
mh.attention(q, q, q).sum().backward()
print(mh.explain(q, q, q).kernel, mh.MultiHeadAttention(8, 2)(torch.randn(1, 3, 8)).shape)
"""
needs_library = pytest.mark.skipif(library.reason_of_absence() is not None, reason="there is no native library here")

SETS = tuple(
    InstructionSet(name, index, compiled, runs, name == "emulated")
    for index, (name, compiled, runs) in enumerate(
        [("scalar", True, True), ("avx2", True, True), ("avx512", True, False), ("emulated", False, False)]
    )
)


@pytest.fixture
def _chosen_anew() -> Iterator[None]:
    """Let this test choose for itself, and the next one again."""
    library.default_instruction_set.cache_clear()
    yield
    library.default_instruction_set.cache_clear()


@pytest.fixture
def _narrow_machine(monkeypatch: pytest.MonkeyPatch, _chosen_anew: None) -> None:
    """A machine whose widest instructions are AVX2."""
    monkeypatch.delenv("MULTIHEAD_CPU", raising=False)
    found = SimpleNamespace(
        instruction_sets=SETS,
        fastest_set=SETS[1],
        fastest_set_of_cpu=SETS[1],
        functions=dict.fromkeys(("choose", "choose_in_thread"), lambda _: None),
    )
    monkeypatch.setattr(library, "_library_or_reason", lambda: found)


@needs_library
class TestRunning:
    def test_every_instruction_set_that_runs_attends(self) -> None:
        scores = torch.tensor([0.0, 1.0, 2.0])
        q, k, v = torch.ones(1, 1, 1, 1), scores[None, None, :, None], 1 + scores[None, None, :, None]
        for each in library.instruction_sets():
            if not each.is_supported_by_cpu:
                continue
            with library.using_instruction_set(each.name):
                output, logsumexp, *_ = torch.ops.multihead.attention.short_call(q, k, v, None, -1, -1, 0, 1.0, None)
            torch.testing.assert_close(output.flatten()[0], scores.softmax(0) @ v.flatten())
            torch.testing.assert_close(logsumexp.flatten()[0], scores.logsumexp(0))

    def test_bounds_are_checked_in_every_sample(self) -> None:
        q, k = torch.ones(2, 1, 5, 4), torch.ones(2, 1, 3, 4)
        start, stop = torch.zeros(2, 5, dtype=torch.int64), torch.full((2, 5), 3)
        terms = (None, None, None, None, 1.0, None, 0.0, None)
        torch.ops.multihead.attention(q, k, k, start, stop, *terms)
        stop[-1, -1] = 4
        with pytest.raises(RuntimeError, match="The bounds of some query lie outside the 3 keys"):
            torch.ops.multihead.attention(q, k, k, start, stop, *terms)

    def test_a_result_beyond_all_memory_is_an_error_in_words(self) -> None:
        """The samples, heads and queries of these tensors exist once in memory."""
        q = torch.ones(1, 1, 1, 1).expand(1 << 15, 1 << 15, 1 << 20, 1)
        with pytest.raises(RuntimeError, match="There is no memory for a tensor that the native kernel returns"):
            torch.ops.multihead.attention.short_call(q, q[:, :, :1], q[:, :, :1], None, -1, -1, 0, None, None)

    def test_the_workspace_grows_with_the_threads(self) -> None:
        q = torch.ones(1, 8, 500, 16)
        edge = torch.zeros(1, 500, dtype=torch.int64)
        before, held = torch.get_num_threads(), []
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                terms = (None, None, None, None, 1.0, None, 0.0, None)
                held.append(torch.ops.multihead.workspace(q, q, q, edge, edge + 500, *terms))
        finally:
            torch.set_num_threads(before)
        assert held[0] < held[1] < held[2]

    def test_a_schema_of_another_version_is_found_out(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        path = library.path_of_library()
        assert path is not None
        schemas = Path(library.__file__).with_name("schemas.txt").read_text(encoding="utf-8")
        (tmp_path / "schemas.txt").write_text(schemas.replace("int total_heads=0, ", "", 1), encoding="utf-8")
        monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
        assert library._load_library(path) == "its library is of another version of multihead; install multihead again"


@needs_library
def test_each_compiled_set_reports_the_size_of_its_register_tiles() -> None:
    tiles = {each.name: each.tile for each in library.instruction_sets()}
    assert tiles["scalar"] == (4, 8)
    for name, tile in (("avx2", (6, 16)), ("avx512", (12, 32)), ("neon", (8, 8))):
        assert tiles[name] in (tile, (0, 0))
    assert all((each.tile > (0, 0)) == each.compiled for each in library.instruction_sets())


@needs_library
@pytest.mark.usefixtures("_chosen_anew")
def test_without_a_request_the_fastest_set_that_runs_here_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULTIHEAD_CPU", raising=False)
    used = library.chosen_instruction_set()
    assert used.is_supported_by_cpu
    assert not used.for_tests
    # Only bfloat16 in pairs is not faster on every processor that has it.
    wider = [
        each.name
        for each in library.instruction_sets()[used.index + 1 :]
        if each.is_supported_by_cpu and not each.for_tests
    ]
    assert wider in ([], ["avx512_bf16"])


@pytest.mark.usefixtures("_narrow_machine")
class TestChoosing:
    def test_the_set_that_the_library_calls_fastest_is_chosen(self) -> None:
        assert library.chosen_instruction_set().name == "avx2"

    def test_the_environment_forces_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTIHEAD_CPU", "scalar")
        assert library.chosen_instruction_set().name == "scalar"

    @pytest.mark.parametrize(
        ("asked", "finding"),
        [
            ("avx512", "MULTIHEAD_CPU is 'avx512', which this CPU cannot run."),
            ("emulated", "MULTIHEAD_CPU is 'emulated', which this build does not contain."),
            ("AVX2", "MULTIHEAD_CPU is 'AVX2', and there is no such instruction set."),
        ],
    )
    def test_an_impossible_request_is_refused_in_words(
        self, monkeypatch: pytest.MonkeyPatch, asked: str, finding: str
    ) -> None:
        monkeypatch.setenv("MULTIHEAD_CPU", asked)
        for _ in range(2):  # the second time too
            with pytest.raises(ArgumentError) as refusal:
                library.chosen_instruction_set()
            assert str(refusal.value) == f"{finding} Give one that runs here: scalar, avx2."

    def test_a_build_without_the_fastest_set_of_this_cpu_warns_once_unless_a_set_is_forced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert library.missing_faster_instruction_set() is None
        monkeypatch.setattr(library._library_or_reason(), "fastest_set_of_cpu", SETS[2])
        with pytest.warns(SlowPathWarning) as warned:
            assert [library.chosen_instruction_set().name for _ in range(2)] == ["avx2", "avx2"]
        assert [str(each.message) for each in warned] == [library.missing_faster_instruction_set()]
        assert library.missing_faster_instruction_set() == (
            "The native kernel was compiled without avx512, the fastest instruction set of this CPU, and uses avx2. "
            "Install multihead again on this machine, or with MULTIHEAD_SETS=all for any."
        )
        library.default_instruction_set.cache_clear()
        monkeypatch.setenv("MULTIHEAD_CPU", "scalar")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert library.chosen_instruction_set().name == "scalar"

    def test_a_set_is_used_within_its_context_alone_and_in_no_other_thread(self) -> None:
        elsewhere = []
        with library.using_instruction_set("scalar") as used:
            assert used.name == library.chosen_instruction_set().name == "scalar"
            thread = threading.Thread(target=lambda: elsewhere.append(library.chosen_instruction_set().name))
            thread.start()
            thread.join()
        assert elsewhere == ["avx2"]
        assert library.chosen_instruction_set().name == "avx2"

    def test_a_set_that_does_not_run_is_refused(self) -> None:
        with pytest.raises(ArgumentError) as refusal, library.using_instruction_set("avx512"):
            pass
        assert str(refusal.value) == (
            "using received 'avx512', which this CPU cannot run. Give one that runs here: scalar, avx2."
        )


class TestAbsence:
    def test_no_file_says_that_it_was_not_built(self, tmp_path: Path) -> None:
        assert library._load_library(tmp_path / library.LIBRARY_NAME) == (
            "its library was not built when multihead was installed, which takes GCC or Clang with OpenMP"
        )

    def test_a_file_that_is_no_library_does_not_load(self, tmp_path: Path) -> None:
        path = tmp_path / library.LIBRARY_NAME
        path.write_bytes(b"no library")
        assert str(library._load_library(path)).startswith("its library does not load (")

    @pytest.mark.usefixtures("_chosen_anew")
    def test_nothing_runs_without_a_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "_library_or_reason", lambda: "its library was not built")
        assert library.reason_of_absence() == "its library was not built"
        assert library.path_of_library() is None
        assert library.instruction_sets() == ()
        for refused in (library.chosen_instruction_set, library._library):
            with pytest.raises(ArgumentError) as refusal:
                refused()
            assert str(refusal.value) == (
                "The native kernel cannot run: its library was not built. Leave kernel out to use another kernel."
            )

    def test_attention_and_layers_run_without_a_library(self) -> None:
        """In a process of its own: importing the formulas of FLOPs once needed an operator of the library."""
        found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
        assert found.stdout.split() == ["sdpa", "torch.Size([1,", "3,", "8])"]


@needs_library
class TestSumsOfRows:
    """The library receives the addresses of these tensors, so what does not fit is rejected before."""

    GOOD: ClassVar = {
        "values": torch.rand(3, 5),
        "counted": torch.ones(3, 5, dtype=torch.bool),
        "levels": torch.rand(2, 5),
        "level_of_row": torch.tensor([0, -1, 1]),
        "ends": torch.tensor([0, 2, 5]),
        "bins": torch.zeros(3, 8, dtype=torch.int64),
    }

    @pytest.mark.parametrize(
        ("name", "wrong"),
        [
            ("values", torch.rand(3, 4)),
            ("values", torch.rand(1, 3, 5)),
            ("values", torch.rand(5)),
            ("values", torch.rand(3, 5).double()),
            ("values", torch.rand(5, 3).T),
            ("counted", torch.ones(3, 4, dtype=torch.bool)),
            ("counted", torch.ones(3, 5)),
            ("counted", torch.ones(5, 3, dtype=torch.bool).T),
            ("levels", torch.rand(2, 4)),
            ("levels", torch.rand(2, 5).double()),
            ("levels", torch.rand(1, 5)),
            ("level_of_row", torch.tensor([0, 1])),
            ("level_of_row", torch.tensor([0, 1, 2])),
            ("level_of_row", torch.tensor([0, 1, 1]).int()),
            ("ends", torch.tensor([0, 2])),
            ("ends", torch.tensor([1, 5])),
            ("ends", torch.tensor([0, 6, 5])),
            ("ends", torch.tensor([0, 2, 5]).int()),
            ("ends", torch.zeros(0, dtype=torch.int64)),
            ("bins", torch.zeros(2, 8, dtype=torch.int64)),
            ("bins", torch.zeros(3, 7, dtype=torch.int64)),
            ("bins", torch.zeros(3, 0, dtype=torch.int64)),
            ("bins", torch.zeros(3, dtype=torch.int64)),
            ("bins", torch.zeros(8, 3, dtype=torch.int64).T),
        ],
    )
    def test_tensors_that_do_not_fit_are_rejected(self, name: str, wrong: torch.Tensor) -> None:
        given = {**self.GOOD, name: wrong}
        with pytest.raises(ArgumentError, match=r"^The values, which of them count, the levels, the level of "):
            library.sum_rows(first_bin=0, **given)

    def test_rows_without_queries_texts_or_levels_are_summed(self) -> None:
        for rows, ends in ((3, [0, 2, 5]), (3, [0, 0, 4, 4]), (0, [0, 5]), (3, [0])):
            values, counted = torch.randn(rows, ends[-1]), torch.rand(rows, ends[-1]) < 0.7
            levels, bins = torch.rand(1, ends[-1]), torch.zeros(rows, 8, dtype=torch.int64)
            level_of_row = torch.tensor([-1, 0, 0])[:rows]
            found = library.sum_rows(values, counted, levels, level_of_row, torch.tensor(ends), 0, bins)
            known = values.double().masked_fill(~counted, 0)
            torch.testing.assert_close(found.total, known.sum(-1))
            assert torch.equal(found.number, counted.sum(-1).double())
            assert int(bins.sum()) == int(counted.sum())
            above = (known - levels.double()).masked_fill(~counted | (level_of_row < 0)[:, None], 0)
            for text, (first, stop) in enumerate(itertools.pairwise(ends)):
                torch.testing.assert_close(found.text_totals[:, text], above[:, first:stop].sum(-1))
                assert torch.equal(found.text_counts[:, text], counted[:, first:stop].sum(-1).double())
