"""Measure the native kernel against PyTorch's fused one per class of requests; `kernels/choose.py` uses the ratios."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from types import ModuleType

import click
import torch
from rich.progress import Progress
from torch import Tensor

from benchmarks.in_process import in_new_process
from benchmarks.machine import cpu
from benchmarks.measure import paired, seconds
from benchmarks.native.contenders import DTYPES, TOLERANCE
from multihead import masks
from multihead.functional import request_of
from multihead.kernels import sdpa
from multihead.kernels.call import AttentionRequest
from multihead.kernels.choose import (
    MEASURED_SPEEDS,
    REQUEST_CLASSES,
    TRAINING_SUFFIX,
    MeasuredSpeed,
    benchmark_class_of,
)
from multihead.kernels.native import kernel as native_kernel
from multihead.kernels.native import library
from multihead.kernels.plan.bounds import bounds_of

TARGET = Path(__file__).resolve().parents[2] / "src" / "multihead" / "kernels" / "measured.json"
LEAST_PAIRS, MOST_PAIRS = 3, 51

EXAMPLES = """
\b
Examples:
  python -m benchmarks.native.kernel_choice
  python -m benchmarks.native.kernel_choice --set scalar --seconds 0.2 --no-write
"""


@click.command(epilog=EXAMPLES)
@click.option("--set", "sets", multiple=True, help="An instruction set; may be repeated. [all that run here]")
@click.option("--seconds", "budget", default=1.0, show_default=True, help="About how long a request is timed.")
@click.option("--write/--no-write", default=True, help="Write the table into src/multihead/kernels/measured.json.")
def main(sets: tuple[str, ...], budget: float, write: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Measure how many times faster the native kernel is than PyTorch's fused kernel, per class of requests.

    Each instruction set and dtype is written as soon as it is measured; those that do not run here stay as they are.
    For avx2 and avx512, torch is limited to the instructions of such a CPU.
    """
    running = [each.name for each in library.instruction_sets() if each.is_supported_by_cpu and not each.for_tests]
    for name in sets:
        if name not in running:
            raise click.UsageError(f"{name!r} cannot run here. Give one of {', '.join(running) or '(none)'}.")
    jobs = list(product(sets or running, DTYPES))
    table = list(MEASURED_SPEEDS)
    with Progress(transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        for set_name, dtype in jobs:
            progress.update(task, description=f"{set_name}, {dtype}")
            ratios = in_new_process(ratios_of, dtype, budget, instruction_set=set_name)
            report(set_name, dtype, ratios)
            table = updated(table, MeasuredSpeed(set_name, str(DTYPES[dtype]).removeprefix("torch."), where(), ratios))
            if write:
                TARGET.write_text(written(table), encoding="utf-8")
            progress.advance(task)


def report(set_name: str, dtype: str, ratios: dict[str, float]) -> None:
    """Print the ratios of an instruction set and a dtype, slowest first."""
    listed = ", ".join(f"{name} {ratio:.2f}" for name, ratio in sorted(ratios.items(), key=lambda item: item[1]))
    click.echo(f"{set_name}, {dtype}: {listed}")


def where() -> str:
    """Return the date, the CPU, the threads and torch."""
    today = dt.date.today().isoformat()
    return f"{today}, {cpu()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def requests(name: str, dtype: str, *, trains: bool) -> list[AttentionRequest]:
    """Return sample requests of a class, of several sizes."""

    def request(length: int, dim: int, mask: masks.Mask, **options: object) -> AttentionRequest:
        batch, queries = options.pop("batch", 1), options.pop("queries", length)
        heads, kv_heads = options.pop("heads", (8, 8))
        sizes = ((heads, queries, dim), (kv_heads, length, dim), (kv_heads, length, options.pop("value_dim", dim)))
        q, k, v = (torch.randn(batch, *size).to(DTYPES[dtype]).requires_grad_(trains) for size in sizes)
        return request_of(q, k, v, mask, **options)

    full, causal = masks.Full(), masks.Causal()
    every_third = torch.arange(1024) % 3 > 0
    return {
        "full": lambda: [request(512, 64, full), request(1024, 128, full)],
        "causal": lambda: [request(512, 64, causal), request(1024, 128, causal)],
        "intervals": lambda: [
            request(1024, 64, causal & masks.Window(128)),
            request(1024, 64, masks.Documents((300, 120, 480, 124)) & causal),
            request(512, 64, masks.Lengths((100, 200, 300, 400)), batch=4),
        ],
        "cells": lambda: [
            request(1024, 64, masks.Keep(every_third, axes="keys")),
            request(1024, 64, masks.Keep(every_third, axes="keys") & causal),
        ],
        "bias": lambda: [
            request(512, 64, full, bias=torch.randn(1, 8, 512, 512)),
            request(1024, 64, causal, bias=torch.randn(1, 8, 1024, 1024)),
        ],
        "few": lambda: [
            request(4096, 64, full, queries=1, heads=(32, 8)),
            request(2048, 128, causal, queries=4, query_start="end"),
        ],
        "short": lambda: [request(64, 64, full), request(128, 64, causal, batch=4)],
        "unequal": lambda: [request(1024, 64, full, value_dim=136), request(512, 64, causal, value_dim=32)],
    }[name]()


def ratios_of(dtype: str, budget: float) -> dict[str, float]:
    """Measure every class, forward alone and in training."""
    torch.manual_seed(0)
    return {
        name + training: ratio_of(name, dtype, training, budget)
        for name in REQUEST_CLASSES
        for training in ("", TRAINING_SUFFIX)
    }


def ratio_of(name: str, dtype: str, training: str, budget: float) -> float:
    """Return how many times faster the native kernel is than PyTorch's fused one, the geometric mean over a class."""
    torch.set_grad_enabled(bool(training))
    found = []
    for request in requests(name, dtype, trains=bool(training)):
        if benchmark_class_of(request, bounds_of(request)) != name + training:
            raise click.ClickException(
                f"A sample request of {name!r} belongs to {benchmark_class_of(request, bounds_of(request))!r}."
            )
        of_output = torch.randn(*request.q.shape[:3], request.v.shape[3]).to(request.q.dtype) if training else None
        ours, rival = (_run(kernel, request, of_output) for kernel in (native_kernel, sdpa))
        check_equal(name + training, ours(), rival(), dtype)
        pair = seconds(ours) + seconds(rival)
        found.append(paired(ours, rival, pairs=min(max(LEAST_PAIRS, round(budget / pair)), MOST_PAIRS)).median)
    return round(statistics.geometric_mean(found), 2)


def _run(kernel: ModuleType, request: AttentionRequest, of_output: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """Return a function that runs a kernel, and its backward pass if there is a gradient of the output."""

    def run() -> tuple[Tensor, ...]:
        output = kernel.attend(request, bounds_of(request)).output
        if of_output is None:
            return (output,)
        return (output.detach(), *torch.autograd.grad(output, (request.q, request.k, request.v), of_output))

    return run


def check_equal(name: str, ours: tuple[Tensor, ...], rival: tuple[Tensor, ...], dtype: str) -> None:
    """Stop if the kernels differ by more than rounding, so that nothing wrong is timed."""
    for mine, other in zip(ours, rival, strict=True):
        error = float((mine.float() - other.float()).abs().max() / other.float().abs().max())
        if not error <= 2 * TOLERANCE[dtype]:
            raise click.ClickException(f"{name}: the kernels differ by {error:.1e} of the largest value.")


def updated(before: Iterable[MeasuredSpeed], now: MeasuredSpeed) -> list[MeasuredSpeed]:
    """Replace the earlier measurement of the same instruction set and dtype."""
    others = [each for each in before if (each.instruction_set, each.dtype) != (now.instruction_set, now.dtype)]
    order = [each.name for each in library.instruction_sets()]
    return sorted([*others, now], key=lambda each: (order.index(each.instruction_set), each.dtype))


def written(table: Iterable[MeasuredSpeed]) -> str:
    """Return the table as JSON."""
    return json.dumps([each._asdict() for each in table], indent=2) + "\n"


if __name__ == "__main__":
    main()
