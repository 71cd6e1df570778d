"""Store statistics of every head over training steps; save, load, tabulate and plot them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from multihead.errors import ArgumentError, InputError
from multihead.errors.given import check_path
from multihead.errors.optional import require
from multihead.files import check_writable, open_atomically
from multihead.observation.presentation import function_of_viewer
from multihead.probes.catalogue import statistic
from multihead.probes.probe import Statistic
from multihead.record.notebook import HEAD_COLUMNS, html_of_table, number_with_noun
from multihead.record.plots import import_pyplot, report_colormap

FORMAT_NAME = "multihead time series"
FORMAT_VERSION = 1

StatisticAndLayer = tuple[str, int]  # name of a statistic, number of a layer


@dataclass(eq=False, repr=False)
class TimeSeries:
    """One number per head, statistic and observed step.

    Attributes:
        steps: the observed steps, ascending.
        layers: number of a layer -> its name.
        statistics: name of a statistic -> its label, unit and number format.

    >>> series = TimeSeries()
    >>> series.append(0, "attention", 0, {"entropy": [1.5, 0.5]})
    >>> series.append(100, "attention", 0, {"entropy": [1.25, 0.25]})
    >>> series.steps, series.values("entropy", layer=0).tolist()
    ([0, 100], [[1.5, 0.5], [1.25, 0.25]])
    """

    steps: list[int] = field(default_factory=list)
    layers: dict[int, str] = field(default_factory=dict)
    statistics: dict[str, Statistic] = field(default_factory=dict)
    _rows: dict[StatisticAndLayer, dict[int, NDArray[np.float32]]] = field(default_factory=dict)  # step -> (heads,)

    def __repr__(self) -> str:
        """Return one line: the numbers of steps and layers, and the names of the statistics."""
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
    ) -> None:
        """Add the statistics of one layer at one step.

        Args:
            step: the step, not smaller than the last step.
            layer: name of the layer.
            number: number of the layer.
            means: name of a statistic -> one value per head.
            shown: label, unit and number format of the statistics that are not built in.
        """
        if not self.steps or self.steps[-1] != step:
            self.steps.append(step)
        self.layers[number] = layer
        for name, values in means.items():
            self.statistics.setdefault(name, statistic(name, shown))
            self._rows.setdefault((name, number), {})[step] = np.asarray(values, np.float32)

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

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per step and head: step, layer, head, and each statistic."""
        return [{"step": step} | row for step in self.steps for row in self._rows_of_step(step)]

    def _describe_sizes(self) -> str:
        return f"{number_with_noun(len(self.steps), 'step')}, {number_with_noun(len(self.layers), 'layer')}"

    def _rows_of_step(self, step: int) -> list[dict[str, Any]]:
        """Return one dict per head at one step: layer, head, and each statistic."""
        found = []
        for number in self.layers:
            by_name = {
                name: self._rows[name, number][step]
                for name in self.statistics
                if step in self._rows.get((name, number), {})
            }
            heads = max(map(len, by_name.values()), default=0)  # none where the layer did not run in this step
            found += [
                {"layer": number, "head": head} | {name: float(values[head]) for name, values in by_name.items()}
                for head in range(heads)
            ]
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
            "version": str(FORMAT_VERSION),
            "layers": json.dumps(self.layers),
            "statistics": json.dumps({name: shown.display() for name, shown in self.statistics.items()}),
        }
        tensors: dict[str, NDArray[Any]] = {"steps": np.asarray(self.steps, np.int64)}
        tensors |= {f"{name}/{number}": self.values(name, layer=number) for name, number in self._rows}
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
                if header.get("format") != FORMAT_NAME or header.get("version") != str(FORMAT_VERSION):
                    raise InputError(
                        f"{target!r} is not a time series of heads.", "Give a file that TimeSeries.save wrote."
                    )
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - `opened` is not a dict
            return _series_of_file(header, tensors)
        except FileNotFoundError:
            raise InputError(f"There is no file {target!r}.", "Check its name.") from None
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{target!r} is damaged: {error}.", "Give a file that TimeSeries.save wrote.") from None


def _series_of_file(header: Mapping[str, str], tensors: dict[str, NDArray[Any]]) -> TimeSeries:
    """Build a series from the contents of a file.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the contents are inconsistent.
    """
    series = TimeSeries(
        steps=[int(step) for step in tensors.pop("steps")],
        layers={int(number): str(name) for number, name in json.loads(header["layers"]).items()},
        statistics={name: Statistic(name, **shown) for name, shown in json.loads(header["statistics"]).items()},
    )
    for key, values in tensors.items():
        name, _, number = key.rpartition("/")
        if name not in series.statistics or int(number) not in series.layers or len(values) != len(series.steps):
            raise ValueError(f"{key} does not fit the steps, layers and statistics")
        rows = zip(series.steps, values.astype(np.float32), strict=True)
        series._rows[name, int(number)] = {step: row for step, row in rows if not np.isnan(row).all()}  # noqa: SLF001
    return series
