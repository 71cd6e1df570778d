"""What `look` prints about memory, files and textbook heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

from multihead.cli.look_output import _table_of_heads, print_memory_and_files, print_textbook_heads
from multihead.kinds import KINDS
from multihead.probes.catalogue import LARGEST_KEY, NEAR_MASS, PROBES, REPEAT_PROBES, SEPARATOR_MASS, SINK_MASS
from multihead.probes.choices import TERMINAL_COLUMNS, TERMINAL_DROP_ORDER
from multihead.record.chance import ChanceComparison
from multihead.record.memory_use import MemoryUse
from multihead.record.profiles import LayerProfile, Visibility, kinds_of_heads
from multihead.record.repeated import RepeatedTokens
from multihead.viewer.report import ReportSummary


def profile(number: int, **shares: list[float]) -> LayerProfile:
    """A layer whose heads were measured on repeated random tokens alone."""
    means = {f"repeated_{name}": torch.tensor(values) for name, values in shares.items()}
    levels = {name: torch.full_like(values, 0.011) for name, values in means.items()}
    heads = len(next(iter(means.values())))
    sure, texts = torch.full((heads,), 0.01), torch.full((heads,), 8.0)
    found = {name: ChanceComparison(values, levels[name], sure, texts) for name, values in means.items()}
    named = kinds_of_heads(found, heads=heads)
    nothing = Visibility("causal", 0, 0, True, 0, torch.zeros(heads), torch.zeros(heads))
    repeated = RepeatedTokens(
        64, 3, True, {name: values.expand(8, -1) for name, values in means.items()}, levels, "<s>"
    )
    return LayerProfile(number, "layer", means, levels, found, named, False, nothing, repeated=repeated)


HEADS = [
    profile(
        17,
        induction=[0.9, 0.8, 0.7, 0.6],
        duplicate=[0.36, 0.1, 0.1, 0.1],
        previous=[0.1, 0.1, 0.1, 0.51],
        first=[0.1, 0.1, 0.75, 0.1],
    )
]


def summary(mode: str) -> ReportSummary:
    return ReportSummary(Path("page.html"), 1_500_000, mode, 0, 0, 0.0, "", "en")


def test_textbook_heads_are_those_that_exceed_chance(capsys: pytest.CaptureFixture[str]) -> None:
    print_textbook_heads(HEADS, "en")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "Textbook heads, on 8 texts of the start token <s> and 3 x 64 random tokens:",
        "  induction        L17 H0 90 %, L17 H1 80 %, L17 H2 70 %, L17 H3 60 % (chance 1.1 %)",
        "  duplicate token  no head exceeds chance by 35 percentage points and three standard errors",
        "  previous token   L17 H3 51 % (chance 1.1 %)",
        "  first token      1 of 4 heads: L17 H2 75 % (chance 1.1 %)",
    ]


def test_more_of_them_than_are_named_are_hinted_at(capsys: pytest.CaptureFixture[str]) -> None:
    print_textbook_heads([profile(17, induction=[0.9] * 9)], "en")
    assert capsys.readouterr().out.endswith("L17 H3 90 %, … (chance 1.1 %)\n")


def test_in_a_narrow_terminal_they_wrap_between_heads(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    print_textbook_heads(HEADS, "en")
    assert capsys.readouterr().out.splitlines()[3:5] == [
        "  induction        L17 H0 90 %, L17 H1 80 %,",
        "                   L17 H2 70 %, L17 H3 60 %",
    ]


def test_in_chinese_the_columns_stand_below_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    print_textbook_heads(HEADS, "zh")
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines[0] == "  归纳      L17 H0 90 %, L17 H1 80 %, L17 H2 70 %, L17 H3 60 %（随机水平 1.1 %）"
    assert lines[1] == "  重复词元  没有头比随机水平高出 35 个百分点和三个标准误"


def test_the_table_has_every_kind_of_a_head_and_a_line_of_chance() -> None:
    row = {"layer": 0, "head": 1, "previous_mass": 0.9, "previous_mass_chance": 0.05, "entropy": 0.5}
    other = {"layer": 0, "head": 2, "previous_mass": 0.1, "previous_mass_chance": 0.05, "entropy": 2.5}
    rows = [{**row, "kind": "repeated_induction+previous+local"}, {**other, "kind": "mixed"}]
    console = Console(width=80, no_color=True)
    with console.capture() as captured:
        console.print(_table_of_heads(rows, 80, KINDS, "en"))
    lines = [line.split() for line in captured.get().splitlines()]
    assert lines[3:5] == [["L0", "H1", "induction*", "+2", "0.50", "90"], ["L0", "H2", "mixed", "2.50", "10"]]
    assert lines[-1] == ["chance", "5.0"]


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("width", [40, 70, 100])
def test_where_the_terminal_is_narrow_numbers_give_way_and_the_kind_of_a_head_does_not(width: int, lang: str) -> None:
    names = (*(probe.name for probe in TERMINAL_COLUMNS), *REPEAT_PROBES)
    row = {name + end: 0.25 for name in names for end in ("", "_chance")} | {"layer": 10}
    rows = [row | {"head": 1, "kind": "repeated_first+previous"}, row | {"head": 2, "kind": "first"}]
    console = Console(width=width, no_color=True)
    for sort in ("layer", "next_mass", "repeated_induction"):
        with console.capture() as captured:
            console.print(_table_of_heads(rows, width, KINDS, lang, sort=sort))
        printed = captured.get()
        assert "…" not in printed
        assert max(map(cell_len, printed.splitlines())) <= width
        kinds, numbers, following, repeated = {
            "en": (("first* +1", "first token"), "entropy", "next", "induction*"),
            "zh": (("首个* +1", "首词元"), "熵", "后一", "归纳*"),
        }[lang]
        assert all(each in printed for each in kinds)
        assert numbers in printed
        assert (following in printed) == (sort == "next_mass" or width > 40)
        assert (repeated in printed) == (sort == "repeated_induction")


def test_a_record_is_named_with_the_command_that_opens_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a record.safetensors"
    file.write_bytes(b"0" * 2_500_000)
    print_memory_and_files(summary("pooled"), str(file), MemoryUse(1, 1, 1), "en")
    assert capsys.readouterr().out.splitlines() == [
        "",
        "The page: page.html (1.5 MB, pooled maps)",
        f"The record: {file} (2.5 MB). Every head down to single weights: multihead view '{file}'",
    ]


def test_where_the_page_leaves_weights_out_it_is_said_how_to_have_them(capsys: pytest.CaptureFixture[str]) -> None:
    print_memory_and_files(summary("largest"), None, MemoryUse(1, 1, 1), "en")
    assert capsys.readouterr().out.endswith(
        "For every weight at every zoom: run look with --record FILE, then multihead view FILE.\n"
    )
    print_memory_and_files(summary("whole"), None, MemoryUse(1, 1, 1), "en")
    assert capsys.readouterr().out.endswith("The page: page.html (1.5 MB, every weight)\n")


def test_peak_memory_stands_beside_what_the_weights_would_take(capsys: pytest.CaptureFixture[str]) -> None:
    print_memory_and_files(summary("whole"), None, MemoryUse(3_100_000_000, 755_000_000, 72_477_573_120), "en")
    assert capsys.readouterr().out.splitlines()[1] == (
        "Peak memory 3.1 GB, including the model; q and k of all heads take 755.0 MB, and their weights would take "
        "72.5 GB."
    )


@pytest.mark.parametrize("memory", [MemoryUse(3, 2, 999_999_999), MemoryUse(None, 2, 10**12)])
def test_of_a_short_text_and_where_the_system_does_not_say_nothing_is_said_of_memory(
    memory: MemoryUse, capsys: pytest.CaptureFixture[str]
) -> None:
    print_memory_and_files(summary("whole"), None, memory, "en")
    assert "memory" not in capsys.readouterr().out


def test_the_table_shows_the_default_statistics_that_every_head_has() -> None:
    # An index has no mean, few heads have sinks, and a terminal has no room for more.
    without = {LARGEST_KEY, SINK_MASS, NEAR_MASS, SEPARATOR_MASS}
    assert set(TERMINAL_COLUMNS) == {probe for probe in PROBES.values() if probe.default} - without
    assert sorted(TERMINAL_DROP_ORDER, key=TERMINAL_COLUMNS.index) == list(TERMINAL_COLUMNS)
