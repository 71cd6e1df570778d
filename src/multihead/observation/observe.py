"""Record the attention calls of a model while it runs, and restore the model afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import nn

from multihead.errors import ArgumentError, ProbeError
from multihead.errors.arguments import check_integer
from multihead.errors.given import check_ids, check_module, check_tokenizer
from multihead.kernels.call import listen
from multihead.kinds import KINDS, Kind, check_kinds, probes_of
from multihead.models import huggingface
from multihead.models.packed import run_models_padded
from multihead.models.pretrained import alignment_heads, track_inputs
from multihead.observation.completeness import check_complete, unheard_layers
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.layer_names import module_names
from multihead.observation.measuring import StatisticsMeasurer
from multihead.observation.picture_calls import (
    PictureCall,
    PictureCalls,
    modules_with_pictures,
    reject_picture_probe,
)
from multihead.observation.places import Progress
from multihead.observation.record import Record
from multihead.observation.recorder import Keep, Recorder
from multihead.probes.catalogue import (
    DEFAULT,
    PICTURE_PROBES,
    POSITION_PROBES,
    PROBES,
    needs_pictures,
    reject_unknown_set,
)
from multihead.probes.context import MAP_SIZE, PoolOperation
from multihead.probes.probe import Probe
from multihead.probes.statistics import ProbeOrName, resolve_probes
from multihead.record.running_summary import RunningSummary
from multihead.tensors.tracing import original_module, run_uncompiled


@contextmanager
def observe(
    model: nn.Module,
    *,
    layers: Sequence[int | str] | int | str | None = None,
    keep: Keep = "cpu",
    probes: ProbeOrName | Sequence[ProbeOrName] | None = None,
    special_ids: Sequence[int] = (),
    tokenizer: Any = None,
    map_size: int = MAP_SIZE,
    map_pool: PoolOperation = "mean",
    kinds: Sequence[Kind] = (),
    processor: Any = None,
    images: Any = None,
) -> Iterator[Record]:
    """Record every attention head of a model while it runs.

    Layers of this library are recorded as they are; a Hugging Face model uses this library's attention inside the
    context, and its outputs stay within the rounding of its dtype. Afterwards, also after an exception, the model is
    restored. Padding is left out: each text of a padded batch is one sample of its own length. The calls of cached
    decoding, one token each, are merged into one sample; further batches are further samples. If a layer attends within
    one window or image at a time, these are segments of one sample, each measured as a separate text. A module of a
    Hugging Face model that computes attention or reads the attention mask, but does not call this library, is not
    recorded, and a warning at the end names it.

    Args:
        model: a module with attention layers of this library, a Hugging Face model, or both.
        layers: the layers to record, by index in the order they first run, or by name: a glob such as "encoder.*",
            or a part such as "layer.3"; None records all.
        keep: where q and k are kept for later tiles of the map: "cpu" (main memory), "device" (the device of the
            model), or nowhere: "statistics" keeps statistics per query, "summary" only their summary over all texts,
            with the kinds of the heads, so that a loop over any number of batches takes constant memory.
        probes: the statistics, by name or as values such as `probes.offset_mass(-5)`; None takes the ones that cost
            next to nothing, `multihead.probes.DEFAULT`. A probe is skipped for calls that lack an input of the probe:
            token ids, special tokens, an output projection or learned sinks, or places in pictures. A model that takes
            no pictures rejects those of pictures, unless all of them are given among others, as they are in
            `multihead.probes.PROBES`; one that takes some has them among its default ones. With keep="statistics" or
            "summary" places are measured before a call runs, once for calls that are equal apart from the pixels.
        special_ids: the token ids that `special_mass` counts, such as the ids of [CLS] and [SEP]; by default the
            special ids of the tokenizer, if there is one.
        tokenizer: a Hugging Face tokenizer that names the tokens of the texts, see `Record.name_tokens`.
        map_size: largest number of rows and columns of the pooled map.
        map_pool: whether a cell of the pooled map is the "mean" or the "max" of the weights in its block.
        kinds: kinds of heads of your own, next to the built-in ones; their probes are measured too.
        processor: the processor of a model that reads pictures. At the end of the context the place of each token in
            its picture is measured, see `mh.places`, once for calls that are equal apart from the pixels. Without it,
            only the tokens of image encoders have places, in the pixels that they read, which are measured when a name,
            place, kind or statistic is first read.
        images: the pictures that the processor read; None: those with which it is called in the context.

    Returns:
        a record that fills while the model runs.

    Raises:
        ModelError: `model` is not a module, its family is not supported, or a name in `layers` matches no module; at
            the end: no attention call was captured, or one of `layers` matches no layer that ran.
        ArgumentError, ProbeError: an option that does not exist, or a probe of pictures of a model that takes none.

    >>> import torch
    >>> import multihead as mh
    >>> layer = mh.MultiHeadAttention(embed_dim=8, num_heads=2)
    >>> with mh.observe(layer) as seen:
    ...     y = layer(torch.randn(1, 5, 8))
    >>> seen.layers[0].weights(head=1, queries=slice(0, 2)).shape
    torch.Size([2, 5])
    """
    options = Options(layers, keep, probes, special_ids, tokenizer, map_size, map_pool, kinds)
    options = options._replace(
        names_pictures=True, compares_texts=probes is not None, processor=processor, images=images
    )
    with record_calls(model, options) as record:
        yield record


class Options(NamedTuple):
    """The arguments of `observe` besides the model, and what else is recorded.

    Attributes:
        keeps_chance: whether a summary has chance levels.
        keeps_quantiles: whether a summary has quantiles.
        names_pictures: whether the places of the tokens of pictures are measured.
        compares_texts: whether layers with places keep the statistics that compare positions in a text.
        progress: called with (runs done, runs expected) while places are measured with a processor; None shows a bar.
        known_places: calls of the model with known places, to which others are added; None if there are none.
    """

    layers: Sequence[int | str] | int | str | None = None
    keep: Keep = "cpu"
    probes: ProbeOrName | Sequence[ProbeOrName] | None = None
    special_ids: Sequence[int] = ()
    tokenizer: Any = None
    map_size: int = MAP_SIZE
    map_pool: PoolOperation = "mean"
    kinds: Sequence[Kind] = ()
    keeps_chance: bool = True
    keeps_quantiles: bool = True
    names_pictures: bool = False
    compares_texts: bool = False
    processor: Any = None
    images: Any = None
    progress: Progress | None = None
    known_places: list[PictureCall] | None = None


@contextmanager
def record_calls(model: nn.Module, options: Options) -> Iterator[Record]:
    """Record a model while it runs, see `observe`."""
    layers, keep, probes, special_ids, tokenizer, map_size, map_pool, kinds, keeps_chance, keeps_quantiles, *_ = options
    check_module(model)
    if tokenizer is not None:
        check_tokenizer(tokenizer, calls=False)
    special_ids = check_ids("special_ids", special_ids)
    if tokenizer is not None and not special_ids:
        special_ids = tuple(tokenizer.all_special_ids)
    root = original_module(model)
    record = Record(title=type(root).__name__)
    kinds = check_kinds(kinds, KINDS)
    record.add_kinds(*kinds)
    named = resolve_probes((*(() if probes is None else resolve_probes(probes)), *probes_of(kinds)))
    asked = any(needs_pictures(probe) for probe in named)
    takes_pictures = (asked or options.names_pictures) and bool(modules_with_pictures(root))
    if not takes_pictures and not {probe.name for probe in PICTURE_PROBES} < {probe.name for probe in named}:
        for probe in named:  # who names all probes, or all with one number per query, names those of other models too
            reject_picture_probe(probe)
    of_models = PICTURE_PROBES if options.names_pictures and takes_pictures else ()
    chosen = resolve_probes((*DEFAULT, *of_models, *named)) if probes is None else named
    # What keys receive in several calls is added before a statistic is computed from it.
    summed = [PROBES[str(part)] for probe in chosen if probe.axes == "keys" for part in probe.parts]
    chosen = resolve_probes((*chosen, *summed)) if summed else chosen
    _check_options(keep, map_size, map_pool, chosen)
    record.statistics = {probe.name: probe for probe in chosen if probe.name not in PROBES} | record.statistics
    names = module_names(root)
    layer_filter = None
    if layers is not None:
        layer_filter = LayerFilter.from_argument(layers)
        layer_filter.check_modules(list(names.values()))
    bypassed: list[str] = []
    measuring = StatisticsMeasurer(root, names, chosen, tuple(special_ids), map_size, map_pool)
    # Models run uncompiled, because calls inside a compiled graph cannot be recorded.
    with (
        huggingface.install(root, bypassed.append),
        run_models_padded(),
        run_uncompiled(),
        track_inputs(root) as inputs,
    ):

        def new_summary(_: str, num_heads: int) -> RunningSummary:
            return RunningSummary(num_heads, keeps_quantiles=keeps_quantiles)

        of_pictures = tuple(probe for probe in chosen if needs_pictures(probe))
        pictures = PictureCalls(
            record.layers,
            options.processor,
            options.images,
            of_pictures,
            frozenset() if options.compares_texts else POSITION_PROBES,
            asked=takes_pictures and asked,
            measures_first=takes_pictures and bool(of_pictures) and keep in ("statistics", "summary"),
            keeps_texts=options.names_pictures and keep != "summary",
            progress=options.progress,
            known=[] if options.known_places is None else options.known_places,
        )
        recorder = Recorder(record, inputs, layer_filter, keep, measuring, keeps_chance, new_summary, pictures)
        follows = pictures.keeps_texts or pictures.measures_first
        with listen(recorder), pictures.follow(root, lambda: inputs.is_recording) if follows else nullcontext():
            yield record
    aligned = alignment_heads(root)
    for layer in record.layers:
        layer.alignment_heads = aligned.get(layer.name, ())
    pictures.name_tokens()
    if tokenizer is not None:
        record.name_tokens(tokenizer)
    elif special_ids:
        record.mark_special(special_ids)
    if bypassed:
        warnings.warn(
            f"The record is incomplete. {' '.join(dict.fromkeys(bypassed))} "
            "Let it call the function that transformers' AttentionInterface returns.",
            stacklevel=5,
        )
    check_complete(root, recorder.layer_names, layer_filter)
    if unheard := [f"{name} ({kind})" for name, kind in unheard_layers(root, names, recorder.layer_names).items()]:
        warnings.warn(
            f"The record is incomplete. No call of {', '.join(unheard)} was heard: "
            "it did not run, or its attention is computed elsewhere, by a class of its own or by a function that takes "
            "its weights. multihead.compat.torch_nn.replace(model, inplace=True) makes each plain "
            "nn.MultiheadAttention a layer that is recorded.",
            stacklevel=5,
        )


def _check_options(keep: object, map_size: object, map_pool: object, probes: Sequence[Probe]) -> None:
    if not isinstance(keep, str) or keep not in ("cpu", "device", "statistics", "summary"):
        raise ArgumentError(f"keep is {keep!r}.", 'Give "cpu", "device", "statistics" or "summary".')
    if map_pool not in ("mean", "max"):
        raise ArgumentError(f"map_pool is {map_pool!r}.", 'Give "mean" or "max".')
    check_integer("map_size", map_size)
    for probe in probes:
        reject_unknown_set(probe)
        # A summary leaves out the built-in statistics per key, which are part of what `look` and others measure.
        if keep == "summary" and probe.axes != "queries" and probe.name not in PROBES:
            axes = {"keys": "key", "map": "cell of a map"}[probe.axes]
            raise ProbeError(
                f'{probe.name} has a number per {axes}, and keep="summary" adds up numbers per query.',
                'Leave it out, or give keep="statistics".',
            )
