"""Find the models of transformers in a module and their cross-attention layers, and track their token inputs."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from multihead.kernels.call import AttentionRequest, CachedSequence, CallOrigin
from multihead.kernels.dense_tile import positions_of_queries, visible_cells
from multihead.models.generation import GeneratedPass, GeneratedText, Generation, follow_generation
from multihead.models.lazy_mask import LazyMask
from multihead.tensors.undo import Undo

WHOLE_MASK = "attention_mask has a value per query and key, and hides padding or separates texts"
KNOWN_TEXTS = (
    "Give an attention_mask of shape (batch, tokens), or position_ids that restart with use_cache=False and no "
    "attention_mask."
)
"""What is said, and advised, where the texts of a call are unknown."""


def pretrained_models(model: nn.Module) -> dict[str, nn.Module]:
    """Return the Hugging Face models in a module, itself included, by qualified name."""
    if "transformers" not in sys.modules:
        return {}  # transformers is not imported, so no model of it can exist
    from transformers import PreTrainedModel

    return {name: module for name, module in model.named_modules() if isinstance(module, PreTrainedModel)}


def is_submodule_of(name: str, other: str) -> bool:
    """Whether the module with qualified name `name` is the module `other` or a submodule of it.

    >>> (
    ...     is_submodule_of("encoder.layer.0", "encoder"),
    ...     is_submodule_of("encoder2", "encoder"),
    ...     is_submodule_of("encoder", ""),
    ... )
    (True, False, True)
    """
    return not other or f"{name}.".startswith(f"{other}.")


def innermost_model(name: str, models: Iterable[str]) -> str | None:
    """Return the name of the innermost model that contains (or is) the module `name`; None if none does."""
    return max((each for each in models if is_submodule_of(name, each)), key=len, default=None)


def is_cross_attention_call(origin: CallOrigin, name: str) -> bool:
    """Whether the keys of a call come from another sequence than its queries.

    Args:
        origin: the call's layer, and whether it said that this is cross-attention; else its modules and name decide.
        name: the qualified name of the layer.
    """
    return is_cross_attention(origin.layer, name) if origin.is_cross_attention is None else origin.is_cross_attention


def is_cross_attention(module: nn.Module, name: str = "") -> bool:
    """Whether a layer is cross-attention, by its attribute `is_cross_attention`, or else by its name and class."""
    if isinstance(flag := getattr(module, "is_cross_attention", None), bool):
        return flag
    names = f"{name}.{type(module).__name__}"
    return re.search("cross|encdec|encoder_attn", names, re.IGNORECASE) is not None


def alignment_heads(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the alignment heads of the models in a module: qualified name of a cross-attention layer -> its heads.

    Whisper's generation config lists these heads as [decoder layer, head], and Whisper computes word timestamps from
    them (https://github.com/openai/whisper). An entry that names no layer or head of the model is left out.
    """
    found: dict[str, set[int]] = {}
    for prefix, module in pretrained_models(model).items():
        whole: Any = module
        listed = getattr(getattr(module, "generation_config", None), "alignment_heads", None)
        if not isinstance(listed, Sequence) or not getattr(module.config, "is_encoder_decoder", False):
            continue
        layers = [getattr(layer, "encoder_attn", None) for layer in getattr(whole.get_decoder(), "layers", ())]
        names = {id(part): f"{prefix}.{name}".strip(".") for name, part in whole.named_modules()}
        for entry in listed:
            layer, head = entry if isinstance(entry, Sequence) and len(entry) == 2 else (-1, -1)
            if not (isinstance(layer, int) and isinstance(head, int) and 0 <= layer < len(layers)):
                continue
            crossing = layers[layer]
            if crossing is not None and 0 <= head < int(getattr(crossing, "num_heads", 0)):
                found.setdefault(names[id(crossing)], set()).add(head)
    return {name: tuple(sorted(heads)) for name, heads in found.items()}


