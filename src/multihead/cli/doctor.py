"""The command `doctor`: which kernels run here, with which instruction set and threads, and why the others do not."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from multihead.cli.console import print_entry, print_sentence

if TYPE_CHECKING:
    from rich.console import Console

    from multihead.cli.diagnosis import Diagnosis
    from multihead.kernels.native.library import InstructionSet
    from multihead.kernels.proven import GpuPath

LABEL_WIDTH = 14  # columns reserved for the labels; the longest label is "emulated_amx"
EXAMPLES = """
\b
Examples:
  multihead doctor
  MULTIHEAD_CPU=avx2 multihead doctor   with another instruction set
  OMP_NUM_THREADS=1 multihead doctor
  multihead doctor --gpu                checks each kernel on your GPU
"""


@click.command(epilog=EXAMPLES)
@click.option("--gpu", is_flag=True, help="Compare the kernels on your GPU with float64 instead.")
def doctor(gpu: bool) -> None:
    """Show which kernels run here, and why the others do not.

    Reports the processor, the number of threads that torch uses, the native kernel and its instruction sets, the
    loaded OpenMP runtimes, for each kernel the kinds of attention calls that it cannot compute, and the GPU: which
    kernels run on it, and whether their code has run on such hardware.
    """
    # Imported here, so that --help does not load torch.
    from rich.console import Console

    from multihead.cli.diagnosis import diagnose

    console = Console(highlight=False, soft_wrap=True)
    if gpu:
        _check_gpu(console)
        return
    found = diagnose()
    _print_machine(console, found)
    _print_native_kernel(console, found)
    _print_kernels(console, found)
    _print_gpu(console, found)
    console.print()
    for warning in found.warnings:
        print_sentence(console, f"! {warning}", style="yellow")
    if not found.warnings:
        print_sentence(console, "No problems found.", style="green")


def _check_gpu(console: Console) -> None:
    """Run the contract on the GPU and print one entry per kernel; exit with 1 if a call is wrong."""
    from multihead import contract
    from multihead.cli.diagnosis import diagnose_gpu
    from multihead.record.table import number_with_noun

    found = diagnose_gpu()
    print_sentence(console, f"{found.card}, torch {found.torch_version}", style="bold")
    wrong = 0
    results: dict[str, list[contract.Checked]] = {}
    for each in contract.run(found.device):
        results.setdefault(each.kernel, []).append(each)
        if each.error is not None:
            wrong += 1
            _print_entry(console, each.kernel, each.error)
    for kernel, checked in results.items():
        passed = sum(each.error is None for each in checked)
        path = contract.path_of(kernel)
        _print_entry(console, kernel, f"{passed} of {number_with_noun(len(checked), 'call')} passed; {_history(path)}")
    console.print()
    if wrong:
        print_sentence(console, f"! {number_with_noun(wrong, 'call')} failed. Report the lines above.", style="yellow")
        sys.exit(1)
    print_sentence(console, "No problems found.", style="green")


def _history(path: GpuPath | None) -> str:
    """Return a phrase: where this code of a kernel ran before, and how to use it if it did not."""
    from multihead.kernels.proven import UNPROVEN_VARIABLE, row_of

    row = None if path is None else row_of(path)
    if row is not None:
        return f"this code passed on {row.card}, {row.date}"
    if path is None or path.in_use_before_rows:
        return "in use; this code has no row in proven.json"
    return f"not yet run on hardware elsewhere: {UNPROVEN_VARIABLE}={path.name} uses it"


def _print_machine(console: Console, found: Diagnosis) -> None:
    from multihead.record.table import number_with_noun

    print_sentence(console, "Machine", style="bold")
    _print_entry(console, "system", found.system)
    _print_entry(console, "processor", found.cpu)
    _print_entry(console, "features", ", ".join(found.cpu_features) or "torch names none")
    _print_entry(console, "torch", f"{found.torch_version}, {number_with_noun(found.threads, 'thread')}")
    if found.openmp_runtime_files is None:
        _print_entry(console, "OpenMP", "the loaded runtimes cannot be listed on this system")
    else:
        for runtime in found.openmp_runtime_files:
            _print_entry(console, "OpenMP", str(runtime))
        if not found.openmp_runtime_files:
            _print_entry(console, "OpenMP", "no runtime is loaded as a separate library")


def _print_native_kernel(console: Console, found: Diagnosis) -> None:
    console.print()
    print_sentence(console, "Native kernel", style="bold")
    if found.absence_reason is not None:
        _print_entry(console, "library", f"none: {found.absence_reason}")
        return
    _print_entry(console, "library", str(found.library))
    for each in found.instruction_sets:
        _print_entry(console, each.name, _state_of_instruction_set(each, found))
    reason = found.short_call_reason
    _print_entry(console, "small calls", "one operator plans and computes" if reason is None else f"planned: {reason}")


def _state_of_instruction_set(each: InstructionSet, found: Diagnosis) -> str:
    """Return a phrase: whether an instruction set is used or could run here, else why it cannot."""
    if each.name == found.chosen_set:
        return "used: set by MULTIHEAD_CPU" if found.requested_set else "used: the fastest that runs here"
    if not each.compiled:
        return "not in this build"
    if not each.is_supported_by_cpu:
        return "this processor lacks it"
    return "for tests, only on request" if each.for_tests else "runs here"


def _print_kernels(console: Console, found: Diagnosis) -> None:
    console.print()
    print_sentence(console, "Kernels, the fastest first", style="bold")
    for kernel in found.kernels:
        kinds: dict[str, list[str]] = {}
        for kind, reason in kernel.refusals.items():
            kinds.setdefault(reason, []).append(kind)
        if not kinds:
            _print_entry(console, kernel.name, "supports every call")
        label = kernel.name
        for reason, refused in kinds.items():
            _print_entry(console, label, f"rejects {', '.join(refused)}: {reason}")
            label = ""


def _print_gpu(console: Console, found: Diagnosis) -> None:
    console.print()
    print_sentence(console, "GPU", style="bold")
    if isinstance(found.gpu, str):
        _print_entry(console, "device", f"none: {found.gpu}")
        return
    _print_entry(console, "device", f"{found.gpu.card}, {found.gpu.platform}")
    by_kernel: dict[str, list[str]] = {}
    for kind, kernel in found.gpu.fused.items():
        by_kernel.setdefault(kernel, []).append(kind)
    label = "full, causal"
    for kernel, kinds in by_kernel.items():
        _print_entry(console, label, f"{'; '.join(kinds)}: {kernel}")
        label = ""
    for name, path in found.gpu.paths.items():
        reason = found.gpu.lacks.get(name)
        _print_entry(console, name, _history(path) if reason is None else f"operators of PyTorch instead: {reason}")
    # A record with q and k on the CPU copies both of them, 84 MB a layer at 8,192 tokens with 32 + 8 heads.
    _print_entry(console, "records", 'keep="statistics" or "device" copies less to the CPU than keep="cpu"')


def _print_entry(console: Console, label: str, text: str) -> None:
    print_entry(console, label, text, width=LABEL_WIDTH, indent=3, style="dim")
