"""The record of one attention layer: its samples, or a running summary of all texts.

If a model is designed to run one module several times, each of these calls is recorded as a layer (`layer.module`,
`layer.call`). For example, ALBERT calls one module twelve times instead of having twelve layers, so each call has its
own layer number. If layers were numbered by module, a head would be identified by layer, call and head, in each table
row, link and file, for the few models that share layers.

The first call of a batch waits as it ran (`WaitingCall`) until a sample is read, because tables of statistics need no
samples. It then appends its rows to the table of the layer (`TextTable`), and its samples are views of them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from threading import RLock
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ProbeError
from multihead.kinds import KINDS, Kind
from multihead.locale.escaping import escape_controls
from multihead.probes.probe import Statistic
from multihead.record.batch import WaitingCall
from multihead.record.chance import ChanceCache, Progress
from multihead.record.profiles import LayerKinds, LayerProfile, profile_of_samples
from multihead.record.repeated import RepeatedTokens
from multihead.record.running_summary import RunningSummary
from multihead.record.sample import SampleRecord
from multihead.record.split import LayerPartOfRank
from multihead.record.table import head_rows, html_of_table, number_with_noun
from multihead.record.text_rows import MeasuredStatistic, SummaryName, count_nonfinite, summarise_samples
from multihead.record.text_table import TextTable
from multihead.record.texts import Text

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


@dataclass(eq=False, repr=False)
class LayerRecord:
    """One attention layer of a record.

    Attributes:
        name: the layer's qualified name in the model, with "#2" and so on for further calls in one forward pass.
        texts: the texts of the layer; without texts if only a summary is kept.
        running_summary: summary of all texts if observed with keep="summary", else None.
        number: index of the layer among all attention layers of the model, recorded or not, in the order of their first
            calls: L17 is the layer that `observe(layers=17)` selects.
        alignment_heads: indices of the heads that the model declares as alignment heads (Whisper), ascending.
        repeated: attention of the heads on repeated random tokens; None if it was not measured.
        split: the heads and tokens of the layer that this rank computed; None if it computed all.
        own_kinds: user-defined kinds of heads, see `Record.add_kinds`.
        numbers: name of a statistic -> (texts, heads) float64, numbers of heads on other texts than the record's, see
            `Record.add`; NaN for a head that was not measured.
    """

    name: str
    texts: LayerTexts = field(default_factory=LayerTexts)
    running_summary: RunningSummary | None = None
    number: int = 0
    alignment_heads: tuple[int, ...] = ()
    repeated: RepeatedTokens | None = None
    split: LayerPartOfRank | None = None
    own_kinds: tuple[Kind, ...] = ()
    numbers: dict[str, Tensor] = field(default_factory=dict)
    _known_heads: int = 0  # number of query heads, of a layer whose calls had no text

    def __repr__(self) -> str:
        """Return one line: the number and name of the layer, and its numbers of heads and texts."""
        contents = f"{number_with_noun(self.num_heads, 'head')}, {number_with_noun(self.num_samples, 'text')}"
        return f"<LayerRecord {self.number} {escape_controls(self.name)}: {contents}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: a table with one row per head."""
        rows = self.rows()
        return html_of_table(
            self.name, f"layer {self.number}, {number_with_noun(self.num_samples, 'text')}", rows, ["head"]
        )

    @property
    def module(self) -> str:
        """The qualified name of the layer's module; layers that share a module, as in ALBERT, share this name."""
        return self.name.partition("#")[0]

    @property
    def call(self) -> int:
        """Index of the recorded call among the calls of the module in one forward pass, from 0."""
        return int(self.name.partition("#")[2] or 1) - 1

    @property
    def samples(self) -> list[SampleRecord]:
        """One sample per text, in the order in which the texts ran; empty if only a summary is kept."""
        return self.texts.samples

    @property
    def num_heads(self) -> int:
        """Number of query heads."""
        if self.running_summary is not None:
            return self.running_summary.num_heads
        return self.texts.known[0].num_heads if self.texts.known else self._known_heads

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        if self.running_summary is not None:
            return self.running_summary.num_samples
        return self.texts.num_texts

    @property
    def has_kinds(self) -> bool:
        """Whether the kinds of the heads are known: from single texts, or from a summary with chance levels."""
        if self.running_summary is not None:
            return self.repeated is not None or bool(self.running_summary.evidence())
        return bool(self.num_samples) and all(one.split is None for one in self.samples)

    @property
    def kinds(self) -> tuple[tuple[str, ...], ...]:
        """The names of the kinds of each head over all samples, the most specific first.

        Raises:
            ProbeError: a summary of an earlier version was kept, which has no chance levels.
        """
        made = {kind.probe.name: kind.probe for kind in self.own_kinds if kind.probe is not None}
        (profile,) = layer_profiles([self], sample=None, statistics=made, among=(*KINDS, *self.own_kinds))
        return profile.kinds

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each statistic over the counted queries of all samples: name -> (heads,) float64."""
        return self.summary()

    def summary(self, of: SummaryName = "mean", names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Summarise each statistic over the counted queries of all samples: name -> (heads,) float64.

        Numbers on other texts, such as repeated random tokens, are included only in means: they are stored per text.

        Args:
            of: "mean", "median", "p95" (the 95th percentile) or "max".
            names: the statistics to summarise; None takes all.

        Raises:
            ArgumentError: `of` is not one of these.
        """
        if self.running_summary is not None:
            return self.running_summary.summary(of, names) | self._means_on_other_texts(of, names)
        return self._summarise(of, names)[0]

    def _means_on_other_texts(self, of: SummaryName, names: Collection[str] | None) -> dict[str, Tensor]:
        """Return the means of the statistics on other texts than those of the record, or {} for another summary."""
        if of != "mean":
            return {}
        found = ({} if self.repeated is None else self.repeated.shares) | self.numbers
        return {name: values.mean(0) for name, values in found.items() if names is None or name in names}

    def rows(self, of: SummaryName = "mean") -> list[dict[str, Any]]:
        """Return a table row for each head: layer, head, name, and the summary of each statistic, see `summary`.

        If a value of the layer was NaN or infinite, each row has `nonfinite`, the number of queries that were left out
        of a summary because of that; of several statistics the largest number.
        """
        summary, num_nonfinite = self._summarise(of, None)
        rows = head_rows(self.number, self.name, self.num_heads, summary)
        if bool(num_nonfinite.any()):
            rows = [row | {"nonfinite": int(number)} for row, number in zip(rows, num_nonfinite, strict=True)]
        return rows

    def _summarise(self, of: SummaryName, names: Collection[str] | None) -> tuple[dict[str, Tensor], Tensor]:
        """Return the summary of each statistic, and how many queries of each head were left out, (heads,) int64."""
        others = self._means_on_other_texts(of, names)
        if self.running_summary is not None:
            found, heads = self.running_summary, self.num_heads
            left_out = torch.cat([torch.zeros(heads, dtype=torch.int64), found.sums.num_nonfinite])
            return found.summary(of, names) | others, left_out.view(-1, heads).amax(0)
        measured = self.texts.measured_texts()
        if not measured:  # all batches were empty
            return others, torch.zeros(0, dtype=torch.int64)
        summary = summarise_samples(measured, of, names) | others
        return summary, count_nonfinite(measured)

    def sample(self, index: int = 0) -> SampleRecord:
        """Return one sample.

        Raises:
            ArgumentError: the sample does not exist.
            ProbeError: only a summary was kept.
        """
        if self.running_summary is not None:
            raise ProbeError(
                f'{self.name} was observed with keep="summary", so it has no single texts.',
                'Observe with keep="statistics" to keep each text.',
            )
        if isinstance(index, bool) or not isinstance(index, int):
            raise ArgumentError(f"sample is {index!r}.", "Give the index of one sample, an integer.")
        if not -self.num_samples <= index < self.num_samples:
            raise ArgumentError(
                f"There is no sample {index}; {self.name} has {self.num_samples}.",
                "Give 0." if self.num_samples == 1 else f"Give one from 0 to {self.num_samples - 1}.",
            )
        return self.samples[index]

    def weights(
        self,
        head: int | None = None,
        *,
        sample: int = 0,
        queries: slice = slice(None),
        keys: slice = slice(None),
    ) -> Tensor:
        """Compute a tile of attention weights of one sample, see `SampleRecord.weights`."""
        return self.sample(sample).weights(head, queries=queries, keys=keys)

    def map(
        self,
        head: int | None = None,
        *,
        sample: int = 0,
        queries: slice = slice(None),
        keys: slice = slice(None),
        bins: int | tuple[int, int] = 256,
    ) -> Tensor:
        """Downsample a rectangle of one sample's attention map, see `SampleRecord.map`."""
        return self.sample(sample).map(head, queries=queries, keys=keys, bins=bins)


