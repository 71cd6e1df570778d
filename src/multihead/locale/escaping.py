"""Escape characters that control a terminal or change the direction of text."""

from __future__ import annotations

import re

# Control characters (C0, DEL, C1), direction marks and overrides, invisible characters, line and paragraph separators,
# and lone surrogates, which no encoding can write. ZWJ and ZWNJ are kept: emoji and Persian words need them.
CONTROL_CHARACTERS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def escape_controls(text: object) -> str:
    r"""Replace control and direction characters by escapes, so that untrusted text cannot act on the terminal.

    >>> print(escape_controls("a\x1b[31mb\n\u202ec"))
    a\x1b[31mb\n\u202ec
    """
    return CONTROL_CHARACTERS.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))
