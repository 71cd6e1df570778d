"""A statistic and how it is shown; a probe, which is a statistic with the function that computes it.

How a statistic is shown is a value of its own, `Statistic`: name, label, unit, number format. A record stores the
`Statistic` of each probe that is not built in, so that a file is shown completely without the script; a file cannot
relabel a built-in one. There are three number formats (`"share"`, `".2f"`, `".3g"`), since Python and JavaScript must
print the same digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cached_property
from operator import itemgetter
from typing import Literal, TypeAlias

from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.parts import Part, check_part

Parts: TypeAlias = Mapping[Part, Tensor]
"""Part -> what was measured; see `multihead.kernels.parts.PARTS` and `PART_FAMILIES`."""

Need = Literal["special_keys", "ids", "sets", "output_weight", "values", "sinks"]
Axes = Literal["queries", "keys", "map"]

SHARE = "share"
TEN_PERCENT = 0.0995  # written as 9.9 %; from here on a share is written without a decimal
_NUMBER_FORMAT = re.compile(r"share|\.[0-9]f|\.[1-9]g", re.ASCII)
_COUNTED = re.compile(r"all|repeated|offset [+-][0-9]{1,9}", re.ASCII)
_COLUMNS = ("layer", "head", "name", "kind", "of")  # no names of statistics: columns, and an option of `Record.find`
_NEEDS: dict[str, tuple[Need, ...]] = {
    "sink_mass": ("sinks",),
    "duplicate_mass": ("ids",),
    "induction_mass": ("ids",),
    "contribution": ("values", "output_weight"),
    "output_norm": ("values", "output_weight"),
}
_AXES: dict[Part, Axes] = {"received": "keys", "pooled_map": "map"}


@dataclass(frozen=True)
class Statistic:
    """One statistic of a head and how its numbers are shown. A record stores it for those that are not built in.

    Attributes:
        name: its key in results, records and files.
        label: its heading; the name with spaces if it is left out.
        unit: the unit after the number or in the heading: "nats", "tokens", "%"; "" for none.
        number_format: how a number is written: "share" (0.123 -> 12 %, one decimal below ten percent), ".2f" (two
            decimals) or ".3g" (three significant digits, no exponent).
        short_label: the label for columns of few characters; the label if it is left out.
        counted: which queries count in a mean or another summary, of those that see a key: "all"; "offset -2", those
            whose text has a key at that offset from the query; "repeated", those whose token occurred before.

    Raises:
        ArgumentError: a field of another type, an unknown number format or rule of counting, or a share with a unit
            other than "%".

    >>> first = Statistic("first_mass", label="first", number_format="share")
    >>> first.heading, first.number(0.0931), first.text(0.41)
    ('first (%)', '9.3', '41 %')
    >>> Statistic("output_norm").heading, Statistic("output_norm").number(1234.5)
    ('output norm', '1230')
    """

    name: str
    label: str = field(default="", kw_only=True, repr=False)
    unit: str = field(default="", kw_only=True, repr=False)
    number_format: str = field(default=".3g", kw_only=True, repr=False)
    short_label: str = field(default="", kw_only=True, repr=False)
    counted: str = field(default="all", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        for each in ("name", "label", "unit", "number_format", "short_label", "counted"):
            value = getattr(self, each)
            if not isinstance(value, str):
                raise ArgumentError(f"The {each} of a statistic is {value!r}.", "Give a string.")
        if not _NUMBER_FORMAT.fullmatch(self.number_format):
            raise ArgumentError(
                f"The number format of {self.name} is {self.number_format!r}.",
                'Give "share", a number of decimals such as ".2f", or of significant digits such as ".3g".',
            )
        if not _COUNTED.fullmatch(self.counted):
            raise ArgumentError(
                f"The queries counted for {self.name} are {self.counted!r}.",
                'Give "all", "repeated", or an offset such as "offset -2".',
            )
        if self.number_format == SHARE and self.unit not in ("", "%"):
            raise ArgumentError(
                f"{self.name} is written as a share, and its unit is {self.unit!r}.",
                'Leave the unit out (it is "%"), or choose another number format, such as ".2f".',
            )
        if self.number_format == SHARE:
            object.__setattr__(self, "unit", "%")
        object.__setattr__(self, "label", self.label or self.name.replace("_", " ").strip())
        object.__setattr__(self, "short_label", self.short_label or self.label)

    def shown(self) -> Statistic:
        """Return the statistic alone, which another process can load."""
        return self

    @property
    def heading(self) -> str:
        """The label with the unit: "entropy (nats)"."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def number(self, value: float | None) -> str:
        """Write a number without its unit; "-" for none and for NaN.

        >>> Statistic("spread", number_format=".1f").number(3.14159)
        '3.1'
        """
        if value is None or math.isnan(value):
            return "-"
        if math.isinf(value):
            return str(value)
        if self.number_format == SHARE:
            return f"{100 * value:.{int(abs(value) < TEN_PERCENT)}f}"
        if self.number_format.endswith("g"):
            return format(Decimal(format(value, self.number_format)), "f")
        return format(value, self.number_format)

    def text(self, value: float | None) -> str:
        """Write a number with its unit: "1.25 nats"."""
        number = self.number(value)
        return f"{number} {self.unit}" if self.unit and number != "-" else number

    def display(self) -> dict[str, str]:
        """Return what a file or a page needs to show it: field name -> text, without the name."""
        shown = (each.name for each in fields(Statistic) if each.name not in ("name", "counted"))
        return {name: getattr(self, name) for name in shown}


