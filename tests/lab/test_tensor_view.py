"""What the walk draws: colours and labels of heads, numbers, shapes, and lines that break where they may."""

from __future__ import annotations

import io

import torch
from rich.console import Console

from multihead.cli.console import wrap_words
from multihead_lab.commands.tensor_view import draw_step, format_shape_with_axes, head_style, number_formatter
from multihead_lab.walk import walk


def test_each_head_keeps_its_colour_and_its_label() -> None:
    step = walk()["by_head"]
    entries = {
        axis: f"{name} {{}}".format for axis, name in {"batch": "sample", "length": "position", "heads": "head"}.items()
    }
    drawing = draw_step(step, num_heads=3, entries=entries, width=80)
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="standard", width=80)
    console.print(drawing.lines[1])
    cyan, magenta, green = "\x1b[36m", "\x1b[35m", "\x1b[32m"
    for colour, number in ((cyan, " 0"), (magenta, " 2"), (green, " 4")):
        assert f"{colour}{number}" in stream.getvalue()
    assert [head_style(head) for head in range(3)] == ["cyan", "magenta", "green"]
    assert "head 0   head 1   head 2" in drawing.lines[0].plain


def test_numbers_are_written_with_as_many_decimals_as_they_need() -> None:
    assert number_formatter(torch.tensor([1, 20]))(20) == "20"
    assert number_formatter(torch.tensor([0.5, 0.0]))(0.5) == "0.5"
    assert number_formatter(torch.tensor([0.25, 1.0]))(1.0) == "1.00"
    assert number_formatter(torch.tensor([1 / 3, -torch.inf]))(1 / 3) == "0.333"
    assert number_formatter(torch.tensor([1 / 3, -torch.inf]))(-torch.inf) == "-inf"
    assert number_formatter(torch.tensor([0.5, -1e-17]))(-1e-17) == "0.0"


def test_a_shape_stands_over_the_names_of_its_axes() -> None:
    assert format_shape_with_axes((6, 3, 2), ("批量*头", "查询", "头维度")) == (
        "(6,       3,    2)",
        "(批量*头, 查询, 头维度)",
    )
    assert format_shape_with_axes((6,), ("batch",)) == ("(6,)", "(batch,)")


def test_chinese_lines_break_anywhere_but_before_a_closing_mark() -> None:
    assert wrap_words("一二三四。五六", 8) == ["一二三", "四。五六"]
    assert wrap_words("two words", 5) == ["two", "words"]
    assert wrap_words("头 head_dim，共两列", 11) == ["头", "head_dim，", "共两列"]
