"""The models of transformers in a module: their names, their cross-attention layers, and the inputs they receive."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from multihead.kernels.call import CallOrigin
from multihead.models.lazy_mask import LazyMask
from multihead.tensors.undo import Undo


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the Hugging Face models in a module, itself included, by qualified name."""
    if "transformers" not in sys.modules:
        return {}  # without transformers no such model can exist
    from transformers import PreTrainedModel

    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


def is_within(name: str, other: str) -> bool:
    """Whether the module `name` is the module `other`, or a part of it.

    >>> is_within("encoder.layer.0", "encoder"), is_within("encoder2", "encoder"), is_within("encoder", "")
    (True, False, True)
    """
    return not other or f"{name}.".startswith(f"{other}.")


def innermost_model(name: str, models: Iterable[str]) -> str | None:
    """Return the name of the innermost of some models around a module, itself included; None if there is none."""
    return max((each for each in models if is_within(name, each)), key=len, default=None)


def is_cross_attention_call(origin: CallOrigin, name: str) -> bool:
    """Whether the keys of a call come from another sequence than its queries: its origin says so, or else its layer.

    Args:
        origin: where the call comes from.
        name: the qualified name of the layer.
    """
    return is_cross_attention(origin.layer, name) if origin.crosses is None else origin.crosses


def is_cross_attention(module: nn.Module, name: str = "") -> bool:
    """Whether the keys of an attention layer come from another sequence than its queries, by its flag or its names."""
    if isinstance(flag := getattr(module, "is_cross_attention", None), bool):
        return flag
    names = f"{name}.{type(module).__name__}"
    return re.search("cross|encdec|encoder_attn", names, re.IGNORECASE) is not None


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Inputs of one model in a forward pass.

    Attributes:
        ids: (batch, tokens) int64, a copy of the token ids on the CPU, or None.
        tokens: (batch, tokens including those of earlier calls) bool, True = no padding, or None where it is unknown.
        batches: batch size of its main input, then of every input; () where it is unknown, as in models that are not
            from Hugging Face.
    """

    ids: Tensor | None = None
    tokens: Tensor | None = None
    batches: tuple[int, ...] = ()


@dataclass(eq=False)
class _TrackedModel:
    """A model that may take tokens.

    Attributes:
        prefix: its qualified name and a dot; "" for the outermost model.
        module: the model.
        signature: that of its forward.
        given: its newest inputs.
    """

    prefix: str
    module: nn.Module
    signature: inspect.Signature
    given: TokenInputs = TokenInputs()

    @property
    def takes_tokens(self) -> bool:
        """Whether its inputs are token ids or their embeddings."""
        return not self.signature.parameters.keys().isdisjoint(("input_ids", "inputs_embeds"))

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder: then its `input_ids` are the encoder's alone."""
        return "decoder_input_ids" in self.signature.parameters