@dataclass(frozen=True)
class Probe(Statistic):
    """A statistic and how it is computed from measured parts.

    Two probes are equal if all but `of` and `about` are equal.

    Attributes:
        of: computes the statistic from its parts. A query's number may depend on this query's parts alone, since a
            batch, packed texts and the steps of a decoding arrive in different pieces.
        parts: the set of parts that it needs, of those in `multihead.kernels.parts`.
        tokens: the token ids of its `tokens_mass` part; None if the context has the set, or nothing is counted.
        source: the paper and equation.
        default: whether it is computed if no probes are chosen.
        chance: whether what an even spread over the visible keys gives is shown next to it, if it has a number per
            query: False for what is no matter of where a query looks, such as the norm of an output.
        about: the definition in a line.

    Raises:
        ArgumentError: the name is no identifier or is a column of every table, or a part is unknown or of
            another shape than the others.

    >>> OWN = ("offset_mass", 0)
    >>> other = Probe("other_mass", lambda parts: 1 - parts[OWN], {OWN}, label="other keys", number_format="share")
    >>> other.heading, other.needs, other.axes
    ('other keys (%)', frozenset(), 'queries')
    """

    of: Callable[[Parts], Tensor] = field(compare=False, repr=False)
    parts: Set[Part] = field(repr=False)
    tokens: frozenset[int] | None = field(default=None, kw_only=True, repr=False)
    source: str = field(default="", kw_only=True, repr=False)
    default: bool = field(default=False, kw_only=True, repr=False)
    chance: bool = field(default=True, kw_only=True, repr=False)
    about: str = field(default="", kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier() or self.name in _COLUMNS:
            raise ArgumentError(
                f"A probe is called {self.name!r}.",
                f'Give a Python identifier other than {", ".join(_COLUMNS)}, such as "late_mass".',
            )
        if not callable(self.of):
            raise ArgumentError(
                f"The function of {self.name} is {self.of!r}.",
                'Give one, such as lambda parts: parts["entropy"].exp().',
            )
        object.__setattr__(self, "parts", _checked_parts(self.name, self.parts))
        if len({_AXES.get(part, "queries") for part in self.parts}) > 1:
            raise ArgumentError(
                f"The parts of {self.name} have different shapes.",
                'Combine parts with a number per query, or take "received" or "pooled_map" alone.',
            )

    @cached_property
    def axes(self) -> Axes:
        """Whether there is a number per query, a number per key, or a map per head."""
        return _AXES.get(next(iter(self.parts)), "queries")

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What must be known besides q and k."""
        found: set[Need] = set()
        for part in self.parts:
            if part == ("tokens_mass", "special"):
                found.add("special_keys")
            elif part[0] == "tokens_mass":
                found.add("sets" if self.tokens is None else "ids")
            elif isinstance(part, str):
                found.update(_NEEDS.get(part, ()))
        return frozenset(found)

    @property
    def only_part(self) -> Part | None:
        """The one part that the statistic equals; None where it is computed from parts."""
        return next(iter(self.parts)) if isinstance(self.of, itemgetter) and len(self.parts) == 1 else None

    def shown(self) -> Statistic:
        """Return the statistic as another process can load it: without its function, unless it equals one part."""
        if self.only_part is not None:
            return self
        return Statistic(self.name, **self.display(), counted=self.counted)


def _checked_parts(name: str, parts: object) -> frozenset[Part]:
    """Return the parts of a probe as a frozenset, and reject anything else than known parts."""
    if not isinstance(parts, Set) or not parts:
        raise ArgumentError(f"The parts of {name} are {parts!r}.", 'Give a set of at least one, such as {"entropy"}.')
    for part in parts:
        check_part(part)
    return frozenset(parts)
