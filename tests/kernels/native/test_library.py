"""The library of the native kernel: how it is found, which instruction set is used, and what it refuses."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from multihead.errors import ArgumentError, SlowPathWarning
from multihead.kernels.native import library
from multihead.kernels.native.library import AT, InstructionSet

HEADER = Path(__file__).resolve().parents[3] / "csrc" / "call.h"
needs_library = pytest.mark.skipif(library.absence() is not None, reason="there is no native library here")

SETS = tuple(
    InstructionSet(name, index, compiled, runs, name == "emulated")
    for index, (name, compiled, runs) in enumerate(
        [("scalar", True, True), ("avx2", True, True), ("avx512", True, False), ("emulated", False, False)]
    )
)


@pytest.fixture
def _chosen_anew() -> Iterator[None]:
    """Let this test choose for itself, and the next one again."""
    library._unforced.cache_clear()
    yield
    library._unforced.cache_clear()


@pytest.fixture
def _narrow_machine(monkeypatch: pytest.MonkeyPatch, _chosen_anew: None) -> None:
    """A machine whose widest instructions are AVX2."""
    monkeypatch.delenv("MULTIHEAD_CPU", raising=False)
    found = SimpleNamespace(
        sets=SETS, fastest=1, fastest_of_cpu=1, choose=lambda _: None, choose_in_thread=lambda _: None
    )
    monkeypatch.setattr(library, "_found", lambda: found)


def small_call() -> tuple[list[float], dict[str, torch.Tensor]]:
    """One query of one head that sees three keys of one feature; the tensors must outlive the call."""
    tensors = {
        "q": torch.ones(1),
        "k": torch.tensor([0.0, 1.0, 2.0]),
        "v": torch.tensor([1.0, 2.0, 3.0]),
        "start": torch.tensor([0]),
        "stop": torch.tensor([3]),
        "output": torch.full((1,), torch.nan),
        "logsumexp": torch.full((1,), torch.nan),
    }
    fields = library.blank()
    for name, tensor in tensors.items():
        fields[AT[name]] = tensor.data_ptr()
    ones = "batch heads kv_heads queries head_dim value_dim k_strides.row v_strides.row scale"
    for name in ones.split():
        fields[AT[name]] = 1
    fields[AT["keys"]] = 3
    return fields, tensors


def test_the_fields_are_those_of_the_header() -> None:
    header = HEADER.read_text(encoding="utf-8")
    fields = header[header.index("#define MULTIHEAD_CALL_FIELDS(") : header.index("struct Call {")]
    for pattern, names in (
        (r"\b(?:INPUT|OUTPUT)\(\w+, (\w+)\)", library.ADDRESSES),
        (r"\bNUMBER\((?:int64_t|Dtype), (\w+)\)", library.SIZES + library.OPTIONS),
        (r"\bROW_STRIDES\((\w+)\)", library.ROW_STRIDES),
        (r"\bCELL_STRIDES\((\w+)\)", library.CELL_STRIDES),
        (r"\bNUMBER\(double, (\w+)\)", library.REALS),
    ):
        assert tuple(found for found in re.findall(pattern, fields) if found != "type") == names


@needs_library
class TestRunning:
    def test_every_instruction_set_that_runs_attends(self) -> None:
        scores = torch.tensor([0.0, 1.0, 2.0])
        for each in library.instruction_sets():
            if not each.runs:
                continue
            with library.using(each.name):
                fields, tensors = small_call()
                assert fields[AT["instruction_set"]] == each.index
                library.run(library.FORWARD, fields)
            torch.testing.assert_close(tensors["output"][0], scores.softmax(0) @ tensors["v"])
            torch.testing.assert_close(tensors["logsumexp"][0], scores.logsumexp(0))

    @pytest.mark.parametrize(("bound", "value"), [("start", -1), ("start", 4), ("stop", -1), ("stop", 4)])
    def test_a_bound_outside_the_keys_is_refused_before_anything_is_computed(self, bound: str, value: int) -> None:
        fields, tensors = small_call()
        tensors[bound].fill_(value)
        with pytest.raises(ArgumentError) as refusal:
            library.run(library.FORWARD, fields)
        assert str(refusal.value) == "The bounds of some query lie outside the 3 keys. Give bounds from 0 to 3."
        assert tensors["output"].isnan().all()

    def test_more_offsets_than_a_row_has_room_for_are_refused(self) -> None:
        fields, tensors = small_call()
        fields[AT["num_offsets"]] = 9
        with pytest.raises(ArgumentError) as refusal:
            library.run(library.FORWARD, fields)
        assert str(refusal.value) == "offset_weights are requested for 9 offsets. Give at most 8."
        assert tensors["output"].isnan().all()

    @pytest.mark.parametrize("rows", [1, 5])
    def test_bounds_are_checked_in_every_sample_and_repeated_ones_once(self, rows: int) -> None:
        fields, tensors = small_call()
        fields[AT["heads"]] = fields[AT["batch"]] = 2
        fields[AT["queries"]] = rows
        fields[AT["q_strides.row"]] = fields[AT["output_strides.row"]] = 1
        tensors["q"], tensors["output"] = torch.ones(4 * rows), torch.zeros(4 * rows)
        tensors["logsumexp"] = torch.zeros(4 * rows)
        tensors["start"] = torch.zeros(2 * rows, dtype=torch.int64)
        tensors["stop"] = torch.full((2 * rows,), 3)
        for name in ("q", "output", "logsumexp", "start", "stop"):
            fields[AT[name]] = tensors[name].data_ptr()
        tensors["stop"][-1] = 4
        library.run(library.FORWARD, fields)  # a stride of 0: no query reads the last element
        fields[AT["bounds_batch_stride"]] = rows
        with pytest.raises(ArgumentError):
            library.run(library.FORWARD, fields)

    def test_an_unknown_pass_and_an_unknown_set_are_refused(self) -> None:
        fields, _ = small_call()
        running = ", ".join(each.name for each in library.instruction_sets() if each.runs)
        index = fields[AT["instruction_set"]]
        for call in (library.run, library.workspace):
            with pytest.raises(ArgumentError) as refusal:
                call(3, fields)
            assert str(refusal.value) == (
                f"The native kernel has no pass 3 for instruction set {index} here. "
                f"Give pass 0, 1 or 2, and a set that runs here: {running}."
            )
        fields[AT["instruction_set"]] = 99
        with pytest.raises(ArgumentError, match="no pass 0 for instruction set 99 here"):
            library.run(library.FORWARD, fields)

    def test_a_workspace_beyond_all_memory_is_an_error_in_words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "_found", lambda: SimpleNamespace(run=lambda *_: 1, workspace=lambda *_: 1 << 60))
        with pytest.raises(MemoryError) as refusal:
            library.run(library.FORWARD, small_call_values())
        assert str(refusal.value) == (
            "There is no memory for the native kernel's workspace of 1152921504606846976 bytes."
        )

    def test_the_workspace_grows_with_the_threads(self) -> None:
        fields, _ = small_call()
        held = []
        for threads in (1, 2, 3):
            fields[AT["threads"]] = threads
            held.append(library.workspace(library.FORWARD, fields))
        assert held[0] <= held[1] <= held[2]

    def test_as_many_threads_as_torch_has_are_used(self) -> None:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            assert library.blank()[AT["threads"]] == 1
        finally:
            torch.set_num_threads(before)


def small_call_values() -> list[float]:
    return [0.0 if name in library.REALS else 0 for name in library.FIELDS]


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
    used = library.chosen()
    assert used.runs
    assert not used.for_tests
    # Only bfloat16 in pairs is not faster on every processor that has it.
    wider = [each.name for each in library.instruction_sets()[used.index + 1 :] if each.runs and not each.for_tests]
    assert wider in ([], ["avx512_bf16"])


@pytest.mark.usefixtures("_narrow_machine")
class TestChoosing:
    def test_the_set_that_the_library_calls_fastest_is_chosen(self) -> None:
        assert library.chosen().name == "avx2"

    def test_the_environment_forces_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MULTIHEAD_CPU", "scalar")
        assert library.chosen().name == "scalar"

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
                library.chosen()
            assert str(refusal.value) == f"{finding} Give one that runs here: scalar, avx2."

    def test_a_build_without_the_fastest_set_of_this_cpu_warns_once_unless_a_set_is_forced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert library.lacking() is None
        monkeypatch.setattr(library._found(), "fastest_of_cpu", 2)
        with pytest.warns(SlowPathWarning) as warned:
            assert [library.chosen().name for _ in range(2)] == ["avx2", "avx2"]
        assert [str(each.message) for each in warned] == [library.lacking()]
        assert library.lacking() == (
            "The native kernel was compiled without avx512, the fastest instruction set of this CPU, and uses avx2. "
            "Install multihead again on this machine, or with MULTIHEAD_SETS=all for any."
        )
        library._unforced.cache_clear()
        monkeypatch.setenv("MULTIHEAD_CPU", "scalar")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert library.chosen().name == "scalar"

    def test_a_set_is_used_within_its_context_alone_and_in_no_other_thread(self) -> None:
        elsewhere = []
        with library.using("scalar") as used:
            assert used.name == library.chosen().name == "scalar"
            thread = threading.Thread(target=lambda: elsewhere.append(library.chosen().name))
            thread.start()
            thread.join()
        assert elsewhere == ["avx2"]
        assert library.chosen().name == "avx2"

    def test_a_set_that_does_not_run_is_refused(self) -> None:
        with pytest.raises(ArgumentError) as refusal, library.using("avx512"):
            pass
        assert str(refusal.value) == (
            "using received 'avx512', which this CPU cannot run. Give one that runs here: scalar, avx2."
        )


class TestAbsence:
    def test_no_file_says_that_it_was_not_built(self, tmp_path: Path) -> None:
        assert library._loaded(tmp_path / library.NAME) == (
            "its library was not built when multihead was installed, which takes GCC or Clang with OpenMP"
        )

    def test_a_file_that_is_no_library_does_not_load(self, tmp_path: Path) -> None:
        path = tmp_path / library.NAME
        path.write_bytes(b"no library")
        assert str(library._loaded(path)).startswith("its library does not load (")

    @needs_library
    def test_a_library_with_other_fields_is_of_another_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = library.path()
        assert path is not None
        monkeypatch.setattr(library, "FIELDS", (*library.FIELDS, "one_more"))
        assert library._loaded(path) == "its library is of another version of multihead; install multihead again"

    @pytest.mark.usefixtures("_chosen_anew")
    def test_nothing_runs_without_a_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, "_found", lambda: "its library was not built")
        assert library.absence() == "its library was not built"
        assert library.path() is None
        assert library.instruction_sets() == ()
        for refused in (library.chosen, library.blank, lambda: library.run(0, small_call_values())):
            with pytest.raises(ArgumentError) as refusal:
                refused()
            assert str(refusal.value) == (
                "The native kernel cannot run: its library was not built. Leave kernel out to have another one chosen."
            )
