"""The command `walk`: what is printed, and how bad input is answered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from multihead.cli import main
from multihead.errors import MultiheadError
from multihead.locale.texts import section
from multihead_lab.locale import LOCALE_PACKAGE
from multihead_lab.walk import CHAPTERS, walk

DOCS = Path(__file__).resolve().parents[2] / "docs"


def run(*args: str, columns: int = 80) -> Result:
    return CliRunner().invoke(main, args, env={"COLUMNS": str(columns), "NO_COLOR": None})


def text(key: str, lang: str, **values: object) -> str:
    return section(lang, "walk", store=LOCALE_PACKAGE)[key].format(**values)


def lines(*rows: str) -> str:
    return "\n".join(rows)


def joined(output: str) -> str:
    """The output without the breaks of its lines, to look for sentences in it."""
    return " ".join(output.split())


def test_the_split_is_printed_with_every_number_and_the_head_below_its_columns() -> None:
    output = run("walk").output
    assert (
        lines(
            "   x = torch.arange(36).reshape(2, 3, 6)",
            "   (2,     3,      6)",
            "   (batch, length, model_dim)",
            "                sample 0                      sample 1",
            "    position 0    0   1 │   2   3 │   4   5    18  19 │  20  21 │  22  23",
            "    position 1    6   7 │   8   9 │  10  11    24  25 │  26  27 │  28  29",
            "    position 2   12  13 │  14  15 │  16  17    30  31 │  32  33 │  34  35",
            "                head 0    head 1    head 2    head 0    head 1    head 2",
        )
        in output
    )


def test_both_middle_shapes_are_printed_over_the_names_of_their_axes() -> None:
    output = run("walk").output
    assert "(2,     3,      3,     2)\n   (batch, length, heads, head_dim)" in output
    assert "(2,     3,     3,      2)\n   (batch, heads, length, head_dim)" in output


def test_the_folded_batch_numbers_its_blocks_with_heads_fastest() -> None:
    output = run("walk").output
    assert (
        lines(
            "   sample 1     [3] head 0   [4] head 1   [5] head 2",
            "    position 0  18 19        20 21        22 23",
            "    position 1  24 25        26 27        28 29",
            "    position 2  30 31        32 33        34 35",
        )
        in output
    )


def test_the_wrong_reshape_says_where_each_row_was_taken_from() -> None:
    output = run("walk").output
    assert (
        "Head 0 of sample 0 should hold [[0, 1], [6, 7], [12, 13]], and would hold [[0, 1], [2, 3], [4, 5]]."
        in joined(output)
    )
    assert "    position 1   2  3 <- p0 h1    8  9 <- p1 h1   14 15 <- p2 h1" in output


@pytest.mark.parametrize(("page", "language", "fence"), [("", "en", "```text\n"), (".zh", "zh", "```text zh\n")])
def test_the_pictures_of_the_docs_are_what_the_walk_prints(page: str, language: str, fence: str) -> None:
    source = (DOCS / f"split-of-heads{page}.md").read_text(encoding="utf-8")
    pictures = [rest.split("\n```")[0] for rest in source.split(fence)[1:]]
    printed = "\n".join(line.removeprefix("   ") for line in run("walk", "--lang", language).output.splitlines())
    assert len(pictures) == 5
    for picture in pictures:
        assert picture in printed


def test_with_nothing_to_mix_the_walk_says_so() -> None:
    output = joined(run("walk", "--heads", "1").output)
    assert text("unmixed", "en") in output
    assert "<- p0" not in output


def test_an_attention_is_printed_to_its_output() -> None:
    output = run("walk").output
    assert "18 Join the heads: Z1 | Z2 | Z3" in output
    last = walk()["output"].tensor[1, 2].tolist()
    assert " ".join(f"{value:6.3f}" for value in last) in output
    assert "   sample 1  [3] head 0   [4] head 1   [5] head 2\n             2            2            2" in output


def test_a_score_a_weight_and_a_result_are_also_worked_out_by_hand() -> None:
    by_hand = [line for line in run("walk", columns=120).output.splitlines() if "By hand" in line]
    assert len(by_hand) == 3
    product = by_hand[0].rpartition(": ")[2]
    left, right = product.split(" = ")
    terms = [term.split(" x ") for term in left.split(" + ")]
    assert sum(float(a) * float(b) for a, b in terms) == pytest.approx(float(right), abs=5e-4)


@pytest.mark.parametrize(("part", "shown"), [("split", {"split"}), ("attention", {"attention"})])
def test_one_part_can_be_walked_alone(part: str, shown: set[str]) -> None:
    output = run("walk", "--part", part).output
    for name in ("split", "attention"):
        assert (text(f"part.{name}.title", "en") in output) == (name in shown)


def test_chinese_speaks_every_chapter_and_no_english_sentence() -> None:
    output = run("walk", "--lang", "zh").output
    for chapter in CHAPTERS:
        assert text(f"chapter.{chapter.name}.title", "zh", joined="Z1 | Z2 | Z3") in output
    assert "(批次, 序列长度, 头, 头维度)" in output
    assert "(批次, 头, 序列长度, 头维度)" in output
    for word in (" the ", " and ", "head 0", "sample", "position", "query", "key "):
        assert word not in output


def test_chinese_columns_stand_below_each_other() -> None:
    """Counted in cells of the terminal, of which a Chinese character takes two."""
    printed = run("walk", "--lang", "zh").output.splitlines()
    start = printed.index("   x = torch.arange(36).reshape(2, 3, 6)")
    rows = printed[start + 4 : start + 7]
    bars = [[cell_len(row[:at]) for at, sign in enumerate(row) if sign == "│"] for row in rows]
    assert bars[0] == bars[1] == bars[2]
    labels = [cell_len(printed[start + 7].split(label)[0]) for label in ("头 1", "头 2")]
    assert labels[0] > bars[0][0]
    assert labels[1] > bars[0][1]


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("sizes", [[], ["--batch", "3", "--length", "20", "--model-dim", "64", "--heads", "8"]])
def test_no_line_is_wider_than_the_terminal(language: str, columns: int, sizes: list[str]) -> None:
    output = run("walk", "--lang", language, *sizes, columns=columns).output
    assert max(cell_len(line) for line in output.splitlines()) <= columns


@pytest.mark.parametrize("language", ["en", "zh"])
def test_large_sizes_stay_readable_and_say_what_they_leave_out(language: str) -> None:
    sizes = ["--batch", "8", "--length", "64", "--model-dim", "512", "--heads", "8"]
    output = run("walk", "--lang", language, *sizes).output
    assert len(output.splitlines()) < 800
    explained = text("elided", language, count="262,144").replace(" ", "")
    assert output.replace(" ", "").replace("\n", "").count(explained) == 1
    assert output.count(text("elided again", language, count="262,144")) > 5


def test_a_sample_without_tokens_is_explained() -> None:
    assert text("empty", "en") in joined(run("walk", "--lengths", "3,0").output)


@pytest.mark.parametrize("given", ["3,1", "3, 1", "3，1"])
def test_lengths_are_read_with_either_comma(given: str) -> None:
    assert "lengths = torch.tensor([3, 1])" in run("walk", "--lengths", given).output


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (
            ["walk", "--model-dim", "7"],
            "model_dim is 7, and 3 heads do not divide it. Give 1 or 7 heads, or a width that is a multiple of 3.",
        ),
        (["walk", "--batch", "0"], "batch is 0, and must be at least 1. Give 1 or more."),
        (["walk", "--length", "-2"], "length is -2, and must be at least 1. Give 1 or more."),
        (
            ["walk", "--heads", "0"],
            "num_heads is 0, and must be at least 1. Give 1 or more.",
        ),
        (
            ["walk", "--lengths", "-1,2"],
            (
                "The length of sample 0 is -1, and must be from 0 to 3, the length of the sequence. "
                "Give a length in that range."
            ),
        ),
        (
            ["walk", "--lengths", "3,9"],
            (
                "The length of sample 1 is 9, and must be from 0 to 3, the length of the sequence. "
                "Give a length in that range."
            ),
        ),
        (
            ["walk", "--lengths", "3"],
            "lengths has 1 entry, and the batch has 2 samples. Give 2 lengths, one per sample.",
        ),
        (
            ["walk", "--lengths", "3,x"],
            (
                "lengths is '3,x', and must be whole numbers with commas between them. "
                "Give one number per sample, such as --lengths 3,2."
            ),
        ),
        (
            ["walk", "--heads", "two"],
            "Invalid value for '--heads': 'two' is not a valid integer. See `multihead walk --help`.",
        ),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_nothing_else(args: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, args, prog_name="multihead")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == f"error: {sentence}\n"


def test_an_error_of_several_lines_is_told_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: object) -> None:
        raise MultiheadError("The file 'a\nb'  is missing.", "Give another.")

    monkeypatch.setattr("multihead_lab.walk.walk", broken)
    result = run("walk")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: The file 'a b' is missing. Give another.\n"


TWO_WALKS = """
from multihead.cli import main
try:
    main(["walk", "--lang", "zh", "--part", "split"])
except SystemExit as ended:
    print("\\nended", ended.code, flush=True)
main(["walk"])
"""


def test_a_terminal_without_chinese_gets_question_marks_and_a_reader_may_close_the_pipe() -> None:
    """Neither is answered by a traceback."""
    environment = {"PYTHONIOENCODING": "ascii", "PYTHONPATH": ":".join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", TWO_WALKS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as walking:
        assert walking.stdout is not None
        assert walking.stderr is not None
        chinese = list(iter(walking.stdout.readline, b"ended 0\n"))
        assert any(b"?" in line for line in chinese)
        walking.stdout.readline()
        walking.stdout.close()
        assert walking.stderr.read() == b""


def test_colour_is_dropped_when_piped_and_with_no_color() -> None:
    assert "\x1b" not in run("walk").output
