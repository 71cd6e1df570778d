"""Options shared by commands that run a model: --layers, --device and --dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = (
    click.option("--layers", metavar="N,N-N,...", help="Only these layers, counted from 0.  [default: all]"),
    click.option("--device", default="cpu", show_default=True, help="The device that runs the model."),
    click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "float64", "float16", "bfloat16"]),
        default="auto",
        show_default=True,
        help="The dtype of its parameters; auto: as they were saved.",
    ),
)


def model_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --layers, --device and --dtype to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def parse_layers(layers: str) -> list[int]:
    """Parse layer numbers and ranges, such as "0,3-5".

    >>> parse_layers("0,3-5")
    [0, 3, 4, 5]

    Raises:
        UsageError: `layers` is not a list of numbers and ranges.
    """
    found: list[int] = []
    for part in layers.replace("，", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not (last.isdigit() and int(first) <= int(last))):
            raise click.UsageError(f"--layers is {layers!r}. Give layer numbers such as 0,3-5.")
        found += range(int(first), int(last or first) + 1)
    return found
