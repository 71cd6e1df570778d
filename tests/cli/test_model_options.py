"""Commands that run a model have the same options, and parse layers in one way."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from multihead.cli import main
from multihead.cli.model_options import parse_layers


@pytest.mark.parametrize("command", ["look", "census"])
def test_both_commands_show_them(command: str) -> None:
    shown = CliRunner().invoke(main, [command, "--help"]).stdout
    assert re.search(r"--layers N,N-N,\.\.\. .*--device TEXT .*--dtype \[auto\|", shown, re.DOTALL)


def test_a_command_that_names_its_heads_has_those_of_the_run_only() -> None:
    shown = CliRunner().invoke(main, ["ablate", "--help"]).stdout
    assert re.search(r"--device TEXT .*--dtype \[auto\|", shown, re.DOTALL)
    assert "--layers" not in shown


def test_layers_are_numbers_and_ranges() -> None:
    assert parse_layers("0, 3-5，7") == [0, 3, 4, 5, 7]


@pytest.mark.parametrize("layers", ["", "a", "5-3", "1-", "1,,2", "-1"])
def test_other_layers_are_an_error(layers: str) -> None:
    sentence = f"--layers is {layers!r}. Give layer numbers such as 0,3-5."
    with pytest.raises(click.UsageError, match=f"^{re.escape(sentence)}$"):
        parse_layers(layers)
