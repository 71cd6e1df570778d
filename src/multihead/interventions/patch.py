"""`mh.patch`: put the output of each head on one text into the run on another text, and measure what that recovers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError
from multihead.errors.given import check_module
from multihead.interventions.ablate import Positions, check_positions
from multihead.interventions.collected import CollectedNumbers
from multihead.interventions.followed import FollowedCall, follow_calls, run_followable
from multihead.interventions.heads import Head, resolve_heads
from multihead.interventions.means import checked_batches, run_batch
from multihead.interventions.measures import Measure, measure_of
from multihead.interventions.prepared import PreparedBatch, prepare
from multihead.interventions.swept import SweptLayer
from multihead.locale.texts import text
from multihead.probes.catalogue import statistic_of_heads
from multihead.probes.head_statistic import HeadStatistic
from multihead.probes.probe import SHARE_FORMAT, Statistic
from multihead.record.head_numbers import (
    STANDARD_ERRORS,
    HeadColumn,
    NumbersOverTexts,
    cells_with_error,
    number_with_error,
    stack_layers,
    standard_error,
)
from multihead.record.table import HeadList, HeadOfLayer, HeadTable
from multihead.tensors.tracing import original_module

Direction = Literal["clean into corrupted", "corrupted into clean"]
Over = Literal["heads", "heads x positions"]
_SHARE = Statistic("recovered", number_format=SHARE_FORMAT)


class PatchStep(NamedTuple):
    """How far `mh.patch` is, for the caller's `progress`.

    Attributes:
        layer: number of the layer whose heads were patched.
        position: the patched token; None for several.
        done: number of steps that are done: one per batch, layer and, over heads x positions, position.
        share: estimated share of the work that is done, from 0 to 1.
        seconds: time so far.
        seconds_left: estimated time for the work that is left.
    """

    layer: int
    position: int | None
    done: int
    share: float
    seconds: float
    seconds_left: float


@dataclass(frozen=True, repr=False)
class PatchedHead(HeadOfLayer):
    """A head, and what a patch of its output recovers.

    Attributes:
        position: the patched token; None for all that were chosen.
        recovered: the share of the gap: 0 is the corrupted text, 1 the clean one; NaN if the gap is no gap.
        standard_error: that of the share, by leaving out one pair at a time; NaN for one pair.
        change: the mean over pairs of the measure with the patch minus the measure without it.
    """

    position: int | None
    recovered: float
    standard_error: float
    change: float

    def __str__(self) -> str:
        token = "" if self.position is None else f" token {self.position}"
        return f"L{self.layer} H{self.head}{token}: {number_with_error(_SHARE, self.recovered, self.standard_error)} %"

    def cells(self) -> dict[str, str]:
        """Return the head as a row of a table in a notebook."""
        token = {} if self.position is None else {"token": str(self.position)}
        return self.place_cells() | token | cells_with_error(_SHARE, self.recovered, self.standard_error)


@dataclass(frozen=True, repr=False)
class Patching:
    """What patches of the heads of a model recover; what `mh.patch` returned.

    Attributes:
        measure: the number of each text.
        over: "heads" or "heads x positions".
        direction: "clean into corrupted" or "corrupted into clean".
        layers: the layers in the order in which they first ran.
        positions: the tokens of the last axis; None over heads.
        clean: (pairs,) float64, the measure of the clean texts.
        corrupted: (pairs,) float64, that of the corrupted ones.
        patched: name of a layer -> (pairs, heads) float64, the measure with the patch of each head; over heads x
            positions (pairs, heads, positions). NaN for a head that was not patched, and a text without the token.
        replayed: whether the blocks before each layer were left out, with equal outputs; else the whole model ran.
        seconds: how long it took.

    >>> import torch, multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> clean, corrupted = torch.randn(2, 5, 6, 8)
    >>> found = mh.patch(layer, clean, corrupted, mh.Measure(lambda output, batch: output.sum((1, 2)), "sum"))
    >>> found.clean.shape, found.changes.shape
    (torch.Size([5]), torch.Size([1, 2]))
    """

    measure: Measure
    over: Over
    direction: Direction
    layers: tuple[SweptLayer, ...]
    positions: tuple[int, ...] | None
    clean: Tensor
    corrupted: Tensor
    patched: Mapping[str, Tensor]
    replayed: bool
    seconds: float

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return len(self.clean)

    @property
    def gap(self) -> float:
        """The mean over pairs of the measure of the clean text minus that of the corrupted one."""
        return float((self.clean - self.corrupted).mean())

    @property
    def gap_error(self) -> float:
        """The standard error of the gap; NaN for one pair."""
        return float(standard_error(self.clean - self.corrupted))

    @property
    def has_gap(self) -> bool:
        """Whether the gap is more than two standard errors from 0, so that shares of it mean something."""
        return abs(self.gap) > (0 if self.pairs == 1 else STANDARD_ERRORS * self.gap_error)

    @cached_property
    def recovered(self) -> Tensor:
        """The share of the gap that is there with each patch: (layers, heads) float64, or (layers, heads, positions).

        0 is the corrupted text and 1 the clean one, in both directions: the mean over pairs of the change from the
        corrupted text, divided by the mean gap, of the pairs that have the token. NaN if there is no gap.
        """
        return stack_layers(self._over_pairs.means)

    @cached_property
    def standard_errors(self) -> Tensor:
        """The standard errors of `recovered`, by leaving out one pair at a time (the jackknife); NaN for one pair."""
        return stack_layers(self._over_pairs.errors)

    @cached_property
    def changes(self) -> Tensor:
        """The mean over pairs of the measure with each patch minus that without it, shaped as `recovered`."""
        before = self.corrupted if self.direction == "clean into corrupted" else self.clean
        patched = [self.patched[layer.name] for layer in self.layers]
        return stack_layers([(values - _per_pair(before, values)).nanmean(0) for values in patched])

    @cached_property
    def _over_pairs(self) -> NumbersOverTexts:
        return NumbersOverTexts([self._shares(self.patched[layer.name]) for layer in self.layers])

    def _shares(self, values: Tensor) -> Tensor:
        """Return numbers whose mean over pairs is the share of each patch, (pairs, ...), NaN for a pair without it.

        Their standard error is that of leaving out one pair at a time: they are the pseudo-values of the jackknife,
        moved so that their mean is the share.
        """
        known = values.isfinite()
        change = (values - _per_pair(self.corrupted, values)).masked_fill(~known, 0)
        gap = _per_pair(self.clean - self.corrupted, values).masked_fill(~known, 0)
        pairs, share = known.sum(0), change.sum(0) / gap.sum(0)
        without = ((change.sum(0) - change) / (gap.sum(0) - gap)).where(known, torch.nan)
        spread = ((pairs - 1) * (without - without.nanmean(0))).masked_fill(pairs < 2, 0)
        return (share - spread).where(known & torch.tensor(self.has_gap), torch.nan)

    def columns(self) -> list[HeadColumn]:
        """Return the column that `Record.add` adds.

        Raises:
            ArgumentError: the patches are of single tokens.
        """
        if self.over != "heads":
            raise ArgumentError(
                "A record has numbers of heads, and these are of heads x positions.", 'Give patches over="heads".'
            )
        lost = self.statistic.what == "lost"
        pairs = zip(self.layers, self._over_pairs.of_layers, strict=True)
        return [HeadColumn(self.statistic, {layer.name: 1 - each if lost else each for layer, each in pairs})]

    def heads(self, top: int | None = None) -> HeadList[PatchedHead]:
        """Return the patched heads, over heads x positions each with its tokens, those that matter most first.

        Clean into corrupted these are the largest shares, corrupted into clean the smallest ones; without a gap the
        largest changes.

        Args:
            top: how many; None returns all.
        """
        whole = self.recovered, self.standard_errors, self.changes
        numbers = [each.view(*each.shape[:2], -1) for each in whole]  # (layers, heads, 1 or positions)
        found = [
            PatchedHead(layer.number, head, layer.name, token, *(float(each[row, head, place]) for each in numbers))
            for row, layer in enumerate(self.layers)
            for head in layer.heads
            for place, token in enumerate(self.positions or [None])
        ]
        sign = -1 if self.direction == "clean into corrupted" else 1
        found.sort(key=lambda each: sign * each.recovered if self.has_gap else -abs(each.change))
        return HeadList(found[:top])

    def table(self, *, sort: str = "layer", top: int | None = None) -> HeadTable:
        """Return a table with one row per head, or per head and token: the share, its standard error, and the change.

        Args:
            sort: "layer", or a column, whose largest values come first.
            top: how many rows to keep; None keeps all.

        Raises:
            ArgumentError: there is no such column, or `top` is less than 1.
        """
        rows = [
            {"layer": each.layer, "head": each.head, "name": each.name}
            | ({} if each.position is None else {"token": each.position})
            | {"recovered": each.recovered, "standard_error": each.standard_error, "change": each.change}
            | {"pairs": self.pairs}
            for each in sorted(self.heads(), key=lambda each: each.position or 0)
        ]
        shown = {
            "recovered": _SHARE,
            "standard_error": Statistic("standard_error", number_format=SHARE_FORMAT),
            "change": Statistic("change", unit=self.measure.unit),
        }
        return HeadTable.from_rows(rows, sort=sort, top=top, statistics=shown)

    @property
    def statistic(self) -> HeadStatistic:
        """How a share is shown as a column of a record.

        Corrupted into clean it is the lost share, 1 minus the recovered one, so that 0 is a head without an effect.
        """
        measure = self.measure
        what = "recovered" if self.direction == "clean into corrupted" else "lost"
        return statistic_of_heads(what, measure.name, "%", "patch", more_is_better=measure.more_is_better)

    def describe(self, lang: str = "en") -> str:
        """Describe the result in sentences: the gap, whether there are shares of it, and how it ran.

        Args:
            lang: "en" or "zh".
        """
        numbers = Statistic("gap", unit=self.measure.unit)
        values = {
            "pairs": self.pairs,
            "clean": numbers.text(float(self.clean.mean())),
            "corrupted": numbers.text(float(self.corrupted.mean())),
            "gap": numbers.text(self.gap),
            "error": numbers.number(self.gap_error),
        }
        parts = ["pairs", *([] if self.has_gap else ["no gap"]), "replayed" if self.replayed else "whole"]
        return "".join(text(f"importance.{each}", lang, **values) for each in parts)

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        heads = sum(len(layer.heads) for layer in self.layers)
        return f"<Patching of {heads} heads for {self.measure.name} over {self.pairs} pairs, {self.direction}>"

    def _repr_html_(self) -> str:
        return self.heads()._repr_html_()


def _per_pair(values: Tensor, like: Tensor) -> Tensor:
    """Return a number per pair in the shape of others: (pairs,) -> (pairs, ...)."""
    return values.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)


def patch(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    measure: Measure | Callable[[Any, Any], Tensor] | None,
    over: Over = "heads",
    direction: Direction = "clean into corrupted",
    *,
    heads: Head | Iterable[Head] | None = None,
    positions: Positions = None,
    progress: Callable[[PatchStep], object] | None = None,
) -> Patching:
    """Put the output of each head on one text into the run on another, and return how much of the gap that recovers.

    Text i of `clean` and text i of `corrupted` are a pair, and have equal numbers of tokens. The output of a head,
    before the output projection, is replaced at each token by that of the same head at the same token of the other
    text. The outputs of the source are kept from one run; all heads of a layer are patched in few forward passes, each
    in a copy of the batch, and the blocks before the layer are not run again, if a replay gives equal outputs. No
    gradients are computed.

    Args:
        model: see `mh.importance`.
        clean: the texts on which the model does what is studied: a batch, or several, as for `mh.head_means`.
        corrupted: texts on which it does not; as many batches and texts, each padded as it likes.
        measure: the number of each text, see `mh.importance`; it must fit clean and corrupted texts alike.
        over: "heads" patches all chosen tokens of a head at once, "heads x positions" each token alone: 270 heads and
            28 tokens are 7,560 runs, and the first call of `progress` has an estimate of the time.
        direction: "clean into corrupted": which heads are enough to bring the behaviour back; or "corrupted into
            clean": which are needed for it.
        heads: the heads to patch, as for `mh.ablate`; None for all.
        positions: the tokens to patch, as for `mh.ablate`; None for all.
        progress: called after the heads of a layer were patched, over heads x positions at each token.

    Returns:
        the recovered shares, with standard errors over pairs.

    Raises:
        ArgumentError: the texts of a pair have different numbers of tokens, or an option does not fit.
        ModelError: see `mh.importance`.

    >>> import torch, multihead as mh
    >>> _ = torch.manual_seed(0)
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2, bias=False)
    >>> clean, corrupted = torch.randn(4, 6, 8) + 1, torch.randn(4, 6, 8)
    >>> last = mh.Measure(lambda output, batch: output[:, -1].sum(1), "last", more_is_better=True)
    >>> found = mh.patch(layer, clean, corrupted, last)
    >>> bool(found.changes.sum() - found.gap < 1e-5)  # the heads of one layer add up
    True
    """
    for name, given, known in (("over", over, Over), ("direction", direction, Direction)):
        if given not in get_args(known):
            raise ArgumentError(f"{name} is {given!r}.", f'Give "{get_args(known)[0]}" or "{get_args(known)[1]}".')
    check_module(model)
    root = original_module(model)
    keys = None if heads is None else resolve_heads(root, heads)
    chosen, tokens = measure_of(root, measure), check_positions(positions)
    batches = _batches_in_pairs(clean, corrupted)
    forward = direction == "clean into corrupted"
    collected, of_sources = CollectedNumbers(len(batches[0])), list[Tensor]()
    longest: list[int | None] = []  # a shorter text has the first of these tokens
    with run_followable(root), torch.no_grad():
        checked = [checked_batches(root, each) for each in (batches if forward else batches[::-1])]
        for source, target in zip(*checked, strict=True):
            kept = SourceOutputs()
            with follow_calls(root, kept.add):
                output = run_batch(root, source)
            prepared = prepare(root, target, chosen, keys=keys)
            kept.check_pairs(prepared.read.tokens, clean_first=forward)
            of_sources.append(chosen.of_texts(output, source, (len(prepared.baseline),)))
            places: dict[str, list[int | None]] = {
                layer.name: [None] if over == "heads" else kept.tokens_of(layer.name, tokens)
                for layer in prepared.layers
            }
            longest = max(longest, *places.values(), key=len)
            sizes = {name: len(found) for name, found in places.items()}
            collected.begin(prepared.layers, prepared.baseline, replayed=prepared.replay.is_exact, places=sizes)
            for layer in prepared.layers:
                for index, place in enumerate(places[layer.name] if layer.heads else []):
                    collected.add(layer, _measured_with_patch(prepared, kept, layer, place, tokens), index)
                    if progress is not None:
                        share, left = collected.share or 0.0, collected.seconds_left or 0.0
                        progress(PatchStep(layer.number, place, collected.done, share, collected.seconds, left))
    of_source, of_target = torch.cat(of_sources), collected.baseline
    numbers = tuple(place for place in longest if place is not None)
    return Patching(
        chosen,
        over,
        direction,
        tuple(collected.layers),
        numbers or None,
        *((of_source, of_target) if forward else (of_target, of_source)),
        {name: values if numbers else values[:, :, 0] for name, values in collected.values.items()},
        collected.replayed,
        collected.seconds,
    )


def _batches_in_pairs(clean: Any, corrupted: Any) -> list[Sequence[Any]]:
    """Return the batches of clean texts and those of corrupted ones, as many of each."""
    batches = [each if isinstance(each, Sequence) else [each] for each in (clean, corrupted)]
    if len(batches[0]) != len(batches[1]):
        raise ArgumentError(
            f"clean has {len(batches[0])} batches, and corrupted {len(batches[1])}.",
            "Give texts in pairs, batch by batch.",
        )
    return batches


def _measured_with_patch(
    prepared: PreparedBatch,
    kept: SourceOutputs,
    layer: SweptLayer,
    position: int | None,
    chosen: tuple[int, ...] | slice | None,
) -> Tensor:
    """Return the measure with the patch of each head of a layer, (pairs, heads) float64.

    Args:
        prepared: the batch of the targets.
        kept: the outputs of the sources.
        layer: the layer.
        position: the token that is patched, NaN for a text that does not have it; None patches those in `chosen`.
        chosen: the tokens that the caller chose.
    """
    at = chosen if position is None else (position,)
    ((_, effects),) = prepared.effects(kept, positions=at, layers=[layer])
    found = prepared.baseline[:, None] + effects
    return found.where(kept.has_token(layer.name, position)[:, None], torch.nan)


@dataclass(frozen=True, eq=False)
class SourceOutputs:
    """The outputs of all heads in one run, which replace those at the same tokens of the same texts in another run.

    Attributes:
        outputs: name of a layer -> (batch * queries, heads, value_dim).
        rows: name of a layer -> (texts, tokens) int64, the row of each token in `outputs`; -1 where a text has ended.
    """

    outputs: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    needs_tokens = True
    description = "by that of the other text of the pair"

    def add(self, call: FollowedCall, output: Tensor) -> tuple[Tensor, None]:
        """Keep the output of a call, (batch, heads, queries, value_dim), which stays as it is."""
        self.outputs[call.layer_name] = output.transpose(1, 2).flatten(0, 1)
        self.rows[call.layer_name] = call.tokens.rows()
        return output, None

    def replace(self, call: FollowedCall, output: Tensor, heads: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """Replace the output of heads by those of the other run, see `Replacement.replace`; each copy has its texts."""
        rows = self.rows[call.layer_name].to(output.device)
        place = rows[call.tokens.text_index % len(rows), call.tokens.position.clamp(0, rows.shape[1] - 1)]
        new = self.outputs[call.layer_name].to(output)[place.clamp(min=0)][:, :, heads]
        return new.transpose(1, 2), torch.full_like(factors, torch.nan)

    def tokens_of(self, layer: str, positions: tuple[int, ...] | slice | None) -> list[int | None]:
        """Return those of some positions that the texts of a layer have, in their order."""
        length = self.rows[layer].shape[1]
        if positions is None or isinstance(positions, slice):
            found = [*range(length)[positions or slice(None)]]
        else:
            found = [position for position in positions if position < length]
        if not found:
            raise ArgumentError(
                f"No text has a token at the positions {positions}.", f"Give some from 0 to {length - 1}."
            )
        return [*found]

    def has_token(self, layer: str, position: int | None) -> Tensor:
        """Return which texts have a token, (texts,) bool; all for None."""
        rows = self.rows[layer].cpu()
        return torch.ones(len(rows), dtype=torch.bool) if position is None else rows[:, position] >= 0

    def check_pairs(self, other: Mapping[str, Sequence[int]], *, clean_first: bool) -> None:
        """Raise an ArgumentError if the texts of another run have other numbers of tokens.

        Args:
            other: name of a layer -> the number of tokens of each text in the other run.
            clean_first: whether these outputs are those of the clean texts.
        """
        for name, rows in self.rows.items():
            lengths = [(rows >= 0).sum(1).tolist(), list(other.get(name, ()))]
            clean, corrupted = lengths if clean_first else lengths[::-1]
            if len(clean) != len(corrupted):
                raise ArgumentError(
                    f"clean has {len(clean)} texts, and corrupted {len(corrupted)}, in {name}.", "Give texts in pairs."
                )
            for pair, (one, another) in enumerate(zip(clean, corrupted, strict=True)):
                if one != another:
                    raise ArgumentError(
                        f"Pair {pair} has {one} tokens in clean and {another} in corrupted, in {name}.",
                        "Give pairs of equal numbers of tokens, so that each token has one to be replaced by.",
                    )