@dataclass(eq=False)
class InputTracker:
    """Inputs of a model and of the models in it, updated while they run.

    Attributes:
        passes: number of forward passes that have started.
        any_ids: whether any model was called with token ids.
    """

    passes: int = 0
    any_ids: bool = False
    _depth: int = 0
    _models: list[_TrackedModel] = field(default_factory=list)  # a model comes before the models in it

    @property
    def is_running(self) -> bool:
        """Whether a forward pass is running."""
        return self._depth > 0

    def inputs_of_queries(self, name: str) -> TokenInputs:
        """Return the inputs from which the queries of a layer are computed.

        A layer belongs to the innermost model around it that takes tokens. An encoder and a decoder are models of their
        own, so that each has its own ids and padding.
        """
        found: TokenInputs | None = None
        for model in reversed(self._models):
            if not f"{name}.".startswith(model.prefix):
                continue
            if found is not None:
                # A model of texts and images embeds the tokens itself and passes the embeddings to its inner model.
                return found if model.is_encoder_decoder else TokenInputs(model.given.ids, found.tokens)
            if model.takes_tokens:
                found = model.given
                if found.ids is not None:
                    return found
            elif model.prefix:
                return TokenInputs()  # an image or sound encoder: its queries are not the tokens of the model around it
        return TokenInputs() if found is None else found

    def rows_per_sample(self, name: str, rows: int) -> int:
        """Return how many rows of a batch in a layer belong to each sample of the innermost model around it.

        That is 1 where the model's batch is unknown, or where one of its inputs has as many rows.
        """
        around = (model for model in reversed(self._models) if f"{name}.".startswith(model.prefix))
        batch, *others = next((model.given.batches for model in around), ()) or (rows,)
        return 1 if not self.is_running or not batch or rows in others or rows % batch else max(rows // batch, 1)

    def encoder_inputs(self, name: str) -> TokenInputs:
        """Return the inputs of the encoder, for a cross-attention layer of an encoder-decoder model.

        While it decodes, such a model gets the output of its encoder and no ids: then the result is the last inputs of
        the encoder.
        """
        for model in self._models:
            if f"{name}.".startswith(model.prefix) and model.is_encoder_decoder:
                if model.given.ids is not None:
                    return model.given
                whole: Any = model.module
                encoder = whole.get_encoder()
                return next((each.given for each in self._models if each.module is encoder), model.given)
        return TokenInputs()

    def begin_pass(
        self, model: _TrackedModel, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Receive the arguments of a model that is about to run; torch omits `kwargs` while it adds the hook."""
        if self not in _receiving.get():
            return  # another thread runs the model, whose calls the listeners of this one do not receive
        self.passes += self._depth == 0
        self._depth += 1
        model.given = _read_token_inputs(model, args, kwargs or {})
        self.any_ids |= model.given.ids is not None

    def end_pass(self, *_: object) -> None:
        """Count a model that has run."""
        if self in _receiving.get():
            self._depth = max(self._depth - 1, 0)


_receiving: ContextVar[tuple[InputTracker, ...]] = ContextVar("receiving", default=())


@contextmanager
def recorded_inputs(model: nn.Module) -> Iterator[InputTracker]:
    """Record the inputs of a model and of all Hugging Face models in it, in this context and in no other thread."""
    inputs = InputTracker()
    with Undo() as undo:
        undo.callback(lambda: _receiving.set(tuple(each for each in _receiving.get() if each is not inputs)))
        _receiving.set((*_receiving.get(), inputs))
        for name, module in {"": model, **pretrained_models(model)}.items():
            each = _TrackedModel(name and f"{name}.", module, _parameters_of_forward(module))
            inputs._models.append(each)  # noqa: SLF001 - made here
            undo.hook_before_forward(module, partial(inputs.begin_pass, each), with_kwargs=True, prepend=True)
            undo.hook_after_forward(module, inputs.end_pass, always_call=True)
        yield inputs


def _parameters_of_forward(module: nn.Module) -> inspect.Signature:
    """Return the parameters of a module's forward; those of a class are read once, which takes a tenth of a ms."""
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__func__ is type(module).forward:
        return _signature_of_method(forward.__func__)
    return inspect.signature(forward)  # the instance has a forward of its own


@lru_cache(maxsize=256)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=tuple(signature.parameters.values())[1:])  # without self


def _read_token_inputs(model: _TrackedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenInputs:
    try:
        bound = model.signature.bind_partial(*args, **kwargs).arguments
    except TypeError:
        return TokenInputs()  # the model itself will raise an error about its arguments
    ids, mask = bound.get("input_ids"), bound.get("attention_mask")
    if isinstance(mask, dict):
        mask = next(iter(mask.values()), None)
    if isinstance(mask, LazyMask):
        mask = mask.padding
    tokens = mask.detach() != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
    # The batch is the first axis in Hugging Face models, which have this attribute; elsewhere it may be another one.
    main = getattr(model.module, "main_input_name", None)
    lengths = {key: len(each) for key, each in bound.items() if isinstance(each, Tensor) and each.dim() > 1}
    batches = (
        () if main is None or not lengths else (lengths.get(main, next(iter(lengths.values()))), *lengths.values())
    )
    if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        return TokenInputs(None, tokens, batches)
    return TokenInputs(ids.detach().to("cpu", torch.int64, copy=True), tokens, batches)
