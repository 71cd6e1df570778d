"""Statistics that records of earlier versions lack, and by which their heads have the same kinds as today.

Earlier versions stored neither "near_mass" nor "separator_mass". A record that kept only statistics has no exact
"near_mass": it had a lower bound, by which some heads were "local", and which no table may show as the statistic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from multihead.errors import MaskError
from multihead.kernels.parts import NEAR_REACH
from multihead.probes.catalogue import (
    FIRST_MASS,
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
    if NEAR_MASS.name not in found and found.keys() >= _DEFAULT_BEFORE and sample.keeps_weights:
        try:
            near = torch.stack([sample.at_offset(offset) for offset in range(-NEAR_REACH, NEAR_REACH + 1)]).sum(0)
        except MaskError:  # the mask's class is not defined in this process
            return found
        found[NEAR_MASS.name] = MeasuredStatistic(near, sample.sees)
    if SEPARATOR_MASS.name not in found and SPECIAL_MASS.name in found and FIRST_MASS.name in found and special:
        values, counted, *_ = found[SPECIAL_MASS.name]
        separator = (values - found[FIRST_MASS.name].values * special[0]).clamp(min=0)
        found[SEPARATOR_MASS.name] = MeasuredStatistic(separator, counted)
    return found
