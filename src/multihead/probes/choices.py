"""The statistics that are shown, watched and sorted by where nobody names any: each choice is made here, by value."""

from __future__ import annotations

from multihead.probes.catalogue import (
    DISTANCE_SPREAD,
    EFFECTIVE_KEYS,
    ENTROPY,
    FIRST_MASS,
    LARGEST_SCORE,
    LARGEST_WEIGHT,
    MEAN_DISTANCE,
    NEXT_MASS,
    PREVIOUS_MASS,
    RECEIVED,
    SELF_MASS,
    SPECIAL_MASS,
)
from multihead.probes.probe import Probe

TERMINAL_COLUMNS = (
    ENTROPY,
    EFFECTIVE_KEYS,
    MEAN_DISTANCE,
    DISTANCE_SPREAD,
    SELF_MASS,
    PREVIOUS_MASS,
    NEXT_MASS,
    FIRST_MASS,
    SPECIAL_MASS,
    LARGEST_WEIGHT,
)
"""Columns of the table of heads in a terminal, in this order; the command `look` also sorts by them."""

TERMINAL_DROP_ORDER = (
    DISTANCE_SPREAD,
    MEAN_DISTANCE,
    SPECIAL_MASS,
    NEXT_MASS,
    EFFECTIVE_KEYS,
    SELF_MASS,
    LARGEST_WEIGHT,
    FIRST_MASS,
    PREVIOUS_MASS,
    ENTROPY,
)
"""The order in which a narrow terminal drops columns, so that the kind of a head is not cut off."""

COUNTED_ON_REPEATS = FIRST_MASS
"""The statistic whose heads on repeated tokens the command `look` counts, because many may have it."""

WATCHED = (ENTROPY, MEAN_DISTANCE, FIRST_MASS, LARGEST_WEIGHT, LARGEST_SCORE)
"""Statistics that `Watch` observes by default."""

WITH_MAXIMUM = (LARGEST_SCORE,)
"""Statistics whose maximum `Watch` keeps in place of the mean, because it limits a training step."""

FOCUS = ENTROPY
"""The statistic by which pages sort their tables at first, and whose lowest mean is the head that a page opens with and
a picture without room for all heads begins with."""

MARGINS_OF_MAP: dict[str, Probe] = {probe.name: probe for probe in (RECEIVED, ENTROPY)}
"""Name -> statistic drawn at a margin of a head's map: per key below the map, per query at its right. Pages measure
them besides the default statistics."""
