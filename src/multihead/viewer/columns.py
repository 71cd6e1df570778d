"""The statistics of every head as columns of a page: a short id for addresses and filters, a unit and a label."""

from __future__ import annotations

from typing import TypedDict

from multihead.locale.texts import statistic_label

_IDS_AND_UNITS = {
    "effective_keys": ("keys", "keys"),
    "entropy": ("entropy", "nats"),
    "mean_distance": ("distance", "tokens"),
    "distance_spread": ("spread", "tokens"),
    "largest_weight": ("largest", "share"),
    "contribution": ("contribution", "norm"),
    "output_norm": ("output_norm", "norm"),
}
"""Statistic -> id and unit, where its name does not give them: `first_mass` is the share `first`."""


class Column(TypedDict):
    """One statistic of a page: its id, its name in the record, its unit, and its label in the page's language."""

    id: str
    statistic: str
    unit: str
    label: str


def column(name: str, lang: str) -> Column:
    """Describe the column of a statistic.

    >>> column("first_mass", "en")
    {'id': 'first', 'statistic': 'first_mass', 'unit': 'share', 'label': 'first'}
    """
    id_, unit = _IDS_AND_UNITS.get(name, (name.removesuffix("_mass"), "share" if name.endswith("_mass") else "number"))
    return Column(id=id_, statistic=name, unit=unit, label=statistic_label(name, lang, id_.replace("_", " ")))
