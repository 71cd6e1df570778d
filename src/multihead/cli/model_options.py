"""Options that commands share, options that are given once, and surplus arguments."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from multihead.errors import InputError
from multihead.files import read_text_file

MAX_QUOTED_CHARACTERS = 60  # characters of a text in an error

_LAYERS_OPTION = click.option(
    "--layers",
    metavar="N,N-N,...",
    callback=lambda _context, _option, given: None if given is None else parse_layers(given),
    help="Only these layers, counted from 0.  [default: all]",
)
_DEVICE_AND_DTYPE_OPTIONS = (
    click.option("--device", default="cpu", show_default=True, help="The device that runs the model."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "float64", "float16", "bfloat16"]),
        default="auto",
        show_default=True,
        help="The dtype of its parameters; auto: as they were saved.",
    ),
)
_SERVER_OPTIONS = (
    click.option(
        "--port", type=click.IntRange(1, 65535), metavar="N", help="Port to listen on.  [default: a free one]"
    ),
    click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page in the browser."),
)


def _import_modules(_: click.Context, __: click.Parameter, modules: tuple[str, ...]) -> None:
    """Import the modules of --import by name, from the environment or the current folder."""
    if modules and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise InputError(
                f"There is no module {module!r}: {error}.",
                "Give --import the name of a module in this folder or in the environment, such as my_masks.",
            ) from error


import_option = click.option(
    "--import",
    multiple=True,
    metavar="MODULE",
    expose_value=False,
    callback=_import_modules,
    help="Import a module first, such as the one that defines a mask of the record; may be repeated.",
)
"""Adds --import to a command; the modules are imported before the command runs."""


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --port and --browser to a command."""
    return add_options(command, _SERVER_OPTIONS)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layers, which becomes a list of numbers, --device and --dtype to a command."""
    return _LAYERS_OPTION(device_options(command))


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --device and --dtype to a command."""
    return add_options(command, _DEVICE_AND_DTYPE_OPTIONS)


def add_options(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Add options to a command, which `--help` lists in their order."""
    for option in reversed(options):
        command = option(command)
    return command


def given_as(kind: type[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a command: it receives the options that are fields of a dataclass as one value, `given`."""

    def with_value(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def run(*arguments: Any, **options: Any) -> Any:
            given = kind(**{each.name: options.pop(each.name) for each in fields(kind)})
            return command(*arguments, given=given, **options)

        return run

    return with_value


def text_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --text and --prompt to a command, as `files` and `prompts`; both may be repeated."""
    return add_options(
        command,
        (
            click.option(
                "--text",
                "files",
                multiple=True,
                metavar="FILE",
                help="Read this text file (UTF-8); - reads standard input. May be repeated.",
            ),
            click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Read this text. May be repeated."),
        ),
    )


def read_texts(files: Sequence[str], prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the name and the contents of each text of `text_options`, those of files first.

    Raises:
        InputError: a file cannot be read.
    """
    return [
        *((file, read_text_file(file)) for file in files),
        *((" ".join(prompt.split()), prompt) for prompt in prompts),
    ]


def option_given_once(*names: str, metavar: str, description: str) -> Callable[[Any], Any]:
    """Return a decorator that adds an option with one value; of several, click alone would take the last."""
    return click.option(*names, multiple=True, callback=_check_given_once, metavar=metavar, help=description)


def _check_given_once(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the value of an option, or None; reject several values."""
    if len(values) > 1:
        raise click.UsageError(
            f"{option.opts[0]} is given {len(values)} times, and `multihead {context.info_name}` takes one. Give one; "
            "`multihead look` and `multihead ablate` read several texts, and `multihead census` counts over many."
        )
    return values[0] if values else None


def check_no_surplus(arguments: Sequence[str]) -> None:
    """Reject what follows MODEL without an option, which is a text or the name of a file.

    Raises:
        UsageError: there are `arguments`; the error names the options for them.
    """
    if arguments:
        given = shlex.quote(shorten(" ".join(arguments), MAX_QUOTED_CHARACTERS, placeholder=" …"))
        raise click.UsageError(
            f"{given} stands after MODEL without an option. Give a text as --prompt {given}, and a file as --text FILE."
        )


def split_list(given: str) -> list[str]:
    """Split a list at its commas, of which a Chinese keyboard types wide ones."""
    return given.replace("，", ",").split(",")


def parse_layers(layers: str) -> list[int]:
    """Parse layer numbers and ranges, such as "0,3-5".

    >>> parse_layers("0,3-5")
    [0, 3, 4, 5]

    Raises:
        UsageError: `layers` is not a list of numbers and ranges.
    """
    found: list[int] = []
    for part in split_list(layers):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise click.UsageError(f"--layers is {layers!r}. Give layer numbers such as 0,3-5.")
        found += range(int(first), int(last or first) + 1)
    return found
