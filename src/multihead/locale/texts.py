"""Look up the texts of pages and commands by language and key.

`en.json` and `zh.json` next to this file hold the same keys with the same placeholders. Their first level is the page
or the command that uses a text; `common` is for all of them, and `page` for the report and the viewer. A key joins the
names of the levels with dots: `look.doing.watching`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

from multihead.errors import ArgumentError

__all__ = ["LANGUAGES", "check_language", "section", "statistic_label", "text"]

LANGUAGES = ("en", "zh")


def check_language(lang: str) -> None:
    """Reject a language that has no texts.

    Raises:
        ArgumentError: lang is not one of `LANGUAGES`.
    """
    if lang not in LANGUAGES:
        languages = " or ".join(f'"{each}"' for each in LANGUAGES)
        raise ArgumentError(f'lang is "{lang}", and there are texts in {languages}.', f"Give {languages}.")


def text(key: str, lang: str, /, **values: object) -> str:
    """Return a text with its placeholders filled in.

    Args:
        key: the page or command and the name of the text, such as "look.tokens".
        lang: one of `LANGUAGES`.
        **values: a value for each placeholder.

    Raises:
        ArgumentError: there are no texts in this language.
        KeyError: there is no such text, or a value is missing.

    >>> text("look.tokens", "en", n=3), text("look.tokens", "zh", n=3)
    ('3 tokens', '3 个词元')
    """
    return _texts(lang)[key].format(**values)


@cache
def section(lang: str, *names: str) -> Mapping[str, str]:
    """Return all texts of some pages or commands, by key without the name of the page.

    >>> section("en", "common", "look")["kind.first"]
    'first token'
    """
    return {
        key.removeprefix(f"{name}."): sentence
        for name in names
        for key, sentence in _texts(lang).items()
        if key.startswith(f"{name}.")
    }


def statistic_label(name: str, lang: str, default: str) -> str:
    """Return what a statistic is called in a language; a statistic defined outside this package keeps its own label.

    Args:
        name: the name of the statistic, such as "previous_mass".
        lang: one of `LANGUAGES`.
        default: the label where there is none in this language.
    """
    return _texts(lang).get(f"common.statistic.{name}", default)


@cache
def _texts(lang: str) -> dict[str, str]:
    check_language(lang)
    return dict(_flat(json.loads((resources.files(__package__) / f"{lang}.json").read_text("utf-8"))))


def _flat(texts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in texts.items():
        if isinstance(value, str):
            yield prefix + name, value
        else:
            yield from _flat(value, f"{prefix}{name}.")
