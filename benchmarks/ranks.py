"""Measure the memory of ranks and simulate their efficiency: python -m benchmarks.ranks memory, or simulation."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import multihead as mh
from benchmarks.machine import machine_line
from benchmarks.measure import seconds
from benchmarks.pages import picture, table
from benchmarks.peak_memory import peak
from benchmarks.simulated_ranks import Heads, Machine, Simulated, simulate
from multihead import masks
from multihead.parallel import context_parallel
from multihead.parallel.layout import Layout, LayoutName

LENGTH, WIDTH, HEADS, RANKS = 32_768, 256, 4, 4
TOLERANCE = 1e-4  # between float32 outputs, and gradients of x, of about 1
FORWARD, TRAINING = 0.45, 0.5  # a rank may need at most these shares of the memory of one process
MASK = masks.Causal()
LAYOUT = Layout("balanced", RANKS)


def input_of(length: int, chunks: range | list[int]) -> Tensor:
    """Return some chunks of the input of the layer, of as many as the layout has: (1, tokens, WIDTH)."""
    size = length // LAYOUT.chunk_count
    parts = (torch.randn(1, size, WIDTH, generator=torch.Generator().manual_seed(chunk)) for chunk in chunks)
    return torch.cat(list(parts), 1)


def layer_of(seed: int = 0) -> mh.MultiHeadAttention:
    """Return the layer, the same one in every process."""
    torch.manual_seed(seed)
    return mh.MultiHeadAttention(WIDTH, HEADS, rotary=mh.Rotary())


def run(layer: mh.MultiHeadAttention, x: Tensor, *, training: bool) -> dict[str, Tensor]:
    """Compute a layer, and in training the gradients of its parameters and its input."""
    if not training:
        with torch.no_grad():
            return {"output": layer(x, mask=MASK)}
    x.requires_grad_()
    output = layer(x, mask=MASK)
    output.square().sum().backward()
    assert x.grad is not None
    return {"output": output.detach(), "gradient": x.grad}


def measure_rank(rank: int, ranks: int, folder: str, length: int, *, training: bool) -> None:
    """Write the peak memory of a rank, or of one process, and its results; the input is part of the memory."""
    torch.set_num_threads(1)
    layer = layer_of()
    size = length // LAYOUT.chunk_count
    chunks = range(LAYOUT.chunk_count) if ranks == 1 else [first // size for first, _ in LAYOUT.chunks(rank, length)]
    results: list[dict[str, Tensor]] = []

    def training_step() -> None:
        results.append(run(layer, input_of(length, chunks), training=training))

    if ranks == 1:
        run(layer, torch.zeros(1, 64, WIDTH), training=training)  # loads what is loaded once
        grown = peak(training_step)
    else:
        store = dist.FileStore(str(Path(folder) / "store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=10))
        with context_parallel(dist.group.WORLD, strategy="ring", layout=LAYOUT.kind):
            run(layer, torch.zeros(1, 64, WIDTH), training=training)
            grown = peak(training_step)
        dist.destroy_process_group()
    torch.save((grown, results[0]), Path(folder) / f"{ranks}.{rank}.pt")


def measured(ranks: int, folder: str, length: int, *, training: bool) -> list[tuple[int, dict[str, Tensor]]]:
    """Run all ranks in processes of their own; return the peak memory and the results of each."""
    # Otherwise the C library keeps freed blocks of up to 32 MiB, and the blocks of ranks are smaller.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
    context = mp.get_context("spawn")
    options = {"training": training}
    children = [
        context.Process(target=measure_rank, args=(rank, ranks, folder, length), kwargs=options)
        for rank in range(ranks)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise click.ClickException("A process failed; its error is above.")
    return [torch.load(Path(folder) / f"{ranks}.{rank}.pt") for rank in range(ranks)]


@dataclass(frozen=True)
class Memory:
    """Peak memory in bytes, of one process and of each rank, and the largest difference of their results."""

    name: str
    allowed: float
    alone: int
    ranks: list[int]
    error: float

    @property
    def share(self) -> float:
        """The largest rank's share of the memory of one process."""
        return max(self.ranks) / self.alone

    def row(self) -> list[str]:
        """Return a row of the table."""
        each = ", ".join(f"{count / 2**20:.0f}" for count in self.ranks)
        met = "" if self.share <= self.allowed else ", not met"
        share = f"{self.share:.2f} (at most {self.allowed}{met})"
        return [self.name, f"{self.alone / 2**20:.0f} MiB", f"{each} MiB", share, f"{self.error:.1e}"]


