"""Look up the texts of pages and commands by language and key.

`en.json` and `zh.json` next to this file have the same keys with the same placeholders; another package may have such
files too, such as `multihead_lab.locale`. The first level of a file is the page or the command that uses a text;
`common` is for all of them, and `page` for the report and the viewer. A key joins the names of the levels with dots:
`look.doing.watching`. Labels and units of statistics are only in `zh.json`: the English ones come from their
definitions (`probes.catalogue`).

A page gets its sections of the texts as JSON in a script tag, so a page in one file stays one file, and a served page
needs no further request. Errors and the output of `doctor` stay English, because people search for them and paste them
into reports.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from multihead.errors import ArgumentError

__all__ = ["LANGUAGES", "check_language", "section", "short_statistic_label", "statistic_label", "text", "unit_label"]

LANGUAGES = ("en", "zh")


def check_language(lang: str) -> None:
    """Reject a language that is not one of `LANGUAGES`."""
    if lang not in LANGUAGES:
        languages = " or ".join(f'"{each}"' for each in LANGUAGES)
        raise ArgumentError(f'lang is "{lang}", and must be {languages}.', f"Give {languages}.")


def text(key: str, lang: str, /, **values: object) -> str:
    """Return a text with its placeholders filled in.

    `key` is the page or command and the name of the text, joined by dots. Raises KeyError if there is no such text, or
    a value for a placeholder is missing.

    >>> text("look.tokens", "en", n=3), text("look.tokens", "zh", n=3)
    ('3 tokens', '3 个词元')
    """
    return _texts_in_language(lang)[key].format(**values)


@cache
def section(lang: str, *names: str, store: str = __package__) -> Mapping[str, str]:
    """Return all texts of some pages or commands by key, without the page's name in the key.

    Args:
        lang: "en" or "zh".
        names: names of the pages or commands.
        store: package that contains `en.json` and `zh.json`.

    >>> section("en", "common", "look")["audio"]
    'audio'
    """
    return {
        key.removeprefix(f"{name}."): sentence
        for name in names
        for key, sentence in _texts_in_language(lang, store).items()
        if key.startswith(f"{name}.")
    }


def statistic_label(name: str, lang: str, default: str) -> str:
    """Return the translated label of a statistic; `default` in English and for a user-defined statistic.

    >>> statistic_label("entropy", "zh", "entropy"), statistic_label("late_mass", "zh", "late")
    ('熵', 'late')
    """
    return text_or(f"common.statistic.{name}", lang, default)


def text_or(key: str, lang: str, default: str) -> str:
    """Return a text in a language; `default` where there is none."""
    return _texts_in_language(lang).get(key, default)


def short_statistic_label(name: str, lang: str, default: str) -> str:
    """Return the translated short label of a statistic, for a narrow column; `default` where there is none."""
    return text_or(f"common.short statistic.{name}", lang, default)


def unit_label(unit: str, lang: str) -> str:
    """Return the translation of a unit; the unit itself if there is none."""
    return text_or(f"common.unit.{unit}", lang, unit)


@cache
def _texts_in_language(lang: str, store: str = __package__) -> dict[str, str]:
    check_language(lang)
    return dict(_flatten_keys(json.loads((resources.files(store) / f"{lang}.json").read_text("utf-8"))))


def _flatten_keys(texts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in texts.items():
        if isinstance(value, str):
            yield prefix + name, value
        else:
            yield from _flatten_keys(value, f"{prefix}{name}.")
