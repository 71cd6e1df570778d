"""The texts that a layer has read: their samples, and first calls of texts of which no sample was read yet.

The first call of a batch waits as it ran (`WaitingCall`) until a sample is read, because tables of statistics need no
samples. It then appends its rows to the table of the layer (`TextTable`), and its samples are views of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from threading import RLock

from multihead.record.batch import WaitingCall
from multihead.record.sample import SampleRecord
from multihead.record.text_rows import MeasuredStatistic
from multihead.record.text_table import TextTable

_READING = RLock()
"""Lock for making samples of waiting calls, because several threads may read a record."""


@dataclass(eq=False)
class BegunTexts:
    """The texts that one call began; on a GPU how many they are is not known before it is read.

    Attributes:
        of_layer: the texts of the layer.
        windows: how many calls each text has: the windows in which a layer attends.
        call: the call until its samples are made, then None.
        made: the samples of the texts, after they were made.
    """

    of_layer: LayerTexts
    windows: int
    call: WaitingCall | None
    made: list[SampleRecord] = field(default_factory=list)

    @property
    def samples(self) -> list[SampleRecord]:
        """One sample per text."""
        if self.call is not None:
            self.of_layer.samples  # noqa: B018 - makes them, and those of earlier calls
        return self.made

    @property
    def calls(self) -> Iterator[tuple[SampleRecord, int]]:
        """The sample of each text, with the index of each of these calls in it."""
        return product(self.samples, range(self.windows))


@dataclass(eq=False)
class LayerTexts:
    """The texts that a layer has read, in the order in which they began.

    Attributes:
        known: the samples of the texts, except those whose first call waits.
        waiting: the texts whose first call waits.
        table: the numbers of the texts; samples of files and of joined records have tensors of their own.
    """

    known: list[SampleRecord] = field(default_factory=list)
    waiting: list[BegunTexts] = field(default_factory=list)
    table: TextTable = field(default_factory=TextTable)

    @property
    def samples(self) -> list[SampleRecord]:
        """One sample per text; the first read makes those of the calls that wait."""
        with _READING:
            while self.waiting:
                begun = self.waiting[0]
                assert begun.call is not None
                begun.made = begun.call.make_samples(self.table, first=len(self.known))
                self.known += begun.made
                begun.call = None
                del self.waiting[0]
        return self.known

    @property
    def num_texts(self) -> int:
        """Number of texts."""
        with _READING:
            return sum((begun.call.num_texts for begun in self.waiting if begun.call is not None), len(self.known))

    def measured_texts(self) -> list[dict[str, MeasuredStatistic]]:
        """Return the statistics of each text, see `SampleRecord.measured`; no sample is made."""
        with _READING:
            found = [sample.measured() for sample in self.known]
            for begun in self.waiting:
                assert begun.call is not None
                found += begun.call.measured().by_text(begun.windows)
        return found

    def begin(self, call: WaitingCall) -> BegunTexts:
        """Append the first call of some texts, and return these texts."""
        begun = BegunTexts(self, call.windows, call)
        self.waiting.append(begun)
        return begun
