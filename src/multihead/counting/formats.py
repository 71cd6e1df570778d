"""Read the texts of a shard: a reader for each format of files, compressed or not, local or at an address.

A file format is a value in `FORMATS`: its suffixes, the first bytes of its files, and the functions that divide and
read a file.

pyarrow reads parquet, arrow and csv. The column of the texts is read as bytes, because one string that is not UTF-8
would make its whole batch unreadable. The offsets of the texts in an arrow file are checked first, because pyarrow
crashes on a damaged offset. Lines of JSON and of text are split by this module: pyarrow rejects a whole JSON file for
one bad line, and cannot start reading in the middle of a file. pyarrow decompresses `.zst` too, so no further package
is needed.

A csv file is one shard, because a range of bytes may begin within a quoted text.
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import lzma
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from csv import reader as csv_rows
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import fsspec

from multihead.encodings import check_is_text, conversion_of, not_utf_8, other_encoding
from multihead.errors import InputError, MultiheadError

MAX_LINE_BYTES = 1 << 26
"""Largest number of bytes of a line; a longer line counts as a broken row."""

CSV_BLOCK_BYTES = 1 << 22
"""Bytes of a csv file that are parsed at once; no row may be longer. pyarrow reads up to 34 such blocks in advance."""

MAX_BROKEN_CSV_ROWS = 100_000
"""Largest number of consecutive broken rows in a csv file; with more the whole file counts as broken."""

_OTHER_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""Signs that separate the values of a csv file in the place of commas, and their names."""

_MAX_NAMED_KEYS = 8
"""Largest number of keys of a JSON object that a message names."""

_MAX_DECODED_BYTES, _MAX_DECODED_ROWS = 1 << 22, 1024  # of texts, in a parquet file, that are decoded at once
_BYTES_PER_READ = 1 << 16  # number of bytes per read of a file
_ARROW_MAGIC, _ARROW_MESSAGE = b"ARROW1", b"\xff\xff\xff\xff"  # beginning of a file, and of each message in a stream


class Shard(NamedTuple):
    """A part of a file of a corpus: the unit of work that one process counts.

    Attributes:
        file: the file's name or address.
        kind: the name of its format.
        group: index of the row group in a parquet file; -1 for all row groups, and in other formats.
        start: index of the first row in the row group, or of the first record batch, or offset of the first byte: the
            shard has the lines that begin at `start` or later.
        stop: index after the last row or record batch, or the byte from which on lines belong to later shards; -1 for
            the end of the file.
    """

    file: str
    kind: str
    group: int
    start: int
    stop: int

    def __str__(self) -> str:
        """The file and the shard's place in the file, for messages."""
        if self.stop < 0 and not self.start:
            return self.file
        return f"{self.file} {FORMATS[self.kind].start_label.format(self.group)} from {self.start}"


class Row(NamedTuple):
    """One row of a corpus.

    Attributes:
        place_in_file: file and row number or byte offset, for messages.
        text: text of the row; None if it cannot be used.
        problem: why the text cannot be used; "" if it can.
    """

    place_in_file: str
    text: str | None
    problem: str = ""


class FilePart(NamedTuple):
    """A file of a corpus, or one row group of a parquet file, before it is divided into shards.

    Attributes:
        as_one_shard: the file or row group as one shard.
        text_bytes: bytes of uncompressed text; estimated for compressed files.
        num_divisible_units: number of rows, record batches or bytes, between which the part can be divided; 1 if it
            cannot be divided.
    """

    as_one_shard: Shard
    text_bytes: int
    num_divisible_units: int


