"""Write names in sentences: they neither control a terminal nor change the direction of the text."""

from __future__ import annotations

import re
import unicodedata

# Control characters (C0, DEL, C1), direction marks and overrides, invisible characters, line and paragraph separators,
# and lone surrogates, which no encoding can write. ZWJ and ZWNJ are kept: emoji and Persian words need them.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)

_VISIBLE_SIGNS = {" ": "␣", "\n": "↵", "\r": "↵", "\t": "⇥", "\u00a0": "␣", "\u3000": "␣"}
_FIRST_STRONG_ISOLATE, _POP_DIRECTIONAL_ISOLATE = "\u2068", "\u2069"


def escape_controls(text: object) -> str:
    r"""Replace control and direction characters by escapes, so that untrusted text cannot act on the terminal.

    >>> print(escape_controls("a\x1b[31mb\n\u202ec"))
    a\x1b[31mb\n\u202ec
    """
    return CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def label_of_token(token: str) -> str:
    r"""Return a token without the spaces around it; signs that can be seen if it has nothing else, "∅" if it is empty.

    >>> label_of_token(" cat"), label_of_token("\n\n"), label_of_token("")
    ('cat', '↵↵', '∅')
    """
    return token.strip() or "".join(_VISIBLE_SIGNS.get(letter, letter) for letter in token) or "∅"


def isolate_direction(name: str) -> str:
    """Return a name for a sentence of either language: one written from right to left does not reorder the sentence."""
    rightward = not any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in name)
    return name if rightward else f"{_FIRST_STRONG_ISOLATE}{name}{_POP_DIRECTIONAL_ISOLATE}"
