"""The record of a model's attention: its layers, tables of statistics, and searches over all heads."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ModelError, ProbeError
from multihead.errors.given import check_ids, check_tokenizer, reject_given
from multihead.errors.optional import require
from multihead.kinds import KINDS, Kind, another_probe_error, check_kinds
from multihead.locale.escaping import escape_controls
from multihead.observation.presentation import function_of_viewer
from multihead.probes.catalogue import PROBES, statistic
from multihead.probes.head_statistic import HeadStatistic
from multihead.probes.probe import Probe, Statistic
from multihead.record import loading, merging, pictures, plots, saving
from multihead.record.analysis.changes import (
    ChangedHead,
    ComparedKind,
    changes,
    compare_kinds,
    heads_correspond,
)
from multihead.record.analysis.find import FoundHead, ValueRange, find
from multihead.record.analysis.highlights import (
    MAX_TEXTS_COMPARED,
    Finding,
    HeadKind,
    findings,
    heads_of_kinds,
    heads_of_short_table,
)
from multihead.record.analysis.similar import NearHead, nearest
from multihead.record.head_numbers import HeadColumn, NumbersOverTexts
from multihead.record.layer import BegunTexts, LayerRecord, RecordContents, layer_profiles, texts_of
from multihead.record.profiles import LayerKinds, LayerProfile
from multihead.record.sample import OwnStatistics, SampleRecord
from multihead.record.table import MAX_SHOWN_HEADS, HeadList, HeadTable, html_of_table, number_with_noun
from multihead.record.text_rows import SummaryName, check_summary_name
from multihead.record.texts import GrowingText, Text, describe_texts

__all__ = ["Record"]


@runtime_checkable
class HeadNumbers(Protocol):
    """Numbers of the heads of a model, one per text, that were measured apart from a record."""

    def columns(self) -> Sequence[HeadColumn]:
        """Return the numbers as columns of a record."""


@dataclass(eq=False, repr=False)
class Record:
    """The attention of a model as `observe` recorded it, or as a file stores it.

    Attributes:
        layers: one record per attention layer, in the order in which the layers first ran.
        title: what was recorded, such as the name of the model's class.
        id: a random name that the record keeps when it is saved.
        statistics: the statistics that are not built in, by name; after `load` without their functions.
        own_kinds: user-defined kinds of heads, see `add_kinds`. A file does not store them.

    >>> import torch
    >>> import multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> with mh.observe(layer) as seen:
    ...     y = layer(torch.randn(1, 5, 8))
    >>> seen.title, len(seen.layers), seen.layers[0].num_heads
    ('MultiHeadAttention', 1, 2)
    """

    layers: list[LayerRecord] = field(default_factory=list)
    title: str = ""
    id: str = field(default_factory=partial(secrets.token_hex, 16))
    # a call of one text with its index in the text, or the first calls of several
    _calls: list[tuple[SampleRecord, int] | BegunTexts] = field(default_factory=list)
    statistics: dict[str, Statistic] = field(default_factory=dict)
    own_kinds: tuple[Kind, ...] = ()

    @property
    def calls(self) -> list[tuple[SampleRecord, int]]:
        """All calls in the order they ran, one pair per sample: the sample, and the index of the call in the sample."""
        found: list[tuple[SampleRecord, int]] = []
        for each in self._calls:
            found.extend(each.calls if isinstance(each, BegunTexts) else [each])
        return found

    def __iter__(self) -> Iterator[SampleRecord]:
        """Iterate over the calls in the order they ran, one sample at a time."""
        for sample, index in self.calls:
            yield sample.call(index)

    def __getitem__(self, layer: str | int) -> LayerRecord:
        """Return the record of a layer, by its name or its number.

        Raises:
            ModelError: no layer of that name or number was recorded.
            ArgumentError: `layer` is neither a name nor a number.
        """
        if isinstance(layer, bool) or not isinstance(layer, (str, int)):
            raise ArgumentError(
                f"The layer is {layer!r}, and a record finds layers by name or number.",
                "Give record[name] or record[number], or record.layers[index] for the layers in the order they first "
                "ran.",
            )
        for each in self.layers:
            if layer == (each.name if isinstance(layer, str) else each.number):
                return each
        known = ", ".join(each.name if isinstance(layer, str) else str(each.number) for each in self.layers) or "none"
        raise ModelError(f"There is no layer {layer!r} in the record.", f"The recorded layers are: {known}.")

    @property
    def _record_parts(self) -> RecordContents:
        return RecordContents(self.layers, self.title, self.id, self.calls, self.statistics)

    @property
    def keeps_weights(self) -> bool:
        """Whether q and k were kept, so that any part of any map can be computed."""
        return self._record_parts.keeps_weights

    @property
    def texts(self) -> list[Text]:
        """One text per sample: its token ids, tokens, and which tokens are special."""
        return texts_of(self.layers)

    def mark_special(self, ids: Iterable[int]) -> None:
        """Mark the tokens with these ids as special, in all texts whose ids are known."""
        marks = frozenset(check_ids("ids", ids))
        for text, known in self._texts_with_ids():
            text.complete_text = Text(known, None, [each in marks for each in known.tolist()])

    def _texts_with_ids(self) -> Iterator[tuple[GrowingText, Tensor]]:
        """Yield each text whose ids are known and its ids, (tokens,): of keys, and of queries of cross-attention."""
        for layer in self.layers:
            for one in layer.samples:
                for text in (one.growing_key_text, one.growing_query_text):
                    if text.ids is not None:
                        yield text, text.ids

    def set_text(self, text: Text, *, sample: int = 0) -> None:
        """Set the tokens of a sample in all layers where it has one key per token.

        Raises:
            ArgumentError: no layer has a sample of this index with one key per token of the text.
        """
        _check_text_of_tokens(text)
        taking = [
            layer.samples[sample]
            for layer in self.layers
            if -layer.num_samples <= sample < layer.num_samples
            and not layer.samples[sample].cross_attention
            and layer.samples[sample].num_keys == text.length
        ]
        if not taking:
            raise ArgumentError(
                f"The text has {text.length} tokens, and no layer has as many keys in sample {sample}.",
                "Give the text that the model read, one token per key.",
            )
        for one in taking:
            one.growing_key_text.complete_text = text

    def name_text(self, text: Text) -> None:
        """Set the tokens of all samples with the ids of a text, as keys or as queries of cross-attention.

        If the record has no ids, the first sample of layers with as many keys is set, see `set_text`.
        """
        _check_text_of_tokens(text)
        assert text.ids is not None
        equal = [growing for growing, ids in self._texts_with_ids() if torch.equal(ids, text.ids)]
        for growing in equal:
            growing.complete_text = text
        if not equal:
            self.set_text(text)

    def name_tokens(self, tokenizer: Any) -> None:
        """Set the tokens of all texts whose token ids are known.

        Args:
            tokenizer: a Hugging Face tokenizer, or anything with `convert_ids_to_tokens`, `decode` and
                `all_special_ids`.
        """
        from multihead.models.tokens import name_tokens

        check_tokenizer(tokenizer, calls=False)
        known: dict[tuple[int, ...], Text] = {}
        marks = frozenset(tokenizer.all_special_ids)
        for text, ids in self._texts_with_ids():
            key = tuple(ids.tolist())
            if key not in known:
                special = [each in marks for each in key]
                named = name_tokens(tokenizer, key, special)
                known[key] = Text(ids, named.names, special, named.gaps)
            text.complete_text = known[key]

    def table(
        self, *, sort: str = "layer", top: int | None = None, of: SummaryName = "mean", kinds: bool = True
    ) -> HeadTable:
        """Return a table with one row per head and one column per statistic, summarised over all queries.

        Args:
            sort: "layer", or a statistic, whose largest values come first.
            top: how many rows to keep; None keeps all.
            of: "mean", "median", "p95" (the 95th percentile) or "max".
            kinds: whether each row has the `kind` of its head, such as "first+local", and the chance level of each
                statistic, such as `previous_mass_chance`. These are computed text by text, which takes longer than the
                rest, unless a summary was kept; a record of the tokens of one of several ranks has none.

        Raises:
            ArgumentError: there is no column `sort`, `top` is less than 1, or `of` is not one of these.
        """
        check_summary_name(of)
        rows = []
        read = self.profiles() if kinds and self._has_kinds else [None] * len(self.layers)
        for layer, profile in zip(self.layers, read, strict=True):
            more = [{}] * layer.num_heads if profile is None else list(map(profile.row, range(layer.num_heads)))
            of_layer = layer.rows(of)
            rows += [row | each for row, each in zip(of_layer, more, strict=True)]
        return HeadTable.from_rows(rows, sort=sort, top=top, statistics=self.statistics)

    @property
    def _has_kinds(self) -> bool:
        """Whether the kinds of all heads are known."""
        return all(layer.has_kinds for layer in self.layers)

    def statistic(self, name: str) -> Statistic:
        """Return the label, unit and number format of a statistic.

        >>> Record().statistic("mean_distance").heading
        'distance (tokens)'
        """
        return statistic(name, self.statistics)

    def find(self, *, of: SummaryName = "mean", **ranges: ValueRange) -> HeadList[FoundHead]:
        """Find the heads whose statistics lie within ranges, the best first.

        Args:
            of: how queries are summarised: "mean", "median", "p95" or "max".
            ranges: the lowest and the highest value, (lowest, highest), None for no limit, by the name of any statistic
                in the record or of a kind of head, as tables show it: `previous`, `next`, `self`, `first`, `separator`,
                `duplicate`, `induction` (the share of attention on such keys, averaged over the queries that have
                one), `local` (share within 3 tokens), `broad` (entropy divided by the largest entropy that the mask
                allows), kinds on repeated random tokens such as `repeated_induction`, and user-defined kinds.

        Returns:
            the heads within all ranges, ordered by the first one: from the largest value if it has a lowest limit,
            else from the smallest.

        Raises:
            ProbeError: no layer has such a statistic.
            ArgumentError: there is no range, or a range is not a pair of numbers.

        >>> import torch
        >>> import multihead as mh
        >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
        >>> with mh.observe(layer) as seen:
        ...     y = layer(torch.zeros(1, 4, 8))
        >>> [(one.layer, one.head) for one in seen.find(broad=(0.9, None), entropy=(None, 2))]
        [(0, 0), (0, 1)]
        """
        return find(self.layers, ranges, of=of, statistics=self.statistics, among=self.all_kinds)

    def findings(self, *, sample: int | None = None, lang: str = "en") -> HeadList[Finding]:
        """Find the most notable heads, at most six, and describe what each does.

        The statistic of each exceeds its chance level (even weights over the visible keys) by 35 percentage points and
        by three standard errors, over texts if there are at least four, else over blocks of the queries. A model with
        random weights has no such heads.

        Over several texts, at most 200, each finding has `over_texts`: the standard deviation of the value over the
        texts, and in how many of them, each taken alone, the head has the kind.

        Args:
            sample: which text; None takes all of them together.
            lang: "en" or "zh".

        Raises:
            ProbeError: one text is asked for, and only a summary was kept.
            ArgumentError: there is no such sample or language.

        >>> import torch
        >>> import multihead as mh
        >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
        >>> with mh.observe(layer) as seen:
        ...     y = layer(torch.randn(1, 40, 8))
        >>> seen.findings()
        []
        """
        profiles = self.profiles(sample=sample)
        texts = self.texts
        text = texts[sample or 0] if texts and (sample is not None or len(texts) == 1) else Text()
        by_text = self.profiles_by_text() if sample is None else []
        return findings(
            profiles, tokens=text.tokens, special=text.special, lang=lang, among=self.all_kinds, by_text=by_text
        )

    def profiles_by_text(self) -> list[list[LayerProfile]]:
        """Return `profiles` of each text alone; [] for one text, for more than `MAX_TEXTS_COMPARED`, and for a summary.

        Raises:
            ProbeError: a layer has read no text.
        """
        numbers = {layer.num_samples for layer in self.layers}
        kept = all(layer.running_summary is None for layer in self.layers)
        if not kept or len(numbers) != 1 or not 1 < (texts := numbers.pop()) <= MAX_TEXTS_COMPARED:
            return []
        return [self.profiles(sample=sample) for sample in range(texts)]

    @overload
    def profiles(
        self,
        *,
        sample: int,
        special: Sequence[bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> list[LayerProfile]: ...

    @overload
    def profiles(
        self,
        *,
        sample: None = None,
        special: Sequence[bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Sequence[LayerKinds]: ...

    def profiles(
        self,
        *,
        sample: int | None = None,
        special: Sequence[bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Sequence[LayerKinds]:
        """Return per layer the mean and chance level of each statistic, the kinds of the heads, and the mask.

        A layer of which only a summary was kept has no mask.

        Args:
            sample: which text; None takes all of them together.
            special: one flag per token, True for special tokens; None takes the flags of the recorded text.
            progress: called with (queries done, all queries of a text) while chance levels are computed, which takes
                seconds for 100,000 tokens.

        Raises:
            ProbeError: one text is asked for, and only a summary was kept, or one of an earlier version, without
                chance levels.
            ArgumentError: there is no such sample.
        """
        return layer_profiles(
            self.layers,
            sample=sample,
            special=special,
            statistics=self.statistics,
            among=self.all_kinds,
            progress=progress,
        )

    @property
    def all_kinds(self) -> tuple[Kind, ...]:
        """The kinds that a head may have: the built-in `multihead.kinds.KINDS`, and `own_kinds`."""
        return (*KINDS, *self.own_kinds)

    def add_kinds(self, *kinds: Kind) -> None:
        """Add kinds of heads, which tables, findings, `find` and pages show like the built-in ones.

        `observe(model, kinds=...)` does this and measures their probes too. A file does not store kinds, so add them
        again to a record that was loaded.

        Raises:
            ArgumentError: an argument is not a Kind, two kinds have the same name, or the record has another statistic
                under the name of a kind's probe.
        """
        check_kinds(kinds, self.all_kinds)
        for kind in kinds:
            measured = self.statistics.get(kind.statistic)
            if isinstance(measured, Probe) and measured != kind.probe:
                raise another_probe_error(kind)
        self.own_kinds += kinds
        for layer in self.layers:
            layer.own_kinds = self.own_kinds
        made = [kind.probe for kind in kinds if kind.probe is not None]
        self.statistics |= {each.name: each for each in made if each.name not in PROBES}

    def kinds(self, *names: str, sample: int | None = None) -> HeadList[HeadKind]:
        """List the kinds of the heads with the numbers that decide about them, the largest share first.

        Args:
            names: only these kinds; all kinds without a name.
            sample: which text; None takes all of them together.

        Returns:
            one item per head and kind: share, chance level, standard error and number of queries.

        Raises:
            ProbeError: a kind that was asked for was not measured, or one text is asked for, and only a summary was
                kept.
            ArgumentError: there is no such kind or sample.

        >>> import torch
        >>> import multihead as mh
        >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
        >>> _ = torch.nn.init.zeros_(layer.q_proj.weight)
        >>> with mh.observe(layer) as seen:
        ...     y = layer(torch.randn(1, 40, 8))
        >>> [str(each) for each in seen.kinds("broad")]
        ['L0 H0: broad 100 % of what an even spread gives', 'L0 H1: broad 100 % of what an even spread gives']
        """
        return heads_of_kinds(self.profiles(sample=sample), self.all_kinds, names)

    def nearest(
        self, layer: int, head: int, *, top: int = 5, sample: int = 0, queries: int | None = None
    ) -> HeadList[NearHead]:
        """Find the heads whose weights are nearest to those of one, by their Jensen-Shannon divergence.

        Heads are compared query by query over the same keys; layers with other numbers of tokens are left out.

        Args:
            layer: the layer's number.
            head: the head's index in its layer.
            top: how many heads to return.
            sample: which text.
            queries: how many evenly spaced queries are compared; None chooses a number that takes 1 to 2 seconds.

        Returns:
            the other heads, the nearest first.

        Raises:
            ProbeError: only statistics were kept.
            ArgumentError: there is no such layer, head or sample.
        """
        return nearest(self.layers, layer, head, top=top, sample=sample, queries=queries)

    def changed(
        self,
        after: Record,
        *,
        sample: int | None = None,
        after_sample: int | None = None,
        top: int | None = None,
        queries: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> HeadList[ChangedHead]:
        """Compare each head with the same head of another run, such as another checkpoint, or on other texts.

        If both runs read the same texts, heads are ranked by the Jensen-Shannon divergence of their attention weights,
        computed in tiles, so that no complete attention map is in memory. Layers that are in only one of the records,
        or have other numbers of heads, queries or keys, are left out.

        On different texts weights cannot be compared. Heads are then ranked by the change of a statistic beyond chance,
        see `multihead.record.analysis.changes.change_beyond_chance`, the clear changes first.

        Args:
            after: the record of the other run; it may be this record, for two of its texts.
            sample: which text; None compares all texts together.
            after_sample: which text of `after`; None takes `sample`.
            top: how many heads; None returns all.
            queries: how many evenly spaced queries are compared; None compares all, which is exact.
            progress: called with (queries done, all queries of all layers).

        Returns:
            the heads, the most changed first, each with its statistics and kinds in both runs.

        Raises:
            ProbeError: only statistics were kept of equal texts, or only a summary.
            ArgumentError: no layer with as many heads is in both records.

        >>> import torch
        >>> import multihead as mh
        >>> layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.randn(1, 5, 8)
        >>> with mh.observe(layer) as before:
        ...     y = layer(x)
        >>> with torch.no_grad(), mh.observe(layer) as after:
        ...     _ = layer.q_proj.weight[4:].mul_(9)  # head 1
        ...     y = layer(x)
        >>> [(one.layer, one.head, one.divergence > 0) for one in before.changed(after)]
        [(0, 1, True), (0, 0, False)]
        """
        _check_records("after", after)
        return changes(
            self.layers,
            after.layers,
            sample=sample,
            after_sample=after_sample,
            top=top,
            queries=queries,
            statistics=after.statistics | self.statistics,
            among=self.all_kinds,
            progress=progress,
        )

    def has_heads_of(self, other: Record) -> bool:
        """Whether another record is of the same heads: of the same model, or of another checkpoint of it.

        If so, `changed` compares head by head; else `compared_kinds` compares kind by kind.
        """
        layers, others = ({layer.number: layer.num_heads for layer in record.layers} for record in (self, other))
        return heads_correspond(layers, others, same_title=self.title == other.title)

    def compared_kinds(
        self, after: Record, *, sample: int | None = None, after_sample: int | None = None
    ) -> HeadList[ComparedKind]:
        """Compare the heads of two runs kind by kind, also those of different models, and on different texts.

        Args:
            after: the record of the other run.
            sample: which text; None takes all of them together.
            after_sample: which text of `after`; None takes `sample`.

        Returns:
            one item per kind that was measured in both runs: how many heads have it, and the strongest of them.

        Raises:
            ArgumentError: there is no such sample.
            ProbeError: one text is asked for, and only a summary was kept.
        """
        _check_records("after", after)
        after_sample = sample if after_sample is None else after_sample
        profiles = self.profiles(sample=sample), after.profiles(sample=after_sample)
        return compare_kinds(profiles[0], profiles[1], dict.fromkeys((*self.all_kinds, *after.all_kinds)))

    def to_pandas(self, *, of: SummaryName = "mean", kinds: bool = True) -> Any:
        """Return the table as a pandas DataFrame, one row per head; the arguments are those of `table`.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        require("pandas", purpose="A DataFrame", extra=None)
        import pandas as pd

        return pd.DataFrame(self.table(of=of, kinds=kinds).rows)

    def __repr__(self) -> str:
        """Return one line: the title, and the numbers of layers, heads, texts and tokens."""
        return f"<Record of {escape_controls(self.title) or 'a run'}: {self._contents()}>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: a table with one row per head."""
        rows = self.table().rows if self.layers else []
        if len(rows) > MAX_SHOWN_HEADS and self._has_kinds:
            telling = heads_of_short_table(findings(self.profiles(), among=self.all_kinds), self.kinds())
            rows = sorted(rows, key=lambda row: telling.get((row["layer"], row["head"]), len(telling)))
        return html_of_table(self.title or "Record", self._contents(), rows, ["layer", "head", "name"], self.statistics)

    def _contents(self) -> str:
        if not self.layers:
            return "nothing was recorded yet"
        heads = [layer.num_heads for layer in self.layers]
        samples = max(layer.num_samples for layer in self.layers)
        tokens = max((one.num_keys for layer in self.layers for one in layer.samples), default=0)
        texts = [one.text for layer in self.layers for one in layer.samples]
        caption = f"{number_with_noun(len(heads), 'layer')}, {number_with_noun(sum(heads), 'head')}, "
        caption += describe_texts(samples, texts, tokens)
        parts = dict.fromkeys(layer.split.describe() for layer in self.layers if layer.split is not None)
        if parts:
            return f"{caption}; {' and '.join(parts)}"
        return caption + ("" if self.keeps_weights else "; statistics only" if tokens else "; sums only")

    def add(self, numbers: HeadNumbers) -> None:
        """Add numbers of the same model's heads that were measured apart from the record, on texts of their own.

        The record then has them as columns of tables and pages, in `find`, and in saved files. Medians and maxima over
        queries do not have them. Numbers with the name of others replace them.

        Args:
            numbers: what `mh.importance` or `mh.patch` returned, and after that what `mh.off_together` returned; layers
                that the record does not have are ignored.

        Raises:
            ArgumentError: there are no such numbers, or they are of another model.

        >>> import torch
        >>> import multihead as mh
        >>> layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.randn(3, 5, 8)
        >>> with torch.no_grad(), mh.observe(layer) as seen:
        ...     y = layer(x)
        >>> seen.add(mh.importance(layer, x, mh.Measure(lambda output, batch: output[:, -1, 0], "score")))
        >>> len(seen.find(effect_score_zero=(None, None)))
        2
        """
        if not isinstance(numbers, HeadNumbers):
            reject_given("numbers", numbers, "numbers of heads", "Give what mh.importance or mh.patch returned.")
        columns = numbers.columns()
        if not any(layer.name in column.numbers for layer in self.layers for column in columns):
            raise ArgumentError(
                "The numbers are of none of the layers of the record.", "Measure and observe the same model."
            )
        for shown, of_layers in columns:
            for layer in self.layers:
                if (values := of_layers.get(layer.name)) is None:
                    continue
                if values.shape[1] != layer.num_heads:
                    raise ArgumentError(
                        f"The numbers are of {values.shape[1]} heads of {layer.name}, and the record has "
                        f"{layer.num_heads}.",
                        "Measure and observe the same model.",
                    )
                layer.numbers = {**layer.numbers, shown.name: values.detach().double().cpu()}
            self.statistics[shown.name] = shown

    def add_calls(self, layer: LayerRecord, calls: Iterable[tuple[SampleRecord, int] | BegunTexts]) -> None:
        """Append calls in the order they ran, each with its index in the sample; and a new layer to `layers`."""
        if layer not in self.layers:
            layer.own_kinds = self.own_kinds
            self.layers.append(layer)
        self._calls.extend(calls)

    def plot(
        self,
        layer: int | str,
        head: int | None = None,
        *,
        sample: int = 0,
        queries: slice = slice(None),
        keys: slice = slice(None),
        of: SummaryName = "mean",
        ax: Any = None,
    ) -> Any:
        """Plot a head's map, `seen.plot(7, 3)`, or a statistic of all heads, `seen.plot("entropy")`, with matplotlib.

        Numbers that `add` added are hatched where their mean is within two standard errors of 0.

        Args:
            layer: the number or name of a layer; without a head, the name of a statistic.
            head: which head of the layer.
            sample: which sample.
            queries: the rows of the map, without steps.
            keys: the columns of the map, without steps.
            of: how queries are summarised in a statistic: "mean", "median", "p95" or "max".
            ax: the matplotlib axes to draw on; None makes new ones.

        Returns:
            the axes.

        Raises:
            ModelError: there is no such layer.
            ProbeError: q and k were not kept, so there is no map, or no layer has the statistic.
            MissingPackageError: matplotlib is not installed.
        """
        if head is not None:
            chosen = self[layer]
            title = f"layer {chosen.number}, head {head}: {escape_controls(chosen.name)}"
            return plots.plot_map(chosen.sample(sample), head, title=title, queries=queries, keys=keys, ax=ax)
        summaries = {each.number: each.summary(of) for each in self.layers}
        having = [each for each in self.layers if layer in summaries[each.number]]
        if not isinstance(layer, str) or not having:
            known = dict.fromkeys(name for each in summaries.values() for name in each)
            raise ProbeError(
                f"There is no statistic {layer!r} in the record.",
                f"Give one of {', '.join(known) or 'none'}; or a layer and a head, such as plot(0, 3).",
            )
        values, shown = {each.number: summaries[each.number][layer] for each in having}, self.statistic(layer)
        hatched: dict[int, Tensor] | None = None
        if isinstance(shown, HeadStatistic) and shown.has_sign:
            over_texts = NumbersOverTexts([each.numbers[layer] for each in having])
            hatched = dict(zip(values, over_texts.within_errors, strict=True))
        return plots.plot_statistic(having, shown, values, hatched=hatched, ax=ax)

    def image_weights(
        self,
        layer: int | str,
        head: int | Literal["mean"],
        query: int | str,
        *,
        sample: int = 0,
        picture: int = 0,
        view: int = 0,
    ) -> Tensor:
        """Return what a query reads of a picture: its weights as rows and columns, times an even spread.

        1 is the weight that each key has if the query reads all keys that it may see alike. Weights show where a head
        reads, not why the model answers as it does.

        Args:
            layer: the number or name of a layer, whose keys have places in pictures.
            head: the index of a head, or "mean" for the mean weight over all heads.
            query: the index of a query, or the name of its token, such as "[CLS]" or "r2 c5".
            sample: which sample.
            picture: which picture of the sample.
            view: which view of the picture: of a picture in tiles 0 is the whole, and 1 the tiles.

        Returns:
            (rows, columns); NaN where the view has no key.

        Raises:
            ModelError: there is no such layer.
            ArgumentError: there is no such head, query, sample, picture or view.
            ProbeError: the tokens have no places in pictures or form no grid, or only statistics were kept.
        """
        return pictures.weights_in_picture(self[layer], head, query, sample=sample, picture=picture, view=view)

    def image_received(
        self, layer: int | str, head: int | Literal["mean"], *, sample: int = 0, picture: int = 0, view: int = 0
    ) -> Tensor:
        """Return what all queries together read of a picture, as rows and columns, times an even spread.

        Patches that receive much from all queries are sinks: a head rests on them, whatever the picture shows there.
        Arguments, errors and result are those of `image_weights`; memory is linear in the number of tokens.
        """
        return pictures.received_in_picture(self[layer], head, sample=sample, picture=picture, view=view)

    def rollout(self, query: int | str, *, layer: int | str | None = None, sample: int = 0) -> Tensor:
        """Follow a query down through all layers with the same tokens (attention rollout, arXiv:2005.00928).

        Each layer is half the token itself and half the mean of its heads. Rollout ignores the values, so it does not
        show what a head adds to a token. It takes one product of a row per layer, in memory linear in the tokens.

        Args:
            query: the index of a query of the last layer, or the name of its token.
            layer: the number or name of the last layer; None takes the last layer of the record.
            sample: which sample.

        Returns:
            (keys,) float64, the share of each token of the first layer.

        Raises:
            ModelError: there is no such layer.
            ArgumentError: there is no such query or sample.
            ProbeError: layers have the tokens in different orders, as windows do, or only statistics were kept.
        """
        if not self.layers:
            raise ArgumentError("Nothing was recorded.", "Run the model in the context of observe first.")
        last = self.layers[-1] if layer is None else self[layer]
        return pictures.rollout(self.layers[: self.layers.index(last) + 1], query, sample=sample)

    def plot_image(
        self,
        layer: int | str,
        head: int | Literal["mean"],
        query: int | str | None = None,
        *,
        image: Any = None,
        sample: int = 0,
        picture: int = 0,
        view: int = 0,
        ax: Any = None,
    ) -> Any:
        """Plot `image_weights` with matplotlib, or `image_received` without a query.

        The scale is logarithmic, from 0.1 to 100 times an even spread, and the same for all plots.

        Args:
            layer: the number or name of a layer.
            head: the index of a head, or "mean".
            query: the index or name of a query; None for all queries together.
            image: the picture, which is drawn in grey underneath; None draws the weights alone.
            sample: which sample.
            picture: which picture of the sample.
            view: which view of the picture.
            ax: the matplotlib axes to draw on; None makes new ones.

        Returns:
            the axes.

        Raises:
            MissingPackageError: matplotlib is not installed; and the errors of `image_weights`.
        """
        chosen = self[layer]
        one, which = chosen.sample(sample), {"sample": sample, "picture": picture, "view": view}
        name = f"L{chosen.number} {'mean of heads' if head == 'mean' else f'H{head}'}"
        if query is None:
            weights, index, title = self.image_received(layer, head, **which), None, f"{name}, read by all queries"
        else:
            weights, index = self.image_weights(layer, head, query, **which), pictures.query_index(one, query)
            tokens = one.query_text.tokens
            title = f"{name} reads for {index if tokens is None else tokens[index]}"
        return pictures.plot_picture(
            weights, one, title=title, query=index, picture=picture, view=view, image=image, ax=ax
        )

    def plot_grid(self, *, sample: int = 0) -> Any:
        """Plot a small map of every head with matplotlib, one row per layer.

        A notebook shows the figure if it is the last line of a cell; a script shows it with `plt.show()`.

        Args:
            sample: which sample.

        Returns:
            the matplotlib figure.

        Raises:
            ArgumentError: nothing was recorded, or there is no such sample.
            ProbeError: only statistics were kept.
            MissingPackageError: matplotlib is not installed.
        """
        if not self.layers:
            raise ArgumentError("Nothing was recorded.", "Run the model in the context of observe first.")
        return plots.plot_grid(self.layers, sample)

    def view(self, *others: Record, lang: str = "en", height: int = 640, linked: Any = None) -> Any:
        """Show the viewer in a notebook: all heads, the map of each head down to single weights, the text, comparisons.

        A notebook shows it if it is the last line of a cell. `view.selection` is the head, the visible section of its
        map and the selected query, and can be set: `view.selection = (17, 4)`. See docs/observing.md.

        Args:
            others: further records, such as other checkpoints on the same text, to compare heads with.
            lang: the language of the page, "en" or "zh".
            height: the height of the widget in pixels.
            linked: another view, whose selection is then synchronised with this view in both directions.

        Returns:
            the widget, a `multihead.viewer.widget.view.View`.

        Raises:
            ArgumentError: nothing was recorded, or an invalid argument.
            MissingPackageError: anywidget is not installed.
        """
        _check_records("A further argument", *others)
        return function_of_viewer("widget.view", "View")(self, *others, lang=lang, height=height, linked=linked)

    def report(
        self, path: str | os.PathLike[str], *, sample: int | None = None, lang: str = "en", **options: Any
    ) -> Any:
        """Write one page that shows every head, with a switch between the texts, and opens without a server.

        Args:
            path: the file to write, such as "page.html"; an existing one is replaced.
            sample: the only text of the page; None: all texts.
            lang: the language of the page, "en" or "zh".
            options: further arguments of `multihead.viewer.write_report`, such as `max_bytes`.

        Returns:
            path, size and contents of the page; `print` shows them in one line.

        Raises:
            ArgumentError: sample, lang or an option is invalid.
            InputError: the path cannot be written, or nothing was recorded.
            MissingPackageError: the packages of the extra "view" are not installed.
        """
        return function_of_viewer("report", "write_report")(self, path, sample=sample, lang=lang, **options)

    def reduce(self, group: Any, *, to: int | None = 0) -> Record | None:
        """Join the records of ranks that computed some heads or tokens of one model each; all ranks of a group call it.

        Args:
            group: a process group, or a DeviceMesh of one dimension: the ranks that split a sequence, the ranks that
                split the heads, or all ranks.
            to: the rank in the group that receives the joined record; None: every rank.

        Returns:
            the joined record, or None on the other ranks. A record larger than the memory of one rank can be saved by
            each rank and opened with `Record.load("run.*.safetensors")`.

        Raises:
            ArgumentError: the records are not of one run, or the record of a rank is missing.
            RankError: a rank stopped.

        >>> import torch, torch.distributed as dist, tempfile
        >>> import multihead as mh
        >>> store = dist.FileStore(tempfile.mktemp(), 1)
        >>> dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
        >>> with mh.observe(layer) as seen, mh.parallel.context_parallel(dist.group.WORLD):
        ...     y = layer(torch.randn(1, 6, 8))
        >>> seen.reduce(dist.group.WORLD)
        <Record of MultiHeadAttention: 1 layer, 2 heads, 1 text of up to 6 tokens>
        >>> dist.destroy_process_group()
        """
        from multihead.parallel.exchange import Ranks, gather_objects

        # The functions of user-defined kinds may not be importable in another process.
        layers = [replace(layer, own_kinds=()) for layer in self.layers]
        sent = self._record_parts._replace(layers=layers, statistics=OwnStatistics(self.statistics))
        found = gather_objects(sent, Ranks.of_mesh(group), to=to)
        if found is None:
            return None
        record = _record_of(merging.merge_records(found))
        record.statistics |= self.statistics
        record.add_kinds(*self.own_kinds)
        return record

    @property
    def is_part(self) -> bool:
        """Whether the record has only the heads or tokens of one of several ranks."""
        return any(layer.split is not None for layer in self.layers)

    @staticmethod
    def joined(records: Sequence[Record]) -> Record:
        """Join the records of all ranks that observed one model together, see `reduce`.

        Raises:
            ArgumentError: the records are not of one run, or the record of a rank is missing.
        """
        records = tuple(records)
        _check_records("records", *records)
        return _record_of(merging.merge_all_ranks([record._record_parts for record in records]))  # noqa: SLF001 - records too

    def save(self, file: str | os.PathLike[str], *, keep: Literal["all", "statistics"] = "all") -> None:
        """Write the record to one safetensors file, completely or not at all.

        Args:
            file: the path, such as "run.safetensors".
            keep: "all", or "statistics", which leaves out q and k, so that no map can be computed from the file.

        Raises:
            InputError: the file cannot be written.
            ArgumentError: `keep` is neither of these.
            MaskError: a mask cannot be stored, and nothing was written.
        """
        saving.save(self._record_parts, file, keep=keep)

    @staticmethod
    def load(file: str | os.PathLike[str], *, mapped: bool = True) -> Record:
        """Open a saved record. Nothing in the file is executed, and all of it is checked.

        Args:
            file: the path; or a pattern such as "run.*.safetensors" for the files of ranks that observed one model
                together, which are opened as one record.
            mapped: map the file into memory, so that its tensors stay in the file until they are read. Truncating the
                file while it is mapped kills the process; replacing it by a new file is safe. False reads q and k from
                the file when they are needed and everything else at once; if the file has changed, reading raises
                InputError.

        Raises:
            InputError: there is no such file, it is truncated, it is not a record, or its version is newer.
        """
        files = loading.matching_files(file)
        found = [loading.load(each, mapped=mapped) for each in files]
        return _record_of(found[0] if len(found) == 1 else merging.merge_all_ranks(found))


def _record_of(contents: RecordContents) -> Record:
    return Record(contents.layers, contents.title, contents.id, [*contents.calls], contents.statistics)


def _check_records(name: str, *records: object) -> None:
    for record in records:
        if not isinstance(record, Record):
            reject_given(name, record, "a record", "Give what mh.observe, mh.look or Record.load returned.")


def _check_text_of_tokens(text: object) -> None:
    if not isinstance(text, Text):
        mend = "Call record.name_tokens(tokenizer), which names the tokens of all texts."
        reject_given("text", text, "a multihead.record.texts.Text", mend)
