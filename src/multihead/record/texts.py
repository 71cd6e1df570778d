"""The text of a sample: token ids, tokens as text, and which tokens are special.

The text between tokens is kept (`gaps`) where the tokenizer has offsets, because tokens alone do not determine on which
side of a quote or bracket a space is. Without these gaps, a page made with the text and a page made from the record
would show different spaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from multihead.probes.context import ProbeContext
from multihead.probes.places import NO_PICTURE, PlaceTable
from multihead.record.grey_copies import Picture
from multihead.record.table import number_with_noun

__all__ = ["Text"]


@dataclass(frozen=True, eq=False)
class Text:
    """The tokens of one text; an attribute that is unknown is None.

    Attributes:
        ids: (tokens,), int64, the token ids, or None if unknown.
        tokens: each token as text, or None without a tokenizer.
        special: whether each token is a special one such as [CLS], or None if unknown.
        gaps: the text between each token and the previous one (None where unknown), or None if all are unknown.
        boxes: the place in a picture that each token comes from; None for a text without pictures.
        pictures: small grey copies of its pictures, by their numbers in `boxes`; () if they are unknown.

    >>> Text(tokens=["The", " cat"]).length
    2
    """

    ids: Tensor | None = None
    tokens: list[str] | None = None
    special: list[bool] | None = None
    gaps: list[str | None] | None = None
    boxes: PlaceTable | None = None
    pictures: tuple[Picture, ...] = ()

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
            None if self.boxes is None else self.boxes.select(cut),
            self.pictures,
        )

    def select_tokens(self, positions: list[int]) -> Text:
        """Return the tokens at `positions` as a text, without gaps."""
        return Text(
            None if self.ids is None else self.ids[positions],
            None if self.tokens is None else [self.tokens[each] for each in positions],
            None if self.special is None else [self.special[each] for each in positions],
            boxes=None if self.boxes is None else self.boxes.select(torch.tensor(positions, dtype=torch.int64)),
            pictures=self.pictures,
        )


def group_of_keys(text: Text) -> Tensor:
    """Return the group of each key of a text with places, (keys,) int64: an index in `PICTURE_GROUPS`."""
    assert text.boxes is not None
    return text.boxes.groups(has_words=text.ids is not None)


@dataclass(eq=False)
class GrowingText:
    """A text to which attention calls append token ids.

    Attributes:
        complete_text: the complete text with its tokens and special flags, set after recording; None until then.
        find_pictures: returns `pictures`; called at the first read, because measuring places runs the model.
    """

    complete_text: Text | None = None
    find_pictures: Callable[[], PictureTokens | None] | None = None
    _pictures: PictureTokens | None = None
    _ids: list[Tensor] | None = None  # of the calls; None if some ids are unknown
    _num_ids: int = 0

    @property
    def pictures(self) -> PictureTokens | None:
        """The places of its first tokens in pictures; None without pictures."""
        if (find := self.find_pictures) is not None:
            self._pictures, self.find_pictures = find(), None
        return self._pictures

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, for copies and pickles, which cannot measure places."""
        return vars(self) | {"_pictures": self.pictures, "find_pictures": None}

    @staticmethod
    def from_text(text: Text) -> GrowingText:
        """Create a `GrowingText` from a complete text."""
        pictures = None
        if text.boxes is not None:
            own = enumerate(text.tokens or ()) if text.ids is None else ()
            outside = (text.boxes.picture == NO_PICTURE).tolist()
            names = {key: name for key, name in own if outside[key]}
            pictures = PictureTokens.from_places(text.boxes, names, text.pictures)
        ids = None if text.ids is None else [text.ids]
        return GrowingText(text, _pictures=pictures, _ids=ids, _num_ids=text.length)

    @property
    def ids(self) -> Tensor | None:
        """The ids of the tokens so far, (tokens,) int64; None if some are unknown."""
        if self._ids is None:
            return None
        if len(self._ids) > 1:
            self._ids = [torch.cat(self._ids)]
        return self._ids[0]

    @property
    def has_places(self) -> bool:
        """Whether some token is a place in a picture."""
        return self.pictures is not None and self.pictures.boxes.has_places

    def set_pictures(self, pictures: PictureTokens) -> None:
        """Set the places of its first tokens."""
        self._pictures, self.find_pictures = pictures, None

    def add_places(self, context: ProbeContext, start: int, stop: int) -> ProbeContext:
        """Add the places of the tokens [start, stop), the keys of a call of this text, to the context of the call."""
        if self.pictures is None:
            return context
        return self.pictures.add_places(context, start, stop, has_words=self.ids is not None)

    def text(self, length: int) -> Text:
        """Return the text of `length` tokens; ids or tokens of another number are left out of it."""
        ids = self.ids
        named = self.complete_text if self.complete_text is not None and self.complete_text.length == length else Text()
        named = replace(named, ids=None if ids is None or len(ids) != length else ids)
        return named if self.pictures is None else self.pictures.name_tokens(named, length)

    def append_ids(self, ids: Tensor | None, *, start: int) -> None:
        """Append those of `ids`, (tokens,) int64 on the CPU, that are new; the first id is at position `start`."""
        known = 0 if self._ids is None else self._num_ids
        if ids is None or start > known:
            self._ids = None
        elif self._ids is None or start + len(ids) > known:  # an empty text is known, too
            self._ids = [] if self._ids is None else self._ids
            self._ids.append(ids[known - start :])
            self._num_ids = start + len(ids)