@dataclass(frozen=True)
class Format:
    """A file format in which a corpus may be stored.

    Attributes:
        name: name of the format in a plan.
        suffixes: file suffixes of the format, in lower case.
        magic: first bytes of its files; empty for formats of plain text, whose files may be compressed as a whole.
        start_label: name of what `Shard.start` counts, such as "byte", for messages; "{}" is replaced by the row group.
        read_rows: yields the rows of a shard; arguments: the shard, and the column of the texts.
        list_parts: returns the parts into which a file is divided; arguments: the file as one shard, its size in bytes,
            and the column of the texts.
    """

    name: str
    suffixes: tuple[str, ...]
    magic: bytes
    start_label: str
    read_rows: Callable[[Shard, str], Iterator[Row]]
    list_parts: Callable[[Shard, int, str], list[FilePart]]


class Compression(NamedTuple):
    """A compression format of whole files.

    Attributes:
        magic: first bytes of a compressed file.
        decompress: takes an open compressed file, and returns a file object with the uncompressed content.
    """

    magic: bytes
    decompress: Callable[[BinaryIO], Any]


def _decompress_zstandard(source: BinaryIO) -> Any:
    import pyarrow as pa

    return pa.CompressedInputStream(source, "zstd")


_COMPRESSIONS = {
    ".gz": Compression(b"\x1f\x8b", gzip.open),
    ".bz2": Compression(b"BZh9", bz2.open),
    ".xz": Compression(b"\xfd7zXZ\0", lzma.open),
    ".zst": Compression(b"\x28\xb5\x2f\xfd", _decompress_zstandard),
}


def format_of_file(file: str) -> Format:
    """Return the format of a file by its suffix.

    Raises:
        InputError: no format has the suffix of the file.
    """
    path = _path_in_archive(file)
    compression = compression_of_file(file)
    suffix = (path if compression is None else path.with_suffix("")).suffix.lower()
    format_of_suffix = {each: found for found in FORMATS.values() for each in found.suffixes}
    if suffix not in format_of_suffix:
        raise InputError(
            f"{file} has the suffix {suffix!r}, which no format of texts has.",
            f"Give files that end in {' '.join(filter(None, format_of_suffix))}; one with a text in each line may be "
            "renamed to .txt.",
        )
    found = format_of_suffix[suffix]
    if compression is not None and found.magic:
        raise InputError(
            f"{file} is compressed as a whole, and {found.name} is read from several places.",
            f"Decompress it; {found.name} compresses its columns itself.",
        )
    return found


def compression_of_file(file: str) -> Compression | None:
    """Return the compression of a file as a whole, by its suffix; None if the file is not compressed."""
    return _COMPRESSIONS.get(_path_in_archive(file).suffix.lower())


def _path_in_archive(file: str) -> PurePosixPath:
    """Return the path in a file name or address; of a chain such as "zip://a.txt::b.zip", that of its first link."""
    links = [link for link in file.split("::") if "://" in link and not link.endswith("://")]
    return PurePosixPath(links[0] if links else file)


def file_system_of(name: str) -> tuple[Any, str]:
    """Return the file system of a name or address, and the path in this file system.

    Raises:
        InputError: fsspec cannot open the address.
    """
    try:
        if "://" not in name:
            return fsspec.filesystem("file"), name
        system, path = fsspec.core.url_to_fs(name)
    except (ImportError, ValueError) as error:
        raise InputError(
            f"{name!r} cannot be opened: {error}.", "Install what fsspec needs for this address."
        ) from None
    return system, path


@contextmanager
def _open_file(file: str) -> Iterator[Any]:
    """Open a file, and keep its file system alive, because that of an archive closes its files when it is deleted."""
    system, path = file_system_of(file)
    if system.isdir(path):
        raise IsADirectoryError(f"{file} is a folder")
    with system.open(path, "rb") as source:
        yield source


@contextmanager
def _open_text(file: str) -> Iterator[io.BufferedReader]:
    """Open a text file, decompressed if it is compressed."""
    with _open_file(file) as raw:
        compression = compression_of_file(file)
        content = raw if compression is None else compression.decompress(raw)
        with io.BufferedReader(content, _BYTES_PER_READ) as source:
            yield source


