"""The vocabulary of what is measured of an attention map."""

from __future__ import annotations

from typing import Any

import pytest

from multihead.errors import ArgumentError
from multihead.kernels.native.statistics import PARTS_OF_ONE_PASS, PARTS_OF_SECOND_PASS
from multihead.kernels.parts import PART_FAMILIES, PARTS, part_named
from multihead.probes import PROBES
from multihead.probes.streaming import STREAMED_PARTS


@pytest.mark.parametrize(
    "part",
    ["entropie", ("offset_mass", 1.0), ("offset_mass", True), ("offset", 1), ("offset_mass", 1, 2), "offset_mass", 3],
)
def test_an_unknown_part_is_refused_with_those_that_exist(part: Any) -> None:
    with pytest.raises(ArgumentError) as refusal:
        part_named(part)
    assert str(refusal.value) == (
        f"There is no part {part!r}. Give some of 'entropy', 'mean_distance', 'distance_spread', 'near_mass', "
        "'first_special_mass', 'largest_weight', 'largest_key', 'sink_mass', 'logsumexp', 'position', "
        "'duplicate_mass', 'induction_mass', 'contribution', 'output_norm', 'patch_distance', 'neighbour_mass', "
        "'one_way_mass', 'received', 'pooled_map', "
        "('offset_mass', int), ('first_keys_mass', int), ('tokens_mass', str)."
    )


def test_kernels_streaming_and_probes_name_parts_of_the_vocabulary_alone() -> None:
    probed = {part for probe in PROBES.values() for part in probe.parts}
    for part in PARTS_OF_ONE_PASS | PARTS_OF_SECOND_PASS | STREAMED_PARTS | probed:
        assert part_named(part).name == part


def test_every_part_has_a_definition() -> None:
    assert all(part.about for part in PARTS.values())
    assert all(family.of_any.about for family in PART_FAMILIES.values())
