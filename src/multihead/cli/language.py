"""The option --lang of the commands, whose default is the language of the locale."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import click

from multihead.locale.texts import LANGUAGES

LOCALE_VARIABLES = ("LC_ALL", "LC_MESSAGES", "LANG")  # the first that is set decides, as in POSIX


def language_of_locale() -> str:
    """Return the language of the locale's messages if the commands have it, else English."""
    locale = next((value for name in LOCALE_VARIABLES if (value := os.environ.get(name))), "")
    return next((each for each in LANGUAGES if locale.lower().startswith(each)), LANGUAGES[0])


def lang_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --lang to a command."""
    return click.option(
        "--lang",
        type=click.Choice(LANGUAGES),
        default=language_of_locale,
        show_default="that of the locale, else en",
        help="Language of the output and of pages.",
    )(command)
