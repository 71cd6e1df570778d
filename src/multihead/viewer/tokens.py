"""Set tokens as reading matter: what stands between them, what each shows, and a label for a ruler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from multihead.errors import ShapeError

SPECIAL, UNKNOWN, PART = 1, 2, 4
"""Flags of a token: a mark of the model's own, not in the vocabulary, a further piece of the character before."""

_VISIBLE = {" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥", "\u00a0": "␣", "\u3000": "␣"}

# Characters that turn the direction of the text after them. Neither a token nor what is between two may turn the page.
_TURNS = dict.fromkeys((0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), "�")


def reading(
    tokens: Sequence[str],
    *,
    special: Sequence[bool] | None = None,
    unknown: Sequence[bool] | None = None,
    text: str | None = None,
    offsets: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """Lay out the tokens of a text for the page; with `text` and `offsets` in the text's own spelling.

    Returns: gaps (what stands before each token), shown, labels and flags, one a token, and the tail of
        the text behind the last token. Slices are made here because a page counts offsets in UTF-16 units.
    Raises: ShapeError if special, unknown or offsets are not one a token.

    >>> page = reading(
    ...     ["[CLS]", "hello", "🎉"], special=[True, False, False], text="Hello 🎉!", offsets=[(0, 0), (0, 5), (6, 7)]
    ... )
    >>> page["gaps"], page["shown"], page["flags"], page["tail"]
    (['', ' ', ' '], ['[CLS]', 'Hello', '🎉'], [1, 0, 0], '!')
    """
    for name, given in (("special", special), ("unknown", unknown), ("offsets", offsets)):
        if given is not None and len(given) != len(tokens):
            raise ShapeError(
                f"{name} has {len(given)} entries, and there are {len(tokens)} tokens.",
                f"Give {name} one entry a token.",
            )
    flags = [
        (SPECIAL if special is not None and special[i] else 0) | (UNKNOWN if unknown is not None and unknown[i] else 0)
        for i in range(len(tokens))
    ]
    if text is not None and offsets is not None:
        gaps, shown, tail = _from_text(tokens, flags, text, offsets)
    else:
        gaps, shown, tail = _from_tokens(tokens)
    gaps, shown, tail = (
        [each.translate(_TURNS) for each in gaps],
        [each.translate(_TURNS) for each in shown],
        tail.translate(_TURNS),
    )
    labels = [_label(token.translate(_TURNS)) for token in tokens]
    return {"gaps": gaps, "shown": shown, "labels": labels, "flags": flags, "tail": tail}


def _from_tokens(tokens: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Tokens that carry their own spaces keep them as gaps; word pieces without any get one between."""
    carry = any(token[:1].isspace() or token[-1:].isspace() for token in tokens)
    words = [token.lstrip(" ") or token for token in tokens]
    gaps = [token[: len(token) - len(word)] if carry else " " for token, word in zip(tokens, words, strict=True)]
    return gaps, words, ""


def _from_text(
    tokens: Sequence[str], flags: list[int], text: str, offsets: Sequence[tuple[int, int]]
) -> tuple[list[str], list[str], str]:
    gaps, shown = [], []
    at = 0
    after_mark = False
    for i, (start, stop) in enumerate(offsets):
        if stop <= start:  # a mark that stands for no text, such as [CLS]
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


def _label(token: str) -> str:
    """A token on a ruler: without the spaces around it, or those spaces made visible."""
    bare = token.strip()
    return bare or "".join(_VISIBLE.get(letter, letter) for letter in token) or "∅"
