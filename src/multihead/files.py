"""Read texts, write files atomically, and raise errors that explain why a file cannot be read or written."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import BinaryIO

from multihead.errors import InputError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MOST_NAME = 100
"""Maximum number of bytes of a file's name in the name of its temporary file; most systems allow 255 in all."""

_PART = re.compile(r"[a-z0-9_]{8}\.part")
_READING = os.O_RDONLY | getattr(os, "O_BINARY", 0)
_SEEKING = threading.Lock()
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def readable_text(file: str) -> str:
    """Read a UTF-8 text file, or standard input for "-".

    Raises:
        InputError: the file does not exist, is a folder, cannot be read, or is not UTF-8 text.
    """
    check_file_name(file)
    try:
        return _standard_input() if file == "-" else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"There is no file {file!r}.", "Check its name.") from None
    except IsADirectoryError:
        raise InputError(f"{file!r} is a folder.", "Give a text file.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file!r} is not UTF-8 text: its byte {error.start} is invalid.", "Save it as UTF-8."
        ) from None
    except OSError as error:
        raise _file_error(file, error, "read") from None


def _standard_input() -> str:
    """Read all of standard input as UTF-8, independent of the terminal's encoding."""
    if sys.stdin is None:  # the process was started with standard input closed
        raise InputError("Standard input is closed, so no text can be read from it.", "Give the name of a file.")
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else binary.read().decode("utf-8")


def is_folder(place: str | os.PathLike[str]) -> bool:
    """Return whether a folder exists; False for a name that is not valid, instead of an error."""
    try:
        return Path(place).is_dir()
    except (OSError, ValueError):
        return False


def check_file_name(name: str) -> None:
    """Reject an invalid file name: one with a NUL, or one that the file system cannot encode.

    Raises:
        InputError: the name is invalid.
    """
    try:
        if b"\0" not in os.fsencode(name):
            return
    except UnicodeEncodeError:
        pass
    raise InputError(f"{name!r} cannot be the name of a file.", "Choose another name.")


