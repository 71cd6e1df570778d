"""A table of heads is sorted sensibly and reads in aligned columns."""

from __future__ import annotations

from typing import Any

import pytest

from multihead.errors import ArgumentError
from multihead.record.table import HeadTable

ROWS: list[dict[str, Any]] = [
    {"layer": 0, "head": 0, "name": "a", "entropy": 1.0, "previous_mass": 0.5},
    {"layer": 0, "head": 1, "name": "a", "entropy": 3.0, "previous_mass": float("nan")},
    {"layer": 10, "head": 0, "name": "b", "entropy": 2.0},
]


def places(table: HeadTable) -> list[tuple[int, int]]:
    return [(row["layer"], row["head"]) for row in table.rows]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("layer", [(0, 0), (0, 1), (10, 0)]),
        ("head", [(0, 0), (10, 0), (0, 1)]),
        ("name", [(0, 0), (0, 1), (10, 0)]),
        ("entropy", [(0, 1), (10, 0), (0, 0)]),
        ("previous_mass", [(0, 0), (0, 1), (10, 0)]),  # what is NaN or missing comes last
    ],
)
def test_places_rise_and_statistics_fall(sort: str, order: list[tuple[int, int]]) -> None:
    assert places(HeadTable.from_rows(ROWS[::-1], sort=sort)) == order


def test_only_the_first_rows_are_kept_if_so_asked() -> None:
    assert places(HeadTable.from_rows(ROWS, sort="entropy", top=1)) == [(0, 1)]


def test_it_reads_in_aligned_columns() -> None:
    assert str(HeadTable.from_rows(ROWS)).splitlines() == [
        "layer  head  entropy (nats)  previous (%)  name",
        "    0     0            1.00            50  a",
        "    0     1            3.00             -  a",
        "   10     0            2.00             -  b",
    ]


def test_a_column_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(ArgumentError) as caught:
        HeadTable.from_rows(ROWS, sort="entropie")
    assert str(caught.value) == (
        "There is no column 'entropie'. Sort by one of layer, head, name, entropy, previous_mass."
    )


@pytest.mark.parametrize("top", [0, -1, 2.5, True])
def test_a_number_of_rows_that_is_none_is_refused(top: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        HeadTable.from_rows(ROWS, top=top)
    assert str(caught.value) == f"top is {top!r}. Give an integer of at least 1, or None for all heads."


def test_a_name_cannot_act_on_the_terminal_it_is_printed_to() -> None:
    table = HeadTable.from_rows([{"layer": 0, "head": 1, "name": "a\x1b[2J\n\u202eb", "x\x9b": 1.25}])
    assert str(table).splitlines() == ["layer  head  x\\x9b  name", "    0     1   1.25  a\\x1b[2J\\n\\u202eb"]


def test_a_table_prints_as_one_line_and_is_a_table_in_a_notebook() -> None:
    table = HeadTable.from_rows([{"layer": 0, "head": 1, "name": "<b>", "entropy": 1.25}])
    assert repr(table) == "<HeadTable of 1 head>"
    assert table._repr_html_().startswith("<div><table>")
    assert "<td>&lt;b&gt;</td>" in table._repr_html_()
