"""Name tokens: each token of a text by the part of the text that it stands for, and a predicted token by its id.

The name of a token is as long as the token: with the space that belongs to it (" cat" of "▁cat" or "Ġcat"), and without
one that the tokenizer prepended to the text. The names of all tokens, each after its gap, are the text. A character of
several byte tokens is the name of the token with its first byte; the others are called `CONTINUATION_MARK`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

CONTINUATION_MARK = "⤷"
"""Name of a token that is a further part of a character of which an earlier token shows the whole."""

_REPLACEMENT_CHARACTER = "\ufffd"  # to which tokenizers decode incomplete UTF-8
_JOINED_TO_NEXT = "@@"  # end of a piece that the next one continues, in the vocabularies of subword-nmt
_ESCAPED_SURROGATE = re.compile("[\udc80-\udcff]")  # a byte that is no UTF-8, decoded with "surrogateescape"
_ESCAPED_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")  # byte fallback of SentencePiece
_JOINERS = "\u200c\u200d"  # ZWNJ and ZWJ shape the letters or emoji before them
# byte tokens that are decoded together: a token may have the last bytes of a character and the first of the next one
_MAX_TOKENS_DECODED_TOGETHER = 32
# tokens decoded before a predicted token, because many tokenizers leave out the space before the first token
_NUM_CONTEXT_TOKENS = 8


@dataclass(frozen=True, eq=False)
class NamedTokens:
    """The names of the tokens of a text.

    Attributes:
        names: name of each token; `CONTINUATION_MARK` for a further token of the same character.
        gaps: text between the previous token and each token, which no token stands for; None where it is unknown.
        spans: start and end of each token in the text, characters (equal for a token without text), or None without a
            text.
    """

    names: list[str]
    gaps: list[str | None]
    spans: list[tuple[int, int]] | None = None


def name_tokens(
    tokenizer: Any,
    ids: Sequence[int],
    special: Sequence[bool],
    *,
    text: str = "",
    offsets: Sequence[tuple[int, int]] | None = None,
) -> NamedTokens:
    """Name the tokens of a text.

    Args:
        tokenizer: a Hugging Face tokenizer, or anything with `convert_ids_to_tokens` and `decode`.
        ids: the id of each token.
        special: whether each token is a special token, such as [CLS].
        text: the text, if `offsets` are given.
        offsets: start and end of each token in `text`, as the tokenizer has them; None decodes the ids.
    """
    return _decode(tokenizer, ids, special) if offsets is None else _slice(tokenizer, ids, special, text, offsets)


def name_predicted_token(tokenizer: Any, id_: int, before: Sequence[int]) -> str:
    """Return the text that a token adds after the tokens `before`; bytes that are no character as "<0xE5>"."""
    added = _added_text(tokenizer, before[-_NUM_CONTEXT_TOKENS:], [id_])
    if not added or _REPLACEMENT_CHARACTER in added:
        return name_bytes(tokenizer, [id_])
    return _without_space_of_decoder(added, *_pieces(tokenizer, [id_]))


def name_bytes(tokenizer: Any, ids: Sequence[int]) -> str:
    """Return the characters and the single bytes of tokens that do not decode to characters, such as "<0xE5>".

    >>> class Bytes:
    ...     convert_ids_to_tokens = staticmethod(lambda id_: ["Ġå", "½"][id_])
    >>> name_bytes(Bytes(), [0]), name_bytes(Bytes(), [1])
    (' <0xE5>', '<0xBD>')
    """
    pieces = _pieces(tokenizer, ids)
    data = [bytes_of_entry(piece) for piece in pieces]
    if any(each is None for each in data):
        return "".join(pieces)
    decoded = b"".join(each or b"" for each in data).decode("utf-8", "surrogateescape")
    return _ESCAPED_SURROGATE.sub(lambda found: f"<0x{ord(found[0]) - 0xDC00:02X}>", decoded)


@cache
def _byte_of_each_character() -> dict[str, int]:
    """Return the byte of each character of the entries of byte-level vocabularies.

    Those of GPT-2 replace the bytes that cannot be printed by characters from U+0100 on; ByT5 has each byte itself.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in range(256)} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _slice(
    tokenizer: Any, ids: Sequence[int], special: Sequence[bool], text: str, offsets: Sequence[tuple[int, int]]
) -> NamedTokens:
    """Name tokens by their offsets in the text."""
    pieces = _pieces(tokenizer, ids)
    spans = _exact_spans(pieces, offsets, text)
    names: list[str] = []
    gaps: list[str | None] = []
    reached = 0
    for piece, (start, stop), mark in zip(pieces, spans, special, strict=True):
        if start < stop <= reached:
            names.append(CONTINUATION_MARK)
        else:
            names.append(piece if mark and start == stop else text[start:stop])
        gaps.append(text[reached:start] if stop > reached else None if mark else "")
        reached = max(reached, stop)
    return NamedTokens(names, gaps, spans)


