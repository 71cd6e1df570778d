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

from multihead.encodings import decode_text
from multihead.errors import InputError

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

MAX_NAME_BYTES = 100
"""Maximum number of bytes of a file's name in the name of its temporary file; most systems allow 255 in all."""

_TEMPORARY_SUFFIX = re.compile(r"[a-z0-9_]{8}\.part")
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_BINARY", 0)
_SEEK_LOCK = threading.Lock()
# Error codes of a full disk or quota, or a file that is too large.
_DISK_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def read_text_file(file: str) -> str:
    r"""Read a UTF-8 text file, or standard input for "-": without a byte order mark, and with line breaks as "\n".

    Raises:
        InputError: the file does not exist, is a folder, cannot be read, or is not UTF-8 text.
    """
    check_file_name(file)
    try:
        return decode_text(file, _read_standard_input() if file == "-" else Path(file).read_bytes())
    except FileNotFoundError:
        raise InputError(f"There is no file {file!r}.", "Check its name.") from None
    except IsADirectoryError:
        raise InputError(f"{file!r} is a folder.", "Give a text file.") from None
    except OSError as error:
        raise _file_error(file, error, "read") from None


def _read_standard_input() -> bytes:
    """Read all bytes of standard input, because its text would depend on the terminal's encoding."""
    if sys.stdin is None:  # the process was started with standard input closed
        raise InputError("Standard input is closed, so no text can be read from it.", "Give the name of a file.")
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read().encode("utf-8", "surrogatepass") if binary is None else bytes(binary.read())


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an existing folder; False for an invalid name, where pathlib raises an error."""
    try:
        return Path(path).is_dir()
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

    Devices and pipes may be given twice, and need no writable folder, because they are written in place.

    Raises:
        InputError: two targets are the same file, a target is a folder, its name is invalid, or its folder does not
            exist or is not writable.
    """
    files = []
    for target in targets:
        check_file_name(target)
        try:
            path, info = _path_to_replace(target)
            if info is not None and stat.S_ISDIR(info.st_mode):
                raise InputError(f"{target!r} is a folder.", "Give the name of a file.")
            if path is None:
                if not os.access(target, os.W_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                continue
            files.append(path)
            if not path.parent.is_dir():
                raise InputError(
                    f"{target!r} cannot be written: there is no folder {str(path.parent)!r}.", "Create it first."
                )
            if not os.access(path.parent, os.W_OK):
                raise InputError(
                    f"{target!r} cannot be written: {str(path.parent)!r} is read-only.", "Choose another folder."
                )
        except OSError as error:
            raise _file_error(target, error, "written") from None
    if len(set(files)) < len(files):
        raise InputError(f"The files {', '.join(targets)} are not all different.", "Give each a different name.")


def write_atomically(target: str | os.PathLike[str], content: str | bytes) -> None:
    """Write bytes or text (as UTF-8) to a file atomically; see `open_atomically`."""
    encoded = content.encode("utf-8") if isinstance(content, str) else content
    with open_atomically(target) as file:
        file.write(encoded)


@contextmanager
def open_atomically(target: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a file for atomic writing: a reader sees the old file or the whole new one, never a part.

    The content goes to a temporary file in the same folder, which is renamed at the end of the context, or removed if
    an error occurs. A temporary file that a killed process left is removed by the next write of the same file. A device
    or a pipe is written in place, and so is the file that standard output or standard error is redirected to. For a
    symbolic link its target is written. The new file has the permissions of the old one.

    Raises:
        InputError: the file cannot be written, for example because the disk is full.
    """
    name = os.fspath(target)
    check_file_name(name)
    try:
        path, info = _path_to_replace(name)
        if path is None:
            with _open_in_place(name, info) as file:
                yield file
            return
        _remove_leftovers(path)
        with _open_temporary(path, info) as file:
            yield file
    except OSError as error:
        if error.errno is None:
            raise  # not an error of the operating system
        raise _file_error(name, error, "written") from error


def _path_to_replace(target: str) -> tuple[Path | None, os.stat_result | None]:
    """Resolve the path to replace; None if the existing file must be written in place, such as a device or a pipe.

    Returns:
        the path with links resolved, and the `os.stat_result` of the existing file, or None.
    """
    try:
        info = Path(target).stat()
    except FileNotFoundError:
        return Path(os.path.realpath(target)), None
    path = Path(os.path.realpath(target))
    plain = stat.S_ISREG(info.st_mode) or stat.S_ISDIR(info.st_mode)
    # A symbolic link in /proc can point to a file that has been removed.
    if not plain or _standard_stream_of(info) is not None or not path.exists():
        return None, info
    return path, info


def _standard_stream_of(info: os.stat_result) -> int | None:
    """Return the descriptor of standard output or error if it is redirected to the regular file `info`, else None."""
    for descriptor in (1, 2):
        try:
            if stat.S_ISREG(info.st_mode) and os.path.samestat(os.fstat(descriptor), info):
                return descriptor
        except OSError:  # the stream is closed
            continue
    return None


def _open_in_place(name: str, info: os.stat_result | None) -> BinaryIO:
    """Open an existing device or pipe for writing, or append to the file that a standard stream is redirected to."""
    stream = None if info is None else _standard_stream_of(info)
    if stream is None:
        return os.fdopen(os.open(name, os.O_WRONLY), "wb")
    for each in (sys.stdout, sys.stderr):
        if each is not None:  # pythonw has no standard streams
            each.flush()
    return os.fdopen(os.dup(stream), "wb")


@contextmanager
def _open_temporary(path: Path, info: os.stat_result | None) -> Iterator[BinaryIO]:
    """Open a locked temporary file next to a path, and rename it to the path at the end of the context."""
    temporary, handle = _create_temporary(path)
    try:
        with os.fdopen(handle, "wb") as file:
            if info is not None:
                temporary.chmod(stat.S_IMODE(info.st_mode) & 0o777)  # drops a setuid bit, because the content is new
            yield file
            file.flush()
            os.fsync(file.fileno())  # before the rename: after a power cut the name has the old content or the new
            if fcntl is None:
                file.close()  # Windows cannot rename an open file
            temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def _create_temporary(path: Path) -> tuple[Path, int]:
    while True:
        temporary = path.with_name(f"{_temporary_prefix(path)}{secrets.token_hex(4)}.part")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        # Another process may have removed the temporary file as a leftover before this process locked it.
        if _try_lock(handle) is not False and temporary.exists():
            return temporary, handle
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files of killed processes: files that no process has locked."""
    prefix = _temporary_prefix(path)
    with suppress(OSError), os.scandir(path.parent) as entries:
        parts = [
            each
            for each in entries
            if each.name.startswith(prefix) and _TEMPORARY_SUFFIX.fullmatch(each.name, len(prefix))
        ]
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


def _temporary_prefix(target: Path) -> str:
    """Return the prefix of the name of a temporary file for `target`, truncated to a valid length."""
    return f".{target.name.encode('utf-8', 'surrogateescape')[:MAX_NAME_BYTES].decode('utf-8', 'ignore')}."


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
    if error.errno in _DISK_FULL_CODES:
        return InputError(f"{name!r} cannot be {verb}: {error.strerror}.", "Free some space, or write elsewhere.")
    return InputError(f"{name!r} cannot be {verb}: {error.strerror}.", "Check its name and permissions.")


class RandomAccessFile:
    """A file of a fixed size that is read and written at any offset.

    If another process truncates or replaces the file, reading raises an error, where a memory-mapped file would end the
    process with SIGBUS.

    Args:
        file: the file, which must exist.
        keep_open: whether to keep the file open, so that it can be read after another file has replaced it; reading
            then raises an error if another process has written to the file.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, file: Path, *, keep_open: bool = False) -> None:
        self.file = file
        self._open_handle: int | None = os.open(file, _READ_FLAGS)
        info = os.fstat(self._open_handle)
        self._time_to_compare = info.st_mtime_ns if keep_open else None
        self._known_status = self._status_to_compare(info)
        close = weakref.finalize(self, os.close, self._open_handle)
        if not keep_open:
            close()
            self._open_handle = None

    @property
    def size(self) -> int:
        """Size of the file, bytes."""
        return self._known_status[2]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset in the file.

        Args:
            offset: the position in the file, bytes.
            buffer: the memory to fill.

        Raises:
            InputError: the file was truncated, replaced, removed or written to.
        """
        try:
            handle = os.open(self.file, _READ_FLAGS) if self._open_handle is None else self._open_handle
            try:
                count = _read_at(handle, offset, buffer)
                # The file is checked after reading, so that a change during the read is detected too.
                same = self._status_to_compare(os.fstat(handle)) == self._known_status
            finally:
                if self._open_handle is None:
                    os.close(handle)
        except OSError as error:
            raise self._change_error() from error
        if count < len(buffer) or not same:
            raise self._change_error()

    def write(self, buffers: dict[int, memoryview]) -> None:
        """Write buffers at offsets in the file, and wait until they are on the disk.

        Args:
            buffers: offset in bytes -> buffer to write there.

        Raises:
            InputError: the file was truncated, replaced or removed, or cannot be written.
        """
        try:
            with self.file.open("r+b") as file:
                if self._status_to_compare(os.fstat(file.fileno())) != self._known_status:
                    raise self._change_error()
                for offset, buffer in buffers.items():
                    file.seek(offset)
                    file.write(buffer)
                file.flush()
                os.fsync(file.fileno())
        except FileNotFoundError as error:
            raise self._change_error() from error
        except OSError as error:
            raise _file_error(str(self.file), error, "written") from error

    def _status_to_compare(self, info: os.stat_result) -> tuple[int, int, int, int | None]:
        """Return the fields of a file's status that show whether another process has changed the file."""
        return info.st_dev, info.st_ino, info.st_size, None if self._time_to_compare is None else info.st_mtime_ns

    def _change_error(self) -> InputError:
        return InputError(f"{str(self.file)!r} was changed, truncated or removed while it was read.", "Open it again.")


def _read_at(handle: int, offset: int, into: memoryview) -> int:
    """Fill a buffer from an offset in an open file, and return the number of bytes read, fewer at the file's end."""
    done = 0
    while done < len(into):
        if hasattr(os, "preadv"):
            count = os.preadv(handle, [into[done:]], offset + done)
        else:  # Windows
            with _SEEK_LOCK:
                os.lseek(handle, offset + done, os.SEEK_SET)
                content = os.read(handle, min(len(into) - done, 1 << 24))
            count = len(content)
            into[done : done + count] = content
        if not count:
            break
        done += count
    return done
