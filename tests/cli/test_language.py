"""The commands print in the language of the locale, unless --lang names one."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from multihead.cli import main
from multihead.cli.language import LOCALE_VARIABLES, language_of_locale

ENGLISH, CHINESE = "A walk through multi-head attention", "多头注意力：一步一步走一遍"


@pytest.fixture(autouse=True)
def _no_locale(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LOCALE_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variables", "lang"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "en_US.UTF-8"}, "en"),
        ({"LANG": "de_DE.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "C.UTF-8", "LC_MESSAGES": "zh_TW.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
    ],
)
def test_the_first_variable_that_is_set_decides(
    variables: dict[str, str], lang: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert language_of_locale() == lang


@pytest.mark.parametrize(("options", "title"), [((), CHINESE), (("--lang", "en"), ENGLISH)])
def test_a_named_language_precedes_that_of_the_locale(options: tuple[str, ...], title: str) -> None:
    result = CliRunner(env={"LANG": "zh_CN.UTF-8"}).invoke(main, ["walk", "--part", "split", *options])
    assert title in result.output


@pytest.mark.parametrize("command", ["look", "view", "compare", "walk", "lab"])
def test_every_command_says_where_its_language_comes_from(command: str) -> None:
    shown = " ".join(CliRunner().invoke(main, [command, "--help"]).stdout.split())
    assert "--lang [en|zh] Language of the output and of pages. [default: (that of the locale, else en)]" in shown
