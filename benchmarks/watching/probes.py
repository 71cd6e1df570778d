"""The cost of each statistic: time as a share of the causal forward pass, and memory relative to q and k.

    python -m benchmarks.watching.probes                      # both tables
    python -m benchmarks.watching.probes --only entropy --length 2048
    python -m benchmarks.watching.probes --no-times  # the memory alone

One synthetic layer with 9 query heads and 3 key/value heads of 64 numbers, float32, causal, as in SmolLM2-135M. Times
are the CPU time of one thread, which other processes hardly change; each run of a statistic is paired with one of
PyTorch's fused forward pass. Memory is the peak of a new process.
"""

from __future__ import annotations

import statistics as stdlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import click
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import machine_line
from benchmarks.peak_memory import peak
from multihead import masks
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionRequest, AttentionResult
from multihead.kernels.native import kernel
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS
from multihead.kernels.parts import SPECIAL_MASS, PartName
from multihead.kernels.plan.bounds import bounds_of
from multihead.probes import DEFAULT, PROBES, Probe, ProbeContext, first_keys_mass, offset_mass, tokens_mass
from multihead.probes.statistics import complete_statistics, possible_probes, resolve_probes

HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 9, 3, 64, 2000
LENGTHS, LONG = (2048, 8192), (8192, 16384, 32768)
SETS: dict[str, tuple[str | Probe, ...]] = {
    "the default": DEFAULT,
    "entropy, offsets, first key": ("entropy", "self_mass", "previous_mass", "next_mass", "first_mass"),
    "all but the map": tuple(name for name in PROBES if name != "pooled_map"),
    **{name: (name,) for name in PROBES},
    "offset_minus_5_mass": (offset_mass(-5),),
    "first_4_mass": (first_keys_mass(4),),
    "punctuation_mass": (tokens_mass("punctuation", range(1, 6)),),
}


def layer_of(length: int) -> tuple[AttentionRequest, ProbeContext]:
    """Make the call of the layer and its context, with token ids that are distributed as in a text."""
    generator = torch.Generator().manual_seed(length)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    q = random(1, HEADS, length, HEAD_DIM)
    k, v = random(1, KV_HEADS, length, HEAD_DIM), random(1, KV_HEADS, length, HEAD_DIM)
    chances = 1 / torch.arange(1, VOCABULARY + 1)  # Zipf's law
    ids = torch.multinomial(chances, length, replacement=True, generator=generator)[None]
    special = torch.zeros(1, length, dtype=torch.bool)
    special[0, 0] = True
    context = ProbeContext(special_keys=special, ids=ids, output_weight=random(HEADS * HEAD_DIM, HEADS * HEAD_DIM))
    return request_of(q, k, v, masks.Causal(), sinks=random(HEADS)), context


def left_out(*, native_kernel: bool) -> AbstractContextManager[object]:
    """Hide the native kernel if `native_kernel` is true."""
    return patch.object(kernel, "refusal", lambda request, bounds: "left out") if native_kernel else nullcontext()


def shares(length: int, names: Iterable[str], *, absent: bool, pairs: int) -> dict[str, float]:
    """Time sets of statistics against PyTorch's fused forward pass, alternately.

    Args:
        length: the length of the text.
        names: names of SETS.
        absent: whether the native kernel is hidden.
        pairs: how many runs of each.

    Returns:
        The median shares of the forward pass.
    """
    request, context = layer_of(length)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad(), left_out(native_kernel=absent):
            attended = attend(request)
            return {name: _share(request, attended, context, SETS[name], pairs) for name in names}
    finally:
        torch.set_num_threads(threads)


