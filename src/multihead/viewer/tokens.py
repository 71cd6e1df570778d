"""Lay out tokens as running text: the gap before each token, its shown text, and its label on a ruler.

Only this module, on the server, lays out tokens: named ones, see `models.tokens`, and entries of a vocabulary of a
byte-level, SentencePiece or WordPiece tokenizer. It knows gaps, labels, and control characters, which are shown by
their code point.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from multihead.errors import ShapeError
from multihead.locale.escaping import label_of_token
from multihead.models.tokens import CONTINUATION_MARK, bytes_of_entry
from multihead.viewer.page_types import TokenLayout

SPECIAL_FLAG, UNKNOWN_FLAG, PIECE_FLAG = 1, 2, 4
"""Flags of a token: a special token, a token missing from the vocabulary, a piece of a character."""

# Control characters, marks that change the direction of the text, and invisible characters. Neither a token nor the
# text between two tokens may act on the page, so each is replaced by its code point.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)
_CLOSING_PUNCTUATION = re.compile("[.,;:!?)\\]}’”%。，、；：！？）】」』]+")
_OPENING_PUNCTUATION = re.compile("[(\\[{“‘«¿¡$#@]+")
_APOSTROPHE_OR_HYPHEN = re.compile("['’-]")  # apostrophe or hyphen: no space on either side
_CJK_CHARACTER = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")


def layout_of_tokens(
    tokens: Sequence[str],
    *,
    special: Sequence[bool] | None = None,
    unknown: Sequence[bool] | None = None,
    text: str | None = None,
    offsets: Sequence[tuple[int, int]] | None = None,
    gaps: Sequence[str | None] | None = None,
) -> TokenLayout:
    """Lay out the tokens of a text for a page.

    With `text` and `offsets` the text keeps its own spelling. Otherwise the tokens may be pieces of text with their
    spaces, words, or entries of a vocabulary such as "Ġthe", "▁the" and "##ing".

    Args:
        tokens: the tokens of the text.
        special: whether each token is a special token.
        unknown: whether each token is missing from the vocabulary.
        text: the text itself.
        offsets: (start, stop) of each token in `text`, in characters; (0, 0) for a special token.
        gaps: without `text`, known text before each token, if `text` is None; None for a token where it is unknown.

    Returns:
        gaps (the text before each token), shown, labels and flags, one per token, and the tail of the text after the
        last token. The text is sliced here because a page's script would count offsets in UTF-16 units.

    Raises:
        ShapeError: special, unknown, offsets or gaps do not have one entry per token.

    >>> page = layout_of_tokens(
    ...     ["[CLS]", "hello", "🎉"], special=[True, False, False], text="Hello 🎉!", offsets=[(0, 0), (0, 5), (6, 7)]
    ... )
    >>> page["gaps"], page["shown"], page["flags"], page["tail"]
    (['', ' ', ' '], ['[CLS]', 'Hello', '🎉'], [1, 0, 0], '!')
    """
    for name, values in (("special", special), ("unknown", unknown), ("offsets", offsets), ("gaps", gaps)):
        if values is not None and len(values) != len(tokens):
            raise ShapeError(
                f"{name} has {len(values)} entries for {len(tokens)} tokens.",
                f"Give {name} one entry per token.",
            )
    flags = [
        (SPECIAL_FLAG if special is not None and special[i] else 0)
        | (UNKNOWN_FLAG if unknown is not None and unknown[i] else 0)
        for i in range(len(tokens))
    ]
    if text is not None and offsets is not None:
        pieces = list(_slice_text(tokens, flags, text, offsets))
        tail = text[max((stop for start, stop in offsets if stop > start), default=0) :]
    else:
        pieces, tail = list(_split_tokens(tokens, flags, gaps)), ""
        tokens = [
            CONTINUATION_MARK if flag & PIECE_FLAG and not shown else shown
            for flag, (_, shown) in zip(flags, pieces, strict=True)
        ]
    return {
        "gaps": [_escape_invisible_characters(gap) for gap, _ in pieces],
        "shown": [_escape_invisible_characters(shown) for _, shown in pieces],
        "labels": [label_of_token(_escape_invisible_characters(token)) for token in tokens],
        "flags": flags,
        "tail": _escape_invisible_characters(tail),
    }


def _split_tokens(
    tokens: Sequence[str], flags: list[int], known: Sequence[str | None] | None
) -> Iterator[tuple[str, str]]:
    """Yield the gap before each token and the text of the token, and flag pieces of characters.

    Gaps are taken from `known`, or else follow from the conventions of the tokenizer.
    """
    byte_level = any(token.startswith(("Ġ", "Ċ")) for token in tokens)
    sentencepiece = any(token.startswith("▁") for token in tokens)
    word_pieces = any(len(token) > 2 and token.startswith("##") for token in tokens)
    spaced = any(token[:1].isspace() or token[-1:].isspace() for token in tokens)
    pieces = _decode_byte_tokens(tokens, flags) if byte_level else list(tokens)
    quoted = False  # whether the token is inside straight double quotes
    opened = True  # whether no gap belongs between the previous token and this one
    for place, token in enumerate(pieces):
        if flags[place] & SPECIAL_FLAG:
            yield " " if place else "", token
            opened = False
            continue
        if token == CONTINUATION_MARK or (flags[place] & PIECE_FLAG and not token):
            flags[place] |= PIECE_FLAG
            yield "", ""
            continue
        gap, piece = "", token
        if sentencepiece:
            piece = token.replace("▁", " ")
        elif not byte_level and (not spaced or word_pieces):
            joined = _CJK_CHARACTER.search(token) and (
                not word_pieces or (place and _CJK_CHARACTER.search(pieces[place - 1]))
            )
            continues = word_pieces and token.startswith("##")
            closing = (
                _CLOSING_PUNCTUATION.fullmatch(token)
                or (token == '"' and quoted)
                or _APOSTROPHE_OR_HYPHEN.fullmatch(token)
            )
            gap = "" if not place or opened or continues or joined or closing else " "
            opened = bool(
                _OPENING_PUNCTUATION.fullmatch(token)
                or _APOSTROPHE_OR_HYPHEN.fullmatch(token)
                or (token == '"' and not quoted)
            )
            quoted ^= token == '"'
            piece = token.removeprefix("##") if continues else token
        if known is not None and (given := known[place]) is not None:
            gap = given or (" " if place and flags[place - 1] & SPECIAL_FLAG else "")
        bare = piece.lstrip()
        if bare and bare != piece:
            gap, piece = gap + piece[: len(piece) - len(bare)], bare
        if "\ufffd" in piece:
            flags[place] |= PIECE_FLAG
        yield gap, piece


def _decode_byte_tokens(tokens: Sequence[str], flags: list[int]) -> list[str]:
    """Decode byte-level tokens to text; if several tokens share one character, only the first one gets it."""
    pieces: list[str] = []
    while (first := len(pieces)) < len(tokens):
        pieces.append(tokens[first] if flags[first] & SPECIAL_FLAG else _decode_byte_token(tokens[first]))
        if flags[first] & SPECIAL_FLAG or not pieces[first].endswith("\ufffd"):
            continue
        for stop in range(first + 2, min(len(tokens), first + 4) + 1):
            if flags[stop - 1] & SPECIAL_FLAG:
                break
            whole = _decode_byte_token("".join(tokens[first:stop]))
            if "\ufffd" not in whole:
                pieces[first:] = [whole, *[""] * (stop - first - 1)]
                flags[first + 1 : stop] = [flag | PIECE_FLAG for flag in flags[first + 1 : stop]]
                break
    return pieces


def _decode_byte_token(token: str) -> str:
    """Decode a byte-level token, in which each byte is a printable character."""
    found = bytes_of_entry(token)
    return token if found is None else found.decode("utf-8", "replace")


def _slice_text(
    tokens: Sequence[str], flags: list[int], text: str, offsets: Sequence[tuple[int, int]]
) -> Iterator[tuple[str, str]]:
    """Slice the text at the offsets: yield the gap before each token and the text of the token, and flag pieces."""
    at = 0
    after_mark = False
    for i, (start, stop) in enumerate(offsets):
        if stop <= start and not tokens[i]:  # a space that the tokenizer prepended
            yield "", ""
        elif stop <= start:  # a special token without text, such as [CLS]
            yield " " if i else "", tokens[i]
            after_mark = True
        elif stop <= at:  # several tokens may share one character, and the first one has shown it
            flags[i] |= PIECE_FLAG
            yield "", ""
        else:
            # Spaces that belong to a token are shown as a gap, so that words are painted and not the spaces between.
            piece = text[max(start, at) : stop]
            bare = piece.lstrip() or piece
            gap = text[at : stop - len(bare)] or (" " if after_mark else "")
            yield gap if i else gap.strip(), bare
            at, after_mark = stop, False


def _escape_invisible_characters(text: str) -> str:
    """Replace each control or invisible character by its code point, such as U+200B."""
    return _CONTROL_CHARACTERS.sub(lambda found: f"U+{ord(found[0]):04X}", text)
