"""The command `compare`: rank the heads of two saved records by how much they differ, or compare them kind by kind."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
    from multihead.record.analysis.changes import ChangedHead, ComparedKind

EXAMPLES = """
\b
Examples:
  multihead compare before.safetensors after.safetensors
  multihead compare before.safetensors after.safetensors --top 50 --csv a.csv
  multihead compare before.safetensors after.safetensors --queries 256
  multihead compare before.safetensors after.safetensors --json -
  multihead compare run.safetensors run.safetensors --sample 0 \\
    --after-sample 1

BEFORE and AFTER are records, such as `multihead look MODEL --text FILE --record before.safetensors` saves: of two
checkpoints of one model on the same texts, of one model on two texts, or of two models.
"""


@click.command(epilog=EXAMPLES)
@click.argument("before", metavar="BEFORE")
@click.argument("after", metavar="AFTER")
@click.option(
    "--sample", type=click.IntRange(min=0), metavar="N", help="Only this text, counted from 0.  [default: all]"
)
@click.option(
    "--after-sample", type=click.IntRange(min=0), metavar="N", help="Which text of AFTER.  [default: that of --sample]"
)
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
    sample: int | None,
    after_sample: int | None,
    top: int,
    queries: int | None,
    json_file: str | None,
    csv_file: str | None,
    lang: str,
) -> None:
    """Rank the heads of two runs by how much they changed.

    On the same texts, heads are ranked by the Jensen-Shannon divergence of their attention weights in nats, averaged
    over the queries: 0 for identical weights, 0.693 (log 2) for no key in common. The table shows the kinds of each
    head in both runs and the statistic that changed most; --json and --csv have every statistic.

    Weights on different texts cannot be compared: heads are ranked by the change of a statistic beyond chance, and the
    table has those that changed clearly. Two models with other numbers of layers or heads are compared kind by kind.
    `multihead view BEFORE AFTER` shows the same, and the maps.
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
        chosen = {"sample": sample, "after_sample": after_sample}
        by_head = runs[0].has_heads_of(runs[1])
        if by_head:
            changed = runs[0].changed(
                runs[1],
                **chosen,
                queries=queries,
                progress=partial(steps.show, comparing),
            )
            rows: list[dict[str, Any]] = [dict(one.row()) for one in changed]
        else:
            kinds = runs[0].compared_kinds(runs[1], **chosen)
            rows = [dict(one.row()) for one in kinds]
    write_tables(rows, json_file=json_file, csv_file=csv_file)
    if "-" not in (json_file, csv_file):
        if by_head:
            _print_changes(changed, (before, after), top=top, lang=lang)
        else:
            _print_kinds(kinds, (before, after), lang)


def _print_kinds(found: Sequence[ComparedKind], files: tuple[str, str], lang: str) -> None:
    """Print how many heads of two models have each kind, and the strongest of them."""
    from multihead.cli.console import empty_table, open_console, print_sentence
    from multihead.record.analysis.changes import describe_kind_counts

    words = section(lang, "compare")
    console = open_console()
    names = [escape_controls(Path(file).name) for file in files]
    print_sentence(console, text("compare.read models", lang, before=names[0], after=names[1]))
    console.print()
    table = empty_table(gap=2)
    for name in ("kind", "before", "after"):
        table.add_column(words[name], no_wrap=name == "kind", overflow="fold")
    for one in found:
        table.add_row(*describe_kind_counts(one, lang))
    console.print(table)


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
    same_texts = any(one.compares_weights for one in changed)
    shown = changed[:top] if same_texts else [one for one in changed if one.is_clear][:top]
    columns = ("head", "divergence", "change", "kinds") if same_texts else ("head", "change of texts", "kinds")
    for name in columns:
        whole = name in ("head", "divergence")  # the others wrap between words
        justify: Literal["left", "right"] = "right" if name == "divergence" else "left"
        table.add_column(words[name], justify=justify, no_wrap=whole, overflow="fold")
    for one in shown:
        kinds = [
            words["join.comma"].join(by_name[kind].label(lang) for kind in each)
            for each in (one.kinds_before, one.kinds_after)
        ]
        both = kinds[0] if kinds[0] == kinds[1] else f"{kinds[0]} → {kinds[1]}"
        change = one.change(lang)
        share = "" if change is None else f"{change.label} {change.before} → {change.after}"
        apart = [f"{one.divergence:.3f}"] if same_texts else []
        table.add_row(f"L{one.layer} H{one.head}", *apart, share, both)
    if shown:
        console.print(table)
        console.print()
    print_sentence(console, kinds_changed)
