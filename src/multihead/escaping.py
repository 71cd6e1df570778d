"""Show characters that act on a terminal or turn the text around them, instead of letting them act."""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1), marks and overrides of direction, characters without a shape, line and paragraph
# separators, and lone surrogates, which no encoding can write. ZWJ and ZWNJ stay: emoji and Persian words need them.
ACTING = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def visible(text: object) -> str:
    r"""Write each acting character as its escape, so that a name from a file cannot move the cursor or hide itself.

    >>> print(visible("a\x1b[31mb\n\u202ec"))
    a\x1b[31mb\n\u202ec
    """
    return ACTING.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))
