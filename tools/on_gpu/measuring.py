"""Attention in bfloat16 against PyTorch's, alternately, after a check: host time, device time and wall time apart.

Host time is that of calls in a row without waiting, device time that between two events and that of a captured graph,
wall time that of a call until the GPU has finished.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import multihead as mh
from multihead import masks
from multihead.masks.positions import TilePositions
from tools.on_gpu.worker import Cases, NotHere

HEADS, PAIRS, ROUNDS = 16, 7, 20
TOLERANCE = 2e-2  # of bfloat16 outputs of about 1
DOCUMENTS = (1024,) * 8


@dataclass(frozen=True)
class Case:
    """A call and its rival.

    Attributes:
        name: of the mask.
        mask: of our call.
        rival: how PyTorch's attention is called: "full", "causal", or with a "dense" mask of booleans.
        batch, queries, keys, dim: sizes.
        kv_heads: of 16 heads.
        trains: whether a step has a backward pass.
    """

    name: str
    mask: masks.Mask
    rival: str
    batch: int
    queries: int
    keys: int
    dim: int = 128
    kv_heads: int = HEADS
    trains: bool = False

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table that say what the case is."""
        size = (
            f"{self.batch} x {self.queries} x {self.keys}"
            if self.queries != self.keys
            else f"{self.batch} x {self.keys}"
        )
        heads = f"{HEADS}/{self.kv_heads}, D {self.dim}"
        against = "SDPA, dense mask" if self.rival == "dense" else "SDPA"
        return self.name + (", training" if self.trains else ""), size, heads, against


def spread(batch: int, length: int) -> masks.Lengths:
    """Return lengths from 10 to 90 % of a length."""
    return masks.Lengths([round(length * (0.1 + 0.8 * n / (batch - 1))) for n in range(batch)])


