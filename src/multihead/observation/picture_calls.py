"""Find the calls of a model with pictures while it is observed, and give the tokens of their samples their places."""

from __future__ import annotations

import inspect
import warnings
import weakref
from _thread import LockType
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from multihead.errors import MultiheadError, ProbeError
from multihead.errors.given import PIXELS
from multihead.models.pretrained import pretrained_models
from multihead.observation.picture_units import copy_pictures
from multihead.observation.places import LayerPlaces, Progress, measure_places
from multihead.probes.catalogue import needs_pictures
from multihead.probes.places import PlaceTable
from multihead.probes.probe import Probe
from multihead.record.grey_copies import Picture
from multihead.record.layer import LayerRecord
from multihead.record.texts import PictureTokens
from multihead.tensors.undo import Undo

TokensOfText: TypeAlias = tuple[PictureTokens, list[int]]
"""The tokens of a text, and the numbers of its pictures in its batch."""

_SECONDS_BEFORE_BAR = 2
_MOST_PROCESSED = 16  # calls of a processor whose pictures wait for the call of the model
_MOST_KNOWN = 16  # calls whose places are kept, where samples do not


@dataclass(eq=False)
class PictureCall:
    """A call of a module with pictures.

    Attributes:
        name: qualified name of the module; "" for the whole model.
        module: the module.
        inputs: the arguments of the call.
        random_state: the state of torch's random numbers before the call.
        before: number of samples of each layer when the call began.
        after: number of samples of each layer when it ended.
        draws: whether it drew random numbers.
        processor: the processor with its options, or None.
        images: the pictures that the processor read, or None.
        asked: whether a missing place is worth a warning.
        like: the call whose places it has, which may be itself; None until known.
        pictures: small copies of the pictures.
    """

    name: str
    module: weakref.ref[nn.Module]
    inputs: dict[str, Any]
    random_state: Tensor
    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    draws: bool = False
    processor: Any = None
    images: Any = None
    asked: bool = False
    like: PictureCall | None = None
    pictures: tuple[Picture, ...] = ()
    _device: torch.device | None = None
    _sizes: object = None  # of the pictures
    _found: dict[str, LayerPlaces] | None = None
    # the table of a layer and the numbers of keys of its texts -> see `tokens`
    _tokens: dict[tuple[int, tuple[int, ...] | None], list[TokensOfText]] = field(default_factory=dict)
    _measuring: LockType = field(default_factory=Lock)  # several threads may read a record

    def __post_init__(self) -> None:
        self._device = self._device_of_module()

    @property
    def has_pictures(self) -> bool:
        """Whether the module got pictures."""
        return isinstance(self.inputs.get(PIXELS), Tensor)

    def _device_of_module(self) -> torch.device | None:
        module = self.module()
        return None if module is None else next((each.device for each in module.parameters()), None)

    def take_pictures(self, processor: Any, images: Any) -> None:
        """Take the processor and the pictures of the call; without a processor only the shape of frames is kept.

        Without tiles of padding their values decide no places.
        """
        self.processor, self.images, self._sizes = processor, images, _sizes(images)
        if processor is None and self.inputs[PIXELS].dim() == 4:
            self._keep_shape_of_pixels()

    def _keep_shape_of_pixels(self) -> None:
        pixels = self.inputs[PIXELS]
        self.inputs[PIXELS] = pixels.detach().new_zeros(()).expand(pixels.shape)

    def has_places_of(self, other: PictureCall) -> bool:
        """Whether another call has the same tokens in the same places: all is equal but the values of the pixels."""
        if self.module() is not other.module() or self.inputs.keys() != other.inputs.keys():
            return False
        if self._sizes != other._sizes or self._device != other._device:
            return False
        if (self.draws or other.draws) and not torch.equal(self.random_state, other.random_state):
            return False
        pairs = ((name, value, other.inputs[name]) for name, value in self.inputs.items())
        return all(_shape(one) == _shape(two) if name == PIXELS else _are_equal(one, two) for name, one, two in pairs)

    def places(self, progress: Progress | None = None) -> dict[str, LayerPlaces]:
        """Return name of a layer -> the places of its keys, which the first call measures; {} without places."""
        with self._measuring:
            if self._found is None:
                with nullcontext(progress) if progress is not None else _bar_of_slow_runs() as shown:
                    self._found = self._measure(shown)
                self._keep_shape_of_pixels()
                self.processor = self.images = None
        return self._found

    def _measure(self, progress: Progress) -> dict[str, LayerPlaces]:
        module, asked, pixels = self.module(), self.asked or self.processor is not None, self.inputs[PIXELS]
        if not asked and pixels.dim() < 4:
            return {}  # rows of patches do not show where they are
        if module is None or (device := self._device_of_module()) != self._device:
            what = "the model no longer exists" if module is None else f"the model has moved to {device}"
            warnings.warn(
                f"Tokens of pictures have no places, because {what}. Read them before: record.texts; or give "
                "processor= to observe.",
                stacklevel=2,
            )
            return {}
        if not any(pixels.stride()):
            column = torch.rand(*pixels.shape[-3:-1], 1, generator=torch.Generator().manual_seed(0))
            self.inputs[PIXELS] = column.to(pixels).expand(pixels.shape)
        try:
            found = measure_places(
                module,
                self.inputs,
                self.processor,
                self.images,
                self.random_state,
                gives_up=not asked,
                progress=progress,
            )
        except Exception as error:  # noqa: BLE001 - without attention a model may raise any error, and the record stays
            reason = str(error) if isinstance(error, MultiheadError) else f"{type(error).__name__}: {error}"
            if asked:
                warnings.warn(f"Tokens of pictures have no places. {reason}", stacklevel=8)
            return {}
        return {f"{self.name}.{name}" if self.name else name: each for name, each in found.items()}

    def tokens(self, layer: str, lengths: tuple[int, ...] | None) -> list[TokensOfText]:
        """Return the tokens of each text of a layer, and the numbers of its pictures; [] without places.

        Args:
            layer: the layer.
            lengths: the number of keys of each text that the layer has of this call; None for one text per row.
        """
        if (places := self.places().get(layer)) is None:
            return []
        key = id(places.table), lengths
        if key not in self._tokens:
            self._tokens[key] = _tokens_of_texts(places, lengths)
        return self._tokens[key]

    def tokens_of_sample(self, layer: str, lengths: tuple[int, ...], number: int) -> PictureTokens | None:
        """Return the tokens of one of the texts of `tokens`, with copies of its pictures; None without places."""
        assert self.like is not None
        found = self.like.tokens(layer, lengths)
        if not found or lengths[number] < len(found[number][0].names):
            return None
        tokens, numbers = found[number]
        return replace(tokens, pictures=tuple(self.pictures[each] for each in numbers) if self.pictures else ())


