"""The group of commands: what it lists, what it imports, and the commands of packages beside the library."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

import multihead
from multihead.cli import COMMANDS, main

ALL = (*COMMANDS, "walk", "lab")
# Runs where the lab is not installed: neither its folder nor an editable install is found.
WITHOUT_LAB = """
import sys
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path != sys.argv[2])]
sys.meta_path[:] = [each for each in sys.meta_path if not getattr(type(each), "__module__", "").startswith("_editable")]
from multihead.cli import main
main(sys.argv[3:], prog_name="multihead")
"""


def run(*args: str) -> Result:
    return CliRunner().invoke(main, args, prog_name="multihead")


def test_it_lists_its_commands_and_its_version() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ALL:
        assert f"\n  {command} " in result.output
    assert run().output == result.output
    assert run("--version").output.startswith("multihead ")


@pytest.mark.parametrize("command", ALL)
def test_every_command_loads_and_its_help_shows_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"multihead {command}" in result.output
    assert max(map(cell_len, result.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["stroll"], "No such command 'stroll'. See `multihead --help`."),
        (["lok"], "No such command 'lok'. Did you mean 'look'? See `multihead --help`."),
        (["wakl"], "No such command 'wakl'. Did you mean 'walk'? See `multihead --help`."),
        (["--loud"], "No such option '--loud'. See `multihead --help`."),
    ],
)
def test_an_unknown_name_is_one_line_on_stderr(args: list[str], sentence: str) -> None:
    result = run(*args)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", f"error: {sentence}\n")


def test_its_help_loads_no_command_of_the_library_and_no_torch() -> None:
    program = (
        "import sys\n"
        "from multihead.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in sys.argv[1:] if name in sys.modules])"
    )
    names = ("torch", *(f"multihead.cli.{name}" for name in COMMANDS))
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_library_and_its_commands_work_without_the_lab(tmp_path: Path) -> None:
    source = Path(multihead.__file__).parent
    (tmp_path / "multihead").symlink_to(source)

    def without(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_LAB, str(tmp_path), str(source.parent), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    listed = without("--help")
    assert listed.returncode == 0, listed.stderr
    assert [name for name in ALL if f"\n  {name} " in listed.stdout] == [*COMMANDS]
    assert without("walk").stderr == "error: No such command 'walk'. See `multihead --help`.\n"
    assert "Kernels, the fastest first" in without("doctor").stdout
