"""Turn a MODEL argument into a model and its tokenizer, and a text into tokens that a person can read."""

from __future__ import annotations

import importlib.util
import json
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multihead.claims import gguf_layers, refuse_unless_moderate
from multihead.errors import ArgumentError, InputError, ModelError
from multihead.files import is_folder
from multihead.optional import require

CONTINUED = "⤷"
"""What stands for a token that goes on with the character of the token before it."""

_DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
_HEADS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
_INCOMPLETE = "\ufffd"  # what decoding gives for some bytes of a character
_SAVE_ANEW = "Save it anew with model.save_pretrained(folder)."
_GGUF_NEEDS = ("gguf", "accelerate")

Stage = Callable[[str], None]
"""Told what begins now: "weights" or "tokenizer"."""


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    Fields:
        name: what the user called it.
        title: a short name to show.
        model: the model, in evaluation mode.
        tokenizer: what turns text into its ids, or None where it came without.
    """

    name: str
    title: str
    model: nn.Module
    tokenizer: Any

    @property
    def max_tokens(self) -> int | None:
        """The most tokens the model takes, or None where its positions have no end."""
        config: Any = self.model.config
        positions = getattr(config, "max_position_embeddings", None)
        if not isinstance(positions, int) or positions < 1:
            return None
        if getattr(config, "model_type", "").startswith(("roberta", "xlm-roberta", "camembert")):
            # They count positions from behind the padding's own.
            positions -= int(getattr(config, "pad_token_id", 1) or 0) + 1
        told = getattr(self.tokenizer, "model_max_length", None)
        return min(positions, told) if isinstance(told, int) else positions

    @property
    def reader(self) -> nn.Module:
        """The part of the model that reads a text: the encoder of an encoder-decoder model, else the model."""
        model: Any = self.model
        encoder: nn.Module = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
        return encoder

    def arguments(self, encoded: Encoded) -> dict[str, Tensor]:
        """Give what the reader's forward takes for a text."""
        device = next(self.model.parameters()).device
        return {"input_ids": encoded.ids.to(device), "attention_mask": encoded.mask.to(device)}


@dataclass(frozen=True, eq=False)
class Encoded:
    """A text as the model's tokens.

    Fields:
        ids: (1, tokens), int64.
        mask: (1, tokens), int64, all 1.
        tokens: what each token shows of the text; `CONTINUED` where it goes on with the character before.
        special: whether each token is a mark of the model's own, such as [CLS].
        unknown: whether each token stands for text that the model has no token for.
        offsets: where each token begins and ends in the text, characters; (0, 0) for the model's own marks.
    """

    ids: Tensor
    mask: Tensor
    tokens: list[str]
    special: list[bool]
    unknown: list[bool]
    offsets: list[tuple[int, int]]

    @property
    def stop(self) -> int:
        """Where the last token ends in the text, characters; 0 where the tokenizer tells no places."""
        return max((stop for _, stop in self.offsets), default=0)

    @property
    def special_ids(self) -> list[int]:
        """The ids of the marks in this text: what `observe(special_ids=...)` takes."""
        return sorted({id_ for id_, mark in zip(self.ids[0].tolist(), self.special, strict=True) if mark})