def _check_text(file: str, head: bytes, position: int = 0) -> None:
    """Reject a text file of another format or another encoding by its bytes `head` at a position."""
    if not position:
        magics = [(suffix, each.magic) for suffix, each in _COMPRESSIONS.items()]
        magics += [(each.suffixes[0], each.magic) for each in FORMATS.values() if each.magic]
        for suffix, magic in magics:
            if head.startswith(magic):
                raise InputError(f"{file} begins as files with the suffix {suffix} do.", f"Add {suffix} to its name.")
        check_is_text(file, head)
    if (encoding := other_encoding(head, position)) is not None:
        raise InputError(f"{file} is not UTF-8 text: it seems to be {encoding}.", conversion_of(encoding))


def rows_of_shard(shard: Shard, column: str) -> Iterator[Row]:
    """Yield the rows of a shard, in memory that does not grow with their number.

    Args:
        shard: the shard.
        column: the column or key of the texts.

    Raises:
        OSError: the file cannot be read.
        InputError: the file is damaged, of another format, or has no such column.
    """
    try:
        for row in FORMATS[shard.kind].read_rows(shard, column):
            yield _check_row(row)
    except MultiheadError:
        raise
    except Exception as error:  # any error of a codec, a file system or pyarrow
        if isinstance(error, OSError) and (error.errno is not None or type(error) not in (OSError, gzip.BadGzipFile)):
            # an OSError with a reason is from the system; for damaged content codecs and pyarrow raise it without one
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{shard.file} cannot be read: {reason.rstrip('.')}.", "Write it again.") from error


def _check_row(row: Row) -> Row:
    """Return a row, without its text if the text is empty or cannot be encoded as UTF-8."""
    if row.text is None:
        return row
    if not row.text.strip():
        return row._replace(text=None, problem="empty")
    try:
        row.text.encode("utf-8")
    except UnicodeEncodeError:
        return row._replace(text=None, problem="half of a surrogate pair, which is no character")
    return row


def _decode_text(place_in_file: str, value: bytes | None) -> Row:
    if value is None:
        return Row(place_in_file, None, "no text")
    try:
        return Row(place_in_file, value.decode("utf-8"))
    except UnicodeDecodeError:
        return Row(place_in_file, None, not_utf_8(value))


def _read_lines(shard: Shard, column: str) -> Iterator[Row]:
    """Read the lines that begin in the range of a shard."""
    with _open_text(shard.file) as source:
        position = shard.start
        if position:
            position -= 1
            source.seek(position)
            position += _skip_line(source)  # a line that begins in the previous shard belongs to that shard
            _check_text(shard.file, source.read(_BYTES_PER_READ), position)
            source.seek(position)
        else:
            _check_text(shard.file, source.peek(_BYTES_PER_READ))
        while (shard.stop < 0 or position < shard.stop) and (line := source.readline(MAX_LINE_BYTES)):
            place_in_file = f"{shard.file} byte {position}"
            position += len(line)
            if line.endswith(b"\n") or len(line) < MAX_LINE_BYTES:
                yield _decode_text(place_in_file, line.removeprefix(codecs.BOM_UTF8).rstrip(b"\r\n"))
            else:
                yield Row(place_in_file, None, f"longer than {MAX_LINE_BYTES} bytes")
                position += _skip_line(source)


def _skip_line(source: io.BufferedReader) -> int:
    """Read to the end of a line, and return the number of bytes read."""
    count = 0
    while part := source.readline(MAX_LINE_BYTES):
        count += len(part)
        if part.endswith(b"\n"):
            break
    return count


def _read_json_lines(shard: Shard, column: str) -> Iterator[Row]:
    rows = _read_lines(shard, column)
    if not shard.start:
        first = list(islice(rows, 2))
        _check_json_lines(shard.file, first)
        rows = chain(first, rows)
    for row in rows:
        yield _text_of_json_line(row, column)