def _share(
    request: AttentionRequest,
    attended: AttentionResult,
    context: ProbeContext,
    wanted: tuple[str | Probe, ...],
    pairs: int,
) -> float:
    """Time the statistics of the kernel by how much longer its pass takes, and the others by themselves."""
    probes = possible_probes(resolve_probes(wanted), request, context)
    bounds = bounds_of(request)
    on_the_way = frozenset[PartName]()
    if kernel.refusal(request, bounds) is None:
        # The special keys are known only after the call.
        on_the_way = frozenset[PartName]().union(*(probe.parts for probe in probes)) & (
            PARTS_OF_ONE_PASS - {SPECIAL_MASS.name}
        )
    left = [probe for probe in probes if not probe.parts <= on_the_way]
    watched = replace(request, requested_statistics=on_the_way)

    def forward() -> object:
        return scaled_dot_product_attention(request.q, request.k, request.v, is_causal=True, enable_gqa=True)

    def measure() -> object:
        return complete_statistics(request, attended.logsumexp, left, context, result=attended)

    ratios = []
    for _ in range(pairs + 1):
        stock = _seconds(forward)
        taken = _seconds(measure) if left else 0.0
        if on_the_way:
            taken += _seconds(lambda: kernel.attend(watched, bounds)) - _seconds(lambda: kernel.attend(request, bounds))
        ratios.append(taken / stock)
    return stdlib.median(ratios[1:])  # the first warms up


def _seconds(run: Callable[[], object]) -> float:
    begin = time.thread_time()
    run()
    return time.thread_time() - begin


def risen(length: int, name: str, *, absent: bool) -> float:
    """Measure in a new process by how much its memory grows, relative to the bytes of q and k."""
    command = [sys.executable, "-m", "benchmarks.watching.probes", "--child", name, "--length", str(length)]
    command += ["--absent"] if absent else []
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def _child(length: int, name: str, *, absent: bool) -> None:
    """Print by how much memory grows while a set is measured."""
    torch.set_num_threads(1)  # a second thread needs another tile, and waits for other processes
    request, context = layer_of(length)
    small, small_context = layer_of(64)
    logsumexp = torch.full(request.q.shape[:3], 20.0)
    probes = possible_probes(resolve_probes(SETS[name]), request, context)
    with torch.no_grad(), left_out(native_kernel=absent):
        complete_statistics(small, torch.zeros(small.q.shape[:3]), probes, small_context)  # loads libraries
        rise = peak(
            lambda: complete_statistics(
                request, logsumexp, probes, context, result=AttentionResult(torch.empty_like(request.q), logsumexp)
            )
        )
    held = (request.q.numel() + request.k.numel()) * request.q.element_size()
    print(rise / held)


@click.command()
@click.option("--only", default="", help="Take the sets whose name contains this text.")
@click.option("--length", "lengths", type=int, multiple=True, help="Take this length; repeatable.")
@click.option("--pairs", default=5, show_default=True, help="Runs of each.")
@click.option("--times/--no-times", default=True, help="Time each statistic.")
@click.option("--memory/--no-memory", default=True, help="Measure memory.")
@click.option("--child", hidden=True, default="")
@click.option("--absent", hidden=True, is_flag=True)
def main(  # click passes each flag by its name
    *, only: str, lengths: tuple[int, ...], pairs: int, times: bool, memory: bool, child: str, absent: bool
) -> None:
    """Print the cost of each statistic, in time and memory."""
    if child:
        _child(lengths[0], child, absent=absent)
        return
    click.echo(machine_line())
    names = [name for name in SETS if only in name]
    if times:
        click.echo("\n".join(["", *time_table(names, lengths or LENGTHS, pairs=pairs)]))
    if memory:
        sets = [name for name in ("the default", "all but the map", "pooled_map") if only in name]
        click.echo("\n".join(["", *memory_table(sets, lengths or LONG)]))


def time_table(names: list[str], lengths: tuple[int, ...], *, pairs: int) -> list[str]:
    """Return the lines of the table of times, with the native kernel and without."""
    heads = [f"{kind}, {length:,}" for kind in ("native", "without") for length in lengths]
    found = [shares(length, names, absent=absent, pairs=pairs) for absent in (False, True) for length in lengths]
    lines = [f"| statistic | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    return lines + [f"| {name} | {' | '.join(f'{each[name]:.2f}' for each in found)} |" for name in names]


def memory_table(names: list[str], lengths: tuple[int, ...]) -> list[str]:
    """Return the lines of the table of memory, relative to the bytes of q and k."""
    heads = [f"{kind}, {length:,}" for kind in ("native", "without") for length in lengths]
    lines = [f"| statistics | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for name in names:
        rises = [risen(length, name, absent=absent) for absent in (False, True) for length in lengths]
        lines.append(f"| {name} | {' | '.join(f'{rise:.2f}' for rise in rises)} |")
    return lines


if __name__ == "__main__":
    main()
