"""Find the files of a corpus, identify their content, and divide them into shards.

Lines are divided at bytes, not at line numbers: a shard has the lines that begin in its range of bytes. Dividing a file
of lines reads only the first and last bytes of the file, and errors name a broken row by its byte offset.

A file counts as unchanged if its size, its modification time, and its first and last bytes are equal; if a server has a
tag instead of a time, the tag is compared. The hash of a plan leaves out times and tags, so copies of a corpus give
shard files with equal bytes.

The sizes of shards do not depend on the number of processes, so the bytes of the shards' files do not either. The last
shards are smaller than the first, because with equal sizes a core was idle at the end of a census.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from multihead.counting.formats import FilePart, Shard, compression_of_file, file_system_of, format_of_file
from multihead.errors import InputError

MAX_SHARD_BYTES, MIN_SHARD_BYTES = 1 << 25, 1 << 14
"""Largest and smallest number of bytes of text in a shard."""

SHARD_DIVISOR, MIN_SHARD_DIVISOR = 64, 4096
"""A shard is a 64th of the text that is not yet divided into shards, and at least a 4096th of the corpus."""

ASSUMED_COMPRESSION_RATIO = 3
"""Estimated bytes of text per byte of a compressed file."""

_BYTES_PER_END = 1 << 12  # bytes at each end of a file that identify its content
_VERSION_FIELDS = "mtime", "LastModified", "last_modified", "updated", "ETag", "etag", "created"


class FileVersion(NamedTuple):
    """What identifies the content of a file of a corpus, besides the file's size.

    Attributes:
        last_written: when the file was last written, or its server's tag of this version; "" if fsspec knows neither.
        hash_of_ends: hash of the first and the last `_BYTES_PER_END` bytes of the file.
    """

    last_written: str
    hash_of_ends: str


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that match some names or globs, in the order of the patterns, each sorted by name.

    A name that matches no file is kept, so that the file is reported as missing when its texts are read.

    Raises:
        InputError: no file exists, or a file has a suffix that no format in `FORMATS` has.
    """
    found: dict[str, None] = {}
    any_exists = False
    for pattern in patterns:
        system, path = file_system_of(pattern)
        matches = sorted(system.glob(path)) if any(sign in pattern for sign in "*?[") else []
        matches = [each for each in matches if not system.isdir(each)]
        if not matches and system.isdir(path):
            raise InputError(
                f"{pattern!r} is a folder.", f"Give its files, for example '{pattern.rstrip('/')}/*.parquet'."
            )
        any_exists |= bool(matches) or system.isfile(path)
        found.update(dict.fromkeys([_name_in_pattern_style(system, pattern, each) for each in matches] or [pattern]))
    if not any_exists:
        raise InputError(f"There is no file {' or '.join(repr(each) for each in patterns)}.", "Check the names.")
    for file in found:
        format_of_file(file)
    return list(found)


def _name_in_pattern_style(system: Any, pattern: str, path: str) -> str:
    """Return the path of a file in the style of the glob pattern that matched: with protocol, absolute or relative."""
    if "://" in pattern:
        return str(system.unstrip_protocol(path))
    if PurePosixPath(pattern).is_absolute():
        return path
    here = str(PurePosixPath(system._strip_protocol("."))) + "/"  # noqa: SLF001 - fsspec makes paths absolute with it
    return path.removeprefix(here)


def sizes_and_versions(files: Sequence[str]) -> tuple[dict[str, int | None], dict[str, FileVersion]]:
    """Return the size of each file in bytes (None if unknown), and the `FileVersion` of each file that can be read.

    A file that cannot be read is missing in the versions.
    """
    sizes: dict[str, int | None] = dict.fromkeys(files)
    versions: dict[str, FileVersion] = {}
    for file in files:
        system, path = file_system_of(file)
        try:
            info = system.info(path)
            size = sizes[file] = int(info["size"])
            ends = system.cat_file(path, 0, min(size, _BYTES_PER_END)) + system.cat_file(
                path, max(size - _BYTES_PER_END, 0), size
            )
        except (OSError, TypeError):  # TypeError: the size of the file is unknown
            continue
        written = next((info[name] for name in _VERSION_FIELDS if info.get(name)), "")
        if isinstance(written, float):
            written = datetime.fromtimestamp(written, UTC).isoformat()
        versions[file] = FileVersion(str(written), hashlib.blake2b(ends, digest_size=16).hexdigest())
    return sizes, versions


def divide_into_shards(sizes: Mapping[str, int | None], column: str, *, shard_bytes: int | None = None) -> list[Shard]:
    """Divide files into shards: rows of row groups, record batches, ranges of lines, or whole files.

    The shards become smaller towards the end, and the largest come first. So processes that take one shard after the
    other finish at almost the same time, whatever their number (guided self-scheduling: Polychronopoulos and Kuck,
    1987). A file that cannot be read is one shard, so that the error is reported when its texts are read.

    Args:
        sizes: name of a file -> its size in bytes, None if unknown.
        column: the column or key of the texts.
        shard_bytes: bytes of text in a shard; None chooses a number by the size of the corpus.
    """
    parts = [part for file, size in sizes.items() for part in _parts_of_file(file, size, column)]
    left = sum(part.text_bytes for part in parts)
    least = max(left // MIN_SHARD_DIVISOR, MIN_SHARD_BYTES)
    sized: list[tuple[int, Shard]] = []
    for whole, size, units in parts:
        first = start = 0  # unit and byte at which the next shard begins
        last = -1
        while last != units:
            stop = min(start + (shard_bytes or min(max(left // SHARD_DIVISOR, least), MAX_SHARD_BYTES)), size)
            last = units if stop == size else max(stop * units // size, first + 1)
            stop = max(stop, last * size // max(units, 1))
            sized.append((stop - start, whole._replace(start=first, stop=whole.stop if last == units else last)))
            left -= stop - start
            first, start = last, stop
    return [shard for _, shard in sorted(sized, key=lambda each: -each[0])]


def _parts_of_file(file: str, size: int | None, column: str) -> list[FilePart]:
    found = format_of_file(file)
    whole = Shard(file, found.name, -1, 0, -1)
    if size is not None and compression_of_file(file):
        return [FilePart(whole, size * ASSUMED_COMPRESSION_RATIO, 1)]
    if size is not None:
        try:
            return found.list_parts(whole, size, column)
        except Exception:  # noqa: BLE001 - reading its texts raises the error again, and there it is reported
            pass
    return [FilePart(whole, 0, 1)]
