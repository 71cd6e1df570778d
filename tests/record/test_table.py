"""A table of heads is sorted sensibly and reads in aligned columns; a notebook never shows a text in it as markup."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch

import multihead as mh
from multihead.errors import ArgumentError
from multihead.observation.record import Record
from multihead.record.analysis.highlights import Finding
from multihead.record.table import MAX_SHOWN_HEADS, HeadList, HeadTable
from tests.observation.recorded import asked, ids, read

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


HOSTILE = "<script>alert('&')</script>"


def rows(shown: str) -> list[list[str]]:
    """The cells of the table, as a strict reader finds them."""
    tree = ET.fromstring(shown)
    return [["".join(cell.itertext()) for cell in row] for row in tree.iter("tr")]


def test_a_record_shows_a_row_a_head_and_says_what_it_saw() -> None:
    record = read(ids(2, 6))
    shown = record._repr_html_()
    assert "Reader</strong>: 2 layers, 8 heads, 2 texts of up to 6 tokens." in shown
    table = rows(shown)
    assert table[0][:6] == ["layer", "head", "name", "kind", "entropy (nats)", "effective keys"]
    assert [row[:3] for row in table[1:9]] == [[str(i), str(j), f"layers.{i}"] for i in range(2) for j in range(4)]
    assert [row[3] for row in table[1:5]] == ["+".join(each) for each in record.layers[0].kinds]
    assert table[9][0] == "chance"
    (profile, _) = record.profiles()
    assert table[9][1] == f"{float(profile.chance['entropy'][0]):.2f}"
    assert table[1][4] == f"{record.table().rows[0]['entropy']:.2f}"


def test_many_heads_are_cut_and_counted() -> None:
    with mh.observe(layer := mh.MultiHeadAttention(128, 64)) as seen:
        layer(torch.randn(1, 3, 128))
    shown = seen._repr_html_()
    assert len(rows(shown)) == 1 + MAX_SHOWN_HEADS + 1  # the names, the heads, and chance
    assert "40 heads more: table() has all." in shown


def test_a_short_table_of_many_heads_begins_with_those_that_stand_out() -> None:
    layer = mh.MultiHeadAttention(128, 64)
    with torch.no_grad():
        layer.q_proj.weight[:, :] = 0
        layer.q_proj.weight[-2:] = layer.k_proj.weight[-2:] = 100 * torch.eye(128)[-2:]  # head 63
    x = torch.randn(1, 40, 128)
    x[..., -2:] = 0
    x[:, ::2, -2], x[:, 1::2, -1] = 3, 3  # each query of head 63 sees the positions of its own parity alone
    x[..., -2] += torch.arange(40) * 0.001
    with mh.observe(layer) as seen:
        layer(x, mask=mh.masks.Causal())
    first = rows(seen._repr_html_())[1]
    telling = [(each.layer, each.head) for each in (*seen.findings(), *seen.kinds())]
    assert telling
    assert (int(first[0]), int(first[1])) == telling[0]


def test_a_sample_shows_its_heads() -> None:
    shown = asked(queries=1, keys=9, query_start=8).layers[0].sample()._repr_html_()
    assert "<strong>Asking</strong>: 1 query and 9 keys." in shown
    assert [row[0] for row in rows(shown)] == ["head", "0", "1", "2", "3"]


def test_hostile_names_are_escaped() -> None:
    record = asked()
    record.title = record.layers[0].name = record.layers[0].samples[0].name = HOSTILE
    for shown in (record._repr_html_(), record.layers[0].sample()._repr_html_()):
        assert "<script>" not in shown
        assert HOSTILE in "".join(ET.fromstring(shown).itertext())


def test_an_empty_record_and_statistics_alone_say_so() -> None:
    assert Record()._repr_html_() == "<div><p><strong>Record</strong>: nothing was recorded yet.</p></div>"
    assert "; statistics only." in asked(watch={"keep": "statistics"})._repr_html_()


def test_a_number_that_is_none_is_a_dash() -> None:
    record = asked()
    record.layers[0].samples[0].per_query["entropy"].fill_(float("nan"))
    assert rows(record._repr_html_())[1][4] == "–"


def test_a_record_a_layer_and_a_sample_print_as_one_line() -> None:
    record = read(ids(2, 6))
    assert repr(record) == "<Record of Reader: 2 layers, 8 heads, 2 texts of up to 6 tokens>"
    assert repr(record.layers[1]) == "<LayerRecord 1 layers.1: 4 heads, 2 texts>"
    assert repr(record.layers[1].sample()) == "<SampleRecord of layers.1: 4 heads, 6 queries and 6 keys>"
    assert repr(read(ids(2, 6), keep="summary").layers[0]) == "<LayerRecord 0 layers.0: 4 heads, 2 texts>"
    assert repr(Record()) == "<Record of a run: nothing was recorded yet>"
    record.title = record.layers[0].name = "a\x1b[31m"
    assert "\x1b" not in f"{record} {record.layers[0]}"


def test_a_list_of_found_heads_is_shown_as_lines_and_in_a_notebook_as_a_table() -> None:
    record = asked()
    finding = Finding("previous", 1, 0, 0.9, 0.1, "looks back: 90\u00a0% <", "one head", "layer 1 head 0: 90 %")
    columns = {
        "entropy (nats)": record.find(entropy=(None, None)),
        "divergence (nats)": record.nearest(0, 0),
        "share": record.kinds(),
        "kinds after": record.changed(record),
        "finding": HeadList([finding]),
    }
    for column, found in columns.items():
        assert found
        assert repr(found).splitlines() == [
            f"{' ' if place else '['}<{type(each).__name__} {each}>{']' if place == len(found) - 1 else ','}"
            for place, each in enumerate(found)
        ]
        headings, *cells = rows(found._repr_html_())
        assert column in headings
        assert [row[:2] for row in cells] == [[str(each.layer), str(each.head)] for each in found]
    assert rows(columns["finding"]._repr_html_())[1][2:] == ["looks back: 90\u00a0% <", "one head"]
    assert (
        rows(columns["entropy (nats)"]._repr_html_())[1][3] == f"{columns['entropy (nats)'][0].values['entropy']:.2f}"
    )
    assert repr(record.find(entropy=(99, None))) == "[]"


def test_a_layer_shows_its_heads() -> None:
    shown = read(ids(2, 6)).layers[1]._repr_html_()
    assert "<strong>layers.1</strong>: layer 1, 2 texts." in shown
    assert [row[0] for row in rows(shown)] == ["head", "0", "1", "2", "3"]
