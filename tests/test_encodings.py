"""The encoding of a text is recognised from its bytes, and text in UTF-8 is read without its byte order mark."""

from __future__ import annotations

import re

import pytest

from multihead.encodings import decode_text, not_utf_8, other_encoding
from multihead.errors import InputError

SIMPLIFIED = "今天天气很好，我们去公园散步。猫坐在垫子上。\n注意力机制是现代语言模型的核心。\n"
TRADITIONAL = "今天天氣很好，我們去公園散步。貓坐在墊子上。\n注意力機制是現代語言模型的核心。\n"
JAPANESE = "今日はとても良い天気です。猫がマットの上に座っています。\n"
KOREAN = "오늘은 날씨가 매우 좋습니다. 고양이가 매트 위에 앉아 있습니다.\n"
RUSSIAN = "Сегодня хорошая погода. Кошка сидит на коврике.\n"
ARABIC = "جلست القطة على السجادة ونظرت إلى الكلب.\n"
FRENCH = "Le café est très bon, déjà vu, naïve.\nGarçon !\n"
QUOTED = "“Le café” – très bon, naïve.\n"
ENGLISH = "The cat sat on the mat.\nThe dog too.\n"

ENCODED = [
    (SIMPLIFIED, "gbk", "GBK"),
    ("猫坐", "gbk", "GBK"),
    (ENGLISH * 3 + SIMPLIFIED, "gbk", "GBK"),
    (TRADITIONAL, "big5", "BIG5"),
    (JAPANESE, "shift_jis", "SHIFT_JIS"),
    (JAPANESE, "euc_jp", "EUC-JP"),
    (KOREAN, "euc_kr", "EUC-KR"),
    (RUSSIAN, "cp1251", "WINDOWS-1251"),
    (RUSSIAN, "koi8_r", "KOI8-R"),
    (FRENCH, "latin-1", "ISO-8859-1"),
    (QUOTED, "cp1252", "WINDOWS-1252"),
]
WIDE = [
    (text, name.lower(), name)
    for text in (SIMPLIFIED, JAPANESE, KOREAN, RUSSIAN, ARABIC, FRENCH, ENGLISH)
    for name in ("UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE", "UTF-16", "UTF-32")
]


@pytest.mark.parametrize(("text", "encoding", "label"), ENCODED + WIDE)
def test_the_error_names_the_encoding_and_how_to_convert_it(text: str, encoding: str, label: str) -> None:
    sentence = rf"'a.txt' is not UTF-8 text: .*it seems to be {label}\. Convert it with iconv -f {label} -t UTF-8\."
    with pytest.raises(InputError, match=f"^{sentence}$"):
        decode_text("a.txt", text.encode(encoding))


@pytest.mark.parametrize(
    "text", [SIMPLIFIED, TRADITIONAL, JAPANESE, KOREAN, RUSSIAN, ARABIC, FRENCH, QUOTED, ENGLISH, ""]
)
def test_text_in_utf_8_is_read_without_its_byte_order_mark(text: str) -> None:
    for mark in ("", "\ufeff"):
        for line_break in ("\n", "\r\n", "\r"):
            assert decode_text("a.txt", (mark + text.replace("\n", line_break)).encode()) == text
    for cut in range(len(text.encode())):
        assert other_encoding(text.encode()[:cut]) is None


def test_a_few_nuls_are_characters() -> None:
    for text in ("The cat\0sat.", "\0", "\0\0\0\0\0\0", SIMPLIFIED + "\0", "a\0bc\0de\0f"):
        assert decode_text("a.txt", text.encode()) == text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"PK\x03\x04 xl/workbook.xml", "'a.txt' is not text but an Excel workbook. Save it as CSV UTF-8."),
        (b"PK\x03\x04 word/document.xml", "'a.txt' is not text but a Word document. Save it as plain text in UTF-8."),
        (b"PK\x03\x04 a.txt", "'a.txt' is not text but a zip file. Unzip it."),
        (b"\x1f\x8b\x08\0", "'a.txt' is not text but a gzip file. Decompress it with gunzip."),
        (b"%PDF-1.7", "'a.txt' is not text but a PDF document. Convert it with pdftotext."),
        (b"PAR1", "'a.txt' is not text but a parquet file. Export its text as UTF-8."),
        (b"ab\xff", "'a.txt' is not UTF-8 text: its byte 2 is invalid. Save it as UTF-8."),
    ],
)
def test_what_is_not_text_is_named(content: bytes, sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}$"):
        decode_text("a.txt", content)


def test_one_row_in_another_encoding_names_it() -> None:
    assert not_utf_8("café".encode("latin-1")) == (
        "not UTF-8; it seems to be ISO-8859-1 (iconv -f ISO-8859-1 -t UTF-8)"
    )
    assert not_utf_8(b"\xff") == "not UTF-8"


def test_a_text_is_in_another_encoding_if_most_of_its_lines_are() -> None:
    line, utf_8 = SIMPLIFIED.encode("gbk"), SIMPLIFIED.encode()
    assert other_encoding(line * 3 + utf_8) == "GBK"
    assert other_encoding(utf_8 * 3 + line) is None
    assert other_encoding(FRENCH.encode("latin-1")) is None  # its lines without accents are right
