"""The text of a sample: token ids, tokens as text, and which tokens are special.

The text between tokens is kept (`gaps`) where the tokenizer has offsets, because tokens alone do not determine on which
side of a quote or bracket a space is. Without these gaps, a page made with the text and a page made from the record
would show different spaces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from multihead.record.notebook import number_with_noun
from multihead.record.segments import ChunkedRows

__all__ = ["Text"]


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of one text; an attribute that is unknown is None.

    Attributes:
        ids: (tokens,), int64, the token ids, or None if unknown.
        tokens: each token as text, or None without a tokenizer.
        special: whether each token is a special one such as [CLS], or None if unknown.
        gaps: the text between each token and the previous one (None where unknown), or None if all are unknown.
        patches: rows and columns of an image, whose patches are the last tokens; None for a text.

    >>> Text(tokens=["The", " cat"]).length
    2
    """

    ids: Tensor | None = None
    tokens: list[str] | None = None
    special: list[bool] | None = None
    gaps: list[str | None] | None = None
    patches: tuple[int, int] | None = None

    @property
    def length(self) -> int:
        """Number of tokens; 0 if nothing is known about the text."""
        known = (self.ids, self.tokens, self.special)
        return next((len(each) for each in known if each is not None), 0)

    def slice_tokens(self, start: int, stop: int) -> Text:
        """Return the tokens [start, stop) as a text."""
        cut = slice(start, stop)
        return Text(
            None if self.ids is None else self.ids[cut],
            None if self.tokens is None else self.tokens[cut],
            None if self.special is None else self.special[cut],
            None if self.gaps is None else self.gaps[cut],
        )

    def select_tokens(self, positions: list[int]) -> Text:
        """Return the tokens at `positions` as a text, without gaps."""
        return Text(
            None if self.ids is None else self.ids[positions],
            None if self.tokens is None else [self.tokens[each] for each in positions],
            None if self.special is None else [self.special[each] for each in positions],
        )


@dataclass(eq=False)
class GrowingText:
    """A text to which attention calls append token ids.

    Attributes:
        ids: (tokens so far,), int64; None if some ids are unknown.
        complete_text: the complete text with its tokens and special flags, set after recording; None until then.
    """

    ids: ChunkedRows | None = None
    complete_text: Text | None = None

    @staticmethod
    def from_text(text: Text) -> GrowingText:
        """Create a `GrowingText` from a complete text."""
        return GrowingText(None if text.ids is None else ChunkedRows(0, [text.ids]), text)

    def text(self, length: int) -> Text:
        """Return the text of `length` tokens; ids or tokens of another number are left out of it."""
        ids = self.ids.all_rows() if self.ids is not None and self.ids.length == length else None
        named = self.complete_text if self.complete_text is not None and self.complete_text.length == length else Text()
        return replace(named, ids=ids)

    def append_ids(self, ids: Tensor | None, *, start: int) -> None:
        """Append those of `ids`, (tokens,) int64 on the CPU, that are new; the first id is at position `start`."""
        if ids is None or (self.ids is None and start > 0):
            self.ids = None
            return
        if self.ids is None:
            self.ids = ChunkedRows(0)
        if start > self.ids.length:
            self.ids = None
        elif start + len(ids) > self.ids.length or not self.ids.has_chunks:  # an empty text is known, too
            self.ids.add(ids[self.ids.length - start :])


def describe_texts(number: int, texts: Iterable[Text], longest: int) -> str:
    """Describe the number of texts and their largest length in tokens, or the size in patches of images of one size.

    >>> describe_texts(2, [], 9), describe_texts(1, [Text(patches=(8, 8))], 65)
    ('2 texts of up to 9 tokens', '1 image of 8 x 8 patches')
    """
    match list({each.patches for each in texts}):
        case [(rows, columns)]:
            return f"{number_with_noun(number, 'image')} of {rows} x {columns} patches"
    size = f" of up to {number_with_noun(longest, 'token')}" if longest else ""
    return number_with_noun(number, "text") + size
