"""Find the files of a corpus, divide them into shards, and read the texts of one shard."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple

import fsspec

from multihead.errors import InputError, MultiheadError
from multihead.errors.optional import require

Kind = Literal["parquet", "jsonl", "lines"]

LONGEST_LINE = 1 << 26
"""Bytes; a longer line is a broken row."""

LARGEST_SHARD, SMALLEST_SHARD = 1 << 25, 1 << 14
"""Bytes of text in a shard."""

PART, LEAST_PART = 64, 4096
"""A shard is a 64th of the text that is not yet divided into shards, and at least a 4096th of the corpus."""

_KINDS: dict[str, Kind] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
}
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
COMPRESSION = 3
"""Estimated bytes of text per byte of a compressed file."""

_ROWS = 1024  # rows of a parquet file that are decoded at once


class Shard(NamedTuple):
    """A part of a file of a corpus: the unit of work that one process counts.

    Attributes:
        file: the file's name or address.
        kind: its format.
        group: the row group of a parquet file; -1 otherwise.
        start: the first row within the group, or the first byte: the shard has the lines that begin from here on.
        stop: the row after the last one, or the byte at which later lines begin; -1 for the end.
    """

    file: str
    kind: Kind
    group: int
    start: int
    stop: int

    def __str__(self) -> str:
        """The file and the place of the shard in it, for messages."""
        if self.stop < 0 and not self.start:
            return self.file
        if self.kind == "parquet":
            return f"{self.file} row group {self.group}, rows from {self.start}"
        return f"{self.file} bytes from {self.start}"


@dataclass(frozen=True)
class Row:
    """One row of a corpus.

    Attributes:
        index: its index in the shard.
        place: the file and the row, for messages.
        text: its text, or None if it cannot be used.
        problem: why its text cannot be used.
    """

    index: int
    place: str
    text: str | None
    problem: str = ""


def find_files(patterns: Sequence[str]) -> list[str]:
    """Return the files that match some names or globs, in the order of the patterns, each sorted by name.

    A name without a match is kept, so that it is reported as missing where its texts are read.

    Raises:
        InputError: none of them exists.
    """
    found: dict[str, None] = {}
    any_exists = False
    for pattern in patterns:
        system, path = _file_system_of(pattern)
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
    return list(found)


def _file_system_of(name: str) -> tuple[Any, str]:
    """Return the file system of a name or address, and the path in it."""
    try:
        if "://" not in name:
            return fsspec.filesystem("file"), name
        system, path = fsspec.core.url_to_fs(name)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{name!r} cannot be opened: {error}.", "Install what fsspec needs for this address."
        ) from None
    return system, path


def _name_in_pattern_style(system: Any, pattern: str, path: str) -> str:
    """Return the path of a file as its glob pattern writes paths: with a protocol, absolute or relative."""
    if "://" in pattern:
        return str(system.unstrip_protocol(path))
    if PurePosixPath(pattern).is_absolute():
        return path
    here = str(PurePosixPath(system._strip_protocol("."))) + "/"  # noqa: SLF001 - fsspec makes paths absolute with it
    return path.removeprefix(here)


def file_sizes(files: Sequence[str]) -> dict[str, int | None]:
    """Return the size of each file in bytes; None for a file whose size cannot be found."""
    found: dict[str, int | None] = {}
    for file in files:
        system, path = _file_system_of(file)
        try:
            found[file] = int(system.size(path))
        except OSError:
            found[file] = None
    return found


def divide_into_shards(sizes: dict[str, int | None], column: str, *, shard_bytes: int | None = None) -> list[Shard]:
    """Divide files into shards: row groups of parquet, or parts of large ones, and ranges of lines.

    The shards become smaller towards the end, and the largest come first. So processes that take one after the other
    finish at almost the same time, however many they are (guided self-scheduling: Polychronopoulos and Kuck, 1987).
    A file that cannot be read is one shard, so that it is reported where its texts are read.

    Args:
        sizes: the files with their sizes.
        column: the column or key of the texts.
        shard_bytes: bytes of text in a shard; None chooses them by the size of the corpus.
    """
    pieces = [piece for file, size in sizes.items() for piece in _parts_of_file(file, size, column)]
    left = sum(piece.size for piece in pieces)
    least = max(left // LEAST_PART, SMALLEST_SHARD)
    sized: list[tuple[int, Shard]] = []
    for piece in pieces:
        start, stop = 0, -1
        while stop != piece.size:
            size = shard_bytes or min(max(left // PART, least), LARGEST_SHARD)
            stop = min(start + size, piece.size) if piece.divisible else piece.size
            sized.append((stop - start, piece.shard_of_bytes(start, stop)))
            left -= stop - start
            start = stop
    return [shard for _, shard in sorted(sized, key=lambda each: -each[0])]


class _FilePart(NamedTuple):
    """A file, or one row group of a parquet file, before it is divided into shards.

    Attributes:
        whole: the part as one shard.
        size: bytes of uncompressed text, estimated for a compressed file.
        divisible: whether it can be divided into several shards.
        rows: number of rows of a row group; 0 for other files.
    """

    whole: Shard
    size: int
    divisible: bool
    rows: int = 0

    def shard_of_bytes(self, start: int, stop: int) -> Shard:
        """Return the shard from byte `start` to byte `stop` of the text; in parquet, of the rows there."""
        if (start, stop) == (0, self.size):
            return self.whole
        if self.whole.kind == "parquet":
            return self.whole._replace(start=start * self.rows // self.size, stop=stop * self.rows // self.size)
        return self.whole._replace(start=start, stop=stop if stop < self.size else -1)


def _parts_of_file(file: str, size: int | None, column: str) -> list[_FilePart]:
    kind = _format_of_file(file)
    whole = Shard(file, kind, 0 if kind == "parquet" else -1, 0, -1)
    if size is None:
        return [_FilePart(whole, 0, divisible=False)]
    if kind == "parquet":
        return _row_groups(whole, column)
    if _compression_of_file(file):
        return [_FilePart(whole, size * COMPRESSION, divisible=False)]
    return [_FilePart(whole, size, divisible=True)]


def _row_groups(whole: Shard, column: str) -> list[_FilePart]:
    require("pyarrow", purpose="A census", extra="census")
    import pyarrow as pa
    import pyarrow.parquet as pq

    found: list[_FilePart] = []
    try:
        with _open_text(whole.file) as source:
            metadata = pq.ParquetFile(source).metadata
            for group in range(metadata.num_row_groups):
                one = metadata.row_group(group)
                columns = [one.column(index) for index in range(one.num_columns)]
                size = sum(
                    each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] == column
                )
                rows_of_group = whole._replace(group=group, stop=one.num_rows)
                found.append(_FilePart(rows_of_group, size, divisible=True, rows=one.num_rows))
    except (OSError, pa.ArrowException):
        return [_FilePart(whole, 0, divisible=False)]
    return found


def _format_of_file(file: str) -> Kind:
    path = PurePosixPath(file)
    if path.suffix in _COMPRESSED:
        path = path.with_suffix("")
    return _KINDS.get(path.suffix.lower(), "lines")


def _compression_of_file(file: str) -> str | None:
    return _COMPRESSED.get(PurePosixPath(file).suffix)


def _open_text(file: str) -> Any:
    system, path = _file_system_of(file)
    if system.isdir(path):
        raise IsADirectoryError(f"{file} is a folder")
    return system.open(path, "rb")


def rows_of_shard(shard: Shard, column: str) -> Iterator[Row]:
    """Read the rows of a shard, one after the other.

    Args:
        shard: the shard.
        column: the column or key of the texts.

    Raises:
        OSError: the file cannot be read.
        InputError: it is damaged, is no parquet file, or has no such column.
    """
    for row in (
        _read_parquet_rows(shard, column)
        if shard.kind == "parquet"
        else _convert_read_errors(_read_line_rows(shard, column), shard)
    ):
        text = row.text
        if text is None:
            yield row
        elif not text.strip():
            yield Row(row.index, row.place, None, "empty")
        else:
            try:
                text.encode("utf-8")
                yield row
            except UnicodeEncodeError:
                yield Row(row.index, row.place, None, "half of a surrogate pair, which is no character")


def _convert_read_errors(found: Iterator[Row], shard: Shard) -> Iterator[Row]:
    """Yield rows; turn an error of a codec or a file system into an InputError that names the file."""
    try:
        yield from found
    except (OSError, MultiheadError):
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise InputError(f"{shard.file} cannot be read: {reason.rstrip('.')}.", "Write it again.") from error


def _read_parquet_rows(shard: Shard, column: str) -> Iterator[Row]:
    require("pyarrow", purpose="A census", extra="census")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with _open_text(shard.file) as source:
            file = pq.ParquetFile(source)
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise InputError(f"{shard.file} has no column {column!r}.", f"Give one of its columns: {names}.")
            kind = file.schema_arrow.field(column).type
            if pa.types.is_dictionary(kind):
                kind = kind.value_type
            if kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
                raise InputError(
                    f"The column {column!r} of {shard.file} holds {kind}, no text.", "Give a column of strings."
                )
            index = 0
            for batch in file.iter_batches(_ROWS, row_groups=[shard.group], columns=[column], use_threads=False):
                stop = index + batch.num_rows
                if stop > shard.start:
                    # Texts are read as bytes, because one value that is not UTF-8 would make a whole batch unreadable.
                    values = batch.column(0).cast(kind).cast(pa.large_binary()).to_pylist()
                    for place in range(max(index, shard.start), stop if shard.stop < 0 else min(stop, shard.stop)):
                        where = f"{shard.file} row group {shard.group} row {place}"
                        yield _decode_line(place - shard.start, where, values[place - index])
                index = stop
                if 0 <= shard.stop <= index:
                    return
    except pa.ArrowException as error:
        raise InputError(f"{shard.file} cannot be read: {str(error).splitlines()[0]}", "Write it again.") from None


def _read_line_rows(shard: Shard, column: str) -> Iterator[Row]:
    with _open_text(shard.file) as raw:
        source: Any = raw
        if (compression := _compression_of_file(shard.file)) is not None:
            codec = fsspec.compression.compr.get(compression)
            if codec is None:
                raise InputError(
                    f"{shard.file} is compressed with {compression}, which needs a package that is not installed.",
                    "Run pip install zstandard.",
                )
            source = codec(raw, mode="rb")
        place, index = shard.start, 0
        if place:
            place -= 1
            source.seek(place)
            place += _skip_line(source)  # a line that begins in the previous shard belongs to that shard
        while shard.stop < 0 or place < shard.stop:
            line = _read_line(source)
            if not line:
                return
            where = f"{shard.file} byte {place}"
            place += len(line)
            if line.endswith(b"\n") or len(line) < LONGEST_LINE:
                row = _decode_line(index, where, line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"))
                yield _text_of_json_line(row, column) if shard.kind == "jsonl" else row
            else:
                yield Row(index, where, None, f"longer than {LONGEST_LINE} bytes")
                place += _skip_line(source)
            index += 1


def _read_line(source: BinaryIO) -> bytes:
    return source.readline(LONGEST_LINE)


def _skip_line(source: BinaryIO) -> int:
    """Read to the end of a line, and return the number of bytes read."""
    count = 0
    while part := _read_line(source):
        count += len(part)
        if part.endswith(b"\n"):
            break
    return count


def _decode_line(index: int, where: str, value: bytes | None) -> Row:
    if value is None:
        return Row(index, where, None, "no text")
    try:
        return Row(index, where, value.decode("utf-8"))
    except UnicodeDecodeError:
        return Row(index, where, None, "not UTF-8")


def _text_of_json_line(row: Row, column: str) -> Row:
    """Return the text of a line of JSON: its value under a key, or the line itself if it is a string."""
    if row.text is None or not row.text.strip():
        return row
    try:
        found = json.loads(row.text)
    except (ValueError, RecursionError):
        return Row(row.index, row.place, None, "not JSON")
    if isinstance(found, dict):
        if column not in found:
            return Row(row.index, row.place, None, f"no key {column!r}")
        found = found[column]
    if not isinstance(found, str):
        return Row(row.index, row.place, None, f"{type(found).__name__}, no text")
    return Row(row.index, row.place, found)
