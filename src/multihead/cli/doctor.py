"""The command `doctor`: which kernels run here, on which instructions and threads, and why the others refuse."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from multihead.doctor import Diagnosis
    from multihead.kernels.native.library import InstructionSet

EXAMPLES = """
\b
Examples:
  multihead doctor
  MULTIHEAD_CPU=avx2 multihead doctor       what changes when one instruction set is forced
  OMP_NUM_THREADS=1 multihead doctor
"""


@click.command(epilog=EXAMPLES)
def doctor() -> None:
    """Say which kernels run here, and why the others refuse.

    Looks at the processor and the threads as torch sees them, at the native kernel and its instruction sets, at the
    OpenMP runtimes that are loaded, and asks every kernel about calls of several kinds.
    """
    # Imported here, so that --help need not load torch.
    from rich.console import Console

    from multihead.doctor import examine

    found = examine()
    console = Console(highlight=False, soft_wrap=True)
    _tell_machine(console, found)
    _tell_native(console, found)
    _tell_kernels(console, found)
    console.print()
    for warning in found.warnings:
        _say(console, f"! {warning}", style="yellow")
    if not found.warnings:
        _say(console, "Nothing is amiss.", style="green")


def _tell_machine(console: Console, found: Diagnosis) -> None:
    _say(console, "Machine", style="bold")
    _entry(console, "system", found.system)
    _entry(console, "processor", found.cpu)
    _entry(console, "features", ", ".join(found.features) or "torch names none")
    _entry(console, "torch", f"{found.torch_version}, {_counted(found.threads, 'thread')}")
    if found.runtimes is None:
        _entry(console, "OpenMP", "which runtimes are loaded cannot be told on this system")
    else:
        for runtime in found.runtimes:
            _entry(console, "OpenMP", str(runtime))
        if not found.runtimes:
            _entry(console, "OpenMP", "no runtime is loaded as a library of its own")


def _tell_native(console: Console, found: Diagnosis) -> None:
    console.print()
    _say(console, "Native kernel", style="bold")
    if found.absence is not None:
        _entry(console, "library", f"none: {found.absence}")
        return
    _entry(console, "library", str(found.library))
    for each in found.sets:
        _entry(console, each.name, _state(each, found))


def _state(each: InstructionSet, found: Diagnosis) -> str:
    """Say of an instruction set whether it runs here, and why it is used if it is."""
    if each.name == found.chosen:
        return "used: MULTIHEAD_CPU asks for it" if found.asked else "used: the widest that runs here"
    if not each.compiled:
        return "not in this build"
    if not each.runs:
        return "this processor lacks it"
    return "for tests, where asked for" if each.for_tests else "runs here"


def _tell_kernels(console: Console, found: Diagnosis) -> None:
    console.print()
    _say(console, "Kernels, the fastest first", style="bold")
    for kernel in found.kernels:
        kinds: dict[str, list[str]] = {}
        for kind, reason in kernel.refusals.items():
            kinds.setdefault(reason, []).append(kind)
        if not kinds:
            _entry(console, kernel.name, "takes every call")
        label = kernel.name
        for reason, refused in kinds.items():
            _entry(console, label, f"refuses {', '.join(refused)}: {reason}")
            label = ""


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _entry(console: Console, label: str, text: str) -> None:
    """Print a label and its text, wrapped next to the label."""
    from multihead.cli.tensor_view import wrap

    for number, line in enumerate(wrap(text, _width(console) - 15)):
        console.print(f"   {'' if number else label:<12}", style="dim", end="", markup=False)
        console.print(line, markup=False)


def _say(console: Console, sentence: str, *, style: str = "") -> None:
    from multihead.cli.tensor_view import wrap

    for line in wrap(sentence, _width(console)):
        console.print(line, style=style, markup=False)


def _width(console: Console) -> int:
    return min(max(console.width, 40), 100)
