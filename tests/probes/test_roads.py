"""A statistic of one's own of every part, on every road to a number, is what it is for the text alone in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from multihead.kernels.parts import PART_FAMILIES, PARTS
from tests.parallel.processes import Processes
from tests.probes import roads
from tests.probes.roads import GROUPS, RANKS, ROADS, Case


def test_every_part_has_a_probe() -> None:
    tried = {part if isinstance(part, str) else part[0] for row in roads.ROWS for part in row.probe.parts}
    of_pictures = {name for name, part in PARTS.items() if "places" in part.needs}  # judged in test_pictures.py
    assert tried == (PARTS.keys() - of_pictures) | PART_FAMILIES.keys()


@pytest.mark.parametrize("road", ROADS)
def test_a_statistic_is_that_of_the_text_alone(road: str) -> None:
    found = {group: roads.judged(road, group) for group in GROUPS}
    assert any(found.values())
    assert [words for group, cells in found.items() for words in roads.what_is_wrong(road, group, cells)] == []


@pytest.mark.parametrize("split", RANKS)
def test_a_statistic_over_ranks_is_that_of_the_text_alone(split: str, four: Processes, tmp_path: Path) -> None:
    found, other = four.results(roads.judged_by_ranks, Case(), split, str(tmp_path), ranks=2)
    assert found.keys() == other.keys()
    assert [words for place, cells in found.items() for words in roads.what_is_wrong(*place, cells)] == []