def load(model: str, *, device: str = "cpu", dtype: str = "auto", stage: Stage | None = None) -> LoadedModel:
    """Load a model and its tokenizer, without a word to the terminal.

    A GGUF file, which some packages carry, is read where the packages gguf and accelerate are installed; that takes
    about 20 s for 135 million parameters, most of it for the tokens' names.

    Args:
        model: a folder, a GGUF file, the name of an installed package that carries a model, or a name on the Hugging
            Face hub.
        device: where it computes, such as "cpu" or "cuda".
        dtype: of its parameters: "auto" (as they were saved), "float32", "float64", "float16" or "bfloat16".
        stage: called with "weights" and with "tokenizer" when their reading begins.

    Raises:
        ModelError: there is no such model, it cannot be read, or transformers is not installed.
        ArgumentError: a device or dtype that does not exist here.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}.", f"Give one of {', '.join(_DTYPES)}.")
    place = _device(device)
    transformers = _transformers()
    found = _file(model)
    source = _source(model, found)
    tell = stage or (lambda name: None)
    with quiet():
        tell("weights")
        refuse_unless_moderate(model, _claimed(transformers, source))
        network = _pretrained(transformers, model, source, found is not None, dtype)
        tell("tokenizer")
        tokenizer = _tokenizer(transformers, source)
    return LoadedModel(model, _title(model, found), network.to(place).eval(), tokenizer)


def encode(loaded: LoadedModel, text: str, *, tokens: int | None = None) -> Encoded:
    """Turn a text into the model's tokens, and say of each what it shows of the text.

    A character that takes several tokens, as Chinese characters and emoji do where tokens are bytes, stands
    whole on the first of them.

    Args:
        loaded: the model.
        text: what it is to read.
        tokens: cut the text so that it has at most so many tokens, the model's own marks with; None cuts nothing.

    Raises:
        InputError: the text is empty, or longer than the model takes.
        ArgumentError: so few tokens that the model's marks leave none for the text.
        ModelError: the model came without a tokenizer.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} came without a tokenizer.", "Give a model that reads text.")
    if not text.strip():
        raise InputError("The text is empty.", "Give at least one word.")
    if re.search("[\ud800-\udfff]", text):
        raise InputError("The text holds half of a surrogate pair, or bytes that are no UTF-8.", "Give it as UTF-8.")
    fast = bool(getattr(loaded.tokenizer, "is_fast", False))
    cut = {"truncation": False} if tokens is None else {"truncation": True, "max_length": _length(loaded, tokens)}
    with quiet():
        found = loaded.tokenizer(text, return_offsets_mapping=fast, return_special_tokens_mask=True, **cut)
    ids = [int(each) for each in found["input_ids"]]
    most = loaded.max_tokens
    if not ids:
        raise InputError("The text has no token that the model knows.", "Give a text in a script that the model reads.")
    if most is not None and len(ids) > most:
        raise InputError(
            f"The text is {len(ids):,} tokens long, and {loaded.title} takes {most:,}.",
            f"Cut it to {most:,} tokens, or take a model that reads longer texts.",
        )
    special = [bool(each) for each in found["special_tokens_mask"]]
    unknown = [each == loaded.tokenizer.unk_token_id and not mark for each, mark in zip(ids, special, strict=True)]
    if fast:
        offsets = [(int(start), int(end)) for start, end in found["offset_mapping"]]
        shown = _tokens_by_place(loaded.tokenizer, ids, offsets, special, text)
    else:
        offsets = [(0, 0)] * len(ids)
        shown = tokens_of(loaded.tokenizer, ids, special)
    rows = torch.tensor([ids])
    return Encoded(rows, torch.ones_like(rows), shown, special, unknown, offsets)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' reports, progress bars and warnings from the terminal while the context lasts."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), _without_bar_of_gguf():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _without_bar_of_gguf() -> Iterator[None]:
    """Reading a GGUF file draws a progress bar of its own, which nothing of transformers' settings reaches."""
    from transformers import modeling_gguf_pytorch_utils as reading

    bar = getattr(reading, "tqdm", None)
    reading.tqdm = lambda items, *given, **said: items
    try:
        yield
    finally:
        reading.tqdm = bar


def _transformers() -> Any:
    require("transformers", purpose="Loading a model", extra="hf")
    import transformers

    return transformers


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"device is {device!r}, and this machine has no such device.", 'Give "cpu".') from error
    return place


def _file(model: str) -> Path | None:
    """Find the file that describes a model on this machine: its config.json, or a GGUF file, which describes itself.

    It is the one named, the one in the folder named, or the one inside an installed package.
    """
    path = _path(model)
    if model.strip() and is_folder(path):
        return _file_in(path, model)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    package = model.replace("-", "_")
    if not package.isidentifier():
        return None
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [config for place in places for config in place.rglob("config.json") if _describes_model(config)]
    found = found or [file for place in places for file in place.rglob("*.gguf")]
    # The one nearest to the package's root; of several at one depth the first by name, so that it is always the same.
    return min(found, key=lambda file: (len(file.parts), str(file))) if found else None