@dataclass(frozen=True, eq=False)
class PictureTokens:
    """The first tokens of a text, some of which are places in pictures.

    Attributes:
        boxes: their places, (tokens,).
        names: their names; None for a token that has a text of its own.
        gaps: the text between each token and the previous one; None for a token that has a text of its own.
        pictures: small copies of the pictures, by their numbers in `boxes`; () if they are unknown.
    """

    boxes: PlaceTable
    names: list[str | None]
    gaps: list[str | None]
    pictures: tuple[Picture, ...] = ()

    @staticmethod
    def from_places(
        boxes: PlaceTable, own_names: Mapping[int, str], pictures: tuple[Picture, ...] = ()
    ) -> PictureTokens:
        """Name tokens by their places, (tokens,), and those that come from no picture by `own_names`, key -> name.

        >>> PictureTokens.from_places(PlaceTable.without_places(2), {0: "[CLS]"}).name_tokens(Text(), 2).tokens
        ['[CLS]', 'no place 2']
        """
        names = [own_names.get(key) if name is None else name for key, name in enumerate(boxes.names())]
        lines = torch.stack([boxes.picture, boxes.view, boxes.cell[:, 0]], 1)
        placed = boxes.picture >= 0
        begins = torch.ones_like(placed)
        begins[1:] = (lines[1:] != lines[:-1]).any(1)  # a line per row of the picture
        gaps = [
            ("\n" if begin else " ") if place else None
            for begin, place in zip(begins.tolist(), placed.tolist(), strict=True)
        ]
        return PictureTokens(boxes, names, gaps, pictures)

    def add_places(self, context: ProbeContext, start: int, stop: int, *, has_words: bool) -> ProbeContext:
        """Add the places of the text's tokens [start, stop), the keys of a call, to the context of the call, if any.

        Args:
            context: the context.
            start: index of the first key of the call in the text.
            stop: index after its last key.
            has_words: whether the tokens that come from no picture are words, not tokens of the model's own.
        """
        if not self.boxes.has_places:
            return context
        has_own = has_words or bool((self.boxes.picture == NO_PICTURE).any())
        groups = ["picture", "words" if has_words else "class"][: 1 + has_own]
        found = context.with_places(self.boxes.between(start, stop).reshape(1, stop - start), groups)
        return found if self.boxes.has_cells else replace(found, places=None)

    def name_tokens(self, text: Text, length: int) -> Text:
        """Return a text of `length` tokens with the places and names of its picture tokens."""
        more = length - len(self.names)
        if more < 0:
            return text
        nothing: list[None] = [None] * length
        boxes = self.boxes.between(0, length)
        names, tokens, special = [*self.names, *nothing[:more]], text.tokens, text.special
        if tokens is None:
            if text.ids is not None:
                return replace(text, boxes=boxes, pictures=self.pictures)
            tokens = [f"no place {number}" for number in range(1, length + 1)]
            special = (boxes.picture == NO_PICTURE).tolist() if special is None else special
        gaps = zip([*self.gaps, *nothing[:more]], text.gaps or nothing, strict=True)
        return replace(
            text,
            tokens=[token if name is None else name for name, token in zip(names, tokens, strict=True)],
            special=special,
            gaps=[known if own is None else own for own, known in gaps],
            boxes=boxes,
            pictures=self.pictures,
        )


def describe_texts(number: int, texts: Iterable[Text], longest: int) -> str:
    """Describe the number of texts and their largest length in tokens, or the size in patches of images of one size.

    >>> describe_texts(2, [], 9)
    '2 texts of up to 9 tokens'
    """
    match list({None if each.boxes is None else each.boxes.grid for each in texts}):
        case [(rows, columns)]:
            return f"{number_with_noun(number, 'image')} of {rows} x {columns} patches"
    size = f" of up to {number_with_noun(longest, 'token')}" if longest else ""
    return number_with_noun(number, "text") + size
