"""Find the calls of a model with pictures while it is observed, and give the tokens of their samples their places."""

from __future__ import annotations

import inspect
import warnings
import weakref
from _thread import LockType
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import MultiheadError
from multihead.kernels.call import without_listeners
from multihead.models.pretrained import pretrained_models
from multihead.observation.picture_units import PIXELS, copy_pictures
from multihead.observation.places import LayerPlaces, Progress, measure_places
from multihead.record.layer import LayerRecord
from multihead.record.picture_statistics import change_statistics
from multihead.record.places import Picture, PlaceTable
from multihead.record.texts import PictureTokens
from multihead.tensors.undo import Undo

_SECONDS_BEFORE_BAR = 2
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
        pictures: small copies of the pictures.
    """

    name: str
    module: weakref.ref[nn.Module]
    inputs: dict[str, Any]
    random_state: Tensor
    before: dict[str, int]
    after: dict[str, int] = field(default_factory=dict)
    has_inner: bool = False
    draws: bool = False
    processor: Any = None
    images: Any = None
    pictures: tuple[Picture, ...] = ()
    _found: dict[str, LayerPlaces] | None = None
    _measuring: LockType = field(default_factory=Lock)  # several threads may read a record

    def has_places_of(self, other: _PictureCall) -> bool:
        """Whether another call has the same tokens in the same places: all is equal but the values of the pixels."""
        if self.module() is not other.module() or self.inputs.keys() != other.inputs.keys():
            return False
        if _sizes(self.images) != _sizes(other.images):
            return False
        if self.draws and not torch.equal(self.random_state, other.random_state):
            return False
        pairs = ((name, value, other.inputs[name]) for name, value in self.inputs.items())
        return all(_shape(one) == _shape(two) if name == PIXELS else _are_equal(one, two) for name, one, two in pairs)

    def keep_shape_of_frames(self) -> None:
        """Replace frames by one value of their shape: without tiles of padding their values decide no places."""
        pixels = self.inputs[PIXELS]
        if pixels.dim() == 4:
            self.inputs[PIXELS] = pixels.detach().new_zeros(()).expand(pixels.shape)

    def places(self, progress: Progress | None = None) -> dict[str, LayerPlaces]:
        """Return name of a layer -> the places of its keys, which the first call measures; {} without places."""
        with self._measuring:
            if self._found is None:
                with nullcontext(progress) if progress is not None else _bar_of_slow_runs() as shown:
                    self._found = self._measure(shown)
                self.inputs, self.processor, self.images = {}, None, None
        return self._found

    def _measure(self, progress: Progress) -> dict[str, LayerPlaces]:
        module, asked = self.module(), self.processor is not None
        if not asked and self.inputs[PIXELS].dim() < 4:
            return {}  # rows of patches do not show where they are
        if module is None:
            warnings.warn(
                "Tokens of pictures have no places, because the model no longer exists. Read them while it does: "
                "record.texts; or give processor= to observe.",
                stacklevel=2,
            )
            return {}
        pixels = self.inputs[PIXELS]
        if not any(pixels.stride()):
            noise = torch.rand(pixels.shape, generator=torch.Generator().manual_seed(0))
            self.inputs[PIXELS] = noise.to(pixels)
        try:
            with without_listeners():  # the model may be observed again while the record is read
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


@dataclass(eq=False)
class PictureCalls:
    """The calls with pictures of a model that is observed.

    Attributes:
        layers: the recorded layers.
        processor: the processor of the model, or None.
        images: the pictures of all calls; None: those with which the processor is called.
        compares_texts: whether statistics of positions in a text are kept in pictures too, because they were asked for.
        statistics: names of the statistics of pictures that are measured; None: all.
        progress: called with (runs done, runs expected) while places are measured; None shows a bar.
    """

    layers: list[LayerRecord]
    processor: Any = None
    images: Any = None
    compares_texts: bool = False
    statistics: Set[str] | None = None
    progress: Progress | None = None
    _distinct: list[_PictureCall] = field(default_factory=list)  # calls that have different places
    _calls: list[tuple[_PictureCall, _PictureCall]] = field(default_factory=list)  # all calls, each with the like one
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
                        undo.replace_method(module, "generate", follow)
            process = getattr(self.processor, "image_processor", self.processor)
            if hasattr(process, "preprocess"):
                undo.replace_method(process, "preprocess", self._follow_preprocess)
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
        state = torch.get_rng_state()
        self._open.append(_PictureCall(name, weakref.ref(module), inputs, state, self._num_samples()))

    def _end(self, module: nn.Module, _: object, __: object = None) -> None:
        """Forward hook of a module that takes pictures."""
        if not self._open or self._open[-1].module() is not module:
            return
        call = self._open.pop()
        wanted = not call.has_inner if self.processor is None else not self._open
        if not wanted or not isinstance(call.inputs.get(PIXELS), Tensor):
            return
        call.after, call.draws = self._num_samples(), not torch.equal(call.random_state, torch.get_rng_state())
        call.processor, call.images = self._pictures_of(call.inputs[PIXELS])
        call.pictures = copy_pictures(call.inputs[PIXELS], call.images)
        if self.processor is None:
            call.keep_shape_of_frames()
        like = next((each for each in self._distinct if call.has_places_of(each)), None)
        if like is None:
            like = call
            self._distinct.append(call)
        else:
            call.inputs, call.images = {}, None  # a loop over many pictures takes no memory
        self._calls.append((call, like))

    def _num_samples(self) -> dict[str, int]:
        return {layer.name: layer.num_samples for layer in self.layers}

    def name_tokens(self) -> None:
        """Give the samples of all calls the places of their tokens.

        With a processor the places are measured now. Without one, which asks for nothing, they are measured when one of
        them is first read.
        """
        if not self._calls:
            return  # counting samples cuts batches into them
        ends = [call.before for call, _ in self._calls[1:]] + [self._num_samples()]
        for (call, like), end in zip(self._calls, ends, strict=True):
            self._name_samples(call, like, end)
        for each in self._distinct if self.processor is not None else []:
            each.places(self.progress)

    def _pictures_of(self, pixels: Tensor) -> tuple[Any, Any]:
        """Return the processor with the options of its call that made some pixels, and the pictures."""
        for place in reversed(range(len(self._processed))):
            images, process, made = self._processed[place]
            if made.shape == pixels.shape and torch.equal(made.to(pixels), pixels):
                del self._processed[place]
                return process, images
        return self.processor, self.images

    def _name_samples(self, call: _PictureCall, like: _PictureCall, end: Mapping[str, int]) -> None:
        """Name the tokens of the samples of a call; `end` is how many samples each layer had before the next one."""
        tokens = _TokensOfCall(like, call.pictures)
        change = partial(change_statistics, compares_texts=self.compares_texts, names=self.statistics)
        for layer in self.layers:
            first = call.before.get(layer.name, 0)
            # What is read while `generate` runs becomes samples when it has ended.
            stop = call.after.get(layer.name, 0) if call.after.get(layer.name, 0) > first else end.get(layer.name, 0)
            if stop <= first:
                continue
            samples = layer.samples[first:stop]
            lengths = tuple(sample.num_keys for sample in samples)
            for number, sample in enumerate(samples):
                sample.growing_key_text.find_pictures = partial(tokens.of_sample, layer.name, lengths, number)
                sample.measure_later(change)


@dataclass(eq=False)
class _TokensOfCall:
    """The tokens of the samples of a call with pictures.

    Attributes:
        like: the call whose places are measured, with the same tokens in the same places.
        pictures: small copies of the pictures of the call.
    """

    like: _PictureCall
    pictures: tuple[Picture, ...]
    # the table of a layer and the numbers of keys of its samples -> the tokens of each
    _known: dict[tuple[int, tuple[int, ...]], list[PictureTokens]] = field(default_factory=dict)

    def of_sample(self, layer: str, lengths: tuple[int, ...], number: int) -> PictureTokens | None:
        """Return the tokens of a sample; None without places.

        Args:
            layer: the layer.
            lengths: the number of keys of each sample that the layer has of this call.
            number: which of these.
        """
        places = self.like.places().get(layer)
        if places is None:
            return None
        key = id(places.table), lengths
        if key not in self._known:
            self._known[key] = _tokens_of_samples(places, lengths, self.pictures)
        tokens = self._known[key]
        return tokens[number] if tokens and lengths[number] >= len(tokens[number].names) else None


def _tokens_of_samples(
    places: LayerPlaces, lengths: Sequence[int], pictures: tuple[Picture, ...]
) -> list[PictureTokens]:
    """Return the tokens of each sample of a call, from the rows of its batch; [] where these do not fit."""
    rows, keys = places.table.picture.shape
    kept = torch.ones(rows, keys, dtype=torch.bool) if places.unpadded is None else places.unpadded.cpu()
    names = [[places.own_names.get(key, "") for key in row.nonzero()[:, 0].tolist()] for row in kept]
    flat_names = [name for row in names for name in row]
    flat = places.table.reshape(rows * keys).select(kept.flatten())
    if sum(lengths) != len(flat_names):  # texts that later calls have continued, one or several of each prompt
        if len(lengths) % rows:
            return []
        ends = kept.sum(1).cumsum(0).tolist()
        slices = [slice(end - len(row), end) for end, row in zip(ends, names, strict=True)]
        slices = [each for each in slices for _ in range(len(lengths) // rows)]
    else:
        ends = torch.tensor(lengths).cumsum(0).tolist()
        slices = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    made: dict[tuple[int, int], PictureTokens] = {}
    for each in slices:
        if (each.start, each.stop) not in made:
            own = {key: name for key, name in enumerate(flat_names[each]) if name}
            table, numbers = _number_pictures(flat.select(each))
            shown = tuple(pictures[number] for number in numbers) if pictures else ()
            made[each.start, each.stop] = PictureTokens.from_places(table, own, shown)
    return [made[each.start, each.stop] for each in slices]


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
    with tqdm(desc="Places of picture tokens", delay=_SECONDS_BEFORE_BAR, leave=False) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield show


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
