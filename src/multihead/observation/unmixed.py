"""Run a model without attention, so that tokens do not mix, and compare the keys of its layers between such runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, ModelError
from multihead.errors.given import PIXELS
from multihead.kernels.call import AttentionRequest
from multihead.kernels.head_changes import apply_change
from multihead.models import huggingface
from multihead.models.pretrained import InputTracker, track_inputs
from multihead.observation.layer_names import LayerNamer, module_names
from multihead.tensors.tracing import original_module, run_uncompiled
from multihead.tensors.undo import Undo

FIRST_CALL = ("", 0)
"""In place of the name and number of calls of a layer: the run ends with the first attention call."""

_NUMBERS_PER_KEY = 4
_KEYS_AT_ONCE = 1024  # that are copied in float64
_UNUSED_INPUTS = ("labels", "output_attentions", "output_hidden_states")


class LayerKeys(NamedTuple):
    """The keys of a layer in one run.

    Attributes:
        sketch: (batch, keys, numbers) float64, random projections of each key, which differ where the key differs.
        tolerance: differences up to this part of the largest number can be rounding errors.
        unpadded: (batch, keys) bool, False for padding; None where padding is unknown.
        calls: number of calls that computed the keys, one per window.
    """

    sketch: Tensor
    tolerance: float
    unpadded: Tensor | None
    calls: int = 1

    def difference(self, other: LayerKeys) -> Tensor:
        """Return how much each key of two runs differs, (batch, keys) float64, as part of the largest number."""
        scale = self.sketch.abs().amax((0, 1)).clamp(min=torch.finfo(torch.float64).tiny)
        return ((self.sketch - other.sketch).abs() / scale).amax(2)

    def join(self, window: LayerKeys) -> LayerKeys:
        """Append the keys of a further window of the same samples."""
        both = None
        if self.unpadded is not None and window.unpadded is not None:
            both = torch.cat([self.unpadded, window.unpadded], 1)
        return LayerKeys(torch.cat([self.sketch, window.sketch], 1), self.tolerance, both, self.calls + 1)


class TokenNoise(NamedTuple):
    """Noise in place of the zeros that the attention of a layer returns without attention, for some of its tokens.

    Attributes:
        layer: name of the layer.
        tokens: (batch, tokens) bool.
        seed: of the noise.
    """

    layer: str
    tokens: Tensor
    seed: int


class _LayerReachedError(Exception):
    """Ends a run when the keys of the last layer that is asked for are known."""


@dataclass(eq=False)
class _KeyReader:
    """The `HeadChange` that reads the keys of each call and sets its output to 0."""

    inputs: InputTracker
    names: dict[int, str]
    last: tuple[str, int] | None  # the layer that ends the run, and its number of calls
    noise: TokenNoise | None = None
    found: dict[str, LayerKeys] = field(default_factory=dict)
    newest: Tensor = field(default_factory=partial(torch.empty, (0,) * 4))  # keys of the last call with a graph
    state: object = None

    def __post_init__(self) -> None:
        self._namer = LayerNamer(self.names, self.inputs)

    def applies_to(self, module: nn.Module) -> bool:
        """Whether a module is the model or a part of it, and runs in this thread."""
        return id(module) in self.names and self.inputs.is_recording

    def replace_attention(self, request: AttentionRequest) -> Tensor:
        """Read the keys of a call, and return zeros in place of its attention, which is not computed."""
        output = request.q.new_zeros((*request.q.shape[:3], request.shape.value_dim))
        return self.change_output(request, output)[0]

    def change_output(self, request: AttentionRequest, output: Tensor) -> tuple[Tensor, Tensor | None]:
        """Read the keys of a call, and return zeros as its output."""
        self._namer.begins_pass()
        name, keys = self._namer.name_call(request, request.known_origin.layer), _read_keys(request)
        before = self.found.pop(name, None)  # the last one of `found` is that of the last call
        begin = before.sketch.shape[1] if before is not None and self._namer.is_further_window else 0
        keys = before.join(keys) if before is not None and begin else keys
        self.found[name], self.newest = keys, request.k if request.k.requires_grad else self.newest
        if self.last in ((name, keys.calls), FIRST_CALL):
            raise _LayerReachedError
        if self.noise is None or self.noise.layer != name:
            return torch.zeros_like(output), None
        random = torch.Generator().manual_seed(self.noise.seed + begin)
        tokens = self.noise.tokens[:, begin : begin + output.shape[2]].to(output.device)
        return torch.rand(output.shape, generator=random).to(output) * tokens[:, None, :, None], None


def _read_keys(request: AttentionRequest) -> LayerKeys:
    k, places = request.k.detach().transpose(1, 2).flatten(2), request.known_origin.key_places
    random = _projections(k.shape[2]).to(k.device)
    return LayerKeys(
        torch.cat([part.double() @ random for part in k.split(_KEYS_AT_ONCE, 1)], 1),
        torch.finfo(k.dtype).eps ** 0.75,
        None if places is None else places.padding,
    )


@lru_cache
def _projections(width: int) -> Tensor:
    """Return random directions, (width, numbers per key) float64, the same ones each time."""
    return torch.randn(width, _NUMBERS_PER_KEY, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


@dataclass(eq=False)
class UnmixedModel:
    """A model whose attention is off, and the inputs of one of its calls; each run begins with the same random state.

    Attributes:
        model: the model, in eval mode in this context.
        inputs: the arguments of its call.
        random_state: the state of torch's random numbers when the call began.
        tracker: counts the forward passes of the model.
        names: id(module) -> name, for all modules of the model.
        report: called with the numbers of runs so far, and of those that are expected, before each run.
        runs: number of runs so far.
        expected: number of runs that are expected.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    random_state: Tensor
    tracker: InputTracker
    names: dict[int, str]
    report: Callable[[int, int], None]
    runs: int = 0
    expected: int = 0

    @torch.no_grad()
    def keys(
        self, changed: Mapping[str, Tensor], last: tuple[str, int] | None = None, noise: TokenNoise | None = None
    ) -> dict[str, LayerKeys]:
        """Run the model with some inputs changed, and return the keys of its layers by name, in the order they ended.

        Args:
            changed: the inputs that differ from those of the call.
            last: name and number of calls of the layer after which the run ends; None runs the whole model.
            noise: changes tokens of a layer, too.
        """
        return self._run(changed, last, noise).found

    @contextmanager
    def stored_blocks(self, layer: str, last: tuple[str, int]) -> Iterator[None]:
        """Leave out the blocks before the one that contains a layer: they return their outputs of the unchanged run."""
        parents = [layer.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        modules = [self.model.get_submodule(name) for name in parents]
        blocks = next((module for module in modules if isinstance(module, nn.ModuleList)), nn.ModuleList())
        inside = next((n for n, block in enumerate(blocks) if block in modules), 0)
        outputs: dict[int, Any] = {}
        with Undo() as undo:
            for number, block in enumerate(list(blocks)[:inside]):
                undo.hook_after_forward(block, lambda *args, number=number: outputs.update({number: args[-1]}))
            self.keys({}, last)
        with Undo() as undo:
            for number, output in outputs.items():
                undo.replace_method(blocks[number], "forward", lambda *_args, output=output, **_kwargs: output)
            yield

    def _run(
        self, changed: Mapping[str, Tensor], last: tuple[str, int] | None, noise: TokenNoise | None = None
    ) -> _KeyReader:
        self.expected = max(self.expected, self.runs + 1)
        self.report(self.runs, self.expected)
        self.runs += 1
        torch.set_rng_state(self.random_state)
        reader = _KeyReader(self.tracker, self.names, last, noise)
        with apply_change(reader), suppress(_LayerReachedError):
            given = {**self.inputs, **changed}  # pixels that were expanded from one column take memory in a run only
            self.model(**{name: each.contiguous() if name == PIXELS else each for name, each in given.items()})
        return reader

    def own_tokens(self, last: tuple[str, int], placed: Tensor) -> dict[str, Tensor]:
        """Find the parameters that are tokens of the model: keys depend on them that come from no picture.

        Args:
            last: name and number of calls of the layer whose keys are read.
            placed: (batch, keys) bool, the keys that come from pictures.

        Returns:
            name of a parameter -> the keys that depend on it, (keys,) bool.
        """
        own = [each for each in self.model.modules() if not type(each).__module__.startswith("torch.")]
        known = [
            (module, name, parameter)
            for module in own
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.is_floating_point()
        ]
        parameters = [parameter for *_, parameter in known]
        with torch.enable_grad(), Undo() as undo:
            for parameter in parameters:
                undo.set_attribute(parameter, "requires_grad", value=True)
            keys = self._run({}, last).newest.transpose(1, 2).flatten(2)
            if not known or keys.shape[:2] != placed.shape:
                return {}
            random = torch.rand(keys.shape, generator=torch.Generator().manual_seed(7)).to(keys)
            decides = []  # per kind of keys, whether each parameter decides some of them
            for some in (placed, ~placed):
                weights = random.masked_fill(~some[:, :, None].to(keys.device), 0)
                gradients = torch.autograd.grad(keys, parameters, weights, retain_graph=True, allow_unused=True)
                decides.append([each is not None and bool(each.any()) for each in gradients])
            del keys, random, weights, gradients  # and the graph
        base, found = self.keys({}, last)[last[0]], {}
        for (module, name, parameter), of_picture, of_other in zip(known, *decides, strict=True):
            if of_picture or not of_other:
                continue
            with Undo() as undo:  # a new parameter, because graphs of the caller may hold this one
                undo.set_attribute(module, name, nn.Parameter(torch.rand_like(parameter), requires_grad=False))
                found[name] = (self.keys({}, last)[last[0]].difference(base) > 0).any(0)
        return found


@contextmanager
def without_attention(
    model: nn.Module,
    inputs: Mapping[str, Any],
    random_state: Tensor | None = None,
    report: Callable[[int, int], None] = lambda done, expected: None,
) -> Iterator[UnmixedModel]:
    """Put a model in eval mode, and restore its mode and torch's random state afterwards.

    Args:
        model: the model.
        inputs: the arguments of its call; outputs that are not needed and an empty cache are left out.
        random_state: the state of torch's random numbers when the call began; None takes the current one.
        report: called with the numbers of runs so far, and of those that are expected, before each run.

    Raises:
        ArgumentError: the call continues a cache.
    """
    root = original_module(model)
    kept = {name: value for name, value in inputs.items() if name not in _UNUSED_INPUTS}
    for name, value in inputs.items():
        if hasattr(value, "get_seq_length"):
            if value.get_seq_length():
                raise ArgumentError(
                    f"{name} holds {int(value.get_seq_length())} tokens, so the call continues an earlier one.",
                    "Give the inputs of the call that reads the pictures.",
                )
            del kept[name]
    if "use_cache" in inspect.signature(root.forward).parameters:
        kept["use_cache"] = False
    state = torch.get_rng_state() if random_state is None else random_state
    with (
        torch.random.fork_rng(devices=[]),
        Undo() as undo,
        huggingface.install(root, lambda _: None),
        run_uncompiled(),
        track_inputs(root) as tracker,
    ):
        for module in root.modules():
            undo.set_attribute(module, "training", value=False)
        yield UnmixedModel(root, kept, state, tracker, module_names(root), report)


def check_repeatable(first: Mapping[str, LayerKeys], again: Mapping[str, LayerKeys]) -> None:
    """Check that two equal runs have equal keys.

    Raises:
        ModelError: there are no keys, or they are not finite, or differ.
    """
    reason = None
    if not first:
        reason = "no attention call was captured"
    elif unlike := unlike_layers(first, again):
        reason = f"the number of keys of {unlike} changes from run to run"
    else:
        for name, keys in first.items():
            if not bool(keys.sketch.isfinite().all()):
                reason = f"keys of {name} are NaN or infinite without attention"
            elif bool(keys.difference(again[name]).any()):
                reason = f"keys of {name} change from run to run with equal inputs and equal random numbers"
            if reason is not None:
                break
    if reason is not None:
        raise ModelError(
            f"The tokens have no places in pictures: {reason}.",
            "Observe the model without processor=, or give a model and inputs that run alike each time.",
        )


def unlike_layers(first: Mapping[str, LayerKeys], again: Mapping[str, LayerKeys]) -> str:
    """Return the name of the first layer that is missing or has another number of keys in one of two runs, or ""."""
    for name in {**first, **again}:
        shapes = [None if run.get(name) is None else run[name].sketch.shape for run in (first, again)]
        if shapes[0] != shapes[1]:
            return name
    return ""