@dataclass(frozen=True, eq=False)
class TokenInputs:
    """Token inputs of one model in a forward pass.

    Attributes:
        ids: (batch, tokens) int64, a copy of the token ids on the CPU; None if the model received none.
        is_token: (batch, cached and new tokens) bool, False for padding; None where padding is unknown.
        batch_sizes: batch size of the main input, then of every input; () where unknown, as in models that are not from
            Hugging Face.
        has_whole_mask: whether the attention mask has a value per query and key, so that it may hide padding or
            separate texts in ways that only its values show.
        num_tokens: number of tokens per row that the model reads, those of the decoder if it has one; 0 if unknown.
        num_cached: number of tokens per row in the cache that it received.
        sequence: the sequences that the pass begins or continues.
    """

    ids: Tensor | None = None
    is_token: Tensor | None = None
    batch_sizes: tuple[int, ...] = ()
    has_whole_mask: bool = False
    num_tokens: int = 0
    num_cached: int = 0
    sequence: CachedSequence = field(default_factory=CachedSequence)


@dataclass(eq=False)
class _TrackedModel:
    """A model whose inputs are recorded.

    Attributes:
        prefix: qualified name of the model and a dot; "" for the outermost model.
        module: the model.
        signature: signature of its forward.
        newest_inputs: inputs of its newest forward pass.
    """

    prefix: str
    module: Any
    signature: inspect.Signature
    newest_inputs: TokenInputs = field(default_factory=TokenInputs)
    token_names = ("input_ids", "inputs_embeds")

    @property
    def takes_tokens(self) -> bool:
        """Whether the model takes token ids or embeddings of tokens."""
        return not self.signature.parameters.keys().isdisjoint(self.token_names)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder and a decoder, so that its `input_ids` are those of the encoder."""
        return "decoder_input_ids" in self.signature.parameters


@dataclass(eq=False)
class InputTracker:
    """Token inputs of a model and of the models inside it, updated by hooks during each forward pass.

    Attributes:
        num_passes: number of forward passes that have started.
        generation: the call of `generate` that runs; None if none does.
        generated_pass: the pass of `generate` that runs; None if none does.
        is_aside: whether a pass runs that is no part of the texts that `generate` returns.
        on_texts: takes the texts that `generate` has returned; None if nobody needs them.
    """

    num_passes: int = 0
    generation: Generation | None = None
    generated_pass: GeneratedPass | None = None
    is_aside: bool = False
    on_texts: Callable[[list[GeneratedText]], None] | None = None
    _nesting_depth: int = 0
    _depth_of_generation: int = 0  # number of passes around `generate`; 0 without it
    _sequences: WeakKeyDictionary[Any, CachedSequence] = field(default_factory=WeakKeyDictionary)  # by cache
    _models: list[_TrackedModel] = field(default_factory=list)  # outer models come before inner ones

    @property
    def is_running(self) -> bool:
        """Whether a forward pass of the outermost model is running."""
        return self._nesting_depth > 0

    @property
    def is_recording(self) -> bool:
        """Whether forward passes in this thread and context are recorded."""
        return self in _active_trackers.get()

    def _models_around(self, name: str) -> Iterator[_TrackedModel]:
        """Yield the models that contain a layer, the innermost first."""
        return (model for model in reversed(self._models) if f"{name}.".startswith(model.prefix))

    def inputs_of_queries(self, name: str) -> TokenInputs:
        """Return the token inputs of the model from which the queries of a layer are computed.

        The result is that of the innermost model that contains the layer and takes tokens. An encoder and a decoder
        are separate models, each with its own token ids and padding.
        """
        found: TokenInputs | None = None
        for model in self._models_around(name):
            if found is not None:
                # A model of texts and images embeds the tokens and passes only embeddings to its inner model.
                return (
                    found if model.is_encoder_decoder else replace(found, ids=model.newest_inputs.ids, batch_sizes=())
                )
            if model.takes_tokens:
                found = model.newest_inputs
                if found.ids is not None:
                    return found
            elif model.prefix:
                return TokenInputs()  # an image or audio encoder: its queries are not text tokens
        return TokenInputs() if found is None else found

    def sequence_of_queries(self, name: str) -> tuple[CachedSequence, int]:
        """Return the sequences that the model around a layer reads, and how many tokens of each are in its cache."""
        around = [model.newest_inputs for model in self._models_around(name)]
        found = next((inputs for inputs in around if inputs.num_cached), around[0])
        return found.sequence, found.num_cached

    def reads_tokens(self, name: str) -> bool:
        """Whether the queries of a layer are tokens that its model receives, and not parts of an image or audio."""
        innermost = next((model for model in self._models_around(name) if model.prefix or model.takes_tokens), None)
        return innermost is not None and innermost.takes_tokens

    def rows_per_prompt(self, name: str, rows: int) -> int:
        """Return how many consecutive rows of a layer's batch continue one prompt of `generate`."""
        return 1 if self.generation is None or not self.reads_tokens(name) else self.generation.rows_per_prompt(rows)

    def rows_per_sample(self, name: str, rows: int) -> int:
        """Return how many batch rows of a layer belong to each sample of the innermost model that contains the layer.

        The result is 1 where the batch size of the model is unknown, or where one of its inputs has `rows` rows.
        """
        batch, *others = next((model.newest_inputs.batch_sizes for model in self._models_around(name)), ()) or (rows,)
        return 1 if not self.is_running or not batch or rows in others or rows % batch else max(rows // batch, 1)

    def tokens_until_query(
        self, name: str, request: AttentionRequest, key_offset: int, on_cpu: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor | None:
        """Return which tokens up to the last query of a Hugging Face call are not padding.

        Args:
            name: the qualified name of the layer.
            request: the call.
            key_offset: position of the call's first key in the sequence.
            on_cpu: returns a tensor on the CPU, where the result is then; None: it is on the device of the call.

        Returns:
            (batch, tokens) bool, whose last `queries` columns are the queries of the call; None if unknown.
        """
        tokens, shape = self.inputs_of_queries(name).is_token, request.shape
        if tokens is None or tokens.shape[0] != shape.batch or tokens.shape[1] < shape.query_length:
            return None
        stop = min(key_offset + int(request.query_start) + shape.query_length, tokens.shape[1])
        # All layers of a pass get the same tensor, so that nobody compares its values to find that out.
        tokens = tokens if on_cpu is None else on_cpu(tokens)
        tokens = tokens if stop == tokens.shape[1] else tokens[:, :stop]
        return tokens.to(shape.device) if on_cpu is None else tokens

    def are_texts_known(self, name: str, request: AttentionRequest) -> bool:
        """Whether it is known which queries of a layer belong to which text.

        It is not if the caller's attention mask has a value per query and key, unless it hides no key from all queries
        and no part of the row from the rest of it: then each row is one text. Values are read only for such a mask.

        Args:
            name: the qualified name of the layer.
            request: the call.
        """
        shape = request.shape
        if request.known_origin.key_places is None or not self.inputs_of_queries(name).has_whole_mask:
            return True
        if not shape.query_length or not shape.key_length:
            return True
        seen = visible_cells(request).any(1).expand(-1, shape.query_length, shape.key_length)
        first = seen.int().argmax(2).masked_fill(~seen.any(2), shape.key_length)  # (batch or 1, queries)
        least_after = first.flip(1).cummin(1).values.flip(1)  # the first key that this query or a later one sees
        position = positions_of_queries(request)
        joined = (least_after < position) | (position <= 0)
        return bool(joined.all()) and bool(seen[:, :, [0, -1]].any(1).all())

    def encoder_inputs(self, name: str) -> TokenInputs:
        """Return the inputs of the encoder, for the cross-attention layer `name` of an encoder-decoder model.

        During decoding the model receives the encoder's output and no token ids; the result is then the last inputs of
        the encoder.
        """
        for model in self._models:
            if f"{name}.".startswith(model.prefix) and model.is_encoder_decoder:
                if model.newest_inputs.ids is not None:
                    return model.newest_inputs
                encoder = getattr(model.module, "get_encoder", lambda: None)()  # a model of one's own may lack it
                return next(
                    (each.newest_inputs for each in self._models if each.module is encoder), model.newest_inputs
                )
        return TokenInputs()

    def begin_pass(
        self, model: _TrackedModel, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Forward pre-hook that stores a model's token inputs; torch may call it without `kwargs` as it is added."""
        if not self.is_recording:
            return  # the model runs in another thread, whose attention calls are not recorded either
        is_outermost = self._nesting_depth == self._depth_of_generation
        self.num_passes += is_outermost
        self._nesting_depth += 1
        model.newest_inputs = self._read_token_inputs(model, args, kwargs or {})
        if is_outermost and self.generation is not None and self.generation.holds_rows:
            self._begin_generated_pass(self.generation, model)

    def _read_token_inputs(self, model: _TrackedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TokenInputs:
        try:
            bound = model.signature.bind_partial(*args, **kwargs).arguments
        except TypeError:
            return TokenInputs()  # wrong arguments: the model itself will raise an error
        ids, mask = bound.get("input_ids"), first_layer_type_mask(bound.get("attention_mask"))
        whole = isinstance(mask, Tensor) and mask.dim() > 2 and mask.shape[-2] > 1 and not isinstance(mask, LazyMask)
        if isinstance(mask, LazyMask):
            mask = mask.padding if mask.is_token is None else mask.is_token
        tokens = mask.detach() != 0 if isinstance(mask, Tensor) and mask.dim() == 2 else None
        # The first axis of inputs is the batch in Hugging Face models, which have `main_input_name`; in others it may
        # not be.
        main = getattr(model.module, "main_input_name", None)
        given = {key: each for key, each in bound.items() if isinstance(each, Tensor) and each.dim() > 1}
        batches = tuple(each.size(0) for each in given.values())  # a nested tensor has no len
        if batches:
            batches = () if main is None else (given[main].size(0) if main in given else batches[0], *batches)
        decoded = ("decoder_input_ids", "decoder_inputs_embeds") if model.is_encoder_decoder else model.token_names
        num_tokens = next((given[name].size(1) for name in decoded if name in given), 0)
        cache = _find_cache([*bound.values(), *bound.get("kwargs", {}).values()])
        num_cached = 0 if cache is None else int(cache.get_seq_length())
        sequence = CachedSequence()
        if cache is not None:
            # An empty cache begins new sequences, even if it held others before.
            sequence = self._sequences.get(cache, sequence) if num_cached else sequence
            self._sequences[cache] = sequence
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
            ids = None
        read = None if ids is None else ids.detach().to("cpu", torch.int64, copy=True)
        return TokenInputs(read, tokens, batches, whole, num_tokens, num_cached, sequence)

    def end_pass(self, model: _TrackedModel, _: nn.Module, __: object, output: object = None) -> None:
        """Forward hook that marks the end of a model's forward pass, and finds the cache that the pass has made."""
        if not self.is_recording:
            return
        self._nesting_depth = max(self._nesting_depth - 1, 0)
        cache = _find_cache(
            output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
        )
        if cache is not None and cache not in self._sequences:
            self._sequences[cache] = model.newest_inputs.sequence
        if self._nesting_depth <= self._depth_of_generation:
            self.generated_pass, self.is_aside = None, False

    def _begin_generated_pass(self, generation: Generation, model: _TrackedModel) -> None:
        """Find out what a pass inside of `generate` is."""
        inputs, module = model.newest_inputs, model.module
        # Where only a part of the model that generates is tracked, its passes are those of the whole.
        tracked = any(each.module is generation.model for each in self._models)
        own = module is generation.model or (not tracked and model.takes_tokens)
        if generation.nested or own:
            # The padding of an encoder-decoder is that of what its encoder reads.
            is_token = None if model.is_encoder_decoder else inputs.is_token
            self.generated_pass = generation.begin_pass(inputs.num_tokens, inputs.num_cached, is_token)
            self.is_aside = self.generated_pass is None

    def follows(self, model: nn.Module) -> bool:
        """Whether a model is tracked, or a tracked one is a part of it."""
        own = {id(each.module) for each in self._models}
        return id(model) in own or any(id(each) in own for each in model.modules())

    def begin_generation(self, generation: Generation) -> bool:
        """Take the start of `generate`; False if it runs inside another one."""
        if self.generation is not None:
            self.generation.nested += 1
            return False
        generation.holds_rows = self.on_texts is not None
        self.generation, self._depth_of_generation = generation, self._nesting_depth
        return True

    def leave_generation(self, generation: Generation) -> None:
        """Take the end of `generate`, see `GenerationFollower`."""
        if self.generation is generation:
            self.generation, self.generated_pass, self.is_aside, self._depth_of_generation = None, None, False, 0
        elif self.generation is not None and self.generation.nested:
            self.generation.nested -= 1

    def forget_cache(self, cache: object) -> None:
        """Take that the rows of a cache no longer continue the same texts."""
        self._sequences.pop(cache, None)

    def forget_listener(self) -> None:
        """Forget who takes the texts, because it may hold this object, and both would stay until a cycle is found."""
        self.on_texts = None

    def take_texts(self, generation: Generation, returned: object) -> None:
        """Take what `generate` returned."""
        if self.on_texts is not None:
            self.on_texts(generation.texts(returned))


_active_trackers: ContextVar[frozenset[InputTracker]] = ContextVar("receiving", default=frozenset())


@contextmanager
def track_inputs(model: nn.Module) -> Iterator[InputTracker]:
    """Record the inputs of a model and of all Hugging Face models in it, in this context and in no other thread."""
    inputs = InputTracker()
    models = pretrained_models(model)
    with Undo() as undo:
        undo.add_step(inputs.forget_listener)
        undo.add_step(lambda: _active_trackers.set(_active_trackers.get() - {inputs}))
        _active_trackers.set(_active_trackers.get() | {inputs})
        for name, module in {"": model, **models}.items():
            each = _TrackedModel(name and f"{name}.", module, _forward_signature(module))
            inputs._models.append(each)  # noqa: SLF001 - made here
            undo.hook_before_forward(module, partial(inputs.begin_pass, each), with_kwargs=True, prepend=True)
            undo.hook_after_forward(module, partial(inputs.end_pass, each), always_call=True)
        with follow_generation(inputs) if models else nullcontext():
            yield inputs


@contextmanager
def without_tracking() -> Iterator[None]:
    """Let no tracker record the passes that begin in this context and thread."""
    token = _active_trackers.set(frozenset())
    try:
        yield
    finally:
        _active_trackers.reset(token)


def _forward_signature(module: nn.Module) -> inspect.Signature:
    """Return the signature of a module's forward, without self."""
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__func__ is type(module).forward:
        return signature_without_self(forward.__func__)
    return inspect.signature(forward)  # the instance overrides forward


@lru_cache(maxsize=256)
def signature_without_self(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method without its first parameter, self; cached, because inspecting takes 0.1 ms."""
    signature = inspect.signature(function)
    return signature.replace(parameters=tuple(signature.parameters.values())[1:])


def first_layer_type_mask(mask: Any) -> Any:
    """Return the `attention_mask` of a call, or the first of its masks if it is a dict: layer type -> mask."""
    return next(iter(mask.values()), None) if isinstance(mask, dict) else mask


def _find_cache(values: Iterable[object]) -> Any:
    """Return the first of some values that is a cache of transformers; None if none is."""
    return next((each for each in values if hasattr(each, "get_seq_length")), None)
