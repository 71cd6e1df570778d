"""What the verb `look` prints: the table of heads, what stands out, what it took and where to see the rest."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multihead.escaping import visible

if TYPE_CHECKING:
    from multihead.analysis.highlights import LayerProfile
    from multihead.models import Encoded, LoadedModel
    from multihead.observation.record import Record
    from multihead.observation.textbook import TextbookHead
    from multihead.record.memory_use import Memory
    from multihead.viewer.report import ReportSummary

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
HALF = 0.5  # of its attention makes a textbook head
NAMED = 4  # of the textbook heads of a kind
HEAVY = 1_000_000_000  # bytes of weights from which on it is told what they would take
WORDS = {
    "en": {
        "out": "What stands out:",
        "textbook": "Textbook heads, on a start token and {times} x {length} random tokens:",
        "induction": "induction",
        "duplicate": "duplicate token",
        "previous": "previous token",
        "first": "first token",
        "none": "no head gives it half of its attention",
        "first count": "{number} of {heads} heads give it over half of their attention: ",
        "memory": "Peak memory {peak}, the model with it; q and k of all heads take {kept}, "
        "and their weights would take {weights}.",
        "page": "The page: {page}",
        "more": "For every weight at every zoom: look with --record FILE, then multihead view FILE.",
        "record": "The record: {file} ({size}). Every head down to single weights: multihead view {quoted}",
    },
    "zh": {
        "out": "发现：",
        "textbook": "教科书式的头（开始标记加 {times} × {length} 个随机词元）：",
        "induction": "归纳",
        "duplicate": "重复词元",
        "previous": "前一词元",
        "first": "首词元",
        "none": "没有头把一半注意力给它",
        "first count": "{heads} 个头中有 {number} 个把一半以上的注意力给它：",
        "memory": "内存峰值 {peak}（含模型）；全部头的 q 与 k 占 {kept}，而它们的权重将占 {weights}。",
        "page": "页面：{page}",
        "more": "要逐级缩放到每个权重：look 时加 --record FILE，然后 multihead view FILE。",
        "record": "记录：{file}（{size}）。查看每个头直至单个权重：multihead view {quoted}",
    },
}


def tell(
    record: Record,
    profiles: Sequence[LayerProfile],
    loaded: LoadedModel,
    encoded: Encoded,
    rows: Sequence[Mapping[str, Any]],
    *,
    lang: str,
) -> None:
    """Print what was read, the table, and what stands out."""
    from rich.console import Console

    from multihead.analysis.highlights import findings

    console = Console(highlight=False)
    part = "" if loaded.reader is loaded.model else "The encoder of "
    console.print(
        f"{part}{visible(loaded.title)} read {len(encoded.tokens)} tokens with {_counted(record)}.\n", markup=False
    )
    console.print(_drawn(rows, console.width))
    found = findings(record.layers, tokens=encoded.tokens, special=encoded.special, lang=lang, profiles=profiles)
    if found:
        click.echo(f"\n{WORDS[lang]['out']}")
    for finding in found:
        console.print(f"  {finding}", markup=False)


def tell_textbook(found: Mapping[str, Sequence[TextbookHead]], lang: str) -> None:
    """Print the heads of each kind that have most of it."""
    from rich.cells import cell_len

    from multihead.analysis.highlights import percent
    from multihead.observation.textbook import LENGTH, TIMES

    words = WORDS[lang]
    click.echo("\n" + words["textbook"].format(times=TIMES, length=LENGTH))
    width = max(cell_len(words[kind]) for kind in found)  # a Chinese sign is two columns wide
    for kind, heads in found.items():
        half = [each for each in heads if each.share > HALF]
        named = ", ".join(f"L{each.layer} H{each.head} {percent(each.share)}" for each in half[:NAMED])
        if kind == "first" and half:
            named = words["first count"].format(number=len(half), heads=len(heads)) + named
        more = ", …" if len(half) > NAMED else ""
        name = words[kind] + " " * (width - cell_len(words[kind]))
        click.echo(f"  {name}  {(named + more or words['none'])}".replace("\u00a0", " "))


def tell_where(page: ReportSummary, record_file: str | None, memory: Memory, lang: str) -> None:
    """Print what was written, what it took, and how to see the rest."""
    words = WORDS[lang]
    if memory.weights >= HEAVY and memory.peak is not None:
        sizes = {name: _size(getattr(memory, name)) for name in ("peak", "kept", "weights")}
        click.echo("\n" + words["memory"].format(**sizes))
    click.echo("\n" + words["page"].format(page=page))
    if record_file is not None:
        size = _size(Path(record_file).stat().st_size)
        click.echo(words["record"].format(file=visible(record_file), size=size, quoted=_quoted(record_file)))
    elif page.holds != "every weight":
        click.echo(words["more"])


def _quoted(file: str) -> str:
    """Write a file's name so that a shell reads it back, acting characters as escapes within $'...'."""
    shown = visible(file.replace("\\", "\\\\").replace("'", "\\'"))
    return shlex.quote(file) if visible(file) == file else f"$'{shown}'"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


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


def _counted(record: Record) -> str:
    heads = [layer.num_heads for layer in record.layers]
    if len(set(heads)) == 1:
        return f"{len(heads)} layers of {heads[0]} heads"
    return f"{sum(heads)} heads in {len(heads)} layers"
