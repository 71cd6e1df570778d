"""Parse and check the query parameters in an address of the viewer."""

from __future__ import annotations

import re

from multihead.errors import ArgumentError, MultiheadError

_MAX_DIGITS = 12


class NotFoundError(MultiheadError):
    """The requested record, head, page or file does not exist (HTTP status 404)."""


class NotReadyError(MultiheadError):
    """The requested map level is still being built (HTTP status 503); retry later."""


def parse_number(name: str, text: str | None, *, below: int, minimum: int = 0, default: int | None = None) -> int:
    """Parse a whole number from `minimum` up to, not including, `below`.

    Args:
        name: the name of the parameter in errors.
        text: the value in the address; None if it is missing.
        below: the end of the range, exclusive.
        minimum: the smallest number.
        default: the result if text is None; without a default, text must not be None.

    Raises:
        ArgumentError: text is missing or is not a whole number.
        NotFoundError: the number is outside the range.

    >>> parse_number("layer", "3", below=6)
    3
    """
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(rf"[0-9]{{1,{_MAX_DIGITS}}}", text):
        problem = "is missing" if text is None else f"is {_quote_truncated(text)}"
        raise ArgumentError(
            f"The {name} {problem}.", f"Give a whole number from {minimum} to {max(below - 1, minimum)}."
        )
    if not minimum <= int(text) < below:
        raise NotFoundError(
            f"There is no {name} {int(text)}.", f"Give a number from {minimum} to {max(below - 1, minimum)}."
        )
    return int(text)


def parse_range(name: str, text: str | None, length: int) -> slice:
    """Parse a range `start:stop` as in Python; a missing number is the start or the end, None is everything.

    Raises:
        ArgumentError: the text is not a range, or the range is empty or extends beyond `length`.

    >>> parse_range("queries", "2:5", 10), parse_range("queries", "2:", 10), parse_range("queries", None, 10)
    (slice(2, 5, None), slice(2, 10, None), slice(0, 10, None))
    """
    found = re.fullmatch(rf"([0-9]{{0,{_MAX_DIGITS}}}):([0-9]{{0,{_MAX_DIGITS}}})", ":" if text is None else text)
    if found is None:
        raise ArgumentError(
            f"The {name} are {_quote_truncated(text or '')}.",
            f"Give the first and the one after the last with a colon between them, such as 0:{length}.",
        )
    start, stop = int(found[1] or 0), int(found[2] or length)
    if not start < stop <= length:
        raise ArgumentError(f"The {name} are {start}:{stop}, of {length}.", f"Give a part of 0:{length}.")
    return slice(start, stop)


def parse_flag(name: str, text: str | None, *, default: bool) -> bool:
    """Parse "1" as True and "0" as False; return the default for None.

    Raises:
        ArgumentError: the text is neither 1 nor 0.
    """
    if text not in (None, "0", "1"):
        raise ArgumentError(f"{name} is {_quote_truncated(text)}.", "Give 1 or 0.")
    return default if text is None else text == "1"


def _quote_truncated(text: str | None) -> str:
    """Quote a value, truncated if it is long."""
    shown = text or ""
    return repr(shown if len(shown) <= 40 else f"{shown[:39]}…")
