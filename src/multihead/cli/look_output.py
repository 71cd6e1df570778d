"""Print the results of the command `look`: the table of heads, the highlights, memory use and the files written."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multihead.locale.escaping import escape_controls
from multihead.locale.texts import section, short_statistic_label, text, unit_label

if TYPE_CHECKING:
    from multihead.kinds import Kind
    from multihead.models.loading import EncodedText
    from multihead.observation.record import Record
    from multihead.probes.probe import Statistic
    from multihead.record.memory_use import MemoryUse
    from multihead.record.profiles import LayerKinds
    from multihead.record.repeated import RepeatedTokens
    from multihead.record.texts import Text
    from multihead.viewer.looking import ModelInputs
    from multihead.viewer.report import ReportSummary

MAX_LISTED_HEADS = 4  # maximum number of textbook heads listed per kind
MAX_CHANCE_ROWS = 4  # maximum number of rows with chance levels at the end of the table
MEMORY_REPORT_THRESHOLD = 1_000_000_000  # bytes of attention weights from which memory use is reported


def print_heads(
    record: Record,
    profiles: Sequence[LayerKinds],
    inputs: Sequence[ModelInputs],
    rows: Sequence[Mapping[str, Any]],
    *,
    sort: str,
    lang: str,
) -> None:
    """Print a sentence about the model and its input, the table of heads, and the highlights."""
    from multihead.cli.console import open_console, print_sentence
    from multihead.record.analysis.highlights import findings

    console = open_console()
    print_sentence(console, _sentence_on_input(record, inputs, lang))
    console.print()
    console.print(_table_of_heads(rows, console.width, record.all_kinds, lang, sort=sort))
    repeats = {kind.name for kind in record.all_kinds if kind.texts == "repeats"}
    if sort in repeats or any(repeats.intersection(row["kind"].split("+")) for row in rows):
        print_sentence(console, text("look.on repeats", lang))
    if any("+" in row["kind"] for row in rows):
        print_sentence(console, text("look.more kinds", lang))
    texts: Sequence[Text | EncodedText] = [text for each in inputs for text in each.texts] or record.texts
    # With two texts, "the first token" is not one token.
    tokens = texts[0].tokens if len(texts) == 1 else None
    found = findings(
        profiles,
        tokens=tokens,
        special=texts[0].special,
        lang=lang,
        among=record.all_kinds,
        by_text=record.profiles_by_text(),
    )
    click.echo("\n" + text("look.highlights" if found else "common.nothing stands out", lang))
    for finding in found:
        print_sentence(console, str(finding), indent=2)


def _sentence_on_input(record: Record, inputs: Sequence[ModelInputs], lang: str) -> str:
    """Return a sentence with the model's name, its layers and heads, and the texts and tokens that it read."""

    def count_tokens(texts: Sequence[EncodedText]) -> str:
        lengths = [len(each.tokens) for each in texts]
        least, most = min(lengths), max(lengths)
        key = "1 token" if most == 1 else "tokens" if least == most else "tokens from"
        count = text(f"look.{key}", lang, n=f"{most:,}", least=f"{least:,}")
        return count if len(texts) == 1 else text("look.texts", lang, number=f"{len(texts):,}", tokens=count)

    if not inputs:  # pictures
        texts = record.layers[-1].samples
        values = {"model": escape_controls(record.title), "heads": _count_layers_and_heads(record, lang)}
        number = sum(len(one.text.pictures) for one in texts)
        key = "look.1 picture" if number == 1 else "look.pictures"
        return text("look.read", lang, tokens=text(key, lang, number=number), **values)
    run = inputs[0]
    values = {"model": escape_controls(record.title), "heads": _count_layers_and_heads(record, lang)}
    if run.decoder_text is None:
        return text("look.read", lang, tokens=count_tokens([each.texts[0] for each in inputs]), **values)
    key = "look.generated" if run.has_generated_decoder_text else "look.decoded"
    read = [each.text for each in inputs if each.text is not None]
    decoders = [each.decoder_text for each in inputs if each.decoder_text is not None]
    memory = count_tokens(read) if read else text("look.audio", lang)
    return text(key, lang, tokens=memory, decoder=count_tokens(decoders), **values)