def _exact_spans(pieces: Sequence[str], offsets: Sequence[tuple[int, int]], text: str) -> list[tuple[int, int]]:
    """Correct the offsets of a tokenizer: each token gets the text that its entry of the vocabulary stands for.

    A space that was prepended to a text borrows the offsets of the first character. Some tokenizers leave the spaces of
    their tokens out of the offsets, and others leave out accents and vowel signs. Further tokens of a character keep
    its span.
    """
    spans: list[tuple[int, int]] = []
    reached, last = 0, -1  # end of the text that has tokens, and the index of the token that reached it

    def extend_over_marks() -> None:
        nonlocal reached
        while last >= 0 and _belongs_to_letter_before(text[reached : reached + 1]):
            reached += 1
            spans[last] = spans[last][0], reached

    for place, (piece, offset) in enumerate(zip(pieces, offsets, strict=True)):
        if offset[0] > reached:
            extend_over_marks()
        following = offsets[place + 1] if place + 1 < len(offsets) else None
        start, stop = _exact_span(piece, offset, following, text, reached)
        if start > reached and place and spans[-1][0] == spans[-1][1] and _is_only_spaces(pieces[place - 1]):
            # a space at the start of the text, which the tokenizer took for one that it prepended
            end = reached + _count_spaces(text[reached : min(start, reached + len(pieces[place - 1]))])
            spans[-1] = reached, end
            reached = end
        if stop > reached:
            start, reached, last = max(start, reached), stop, place
        spans.append((start, stop))
    extend_over_marks()
    return spans


def _exact_span(
    piece: str, offset: tuple[int, int], following: tuple[int, int] | None, text: str, reached: int
) -> tuple[int, int]:
    """Return the span of a token with the spaces that its entry of the vocabulary has, and with no other character.

    Args:
        piece: the entry of the token in the vocabulary.
        offset: start and end of the token, as the tokenizer has them.
        following: those of the next token.
        text: the text.
        reached: end of the tokens before it.
    """
    if not {piece[:1], piece[-1:]} & {"▁", "Ġ"}:  # nothing to correct, which is so for most tokens
        return offset
    start, stop = offset
    covered = text[start:stop]
    if covered == piece:  # where the text itself has a "▁", it is no space
        return offset
    sign = _space_sign(piece)
    before, after = len(piece) - len(piece.lstrip(sign)), len(piece) - len(piece.rstrip(sign))
    if before == len(piece):
        prepended = following is not None and start <= following[0] < min(stop, following[1])
        stop = start if prepended or covered.strip() else stop
        after = 0
    if covered[:1] != " ":
        start -= min(before, _count_spaces(text[reached:start][::-1]))
    if covered[-1:] != " ":
        stop += min(after, _count_spaces(text[stop : stop + after]))
    return start, stop


def _space_sign(piece: str) -> str:
    """Return the character that stands for a space in an entry of the vocabulary of a tokenizer.

    SentencePiece writes "▁", and byte-level tokenizers, whose entries cannot contain that character, write "Ġ".
    """
    return "▁" if "▁" in piece else "Ġ"


def _is_only_spaces(piece: str) -> bool:
    return not piece.strip(_space_sign(piece))


def _count_spaces(text: str) -> int:
    """Return the number of spaces and line breaks at the start of a text."""
    return len(text) - len(text.lstrip())


def _belongs_to_letter_before(character: str) -> bool:
    """Return whether a character is an accent, a vowel sign, or a joiner of emoji or letters."""
    return character != "" and (character in _JOINERS or unicodedata.category(character).startswith("M"))


def _decode(tokenizer: Any, ids: Sequence[int], special: Sequence[bool]) -> NamedTokens:
    """Name tokens by what each adds to the decoded tokens before it; byte tokens of one character are decoded together.

    A space that the decoder puts between words, as that of WordPiece does, belongs to no token, and the text may not
    have it: the gap is unknown.
    """
    pieces = _pieces(tokenizer, ids)
    names: list[str] = []
    gaps: list[str | None] = []
    known: dict[int, tuple[list[str], str | None]] = {}  # of tokens that follow others
    context = 0  # index of the first token that is decoded before the next ones
    while (first := len(names)) < len(ids):
        if special[first]:
            names.append(pieces[first])
            gaps.append(None)
            context = first + 1
            continue
        before = ids[context:first]
        found = known.get(ids[first]) if before else None
        if found is None:
            limit = min(first + _MAX_TOKENS_DECODED_TOGETHER, len(ids))
            stop = next((place for place in range(first, limit) if special[place]), limit)
            found = _name_next_character(tokenizer, before, ids[first:stop], pieces[first:stop])
            if before and names[-1] and len(found[0]) == 1:
                known[ids[first]] = found
        names += found[0]
        gaps += [found[1], *[""] * (len(found[0]) - 1)]
        context = first
    return NamedTokens(names, gaps)


