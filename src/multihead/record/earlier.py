"""Statistics that records of earlier versions lack, and by which their heads have the same kinds as today.

Earlier versions stored neither "near_mass" nor "separator_mass". A record that kept only statistics has no exact
"near_mass", but a lower bound, by which heads are "local", as they were; no table shows it as the statistic.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.kernels.parts import NEAR_REACH
from multihead.probes.catalogue import (
    FIRST_MASS,
    MEAN_DISTANCE,
    NEAR_MASS,
    NEXT_MASS,
    PREVIOUS_MASS,
    SELF_MASS,
    SEPARATOR_MASS,
    SPECIAL_MASS,
)
from multihead.record.sample import SampleRecord
from multihead.record.text_rows import MeasuredStatistic

_DEFAULT_BEFORE = {SELF_MASS.name, PREVIOUS_MASS.name, NEXT_MASS.name}  # which today are measured with "near_mass"


def add_later_statistics(
    sample: SampleRecord, found: Mapping[str, MeasuredStatistic], special: Sequence[bool] | None
) -> dict[str, MeasuredStatistic]:
    """Add the statistics that an earlier version did not measure to those of a sample, if they can be computed.

    Args:
        sample: one text in one layer.
        found: name -> the measured statistics of the sample, (heads, queries) each.
        special: one flag per key, True for special tokens; None if unknown.
    """
    found = dict(found)
    if NEAR_MASS.name not in found and found.keys() >= _DEFAULT_BEFORE:
        try:
            near = _near_mass(sample) if sample.keeps_weights else _least_near_mass(sample, found)
        except MaskError:  # the mask's class is not defined in this process
            return found
        found[NEAR_MASS.name] = MeasuredStatistic.of_rows(near, sample.sees)
    if SEPARATOR_MASS.name not in found and SPECIAL_MASS.name in found and FIRST_MASS.name in found and special:
        values, counted, *_ = found[SPECIAL_MASS.name]
        separator = (values - found[FIRST_MASS.name].values * special[0]).clamp(min=0)
        found[SEPARATOR_MASS.name] = MeasuredStatistic(separator, counted)
    return found


def has_bounds(samples: Iterable[SampleRecord]) -> bool:
    """Whether some sample has only a lower bound of what is near."""
    return any(NEAR_MASS.name not in one.per_query and not one.keeps_weights for one in samples)


def _near_mass(sample: SampleRecord) -> Tensor:
    """Return the weight on the keys near each query, from q and k: (heads, queries)."""
    return torch.stack([sample.at_offset(offset) for offset in range(-NEAR_REACH, NEAR_REACH + 1)]).sum(0)


def _least_near_mass(sample: SampleRecord, found: Mapping[str, MeasuredStatistic]) -> Tensor:
    """Return a lower bound of the weight on the keys near each query: (heads, queries) float64.

    It is the larger of self + previous + next and, by Markov's inequality, 1 - distance / 4, because a key that is more
    than 3 tokens away is at least 4 away.
    """
    bound = torch.stack([found[name].values.double() for name in sorted(_DEFAULT_BEFORE)]).sum(0)
    if MEAN_DISTANCE.name in found:
        by_distance = 1 - found[MEAN_DISTANCE.name].values.double() / (NEAR_REACH + 1)
        bound = bound.maximum(by_distance.masked_fill(~sample.sees, 0))  # without a key the distance is 0
    return bound.clamp(0, 1)
