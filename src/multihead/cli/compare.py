"""The command `compare`: rank the heads of two saved records by how much their attention changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from multihead.cli.language import lang_option
from multihead.cli.model_options import import_option
from multihead.cli.progress import Steps
from multihead.cli.tables import table_files, table_options, write_tables
from multihead.errors.optional import require
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import section, text

if TYPE_CHECKING:
    from multihead.record.analysis.changes import ChangedHead

EXAMPLES = """
\b
Examples:
  multihead compare before.safetensors after.safetensors
  multihead compare before.safetensors after.safetensors --top 50 --csv a.csv
  multihead compare before.safetensors after.safetensors --queries 256
  multihead compare before.safetensors after.safetensors --json -

BEFORE and AFTER are records of the same text, read by two models with the same layers and heads, such as two
checkpoints of one model: `multihead look MODEL --text FILE --record before.safetensors`.
"""


@click.command(epilog=EXAMPLES)
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option("--sample", type=click.IntRange(min=0), metavar="N", default=0, help="Which text.  [default: 0]")
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    default=20,
    show_default=True,
    help="Print only the first N heads of the table.",
)
@click.option(
    "--queries",
    type=click.IntRange(min=1),
    metavar="N",
    help="Compare N evenly spaced queries of each layer.  [default: all, which is exact]",
)
@table_options
@lang_option
@import_option
def compare(
    *,
    before: str,
    after: str,
    sample: int,
    top: int,
    queries: int | None,
    json_file: str | None,
    csv_file: str | None,
    lang: str,
) -> None:
    """Rank the heads of two runs by how much their attention changed.

    Heads are ranked by the Jensen-Shannon divergence of their attention weights in nats, averaged over the queries: 0
    for identical weights, 0.693 (log 2) for no key in common. The table shows the kinds of each head in both runs and
    the statistic that changed most; --json and --csv have every statistic. `multihead view BEFORE AFTER` shows the maps
    side by side.
    """
    check_writable(table_files(json_file, csv_file))
    require("safetensors", purpose="Opening a record", extra="view")
    # Imported here, so that --help does not load torch.
    from multihead.observation.record import Record

    with Steps(lang) as steps:
        steps.show(text("view.opening", lang, names=", ".join(map(escape_controls, (before, after)))))
        runs = Record.load(before), Record.load(after)
        comparing = text("compare.comparing", lang)
        steps.show(comparing)
        changed = runs[0].changed(
            runs[1],
            sample=sample,
            queries=queries,
            progress=lambda done, total: steps.show(comparing, done, total),
        )
    rows = [one.row() for one in changed]
    write_tables(rows, json_file=json_file, csv_file=csv_file)
    if "-" not in (json_file, csv_file):
        _print_changes(changed, (before, after), top=top, lang=lang)


def _print_changes(changed: Sequence[ChangedHead], files: tuple[str, str], *, top: int, lang: str) -> None:
    """Print the two runs, a table of the most changed heads, and how many changed their kinds."""
    from multihead.cli.console import empty_table, open_console, print_sentence
    from multihead.kinds import KINDS, kinds_by_name
    from multihead.record.analysis.changes import summarise_changes

    words, by_name = section(lang, "common", "compare"), kinds_by_name(KINDS)
    console = open_console()
    heads, kinds_changed = summarise_changes(changed, Path(files[0]).name, Path(files[1]).name, lang)
    print_sentence(console, heads)
    console.print()
    table = empty_table(gap=2)
    for name in ("head", "divergence", "change", "kinds"):
        whole = name in ("head", "divergence")  # the others wrap between words
        justify: Literal["left", "right"] = "right" if name == "divergence" else "left"
        table.add_column(words[name], justify=justify, no_wrap=whole, overflow="fold")
    for one in changed[:top]:
        kinds = [
            words["join.comma"].join(by_name[kind].label(lang) for kind in each)
            for each in (one.kinds_before, one.kinds_after)
        ]
        both = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} → {kinds[1]}"
        change = one.change(lang)
        share = "" if change is None else f"{change.label} {change.before} → {change.after}"
        table.add_row(f"L{one.layer} H{one.head}", f"{one.divergence:.3f}", share, both)
    console.print(table)
    console.print()
    print_sentence(console, kinds_changed)