@overload
def layer_profiles(
    layers: Sequence[LayerRecord],
    *,
    sample: int = 0,
    special: Sequence[bool] | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    among: Sequence[Kind] = KINDS,
    progress: Progress | None = None,
) -> list[LayerProfile]: ...


@overload
def layer_profiles(
    layers: Sequence[LayerRecord],
    *,
    sample: int | None,
    special: Sequence[bool] | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    among: Sequence[Kind] = KINDS,
    progress: Progress | None = None,
) -> Sequence[LayerKinds]: ...


def layer_profiles(
    layers: Sequence[LayerRecord],
    *,
    sample: int | None = 0,
    special: Sequence[bool] | None = None,
    statistics: Mapping[str, Statistic] | None = None,
    among: Sequence[Kind] = KINDS,
    progress: Progress | None = None,
) -> Sequence[LayerKinds]:
    """Compute the means, chance levels, kinds and mask of every layer of a record; of a summary all but the mask.

    Args:
        layers: the layers of a record.
        sample: index of the text; None combines all texts.
        special: one flag per token, True for special tokens ([CLS], [SEP], <s>), from which the chance levels of the
            weights on them are computed. None takes the flags of the recorded text.
        statistics: name -> statistic, for the statistics of the record that are not built in.
        among: the kinds to choose from.
        progress: called with (queries done, all queries) of a text while its chance levels are computed.

    Raises:
        ProbeError: a layer has read no text, has only a summary where one text is asked for, or one without chance
            levels.
    """
    known: ChanceCache = {}
    found: list[LayerKinds] = []
    for layer in layers:
        if sample is None and layer.running_summary is not None:
            if not layer.has_kinds:
                raise ProbeError(
                    f"{layer.name} was summarised without chance levels, so no kinds of heads can be told.",
                    'Observe it again with keep="summary"; where a sequence is split over ranks, with '
                    'keep="statistics", and join the records with seen.reduce(group).',
                )
            found.append(kinds_of_summary(layer, layer.running_summary, among))
            continue
        samples = [layer.sample(each) for each in (range(layer.num_samples) if sample is None else [sample])]
        if not samples:
            raise empty_layer_error(layer.name)
        found.append(
            profile_of_samples(
                samples,
                number=layer.number,
                name=layer.name,
                special=special,
                statistics=statistics or {},
                known=known,
                among=among,
                repeated=layer.repeated,
                numbers=layer.numbers,
                progress=progress,
            )
        )
    return found


