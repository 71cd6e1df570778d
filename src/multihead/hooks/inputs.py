"""Record the inputs of a Hugging Face model: its token ids, and which of its tokens are padding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from multihead.hooks.huggingface import pretrained_models
from multihead.hooks.lazy_mask import LazyMask


@dataclass(frozen=True, eq=False)
class Given:
    """Inputs of one model in a forward pass.

    Attributes:
        ids: (batch, tokens), the token ids, or None.
        tokens: (batch, tokens including those of earlier calls) bool, True = no padding, or None where it is unknown.
    """

    ids: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(eq=False)
class Inputs:
    """Inputs of a model and of the models in it, updated while they run.

    Attributes:
        passes: number of forward passes that have started.
    """

    passes: int = 0
    _depth: int = 0
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _given: dict[str, Given] = field(default_factory=dict)
    _taken: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether a forward pass is running."""
        return self._depth > 0

    def queries_of(self, name: str) -> Given:
        """Return the inputs from which the queries of a layer are computed.

        A layer belongs to the innermost model around it that takes tokens. An encoder and a decoder are models of their
        own, so that each has its own ids and padding.
        """
        around = sorted((each for each in self._models if _holds(each, name)), key=len, reverse=True)
        for each in around:
            taken = self._parameters(each)
            if "input_ids" in taken or "inputs_embeds" in taken:
                inputs = self._given.get(each, Given())
                outer = next((other for other in around if len(other) < len(each)), None)
                if inputs.ids is None and outer is not None and not self._pairs(outer):
                    # A model of texts and images embeds the tokens itself and passes the embeddings to its inner model.
                    inputs = Given(self._given.get(outer, Given()).ids, inputs.tokens)
                return inputs
        return Given()

    def memory_of(self, name: str) -> Given:
        """Return the inputs of the encoder, for a cross-attention layer of an encoder-decoder model.

        While it decodes, such a model gets the output of its encoder and no ids: then the result is the last inputs of
        the encoder.
        """
        for each in sorted(self._models, key=len):
            model: Any = self._models[each]
            if _holds(each, name) and self._pairs(each):
                given = self._given.get(each, Given())
                if given.ids is not None:
                    return given
                encoder = model.get_encoder()
                inner = next((other for other, module in self._models.items() if module is encoder), None)
                return given if inner is None else self._given.get(inner, given)
        return Given()

    def _parameters(self, model: str) -> frozenset[str]:
        """Return the parameter names of a model's forward; cached, because every attention call needs them."""
        if model not in self._taken:
            self._taken[model] = frozenset(inspect.signature(self._models[model].forward).parameters)
        return self._taken[model]

    def _pairs(self, model: str) -> bool:
        """Whether a model is an encoder and a decoder: then its `input_ids` are the encoder's alone."""
        return "decoder_input_ids" in self._parameters(model)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._depth == 0:
            self.passes += 1
        self._depth += 1
        if name in self._models:
            self._given[name] = _given(module, args, kwargs)

    def _leave(self) -> None:
        self._depth = max(self._depth - 1, 0)


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[Inputs]:
    """Record the inputs of a model and of all Hugging Face models in it while the context is active."""
    inputs = Inputs(_models={"": model, **pretrained_models(model)})
    with ExitStack() as stack:
        for name, module in inputs._models.items():  # noqa: SLF001 - made here
            before, after = _hooks(inputs, name)
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(after, always_call=True).remove)
        yield inputs


def _hooks(inputs: Inputs, name: str) -> tuple[Any, Any]:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs._enter(name, module, args, kwargs)  # noqa: SLF001 - the hook is part of it

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        inputs._leave()  # noqa: SLF001

    return before, after


def _given(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return Given()  # the model itself will raise an error about its arguments
    ids, mask = bound.get("input_ids"), bound.get("attention_mask")
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    if isinstance(mask, LazyMask):
        mask = mask.padding
    tokens = mask.detach() != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
    return Given(ids.detach() if isinstance(ids, Tensor) and ids.dim() == 2 else None, tokens)


def _holds(outer: str, name: str) -> bool:
    return outer in ("", name) or name.startswith(f"{outer}.")
