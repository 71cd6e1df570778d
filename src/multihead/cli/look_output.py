"""Print the results of the command `look`: the table of heads, the highlights, memory use and the files written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multihead.locale.escaping import visible
from multihead.locale.texts import section, short_statistic_label, text, unit_label

if TYPE_CHECKING:
    from multihead.kinds import Kind
    from multihead.models.loading import EncodedText
    from multihead.observation.record import Record
    from multihead.probes.probe import Statistic
    from multihead.record.analysis.highlights import LayerProfile
    from multihead.record.memory_use import Memory
    from multihead.viewer.looking import ModelInputs
    from multihead.viewer.report import ReportSummary

# The statistics in the terminal's table; without distance_spread they fit into 80 columns.
COLUMNS = (
    "entropy",
    "effective_keys",
    "mean_distance",
    "distance_spread",
    "self_mass",
    "previous_mass",
    "next_mass",
    "first_mass",
    "special_mass",
    "largest_weight",
)
NARROW = 90
NAMED = 4  # textbook heads listed per kind
MOST_LEVELS = 4  # rows at the end of the table with chance levels
HEAVY = 1_000_000_000  # from this many bytes of weights on, memory is reported


def print_heads(
    record: Record,
    profiles: Sequence[LayerProfile],
    run: ModelInputs,
    rows: Sequence[Mapping[str, Any]],
    *,
    lang: str,
) -> None:
    """Print a line about the model and its text, the table of heads, and the highlights."""
    from rich.console import Console

    from multihead.record.analysis.highlights import findings

    console = Console(highlight=False)
    console.print(_sentence_on_input(record, run, lang) + "\n", markup=False)
    console.print(_table_of_heads(rows, console.width, record.all_kinds, lang))
    repeats = {kind.name for kind in record.all_kinds if kind.texts == "repeats"}
    if any(repeats.intersection(row["kind"].split("+")) for row in rows):
        console.print(text("look.on repeats", lang), markup=False)
    # With two texts, "the first token" is not one token.
    tokens = run.texts[0].tokens if len(run.texts) == 1 else None
    found = findings(
        record.layers, tokens=tokens, special=run.texts[0].special, lang=lang, profiles=profiles, among=record.all_kinds
    )
    click.echo("\n" + text("look.highlights" if found else "look.no highlights", lang))
    for finding in found:
        console.print(f"  {finding}", markup=False, soft_wrap=True)


def _sentence_on_input(record: Record, run: ModelInputs, lang: str) -> str:
    """Return the sentence on the model, its heads, and the tokens that it read."""

    def count_tokens(encoded: EncodedText) -> str:
        number = len(encoded.tokens)
        return text("look.1 token", lang) if number == 1 else text("look.tokens", lang, n=number)

    values = {"model": visible(record.title), "heads": _count_layers_and_heads(record, lang)}
    if run.decoder is None:
        return text("look.read", lang, tokens=count_tokens(run.texts[0]), **values)
    key = "look.generated" if run.generated else "look.decoded"
    memory = text("look.audio", lang) if run.text is None else count_tokens(run.text)
    return text(key, lang, tokens=memory, decoder=count_tokens(run.decoder), **values)


def print_textbook_heads(profiles: Sequence[LayerProfile], lang: str) -> None:
    """Print the strongest heads of each kind that was measured on repeated random tokens."""
    from rich.cells import cell_len

    from multihead.kinds import KINDS, percent
    from multihead.observation.textbook import DRAWS, LENGTH, TIMES

    click.echo("\n" + text("look.textbook.title", lang, draws=DRAWS, times=TIMES, length=LENGTH))
    repeats = [kind.name for kind in KINDS if kind.texts == "repeats"]
    measured = [kind for kind in repeats if any(kind in one.evidence for one in profiles)]
    names = {kind: text(f"look.textbook.{kind}", lang) for kind in measured}
    width = max((cell_len(name) for name in names.values()), default=0)  # a Chinese character is two columns wide
    for kind, name in names.items():
        heads = sorted(
            (-float(one.evidence[kind].mean[head]), float(one.evidence[kind].chance[head]), one.number, head)
            for one in profiles
            for head, kinds in enumerate(one.kinds)
            if kind in kinds
        )
        named = ", ".join(f"L{layer} H{head} {percent(-share)}" for share, _, layer, head in heads[:NAMED])
        if heads:
            more = ", …" if len(heads) > NAMED else ""
            chance = text("look.chance of", lang, chance=percent(max(level for _, level, _, _ in heads)))
            named = f"{named}{more}{section(lang, 'common')['join.sentences']}{chance}"
        if kind == "repeated_first" and heads:
            count = text("look.textbook.count", lang, number=len(heads), heads=sum(len(one.kinds) for one in profiles))
            named = f"{count}{section(lang, 'common')['join.sentences']}{named}"
        shown = name + " " * (width - cell_len(name))
        click.echo(f"  {shown}  {named or text('look.textbook.none', lang)}".replace("\u00a0", " "))


def print_memory_and_files(page: ReportSummary, record_file: str | None, memory: Memory, lang: str) -> None:
    """Print the memory used, the files written, and how to see more."""
    if memory.weights >= HEAVY and memory.peak is not None:
        sizes = {name: _readable_size(getattr(memory, name)) for name in ("peak", "kept", "weights")}
        click.echo("\n" + text("look.memory", lang, **sizes))
    click.echo("\n" + text("look.page", lang, page=page))
    if record_file is not None:
        size = _readable_size(Path(record_file).stat().st_size)
        click.echo(
            text("look.record", lang, file=visible(record_file), size=size, quoted=_quoted_for_shell(record_file))
        )
    elif page.mode != "whole":
        click.echo(text("look.more", lang))


def _quoted_for_shell(file: str) -> str:
    """Quote a file's name for a shell; a name with control characters becomes $'...' with escapes."""
    shown = visible(file.replace("\\", "\\\\").replace("'", "\\'"))
    return shlex.quote(file) if visible(file) == file else f"$'{shown}'"


