"""The command `doctor`: what it prints, where all is well and where something is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch.nn.attention import SDPBackend, sdpa_kernel

import multihead.cli.diagnosis as room
from multihead import contract
from multihead.cli import main
from multihead.cli.doctor import _history
from multihead.kernels import proven, sdpa
from multihead.kernels.native.library import InstructionSet
from multihead.kernels.proven import GpuPath, ProvenRow, code_of
from tests.simulated_gpu import operators
from tests.simulated_gpu.device import simulated_gpu, skip_where_not_simulated

FOUND = room.Diagnosis(
    system="Linux x86_64",
    cpu="A processor",
    cpu_features=("avx2", "fma3"),
    torch_version="2.13.0",
    threads=1,
    library=Path("/here/libmultihead_native.so"),
    absence_reason=None,
    instruction_sets=(
        InstructionSet("scalar", 0, compiled=True, is_supported_by_cpu=True, for_tests=False),
        InstructionSet("avx2", 1, compiled=True, is_supported_by_cpu=True, for_tests=False),
        InstructionSet("avx512", 2, compiled=True, is_supported_by_cpu=False, for_tests=False),
        InstructionSet("avx512_bf16", 3, compiled=False, is_supported_by_cpu=False, for_tests=False),
        InstructionSet("emulated_amx", 4, compiled=True, is_supported_by_cpu=True, for_tests=True),
    ),
    requested_set=None,
    chosen_set="avx2",
    refusal_reason=None,
    missing_set_warning=None,
    openmp_runtime_files=(Path("/torch/libgomp.so.1"),),
    kernels=(
        room.KernelDiagnosis("native", {"float16": "it computes float32", "float64": "it computes float32"}),
        room.KernelDiagnosis("reference", {}),
    ),
    gpu="torch 2.13.0 finds no GPU",
)

ALL_IS_WELL = """\
Machine
   system        Linux x86_64
   processor     A processor
   features      avx2, fma3
   torch         2.13.0, 1 thread
   OpenMP        /torch/libgomp.so.1

Native kernel
   library       /here/libmultihead_native.so
   scalar        runs here
   avx2          used: the fastest that runs here
   avx512        this processor lacks it
   avx512_bf16   not in this build
   emulated_amx  for tests, only on request
   small calls   one operator plans and computes

Kernels, the fastest first
   native        rejects float16, float64: it computes float32
   reference     supports every call

GPU
   device        none: torch 2.13.0 finds no GPU