def check_writable(targets: Sequence[str]) -> None:
    """Reject files that cannot be written, before any work is done.

    Devices and pipes may be named twice, and need no writable folder, because they are written in place.

    Raises:
        InputError: two of them are the same file, one is a folder, its name is invalid, or its folder does not exist or
            is not writable.
    """
    files = []
    for target in targets:
        check_file_name(target)
        try:
            place, info = _path_to_replace(target)
            if info is not None and stat.S_ISDIR(info.st_mode):
                raise InputError(f"{target!r} is a folder.", "Give the name of a file.")
            if place is None:
                if not os.access(target, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                continue
            files.append(place)
            if not place.parent.is_dir():
                raise InputError(
                    f"{target!r} cannot be written: there is no folder {str(place.parent)!r}.", "Create it first."
                )
            if not os.access(place.parent, os.W_OK):
                raise InputError(
                    f"{target!r} cannot be written: {str(place.parent)!r} is read-only.", "Choose another folder."
                )
        except OSError as error:
            raise _file_error(target, error, "written") from None
    if len(set(files)) < len(files):
        raise InputError(f"The files {', '.join(targets)} are not all different.", "Give each a different name.")


def write_atomically(target: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8; see `open_atomically`."""
    encoded = content.encode("utf-8") if isinstance(content, str) else content
    with open_atomically(target) as file:
        file.write(encoded)


@contextmanager
def open_atomically(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for atomic writing: a reader sees the old file or the whole new one, never a part.

    The content goes to a temporary file in the same folder, which is renamed at the end of the context, or removed if
    that fails. A temporary file that a killed process left is removed by the next write of the same file. A device or
    a pipe is written in place, and so is the file that standard output or standard error is redirected to. For a
    symbolic link its target is written. The new file has the permissions of the old one.

    Raises:
        InputError: the file cannot be written, for example because the disk is full.
    """
    name = os.fspath(target)
    check_file_name(name)
    try:
        place, info = _path_to_replace(name)
        if place is None:
            with _open_in_place(name, info) as file:
                yield file
            return
        _remove_leftovers(place)
        with _open_temporary(place, info) as file:
            yield file
    except OSError as error:
        if error.errno is None:
            raise  # not an error of the operating system
        raise _file_error(name, error, "written") from error


def _path_to_replace(target: str) -> tuple[Path | None, os.stat_result | None]:
    """Resolve the path to replace; None where the existing file must be written in place.

    Returns:
        the path with links resolved, and the status of the existing file, if there is one.
    """
    try:
        info = Path(target).stat()
    except FileNotFoundError:
        return Path(os.path.realpath(target)), None
    place = Path(os.path.realpath(target))
    plain = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
    # A link in /proc can point to a file that has been unlinked.
    if not plain or _standard_stream_of(info) is not None or not place.exists():
        return None, info
    return place, info


def _standard_stream_of(info: os.stat_result) -> int | None:
    """Return the descriptor of standard output or standard error if that is this regular file, else None."""
    for descriptor in (1, 2):
        try:
            if stat.S_ISREG(info.st_mode) and os.path.samestat(os.fstat(descriptor), info):
                return descriptor
        except OSError:  # the stream is closed
            continue
    return None


def _open_in_place(name: str, info: os.stat_result | None) -> BinaryIO:
    """Open an existing device or pipe, or the file of a standard stream after its current content."""
    stream = None if info is None else _standard_stream_of(info)
    if stream is None:
        return os.fdopen(os.open(name, os.O_WRONLY), "wb")
    for each in (sys.stdout, sys.stderr):
        if each is not None:  # pythonw has no standard streams
            each.flush()
    return os.fdopen(os.dup(stream), "wb")


@contextmanager
def _open_temporary(place: Path, info: os.stat_result | None) -> Iterator[BinaryIO]:
    """Open a locked temporary file next to a path, and rename it to the path at the end of the context."""
    part, handle = _create_temporary(place)
    try:
        with os.fdopen(handle, "wb") as file:
            if info is not None:
                part.chmod(stat.S_IMODE(info.st_mode) & 0o777)  # without a setuid bit, because the content is new
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power cut the name has the old content or the new
            if fcntl is None:
                file.close()  # Windows cannot rename an open file
            part.replace(place)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise


def _create_temporary(place: Path) -> tuple[Path, int]:
    while True:
        part = place.with_name(f"{_temporary_prefix(place)}{secrets.token_hex(4)}.part")
        handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        # Before it was locked, another process may have removed the temporary file as a leftover.
        if _try_lock(handle) is not False and part.exists():
            return part, handle
        os.close(handle)


def _remove_leftovers(place: Path) -> None:
    """Remove temporary files that killed processes left: those that no process has locked."""
    prefix = _temporary_prefix(place)
    with suppress(OSError), os.scandir(place.parent) as entries:
        parts = [each for each in entries if each.name.startswith(prefix) and _PART.fullmatch(each.name, len(prefix))]
        for entry in [each for each in parts if each.is_file(follow_symlinks=False)]:
            with suppress(OSError):
                handle = os.open(entry.path, os.O_WRONLY)
                try:
                    if fcntl is not None and _try_lock(handle):
                        Path(entry.path).unlink()
                finally:
                    os.close(handle)
                if fcntl is None:
                    Path(entry.path).unlink()  # Windows cannot remove an open file


def _temporary_prefix(place: Path) -> str:
    """Return the start of a temporary file's name, truncated so that the whole name is not too long."""
    return f".{place.name.encode('utf-8', 'surrogateescape')[:MOST_NAME].decode('utf-8', 'ignore')}."


def _try_lock(handle: int) -> bool | None:
    """Lock an open file; False if another process holds the lock, None if files cannot be locked."""
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        pass
    return None


def _file_error(name: str, error: OSError, verb: str) -> InputError:
    """Build the error that explains why a file cannot be read or written."""
    if error.errno in _FULL:
        return InputError(f"{name!r} cannot be {verb}: {error.strerror}.", "Free some space, or write elsewhere.")
    return InputError(f"{name!r} cannot be {verb}: {error.strerror}.", "Check its name and permissions.")


class RandomAccessFile:
    """A file of a fixed size that is read and written in parts, at any offset.

    Another process may truncate or replace it in the meantime. That raises an error here, whereas a memory-mapped file
    would end the process with SIGBUS.

    Args:
        file: the file, which must exist.
        hold: whether to keep the file open, so that it can be read after another file has replaced it; reading then
            raises an error if another process has written to the file.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path, *, hold: bool = False) -> None:
        self.file = file
        self._held: int | None = os.open(file, _READING)
        info = os.fstat(self._held)
        self._time = info.st_mtime_ns if hold else None
        self._known = self._status_to_compare(info)
        close = weakref.finalize(self, os.close, self._held)
        if not hold:
            close()
            self._held = None

    @property
    def size(self) -> int:
        """Size of the file, bytes."""
        return self._known[2]

    def read_into(self, place: int, numbers: memoryview) -> None:
        """Fill a buffer from an offset in the file.

        Args:
            place: the offset, bytes.
            numbers: the buffer.

        Raises:
            InputError: the file was truncated, replaced, removed or written to.
        """
        try:
            handle = os.open(self.file, _READING) if self._held is None else self._held
            try:
                count = _read_at(handle, place, numbers)
                # Checked after reading, so that a change during the read is noticed too.
                same = self._status_to_compare(os.fstat(handle)) == self._known
            finally:
                if self._held is None:
                    os.close(handle)
        except OSError as error:
            raise self._change_error() from error
        if count < len(numbers) or not same:
            raise self._change_error()

    def write(self, parts: dict[int, memoryview]) -> None:
        """Write buffers at their offsets within the file, and wait until they are on the disk.

        Args:
            parts: the buffers by offset, bytes.

        Raises:
            InputError: the file was truncated, replaced or removed, or cannot be written.
        """
        try:
            with self.file.open("r+b") as file:
                if self._status_to_compare(os.fstat(file.fileno())) != self._known:
                    raise self._change_error()
                for place, numbers in parts.items():
                    file.seek(place)
                    file.write(numbers)
                file.flush()
                os.fsync(file.fileno())
        except FileNotFoundError as error:
            raise self._change_error() from error
        except OSError as error:
            raise _file_error(str(self.file), error, "written") from error

    def _status_to_compare(self, info: os.stat_result) -> tuple[int, int, int, int | None]:
        """Return the fields of a file's status that show whether another process has changed the file."""
        return info.st_dev, info.st_ino, info.st_size, None if self._time is None else info.st_mtime_ns

    def _change_error(self) -> InputError:
        return InputError(f"{str(self.file)!r} was changed, truncated or removed while it was read.", "Open it again.")


def _read_at(handle: int, place: int, into: memoryview) -> int:
    """Fill a buffer from an offset in an open file, and return the number of bytes read, fewer at the file's end."""
    done = 0
    while done < len(into):
        if hasattr(os, "preadv"):
            count = os.preadv(handle, [into[done:]], place + done)
        else:  # Windows
            with _SEEKING:
                os.lseek(handle, place + done, os.SEEK_SET)
                content = os.read(handle, min(len(into) - done, 1 << 24))
            count = len(content)
            into[done : done + count] = content
        if not count:
            break
        done += count
    return done