def _name_next_character(
    tokenizer: Any, before: Sequence[int], ids: Sequence[int], pieces: Sequence[str]
) -> tuple[list[str], str | None]:
    """Return the names of the first of some tokens, as many as decode to whole characters, and the gap before them.

    Args:
        tokenizer: the tokenizer.
        before: the ids of the tokens before them; empty at the start of a text.
        ids: the ids of the tokens, none of them special.
        pieces: the entries of the tokens in the vocabulary.
    """
    for stop in range(1, len(ids) + 1):
        added = _added_text(tokenizer, before, ids[:stop])
        if _is_incomplete(added, pieces[:stop]):
            if _why_no_text([bytes_of_entry(piece) for piece in pieces[:stop]]) in ("", "unexpected end of data"):
                continue
            break
        if not before and added.startswith(" ") and _prepends_space(tokenizer):
            return _divide_characters(added[1:], pieces[:stop]), ""
        if stop == 1 and (bare := _without_space_of_decoder(added, pieces[0])) != added:
            return [bare], None
        return _divide_characters(added, pieces[:stop]), ""
    return [name_bytes(tokenizer, ids[:1])], ""


def _without_space_of_decoder(added: str, piece: str) -> str:
    """Return the text that a token adds, without a space that its entry of the vocabulary does not have."""
    bare = added.lstrip(" ")
    return bare if bare and piece.startswith(bare) else added


def _divide_characters(text: str, pieces: Sequence[str]) -> list[str]:
    """Divide the text of some tokens among them: each character is in the name of the token that has its first byte."""
    if len(pieces) == 1:
        return [text]
    data = [bytes_of_entry(piece) for piece in pieces]
    size = sum(len(each or b"") for each in data)
    if any(each is None for each in data) or size < len(text.encode()):
        return [text, *[CONTINUATION_MARK] * (len(pieces) - 1)]
    names, place = [""] * len(pieces), 0
    at = size - len(text.encode())  # a space that was prepended to the text is left out
    ends = list(accumulate(len(each or b"") for each in data))
    for character in text:
        while at >= ends[place]:
            place += 1
        names[place] += character
        at += len(character.encode())
    return [name or CONTINUATION_MARK for name in names]


def _is_incomplete(added: str, pieces: Sequence[str]) -> bool:
    """Return whether tokens, and the text that they add, end inside of a character."""
    if added and _REPLACEMENT_CHARACTER not in added:
        return False
    data = [bytes_of_entry(piece) for piece in pieces]
    if any(each is None for each in data):
        # Some tokenizers decode an incomplete character to an empty text, as others do a space at the start.
        written = "".join(pieces)
        return _REPLACEMENT_CHARACTER not in written if added else not _is_only_spaces(written)
    return _why_no_text(data) != ""


def _why_no_text(data: Sequence[bytes | None]) -> str:
    """Return why bytes are not UTF-8; "" if they are, or unknown."""
    try:
        b"".join(each for each in data if each is not None).decode()
    except UnicodeDecodeError as error:
        return error.reason
    return ""


def _added_text(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return what tokens add to the decoded tokens before them."""
    if before:
        known, whole = (_decode_ids(tokenizer, each) for each in (before, [*before, *ids]))
        if whole.startswith(known):
            return whole[len(known) :]
    alone = _decode_ids(tokenizer, ids)
    if alone.endswith(_JOINED_TO_NEXT) and not _decode_ids(tokenizer, [*ids, *ids]).startswith(alone):
        return alone.removesuffix(_JOINED_TO_NEXT)
    return alone


def _decode_ids(tokenizer: Any, ids: Sequence[int]) -> str:
    options = {"clean_up_tokenization_spaces": False} if hasattr(tokenizer, "clean_up_tokenization_spaces") else {}
    return str(tokenizer.decode(list(ids), **options))


def _prepends_space(tokenizer: Any) -> bool:
    """Return whether a tokenizer puts a space before a text that its decoder leaves there."""
    return callable(tokenizer) and _decode_ids(tokenizer, tokenizer("a", add_special_tokens=False)["input_ids"]) == " a"


def _pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return the entries of tokens in the vocabulary."""
    if hasattr(tokenizer, "is_fast"):  # a tokenizer of transformers also takes a list, which is faster
        return list(map(str, tokenizer.convert_ids_to_tokens(list(ids))))
    return [str(tokenizer.convert_ids_to_tokens(id_)) for id_ in ids]


def bytes_of_entry(piece: str) -> bytes | None:
    """Return the bytes of a byte-level entry of a vocabulary, or of one for a single byte; None for any other."""
    if single := _ESCAPED_BYTE.fullmatch(piece):
        return bytes([int(single[1], 16)])
    known = _byte_of_each_character()
    return bytes(known[character] for character in piece) if known.keys() >= set(piece) else None
