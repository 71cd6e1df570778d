"""Find which kernels run on this machine, with which instruction sets, and why the others cannot run."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from multihead import contract
from multihead.errors import ArgumentError, InputError
from multihead.functional import request_of
from multihead.kernels import fused_on_cuda
from multihead.kernels.call import AttentionRequest
from multihead.kernels.choose import KERNELS
from multihead.kernels.fused_on_cuda import CUDNN, EFFICIENT, FLASH
from multihead.kernels.native import library, short_call
from multihead.kernels.native.library import InstructionSet, openmp_runtimes
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.proven import GpuPath
from multihead.kernels.triton import launch

# CPU capabilities, by torch's names, that make an attention kernel faster.
CPU_FEATURES = (
    *("avx2", "fma3", "avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_bf16", "amx_bf16"),
    *("neon", "sve", "bf16"),  # Arm
)


@dataclass(frozen=True)
class KernelDiagnosis:
    """Which kinds of attention calls one kernel cannot compute.

    Attributes:
        name: name of the kernel.
        refusals: kind of call, such as "dropout" -> why the kernel cannot compute it, in one sentence.
    """

    name: str
    refusals: dict[str, str]


@dataclass(frozen=True)
class Diagnosis:
    """The machine, torch, the native library and the kernels.

    Attributes:
        system: operating system and processor family.
        cpu: the processor's name.
        cpu_features: the processor's vector instruction sets, by torch's names.
        torch_version: version of torch.
        threads: number of threads that torch and the native kernel use per operator.
        library: shared library of the native kernel, or None.
        absence_reason: why there is no native kernel, or None.
        instruction_sets: instruction sets that the native kernel knows.
        requested_set: instruction set named by the environment variable MULTIHEAD_CPU, or None.
        chosen_set: instruction set that is used, or None.
        refusal_reason: why the requested instruction set cannot be used, or None.
        missing_set_warning: warning that the processor has a faster instruction set that was not compiled, or None.
        openmp_runtime_files: files of the loaded OpenMP runtimes; None where the operating system does not list them.
        kernels: the diagnosis of each kernel, the fastest kernel first.
        short_call_reason: why the native kernel's short operator takes no call, or None.
        gpu: the GPU, or why there is none, in one sentence without a full stop.
    """

    system: str
    cpu: str
    cpu_features: tuple[str, ...]
    torch_version: str
    threads: int
    library: Path | None
    absence_reason: str | None
    instruction_sets: tuple[InstructionSet, ...]
    requested_set: str | None
    chosen_set: str | None
    refusal_reason: str | None
    missing_set_warning: str | None
    openmp_runtime_files: tuple[Path, ...] | None
    kernels: tuple[KernelDiagnosis, ...]
    short_call_reason: str | None = None
    gpu: GpuDiagnosis | str = ""

    @property
    def warnings(self) -> tuple[str, ...]:
        """One sentence for each problem of this machine and how to fix it."""
        problems = []
        if self.absence_reason is not None:
            problems.append(
                f"The native kernel is not available: {self.absence_reason}. Calls use the next kernel that does not "
                "refuse; install a compiler, then multihead again."
            )
        if self.refusal_reason is not None:
            problems.append(self.refusal_reason)
        if self.missing_set_warning is not None:
            problems.append(self.missing_set_warning)
        if self.openmp_runtime_files is not None and len(self.openmp_runtime_files) > 1:
            problems.append(
                f"{len(self.openmp_runtime_files)} OpenMP runtimes are loaded, and their threads compete for the same "
                f"cores: {', '.join(map(str, self.openmp_runtime_files))}. Install packages that share one."
            )
        return tuple(problems)


@dataclass(frozen=True)
class GpuDiagnosis:
    """The GPU of this machine.

    Attributes:
        card: its name.
        device: torch's name of it.
        torch_version: version of torch.
        platform: what torch was built for, and the card's number there, such as "CUDA 13.0, compute capability 9.0".
        fused: kind of full and causal calls, such as "float32" -> the kernel of PyTorch that computes them.
        paths: kernel of this library for GPUs -> its code.
        lacks: such a kernel -> what the card or its software lacks to run it, in one sentence.
    """

    card: str
    device: torch.device
    torch_version: str
    platform: str = ""
    fused: Mapping[str, str] = field(default_factory=dict)
    paths: Mapping[str, GpuPath] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)


def diagnose_gpu() -> GpuDiagnosis:
    """Find the GPU of this machine.

    Raises:
        InputError: torch finds none.
    """
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        raise InputError(
            f"torch {torch.__version__} finds no GPU."
            if built
            else f"torch {torch.__version__} is a build without CUDA, so no kernel can run on a GPU.",
            "Check the driver with nvidia-smi." if built else "Install a build for your GPU, as pytorch.org describes.",
        )
    device, found = torch.device("cuda", 0), torch.cuda.get_device_properties(0)
    platform = f"CUDA {torch.version.cuda}, compute capability {found.major}.{found.minor}"
    if torch.version.hip:
        platform = f"ROCm {torch.version.hip}, {getattr(found, 'gcnArchName', 'an unknown architecture')}"
    paths = {name: path for name in (*KERNELS, contract.STATISTICS) if (path := contract.path_of(name)) is not None}
    reason = launch.reason_of_device(device)
    lacks = {} if reason is None else {contract.STATISTICS: reason}
    return GpuDiagnosis(found.name, device, torch.__version__, platform, _fused_kernels(device), paths, lacks)


def _fused_kernels(device: torch.device) -> dict[str, str]:
    """Return kind of call -> the kernel that PyTorch chooses for full and causal calls of the kind, by its name."""
    names = {FLASH: "FlashAttention", EFFICIENT: "the memory-efficient kernel", CUDNN: "cuDNN"}
    found = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kv_heads, suffix in ((2, ""), (1, ", grouped heads")):
            q, k = (torch.zeros(1, heads, 8, 64, dtype=dtype, device=device) for heads in (2, kv_heads))
            call = fused_on_cuda.choose(q, k, k, causal=True, dropout=0.0, scale=0.125)
            name = "none, so another kernel of this library computes them" if call is None else names[call.kernel]
            repeated = call is not None and call.repeats > 1
            kind = str(dtype).removeprefix("torch.") + suffix
            found[kind] = f"{name}, with k and v repeated" if repeated else name
    return found


def diagnose() -> Diagnosis:
    """Examine the machine, torch, the native library and every kernel.

    >>> [kernel.name for kernel in diagnose().kernels][-1]
    'reference'
    """
    chosen: str | None = None
    refusal: str | None = None
    if library.reason_of_absence() is None:
        try:
            chosen = library.chosen_instruction_set().name
        except ArgumentError as error:
            refusal = str(error)
    capabilities = _cpu_capabilities()
    return Diagnosis(
        system=f"{platform.system()} {platform.machine()}",
        cpu=str(capabilities.get("cpu_name") or platform.processor() or "unknown"),
        cpu_features=tuple(name for name in CPU_FEATURES if capabilities.get(name)),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        library=library.path_of_library(),
        absence_reason=library.reason_of_absence(),
        instruction_sets=library.instruction_sets(),
        requested_set=os.environ.get(library.INSTRUCTION_SET_VARIABLE) or None,
        chosen_set=chosen,
        refusal_reason=refusal,
        missing_set_warning=library.missing_faster_instruction_set(),
        openmp_runtime_files=openmp_runtimes(),
        kernels=tuple(_diagnose_kernel(name) for name in KERNELS),
        short_call_reason=refusal or short_call.reason_against_all(),
        gpu=_gpu_or_reason(),
    )


def _gpu_or_reason() -> GpuDiagnosis | str:
    try:
        return diagnose_gpu()
    except InputError as error:
        return error.finding.removesuffix(".")


def _cpu_capabilities() -> dict[str, object]:
    read: Callable[[], dict[str, object]] | None = getattr(torch.cpu, "get_capabilities", None)
    return {} if read is None else read()


def _diagnose_kernel(name: str) -> KernelDiagnosis:
    """Try a small call of each kind on a kernel, and return the kinds that it cannot compute."""
    refusals = {}
    calls = _small_calls_by_kind()
    for kind, request in calls.items():
        reason = KERNELS[name].refusal(request, bounds_of(request))
        if reason is not None:
            refusals[kind] = reason
    if len(refusals) == len(calls) and len(set(refusals.values())) == 1:
        refusals = {"every call": refusals.popitem()[1]}
    return KernelDiagnosis(name, refusals)


def _small_calls_by_kind() -> dict[str, AttentionRequest]:
    """Return small attention calls that some kernel may not support, by what is special in them, such as "softcap"."""

    def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(1, 1, 2, 8, dtype=dtype)

    plain = zeros()
    bias = torch.zeros(1, 1, 2, 2)
    calls = {
        str(dtype).removeprefix("torch."): request_of(zeros(dtype), zeros(dtype), zeros(dtype))
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    }
    calls["value dim other than query dim"] = request_of(plain, plain, plain[..., :4])
    calls["bias"] = request_of(plain, plain, plain, bias=bias)
    calls["bias with gradient"] = request_of(plain, plain, plain, bias=bias.clone().requires_grad_())
    calls["softcap"] = request_of(plain, plain, plain, softcap=20.0)
    calls["sinks"] = request_of(plain, plain, plain, sinks=torch.zeros(1))
    calls["dropout"] = request_of(plain, plain, plain, dropout=0.1)
    return calls
