"""Find the calls of a model with pictures while it is observed, and give the tokens of their samples their places."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import MultiheadError
from multihead.models.pretrained import pretrained_models
from multihead.observation.picture_units import PIXELS
from multihead.observation.places import LayerPlaces, measure_places
from multihead.record.layer import LayerRecord
from multihead.record.picture_statistics import compare_in_picture
from multihead.record.places import PlaceTable
from multihead.record.sample import SampleRecord
from multihead.record.texts import PictureTokens
from multihead.tensors.undo import Undo

_MOST_PROCESSED = 16  # calls of a processor whose pictures wait for the call of the model


@dataclass(eq=False)
class _PictureCall:
    """A call of a module with pictures.

    Attributes:
        name: qualified name of the module; "" for the whole model.
        module: the module.
        inputs: the arguments of the call.
        random_state: the state of torch's random numbers before the call.
        before: number of samples of each layer when the call began.
        after: number of samples of each layer when it ended.
        has_inner: whether a module inside of it was called with pictures.
        draws: whether it drew random numbers.
        processor: the processor with its options, or None.
        images: the pictures that the processor read, or None.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Any]
    random_state: Tensor
    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    has_inner: bool = False
    draws: bool = False
    processor: Any = None
    images: Any = None

    def has_places_of(self, other: _PictureCall) -> bool:
        """Whether another call has the same tokens in the same places: all is equal but the values of the pixels."""
        if self.module is not other.module or self.inputs.keys() != other.inputs.keys():
            return False
        if _sizes(self.images) != _sizes(other.images):
            return False
        if self.draws and not torch.equal(self.random_state, other.random_state):
            return False
        pairs = ((name, value, other.inputs[name]) for name, value in self.inputs.items())
        return all(_shape(one) == _shape(two) if name == PIXELS else _are_equal(one, two) for name, one, two in pairs)


