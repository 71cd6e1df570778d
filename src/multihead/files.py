"""Read texts and write files whole, and refuse in words what cannot be read or written."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from multihead.errors import InputError


def readable_text(file: str) -> str:
    """Read a UTF-8 text file, or standard input for "-".

    Raises:
        InputError: there is no such file, it is no file, may not be read, or is no UTF-8 text.
    """
    try:
        return _standard_input() if file == "-" else Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"There is no file {file!r}.", "Check its name.") from None
    except IsADirectoryError:
        raise InputError(f"{file!r} is a folder.", "Give a text file.") from None
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file!r} is no UTF-8 text: its byte {error.start} does not fit.", "Save it as UTF-8."
        ) from None
    except OSError as error:
        raise InputError(f"{file!r} cannot be read: {error.strerror or error}.", "Check its name and rights.") from None


def _standard_input() -> str:
    """Read all of standard input as UTF-8, whatever encoding the terminal has."""
    if sys.stdin is None:  # the process was started with it closed
        raise InputError("Standard input is closed, and the text was to come from it.", "Give the name of a file.")
    binary = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if binary is None else binary.read().decode("utf-8")


def refuse_unless_writable(targets: Sequence[str]) -> None:
    """Refuse files that could not be written, before any work is done.

    Raises:
        InputError: two of them are one file, one is a folder, or its folder does not exist or may not be written.
    """
    if len({Path(target).absolute() for target in targets}) < len(targets):
        raise InputError(f"The files {', '.join(targets)} are not all different.", "Give each a name of its own.")
    for target in targets:
        folder = Path(target).absolute().parent
        if Path(target).is_dir():
            raise InputError(f"{target!r} is a folder.", "Give the name of a file.")
        if not folder.is_dir():
            raise InputError(f"{target!r} cannot be written: there is no folder {str(folder)!r}.", "Make it first.")
        if not os.access(folder, os.W_OK):
            raise InputError(f"{target!r} cannot be written: {str(folder)!r} is read-only.", "Choose another folder.")


def write_whole(target: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file, text as UTF-8, whole or not at all: a reader sees the old file or the new one, never a part."""
    place = Path(target).absolute()
    handle, beside = tempfile.mkstemp(dir=place.parent, prefix=f".{place.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        mask = os.umask(0)
        os.umask(mask)
        Path(beside).chmod(0o666 & ~mask)  # mkstemp makes files for their owner's eyes only
        Path(beside).replace(place)
    except BaseException:
        Path(beside).unlink()
        raise