def _readable_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _table_of_heads(rows: Sequence[Mapping[str, Any]], width: int, kinds: Sequence[Kind], lang: str) -> Any:
    """Lay out the table: one row per head, with its kind and its means."""
    from rich import box
    from rich.table import Table

    from multihead.probes.catalogue import PROBES
    from multihead.record.notebook import CHANCE

    shown = [PROBES[name] for name in COLUMNS if any(name in row for row in rows)]
    has_roles = any("role" in row for row in rows)
    if width < NARROW:
        left_out = {"distance_spread", "mean_distance"} if has_roles else {"distance_spread"}
        shown = [each for each in shown if each.name not in left_out]
    padding = 0 if width < NARROW else 1
    drawn = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, padding, 0, 0))
    for name in ("head", "role", "kind") if has_roles else ("head", "kind"):
        drawn.add_column(text(f"look.{name}", lang) + "\n", no_wrap=name != "kind")
    for each in shown:
        drawn.add_column(_column_heading(each, lang), justify="right", no_wrap=True)
    for row in rows:
        numbers = [each.number(row[each.name]) if each.name in row else "" for each in shown]
        named = _cell_of_kinds(row["kind"].split("+"), kinds, lang)
        if row.get("alignment"):
            named = text("look.and alignment", lang, kind=named, alignment=text("common.alignment", lang))
        role = [_name_of_role(row["role"], lang)] if has_roles else []
        drawn.add_row(f"L{row['layer']} H{row['head']}", *role, named, *numbers)
    chances: dict[tuple[str, ...], set[str]] = {}  # layers with different masks have different levels of chance
    for row in rows:
        numbers = [each.number(row.get(each.name + CHANCE)) for each in shown]
        level = tuple("" if number == "-" else number for number in numbers)
        chances.setdefault(level, set()).add(row.get("role", ""))
    drawn.add_section()
    for level, roles in [*chances.items()][:MOST_LEVELS]:
        role = [_name_of_role("".join(roles) if len(roles) == 1 else "", lang)] if has_roles else []
        drawn.add_row(text("look.chance", lang), *role, "", *level)
    return drawn


def _name_of_role(role: str, lang: str) -> str:
    return text("look.cross", lang) if role == "cross" else text(f"common.role.{role}", lang) if role else ""


def _cell_of_kinds(names: Sequence[str], kinds: Sequence[Kind], lang: str) -> str:
    """Return a head's first kind, with "*" if it was measured on repeated random tokens, and the number of others."""
    from multihead.kinds import kinds_by_name

    first = kinds_by_name(kinds)[names[0]]
    name = visible(first.label(lang))
    if first.texts == "repeats" and first.probe is not None:
        name = short_statistic_label(first.probe.name, lang, first.probe.label) + "*"
    return name + (f" +{len(names) - 1}" if len(names) > 1 else "")


def _column_heading(shown: Statistic, lang: str) -> str:
    """Return the two lines above a column: the short label and the unit, or a label of two words."""
    label = short_statistic_label(shown.name, lang, shown.short_label)
    return f"{label}\n{unit_label(shown.unit, lang)}" if shown.unit else label.replace(" ", "\n", 1)


def _count_layers_and_heads(record: Record, lang: str) -> str:
    layers, heads = len(record.layers), [layer.num_heads for layer in record.layers]
    if len(set(heads)) > 1:
        return text("look.heads in layers", lang, heads=sum(heads), layers=layers)
    if layers == 1:
        return text("look.1 layer of heads", lang, heads=heads[0])
    return text("look.layers of heads", lang, layers=layers, heads=heads[0])
