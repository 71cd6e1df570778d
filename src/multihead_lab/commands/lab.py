"""The command `lab`: count, train and measure what the number of heads changes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

import click

from multihead.cli.console import empty_table, print_sentence
from multihead.cli.language import lang_option
from multihead.cli.progress import Steps
from multihead.errors import ArgumentError
from multihead.errors.optional import require
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls
from multihead_lab.commands import parse_whole_numbers

if TYPE_CHECKING:
    from rich.console import Console

    from multihead_lab.run import LabPart, LabResults
    from multihead_lab.text import Chapter, Phrases, Table

EXAMPLES = """
\b
Examples:
  multihead lab                      everything, in minutes; writes lab.html
  multihead lab --lang zh            the same in Chinese
  multihead lab --only parameters    what can be counted, in seconds
  multihead lab --quick --seeds 2    a first look at the training
  multihead lab --seeds 20 --out 20.html
  multihead lab --heads 1,2,16 --only tasks
"""

MAX_TABLE_WIDTH = 110


@click.command(epilog=EXAMPLES, context_settings={"show_default": True})
@lang_option
@click.option(
    "--only",
    type=click.Choice(["parameters", "tasks", "vectors"]),
    help="Only what can be counted, what must be trained, or the matching of vectors.  [default: all]",
)
@click.option("--heads", metavar="N,N,...", default="1,2,4,8", help="Head counts to compare.")
@click.option("--seeds", type=int, default=5, help="Models per head count.")
@click.option("--seed", type=int, default=0, help="The first seed.")
@click.option("--quick", is_flag=True, help="Train half as long, and match fewer vectors.")
@click.option("--workers", type=int, help="Processes that train side by side.  [default: one per core, at most 8]")
@click.option("--out", default="lab.html", metavar="FILE", help="The page to write.")
def lab(
    *,
    lang: str,
    only: LabPart | None,
    heads: str,
    seeds: int,
    seed: int,
    quick: bool,
    workers: int | None,
    out: str,
) -> None:
    """Measure what the number of heads changes.

    Counts the parameters, lists the shapes, compares outputs and gradients of the same weights, trains small models
    with 1, 2, 4 and 8 heads, shows what each head attends to after training, and matches long vectors against short
    ones. Prints the results and writes one page that opens offline.
    """
    check_writable([out])
    counts = parse_whole_numbers("heads", heads, "Give for example 1,2,4,8.")
    if len(set(counts)) < len(counts):
        raise ArgumentError(f"heads is {heads!r}, and contains a number twice.", "Give each number once.")
    require("jinja2", purpose="The lab", extra="lab")
    # Imported here, so that --help does not load torch.
    from rich.console import Console

    from multihead_lab.page import write_page
    from multihead_lab.report import build_chapters
    from multihead_lab.run import LAB_PARTS, run_lab
    from multihead_lab.text import load_phrases

    phrases = load_phrases(lang)
    console = Console(highlight=False, soft_wrap=True)
    answers: LabResults
    with Steps(lang, keep=True) as steps:
        answers = run_lab(
            parts=(only,) if only is not None else LAB_PARTS,
            heads=counts,
            seeds=seeds,
            seed=seed,
            quick=quick,
            workers=min(os.cpu_count() or 1, 8) if workers is None else workers,
            progress=lambda name, done, total: steps.show(phrases.texts_by_key[f"doing.{name}"], done, total),
        )
    path = write_page(answers, out, lang=lang)
    print_sentence(console, phrases.texts_by_key["page title"], style="bold")
    print_sentence(console, phrases.texts_by_key["lead"])
    if quick:
        print_sentence(console, phrases.texts_by_key["quick"], style="yellow")
    for number, chapter in enumerate(build_chapters(answers, phrases), start=1):
        _print_chapter(console, number, chapter, phrases)
    console.print()
    print_sentence(
        console,
        phrases.translate("page at" if answers.experiments else "page only", path=escape_controls(path)),
        style="green",
    )


def _print_chapter(console: Console, number: int, chapter: Chapter, phrases: Phrases) -> None:
    """Print one chapter of the lab: its question, its short answer, its paragraphs and its tables."""
    console.print()
    print_sentence(console, f"{number}. {chapter.title}", style="bold")
    print_sentence(console, chapter.short_answer, style="cyan", indent=3)
    for paragraph in chapter.paragraphs:
        print_sentence(console, paragraph, indent=3)
    _print_table(console, chapter.table)
    if chapter.head_table is not None:
        console.print()
        print_sentence(console, phrases.texts_by_key["looks.heading"], style="bold", indent=3)
        for sentence in chapter.head_paragraphs:
            print_sentence(console, sentence, indent=3)
        _print_table(console, chapter.head_table)


def _print_table(console: Console, table: Table) -> None:
    """Print one table of a chapter, at most as wide as the terminal and `MAX_TABLE_WIDTH`."""
    from rich.padding import Padding
    from rich.text import Text

    drawn = empty_table(gap=2)
    drawn.header_style = "dim"
    numeric = [all(_looks_like_number(row[place]) for row in table.rows) for place in range(len(table.columns))]
    for place, column in enumerate(table.columns):
        justify: Literal["left", "right"] = "right" if numeric[place] and place else "left"
        drawn.add_column(Text(column, justify=justify), justify=justify, overflow="fold")
    for row in table.rows:
        drawn.add_row(*row)
    console.print()
    print_sentence(console, table.caption, style="dim", indent=3)
    width = min(console.width, MAX_TABLE_WIDTH)
    console.print(Padding(drawn, (0, 0, 0, 3)), markup=False, soft_wrap=False, width=width)


def _looks_like_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell[0] in "–-"