def memory_of(length: int, *, training: bool) -> Memory:
    """Measure one process and the ranks, and compare their results."""
    with tempfile.TemporaryDirectory() as folder:
        ((alone, expected),) = measured(1, folder, length, training=training)
        of_ranks = measured(RANKS, folder, length, training=training)
    error = 0.0
    for name, each in expected.items():
        joined = LAYOUT.join_tokens_of_ranks([found[name] for _, found in of_ranks], 1)
        error = max(error, float((joined - each).abs().max() / each.abs().max()))
    if not error <= TOLERANCE:
        raise click.ClickException(f"The results of ranks differ from those of one process by {error:.1e}.")
    name, allowed = ("training", TRAINING) if training else ("forward", FORWARD)
    return Memory(name, allowed, alone, [count for count, _ in of_ranks], error)


@dataclass(frozen=True)
class Scene:
    """A mask whose ranks are simulated, with the layout that suits it."""

    name: str
    mask: masks.Mask
    kind: LayoutName
    gathered: bool = False


def scenes(length: int) -> list[Scene]:
    """Return the masks that are simulated, for a text of some length."""
    window = masks.Causal() & masks.Window(4096)
    documents = masks.Causal() & masks.Documents((length // 32,) * 32)
    return [
        Scene("causal, balanced ring", masks.Causal(), "balanced"),
        Scene("causal, contiguous ring", masks.Causal(), "contiguous"),
        Scene("causal, gathered keys", masks.Causal(), "balanced", gathered=True),
        Scene("window of 4,096, contiguous ring", window, "contiguous"),
        Scene("32 documents, balanced ring", documents, "balanced"),
    ]


@dataclass(frozen=True)
class Calibration:
    """Seconds of the parts of the cost model, one of each per round; the rounds interleave them.

    What else runs on the machine then slows all parts of some rounds, and not one part of all: medians leave it out.

    Attributes:
        cells: cells of a call.
        nbytes: bytes of an exchange.
        rounds: by name, the seconds of each round.
    """

    cells: int
    nbytes: int
    rounds: dict[str, list[float]]

    @property
    def machine(self) -> Machine:
        """The medians, as rates."""
        middle = {name: median(each) for name, each in self.rounds.items()}
        return Machine(
            self.cells / middle["forward"],
            self.cells / middle["backward"],
            middle["call"],
            bandwidth=self.nbytes / max(middle["exchange"] - middle["message"], 1e-9),
            latency=middle["message"],
        )

    def __str__(self) -> str:
        """Return how far the rounds differ."""
        shares = []
        for name, each in self.rounds.items():
            low, middle, high = quantiles(each, n=4)
            shares.append(f"{name} {low / middle:.2f} to {high / middle:.2f}")
        return f"{len(self.rounds['forward'])} rounds; quartiles by median: {', '.join(shares)}"


def measured_work(heads: Heads, tokens: int = 1024) -> tuple[int, Callable[[], dict[str, float]]]:
    """Return the cells of a call of two key/value heads, and a function that measures it on one thread."""
    group = heads.heads // heads.kv_heads
    q, k, v = (torch.randn(1, count, tokens, heads.head_dim).requires_grad_() for count in (2 * group, 2, 2))

    def call(queries: int = tokens) -> Tensor:
        return mh.attention(q[:, :, :queries], k[:, :, :queries], v[:, :, :queries])

    def measure() -> dict[str, float]:
        with torch.no_grad():
            found = {"forward": seconds(call), "call": seconds(partial(call, 1), 100)}
        output = call()
        return found | {"backward": seconds(output.sum().backward)}

    return 2 * group * tokens**2, measure


def exchange(rank: int, folder: str, nbytes: int, connection: Connection) -> None:
    """For each message of the connection, measure an exchange of 64 bytes, and one of `nbytes` each way."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=10))
    tensors = {"message": torch.zeros(2, 64, dtype=torch.uint8), "exchange": torch.zeros(2, nbytes, dtype=torch.uint8)}

    def once(sent: Tensor, received: Tensor) -> None:
        both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for each in dist.batch_isend_irecv(both):
            each.wait()

    times = {"message": 100, "exchange": 5}
    while connection.recv() == "measure":
        connection.send({name: seconds(partial(once, *pair), times[name]) for name, pair in tensors.items()})
    dist.destroy_process_group()


def calibrated(heads: Heads, *, rounds: int = 25, nbytes: int = 16 << 20) -> Calibration:
    """Measure the parts of the cost model on this machine: one thread, and gloo between two processes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pairs = [context.Pipe() for _ in range(2)]
        children = [context.Process(target=exchange, args=(i, folder, nbytes, pairs[i][1])) for i in range(2)]
        for child in children:
            child.start()
        try:
            cells, measure = measured_work(heads)
            found = []
            for _ in range(rounds + 1):
                for connection, _ in pairs:
                    connection.send("measure")
                links = [connection.recv() for connection, _ in pairs]
                found.append(links[0] | measure())
            for connection, _ in pairs:
                connection.send("end")
            for child in children:
                child.join()
        finally:
            for child in children:
                child.kill()
            torch.set_num_threads(before)
    return Calibration(cells, nbytes, {name: [each[name] for each in found[1:]] for name in found[0]})


def write_plot(found: dict[str, list[Simulated]], length: int, target: Path) -> None:
    """Draw the efficiency by the number of ranks as an SVG."""
    with picture(target, 7, 4) as axes:
        for name, each in found.items():
            axes.plot([one.ranks for one in each], [100 * one.efficiency for one in each], marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_xticks([one.ranks for one in next(iter(found.values()))])
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(ylim=(0, 105), xlabel="ranks", ylabel="efficiency (%)")
        axes.set_title(f"Simulated, not measured: training attention over {length:,} tokens")
        axes.legend(frameon=False)
        axes.grid(visible=True, alpha=0.3)


@click.group()
def main() -> None:
    """Measure and simulate attention over ranks."""


@main.command()
@click.option("--length", default=LENGTH, show_default=True, help="Tokens of the text.")
def memory(length: int) -> None:
    """Measure the peak memory of a layer in one process and on four ranks."""
    rows = [memory_of(length, training=training).row() for training in (False, True)]
    for line in table(("pass", "one process", "each rank", "share of the largest", "largest difference"), rows):
        click.echo(line)


@main.command()
@click.option("--length", default=1 << 20, show_default=True, help="Tokens of the text.")
@click.option("--ranks", multiple=True, type=int, default=(64, 128, 256, 512, 1024), help="Numbers of ranks.")
@click.option("--rate", type=float, help="Cells per second in the forward pass, instead of the measured ones.")
@click.option("--bandwidth", type=float, help="Bytes per second of a rank's link, instead of the measured ones.")
@click.option("--latency", type=float, help="Seconds of a message, instead of the measured ones.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the efficiency into this SVG.")
def simulation(
    *,
    length: int,
    ranks: tuple[int, ...],
    rate: float | None,
    bandwidth: float | None,
    latency: float | None,
    plot: Path | None,
) -> None:
    """Simulate the efficiency of many ranks, with work, bytes and latency measured on this machine."""
    heads = Heads()
    measured_here = calibrated(heads)
    machine = measured_here.machine
    if rate is not None:
        scale = rate / machine.cells_forward
        machine = replace(machine, cells_forward=rate, cells_backward=scale * machine.cells_backward)
    machine = replace(machine, bandwidth=bandwidth or machine.bandwidth, latency=latency or machine.latency)
    click.echo(
        f"SIMULATED from: {machine.cells_forward / 1e6:,.0f} and {machine.cells_backward / 1e6:,.0f} million cells per "
        f"second (forward, backward), {machine.call * 1e6:.0f} us per call, {machine.bandwidth / 1e9:.2f} GB/s, "
        f"{machine.latency * 1e6:.0f} us per message; {length:,} tokens, {heads}. {machine_line()}"
    )
    click.echo(f"Measured in {measured_here}.")
    found = {
        scene.name: [
            simulate(scene.mask, length, count, scene.kind, machine, heads, gathered=scene.gathered) for count in ranks
        ]
        for scene in scenes(length)
    }
    names = ("efficiency, simulated", *(f"{count:,} ranks" for count in ranks), "sent per rank at most", "imbalance")
    rows = []
    for name, each in found.items():
        sent = f"{each[0].bytes_sent / 2**30:.2f} to {each[-1].bytes_sent / 2**30:.2f} GiB"
        shares = (f"{one.efficiency:.0%}" for one in each)
        rows.append([name, *shares, sent, f"{max(one.imbalance for one in each):.2f}"])
    for line in table(names, rows):
        click.echo(line)
    if plot is not None:
        write_plot(found, length, plot)


if __name__ == "__main__":
    main()
