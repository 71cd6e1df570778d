"""Decode the text of a file as UTF-8, and recognise from its bytes which other encoding or format it has."""

from __future__ import annotations

import codecs
from typing import NamedTuple

from multihead.errors import InputError

_NUM_EXAMINED_BYTES = 1 << 16  # first bytes of a text by which its encoding is recognised
_MIN_SHARE_OF_NULS = 0.7  # share of NULs and other control characters at every second byte of a text in UTF-16
_MIN_SHARE_BEYOND_ASCII = 0.3  # share of bytes beyond ASCII in text of other scripts than Latin
_MIN_SHARE = 0.9  # share of the characters beyond ASCII that must be typical for an encoding
_MIN_SHARE_OF_KANA = 0.25  # in Japanese text; Chinese text has almost none


class _Signature(NamedTuple):
    """The first bytes of a format that is not text, what such a file is, and how to get its text."""

    magic: bytes
    label: str
    mend: str


_SIGNATURES = (
    _Signature(b"\x1f\x8b", "a gzip file", "Decompress it with gunzip"),
    _Signature(b"BZh", "a bzip2 file", "Decompress it with bunzip2"),
    _Signature(b"\xfd7zXZ\0", "an xz file", "Decompress it with unxz"),
    _Signature(b"\x28\xb5\x2f\xfd", "a zstandard file", "Decompress it with unzstd"),
    _Signature(b"PAR1", "a parquet file", "Export its text as UTF-8"),
    _Signature(b"ARROW1", "an arrow file", "Export its text as UTF-8"),
    _Signature(b"%PDF", "a PDF document", "Convert it with pdftotext"),
    _Signature(b"{\\rtf", "a document in RTF", "Save it as plain text in UTF-8"),
    _Signature(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Excel or Word document", "Save it as CSV or text in UTF-8"),
    _Signature(b"SQLite format 3\0", "an SQLite database", "Export its text as UTF-8"),
    _Signature(b"\x89PNG", "a PNG picture", "Give a text file"),
    _Signature(b"\xff\xd8\xff", "a JPEG picture", "Give a text file"),
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r"))  # that no text has, NUL among them
_LATIN_ENCODINGS = "ISO-8859-1", "WINDOWS-1252"  # the second one has letters and quotes below 0xA0
_ZIP_MAGIC = b"PK\x03\x04"
_OFFICE_PARTS = {
    b"xl/": ("an Excel workbook", "Save it as CSV UTF-8"),
    b"word/": ("a Word document", "Save it as plain text in UTF-8"),
    b"[Content_Types].xml": ("an Office document", "Save it as CSV UTF-8, or as plain text in UTF-8"),
}
_BOMS = (  # the BOM of UTF-32 LE begins with that of UTF-16 LE
    (codecs.BOM_UTF32_LE, "UTF-32"),
    (codecs.BOM_UTF32_BE, "UTF-32"),
    (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)


def check_is_text(file: str, content: bytes) -> None:
    """Reject a file that begins as those of a format that is not text.

    Args:
        file: the file's name as it is shown in the error.
        content: the first bytes of the file.

    Raises:
        InputError: the file is not text; the error names its format.
    """
    found = next(((label, mend) for magic, label, mend in _SIGNATURES if content.startswith(magic)), None)
    if content.startswith(_ZIP_MAGIC):
        found = next((named for part, named in _OFFICE_PARTS.items() if part in content), ("a zip file", "Unzip it"))
    if found is not None:
        label, mend = found
        raise InputError(f"{file} is not text but {label}.", f"{mend}.")


def utf_16_or_32(content: bytes) -> str | None:
    """Return "UTF-16LE" or the like if a text begins with such a BOM, or has NULs at every second byte; else None.

    In most scripts the first byte of a UTF-16 character is a control character of ASCII: 0 in Latin, 4 in Cyrillic. A
    few NULs elsewhere are characters of a UTF-8 text.
    """
    for bom, name in _BOMS:
        if content.startswith(bom):
            return name
    content = content[:_NUM_EXAMINED_BYTES]
    if b"\0" not in content or len(content) < 4:
        return None
    first, second, third, fourth = (_share_of_controls(content[at::4]) >= _MIN_SHARE_OF_NULS for at in range(4))
    if third and fourth and not first:
        return "UTF-32LE"
    if first and second and not fourth:
        return "UTF-32BE"
    if second and fourth and not (first or third):
        return "UTF-16LE"
    if first and third and not (second or fourth):
        return "UTF-16BE"
    return None


def _share_of_controls(content: bytes) -> float:
    return 1 - len(content.translate(None, _CONTROLS)) / max(len(content), 1)


def seems_to_be(content: bytes) -> str | None:
    """Return the encoding that a text which is not UTF-8 seems to have, as iconv names it; None if none fits.

    Chinese, Japanese and Korean encodings share their bytes, so each is recognised by what its texts have most of.
    """
    content = content[:_NUM_EXAMINED_BYTES]
    if (found := utf_16_or_32(content)) is not None:
        return found
    if b"\0" in content:
        return _utf_16_of_few_nuls(content)
    trails = _second_bytes(content)
    high = bytes(byte for byte in content if byte >= 0x80)
    other_script = len(high) >= _MIN_SHARE_BEYOND_ASCII * len(content)
    if other_script or _share(trails, 0xA1, 0xFE) >= _MIN_SHARE:
        for name, first, last, least in (
            ("SHIFT_JIS", "\u3040", "\u30ff", _MIN_SHARE_OF_KANA),
            ("EUC-JP", "\u3040", "\u30ff", _MIN_SHARE_OF_KANA),
            ("EUC-KR", "\uac00", "\ud7a3", _MIN_SHARE),
        ):
            text = _decoded(content, name)
            letters = [each for each in text or "" if each > "\x7f" and each not in "。、，．！？「」"]
            if letters and sum(first <= each <= last for each in letters) >= least * len(letters):
                return name
        if _share(trails, 0xA1, 0xFE) >= _MIN_SHARE and _decoded(content, "gb18030") is not None:
            return "GBK"
        if _decoded(content, "big5") is not None and len(trails) > 1:
            return "BIG5"
        if _decoded(content, "gb18030") is not None and len(trails) > 1:
            return "GB18030"
    if len(high) > 3 and other_script and sum(byte >= 0xC0 for byte in high) >= _MIN_SHARE * len(high):
        return "WINDOWS-1251" if sum(byte >= 0xE0 for byte in high) > len(high) / 2 else "KOI8-R"
    if high and not other_script:
        return _LATIN_ENCODINGS[any(byte < 0xA0 for byte in high)]
    return None


def _utf_16_of_few_nuls(content: bytes) -> str | None:
    """Recognise UTF-16 text that is mostly not Latin by its spaces, line breaks and Chinese punctuation."""
    marks = " \n,.。，、"
    counts = {}
    for name in ("UTF-16LE", "UTF-16BE"):
        units = [content[at : at + 2] for at in range(0, len(content) - 1, 2)]
        wanted = {each.encode(name) for each in marks}
        counts[name] = sum(unit in wanted for unit in units)
    best = max(counts, key=counts.__getitem__)
    return best if counts[best] > 0 and _decoded(content, best) is not None else None


def _second_bytes(content: bytes) -> list[int]:
    """Return the second byte of each pair whose first byte is beyond ASCII."""
    found, at = [], 0
    while at < len(content) - 1:
        if content[at] >= 0x80:
            found.append(content[at + 1])
            at += 1
        at += 1
    return found


def _share(values: list[int], least: int, most: int) -> float:
    return sum(least <= each <= most for each in values) / len(values) if values else 0.0


def _decoded(content: bytes, encoding: str) -> str | None:
    """Decode bytes, of which the last character may be cut off; None if they are invalid."""
    try:
        return codecs.getincrementaldecoder(encoding)().decode(content)
    except UnicodeDecodeError:
        return None


def conversion_of(encoding: str) -> str:
    """Return the sentence on how to convert a file from an encoding to UTF-8."""
    return f"Convert it with iconv -f {encoding} -t UTF-8."


def not_utf_8(content: bytes) -> str:
    """Return why bytes that are not UTF-8 cannot be used, such as "not UTF-8; it seems to be GBK (iconv -f GBK)"."""
    found = seems_to_be(content)
    return "not UTF-8" if found is None else f"not UTF-8; it seems to be {found} (iconv -f {found} -t UTF-8)"


def other_encoding(content: bytes, position: int = 0) -> str | None:
    """Return the encoding of a text most of whose lines are in another encoding than UTF-8; None if it may be UTF-8.

    A few lines that are not UTF-8 do not make the others useless, and neither does Latin text, of which only the words
    with accents are invalid.

    Args:
        content: a part of the text.
        position: the part's place in the text, bytes.
    """
    if (found := utf_16_or_32(content[-position % 4 :])) is not None:
        return found
    if _decoded(content, "utf-8") is not None:
        return None
    lines = content.splitlines()[: -1 if content.count(b"\n") else None]
    invalid = [line for line in lines if _decoded(line, "utf-8") is None]
    if 2 * len(invalid) <= sum(bool(line.strip()) for line in lines):
        return None
    found = seems_to_be(content) or seems_to_be(b"\n".join(invalid))
    return None if found in _LATIN_ENCODINGS else found


def decode_text(name: str, content: bytes) -> str:
    r"""Return the text of a file: UTF-8, without a byte order mark, and with line breaks as "\n".

    Args:
        name: name of the file, for errors.
        content: all bytes of the file.

    Raises:
        InputError: the file is not text in UTF-8; the error names the encoding or format that it seems to have.
    """
    check_is_text(repr(name), content)
    if (encoding := utf_16_or_32(content)) is not None:
        raise InputError(f"{name!r} is not UTF-8 text: it seems to be {encoding}.", conversion_of(encoding))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = seems_to_be(content)
        guess, mend = (
            ("", "Save it as UTF-8.") if encoding is None else (f"; it seems to be {encoding}", conversion_of(encoding))
        )
        raise InputError(f"{name!r} is not UTF-8 text: its byte {error.start} is invalid{guess}.", mend) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
