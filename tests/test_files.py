"""Files are read as text or rejected, and written atomically."""

from __future__ import annotations

import io
import os
import re
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multihead.errors import InputError
from multihead.files import check_writable, open_atomically, read_text_file, write_atomically


def test_a_text_is_read_as_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text.txt"
    file.write_text("头 🎉\n", encoding="utf-8")
    assert read_text_file(str(file)) == "头 🎉\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert read_text_file("-") == "from a pipe"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda file: None, "There is no file {file!r}. Check its name."),
        (lambda file: file.mkdir(), "{file!r} is a folder. Give a text file."),
        (
            lambda file: file.write_bytes(b"ab\xff"),
            "{file!r} is not UTF-8 text: its byte 2 is invalid. Save it as UTF-8.",
        ),
    ],
)
def test_what_is_not_text_is_rejected(tmp_path: Path, make: Callable[[Path], object], sentence: str) -> None:
    file = tmp_path / "text.txt"
    make(file)
    with pytest.raises(InputError, match=f"^{re.escape(sentence.format(file=str(file)))}$"):
        read_text_file(str(file))


def test_a_file_is_written_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_atomically(file, "old")
    write_atomically(file, "new\n")
    assert file.read_bytes() == b"new\n"
    assert list(tmp_path.iterdir()) == [file]
    plain = tmp_path / "plain.html"
    plain.write_text("")
    assert file.stat().st_mode == plain.stat().st_mode


