"""Store statistics of every head over training steps; save, load, tabulate and plot them; find when kinds changed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihead.errors import ArgumentError, InputError, ProbeError
from multihead.errors.given import check_path
from multihead.errors.optional import require
from multihead.files import check_writable, open_atomically
from multihead.kinds import KINDS, MIXED, Kind, kinds_named
from multihead.locale.texts import LANGUAGES, text
from multihead.observation.presentation import function_of_viewer
from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic
from multihead.record.plots import import_pyplot, report_colormap
from multihead.record.table import HEAD_COLUMNS, HeadList, HeadOfLayer, html_of_table, number_with_noun

WATCH_KINDS = "Watch them: mh.Watch(model, kinds=True)."
"""How to get the kinds of heads, as the end of an error."""

FORMAT_NAME = "multihead time series"
FORMAT_VERSION = 2
"""Version of a file with kinds of heads; one without them has version 1, which earlier versions of the library open."""

_KIND_TENSOR = "kind/"  # beginning of the name of a layer's tensor of kinds; no statistic is called "kind"

StatisticAndLayer = tuple[str, int]  # name of a statistic, number of a layer


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


@dataclass(eq=False, repr=False)
class TimeSeries:
    """One number per head, statistic and observed step; and the kinds of each head, if they were watched.

    Attributes:
        steps: the observed steps, ascending.
        layers: number of a layer -> its name.
        statistics: name of a statistic -> its label, unit and number format.
        watched_kinds: the kinds of heads that were watched.

    >>> series = TimeSeries()
    >>> series.append(0, "attention", 0, {"entropy": [1.5, 0.5]})
    >>> series.append(100, "attention", 0, {"entropy": [1.25, 0.25]})
    >>> series.steps, series.values("entropy", layer=0).tolist()
    ([0, 100], [[1.5, 0.5], [1.25, 0.25]])
    """

    steps: list[int] = field(default_factory=list)
    layers: dict[int, str] = field(default_factory=dict)
    statistics: dict[str, Statistic] = field(default_factory=dict)
    watched_kinds: tuple[Kind, ...] = ()
    _rows: dict[StatisticAndLayer, dict[int, NDArray[np.float32]]] = field(default_factory=dict)  # step -> (heads,)
    _combinations: list[tuple[str, ...]] = field(default_factory=list)  # of names of kinds that some head had
    # Number of a layer -> step -> (heads,), the index of each head's kinds in `_combinations`.
    _kinds: dict[int, dict[int, NDArray[np.int32]]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return one line: the numbers of steps, layers and watched kinds, and the names of the statistics."""
        contents = (self._describe_sizes(), ", ".join(self.statistics))
        return f"<TimeSeries of {', '.join(filter(None, contents))}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: a table of the last step, one row per head."""
        if not self.steps:
            return html_of_table("TimeSeries", "nothing was observed yet", [], [])
        rows = [row | {"name": self.layers[row["layer"]]} for row in self._rows_of_step(self.steps[-1])]
        caption = f"{self._describe_sizes()}; at step {self.steps[-1]:,}"
        return html_of_table("TimeSeries", caption, rows, HEAD_COLUMNS, self.statistics, rest="rows()")

    def append(
        self,
        step: int,
        layer: str,
        number: int,
        means: Mapping[str, Sequence[float]],
        shown: Mapping[str, Statistic] | None = None,
        kinds: Sequence[Sequence[str]] | None = None,
    ) -> None:
        """Add the statistics of one layer at one step.

        Args:
            step: the step, not smaller than the last step.
            layer: name of the layer.
            number: number of the layer.
            means: name of a statistic -> one value per head.
            shown: label, unit and number format of the statistics that are not built in.
            kinds: names of each head's kinds among `watched_kinds`, the most specific first, or "mixed"; None if they
                were not watched.

        Raises:
            ArgumentError: a kind is not one of `watched_kinds`.
        """
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
        self.layers[number] = layer
        for name, values in means.items():
            self.statistics.setdefault(name, statistic(name, shown))
            self._rows.setdefault((name, number), {})[step] = np.asarray(values, np.float32)
        if kinds is not None:
            named = list(map(tuple, kinds))
            for new in dict.fromkeys(each for each in named if each not in self._combinations):
                kinds_named(new, (*self.watched_kinds, MIXED))
                self._combinations.append(new)
            places = list(map(self._combinations.index, named))
            self._kinds.setdefault(number, {})[step] = np.asarray(places, np.int32)

    def values(self, name: str, *, layer: int) -> NDArray[np.float32]:
        """Return a statistic of all heads of a layer: (steps, heads), NaN where it was not measured.

        Raises:
            ArgumentError: no such statistic or layer was observed.
        """
        rows = self._rows.get((name, layer))
        if rows is None:
            raise ArgumentError(
                f"There is no {name!r} of layer {layer!r}.",
                f"Give one of {', '.join(self.statistics) or 'no statistics'} and a layer of "
                f"{', '.join(map(str, self.layers)) or 'none'}.",
            )
        missing = np.full(len(next(iter(rows.values()))), np.nan, np.float32)
        return np.stack([rows.get(step, missing) for step in self.steps])

    def kinds(self, *, layer: int) -> list[tuple[tuple[str, ...], ...] | None]:
        """Return the names of the kinds of all heads of a layer, the most specific first, one item per step.

        The item of a step at which the layer did not run is None.

        Raises:
            ArgumentError: the kinds of such a layer were not watched.
        """
        found = self._kinds.get(layer)
        if found is None:
            known = ", ".join(map(str, self._kinds))
            mend = f"Give a layer of {known}." if known else "No layer had what its kinds are measured from."
            raise ArgumentError(
                f"There are no kinds of the heads of layer {layer!r}.", mend if self.watched_kinds else WATCH_KINDS
            )
        named = {step: tuple(self._combinations[each] for each in places) for step, places in found.items()}
        return [named.get(step) for step in self.steps]

    def _places_of_kinds(self, number: int) -> NDArray[np.int32]:
        """Return the index of each head's kinds in `_combinations`, (steps, heads), -1 where the layer did not run."""
        found = self._kinds[number]
        missing = np.full_like(next(iter(found.values())), -1)
        return np.stack([found.get(step, missing) for step in self.steps])

    def _set_places_of_kinds(self, number: int, places: NDArray[Any]) -> None:
        """Set the kinds of a layer's heads, see `_places_of_kinds`.

        Raises:
            ValueError: an index is not one of `_combinations`.
        """
        if places.dtype != np.int32 or places.min(initial=0) < -1 or places.max(initial=-1) >= len(self._combinations):
            raise ValueError(f"{_KIND_TENSOR}{number} has other numbers than those of kinds")
        rows = zip(self.steps, places, strict=True)
        self._kinds[number] = {step: row for step, row in rows if (row >= 0).all()}

    def decides(self, kind: Kind) -> bool:
        """Return whether it was measured at some step which heads have a kind."""
        return any((kind.statistic, number) in self._rows for number in self._kinds)

    def changes(self, *names: str) -> HeadList[KindChange]:
        """List when heads became a kind, and when they were no longer of it, in the order of the steps.

        A change is listed if the head is of the kind, or is not, at two observed steps in a row or at the last one, so
        a single step in between is left out. The kinds at the first step are no change. The step of a change is the
        first observed one after it; the head may have changed at any step since the observed step before.

        Args:
            names: only these kinds; all watched kinds without a name.

        Raises:
            ProbeError: kinds were not watched.
            ArgumentError: no kind of a name was watched.

        >>> series = TimeSeries(watched_kinds=KINDS)
        >>> for step, kinds in ((0, ["broad"]), (60, ["broad"]), (120, ["first", "local"]), (180, ["first", "local"])):
        ...     share = 0.02 if step < 100 else 0.9
        ...     means = {"first_mass": [share], "near_mass": [share], "entropy": [1 - share]}
        ...     series.append(step, "layers.1", 1, means, kinds=[kinds])
        >>> series.changes("first", "broad")
        [<KindChange L1 H0 became a first-token head at step 120.>,
         <KindChange L1 H0 was no longer a broad head from step 120 on.>]
        """
        if not self.watched_kinds:
            raise ProbeError("The kinds of the heads were not watched.", WATCH_KINDS)
        found: list[KindChange] = []
        for kind in kinds_named(names, self.watched_kinds):
            of_kind = np.array([kind.name in named for named in self._combinations], np.bool_)
            for number, places in self._kinds.items():
                measured = self._rows.get((kind.statistic, number), {})
                if steps := [step for step in places if step in measured]:
                    states = of_kind[np.stack([places[step] for step in steps])]  # (steps, heads)
                    found += changes_of_layer(kind, steps, states, layer=number, name=self.layers[number])
        return HeadList(sorted(found, key=lambda each: (each.step, each.layer, each.head)))

    @property
    def num_heads(self) -> dict[int, int]:
        """How many heads each layer has, by its number."""
        found = dict.fromkeys(self.layers, 0)
        for (_, number), rows in self._rows.items():
            found[number] = max(found[number], *map(len, rows.values()))
        return found

    def values_of_all_heads(self, name: str) -> NDArray[np.float32]:
        """Return a statistic of the heads of all layers: (steps, heads), NaN where it was not measured."""
        layers = [
            self.values(name, layer=number)
            if (name, number) in self._rows
            else np.full((len(self.steps), heads), np.nan, np.float32)
            for number, heads in self.num_heads.items()
        ]
        return np.concatenate(layers, axis=1)

    def kinds_of_all_heads(self) -> list[list[tuple[str, ...]]]:
        """Return the names of the kinds of the heads of all layers, one list per step; () where they are unknown."""
        layers = [
            [each or ((),) * heads for each in self.kinds(layer=number)]
            if number in self._kinds
            else [((),) * heads] * len(self.steps)
            for number, heads in self.num_heads.items()
        ]
        return [[of_head for layer in layers for of_head in layer[place]] for place in range(len(self.steps))]

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per step and head: step, layer, head, each statistic, and `kind` if kinds were watched.

        `kind` is a word such as "first+local".
        """
        return [{"step": step} | row for step in self.steps for row in self._rows_of_step(step)]

    def _describe_sizes(self) -> str:
        sizes = {"step": len(self.steps), "layer": len(self.layers)}
        if self.watched_kinds:
            sizes["kind"] = len(self.watched_kinds)
        return ", ".join(number_with_noun(number, noun) for noun, number in sizes.items())

    def _rows_of_step(self, step: int) -> list[dict[str, Any]]:
        """Return one dict per head at one step: layer, head, each statistic, and `kind` if kinds were watched."""
        found = []
        for number in self.layers:
            by_name = {
                name: self._rows[name, number][step]
                for name in self.statistics
                if step in self._rows.get((name, number), {})
            }
            heads = max(map(len, by_name.values()), default=0)  # none where the layer did not run in this step
            kinds = self._kinds.get(number, {}).get(step)
            for head in range(heads):
                row: dict[str, Any] = {"layer": number, "head": head}
                row |= {name: float(values[head]) for name, values in by_name.items()}
                if self.watched_kinds:
                    row["kind"] = "" if kinds is None else "+".join(self._combinations[kinds[head]])
                found.append(row)
        return found

    def to_pandas(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        require("pandas", purpose="TimeSeries.to_pandas()", extra=None)
        import pandas as pd

        return pd.DataFrame(self.rows())

    def plot(self, name: str, *, layer: int | None = None, ax: Any = None) -> Any:
        """Plot a statistic over the steps with matplotlib: one line per head of a layer, or one line per layer.

        Args:
            name: the statistic.
            layer: number of the layer; None plots the mean over the heads of each layer.
            ax: the matplotlib axes to draw on; None makes new ones.

        Returns:
            the axes.

        Raises:
            ArgumentError: no such statistic or layer was observed.
            MissingPackageError: matplotlib is not installed.
        """
        plt = import_pyplot()
        if layer is None:
            numbers = [number for number in self.layers if (name, number) in self._rows]
            if not numbers:
                raise ArgumentError(
                    f"There is no statistic {name!r}.", f"Give one of {', '.join(self.statistics) or 'none'}."
                )
            lines = {f"layer {number}": self.values(name, layer=number).mean(-1) for number in numbers}
        else:
            lines = {f"head {head}": line for head, line in enumerate(self.values(name, layer=layer).T)}
        if ax is None:
            ax = plt.subplots(layout="constrained")[1]
        shades = report_colormap()(np.linspace(0.3, 1, len(lines)))  # below 0.3 a line is too pale on paper
        for (label, line), color in zip(lines.items(), shades, strict=True):
            ax.plot(self.steps, line, color=color, label=label, linewidth=1.5)
        shown = self.statistics[name]
        ax.set(xlabel="step", ylabel=shown.heading)
        ax.set_title(name if layer is None else f"layer {layer}: {shown.label}")
        ax.legend(fontsize="small", ncols=1 + len(lines) // 12)
        return ax

    def view(self, *, lang: str = "en", height: int = 720) -> Any:
        """Show a film of the heads over the steps in a notebook: all heads at one step, and one head over all steps.

        It is shown where it is the last line of a cell, and stays in the saved notebook.

        Args:
            lang: the language of the page, "en" or "zh".
            height: the height in the notebook in pixels.

        Returns:
            the film, a `multihead.viewer.series_page.HeadFilm`.

        Raises:
            ArgumentError: nothing was observed yet, or an invalid argument.
            MissingPackageError: the packages of the extra "view" are not installed.
        """
        return function_of_viewer("series_page", "film_of_series")(self, lang=lang, height=height)

    def report(self, path: str | os.PathLike[str], *, lang: str = "en") -> Path:
        """Write the film of the heads over the steps as one page, which opens without a server.

        Args:
            path: the file to write, such as "training.html"; an existing one is replaced.
            lang: the language of the page, "en" or "zh".

        Returns:
            the path.

        Raises:
            ArgumentError: nothing was observed yet, or there is no such language.
            InputError: the path cannot be written.
            MissingPackageError: the packages of the extra "view" are not installed.
        """
        written: Path = function_of_viewer("series_page", "write_series_page")(self, path, lang=lang)
        return written

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the series to one safetensors file, completely or not at all.

        Raises:
            InputError: the file cannot be written.
            MissingPackageError: safetensors is not installed.
        """
        require("safetensors", purpose="Saving a time series", extra="view")
        from safetensors.numpy import save

        check_path("file", file)
        target = os.fspath(file)
        check_writable([target])
        header = {
            "format": FORMAT_NAME,
            "version": "1",
            "layers": json.dumps(self.layers),
            "statistics": json.dumps({name: shown.display() for name, shown in self.statistics.items()}),
        }
        tensors: dict[str, NDArray[Any]] = {"steps": np.asarray(self.steps, np.int64)}
        tensors |= {f"{name}/{number}": self.values(name, layer=number) for name, number in self._rows}
        if self.watched_kinds:
            header["version"] = str(FORMAT_VERSION)
            header["kinds"] = json.dumps(list(map(_described_kind, self.watched_kinds)))
            header["combinations"] = json.dumps(self._combinations)
            tensors |= {f"{_KIND_TENSOR}{number}": self._places_of_kinds(number) for number in self._kinds}
        with open_atomically(target) as out:
            out.write(save(tensors, header))

    @staticmethod
    def load(file: str | os.PathLike[str]) -> TimeSeries:
        """Open a saved series.

        Raises:
            InputError: there is no such file, or it is not a time series.
            MissingPackageError: safetensors is not installed.
        """
        require("safetensors", purpose="Loading a time series", extra="view")
        from safetensors import SafetensorError, safe_open

        check_path("file", file)
        target = os.fspath(file)
        try:
            with safe_open(target, framework="numpy") as opened:
                header = opened.metadata() or {}
                if header.get("format") != FORMAT_NAME or header.get("version") not in ("1", str(FORMAT_VERSION)):
                    raise InputError(
                        f"{target!r} is not a time series of heads.", "Give a file that TimeSeries.save wrote."
                    )
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - `opened` is not a dict
            return _series_of_file(header, tensors)
        except InputError:
            raise
        except FileNotFoundError:
            raise InputError(f"There is no file {target!r}.", "Check its name.") from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{target!r} is damaged: {error}.", "Give a file that TimeSeries.save wrote.") from None


