"""What `look` prints about memory, files and textbook heads."""

from __future__ import annotations

from pathlib import Path

import pytest

from multihead.cli.look_output import COLUMNS, print_files, print_textbook_heads
from multihead.observation.textbook import TextbookHead
from multihead.probes import DEFAULT
from multihead.record.memory_use import Memory
from multihead.viewer.report import ReportSummary

HEADS = {
    "induction": [TextbookHead(17, head, 0.9 - head / 10) for head in range(9)],
    "duplicate": [TextbookHead(3, 1, 0.5), TextbookHead(3, 0, 0.1)],
    "previous": [TextbookHead(2, 1, 0.51), TextbookHead(3, 0, 0.1)],
    "first": [TextbookHead(2, 1, 0.75), TextbookHead(3, 0, 0.1)],
}


def summary(mode: str) -> ReportSummary:
    return ReportSummary(Path("page.html"), 1_500_000, mode, 0, 0, 0.0, "", "en")


def test_textbook_heads_are_those_with_half_of_their_attention_there(capsys: pytest.CaptureFixture[str]) -> None:
    print_textbook_heads(HEADS, "en")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "Textbook heads, on a start token and 3 x 64 random tokens:",
        "  induction        L17 H0 90 %, L17 H1 80 %, L17 H2 70 %, L17 H3 60 %",
        "  duplicate token  no head has half of its attention there",
        "  previous token   L2 H1 51 %",
        "  first token      1 of 2 heads have over half of their attention there: L2 H1 75 %",
    ]


def test_more_of_them_than_are_named_are_hinted_at(capsys: pytest.CaptureFixture[str]) -> None:
    print_textbook_heads({"induction": [TextbookHead(17, head, 0.9) for head in range(9)]}, "en")
    assert capsys.readouterr().out.endswith("L17 H3 90 %, …\n")


def test_in_chinese_the_columns_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_textbook_heads(HEADS, "zh")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "  归纳      L17 H0 90 %, L17 H1 80 %, L17 H2 70 %, L17 H3 60 %"
    assert lines[1] == "  重复词元  没有头把一半的注意力放在这里"


def test_a_record_is_named_with_the_command_that_opens_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a record.safetensors"
    file.write_bytes(b"0" * 2_500_000)
    print_files(summary("pooled"), str(file), Memory(1, 1, 1), "en")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "The page: page.html (1.5 MB, pooled maps)",
        f"The record: {file} (2.5 MB). Every head down to single weights: multihead view '{file}'",
    ]


def test_where_the_page_leaves_weights_out_it_is_said_how_to_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_files(summary("largest"), None, Memory(1, 1, 1), "en")
    assert capsys.readouterr().out.endswith(
        "For every weight at every zoom: run look with --record FILE, then multihead view FILE.\n"
    )
    print_files(summary("whole"), None, Memory(1, 1, 1), "en")
    assert capsys.readouterr().out.endswith("The page: page.html (1.5 MB, every weight)\n")


def test_peak_memory_stands_beside_what_the_weights_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    print_files(summary("whole"), None, Memory(3_100_000_000, 755_000_000, 72_477_573_120), "en")
    assert capsys.readouterr().out.splitlines()[1] == (
        "Peak memory 3.1 GB, including the model; q and k of all heads take 755.0 MB, and their weights would take "
        "72.5 GB."
    )


@pytest.mark.parametrize("memory", [Memory(3, 2, 999_999_999), Memory(None, 2, 10**12)])
def test_of_a_short_text_and_where_the_system_does_not_say_nothing_is_said_of_memory(
    memory: Memory, capsys: pytest.CaptureFixture[str]
) -> None:
    print_files(summary("whole"), None, memory, "en")
    assert "memory" not in capsys.readouterr().out


def test_the_table_shows_the_default_statistics_that_every_head_has() -> None:
    assert set(COLUMNS) == set(DEFAULT) - {"largest_key", "sink_mass"}  # an index has no mean; few heads have sinks
