"""Notice what a Hugging Face model is given: its token ids, and which of its tokens are padding."""

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
    """What one model in a forward pass was given.

    Fields:
        ids: (batch, tokens), the token ids, or None.
        tokens: (batch, tokens so far) bool, True = no padding, or None where nothing says.
    """

    ids: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(eq=False)
class Inputs:
    """What the models of a tree are given, while they run.

    Fields:
        passes: how many forward passes began.
    """

    passes: int = 0
    _depth: int = 0
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _given: dict[str, Given] = field(default_factory=dict)
    _taken: dict[str, frozenset[str]] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether a forward pass runs now."""
        return self._depth > 0

    def queries_of(self, name: str) -> Given:
        """Say what the sequence was that a layer's queries are made of.

        A layer belongs to the innermost model around it that takes tokens: an encoder and a decoder are models
        of their own, and so each is told apart from the other's ids and padding.
        """
        around = sorted((each for each in self._models if _holds(each, name)), key=len, reverse=True)
        for each in around:
            taken = self._parameters(each)
            if "input_ids" in taken or "inputs_embeds" in taken:
                found = self._given.get(each, Given())
                outer = next((other for other in around if len(other) < len(each)), None)
                if found.ids is None and outer is not None and not self._pairs(outer):
                    # A model of texts and images embeds the tokens itself and hands on what came of it.
                    found = Given(self._given.get(outer, Given()).ids, found.tokens)
                return found
        return Given()

    def memory_of(self, name: str) -> Given:
        """Say what the encoder's sequence was, for a cross-attention layer of an encoder-decoder model.

        While it decodes such a model is given what its encoder made, and no ids: then those that the encoder was
        given last are meant.
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
        """Name what a model's forward takes; looked up once, since every attention call asks."""
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
def noticed(model: nn.Module) -> Iterator[Inputs]:
    """Notice the inputs of a model and of all Hugging Face models in it while the context lasts."""
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
        return Given()  # the model itself will say what is wrong with its arguments
    ids, mask = bound.get("input_ids"), bound.get("attention_mask")
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    if isinstance(mask, LazyMask):
        mask = mask.padding
    tokens = mask.detach() != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
    return Given(ids.detach() if isinstance(ids, Tensor) and ids.dim() == 2 else None, tokens)


def _holds(outer: str, name: str) -> bool:
    return outer in ("", name) or name.startswith(f"{outer}.")