def _check_json_lines(file: str, first: Sequence[Row]) -> None:
    """Reject a JSON file whose first two rows, `first`, show that it is one value on several lines, or one array."""
    lines = [(row.text or "").strip() for row in first]
    values = [_parse_json(line) for line in lines]
    array = bool(lines) and (
        (lines[0].startswith("[") and values[0] is None) or (len(lines) == 1 and isinstance(values[0], list))
    )
    if array or (len(lines) == 2 and lines[0].startswith("{") and values == [None, None]):
        found, query = ("one JSON array", ".[]") if array else ("JSON on several lines", ".")
        source, target = (shlex.quote(each) for each in (file, f"{PurePosixPath(file).stem}.jsonl"))
        raise InputError(
            f"{file} is {found}, and a value per line is expected.",
            f"Convert it with jq -c '{query}' {source} > {target}.",
        )


def _parse_json(text: str) -> Any:
    """Return the value of a JSON text; None if it is invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _text_of_json_line(row: Row, column: str) -> Row:
    """Return the text of a line of JSON: its value under a key, or the line itself if it is a string."""
    if row.text is None or not row.text.strip():
        return row
    try:
        found = json.loads(row.text)
    except (ValueError, RecursionError):
        return row._replace(text=None, problem="not JSON")
    if isinstance(found, dict):
        if column not in found:
            return row._replace(text=None, problem=f"no key {column!r}{_keys_of_object(found)}")
        found = found[column]
    if not isinstance(found, str):
        return row._replace(text=None, problem=f"{type(found).__name__}, no text{_hint_for_value(found)}")
    return row._replace(text=found)


def _keys_of_object(value: dict[str, Any]) -> str:
    """Return the keys of a JSON object for a message, such as "; its keys are id, body"."""
    named = [repr(key) for key in value][:_MAX_NAMED_KEYS]
    return f"; its keys are {', '.join(named)}{' ...' if len(value) > len(named) else ''}" if named else ""


def _hint_for_value(value: Any) -> str:
    """Return what a value is that a message can help with: chat messages, or an object with keys of its own."""
    if isinstance(value, dict):
        return _keys_of_object(value) + "; a text is read from the top of a row" if value else ""
    if isinstance(value, list) and value and isinstance(value[0], dict) and {"role", "content"} <= set(value[0]):
        return ", but chat messages; write each chat as one text (tokenizer.apply_chat_template)"
    return ""


def _divide_bytes(whole: Shard, size: int, column: str) -> list[FilePart]:
    system, path = file_system_of(whole.file)
    with suppress(OSError):  # an error is reported when the texts of the file are read
        _check_text(
            whole.file, system.cat_file(path, 0, min(size, _BYTES_PER_READ))
        )  # an unreadable file is kept whole, so that one shard fails instead of many
    return [FilePart(whole, size, size)]


def _divide_json_lines(whole: Shard, size: int, column: str) -> list[FilePart]:
    _check_json_lines(whole.file, list(islice(_read_lines(whole, column), 2)))
    return _divide_bytes(whole, size, column)


def _read_csv(shard: Shard, column: str) -> Iterator[Row]:
    """Yield the rows of a csv file in order, including the broken rows that pyarrow leaves out."""
    import pyarrow as pa
    from pyarrow import csv

    broken: deque[tuple[int, str]] = deque()  # number and problem of each row that pyarrow left out

    def leave_out(row: Any) -> str:
        broken.append((row.number, f"{row.actual_columns} columns, not {row.expected_columns}"))
        return "skip" if len(broken) < MAX_BROKEN_CSV_ROWS else "error"

    with _open_text(shard.file) as source:
        _check_text(shard.file, source.peek(_BYTES_PER_READ))
        try:
            batches = csv.open_csv(
                source,
                csv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
                csv.ParseOptions(newlines_in_values=True, invalid_row_handler=leave_out),
                # As bytes, because one value that is not UTF-8 would make a whole block unreadable.
                csv.ConvertOptions(include_columns=[column], column_types={column: pa.large_binary()}),
            )
            number = 2  # the first row has the names of the columns
            for value in (each for batch in batches for each in _values_as_bytes(batch.column(0))):
                while broken and broken[0][0] == number:
                    yield Row(f"{shard.file} row {number}", None, broken.popleft()[1])
                    number += 1
                yield _decode_text(f"{shard.file} row {number}", value.as_py())
                number += 1
            for number, problem in broken:
                yield Row(f"{shard.file} row {number}", None, problem)
        except pa.ArrowKeyError:
            raise _missing_csv_column_error(shard.file, column) from None
        except pa.ArrowInvalid as error:
            if "straddl" not in str(error):
                raise
            raise InputError(
                f"{shard.file} has a row of more than {CSV_BLOCK_BYTES} bytes.",
                "Close its quotes, or write it as jsonl.",
            ) from None


def _missing_csv_column_error(file: str, column: str) -> InputError:
    """Return the error for a csv file without the column of the texts, or whose values commas do not separate."""
    with _open_text(file) as source:
        first = source.readline(_BYTES_PER_READ).removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace")
    names = next(csv_rows([first]), [])
    for sign, label in _OTHER_SEPARATORS.items():
        if len(names) == 1 and sign in first:
            return InputError(
                f"{file} has no column {column!r}: {label} seem to separate its values, not commas.",
                f"Write it with commas: pandas.read_csv({file!r}, sep={sign!r}).to_csv({file!r}, index=False).",
            )
    return _missing_column_error(file, column, names)


def _keep_whole(whole: Shard, size: int, column: str) -> list[FilePart]:
    # A quoted value may hold line breaks, so only a reader that started at the beginning knows where a row begins.
    return [FilePart(whole, size, 1)]


def _read_parquet(shard: Shard, column: str) -> Iterator[Row]:
    import pyarrow.parquet as pq

    with _open_file(shard.file) as source:
        file = pq.ParquetFile(source, buffer_size=_BYTES_PER_READ, page_checksum_verification=True)
        _check_column(shard.file, column, file.schema_arrow)
        for group in range(file.num_row_groups) if shard.group < 0 else (shard.group,):
            size, rows = _size_of_column(file.metadata, group, column)
            stop = rows if shard.stop < 0 else shard.stop
            at_once = max(min(_MAX_DECODED_BYTES * rows // max(size, 1), _MAX_DECODED_ROWS), 1)
            first = 0  # index of the batch's first row
            for batch in file.iter_batches(at_once, row_groups=[group], columns=[column], use_threads=False):
                skipped = min(max(shard.start - first, 0), batch.num_rows)
                chosen = batch.slice(skipped, max(stop - first - skipped, 0))
                for row, value in enumerate(_values_as_bytes(chosen.column(0)), first + skipped):
                    yield _decode_text(f"{shard.file} row group {group} row {row}", value.as_py())
                first += batch.num_rows
                if first >= stop:
                    break


def _divide_row_groups(whole: Shard, size: int, column: str) -> list[FilePart]:
    import pyarrow.parquet as pq

    with _open_file(whole.file) as source:
        metadata = pq.ParquetFile(source).metadata
    found = []
    for group in range(metadata.num_row_groups):
        size_of_column, rows = _size_of_column(metadata, group, column)
        found.append(FilePart(whole._replace(group=group, stop=rows), size_of_column, rows))
    return found


def _size_of_column(metadata: Any, group: int, column: str) -> tuple[int, int]:
    """Return the uncompressed bytes of a column of a row group, and the number of rows."""
    found = metadata.row_group(group)
    columns = [found.column(index) for index in range(found.num_columns)]
    size = sum(each.total_uncompressed_size for each in columns if each.path_in_schema.split(".")[0] == column)
    return size, found.num_rows


def _read_arrow(shard: Shard, column: str) -> Iterator[Row]:
    from pyarrow import ipc

    with _open_file(shard.file) as source:
        names = _check_column(shard.file, column, _open_arrow(shard.file, source).schema)
        # Only the column of the texts is decoded.
        reader = _open_arrow(
            shard.file, source, options=ipc.IpcReadOptions(included_fields=[names.index(column)], use_threads=False)
        )
        if isinstance(reader, ipc.RecordBatchFileReader):
            stop = reader.num_record_batches if shard.stop < 0 else shard.stop
            batches = (reader.get_batch(number) for number in range(shard.start, stop))
        else:
            batches = reader
        for number, batch in enumerate(batches, shard.start):
            for row, value in enumerate(_values_as_bytes(batch.column(0))):
                yield _decode_text(f"{shard.file} record batch {number} row {row}", value.as_py())


def _open_arrow(file: str, source: BinaryIO, **options: Any) -> Any:
    """Open an arrow file (with a list of its record batches at its end) or an arrow stream (without such a list)."""
    from pyarrow import ipc

    source.seek(0)
    head = source.read(len(_ARROW_MAGIC))
    source.seek(0)
    if head == _ARROW_MAGIC:
        return ipc.open_file(source, **options)
    if head[:4] != _ARROW_MESSAGE:
        raise InputError(f"{file} is neither an arrow file nor a stream of record batches.", "Write it again.")
    return ipc.open_stream(source, **options)


def _divide_record_batches(whole: Shard, size: int, column: str) -> list[FilePart]:
    from pyarrow import ipc

    with _open_file(whole.file) as source:
        reader = _open_arrow(whole.file, source)
        if isinstance(reader, ipc.RecordBatchFileReader):
            return [FilePart(whole._replace(stop=reader.num_record_batches), size, reader.num_record_batches)]
    return [FilePart(whole, size, 1)]


def _check_column(file: str, column: str, schema: Any) -> list[str]:
    """Reject a table without a column of texts, and return the names of its columns."""
    names: list[str] = schema.names
    if column not in names:
        raise _missing_column_error(file, column, names)
    kind = schema.types[names.index(column)]
    if not _holds_text(kind):
        strings = [name for name, each in zip(names, schema.types, strict=True) if _holds_text(each)]
        raise InputError(
            f"The column {column!r} of {file} holds {kind}, no text.",
            f"Give a column of strings: {', '.join(strings)}."
            if strings
            else "Write its texts to a column of strings.",
        )
    return names


def _holds_text(kind: Any) -> bool:
    """Return whether a pyarrow type is that of strings or bytes, or of a dictionary of them."""
    from pyarrow import types

    values = kind.value_type if types.is_dictionary(kind) else kind
    texts = (
        types.is_string, types.is_large_string, types.is_string_view,
        types.is_binary, types.is_large_binary, types.is_binary_view,
    )  # fmt: skip
    return any(is_text(values) for is_text in texts)


def _missing_column_error(file: str, column: str, names: list[str]) -> InputError:
    return InputError(f"{file} has no column {column!r}.", f"Give one of its columns: {', '.join(names)}.")


def _values_as_bytes(values: Any) -> Any:
    """Return an array of strings as an array of bytes, so that a value that is not UTF-8 affects no others.

    Raises an error if the array is damaged, because pyarrow would crash when it reads a value.
    """
    import pyarrow as pa

    if pa.types.is_dictionary(values.type):
        return pa.DictionaryArray.from_arrays(values.indices, _values_as_bytes(values.dictionary)).dictionary_decode()
    same_layout = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
    found = values.view(same_layout.get(values.type, values.type))
    found.validate(full=True)
    return found


FORMATS = {
    each.name: each
    for each in (
        Format("parquet", (".parquet", ".pq"), b"PAR1", "row group {}, rows", _read_parquet, _divide_row_groups),
        Format("arrow", (".arrow", ".feather"), _ARROW_MAGIC, "record batches", _read_arrow, _divide_record_batches),
        Format("csv", (".csv",), b"", "rows", _read_csv, _keep_whole),
        Format("jsonl", (".jsonl", ".ndjson", ".json"), b"", "bytes", _read_json_lines, _divide_json_lines),
        Format("lines", (".txt", ".text", ""), b"", "bytes", _read_lines, _divide_bytes),
    )
}
"""Name of a file format -> the format."""
