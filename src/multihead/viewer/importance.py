"""Describe for a page which heads matter: the numbers of heads that were measured apart from the record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from multihead.locale.escaping import escape_controls
from multihead.locale.texts import text
from multihead.probes.head_statistic import HEAD_NUMBERS, HeadStatistic, HeadsTogether
from multihead.record.head_numbers import NumbersOverTexts, standard_error
from multihead.viewer.page import round_all_for_json
from multihead.viewer.page_types import HeadNumbers, OffTogetherDescription

if TYPE_CHECKING:
    from multihead.observation.record import Record

MOST_IMPORTANT = 10
"""Number of heads that are listed as those that matter most."""

SHARES = ("recovered", "lost")  # of pairs of texts


def describe_head_numbers(record: Record, lang: str) -> list[HeadNumbers]:
    """Describe the numbers of heads that `Record.add` has added, exact effects first; [] if there are none."""
    names = dict.fromkeys(name for layer in record.layers for name in layer.numbers)
    known = [each for each in map(record.statistic, names) if isinstance(each, HeadStatistic)]
    return [_describe(record, each, lang) for each in sorted(known, key=lambda each: HEAD_NUMBERS.index(each.what))]


def _describe(record: Record, shown: HeadStatistic, lang: str) -> HeadNumbers:
    """Describe one number of each head."""
    measured = [layer.numbers.get(shown.name) for layer in record.layers]
    texts = max(len(values) for values in measured if values is not None)
    numbers = NumbersOverTexts(
        [
            torch.full((texts, layer.num_heads), torch.nan, dtype=torch.float64) if values is None else values
            for layer, values in zip(record.layers, measured, strict=True)
        ]
    )
    words = {key: escape_controls(value) for key, value in shown.words(lang).items()}
    within = torch.cat(numbers.within_errors).tolist() if texts > 1 and shown.has_sign else []
    return {
        "id": shown.name,
        "name": text(f"viewer.important.name.{shown.what}", lang),
        "of": text("viewer.important.of", lang, **words),
        "most": text(f"viewer.important.most.{shown.what}", lang),
        "sentence": _sentence(shown, numbers, lang),
        "about": text(f"viewer.important.about.{shown.what}", lang, **words),
        "note": text("common.join.sentences", lang).join(
            [
                text(f"viewer.important.above.{_meaning(shown)}", lang),
                *([text("viewer.important.hatched", lang)] if within else []),
                *(
                    [text(f"viewer.important.one {'pair' if shown.what in SHARES else 'text'}", lang)]
                    if texts == 1
                    else []
                ),
            ]
        ),
        "errors": round_all_for_json(torch.cat(numbers.errors)) if texts > 1 else [],
        "within": within,
        "order": most_important(torch.cat(numbers.means), shown),
        "together": None if shown.together is None else _describe_together(record, shown, shown.together, lang),
    }


def _sentence(shown: HeadStatistic, numbers: NumbersOverTexts, lang: str) -> str:
    """Return how many heads are beyond chance; of estimates also that they are estimates."""
    if not shown.has_sign:
        return text("viewer.important.unsigned", lang, texts=numbers.texts, heads=numbers.num_heads)
    if shown.what in SHARES:
        return numbers.describe(lang, pairs=True) if numbers.num_heads else text("viewer.important.no gap", lang)
    return numbers.describe(lang) + (text("importance.gradient", lang) if shown.what == "estimate" else "")


def _meaning(shown: HeadStatistic) -> str:
    """Return which text says what a number above 0 means."""
    if shown.what in ("effect", "estimate"):
        return shown.better or "neither"
    return shown.what


def most_important(means: Tensor, shown: HeadStatistic) -> list[int]:
    """Return the heads that matter most, the most important first: those without which the measure is worst."""
    order = shown.importance_of(means).nan_to_num(-torch.inf).argsort(descending=True, stable=True).tolist()
    return order[: min(MOST_IMPORTANT, int(means.isfinite().sum()))]


def _describe_together(
    record: Record, shown: HeadStatistic, together: HeadsTogether, lang: str
) -> OffTogetherDescription:
    """Describe what some heads do when all of them are off, next to the sum of their effects and to random heads."""
    heads = [(layer.number, head) for layer in record.layers for head in range(layer.num_heads)]
    singles = "estimates" if shown.what == "estimate" else "singles"
    rows = [("together", together.effects), (singles, together.singles), ("draws", together.draws)]
    return {
        "sentence": text("viewer.important.together.about", lang, n=len(together.heads), texts=len(together.effects)),
        "heads": [heads.index(head) for head in together.heads if head in heads],
        "rows": [
            (
                text(f"viewer.important.together.{name}", lang, n=len(values)),
                *_mean_and_error(values, is_spread=name == "draws"),
            )
            for name, values in rows
            if values
        ],
    }


def _mean_and_error(values: Sequence[float], *, is_spread: bool) -> tuple[float, float | None]:
    """Return the mean of some numbers and its standard error, or their standard deviation; None for one number."""
    numbers = torch.tensor(values, dtype=torch.float64)
    error = None if len(numbers) < 2 else float(numbers.std() if is_spread else standard_error(numbers))
    return float(numbers.mean()), error