def kinds_of_summary(layer: LayerRecord, summary: RunningSummary, among: Sequence[Kind]) -> LayerKinds:
    """Decide the kinds of the heads of a layer from its summary; no kind whose chance level is unknown."""
    return LayerKinds.from_evidence(
        summary.summary("mean"),
        summary.evidence(),
        number=layer.number,
        name=layer.name,
        heads=summary.num_heads,
        cross_attention=summary.cross_attention,
        among=among,
        repeated=layer.repeated,
        numbers=layer.numbers,
    )


def empty_layer_error(name: str) -> ProbeError:
    """Return the error for a layer that was recorded with empty batches only."""
    return ProbeError(f"{name} has read no text: its batches were empty.", "Run the model on a text.")


def texts_of(layers: Sequence[LayerRecord]) -> list[Text]:
    """Return the text of each sample; an empty text for a sample whose text is unknown."""
    found: list[Text] = []
    for layer in layers:
        for index, one in enumerate(layer.samples):
            text = Text() if one.cross_attention else one.text
            if index == len(found):
                found.append(text)
            elif not found[index].length:
                found[index] = text
    return found


class RecordContents(NamedTuple):
    """The contents of a record that are stored in a file.

    Attributes:
        layers: one record per attention layer, in the order in which the layers first ran.
        title: what was recorded, such as the name of the model's class.
        id: a random name of 32 hexadecimal digits that the record keeps when it is saved.
        calls: sample of each call, and the index of the call in the sample.
        statistics: name -> statistic, for the statistics that are not built in.
    """

    layers: list[LayerRecord]
    title: str
    id: str
    calls: list[tuple[SampleRecord, int]]
    statistics: dict[str, Statistic]

    @property
    def keeps_weights(self) -> bool:
        """Whether q and k were kept, so that any part of any map can be computed."""
        return all(
            layer.running_summary is None and all(one.keeps_weights for one in layer.samples) for layer in self.layers
        )