def test_a_failure_leaves_the_old_file_and_no_other_file(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(file, "new \ud800")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_paths_that_cannot_be_written_are_rejected_before_any_work(tmp_path: Path) -> None:
    fine, nowhere = str(tmp_path / "a.csv"), str(tmp_path / "none" / "b.csv")
    check_writable([fine])
    with pytest.raises(InputError, match=f"^{re.escape(repr(nowhere))} cannot be written: there is no folder .* first"):
        check_writable([fine, nowhere])
    with pytest.raises(InputError, match=f"^{re.escape(repr(str(tmp_path)))} is a folder. Give the name of a file.$"):
        check_writable([str(tmp_path)])
    with pytest.raises(InputError, match=r"are not all different\. Give each a different name\.$"):
        check_writable([fine, fine])


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        act()
    return str(caught.value)


def device(place: Path, minor: int) -> Path:
    """Make a device of memory of its own: 3 takes everything, 7 is always full."""
    try:
        os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        os.close(os.open(place, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error.strerror}")
    return place


class TestWhatIsThereAlready:
    def test_a_device_is_written_into_and_stays_one(self, tmp_path: Path) -> None:
        null = device(tmp_path / "null", 3)
        check_writable([str(null), str(null)])
        write_atomically(null, "to nobody")
        assert stat.S_ISCHR(null.lstat().st_mode)
        assert list(tmp_path.iterdir()) == [null]

    def test_a_pipe_is_written_into(self, tmp_path: Path) -> None:
        os.mkfifo(pipe := tmp_path / "pipe")
        check_writable([str(pipe)])
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
        reader.start()
        write_atomically(pipe, "through a pipe")
        reader.join()
        assert found == [b"through a pipe"]
        assert stat.S_ISFIFO(pipe.lstat().st_mode)

    def test_a_links_target_is_written_and_the_link_stays(self, tmp_path: Path) -> None:
        (folder := tmp_path / "elsewhere").mkdir()
        (target := folder / "page.html").write_text("old")
        (link := tmp_path / "link.html").symlink_to("elsewhere/page.html")
        write_atomically(link, "new")
        assert (link.is_symlink(), target.read_text()) == (True, "new")
        (dangling := tmp_path / "dangling.html").symlink_to(folder / "made.html")
        check_writable([str(dangling)])
        write_atomically(dangling, "made")
        assert (dangling.is_symlink(), (folder / "made.html").read_text()) == (True, "made")
        assert sorted(each.name for each in folder.iterdir()) == ["made.html", "page.html"]

    def test_a_link_and_its_target_are_one_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").touch()
        (tmp_path / "b.csv").symlink_to("a.csv")
        names = [str(tmp_path / name) for name in ("a.csv", "b.csv")]
        assert refusal(lambda: check_writable(names)) == (
            f"The files {', '.join(names)} are not all different. Give each a different name."
        )

    def test_the_file_of_standard_output_keeps_what_was_printed(self, tmp_path: Path) -> None:
        (link := tmp_path / "stdout").symlink_to("/proc/self/fd/1")
        code = (
            f"from multihead.files import write_atomically; print(1); write_atomically({str(link)!r}, '2\\n'); print(3)"
        )
        with (printed := tmp_path / "printed").open("wb") as out:
            subprocess.run([sys.executable, "-c", code], stdout=out, check=True)
        assert (printed.read_text(), link.is_symlink()) == ("1\n2\n3\n", True)

    @pytest.mark.parametrize(("mode", "kept"), [(0o600, 0o600), (0o4755, 0o755)])
    def test_a_file_keeps_its_rights_and_no_setuid_bit(self, mode: int, kept: int, tmp_path: Path) -> None:
        (file := tmp_path / "page.html").touch()
        file.chmod(mode)
        write_atomically(file, "new")
        assert stat.S_IMODE(file.stat().st_mode) == kept

    def test_the_content_reaches_the_disk_before_the_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (file := tmp_path / "page.html").write_text("old")
        stored: list[tuple[int, str]] = []
        monkeypatch.setattr(os, "fsync", lambda handle: stored.append((os.fstat(handle).st_size, file.read_text())))
        write_atomically(file, "newer")
        assert stored == [(5, "old")]


class TestWhatCannotBeWritten:
    @contextmanager
    def little_room(self) -> Iterator[None]:
        """Limit every file to 1,000 bytes, as on a full disk; also those that pytest logs to."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def test_without_room_the_old_file_stays_and_nothing_next_to_it(self, tmp_path: Path) -> None:
        write_atomically(file := tmp_path / "page.html", "old")
        with self.little_room():
            sentence = refusal(lambda: write_atomically(file, "new" * 1000))
        assert sentence == f"{str(file)!r} cannot be written: File too large. Free some space, or write elsewhere."
        assert file.read_text() == "old"
        assert list(tmp_path.iterdir()) == [file]

    def test_a_device_that_is_full(self, tmp_path: Path) -> None:
        full = device(tmp_path / "full", 7)
        assert refusal(lambda: write_atomically(full, "new")) == (
            f"{str(full)!r} cannot be written: No space left on device. Free some space, or write elsewhere."
        )
        assert stat.S_ISCHR(full.lstat().st_mode)

    @pytest.mark.parametrize("name", ["a\0b", "\ud800"])
    def test_what_no_file_can_be_called(self, name: str, tmp_path: Path) -> None:
        file = str(tmp_path / name)
        sentence = f"{file!r} cannot be the name of a file. Choose another name."
        for act in (write_atomically, lambda file, _: check_writable([file]), lambda file, _: read_text_file(file)):
            assert refusal(lambda act=act: act(file, "new")) == sentence  # type: ignore[misc]
        assert list(tmp_path.iterdir()) == []

    def test_a_name_that_is_too_long(self, tmp_path: Path) -> None:
        longest, longer = str(tmp_path / ("头" * 85)), str(tmp_path / ("头" * 86))
        write_atomically(longest, "new")
        assert [each.name for each in tmp_path.iterdir()] == ["头" * 85]
        for act in (write_atomically, lambda file, _: check_writable([file])):
            assert refusal(lambda act=act: act(longer, "new")) == (  # type: ignore[misc]
                f"{longer!r} cannot be written: File name too long. Check its name and permissions."
            )


class TestLeftovers:
    def test_what_a_killed_process_left_is_removed_by_the_next_writing(self, tmp_path: Path) -> None:
        file = tmp_path / "page.html"
        code = (
            "import os; from multihead.files import open_atomically\n"
            f"with open_atomically({str(file)!r}) as opened: opened.write(b'x' * 99999); os.kill(os.getpid(), 9)"
        )
        subprocess.run([sys.executable, "-c", code], check=False)
        (left,) = tmp_path.iterdir()
        assert re.fullmatch(r"\.page\.html\.[0-9a-f]{8}\.part", left.name)
        (other := tmp_path / ".page.html.old.part").touch()  # not one of ours
        write_atomically(file, "new")
        assert sorted(tmp_path.iterdir()) == [other, file]

    def test_what_another_process_is_writing_stays(self, tmp_path: Path) -> None:
        file = tmp_path / "page.html"
        with open_atomically(file) as slow:
            slow.write(b"slow")
            write_atomically(file, "quick")
            assert file.read_bytes() == b"quick"
        assert file.read_bytes() == b"slow"
        assert list(tmp_path.iterdir()) == [file]
