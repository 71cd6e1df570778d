"""The report of the doctor: the machine, the native library, the OpenMP runtimes, and what each kernel refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multihead.cli.diagnosis import diagnose
from multihead.kernels.choose import KERNELS
from multihead.kernels.native import library
from multihead.kernels.native.library import openmp_runtimes

MEMORY_MAP = """\
55d0c0000000-55d0c0001000 r--p 00000000 08:01 131 /usr/bin/python3.11
7f00a0000000-7f00a0010000 r-xp 00000000 08:01 132 /opt/my libs/torch/lib/libgomp.so.1
7f00a0010000-7f00a0020000 rw-p 00010000 08:01 132 /opt/my libs/torch/lib/libgomp.so.1
7f00b0000000-7f00b0010000 r-xp 00000000 08:01 133 /usr/lib/libomp.so
7f00b0010000-7f00b0020000 r-xp 00000000 08:01 134 /opt/sklearn/libgomp-a34b3233.so.1.0.0
7f00c0000000-7f00c0010000 r-xp 00000000 08:01 135 /usr/lib/libompl.so
7f00d0000000-7f00d0010000 rw-p 00000000 00:00 0
7ffc00000000-7ffc00010000 rw-p 00000000 00:00 0 [stack]
"""


def test_every_openmp_runtime_is_listed_once(tmp_path: Path) -> None:
    (tmp_path / "maps").write_text(MEMORY_MAP)
    assert openmp_runtimes(tmp_path / "maps") == (
        Path("/opt/my libs/torch/lib/libgomp.so.1"),
        Path("/opt/sklearn/libgomp-a34b3233.so.1.0.0"),
        Path("/usr/lib/libomp.so"),
    )


def test_a_system_that_does_not_list_runtimes_returns_none(tmp_path: Path) -> None:
    assert openmp_runtimes(tmp_path / "maps") is None


def test_two_runtimes_are_warned_of() -> None:
    found = replace(
        diagnose(),
        absence_reason=None,
        refusal_reason=None,
        openmp_runtime_files=(Path("/a/libgomp.so.1"), Path("/b/libomp.so")),
    )
    (warning,) = found.warnings
    assert warning == (
        "2 OpenMP runtimes are loaded, and their threads compete for the same cores: /a/libgomp.so.1, /b/libomp.so. "
        "Install packages that share one."
    )


@pytest.mark.skipif(library.reason_of_absence() is not None, reason="there is no native library here")
def test_the_native_library_shares_the_runtime_of_torch() -> None:
    found = diagnose()
    if found.openmp_runtime_files is None:
        pytest.skip("this system does not list which runtimes are loaded")
    assert len(found.openmp_runtime_files) <= 1
    assert found.warnings == ()


def test_the_refusals_of_every_kernel_are_reported() -> None:
    found = {kernel.name: kernel.refusals for kernel in diagnose().kernels}
    assert list(found) == list(KERNELS)
    assert found["reference"] == {}
    assert found["flex"] == {"every call": "it needs CUDA, and the tensors are on cpu"}
    assert found["sdpa"] == {
        "bias with gradient": "PyTorch's fused kernels have no gradient for a bias",
        "softcap": "PyTorch's fused kernels have no softcap",
        "dropout": "PyTorch's fused kernels are called without dropout",
    }


def test_choices_and_features_are_those_of_torch_and_the_library() -> None:
    found = diagnose()
    assert (found.torch_version, found.threads) == (torch.__version__, torch.get_num_threads())
    assert found.library == library.path_of_library()
    assert found.chosen_set == (library.chosen_instruction_set().name if found.absence_reason is None else None)


def test_a_missing_library_is_a_warning_and_the_rest_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_library_or_reason", lambda: "its library was not built")
    found = diagnose()
    assert (found.library, found.instruction_sets, found.chosen_set) == (None, (), None)
    assert found.warnings[0] == (
        "The native kernel is not available: its library was not built. Calls use the next kernel that does not "
        "refuse; install a compiler, then multihead again."
    )
    native = {kernel.name: kernel.refusals for kernel in found.kernels}["native"]
    assert native["float32"] == "its library was not built"


@pytest.mark.skipif(library.reason_of_absence() is not None, reason="there is no native library here")
def test_an_impossible_request_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIHEAD_CPU", "avx9")
    library.default_instruction_set.cache_clear()
    try:
        found = diagnose()
    finally:
        library.default_instruction_set.cache_clear()
    assert found.requested_set == "avx9"
    assert found.chosen_set is None
    assert found.warnings[0].startswith("MULTIHEAD_CPU is 'avx9', and there is no such instruction set. Give one that")
