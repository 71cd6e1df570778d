"""Describe the columns and the legend of a page, with labels in the page's language."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from multihead.kinds import MIXED, Kind
from multihead.locale.escaping import escape_controls
from multihead.locale.texts import unit_label
from multihead.probes.catalogue import PROBES, REPEAT_PROBES, SEPARATOR_MASS, SPECIAL_MASS, statistic
from multihead.probes.choices import FOCUS
from multihead.probes.probe import Probe, Statistic
from multihead.record.profiles import LayerKinds
from multihead.viewer.page_types import ColumnDescription, KindDescription, UnrecordedStatistic


class DecidesKinds(Protocol):
    """What knows which kinds of heads were measured: the statistics of a layer, or a time series."""

    def decides(self, kind: Kind) -> bool:
        """Return whether it was measured which heads have a kind."""


def describe_column(shown: Statistic, lang: str) -> ColumnDescription:
    """Describe the column of a statistic in the tables of a page.

    Returns:
        id (the name of the statistic, also used in addresses and filters), label and unit in the page's language (""
        for no unit), format, see `Statistic.number_format`, about: the definition of a probe, in English, and focus:
        whether tables are sorted by this column at first, the lowest numbers above.

    >>> describe_column(Statistic("late_mass", label="late", number_format="share"), "en")
    {'id': 'late_mass', 'label': 'late', 'unit': '%', 'format': 'share', 'about': '', 'focus': False}
    """
    return {
        "id": shown.name,
        "label": escape_controls(shown.translated_label(lang)),
        "unit": escape_controls(unit_label(shown.unit, lang)),
        "format": shown.number_format,
        "about": escape_controls(shown.about) if isinstance(shown, Probe) and shown.name not in PROBES else "",
        "focus": shown.name == FOCUS.name,
    }


def columns_not_recorded(names: Iterable[str], lang: str) -> list[UnrecordedStatistic]:
    """List the id and label of the built-in statistics that have columns in a page and are not among `names`."""
    known = {*names}
    built_in = [probe.without_function() for probe in PROBES.values() if probe.has_mean]
    missing = (each for each in (*built_in, *map(statistic, REPEAT_PROBES)) if each.name not in known)
    return [{"id": each["id"], "label": each["label"]} for each in (describe_column(one, lang) for one in missing)]


def legend_of_kinds(kinds: Iterable[Kind], profiles: Iterable[DecidesKinds], lang: str) -> list[KindDescription]:
    """Describe the kinds of heads in a page's legend, and whether each was measured.

    Args:
        kinds: the kinds, see `multihead.kinds.Kind`.
        profiles: the statistics of each layer, or a time series.
        lang: the language of the page.
    """
    profiles = list(profiles)
    return [
        {
            "id": kind.name,
            "label": escape_controls(kind.label(lang)),
            "about": escape_controls(kind.definition(lang)),
            "statistic": kind.statistic,
            "glyph": kind.glyph,
            "colour": kind.colour,
            "repeats": kind.texts == "repeats",
            "measured": kind is MIXED or any(one.decides(kind) for one in profiles),
        }
        for kind in (*kinds, MIXED)
    ]


def names_of_statistics(profiles: Iterable[LayerKinds]) -> list[str]:
    """List the names of the statistics in the order of table columns."""
    return list(dict.fromkeys(name for one in profiles for name in one.means))


def without_repeated_special_tokens(names: Iterable[str], profiles: Iterable[LayerKinds]) -> list[str]:
    """Leave out either the special tokens or those after the first, because the first token has its own column.

    The special tokens after the first are shown if the text has some, so that their chance is above 0.
    """
    names = list(names)
    levels = [one.chance[SEPARATOR_MASS.name] for one in profiles if SEPARATOR_MASS.name in one.chance]
    left_out = SPECIAL_MASS if any(bool((level > 0).any()) for level in levels) else SEPARATOR_MASS
    return [name for name in names if name != left_out.name]
