"""`mh.ablate` and `mh.scale_heads`: switch heads of a model off, or scale their outputs, inside a context."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ModelError
from multihead.errors.arguments import check_integer, join_first
from multihead.interventions.factors import (
    HeadFactor,
    LayerFactors,
    check_factor,
    describe_factor,
    require_one_factor,
    values_of,
)
from multihead.interventions.followed import FollowedCall, follow_calls
from multihead.interventions.heads import Head, HeadKey, count_named_heads, require_head_of_layer, resolve_heads
from multihead.interventions.means import HeadMeans, MeanOver, head_means
from multihead.interventions.replacements import (
    GivenOutput,
    MeanOutput,
    OutputFunction,
    Replacement,
    ResampledOutput,
    ScaledOutput,
)
from multihead.kernels.head_changes import mark_changed_output
from multihead.models.guarded_cache import guard_caches

AblationMethod = Literal["zero", "mean", "resample"]
Positions: TypeAlias = "int | Sequence[int] | range | slice | None"
_block_serials = count(1)  # gives each `with` block of this process another number


def ablate(
    model: nn.Module,
    heads: Head | Iterable[Head],
    *,
    by: AblationMethod | Tensor | OutputFunction = "zero",
    positions: Positions = None,
    samples: Sequence[int] | None = None,
    reference: HeadMeans | Iterable[Any] | None = None,
    mean_over: MeanOver = "text",
    seed: int = 0,
    allow_mixed: bool = False,
) -> Intervention:
    """Switch heads of a model off inside a context: their output before the output projection is replaced.

    The heads run as usual, so their attention maps stay those of the model's inputs; only what they write is replaced.
    Of grouped heads a query head is switched off, and its key/value head stays for the others. A Hugging Face model
    calls this library's attention inside the context, compiled models run eagerly, and `observe` may be active at the
    same time: `output_norm` and `contribution` are then those of the replaced output. Contexts may be nested. As with
    `observe`, calls in other threads are not changed.

    Args:
        model: a module with attention layers of this library or its drop-ins, or a Hugging Face model.
        heads: "L17 H4", (17, 4), a whole layer "L17", a list of these, or what `seen.find(...)`, `seen.nearest(...)`
            and `seen.kinds()` return. Layers are numbered in the order in which they first run, as in tables.
        by: what replaces the output: "zero"; "mean", the head's mean output over a reference; "resample", its output
            at the same position of another text in the batch; a vector (value_dim,), in the dtype of the output; or a
            function f(output, call) of a head's output, (batch, queries, value_dim), that returns a tensor like it.
            `call` has `layer`, `layer_name`, `head`, `texts` and `positions` of the queries, (batch, queries) int64
            each, -1 for padding, and `outputs`, those of all heads of the layer before this change, (batch, heads,
            queries, value_dim). A function may use several heads and texts, and gradients pass through it.
        positions: the tokens whose output is replaced, counted from the first token of each text without padding, as
            an int, ints or a slice; None for all. Cross-attention of `MultiHeadAttention` needs `lengths=` for this.
        samples: the texts of each batch whose heads are switched off, by index; None for all.
        reference: for "mean", batches of the model's inputs, or the result of `head_means`.
        mean_over: "text" takes a mean of the first tokens of the reference's texts and one of all other tokens, because
            attention sinks make the first token special; "position" takes one mean per position.
        seed: for "resample", which other text each text gets.
        allow_mixed: allow a key/value cache that was filled under other interventions, see below.

    Returns:
        a context manager.

    Raises:
        ArgumentError: a head does not exist (the error names the nearest), the heads are all heads of the model, or an
            option does not fit; raised before anything runs. In the context: a vector or what a function returned has
            another shape, dtype or device than the output.
        ModelError: `model` has no attention layer, or is of an unsupported family; at the end of the context: a named
            head was never reached; in the context: a cache was filled under other
            interventions, or the layer runs under activation checkpointing with use_reentrant=True.

    Activation checkpointing with use_reentrant=False recomputes a layer with the heads of its forward pass if the
    backward pass runs inside the context; outside of it torch raises a CheckpointError.

    >>> import torch, multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2, bias=False)
    >>> x = torch.randn(1, 5, 8)
    >>> with mh.ablate(layer, "L0 H1"):
    ...     without = layer(x)
    >>> bool(torch.equal(without, layer(x)))
    False
    >>> with mh.ablate(layer, "L0 H1", by=lambda output, call: call.outputs[:, 0]):  # head 1 writes what head 0 writes
    ...     copied = layer(x)
    """
    keys = resolve_heads(model, heads)
    if positions is None and samples is None and (isinstance(by, Tensor) or by in ("zero", "mean")):
        named, total = count_named_heads(model, keys) or (0, 1)
        if named == total:
            raise ArgumentError("The heads are all heads of the model.", "Leave some on.")
    replacement = replacement_of(model, by, reference=reference, mean_over=mean_over, seed=seed)
    return Intervention(model, dict.fromkeys(keys, 0.0), replacement, positions, samples, allow_mixed=allow_mixed)


def scale_heads(
    model: nn.Module,
    factors: Mapping[Any, float | Tensor],
    *,
    positions: Positions = None,
    samples: Sequence[int] | None = None,
    allow_mixed: bool = False,
) -> Intervention:
    """Multiply the output of heads by factors inside a context, before the output projection.

    Args:
        model: see `ablate`.
        factors: head or layer, as in `ablate` -> finite factor; 0 switches it off, 1 changes nothing. A tensor of
            floating-point numbers has a factor per text of the batch for a head, (texts,), and for a layer a factor
            per head, (heads,), or per text and head, (texts, heads). Gradients pass to it, also where it is 0.
        positions: see `ablate`.
        samples: see `ablate`.
        allow_mixed: see `ablate`.

    Returns:
        a context manager.

    Raises:
        ArgumentError, ModelError: as in `ablate`, or a factor is not finite, or has fewer texts or another number of
            heads than a call.

    >>> import torch, multihead as mh
    >>> layer, x = mh.MultiHeadAttention(embed_dim=8, num_heads=2), torch.randn(1, 5, 8)
    >>> with mh.scale_heads(layer, {"L0 H0": 1.0}):
    ...     same = layer(x)
    >>> torch.allclose(same, layer(x), atol=1e-6)
    True
    >>> gate = torch.zeros(2, requires_grad=True)  # a factor per head
    >>> with mh.scale_heads(layer, {"L0": gate}):
    ...     layer(x).square().sum().backward()
    >>> gate.grad.shape
    torch.Size([2])
    """
    if not isinstance(factors, Mapping):
        raise ArgumentError(f"factors is a {type(factors).__name__}.", 'Give a dict such as {"L17 H4": 0.5}.')
    resolve_heads(model, list(factors))  # all are checked before the first is used
    found: dict[HeadKey, HeadFactor] = {}
    for head, given in factors.items():
        (key,) = resolve_heads(model, head)
        factor = check_factor(head, key, given)
        require_one_factor(key, found.setdefault(key, factor), factor)
    return Intervention(model, found, ScaledOutput(), positions, samples, allow_mixed=allow_mixed)


def replacement_of(
    model: nn.Module,
    by: AblationMethod | Tensor | OutputFunction,
    *,
    reference: HeadMeans | Iterable[Any] | None,
    mean_over: MeanOver = "text",
    seed: int = 0,
) -> Replacement:
    """Return the rule for the output of a head that is switched off; the arguments are those of `ablate`.

    Raises:
        ArgumentError: an option does not exist, or does not fit the others.
    """
    given = isinstance(by, Tensor) or callable(by)
    if not given and (not isinstance(by, str) or by not in ("zero", "mean", "resample")):
        raise ArgumentError(
            f"by is {by!r}.", 'Give "zero", "mean", "resample", a vector, or a function of the output of a head.'
        )
    if reference is not None and (given or by != "mean"):
        of = "a vector or a function as by=" if given else f'by="{by}"'
        raise ArgumentError(f"reference was given with {of}.", 'Use by="mean", or leave it out.')
    if isinstance(by, Tensor) or callable(by):
        return GivenOutput(by)
    if by == "mean":
        return MeanOutput(_means_of_reference(model, reference, mean_over))
    return ResampledOutput(seed) if by == "resample" else ScaledOutput()


@dataclass(eq=False, repr=False)
class Intervention:
    """A change to the outputs of some heads of a model, active inside a `with` block; made by `ablate`, `scale_heads`.

    The same object may be entered again after its block has ended.

    Attributes:
        model: the model.
        heads: head -> the factor of its output (0 where it is replaced).
        replacement: what replaces the output.
        positions: the tokens whose output is replaced, see `ablate`.
        samples: the texts of each batch whose heads are changed, by index; None for all.
        allow_mixed: whether a key/value cache may have been filled under other interventions.
    """

    model: nn.Module
    heads: Mapping[HeadKey, HeadFactor]
    replacement: Replacement
    positions: Positions = None
    samples: Sequence[int] | None = None
    allow_mixed: bool = False
    _active_run: _InterventionRun | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.positions = check_positions(self.positions)
        self.samples = _check_indices("samples", self.samples, "sample")

    def __repr__(self) -> str:
        words = self.replacement.description
        heads = (f"{key} {words.format(factor=describe_factor(factor))}" for key, factor in self.heads.items())
        return f"<Intervention: {', '.join(heads)}>"

    def __enter__(self) -> Intervention:
        if self._active_run is not None:
            raise ArgumentError("This intervention is already active.", "Make another one with mh.ablate.")
        run = _InterventionRun(self)
        settings = self.replacement, repr(self.positions), self.samples
        state = (
            None
            if self.allow_mixed
            else _InterventionState(
                {key: values_of(factor) for key, factor in self.heads.items()}, settings, run.layers
            )
        )
        try:
            self._active_run = run
            run.stack.enter_context(follow_calls(self.model, run.change, state=state))
            run.stack.enter_context(guard_caches(self.model))
            return self
        except BaseException:
            self._active_run = None
            run.stack.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._active_run is not None:
                self._active_run.stack.close()
        finally:
            run, self._active_run = self._active_run, None
            if run is not None:
                run.stack.close()  # an interrupt stopped the first try: leave the remaining contexts
        if run is not None and kind is None:
            run.check_applied()


@dataclass(frozen=True, eq=False)
class _InterventionState:
    """The `HeadChange.state` of an intervention, equal for two that change the same heads in the same way.

    A head has the number of its layer ("L17 H4") or its name (a head that a record found). The name of a numbered layer
    is known once the layer has run in one of the two blocks, as it has when a cache is compared.

    Attributes:
        heads: head -> the numbers of the factor of its output.
        settings: the replacement, positions and samples of the intervention.
        layers: name of a layer that ran in the block -> its number; filled in while the block runs.
    """

    heads: Mapping[HeadKey, object]
    settings: tuple[object, ...]
    layers: Mapping[str, int]

    def __hash__(self) -> int:
        return hash(self.settings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _InterventionState) or self.settings != other.settings:
            return False
        return self._factors_by_layer_name(other.layers) == other._factors_by_layer_name(self.layers)

    def _factors_by_layer_name(self, more_layers: Mapping[str, int]) -> dict[tuple[int | str, int | None], object]:
        """Return (name of the layer, head) -> factor; a layer in neither list of layers keeps its number."""
        names = {number: name for layers in (more_layers, self.layers) for name, number in layers.items()}
        return {
            (key.layer if isinstance(key.layer, str) else names.get(key.layer, key.layer), key.head): factor
            for key, factor in self.heads.items()
        }


@dataclass(eq=False)
class _InterventionRun:
    """One `with` block in which an intervention is active.

    Attributes:
        intervention: the intervention.
        stack: the contexts to leave at the end.
        serial: a number that identifies the block in this process.
        reached_heads: the heads whose output was changed for at least one token.
        layers: name of a layer that ran -> its number.
    """

    intervention: Intervention
    stack: ExitStack = field(default_factory=ExitStack)
    serial: int = field(default_factory=_block_serials.__next__)
    reached_heads: dict[HeadKey, Tensor | bool] = field(default_factory=dict)
    layers: dict[str, int] = field(default_factory=dict)
    # name of a layer -> the result of `_heads_of_layer`
    _heads_of_layers: dict[str, tuple[list[HeadKey], LayerFactors] | None] = field(default_factory=dict)

    def change(self, call: FollowedCall, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Change the output of a call, (batch, heads, queries, value_dim), as `HeadChange.change_output` does."""
        self.layers.setdefault(call.layer_name, call.layer_number)
        if call.layer_name not in self._heads_of_layers:
            self._heads_of_layers[call.layer_name] = self._heads_of_layer(call)
        found = self._heads_of_layers[call.layer_name]
        if found is None:
            return output, None
        keys, factors_of_layer = found
        heads = factors_of_layer.heads.to(output.device)
        factors = factors_of_layer.of_queries(call, output)
        new, scales = self.intervention.replacement.replace(call, output, heads, factors)
        intervention = self.intervention
        where = None
        if intervention.replacement.needs_tokens or (intervention.positions, intervention.samples) != (None, None):
            where = chosen_queries(call, intervention.positions, intervention.samples)  # (batch, queries)
        if where is None:
            touched: Tensor | bool = output.numel() > 0
            of_query = scales
        else:
            touched = where.any()
            new = torch.where(where[:, None, :, None], new, output.index_select(1, heads))
            of_query = torch.where(where[:, None], scales, 1)  # (batch, heads, queries)
        for key in keys:
            self.reached_heads[key] = touched | self.reached_heads.get(key, False)
        # The numbers are equal for two calls only if both are changed in the same way.
        forward_pass = 0 if where is None and of_query.shape[-1] == 1 else call.forward_passes
        changed = mark_changed_output(output.index_copy(1, heads, new), self.serial, forward_pass, call.layer_number)
        ones = output.new_ones(len(of_query), output.shape[1], of_query.shape[-1])
        return changed, ones.index_copy(1, heads, of_query)

    def _heads_of_layer(self, call: FollowedCall) -> tuple[list[HeadKey], LayerFactors] | None:
        """Return the changed heads of a layer: their keys and factors; None if it has none."""
        count, keys = call.request.shape.num_heads, []
        chosen: dict[int, tuple[HeadFactor, bool]] = {}
        for key, factor in self.intervention.heads.items():
            if key.layer in (call.layer_number, call.layer_name):
                keys.append(key)
                for head in range(count) if key.head is None else [key.head]:
                    before, _ = chosen.setdefault(head, (factor, key.head is None))
                    require_one_factor(HeadKey(call.layer_number, head), before, factor)
        if not chosen:
            return None
        call.require_all_heads("heads cannot be switched off")
        require_head_of_layer(call.layer_number, call.layer_name, count, max(chosen))
        return keys, LayerFactors.of(chosen)

    def check_applied(self) -> None:
        """Raise a ModelError if the output of a named head was never changed in the block."""
        missed = [key for key in self.intervention.heads if not bool(self.reached_heads.get(key, False))]
        if not missed:
            return
        ran = join_first([f"L{number} {name}" for name, number in self.layers.items()], 4) or "none"
        raise ModelError(
            f"{', '.join(map(str, missed))} was never reached inside the context. The layers that ran are {ran}.",
            "Run the given model and not a copy of it, with inputs that reach these layers and have the positions and "
            "samples.",
        )


