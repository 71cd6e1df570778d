"""A statistic of one's own of every part, on every road to a number, is what it is for the text alone in float64."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

from multihead.kernels.parts import PART_FAMILIES, PARTS
from tests.parallel.processes import Processes
from tests.probes import roads
from tests.probes.roads import GROUPS, RANKS, ROADS, UNMENDED, Case, Cells, Group, Unmended

judged = cache(roads.judged)
_over_ranks: dict[tuple[str, Group], Cells] = {}


@pytest.fixture
def over_ranks(four: Processes, tmp_path: Path) -> dict[tuple[str, Group], Cells]:
    """The cells of all roads over two processes, judged once."""
    for name in RANKS if not _over_ranks else ():
        found, other = four.results(roads.judged_by_ranks, Case(), name, str(tmp_path), ranks=2)
        assert found.keys() == other.keys()
        _over_ranks.update(found)
    return _over_ranks


def test_every_part_has_a_probe() -> None:
    tried = {part if isinstance(part, str) else part[0] for row in roads.ROWS for part in row.probe.parts}
    assert tried == PARTS.keys() | PART_FAMILIES.keys()


@pytest.mark.parametrize("road", ROADS)
def test_a_statistic_is_that_of_the_text_alone(road: str) -> None:
    found = {group: judged(road, group) for group in GROUPS}
    assert any(found.values())
    assert [words for group, cells in found.items() for words in roads.unexpected(road, group, cells)] == []


def test_a_statistic_over_ranks_is_that_of_the_text_alone(over_ranks: dict[tuple[str, Group], Cells]) -> None:
    assert [words for place, cells in over_ranks.items() for words in roads.unexpected(*place, cells)] == []


def _wrong(unmended: Unmended, over_ranks: dict[tuple[str, Group], Cells]) -> dict[str, str]:
    """Return the roads that have a wrong cell of an entry, each with what is wrong."""
    cells = {(road, group): judged(road, group) for road in ROADS if unmended.covers(road) for group in GROUPS}
    return {
        road: words
        for (road, group), of_road in (cells | over_ranks).items()
        for cell, words in of_road.items()
        if words and unmended.covers(road, group, *cell)
    }


@pytest.mark.parametrize(
    "unmended", [pytest.param(each, marks=pytest.mark.xfail(strict=True, reason=each.reason)) for each in UNMENDED]
)
def test_what_is_known_to_be_wrong_is_right(unmended: Unmended, over_ranks: dict[tuple[str, Group], Cells]) -> None:
    assert not _wrong(unmended, over_ranks)


@pytest.mark.parametrize("unmended", UNMENDED)
def test_what_is_right_is_not_said_to_be_wrong(unmended: Unmended, over_ranks: dict[tuple[str, Group], Cells]) -> None:
    wrong = _wrong(unmended, over_ranks)
    assert [each for each in unmended.roads if not any(fnmatchcase(road, each) for road in wrong)] == []