def print_textbook_heads(profiles: Sequence[LayerKinds], lang: str) -> None:
    """Print the strongest heads of each kind (such as induction heads) that is measured on repeated random tokens."""
    from rich.cells import cell_len

    from multihead.cli.console import open_console, print_entry, print_sentence
    from multihead.kinds import KINDS, format_percent
    from multihead.probes.choices import COUNTED_ON_REPEATS

    console = open_console()
    console.print()
    print_sentence(console, _title_of_textbook_heads(next(one.repeated for one in profiles if one.repeated), lang))
    repeats = {kind.name: kind for kind in KINDS if kind.texts == "repeats"}
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
        named = ", ".join(
            f"L{layer}\u00a0H{head}\u00a0{format_percent(-share)}" for share, _, layer, head in heads[:MAX_LISTED_HEADS]
        )
        if heads:
            more = ", …" if len(heads) > MAX_LISTED_HEADS else ""
            chance = text("look.chance of", lang, chance=format_percent(max(level for _, level, _, _ in heads)))
            named = f"{named}{more}{section(lang, 'common')['join.sentences']}{chance}"
        if repeats[kind].probe == COUNTED_ON_REPEATS and heads:
            count = text("look.textbook.count", lang, number=len(heads), heads=sum(len(one.kinds) for one in profiles))
            named = f"{count}{section(lang, 'common')['join.sentences']}{named}"
        print_entry(console, name, named or text("look.textbook.none", lang), width=width + 2, indent=2)


def _title_of_textbook_heads(repeated: RepeatedTokens, lang: str) -> str:
    """Return a line with the number and the contents of the texts of repeated random tokens."""
    values = {"draws": len(next(iter(repeated.shares.values()))), "times": repeated.times, "length": repeated.length}
    if not repeated.start:
        return text("look.textbook.title without start", lang, **values)
    token = escape_controls(repeated.start_token)
    start = text("look.textbook.start", lang, token=token) if token else text("look.textbook.a start", lang)
    return text("look.textbook.title", lang, start=start, **values)


def print_memory_and_files(page: ReportSummary, record_file: str | None, memory: MemoryUse, lang: str) -> None:
    """Print the memory used, the files written, and how to see more."""
    from multihead.cli.console import open_console, print_sentence

    console = open_console()
    if memory.weights >= MEMORY_REPORT_THRESHOLD and memory.peak is not None:
        sizes = {name: _readable_size(getattr(memory, name)) for name in ("peak", "kept", "weights")}
        click.echo()
        print_sentence(console, text("look.memory", lang, **sizes))
    click.echo("\n" + text("look.page", lang, page=page))
    if record_file is not None:
        size = _readable_size(Path(record_file).stat().st_size)
        click.echo(
            text(
                "look.record", lang, file=escape_controls(record_file), size=size, quoted=_quoted_for_shell(record_file)
            )
        )
    elif page.mode != "whole":
        print_sentence(console, text("look.more", lang))


def _quoted_for_shell(file: str) -> str:
    """Quote a file's name for a shell; a name with control characters becomes $'...' with escapes."""
    shown = escape_controls(file.replace("\\", "\\\\").replace("'", "\\'"))
    return shlex.quote(file) if escape_controls(file) == file else f"$'{shown}'"


