"""Observe every n-th training step, and log statistics of all heads as plain numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ProbeError
from multihead.errors.arguments import check_integer
from multihead.errors.given import PIXELS, check_ids, check_module, reject_given
from multihead.kinds import KINDS, Kind, check_kinds, kinds_named, probes_of
from multihead.locale.escaping import escape_controls
from multihead.models.trainer import call_around_steps
from multihead.observation.observe import Options, record_calls
from multihead.observation.picture_calls import PictureCall, modules_with_pictures, reject_picture_probe
from multihead.observation.record import Record
from multihead.observation.time_series import TimeSeries
from multihead.probes.catalogue import ENTROPY, LARGEST_SCORE, needs_pictures
from multihead.probes.choices import WATCHED, WITH_MAXIMUM
from multihead.probes.probe import Probe
from multihead.probes.statistics import ProbeOrName, resolve_probes
from multihead.record.layer import layer_profiles
from multihead.record.table import html_of_table, number_with_noun


class ScalarWriter(Protocol):
    """An object with the method `add_scalar` of TensorBoard's `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Log a number under a tag at a step."""


LogTarget: TypeAlias = "Callable[[dict[str, float], int], object] | ScalarWriter"


class Watch:
    """Observe one training step in `every`, and leave the other steps unchanged.

    Run each training step in the watch as a context manager. In an observed step every attention layer is measured
    during its forward pass; a Hugging Face model uses this library's attention in that step. All other steps run the
    model's own code without hooks. A compiled model runs uncompiled in an observed step, and is not compiled again.
    Only numbers are kept, no tensors of the model.

    Args:
        model: a module with attention layers of this library, a Hugging Face model, or both.
        every: number of steps from one observed step to the next; the first step is observed.
        probes: statistics with a number per query, by name or as values; None takes
            `probes.choices.WATCHED`. Each is averaged over the queries, except `largest_score`, whose maximum is kept.
        layers: the layers to observe, as in `observe`; None observes all.
        per_head: whether `numbers` also holds a number per head, and not only their mean, minimum and maximum.
        log: called as log(numbers, step) after each observed step; or a SummaryWriter.
        kinds: whether the kinds of the heads are watched, which makes an observed step longer: True for the built-in
            kinds, or some of them by name, and kinds of your own as values. Without a name all built-in ones are
            watched, as in `observe`. Their statistics are observed besides `probes`. Left out are kinds that need texts
            of repeated random tokens, those that need special tokens if there are no `special_ids`, and those of
            pictures if the model takes none.
        special_ids: the token ids that `special_mass` counts, as in `observe`.

    Attributes:
        step: number of steps so far.
        numbers: name -> number at the last observed step, with names such as "heads/entropy/L07/mean"; and how many
            heads are of each watched kind, with names such as "heads/kind/induction".
        series: statistics of every head at every observed step, and its kinds.

    Raises:
        ModelError: at the end of the first observed step, if no attention was captured.
        ArgumentError, ProbeError: an option does not exist, a probe has no number per query, or a kind that was named
            cannot be watched; at the end of the first observed step, if kinds are watched and the tokens of a text are
            on several ranks.

    >>> import multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> watch = mh.Watch(layer, every=2, probes="entropy")
    >>> for step in range(3):
    ...     with watch:
    ...         layer(torch.zeros(1, 4, 8)).sum().backward()
    >>> watch.series.steps, round(watch.numbers["heads/entropy/L00/mean"], 3)
    ([0, 2], 1.386)

    >>> watch = mh.Watch(layer, probes="entropy", kinds=["broad"])
    >>> with watch:
    ...     y = layer(torch.zeros(1, 40, 8))
    >>> watch.series.kinds(layer=0), watch.numbers["heads/kind/broad"]
    ([(('broad',), ('broad',))], 2.0)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        probes: ProbeOrName | Sequence[ProbeOrName] | None = None,
        layers: Sequence[int | str] | int | str | None = None,
        per_head: bool = False,
        log: LogTarget | None = None,
        kinds: bool | str | Kind | Sequence[str | Kind] = False,
        special_ids: Sequence[int] = (),
    ) -> None:
        check_module(model)
        check_integer("every", every)
        self.model, self.every, self.layers, self.per_head, self.log = model, every, layers, per_head, log
        self.special_ids = check_ids("special_ids", special_ids)
        takes_pictures = bool(modules_with_pictures(model))
        self.kinds = _kinds_to_watch(kinds, special_ids=self.special_ids, takes_pictures=takes_pictures)
        chosen = resolve_probes(WATCHED if probes is None else probes)
        self.probes: tuple[Probe, ...] = resolve_probes((*chosen, *probes_of(self.kinds)))
        for probe in self.probes:
            if not probe.has_mean:
                raise ProbeError(
                    f"{probe.name} has no mean over the queries of a head.", f'Give probes such as "{ENTROPY.name}".'
                )
            if not takes_pictures:
                reject_picture_probe(probe)
        self.step = 0
        self.numbers: dict[str, float] = {}
        self.series = TimeSeries(watched_kinds=self.kinds)
        self._places: list[PictureCall] = []  # known of the pictures of earlier steps
        self._named = probes is not None
        self._stack: ExitStack | None = None
        self._record: Record | None = None

    def __repr__(self) -> str:
        """Return one line: the class of the model, the numbers of observed and all steps, and the statistics."""
        return f"<{self._title()}: {self._contents()}>"

    def _repr_html_(self) -> str:
        """Return HTML for a notebook: the numbers of steps, and the table of the last observed step."""
        return f"<div>{html_of_table(self._title(), self._contents(), [], [])}{self.series._repr_html_()}</div>"

    def _title(self) -> str:
        return f"Watch of {escape_controls(type(self.model).__name__)}"

    def _contents(self) -> str:
        observed = f"{len(self.series.steps):,} of {number_with_noun(self.step, 'step')} observed (every={self.every})"
        kinds = [number_with_noun(len(self.kinds), "kind")] if self.kinds else []
        return ", ".join([observed, *kinds, *(probe.name for probe in self.probes)])

    @property
    def due(self) -> bool:
        """Whether the next step will be observed."""
        return self.step % self.every == 0

    def __enter__(self) -> Watch:
        if self._stack is not None:
            raise ArgumentError("The watch is already in a step.", "End one step before the next one begins.")
        try:
            self._stack = ExitStack()
            if self.due:
                options = Options(
                    self.layers,
                    "summary",
                    self.probes,
                    special_ids=self.special_ids,
                    kinds=[kind for kind in self.kinds if kind not in KINDS],
                    keeps_chance=bool(self.kinds),
                    keeps_quantiles=False,
                    compares_texts=self._named,
                    known_places=self._places,
                )
                context = record_calls(self.model, options)
                self._record = self._stack.enter_context(context)
            return self
        except BaseException:
            stack, self._stack, self._record = self._stack, None, None
            if stack is not None:
                stack.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, record, self._stack, self._record = self._stack, self._record, None, None
        assert stack is not None
        step = self.step
        if kind is None:
            self.step += 1
        stack.__exit__(kind, error, trace)
        if kind is None and record is not None:
            self._store_and_log_numbers(record, step)

    def attach(self, trainer: Any) -> None:
        """Observe the steps of a transformers Trainer, and write the numbers to its logs.

        Args:
            trainer: a `transformers.Trainer` or an instance of a subclass.

        Raises:
            MissingPackageError: transformers is not installed.
        """

        def begin_step(step: int) -> None:
            self.step = step
            self.__enter__()

        def end_step() -> None:
            observed = self.due
            self.__exit__(None, None, None)
            if observed:
                trainer.log(self.numbers)

        call_around_steps(trainer, begin_step, end_step)

    def _store_and_log_numbers(self, record: Record, step: int) -> None:
        """Add an observed step to `series`, set `numbers`, and log them."""
        self.numbers = {}
        kinds = self._kinds_of_layers(record)
        for layer in record.layers:
            found = layer.summary("mean") | layer.summary("max", [probe.name for probe in WITH_MAXIMUM])
            means = {name: each.tolist() for name, each in found.items()}
            self.series.append(step, layer.name, layer.number, means, record.statistics, kinds.get(layer.number))
            for name, values in found.items():
                place = f"heads/{name}/L{layer.number:02d}"
                parts = {"mean": values.mean(), "min": values.min(), "max": values.max()}
                self.numbers |= {f"{place}/{part}": float(value) for part, value in parts.items()}
                if self.per_head:
                    self.numbers |= {f"{place}/H{head:02d}": value for head, value in enumerate(values.tolist())}
        heads = Counter(name for of_layer in kinds.values() for of_head in of_layer for name in of_head)
        decided = [kind.name for kind in self.kinds if self.series.decides(kind)]
        self.numbers |= {f"heads/kind/{name}": float(heads[name]) for name in decided}
        if callable(self.log):
            self.log(self.numbers, step)
        elif self.log is not None:
            for name, number in self.numbers.items():
                self.log.add_scalar(name, number, step)

    def _kinds_of_layers(self, record: Record) -> dict[int, tuple[tuple[str, ...], ...]]:
        """Return number of a layer -> the names of each head's kinds; without layers of which they are unknown.

        Raises:
            ProbeError: the tokens of a layer are on several ranks.
        """
        if not self.kinds:
            return {}
        for layer in record.layers:
            if layer.split is not None and layer.split.ranks > 1:
                raise ProbeError(
                    f"{layer.name} has its tokens on {layer.split.ranks} ranks, and the kinds of its heads are known "
                    "of whole texts only.",
                    "Leave out kinds, or watch the training on one rank.",
                )
        layers = [layer for layer in record.layers if layer.has_kinds]
        found = layer_profiles(layers, sample=None, statistics=record.statistics, among=self.kinds)
        return {one.number: one.kinds for one in found}


def _kinds_to_watch(kinds: object, *, special_ids: Sequence[int], takes_pictures: bool) -> tuple[Kind, ...]:
    """Return the kinds that the argument `kinds` of a watch selects.

    Raises:
        ArgumentError: there is no such kind, or one that was named cannot be watched.
    """
    why_not = partial(_why_unwatchable, special_ids=special_ids, takes_pictures=takes_pictures)
    if kinds is False:
        return ()
    given = [kinds] if isinstance(kinds, (str, Kind)) else kinds
    if given is not True and (not isinstance(given, Iterable) or isinstance(given, bytes)):
        mend = 'Give names such as "induction", values of multihead.kinds.Kind, or True for all built-in kinds.'
        reject_given("kinds", kinds, "True, False, or a list of kinds of heads", mend)
    listed: list[object] = [] if given is True else list(given)
    if given is not True and not listed:
        raise ArgumentError("kinds is empty.", "Give some kinds, True for all built-in ones, or False.")
    names = [each.name if isinstance(each, Kind) else each for each in listed if isinstance(each, str) or each in KINDS]
    own = check_kinds([each for each in listed if not (isinstance(each, str) or each in KINDS)], KINDS)
    named = kinds_named(names, KINDS)
    for kind in (*(named if names else ()), *own):
        if why := why_not(kind):
            raise ArgumentError(*why)
    return (*(kind for kind in named if not why_not(kind)), *own)


def _why_unwatchable(kind: Kind, special_ids: Sequence[int], *, takes_pictures: bool) -> tuple[str, str] | None:
    """Return why a watch cannot tell which heads are of a kind, and what to do; None if it can."""
    if kind.texts != "given":
        return f"The kind {kind.name} needs texts of repeated random tokens.", "Measure it with mh.look(textbook=True)."
    if not isinstance(kind.probe, Probe):
        return f"The kind {kind.name} has a statistic without a function.", "Give it a probe."
    if needs_pictures(kind.probe) and not takes_pictures:
        return f"The kind {kind.name} needs pictures, which the model does not take as {PIXELS}.", "Leave it out."
    if "special_keys" in kind.probe.needs and not special_ids:
        return f"The kind {kind.name} needs special tokens.", "Give special_ids, such as tokenizer.all_special_ids."
    return None


def qk_clip_factors(seen: Record | Watch, threshold: float = 100.0) -> dict[str, Tensor]:
    """Return per head the factor that reduces its largest attention score to a threshold (QK-clip).

    Scores are bilinear in the query and key projections. So multiply the head's rows of `q_proj` by the factor; or, if
    no other head shares the keys, its rows of `q_proj` and of `k_proj` by the square root of the factor.

    Args:
        seen: a record with the statistic `largest_score`, or a watch that observed it.
        threshold: largest allowed score, such as 100.

    Returns:
        name of a layer -> (heads,) float32, 1 where the largest score does not exceed the threshold.

    Raises:
        ArgumentError: the threshold is not positive, or nothing was observed.
        ProbeError: `largest_score` was not observed.

    Source: MuonClip, arXiv:2507.20534, algorithm 1.

    >>> import multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> with mh.observe(layer, probes="largest_score") as seen:
    ...     y = layer(torch.randn(1, 5, 8))
    >>> mh.qk_clip_factors(seen)
    {'MultiHeadAttention': tensor([1., 1.])}
    """
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not threshold > 0:
        raise ArgumentError(f"threshold is {threshold!r}.", "Give a positive number, such as 100.")
    score = LARGEST_SCORE.name
    if isinstance(seen, Watch):
        series, known = seen.series, score in seen.series.statistics
        largest = {
            name: torch.from_numpy(series.values(score, layer=number)[-1]) if known else None
            for number, name in series.layers.items()
        }
    else:
        largest = {layer.name: layer.summary("max", (score,)).get(score) for layer in seen.layers}
    if not largest:
        raise ArgumentError("Nothing was observed.", "Run the model in the context first.")
    measured = {name: scores for name, scores in largest.items() if scores is not None}
    if len(measured) < len(largest):
        raise ProbeError(
            f"The statistic {score!r} was not observed.", f'Observe with probes=("{ENTROPY.name}", "{score}").'
        )
    return {name: (threshold / scores.clamp(min=threshold)).float() for name, scores in measured.items()}