# The cases of other kinds than full and causal come first, because the time may end before the last one.
CASES = [
    Case("a small call", masks.Causal(), "causal", 1, 64, 64, 64),
    Case("one query", masks.Full(), "full", 16, 1, 8192, kv_heads=4),
    Case("padded, 10 to 90 %", spread(8, 2048), "dense", 8, 2048, 2048),
    Case("8 documents, causal", masks.Causal() & masks.Documents(DOCUMENTS), "dense", 2, 8192, 8192),
    Case("window of 256, causal", masks.Causal() & masks.Window(256), "dense", 2, 8192, 8192),
    Case("causal, 4 kv heads", masks.Causal(), "causal", 4, 4096, 4096, kv_heads=4),
    *(Case("causal", masks.Causal(), "causal", 16384 // n, n, n, dim) for n in (512, 2048, 8192) for dim in (64, 128)),
    *(Case("full", masks.Full(), "full", 16384 // n, n, n, dim) for n in (512, 2048, 8192) for dim in (64, 128)),
    Case("causal", masks.Causal(), "causal", 4, 4096, 4096, trains=True),
    Case("full", masks.Full(), "full", 4, 4096, 4096, trains=True),
    Case("window of 256, causal", masks.Causal() & masks.Window(256), "dense", 2, 8192, 8192, trains=True),
    Case("8 documents, causal", masks.Causal() & masks.Documents(DOCUMENTS), "dense", 2, 8192, 8192, trains=True),
]


def cases(seconds: float) -> Cases:
    """Return the measurements: statistics and a watched model after the first calls, because the time may end."""
    compared = {", ".join(case.cells()[:3]): partial(measure, case) for case in CASES}
    names = list(compared)
    further: dict[str, Callable[[], dict[str, object]]] = {"default statistics": statistics_of_a_call, "a model": model}
    return {name: compared[name] for name in names[:5]} | further | {name: compared[name] for name in names[5:]}


def measure(case: Case) -> dict[str, object]:
    """Compare a case with its rival, after both outputs were checked."""
    sizes = ((HEADS, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
    q, k, v = (
        torch.randn(case.batch, *size, case.dim, device="cuda", dtype=torch.bfloat16, requires_grad=case.trains)
        for size in sizes
    )
    seen = case.mask.tile(_positions(case)) if case.rival == "dense" else None
    grouped = case.kv_heads < HEADS

    def ours() -> Tensor:
        return mh.attention(q, k, v, mask=case.mask)

    def theirs() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, is_causal=case.rival == "causal", enable_gqa=grouped
        )

    error = check(case, ours(), theirs(), (q, k, v))
    with waiting_is_an_error():
        ours()
    found = compare(_step(ours, case), _step(theirs, case), captures=not case.trains)
    ratios: Any = found["ratios"]
    host: Any = found["host_us"]
    return {
        **found,
        "cells": case.cells(),
        "largest_error": error,
        "answer": f"wall {ratios['wall'][0]:.2f} x, device {ratios['device'][0]:.2f} x, "
        f"host {host[0]:.0f} against {host[1]:.0f} us",
    }


def compare(ours: Callable[[], object], theirs: Callable[[], object], *, captures: bool) -> dict[str, object]:
    """Measure two functions alternately, also in graphs if `captures`.

    `ratios` are times faster: median, lower and upper quartile.
    """
    both = (ours, theirs)
    taken: dict[str, list[tuple[float, float]]] = {"wall": [], "host": [], "device": [], "graph": []}
    for run in both:
        run()
    graphs = [_captured(run) if captures else None for run in both]
    for pair in range(PAIRS):
        order = (1, 0) if pair % 2 else (0, 1)
        for kind, time_of in (("wall", _wall), ("host", _host), ("device", _device)):
            times = {index: time_of(both[index]) for index in order}
            taken[kind].append((times[0], times[1]))
        replays = [graph.replay if graph is not None else None for graph in graphs]
        if replays[0] is not None and replays[1] is not None:
            times = {index: _device(replays[index]) for index in order}  # type: ignore[arg-type]
            taken["graph"].append((times[0], times[1]))
    ratios = {kind: _quartiles([theirs / ours for ours, theirs in pairs]) for kind, pairs in taken.items() if pairs}
    least = {kind: [min(pair[side] for pair in pairs) for side in (0, 1)] for kind, pairs in taken.items() if pairs}
    return {
        "ratios": ratios,
        "host_us": [each * 1e6 for each in least["host"]],
        "ms": {kind: [each * 1e3 for each in pair] for kind, pair in least.items()},
    }


def _quartiles(ratios: list[float]) -> tuple[float, float, float]:
    """Return median, lower and upper quartile."""
    low, median, high = statistics.quantiles(ratios, n=4)
    return round(median, 3), round(low, 3), round(high, 3)


def _wall(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _host(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        run()
    took = (time.perf_counter() - began) / ROUNDS
    torch.cuda.synchronize()
    return took


def _device(run: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(ROUNDS // 4):
        run()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / (ROUNDS // 4)


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """Capture a function in a CUDA graph; None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let PyTorch raise an error where the host would wait for a value of the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _step(run: Callable[[], Tensor], case: Case) -> Callable[[], object]:
    """Return a function that computes the output, and in training the gradients."""
    return (lambda: run().sum().backward()) if case.trains else run


def _positions(case: Case) -> TilePositions:
    return TilePositions.from_sizes(case.queries, case.keys, query_start=0, device=torch.device("cuda"))


def check(case: Case, ours: Tensor, theirs: Tensor, given: tuple[Tensor, ...]) -> float:
    """Compare both outputs of the last sample and head with float64, and return our largest error."""
    q, k, v = (each[-1, -1].detach().double() for each in given)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    seen = case.mask.tile(_positions(case)).expand(case.batch, -1, -1, -1)[-1, -1]
    weights = scores.masked_fill_(~seen, -torch.inf).softmax(-1).nan_to_num_(0.0)
    rows = seen.any(-1)
    exact = (weights @ v)[rows]
    errors = [float((each[-1, -1].detach()[rows].double() - exact).abs().max()) for each in (ours, theirs)]
    if not max(errors) <= TOLERANCE:
        raise AssertionError(f"ours is {errors[0]:.1e} off, PyTorch's attention {errors[1]:.1e}.")
    return errors[0]


def statistics_of_a_call() -> dict[str, object]:
    """Return how many times longer the default statistics of a call take than its output, with the error of entropy."""
    q, k, v = (torch.randn(4, HEADS, 4096, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weights = (
        (q[-1, -1].double() @ k[-1, -1].double().mT * 128**-0.5)
        .masked_fill_(torch.ones(4096, 4096, dtype=torch.bool, device="cuda").triu_(1), -torch.inf)
        .softmax(-1)
    )
    exact = -torch.xlogy(weights, weights).sum(-1)
    found = mh.statistics(q, k, mask=masks.Causal())["entropy"][-1, -1]
    error = float((found - exact).abs().max())

    def measured() -> object:
        return mh.statistics(q, k, mask=masks.Causal())

    def attended() -> object:
        return mh.attention(q, k, v, mask=masks.Causal())

    ratio = statistics.median([_wall(measured) / _wall(attended) for _ in range(4)][1:])
    return {"answer": f"as long as {ratio:.0f} forward passes", "ratio": ratio, "largest_error": error}


def model() -> dict[str, object]:
    """Return how many times longer a Llama of random weights takes observed than unobserved, 2,048 tokens."""
    try:
        import transformers as hf
    except ImportError as error:
        raise NotHere(f"transformers cannot be imported: {error}") from error
    sizes = {"hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = hf.LlamaConfig(**sizes, intermediate_size=4096, vocab_size=1000)
    llama = hf.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(0, 1000, (1, 2048), device="cuda")

    def observed() -> None:
        with mh.observe(llama, keep="statistics"):
            llama(ids, use_cache=False)

    with torch.no_grad():
        ratios = [_wall(observed) / _wall(lambda: llama(ids, use_cache=False)) for _ in range(5)][2:]
    ratio = statistics.median(ratios)
    return {"answer": f"observed takes {ratio:.1f} times as long as unobserved", "ratio": ratio}