def _series_of_file(header: Mapping[str, str], tensors: dict[str, NDArray[Any]]) -> TimeSeries:
    """Build a series from the contents of a file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the contents are inconsistent.
    """
    statistics = {name: Statistic(name, **shown) for name, shown in json.loads(header["statistics"]).items()}
    series = TimeSeries(
        steps=[int(step) for step in tensors.pop("steps")],
        layers={int(number): str(name) for number, name in json.loads(header["layers"]).items()},
        statistics=statistics,
        watched_kinds=tuple(_kind_of_file(each, statistics) for each in json.loads(header.get("kinds", "[]"))),
        _combinations=[tuple(each) for each in json.loads(header.get("combinations", "[]"))],
    )
    known = {MIXED.name, *(kind.name for kind in series.watched_kinds)}
    if unknown := {name for named in series._combinations for name in named} - known:  # noqa: SLF001
        raise ValueError(f"the kinds {', '.join(sorted(map(str, unknown)))} are not described")
    places = {int(key[len(_KIND_TENSOR) :]): tensors.pop(key) for key in [*tensors] if key.startswith(_KIND_TENSOR)}
    for key, values in tensors.items():
        name, _, number = key.rpartition("/")
        if name not in series.statistics or int(number) not in series.layers or len(values) != len(series.steps):
            raise ValueError(f"{key} does not fit the steps, layers and statistics")
        rows = zip(series.steps, values.astype(np.float32), strict=True)
        series._rows[name, int(number)] = {step: row for step, row in rows if not np.isnan(row).all()}  # noqa: SLF001
    for layer, found in places.items():
        if found.shape != (len(series.steps), series.num_heads.get(layer)):
            raise ValueError(f"{_KIND_TENSOR}{layer} does not fit the steps, layers and heads")
        series._set_places_of_kinds(layer, found)  # noqa: SLF001
    return series


