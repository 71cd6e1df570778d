"""Lay out tokens as running text: the gap before each token, the text it shows, and its label on a ruler."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from multihead.errors import ShapeError

SPECIAL, UNKNOWN, PART = 1, 2, 4
"""Flags of a token: a special token, a token missing from the vocabulary, a piece of a character."""

_VISIBLE = {" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥", "\u00a0": "␣", "\u3000": "␣"}

# Control characters, marks that change the direction of the text, and invisible characters. Neither a token nor the
# text between two tokens may act on the page, so each is replaced by its code point.
_ACTING = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]"
)
_CLOSING = re.compile("[.,;:!?)\\]}’”%。，、；：！？）】」』]+")
_CJK = re.compile("[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]")


def reading(
    tokens: Sequence[str],
    *,
    special: Sequence[bool] | None = None,
    unknown: Sequence[bool] | None = None,
    text: str | None = None,
    offsets: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Lay out the tokens of a text for a page.

    With `text` and `offsets` the text keeps its own spelling. Otherwise the tokens may be pieces of text with their
    spaces, words, or entries of a vocabulary such as "Ġthe", "▁the" and "##ing".

    Args:
        tokens: the tokens of the text.
        special: whether each token is a special token.
        unknown: whether each token is missing from the vocabulary.
        text: the text itself.
        offsets: (start, stop) of each token in `text`, in characters; (0, 0) for a special token.

    Returns:
        gaps (the text before each token), shown, labels and flags, one per token, and the tail of the text after the
        last token. Slices are made here because a page counts offsets in UTF-16 units.

    Raises:
        ShapeError: special, unknown or offsets do not have one entry per token.

    >>> page = reading(
    ...     ["[CLS]", "hello", "🎉"], special=[True, False, False], text="Hello 🎉!", offsets=[(0, 0), (0, 5), (6, 7)]
    ... )
    >>> page["gaps"], page["shown"], page["flags"], page["tail"]
    (['', ' ', ' '], ['[CLS]', 'Hello', '🎉'], [1, 0, 0], '!')
    """
    for name, values in (("special", special), ("unknown", unknown), ("offsets", offsets)):
        if values is not None and len(values) != len(tokens):
            raise ShapeError(
                f"{name} has {len(values)} entries for {len(tokens)} tokens.",
                f"Give {name} one entry per token.",
            )
    flags = [
        (SPECIAL if special is not None and special[i] else 0) | (UNKNOWN if unknown is not None and unknown[i] else 0)
        for i in range(len(tokens))
    ]
    if text is not None and offsets is not None:
        gaps, shown, tail = _from_text(tokens, flags, text, offsets)
    else:
        gaps, shown, tail = _from_tokens(tokens, flags)
        tokens = shown
    return {
        "gaps": [_harmless(each) for each in gaps],
        "shown": [_harmless(each) for each in shown],
        "labels": [_label(_harmless(token)) for token in tokens],
        "flags": flags,
        "tail": _harmless(tail),
    }


def _from_tokens(tokens: Sequence[str], flags: list[int]) -> tuple[list[str], list[str], str]:
    """Split each token into the gap before it and its text, by the convention of its tokenizer."""
    byte_level = any(token.startswith(("Ġ", "Ċ")) for token in tokens)
    sentencepiece = any(token.startswith("▁") for token in tokens)
    word_pieces = any(len(token) > 2 and token.startswith("##") for token in tokens)
    spaced = any(token[:1].isspace() or token[-1:].isspace() for token in tokens)
    gaps, shown = [], []
    for place, token in enumerate(tokens):
        gap, piece = "", token
        if flags[place] & SPECIAL:
            gaps.append(" " if place else "")
            shown.append(token)
            continue
        if byte_level:
            piece = _decoded(token)
        elif sentencepiece:
            piece = token.replace("▁", " ")
        elif not spaced or word_pieces:
            joined = _CJK.search(token) and (not word_pieces or (place and _CJK.search(tokens[place - 1])))
            continues = word_pieces and token.startswith("##")
            gap = "" if not place or continues or joined or _CLOSING.fullmatch(token) else " "
            piece = token.removeprefix("##") if continues else token
        bare = piece.lstrip()
        if bare and bare != piece:
            gap, piece = piece[: len(piece) - len(bare)], bare
        if "\ufffd" in piece:
            flags[place] |= PART
        gaps.append(gap)
        shown.append(piece)
    return gaps, shown, ""


def _decoded(token: str) -> str:
    """Decode a byte-level token, in which each byte is a printable character."""
    codes = [_bytes().get(letter) for letter in token]
    known = [code for code in codes if code is not None]
    return bytes(known).decode("utf-8", "replace") if len(known) == len(codes) else token


@cache
def _bytes() -> dict[str, int]:
    """Return the byte of each printable character of byte-level tokenizers (GPT-2)."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _from_text(
    tokens: Sequence[str], flags: list[int], text: str, offsets: Sequence[tuple[int, int]]
) -> tuple[list[str], list[str], str]:
    """Slice the text at the offsets: the gap before each token, its text, and the tail."""
    gaps, shown = [], []
    at = 0
    after_mark = False
    for i, (start, stop) in enumerate(offsets):
        if stop <= start:  # a special token without text, such as [CLS]
            gaps.append(" ")
            shown.append(tokens[i])
            after_mark = True
            continue
        if stop <= at:  # several tokens may share one character: the first shows it
            flags[i] |= PART
            gaps.append("")
            shown.append("")
            continue
        begin = max(start, at)
        gaps.append(text[at:begin] or (" " if after_mark else ""))
        shown.append(text[begin:stop])
        at, after_mark = stop, False
    return [gaps[0].strip() if gaps else "", *gaps[1:]], shown, text[at:]


def _harmless(text: str) -> str:
    """Replace each character that would act on the page by its code point."""
    return _ACTING.sub(lambda found: f"U+{ord(found[0]):04X}", text)


def _label(token: str) -> str:
    """Return a token's label on a ruler: without surrounding spaces, or those spaces made visible."""
    bare = token.strip()
    return bare or "".join(_VISIBLE.get(letter, letter) for letter in token) or "∅"