No problems found.
"""


def run(monkeypatch: pytest.MonkeyPatch, found: room.Diagnosis, columns: int = 80) -> Result:
    monkeypatch.setattr(room, "diagnose", lambda: found)
    return CliRunner().invoke(main, ["doctor"], env={"COLUMNS": str(columns)})


def test_all_that_is_found_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, FOUND)
    assert result.exit_code == 0
    assert result.output == ALL_IS_WELL


def test_a_build_that_lacks_a_faster_set_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(
        monkeypatch, replace(FOUND, missing_set_warning="The native kernel was compiled without amx. Install it again.")
    )
    assert result.output.endswith("\n\n! The native kernel was compiled without amx. Install it again.\n")


def test_a_forced_set_says_what_forced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, replace(FOUND, requested_set="scalar", chosen_set="scalar"))
    assert "   scalar        used: set by MULTIHEAD_CPU\n   avx2          runs here\n" in result.output


def test_a_missing_library_and_a_silent_system_are_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = replace(
        FOUND,
        library=None,
        absence_reason="it was not built",
        instruction_sets=(),
        chosen_set=None,
        openmp_runtime_files=None,
        cpu_features=(),
    )
    output = run(monkeypatch, bare, columns=200).output
    assert "   features      torch names none\n" in output
    assert "   OpenMP        the loaded runtimes cannot be listed on this system\n" in output
    assert "Native kernel\n   library       none: it was not built\n\nKernels" in output
    assert " ".join(output.split()).endswith(
        "! The native kernel is not available: it was not built. Calls use the next kernel that does not refuse; "
        "install a compiler, then multihead again."
    )


def test_no_runtime_of_its_own_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "   OpenMP        no runtime is loaded as a separate library\n" in run(
        monkeypatch, replace(FOUND, openmp_runtime_files=())
    ).output  # fmt: skip


@pytest.mark.parametrize("columns", [50, 60])
def test_lines_wrap_next_to_their_label(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    reason = "it computes float32 and bfloat16, and the tensors are of another dtype altogether"
    result = run(monkeypatch, replace(FOUND, kernels=(room.KernelDiagnosis("native", {"float16": reason}),)), columns)
    assert max(map(len, result.output.splitlines())) <= columns
    assert f"rejects float16: {reason}" in " ".join(result.output.split())


def test_the_doctor_of_this_machine_runs() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    assert "Kernels, the fastest first\n" in result.output


def test_help_shows_examples() -> None:
    output = CliRunner().invoke(main, ["doctor", "--help"]).output
    assert "MULTIHEAD_CPU=avx2 multihead doctor" in output


def test_the_gpu_is_named_with_its_kernels_and_what_has_not_run_on_hardware() -> None:
    skip_where_not_simulated()
    with simulated_gpu():
        output = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"}).output
    lines = output[output.index("GPU\n") :].splitlines()
    assert lines[1].startswith("   device        a simulated GPU, CUDA ")
    assert lines[1].endswith(", compute capability 9.0")
    assert lines[2:10] == [
        "   full, causal  bfloat16; bfloat16, grouped heads; float16; float16, grouped heads: FlashAttention",
        "                 float32: the memory-efficient kernel",
        "                 float32, grouped heads: the memory-efficient kernel, with k and v repeated",
        "   ragged        not yet run on hardware elsewhere: MULTIHEAD_UNPROVEN=ragged uses it",
        "   sdpa          in use; this code has no row in proven.json",
        "   flex          in use; this code has no row in proven.json",
        "   statistics    not yet run on hardware elsewhere: MULTIHEAD_UNPROVEN=statistics uses it",
        '   records       keep="statistics" or "device" copies less to the CPU than keep="cpu"',
    ]


def test_a_card_without_matrix_instructions_measures_by_operators_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_not_simulated()
    monkeypatch.setattr(operators, "CAPABILITY", [7, 5])
    with simulated_gpu():
        output = CliRunner().invoke(main, ["doctor"], env={"COLUMNS": "200"}).output
    assert (
        "statistics operators of PyTorch instead: it needs a GPU of compute capability 8.0, because older ones would "
        "compute without matrix instructions"
    ) in " ".join(output.split())


def test_a_gpu_without_fused_kernels_and_one_of_rocm_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_where_not_simulated()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with simulated_gpu(), sdpa_kernel(SDPBackend.MATH):
        found = room.diagnose_gpu()
    assert found.platform == "ROCm 7.0, an unknown architecture"
    assert set(found.fused.values()) == {"none, so another kernel of this library computes them"}


class TestOnTheGpu:
    """A simulated GPU, on which gradients do not run, so that calls without them are checked."""

    @pytest.fixture
    def run_there(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Result]]:
        skip_where_not_simulated()
        calls = [replace(call, trains=False) for call in contract.CALLS if call.name in ("causal", "softcap")]
        monkeypatch.setattr(contract, "CALLS", tuple(call for call in calls if call.dtype == torch.float32))
        with simulated_gpu():
            yield lambda: CliRunner().invoke(main, ["doctor", "--gpu"], env={"COLUMNS": "200"})

    def test_every_kernel_is_checked(self, run_there: Callable[[], Result]) -> None:
        result = run_there()
        assert result.output.splitlines() == [
            f"a simulated GPU, torch {torch.__version__}",
            "   sdpa          1 of 1 call passed; in use; this code has no row in proven.json",
            "   flex          2 of 2 calls passed; in use; this code has no row in proven.json",
            "   statistics    2 of 2 calls passed; not yet run on hardware elsewhere:",
            "                 MULTIHEAD_UNPROVEN=statistics uses it",
            "",
            "No problems found.",
        ]
        assert result.exit_code == 0

    def test_a_kernel_that_is_wrong_is_named_and_the_command_fails(
        self, run_there: Callable[[], Result], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attend = sdpa.attend

        def wrong(request: Any, bounds: Any) -> Any:
            found = attend(request, bounds)
            return replace(found, output=found.output * 2)

        monkeypatch.setattr(sdpa, "attend", wrong)
        monkeypatch.setattr(contract, "kernels_on", lambda _: ("sdpa",))  # the test above checks the others
        result = run_there()
        lines = result.output.splitlines()
        assert lines[1].startswith("   sdpa          causal, float32: the output is 1.0e+00 off, and the tolerance is")
        assert lines[2].startswith("   sdpa          0 of 1 call passed; ")
        assert lines[-1] == "! 1 call failed. Report the lines above."
        assert result.exit_code == 1

    def test_a_kernel_with_a_row_names_its_card_and_one_without_the_way_to_use_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = GpuPath("planted", ("kernels/flex.py",))
        assert _history(path) == "not yet run on hardware elsewhere: MULTIHEAD_UNPROVEN=planted uses it"
        row = ProvenRow("planted", code_of(path.sources), "A card", "2.11.0", None, "2026-11-28")
        monkeypatch.setattr(proven, "rows", lambda: (row,))
        assert _history(path) == "this code passed on A card, 2026-11-28"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_one_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        result = CliRunner().invoke(main, ["doctor", "--gpu"])
        assert result.exit_code == 2
        assert result.stderr == (
            f"error: torch {torch.__version__} is a build without CUDA, so no kernel can run on a GPU. "
            "Install a build for your GPU, as pytorch.org describes.\n"
        )
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        sentence = f"error: torch {torch.__version__} finds no GPU. Check the driver with nvidia-smi.\n"
        assert CliRunner().invoke(main, ["doctor", "--gpu"]).stderr == sentence
