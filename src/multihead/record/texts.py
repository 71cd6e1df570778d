"""What a sample was read from: its token ids, and its tokens as a person reads them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from multihead.record.segments import Rows


@dataclass(frozen=True, eq=False)
class Text:
    """One text.

    Fields:
        ids: (tokens,), int64, the token ids, or None where they are not known.
        tokens: what each token shows of the text, or None where no tokenizer said.
        special: whether each token is a mark of the model's own, such as [CLS]; or None.
    """

    ids: Tensor | None = None
    tokens: list[str] | None = None
    special: list[bool] | None = None

    @property
    def length(self) -> int:
        """How many tokens it has; 0 where nothing is known of it."""
        known = (self.ids, self.tokens, self.special)
        return next((len(each) for each in known if each is not None), 0)

    def part(self, start: int, stop: int) -> Text:
        """Keep some consecutive tokens."""
        cut = slice(start, stop)
        return Text(
            None if self.ids is None else self.ids[cut],
            None if self.tokens is None else self.tokens[cut],
            None if self.special is None else self.special[cut],
        )


@dataclass(eq=False)
class Reading:
    """A text as it comes, token by token.

    Fields:
        ids: (tokens so far,), int64, or None where some of them are not known.
        named: what was said of the tokens, or None.
    """

    ids: Rows | None = None
    named: Text | None = None

    @staticmethod
    def of(text: Text) -> Reading:
        """Read a whole text."""
        return Reading(None if text.ids is None else Rows(0, [text.ids]), text)

    def text(self, length: int) -> Text:
        """Return what is known of a text of so many tokens."""
        ids = self.ids.whole() if self.ids is not None and self.ids.length == length else None
        named = self.named if self.named is not None and self.named.length == length else Text()
        return Text(ids, named.tokens, named.special)

    def grow(self, ids: Tensor | None, *, start: int) -> None:
        """Take in the ids that are new among some of which the first stands at `start`: (tokens,), int64."""
        if ids is None or (self.ids is None and start > 0):
            self.ids = None
            return
        if self.ids is None:
            self.ids = Rows(0)
        if start > self.ids.length:
            self.ids = None
        elif start + len(ids) > self.ids.length:
            self.ids.add(ids[self.ids.length - start :].to("cpu", copy=True))