def _readable_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _table_of_heads(
    rows: Sequence[Mapping[str, Any]], width: int, kinds: Sequence[Kind], lang: str, *, sort: str = "layer"
) -> Any:
    """Return a rich table: one row per head, with its kind and the mean of each statistic that fits into `width`."""
    from rich.cells import cell_len

    from multihead.cli.console import NARROW_TERMINAL_WIDTH, empty_table
    from multihead.record.table import CHANCE_SUFFIX

    has_roles = any("role" in row for row in rows)
    words = []
    for row in rows:
        named = cell_of_kinds(row["kind"].split("+"), kinds, lang)
        if row.get("alignment"):
            named = text("look.and alignment", lang, kind=named, alignment=text("common.alignment", lang))
        role = [_name_of_role(row["role"], lang)] if has_roles else []
        words.append([f"L{row['layer']} H{row['head']}", *role, named])
    headings = [text(f"look.{name}", lang) for name in (("head", "role", "kind") if has_roles else ("head", "kind"))]
    gap = 1 if width < NARROW_TERMINAL_WIDTH else 2
    *fixed, kind = [max(map(cell_len, cells)) for cells in zip(headings, *words, strict=True)]
    fixed[0] = max(fixed[0], cell_len(text("look.chance", lang)))
    taken = sum(fixed) + min(kind, width // 3) + len(fixed) * gap
    shown = _statistics_fitting_width(rows, width - taken, gap, lang, sort)
    drawn = empty_table(gap)
    for heading in headings:
        drawn.add_column(heading + "\n", no_wrap=heading != headings[-1], overflow="fold")
    for each in shown:
        drawn.add_column(_column_heading(each, lang), justify="right", no_wrap=True)
    for row, cells in zip(rows, words, strict=True):
        drawn.add_row(*cells, *[each.number(row[each.name]) if each.name in row else "" for each in shown])
    chances: dict[tuple[str, ...], set[str]] = {}  # layers with different masks have different chance levels
    for row in rows:
        numbers = [each.number(row.get(each.name + CHANCE_SUFFIX)) for each in shown]
        level = tuple("" if number == "-" else number for number in numbers)
        chances.setdefault(level, set()).add(row.get("role", ""))
    drawn.add_section()
    for level, roles in [*chances.items()][:MAX_CHANCE_ROWS]:
        role = [_name_of_role("".join(roles) if len(roles) == 1 else "", lang)] if has_roles else []
        drawn.add_row(text("look.chance", lang), *role, "", *level)
    return drawn


def _statistics_fitting_width(
    rows: Sequence[Mapping[str, Any]], width: int, gap: int, lang: str, sort: str
) -> list[Statistic]:
    """Return the statistics whose columns fit into `width`, a `gap` before each; the sort column is never dropped."""
    from rich.cells import cell_len

    from multihead.probes.catalogue import REPEAT_PROBES, statistic
    from multihead.probes.choices import TERMINAL_COLUMNS, TERMINAL_DROP_ORDER
    from multihead.record.table import CHANCE_SUFFIX

    on_repeats = [statistic(sort)] if sort in REPEAT_PROBES else []  # what --textbook measures is a column only then
    shown = [each for each in (*TERMINAL_COLUMNS, *on_repeats) if any(each.name in row for row in rows)]
    widths = {
        each.name: gap
        + max(
            *map(cell_len, _column_heading(each, lang).splitlines()),
            *(
                len(each.number(row[name]))
                for row in rows
                for name in (each.name, each.name + CHANCE_SUFFIX)
                if name in row
            ),
        )
        for each in shown
    }
    for each in TERMINAL_DROP_ORDER:
        if sum(widths.values()) > width and each.name != sort:
            widths.pop(each.name, None)
    return [each for each in shown if each.name in widths]


def _name_of_role(role: str, lang: str) -> str:
    return text("look.cross", lang) if role == "cross" else text(f"common.role.{role}", lang) if role else ""


def cell_of_kinds(names: Sequence[str], kinds: Sequence[Kind], lang: str) -> str:
    """Return e.g. "induction* +1": the first kind, "*" if measured on repeated tokens, and how many more kinds."""
    from multihead.kinds import kinds_by_name

    first = kinds_by_name(kinds)[names[0]]
    name = escape_controls(first.label(lang))
    if first.texts == "repeats" and first.probe is not None:
        name = short_statistic_label(first.probe.name, lang, first.probe.label) + "*"
    return name + (f" +{len(names) - 1}" if len(names) > 1 else "")


def _column_heading(shown: Statistic, lang: str) -> str:
    """Return the heading of a column in two lines: the short label and the unit, or the label split into two."""
    from multihead.probes.catalogue import REPEAT_PROBES

    on_repeats = shown.name in REPEAT_PROBES
    shown = REPEAT_PROBES.get(shown.name, shown)
    label = short_statistic_label(shown.name, lang, shown.short_label) + ("*" if on_repeats else "")
    return f"{label}\n{unit_label(shown.unit, lang)}" if shown.unit else label.replace(" ", "\n", 1)


def _count_layers_and_heads(record: Record, lang: str) -> str:
    layers, heads = len(record.layers), [layer.num_heads for layer in record.layers]
    if len(set(heads)) > 1:
        return text("look.heads in layers", lang, heads=sum(heads), layers=layers)
    if layers == 1:
        return text("look.1 layer of heads", lang, heads=heads[0])
    return text("look.layers of heads", lang, layers=layers, heads=heads[0])
