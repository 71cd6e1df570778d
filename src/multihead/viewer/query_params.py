"""Read the numbers of an address, and say in words what is wrong with one."""

from __future__ import annotations

import re

from multihead.errors import ArgumentError, MultiheadError

_MOST_DIGITS = 12


class AbsentError(MultiheadError):
    """What was asked for is not there."""


class LaterError(MultiheadError):
    """What was asked for is being made."""


def number(name: str, text: str | None, *, below: int, least: int = 0, default: int | None = None) -> int:
    """Read a number from a least one, 0 unless said, to one below another.

    Raises:
        ArgumentError: it is no whole number.
        AbsentError: it is beyond the last.

    >>> number("layer", "3", below=6)
    3
    """
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(rf"[0-9]{{1,{_MOST_DIGITS}}}", text):
        given = "is missing" if text is None else f"is {_short(text)}"
        raise ArgumentError(f"The {name} {given}.", f"Give a whole number from {least} to {max(below - 1, least)}.")
    if not least <= int(text) < below:
        raise AbsentError(f"There is no {name} {int(text)}.", f"Give a number from {least} to {max(below - 1, least)}.")
    return int(text)


def span(name: str, text: str | None, length: int) -> slice:
    """Read two numbers with a colon between them: from the first on, up to the second; without either, to the end.

    Raises:
        ArgumentError: it is none, or empty, or goes beyond the end.

    >>> span("queries", "2:5", 10), span("queries", "2:", 10), span("queries", None, 10)
    (slice(2, 5, None), slice(2, 10, None), slice(0, 10, None))
    """
    found = re.fullmatch(rf"([0-9]{{0,{_MOST_DIGITS}}}):([0-9]{{0,{_MOST_DIGITS}}})", ":" if text is None else text)
    if found is None:
        raise ArgumentError(
            f"The {name} are {_short(text or '')}.",
            f"Give the first and the one behind the last with a colon between them, such as 0:{length}.",
        )
    first, behind = int(found[1] or 0), int(found[2] or length)
    if not first < behind <= length:
        raise ArgumentError(f"The {name} are {first}:{behind}, of {length}.", f"Give a part of 0:{length}.")
    return slice(first, behind)


def flag(name: str, text: str | None, *, default: bool) -> bool:
    """Read 1 or 0.

    Raises:
        ArgumentError: it is neither.
    """
    if text not in (None, "0", "1"):
        raise ArgumentError(f"{name} is {_short(text)}.", "Give 1 or 0.")
    return default if text is None else text == "1"


def _short(text: str | None) -> str:
    """Quote what was given, cut if it is long."""
    shown = text or ""
    return repr(shown if len(shown) <= 40 else f"{shown[:39]}…")
