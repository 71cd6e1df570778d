"""Time the viewer over HTTP: tiles of every level, first and repeated, the building of levels, and the memory."""

from __future__ import annotations

import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import multihead as mh
from benchmarks.machine import machine_line
from multihead import masks
from multihead.observation.record import Record
from multihead.viewer.levels import FINEST_STORED_LEVEL, TILE_SIDE, cells_per_side, number_of_levels

TOLERANCE = 1e-4  # of a mean, relative: weights in float32 against the same sums in float64
SAMPLE = "api/runs/0/samples/0"


@click.command()
@click.option("--tokens", default=100_000, show_default=True, help="Length of the text.")
@click.option("--heads", default=2, show_default=True, help="Heads of the layer; each is 64 wide.")
@click.option("--runs", default=9, show_default=True, help="The most tiles per level.")
def main(*, tokens: int, heads: int, runs: int) -> None:
    """Make a causal record of one layer, serve it with `multihead view`, and time its responses."""
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.safetensors"
        record = _recorded(tokens, heads)
        record.save(file)
        with _Viewer(file) as viewer:
            built = _until_built(viewer)
            if number_of_levels(tokens, tokens) > FINEST_STORED_LEVEL:
                console.print(f"Coarse levels of {heads} heads at {tokens:,} tokens: {built:.1f} s.")
            table = Table("level", "scores per tile", "first, ms", "slowest, ms", "repeated, ms")
            for level in range(number_of_levels(tokens, tokens)):
                rows = min(TILE_SIDE, cells_per_side(tokens, level))
                cold, again = _timed(viewer, tokens, heads, level, runs)
                _check_equal(viewer, record, level)
                table.add_row(
                    str(level),
                    f"{(rows << level) ** 2:,}",
                    *(f"{1e3 * each:.1f}" for each in (statistics.median(cold), max(cold), statistics.median(again))),
                )
            console.print(table)
            console.print(f"Highest resident memory of the viewer: {viewer.peak():.0f} MB.")
    console.print(f"q and k: {2 * tokens * heads * 256 / 1e6:.0f} MB.")
    console.print(machine_line())


def _recorded(tokens: int, heads: int) -> Record:
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=64 * heads, num_heads=heads)
    with torch.no_grad():
        layer.q_proj.weight.mul_(3)
        layer.k_proj.weight.mul_(3)
        with mh.observe(layer, probes=("entropy",)) as seen:
            layer(torch.randn(1, tokens, 64 * heads), mask=masks.Causal())
    return seen


@dataclass
class _Answer:
    seconds: float
    body: bytes
    shape: tuple[int, ...]


class _Viewer:
    """`multihead view` in another process."""

    def __init__(self, file: Path) -> None:
        command = [sys.executable, "-c", "from multihead.cli import main; main()", "view", str(file), "--no-browser"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        printed = "".join(self.process.stdout.readline() for _ in range(3))
        found = re.search(r"http://127\.0\.0\.1:(\d+)(/\S+/)", printed)
        assert found is not None, printed
        self.port, self.path = int(found[1]), found[2]

    def __enter__(self) -> _Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)

    def get(self, path: str) -> _Answer:
        """Send one request, over a new connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        began = time.perf_counter()
        connection.request("GET", self.path + path)
        response = connection.getresponse()
        body = response.read()
        seconds = time.perf_counter() - began
        connection.close()
        if response.status != 200:
            raise click.ClickException(f"{path} returned {response.status}: {body.decode()}")
        shape = response.headers.get("X-Shape", "")
        return _Answer(seconds, body, tuple(int(each) for each in shape.split(",") if each))

    def peak(self) -> float:
        """Return the peak of its resident memory in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        return int(status.split("VmHWM:")[1].split()[0]) / 1e3


def _until_built(viewer: _Viewer) -> float:
    began = time.perf_counter()
    viewer.get(SAMPLE)
    while json.loads(viewer.get(f"{SAMPLE}/levels").body)["state"] != "ready":
        time.sleep(0.1)
    return time.perf_counter() - began


def _timed(viewer: _Viewer, tokens: int, heads: int, level: int, runs: int) -> tuple[list[float], list[float]]:
    """Request tiles below the diagonal, where every cell is visible, each of them twice."""
    side = -(-cells_per_side(tokens, level) // TILE_SIDE)
    below = [(row, column) for row in range(side) for column in range(row)] or [(0, 0)]
    each = [(*place, head, sink) for place in below for head in range(heads) for sink in (1, 0)]
    cold, again = [], []
    for row, column, head, sink in each[:: -(-len(each) // runs)]:
        path = f"{SAMPLE}/heads/0/{head}/tile?level={level}&row={row}&column={column}&sink={sink}"
        cold.append(viewer.get(path).seconds)
        again.append(viewer.get(path).seconds)
    return cold, again


def _check_equal(viewer: _Viewer, record: Record, level: int) -> None:
    """Compare some cells in the last row of tiles with the mean of their weights in float64."""
    sample, side = record.layers[0].sample(), 1 << level
    row = (cells_per_side(sample.num_queries, level) - 1) // TILE_SIDE
    answer = viewer.get(f"{SAMPLE}/heads/0/0/tile?level={level}&row={row}&column=0")
    found = np.frombuffer(answer.body, "<f4").reshape(answer.shape)
    down = row * TILE_SIDE + len(found) // 2
    queries = slice(down * side, min((down + 1) * side, sample.num_queries))
    for across in (0, found.shape[1] // 3):
        weights = sample.weights(0, queries=queries, keys=slice(across * side, (across + 1) * side)).double()
        shown = sample.visible(queries=queries, keys=slice(across * side, (across + 1) * side))
        expected = float(weights.sum() / shown.sum())
        if not abs(found[down - row * TILE_SIDE, across] - expected) <= TOLERANCE * expected + 1e-12:
            raise click.ClickException(f"A tile of level {level} is not the mean of its weights.")


if __name__ == "__main__":
    main()