def _described_kind(kind: Kind) -> dict[str, Any]:
    """Return what a file needs to show a kind, and when heads changed in it: field -> value."""
    texts = {"labels": kind.label, "about": kind.definition, "noun": kind.noun_phrase}
    fields = ("name", "statistic", "above_chance", "at_least", "of_largest", "rank", "finding", "glyph", "colour")
    return {name: getattr(kind, name) for name in fields} | {
        name: {lang: of_language(lang) for lang in LANGUAGES} for name, of_language in texts.items()
    }


def _kind_of_file(described: dict[str, Any], statistics: Mapping[str, Statistic]) -> Kind:
    """Return the built-in kind of this name, or the kind that a file describes.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the description is invalid.
    """
    for kind in KINDS:
        if kind.name == described["name"]:
            return kind
    labels, about, noun = (
        {str(lang): str(each) for lang, each in described[name].items()} for name in ("labels", "about", "noun")
    )
    return Kind(
        described["name"],
        statistic(described["statistic"], statistics),
        above_chance=described["above_chance"],
        at_least=described["at_least"],
        of_largest=described["of_largest"],
        rank=int(described["rank"]),
        finding=None if described["finding"] is None else int(described["finding"]),
        labels=labels,
        # The definition of a kind is a format string, and that of a file is complete.
        about={lang: each.replace("{", "{{").replace("}", "}}") for lang, each in about.items()},
        noun=noun,
        glyph=described["glyph"],
        colour=tuple(described["colour"]),
    )