@dataclass(eq=False)
class PictureCalls:
    """The calls with pictures of a model that is observed.

    Attributes:
        layers: the recorded layers.
        processor: the processor of the model, or None.
        images: the pictures of all calls; None: those with which the processor is called.
        compares_texts: whether statistics of positions in a text are kept in pictures too, because they were asked for.
    """

    layers: list[LayerRecord]
    processor: Any = None
    images: Any = None
    compares_texts: bool = False
    _distinct: list[_PictureCall] = field(default_factory=list)  # calls that have different places
    _calls: list[tuple[_PictureCall, int]] = field(default_factory=list)  # all calls, and the index of the like one
    _open: list[_PictureCall] = field(default_factory=list)  # the calls that run, the outermost first
    _processed: list[tuple[Any, Callable[..., Any], Tensor]] = field(default_factory=list)  # pictures, how, and pixels

    @contextmanager
    def follow(self, root: nn.Module, is_followed: Callable[[], bool]) -> Iterator[None]:
        """Find the calls of a model, and of the models in it, while in this context, and the pictures of each.

        Args:
            root: the model.
            is_followed: whether the call that begins is recorded.
        """
        with Undo() as undo:
            for name, module in {"": root, **pretrained_models(root)}.items():
                signature = inspect.signature(module.forward)
                if PIXELS in signature.parameters:
                    begin = partial(self._begin, name, signature, is_followed)
                    undo.hook_before_forward(module, begin, with_kwargs=True)
                    undo.hook_after_forward(module, self._end, always_call=True)
                    if hasattr(module, "generate"):
                        follow = partial(self._follow_generate, begin, signature, module)
                        _replace_method(undo, module, "generate", follow)
            process = getattr(self.processor, "image_processor", self.processor)
            if hasattr(process, "preprocess"):
                _replace_method(undo, process, "preprocess", self._follow_preprocess)
            yield

    def _follow_generate(
        self,
        begin: Callable[..., None],
        signature: inspect.Signature,
        module: nn.Module,
        generate: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Take `generate` as one call of its model, because it may encode the pictures before the model runs."""
        inputs = {"input_ids": args[0]} if args and isinstance(args[0], Tensor) else {}
        inputs |= {name: value for name, value in options.items() if name in signature.parameters}
        begin(module, (), inputs)
        try:
            return generate(*args, **options)
        finally:
            self._end(module, None)

    def _follow_preprocess(self, preprocess: Callable[..., Any], images: Any, *args: Any, **options: Any) -> Any:
        """Store the pictures, the options and the pixels of a call of the image processor."""
        made = preprocess(images, *args, **options)
        pixels = made.get(PIXELS) if hasattr(made, "get") else None
        if isinstance(pixels, Tensor):
            again = lambda images, **_: preprocess(images, *args, **options)  # noqa: E731
            self._processed = [*self._processed, (images, again, pixels)][-_MOST_PROCESSED:]
        return made

    def _begin(
        self,
        name: str,
        signature: inspect.Signature,
        is_followed: Callable[[], bool],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Forward pre-hook of a module that takes pictures."""
        if not is_followed():
            return
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return  # wrong arguments: the model itself will raise an error
        inputs = {**bound, **bound.get("kwargs", {})}
        inputs.pop("kwargs", None)
        for each in self._open:
            each.has_inner |= isinstance(inputs.get(PIXELS), Tensor)
        caches = {key: int(value.get_seq_length()) for key, value in inputs.items() if hasattr(value, "get_seq_length")}
        # An empty cache is filled by the call; what continues one depends on what the model has read before.
        inputs = {} if any(caches.values()) else {key: value for key, value in inputs.items() if key not in caches}
        self._open.append(_PictureCall(name, module, inputs, torch.get_rng_state(), self._num_samples()))

    def _end(self, module: nn.Module, _: object, __: object = None) -> None:
        """Forward hook of a module that takes pictures."""
        if not self._open or self._open[-1].module is not module:
            return
        call = self._open.pop()
        wanted = not call.has_inner if self.processor is None else not self._open
        if not wanted or not isinstance(call.inputs.get(PIXELS), Tensor):
            return
        call.after, call.draws = self._num_samples(), not torch.equal(call.random_state, torch.get_rng_state())
        call.processor, call.images = self._pictures_of(call.inputs[PIXELS])
        like = next((n for n, each in enumerate(self._distinct) if call.has_places_of(each)), len(self._distinct))
        if like == len(self._distinct):
            self._distinct.append(call)
        else:
            call.inputs, call.images = {}, None  # a loop over many pictures takes no memory
        self._calls.append((call, like))

    def _num_samples(self) -> dict[str, int]:
        return {layer.name: layer.num_samples for layer in self.layers}

    def name_tokens(self) -> None:
        """Measure the places of the tokens of all calls, and name the tokens of their samples."""
        if not self._calls:
            return  # counting samples cuts batches into them
        found = list(map(self._measure, self._distinct))
        ends = [call.before for call, _ in self._calls[1:]] + [self._num_samples()]
        for (call, like), end in zip(self._calls, ends, strict=False):
            self._name_samples(call, found[like], end)

    def _measure(self, call: _PictureCall) -> dict[str, LayerPlaces]:
        if self.processor is None and call.inputs[PIXELS].dim() < 4:
            return {}  # rows of patches do not show where they are
        prefix = call.name and f"{call.name}."
        try:
            found = measure_places(
                call.module,
                call.inputs,
                call.processor,
                call.images,
                call.random_state,
                gives_up=self.processor is None,
            )
        except Exception as error:  # noqa: BLE001 - without attention a model may raise any error, and the record stays
            reason = str(error) if isinstance(error, MultiheadError) else f"{type(error).__name__}: {error}"
            if self.processor is not None:
                warnings.warn(f"Tokens of pictures have no places. {reason}", stacklevel=7)
            return {}
        return {f"{prefix}{name}": each for name, each in found.items()}

    def _pictures_of(self, pixels: Tensor) -> tuple[Any, Any]:
        """Return the processor with the options of its call that made some pixels, and the pictures."""
        for place in reversed(range(len(self._processed))):
            images, process, made = self._processed[place]
            if made.shape == pixels.shape and torch.equal(made.to(pixels), pixels):
                del self._processed[place]
                return process, images
        return self.processor, self.images

    def _name_samples(self, call: _PictureCall, found: Mapping[str, LayerPlaces], end: Mapping[str, int]) -> None:
        """Name the tokens of the samples of a call; `end` is how many samples each layer had before the next one."""
        named: dict[tuple[int, int], list[PictureTokens]] = {}
        for layer in self.layers:
            first, places = call.before.get(layer.name, 0), found.get(layer.name)
            # What is read while `generate` runs becomes samples when it has ended.
            stop = call.after.get(layer.name, 0) if call.after.get(layer.name, 0) > first else end.get(layer.name, 0)
            if places is None or stop <= first:
                continue
            samples = layer.samples[first:stop]
            key = id(places.table), len(samples)
            if key not in named:
                named[key] = _tokens_of_samples(places, samples)
            for sample, tokens in zip(samples, named[key], strict=False):
                if sample.num_keys >= len(tokens.names):
                    sample.growing_key_text.pictures = tokens
                    compare_in_picture(sample, compares_texts=self.compares_texts)


def _tokens_of_samples(places: LayerPlaces, samples: list[SampleRecord]) -> list[PictureTokens]:
    """Return the tokens of each sample of a call, from the rows of its batch; [] where these do not fit."""
    rows, keys = places.table.picture.shape
    kept = torch.ones(rows, keys, dtype=torch.bool) if places.unpadded is None else places.unpadded.cpu()
    names = [[places.own_names.get(key, "") for key in row.nonzero()[:, 0].tolist()] for row in kept]
    flat_names = [name for row in names for name in row]
    flat = places.table.reshape(rows * keys).select(kept.flatten())
    lengths = [sample.num_keys for sample in samples]
    if sum(lengths) != len(flat_names):  # texts that later calls have continued, one or several of each prompt
        if len(samples) % rows:
            return []
        ends = kept.sum(1).cumsum(0).tolist()
        slices = [slice(end - len(row), end) for end, row in zip(ends, names, strict=True)]
        slices = [each for each in slices for _ in range(len(samples) // rows)]
    else:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        slices = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    made: dict[tuple[int, int], PictureTokens] = {}
    for each in slices:
        if (each.start, each.stop) not in made:
            own = {key: name for key, name in enumerate(flat_names[each]) if name}
            made[each.start, each.stop] = PictureTokens.from_places(_number_pictures(flat.select(each)), own)
    return [made[each.start, each.stop] for each in slices]


def _number_pictures(table: PlaceTable) -> PlaceTable:
    """Number the pictures of a sample from 0; in a batch the samples before it may have others."""
    placed = table.picture >= 0
    picture = table.picture.clone()
    picture[placed] = torch.unique(table.picture[placed], return_inverse=True)[1]
    return PlaceTable(picture, *table.columns[1:])


def _replace_method(undo: Undo, owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Let a method of one object run `function(method, *args, **options)`, until undone."""
    before = vars(owner).get(name)

    def restore() -> None:
        vars(owner).pop(name, None)
        if before is not None:
            vars(owner)[name] = before

    undo.add_step(restore)
    vars(owner)[name] = partial(function, getattr(owner, name))


def _sizes(images: Any) -> list[Any]:
    """Return the sizes of pictures, however nested."""
    if isinstance(images, (list, tuple)):
        return [_sizes(each) for each in images]
    return [getattr(images, "size", None) if not isinstance(images, Tensor) else tuple(images.shape)]


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else type(value)


def _are_equal(one: Any, two: Any) -> bool:
    """Whether two arguments of calls are equal; caches are, because a call with pictures begins with an empty one."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    if hasattr(one, "get_seq_length"):
        return hasattr(two, "get_seq_length")
    return type(one) is type(two) and (one is two or bool(one == two))