def chosen_queries(call: FollowedCall, positions: Positions, samples: Sequence[int] | None = None) -> Tensor:
    """Return the queries of a call whose output is changed, (batch, queries) bool; see `ablate`. None chooses all."""
    text, position = call.tokens
    where = position >= 0
    if isinstance(positions, slice):
        first, stop, step = positions.start or 0, positions.stop, positions.step or 1
        where = where & (position >= first) & ((position - first) % step == 0)
        where = where if stop is None else where & (position < stop)
    elif positions is not None:
        where = where & torch.isin(position, torch.tensor(positions, device=position.device))
    if samples is not None:
        where = where & torch.isin(text, torch.tensor(samples, device=text.device))
    return where


def _means_of_reference(model: nn.Module, reference: HeadMeans | Iterable[Any] | None, over: MeanOver) -> HeadMeans:
    """Return the means that replace the outputs of heads; compute them if `reference` consists of batches."""
    if over not in ("text", "position"):
        raise ArgumentError(f"mean_over is {over!r}.", 'Give "text" or "position".')
    if reference is None:
        raise ArgumentError(
            'by="mean" needs a reference.',
            "Give batches of the model's inputs as reference=, or what mh.head_means(model, batches) returns.",
        )
    if isinstance(reference, HeadMeans):
        if over not in (reference.over, "text"):
            raise ArgumentError(
                f"mean_over is {over!r}, and the reference has means over {reference.over!r}.",
                f'Compute it with mh.head_means(model, batches, over="{over}").',
            )
        return reference
    return head_means(model, reference, over=over)


def check_positions(positions: Any) -> tuple[int, ...] | slice | None:
    """Return positions as sorted ints or a slice; reject negative ones, because the end of a text may be unknown."""
    if isinstance(positions, slice):
        numbers = [each for each in (positions.start, positions.stop, positions.step) if each is not None]
        if any(not isinstance(each, int) or each < 0 for each in numbers) or positions.step == 0:
            raise ArgumentError(f"positions is {positions!r}.", "Give a slice from 0, such as slice(1, None).")
        return positions
    return _check_indices("positions", positions, "token")


def _check_indices(name: str, given: Any, item: str) -> tuple[int, ...] | None:
    """Return one or more indices of items, such as tokens, as sorted ints; None for all."""
    if given is None:
        return None
    found = list(given) if isinstance(given, Iterable) else [given]
    for each in found:
        check_integer(name, each, least=0)
    if not found:
        raise ArgumentError(f"{name} is empty.", f"Give the index of at least one {item}, or None for all.")
    return tuple(sorted(set(found)))