def _path(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~name, and nobody is called so
        return Path(model)


def _file_in(folder: Path, model: str) -> Path:
    """Find the file that describes the model in a folder."""
    if (folder / "config.json").is_file():
        return folder / "config.json"
    found = sorted(folder.glob("*.gguf"))
    if not found:
        raise ModelError(f'The folder "{model}" holds no config.json.', "Give the folder a model was saved to.")
    if len(found) > 1:
        raise ModelError(
            f'The folder "{model}" holds {len(found)} GGUF files.',
            f'Give one of them, such as "{folder / found[0].name}".',
        )
    return found[0]


def _source(model: str, found: Path | None) -> dict[str, str]:
    """Say where a model is, as `from_pretrained` takes it.

    Raises:
        MissingPackageError: it is a GGUF file, and the packages that read those are not installed.
    """
    if found is None:
        return {"pretrained_model_name_or_path": model}
    if found.name == "config.json":
        return {"pretrained_model_name_or_path": str(found.parent)}
    require(*_GGUF_NEEDS, purpose=f"{model} is a GGUF file, and reading it", extra="gguf")
    return {"pretrained_model_name_or_path": str(found.parent), "gguf_file": found.name}


def _describes_model(config: Path) -> bool:
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and "model_type" in said


def _title(model: str, found: Path | None) -> str:
    if found is None:
        return model.rsplit("/", 1)[-1]
    path = _path(model)
    if path == found:
        return found.stem
    return path.resolve().name if path == found.parent else model


def _pretrained(transformers: Any, model: str, source: dict[str, str], is_here: bool, dtype: str) -> Any:  # noqa: FBT001
    choice = dtype if dtype == "auto" else getattr(torch, dtype)
    for head in _HEADS:
        try:
            return getattr(transformers, head).from_pretrained(**source, dtype=choice, trust_remote_code=False)
        except Exception as error:  # a broken file fails in whatever way its bytes lead to
            if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
                continue
            _refuse_code(model, str(error))
            if is_here or isinstance(error, ValueError):
                mend = "Fetch or convert it anew." if "gguf_file" in source else _SAVE_ANEW
                said = str(error).strip().splitlines()
                raise ModelError(
                    f"{model} cannot be read: {said[0].rstrip('.') if said else type(error).__name__}.", mend
                ) from error
            raise ModelError(
                f'"{model}" is no folder, no installed package that carries a model, and no model of the Hugging Face '
                "hub that is on this machine or can be fetched now.",
                "Check the name, or go online and download it first.",
            ) from error
    raise ModelError(f"{model} is no model of text with attention.", "Give an encoder or a language model.")


def _refuse_code(model: str, said: str) -> None:
    """Refuse a model that would run code; what transformers says of it ends in the advice to allow that.

    Raises: ModelError where that is why it was not read.
    """
    if "weights_only" in said or "Weights only load failed" in said:
        raise ModelError(
            f"{model} keeps its weights in a pickle, and this one is broken or holds more than tensors, which may run "
            "code when it is opened.",
            "Give the model with its weights as safetensors.",
        )
    if "trust_remote_code" in said or "custom code" in said:
        raise ModelError(
            f"{model} needs Python code that comes with it, and multihead runs no code of a model.",
            "Give a model of a family that transformers has built in.",
        )


def _claimed(transformers: Any, source: dict[str, str]) -> Any:
    """Read what a model claims to be, or nothing where it cannot be read: loading it finds that out, in words."""
    try:
        if "gguf_file" in source:
            with (Path(source["pretrained_model_name_or_path"]) / source["gguf_file"]).open("rb") as file:
                return gguf_layers(file)
        return transformers.PretrainedConfig.get_config_dict(**source)[0]
    except Exception:  # noqa: BLE001 - a broken file fails in whatever way its bytes lead to
        return {}


def _tokenizer(transformers: Any, source: dict[str, str]) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source, trust_remote_code=False)
    except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower where its file is broken
        return None  # a model of images has none; encode() says so where one is needed
    # Where its files are missing the library makes one up that knows its marks alone, and no word.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


def _length(loaded: LoadedModel, tokens: int) -> int:
    """Refuse fewer tokens than the model's marks and one of the text."""
    least = int(loaded.tokenizer.num_special_tokens_to_add()) + 1
    if tokens < least:
        raise ArgumentError(f"tokens is {tokens}.", f"Give at least {least} for {loaded.title}, its own marks with.")
    return tokens


def _tokens_by_place(
    tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]], special: Sequence[bool], text: str
) -> list[str]:
    """Show the text each token was made of; tokens that share a character share its place."""
    shown: list[str] = []
    reached = 0
    for id_, (start, end), mark in zip(ids, offsets, special, strict=True):
        if mark:
            shown.append(str(tokenizer.convert_ids_to_tokens(id_)))
        elif start == end:
            shown.append(str(tokenizer.decode([id_])))
        else:
            shown.append(text[max(start, reached) : end] if end > reached else CONTINUED)
            reached = max(reached, end)
    return shown


def tokens_of(tokenizer: Any, ids: Sequence[int], special: Sequence[bool]) -> list[str]:
    """Say what each token shows, decoded one by one; tokens that are parts of a character are decoded together."""
    shown: list[str] = []
    first = 0
    for index, (id_, mark) in enumerate(zip(ids, special, strict=True)):
        if mark:
            shown.append(str(tokenizer.convert_ids_to_tokens(id_)))
            first = index + 1
            continue
        piece = str(tokenizer.decode(list(ids[first : index + 1])))
        shown.append(CONTINUED if index > first else piece)
        if piece and not piece.endswith(_INCOMPLETE):  # of an unfinished character some tokenizers show nothing
            shown[first] = piece
            first = index + 1
    return shown