def reject_picture_probe(probe: Probe) -> None:
    """Raise a ProbeError if a probe of a model that takes no pictures needs them."""
    if needs_pictures(probe):
        raise ProbeError(f"{probe.name} needs pictures, which the model does not take as {PIXELS}.", "Leave it out.")


def modules_with_pictures(root: nn.Module) -> dict[str, nn.Module]:
    """Return the model and the models in it that take pictures, by qualified name, the outer ones first."""
    modules = {"": root, **pretrained_models(root)}
    return {name: each for name, each in modules.items() if PIXELS in inspect.signature(each.forward).parameters}


@dataclass(eq=False)
class PictureCalls:
    """The calls with pictures of a model that is observed.

    Attributes:
        layers: the recorded layers.
        processor: the processor of the model, or None.
        images: the pictures of all calls; None: those with which the processor is called.
        probes: the probes of pictures, which are measured.
        left_out: names of statistics that layers with places do not have.
        asked: whether probes of pictures were named.
        measures_first: whether places are measured before a call runs, because q and k are not kept.
        keeps_texts: whether the record has texts, whose tokens get places.
        progress: called with (runs done, runs expected) while places are measured; None shows a bar.
        known: calls with different places, of this model.
    """

    layers: list[LayerRecord]
    processor: Any = None
    images: Any = None
    probes: Sequence[Probe] = ()
    left_out: Set[str] = frozenset()
    asked: bool = False
    measures_first: bool = False
    keeps_texts: bool = True
    progress: Progress | None = None
    known: list[PictureCall] = field(default_factory=list)
    _calls: list[PictureCall] = field(default_factory=list)
    _open: list[PictureCall] = field(default_factory=list)  # the calls that run, the outermost first
    _processed: list[tuple[Any, Callable[..., Any], Tensor]] = field(default_factory=list)  # pictures, how, and pixels

    @contextmanager
    def follow(self, root: nn.Module, is_followed: Callable[[], bool]) -> Iterator[None]:
        """Find the calls of a model, and of the models in it, while in this context, and the pictures of each.

        With a processor the outermost call has the places, else that of a model without further ones that take
        pictures.

        Args:
            root: the model.
            is_followed: whether the call that begins is recorded.
        """
        modules = modules_with_pictures(root)
        with Undo() as undo:
            for name, module in modules.items():
                inner = any(each != name and f"{each}.".startswith(name and f"{name}.") for each in modules)
                signature = inspect.signature(module.forward)
                begin = partial(self._begin, name, signature, is_followed, has_inner=inner)
                end = partial(self._end, is_followed)
                undo.hook_before_forward(module, begin, with_kwargs=True)
                undo.hook_after_forward(module, end, always_call=True)
                if hasattr(module, "generate"):
                    follow = partial(self._follow_generate, begin, end, signature, module)
                    undo.replace_method(module, "generate", follow)
            process = getattr(self.processor, "image_processor", self.processor)
            if hasattr(process, "preprocess"):
                undo.replace_method(process, "preprocess", self._follow_preprocess)
            yield

    def _follow_generate(
        self,
        begin: Callable[..., None],
        end: Callable[..., None],
        signature: inspect.Signature,
        module: nn.Module,
        generate: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        """Take `generate` as one call of its model, because it may encode the pictures before the model runs."""
        inputs = {"input_ids": args[0]} if args and isinstance(args[0], Tensor) else {}
        inputs |= {name: value for name, value in options.items() if name in signature.parameters}
        first = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
        if first is not None and getattr(module.config, "is_encoder_decoder", False):
            inputs.setdefault("decoder_input_ids", first.new_zeros(len(first), 1, dtype=torch.int64))  # any word
        begin(module, (), inputs)
        try:
            return generate(*args, **options)
        finally:
            end(module, None)

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
        *,
        has_inner: bool,
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
        caches = {key: int(value.get_seq_length()) for key, value in inputs.items() if hasattr(value, "get_seq_length")}
        # An empty cache is filled by the call; what continues one depends on what the model has read before.
        inputs = {} if any(caches.values()) else {key: value for key, value in inputs.items() if key not in caches}
        wanted = not has_inner if self.processor is None else not self._open
        state, before = torch.get_rng_state(), self._num_samples()
        call = PictureCall(name, weakref.ref(module), inputs if wanted else {}, state, before, asked=self.asked)
        self._open.append(call)
        if self.measures_first and call.has_pictures:
            call.inputs = dict(call.inputs)
            self._find_like(call).places(self.progress)

    def _find_like(self, call: PictureCall) -> PictureCall:
        """Return the call that has the places of a call; itself if they are not known yet."""
        processor, images = self._pictures_of(call.inputs[PIXELS])
        call.pictures = copy_pictures(call.inputs[PIXELS], images) if self.keeps_texts else ()
        call.take_pictures(processor, images)
        call.like = next((each for each in self.known if call.has_places_of(each)), None)
        if call.like is None:
            call.like = call
            self.known.append(call)
            if self.measures_first:
                del self.known[:-_MOST_KNOWN]  # a loop over any number of texts takes constant memory
        return call.like

    def _end(self, is_followed: Callable[[], bool], module: nn.Module, _: object, __: object = None) -> None:
        """Forward hook of a module that takes pictures."""
        if not is_followed() or not self._open or self._open[-1].module() is not module:
            return
        call = self._open.pop()
        if not call.has_pictures:
            return
        call.after, call.draws = self._num_samples(), not torch.equal(call.random_state, torch.get_rng_state())
        if call.like is None:
            self._find_like(call)
        if call.like is not call:
            call.inputs = {}  # a loop over many pictures takes no memory
        if self.keeps_texts:
            self._calls.append(call)

    def tokens_of_call(self, layer: str, lengths: tuple[int, ...] | None) -> list[PictureTokens]:
        """Return the tokens of each text of the call that runs; [] where the keys of the layer have no places.

        Args:
            layer: name of the layer.
            lengths: the number of keys of each text; None for one text per row of the model's inputs.
        """
        call = self._open[0 if self.processor is not None else -1] if self._open else None
        if not self.measures_first or call is None or call.like is None:
            return []
        return [tokens for tokens, _ in call.like.tokens(layer, lengths)]

    def _num_samples(self) -> dict[str, int]:
        return {layer.name: layer.num_samples for layer in self.layers}

    def name_tokens(self) -> None:
        """Give the samples of all calls the places of their tokens.

        With a processor the places are measured now. Without one, which asks for nothing, they are measured when one of
        them is first read.
        """
        if not self._calls:
            return  # counting samples cuts batches into them
        ends = [call.before for call in self._calls[1:]] + [self._num_samples()]
        for call, end in zip(self._calls, ends, strict=True):
            self._name_samples(call, end)
        for each in self.known if self.processor is not None else []:
            each.places(self.progress)

    def _pictures_of(self, pixels: Tensor) -> tuple[Any, Any]:
        """Return the processor with the options of its call that made some pixels, and the pictures."""
        for place in reversed(range(len(self._processed))):
            images, process, made = self._processed[place]
            if made.shape == pixels.shape and torch.equal(made.to(pixels), pixels):
                del self._processed[place]
                return process, images
        return self.processor, self.images

    def _name_samples(self, call: PictureCall, end: Mapping[str, int]) -> None:
        """Name the tokens of the samples of a call; `end` is how many samples each layer had before the next one."""
        for layer in self.layers:
            first = call.before.get(layer.name, 0)
            # What is read while `generate` runs becomes samples when it has ended.
            stop = call.after.get(layer.name, 0) if call.after.get(layer.name, 0) > first else end.get(layer.name, 0)
            if stop <= first:
                continue
            samples = layer.samples[first:stop]
            lengths = tuple(sample.num_keys for sample in samples)
            for number, sample in enumerate(samples):
                sample.growing_key_text.find_pictures = partial(call.tokens_of_sample, layer.name, lengths, number)
                sample.measure_later(self.probes, self.left_out)


def _tokens_of_texts(places: LayerPlaces, lengths: tuple[int, ...] | None) -> list[TokensOfText]:
    """Return the tokens of each text of a call, from the rows of its batch; [] where these do not fit."""
    rows, keys = places.table.picture.shape
    kept = torch.ones(rows, keys, dtype=torch.bool) if places.unpadded is None else places.unpadded.cpu()
    names = [places.own_names.get(key, "") for row in kept for key in row.nonzero()[:, 0].tolist()]
    flat, texts = places.table.reshape(rows * keys).select(kept.flatten()), rows if lengths is None else len(lengths)
    if lengths is not None and sum(lengths) == len(names):
        sizes = torch.tensor(lengths)
    elif texts % rows:
        return []
    else:  # texts that later calls continue, one or several of each prompt
        sizes = kept.sum(1)
    ends = sizes.cumsum(0).tolist()
    made: list[TokensOfText] = []
    for end, size in zip(ends, sizes.tolist(), strict=True):
        own = {key: name for key, name in enumerate(names[end - size : end]) if name}
        table, numbers = _number_pictures(flat.select(slice(end - size, end)))
        made.append((PictureTokens.from_places(table, own), numbers))
    return [each for each in made for _ in range(texts // len(made))]


def _number_pictures(table: PlaceTable) -> tuple[PlaceTable, list[int]]:
    """Number the pictures of a sample from 0, and return their numbers in its batch, where others may be before."""
    placed = table.picture >= 0
    picture = table.picture.clone()
    numbers, picture[placed] = torch.unique(table.picture[placed], return_inverse=True)
    return PlaceTable(picture, *table.columns[1:]), numbers.tolist()


@contextmanager
def _bar_of_slow_runs() -> Iterator[Progress]:
    """Show a bar on stderr, with the time that is left, once runs have taken two seconds.

    It is that of tqdm, which transformers brings and shows its own bars with.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda done, total: None
        return
    with tqdm(desc="Places of picture tokens", delay=_SECONDS_BEFORE_BAR, mininterval=0, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


def _sizes(images: Any) -> Any:
    """Return the sizes of pictures, nested as they are."""
    return tree_map(lambda each: getattr(each, "shape", getattr(each, "size", None)), images)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, Tensor) else type(value)


def _are_equal(one: Any, two: Any) -> bool:
    """Whether two arguments of calls are equal; caches are, because a call with pictures begins with an empty one."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        return one.shape == two.shape and torch.equal(one, two)
    if hasattr(one, "get_seq_length"):
        return hasattr(two, "get_seq_length")
    return type(one) is type(two) and (one is two or bool(one == two))
