"""Files are read as text or refused, and written whole or not at all."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from multihead.errors import InputError
from multihead.files import readable_text, refuse_unless_writable, write_whole


def test_a_text_is_read_as_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    file.write_text("头 🎉\n", encoding="utf-8")
    assert readable_text(str(file)) == "头 🎉\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert readable_text("-") == "from a pipe"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda file: None, "There is no file {file!r}. Check its name."),
        (lambda file: file.mkdir(), "{file!r} is a folder. Give a text file."),
        (
            lambda file: file.write_bytes(b"ab\xff"),
            "{file!r} is no UTF-8 text: its byte 2 does not fit. Save it as UTF-8.",
        ),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, make: Callable[[Path], object], sentence: str) -> None:
    file = tmp_path / "text.txt"
    make(file)
    with pytest.raises(InputError, match=f"^{re.escape(sentence.format(file=str(file)))}$"):
        readable_text(str(file))


def test_a_file_is_written_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_whole(file, "old")
    write_whole(file, "new\n")
    assert file.read_bytes() == b"new\n"
    assert list(tmp_path.iterdir()) == [file]
    plain = tmp_path / "plain.html"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode


def test_a_failure_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_whole(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_whole(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_places_that_cannot_be_written_are_refused_before_any_work(tmp_path: Path) -> None:
    fine, nowhere = str(tmp_path / "a.csv"), str(tmp_path / "none" / "b.csv")
    refuse_unless_writable([fine])
    with pytest.raises(InputError, match=f"^{re.escape(repr(nowhere))} cannot be written: there is no folder .* first"):
        refuse_unless_writable([fine, nowhere])
    with pytest.raises(InputError, match=f"^{re.escape(repr(str(tmp_path)))} is a folder. Give the name of a file.$"):
        refuse_unless_writable([str(tmp_path)])
    with pytest.raises(InputError, match=r"are not all different\. Give each a name of its own\.$"):
        refuse_unless_writable([fine, fine])
