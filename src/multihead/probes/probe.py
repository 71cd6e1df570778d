"""`Statistic`: name, label, unit and number format of a statistic; `Probe`: a statistic and how it is computed.

A record stores the `Statistic` of each probe that is not built in, so that a file is shown completely without the
script; a file cannot relabel a built-in one. There are three number formats (`"share"`, `".2f"`, `".3g"`), since Python
and JavaScript must print the same digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import cached_property
from operator import itemgetter
from typing import TypeAlias, get_args

from torch import Tensor

from multihead.errors import ArgumentError
from multihead.kernels.parts import PARTS, PartAxes, PartInput, PartName, part_named
from multihead.locale.texts import statistic_label
from multihead.probes.function_identity import identity_of_function

PartValues: TypeAlias = Mapping[PartName, Tensor]
"""Name of a part (a measured statistic), such as "entropy" -> tensor; see `PARTS` in `multihead.kernels.parts`."""

SHARE_FORMAT = "share"
MIN_SHARE_WITHOUT_DECIMAL = 0.0995  # 9.95 %, from which shares are written without a decimal
_NUMBER_FORMAT_PATTERN = re.compile(r"share|\.[0-9]f|\.[1-9]g", re.ASCII)
_COUNTED_PATTERN = re.compile(r"all|repeated|placed|offset [+-][0-9]{1,9}", re.ASCII)
_OFFSET_RULE = "offset "  # beginning of `Statistic.counted`
_RESERVED_NAMES = ("layer", "head", "name", "kind", "of")  # columns of tables, and an option of `find`


@dataclass(frozen=True)
class Statistic:
    """A statistic of attention heads and how its numbers are shown. Records store it for user-defined statistics.

    Attributes:
        name: key in results, records and files.
        label: heading of a column; by default the name with spaces.
        unit: the unit after a number or in a heading: "nats", "tokens", "%"; "" for none.
        number_format: how a number is written: "share" (0.123 -> 12 %, one decimal below ten percent), ".2f" (two
            decimals) or ".3g" (three significant digits, no exponent).
        short_label: label for narrow columns; by default the label.
        counted: which queries with visible keys count in a mean or another summary: "all"; "offset -2", queries with
            a key at that offset in their text; "repeated", queries whose token occurred before; "placed", queries that
            come from a place in a picture.
        axes: what there is per head: "queries" (a number per query), "keys" (a number per key) or "map". Only numbers
            per query have a mean, a column in a table, and a chance level.

    Raises:
        ArgumentError: a field has the wrong type, `number_format`, `counted` or `axes` is unknown, or a share has a
            unit other than "%".

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
    axes: PartAxes = field(default="queries", kw_only=True, repr=False)

    def __post_init__(self) -> None:
        for each in ("name", "label", "unit", "number_format", "short_label", "counted", "axes"):
            value = getattr(self, each)
            if not isinstance(value, str):
                raise ArgumentError(f"The {each} of a statistic is {value!r}.", "Give a string.")
        if not _NUMBER_FORMAT_PATTERN.fullmatch(self.number_format):
            raise ArgumentError(
                f"The number format of {self.name} is {self.number_format!r}.",
                'Give "share", a number of decimals such as ".2f", or of significant digits such as ".3g".',
            )
        if not _COUNTED_PATTERN.fullmatch(self.counted):
            raise ArgumentError(
                f"The queries counted for {self.name} are {self.counted!r}.",
                'Give "all", "repeated", "placed", or an offset such as "offset -2".',
            )
        if self.axes not in get_args(PartAxes):
            raise ArgumentError(f"The axes of {self.name} are {self.axes!r}.", 'Give "queries", "keys" or "map".')
        if self.number_format == SHARE_FORMAT and self.unit not in ("", "%"):
            raise ArgumentError(
                f"{self.name} is written as a share, and its unit is {self.unit!r}.",
                'Leave the unit out (it is "%"), or choose another number format, such as ".2f".',
            )
        if self.number_format == SHARE_FORMAT:
            object.__setattr__(self, "unit", "%")
        object.__setattr__(self, "label", self.label or self.name.replace("_", " ").strip())
        object.__setattr__(self, "short_label", self.short_label or self.label)

    def without_function(self) -> Statistic:
        """Return the statistic without its function, so that another process can load it."""
        return self

    @property
    def has_mean(self) -> bool:
        """Whether the statistic has a number per query that can be averaged."""
        return self.axes == "queries"

    @property
    def counted_offset(self) -> int | None:
        """The offset at which the text of a query needs a key, so that the query counts; None if none is needed."""
        return int(self.counted.removeprefix(_OFFSET_RULE)) if self.counted.startswith(_OFFSET_RULE) else None

    def translated_label(self, lang: str) -> str:
        """Return the label in a language; a user-defined statistic keeps its own."""
        return statistic_label(self.name, lang, self.label)

    @property
    def heading(self) -> str:
        """The label with the unit: "entropy (nats)"."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def number(self, value: float | None) -> str:
        """Format a number without its unit; "-" for None and NaN.

        >>> Statistic("spread", number_format=".1f").number(3.14159)
        '3.1'
        """
        if value is None or math.isnan(value):
            return "-"
        if math.isinf(value):
            return str(value)
        if self.number_format == SHARE_FORMAT:
            return f"{100 * value:.{int(abs(value) < MIN_SHARE_WITHOUT_DECIMAL)}f}"
        if self.number_format.endswith("g"):
            return format(Decimal(format(value, self.number_format)), "f")
        return format(value, self.number_format)

    def text(self, value: float | None) -> str:
        """Format a number with its unit: "1.25 nats"."""
        number = self.number(value)
        return f"{number} {self.unit}" if self.unit and number != "-" else number

    def display(self) -> dict[str, str]:
        """Return the fields that a file or a page needs to show the statistic, except its name: field -> text."""
        shown = (each.name for each in fields(Statistic) if each.name not in ("name", "counted", "axes"))
        return {name: getattr(self, name) for name in shown}


@dataclass(frozen=True)
class Probe(Statistic):
    """A statistic and how it is computed from parts, the quantities that the kernels measure per query.

    Two probes are equal if all attributes except `about` are equal, and their functions compute the same, see
    `identity_of_function`.

    Attributes:
        of: function from the parts to the statistic. The number of a query may only depend on the parts of this query,
            because queries of batches, packed texts and decoding steps are passed in different groups.
        parts: names of the parts that `of` reads, see `multihead.kernels.parts`.
        tokens: token ids of the `tokens_mass` part; None if the context has the set, or there is no such part.
        source: paper and equation.
        default: whether the probe is computed if the user chooses no probes.
        chance: whether the chance level (even weights over the visible keys) is shown next to the statistic; False for
            statistics that do not depend on where a query attends, such as the norm of an output.
        about: definition in one line.
        axes: those of the parts.

    Raises:
        ArgumentError: the name is not an identifier or is a column of every table, or a part is unknown, or the parts
            have different shapes.

    >>> OWN = ("offset_mass", 0)
    >>> other = Probe("other_mass", lambda parts: 1 - parts[OWN], {OWN}, label="other keys", number_format="share")
    >>> other.heading, other.needs, other.axes
    ('other keys (%)', frozenset(), 'queries')
    """

    of: Callable[[PartValues], Tensor] = field(compare=False, repr=False)
    parts: Set[PartName] = field(repr=False)
    tokens: frozenset[int] | None = field(default=None, kw_only=True, repr=False)
    source: str = field(default="", kw_only=True, repr=False)
    default: bool = field(default=False, kw_only=True, repr=False)
    chance: bool = field(default=True, kw_only=True, repr=False)
    about: str = field(default="", kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier() or self.name in _RESERVED_NAMES:
            raise ArgumentError(
                f"A probe is called {self.name!r}.",
                f'Give a Python identifier other than {", ".join(_RESERVED_NAMES)}, such as "late_mass".',
            )
        if not callable(self.of):
            raise ArgumentError(
                f"The function of {self.name} is {self.of!r}.",
                'Give one, such as lambda parts: parts["entropy"].exp().',
            )
        if not isinstance(self.parts, Set) or not self.parts:
            raise ArgumentError(
                f"The parts of {self.name} are {self.parts!r}.", 'Give a set of at least one, such as {"entropy"}.'
            )
        object.__setattr__(self, "parts", frozenset(self.parts))
        axes = {part_named(part).axes for part in self.parts}
        if len(axes) > 1:
            alone = " or ".join(f'"{name}"' for name, part in PARTS.items() if part.axes != "queries")
            raise ArgumentError(
                f"The parts of {self.name} have different shapes.",
                f"Combine parts with a number per query, or take {alone} alone.",
            )
        object.__setattr__(self, "axes", *axes)

    def __eq__(self, other: object) -> bool:
        """Compare all attributes but `about`, the functions last, because that takes longer."""
        if not isinstance(other, Probe):
            return NotImplemented
        names = [each.name for each in fields(Probe) if each.compare]
        return all(getattr(self, name) == getattr(other, name) for name in names) and (
            self.of is other.of or (self.function is not None and self.function == other.function)
        )

    def __hash__(self) -> int:
        return hash((self.name, self.parts, self.tokens))

    @cached_property
    def function(self) -> str | None:
        """Hash of what `of` computes, for comparisons; None if it cannot be hashed."""
        return identity_of_function(self.of)

    @cached_property
    def needs(self) -> frozenset[PartInput]:
        """Names of the inputs that the probe needs besides q and k."""
        found = {need for part in self.parts for need in part_named(part).needs}
        return frozenset("ids" if need == "sets" and self.tokens is not None else need for need in found)

    @cached_property
    def compares_tokens(self) -> bool:
        """Whether a part compares the token of a key with that of the query, so that they must be of one text."""
        return any(part_named(part).compares_tokens for part in self.parts)

    @cached_property
    def only_part(self) -> PartName | None:
        """The part that the statistic equals; None if the statistic is computed from parts."""
        return next(iter(self.parts)) if isinstance(self.of, itemgetter) and len(self.parts) == 1 else None

    @property
    def has_mean(self) -> bool:
        """Whether the statistic has a number per query that can be averaged, which the index of a key is not."""
        return super().has_mean and (self.only_part is None or not part_named(self.only_part).is_integer)

    def without_function(self) -> Statistic:
        """Return the statistic without its function, so that another process can load it; self if it is one part."""
        if self.only_part is not None:
            return self
        return Statistic(self.name, **self.display(), counted=self.counted, axes=self.axes)
