"""Find when heads became a kind, and when they were no longer of it, over the observed steps of a training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from multihead.kinds import Kind
from multihead.locale.texts import text
from multihead.record.table import HeadOfLayer


@dataclass(frozen=True, repr=False)
class KindChange(HeadOfLayer):
    """A head that became a kind of head during a training, or was no longer of the kind.

    Attributes:
        layer: number of the layer.
        head: index of the head in the layer.
        name: name of the layer.
        kind: name of the kind.
        gained: True if the head became a head of the kind, False if it was no longer one.
        step: the first observed step after the change.
        after: the last observed step before the change.
        until: the observed step of the next change of this head and kind; None if there is none.
    """

    kind: str
    gained: bool
    step: int
    after: int
    until: int | None
    shown: Kind = field(compare=False)

    def sentence(self, lang: str = "en") -> str:
        """Return the change as a sentence, in a language.

        Raises:
            ArgumentError: there is no such language.
        """
        key = "series.became" if self.gained else "series.no longer"
        head, step = f"L{self.layer} H{self.head}", text("series.step", lang, n=f"{self.step:,}")
        return text(key, lang, head=head, noun=self.shown.noun_phrase(lang), step=step)

    def __str__(self) -> str:
        """Return the sentence, such as "L1 H0 became a first-token head at step 120."."""
        return self.sentence()

    def cells(self) -> dict[str, str]:
        """Return the change as a row of a table: heading -> text."""
        return self.place_cells() | {"step": f"{self.step:,}", "kind": self.kind, "change": str(self)}


def changed_places(states: Sequence[bool]) -> list[int]:
    """Return the indices at which a state changes, without the changes that last for one index only.

    A change counts if the new state is also that of the next index, or there is no next index. The first state is True
    only if the second one is, too.

    >>> changed_places([False, True, True, False, True, True, False]), changed_places([True, False, False])
    ([1, 6], [])
    """
    settled, found = all(states[:2]), []
    for place, state in enumerate(states):
        if state != settled and all(each == state for each in states[place : place + 2]):
            settled = not settled
            found.append(place)
    return found


def changes_of_layer(
    kind: Kind, steps: Sequence[int], states: NDArray[np.bool_], *, layer: int, name: str
) -> Iterator[KindChange]:
    """Yield the changes of one kind in the heads of a layer.

    Args:
        kind: the kind.
        steps: the observed steps, ascending.
        states: whether each head was of the kind, (steps, heads).
        layer: number of the layer.
        name: name of the layer.
    """
    for head in np.flatnonzero((states[1:] != states[:-1]).any(0)).tolist():
        places = changed_places(states[:, head].tolist())
        for number, place in enumerate(places):
            until = steps[places[number + 1]] if number + 1 < len(places) else None
            gained = bool(states[place, head])
            yield KindChange(layer, head, name, kind.name, gained, steps[place], steps[place - 1], until, kind)


def most_telling_first(changes: Iterable[KindChange]) -> list[KindChange]:
    """Sort changes for a page: the first head to become each kind, then the second one of each kind, and so on.

    After the heads that became a kind that findings report (`Kind.finding`) and stayed it, come those that were no
    longer of it later; then the ends of these kinds; then the kinds that findings leave out, such as "broad", which
    nearly every head is before the training.
    """
    numbers = Counter[tuple[str, bool, bool]]()
    found: list[tuple[tuple[bool, bool, bool, int, int], KindChange]] = []
    for each in sorted(changes, key=lambda one: (one.step, one.layer, one.head)):
        rank, lasts = each.shown.finding, each.until is None
        group = each.kind, each.gained, lasts
        found.append(((rank is None, not each.gained, not lasts, numbers[group], rank or 0), each))
        numbers[group] += 1
    return [each for _, each in sorted(found, key=itemgetter(0))]
