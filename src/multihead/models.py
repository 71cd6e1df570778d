"""Turn a MODEL argument into a model and its tokenizer, and a text into tokens that a person can read."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from multihead.errors import ArgumentError, InputError, ModelError

CONTINUED = "⤷"
"""What stands for a token that goes on with the character of the token before it."""

_DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
_HEADS = ("AutoModel", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
_INCOMPLETE = "\ufffd"  # what decoding gives for some bytes of a character


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
    def special_ids(self) -> list[int]:
        """The ids of the marks in this text: what `observe(special_ids=...)` takes."""
        return sorted({id_ for id_, mark in zip(self.ids[0].tolist(), self.special, strict=True) if mark})


def load(model: str, *, device: str = "cpu", dtype: str = "auto") -> LoadedModel:
    """Load a model and its tokenizer, without a word to the terminal.

    Args:
        model: a folder, the name of an installed package that carries a model, or a name on the Hugging Face hub.
        device: where it computes, such as "cpu" or "cuda".
        dtype: of its parameters: "auto" (as they were saved), "float32", "float64", "float16" or "bfloat16".

    Raises:
        ModelError: there is no such model, it cannot be read, or transformers is not installed.
        ArgumentError: a device or dtype that does not exist here.
    """
    if dtype not in _DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}.", f"Give one of {', '.join(_DTYPES)}.")
    place = _device(device)
    transformers = _transformers()
    folder = _folder(model)
    source = model if folder is None else str(folder)
    with quiet():
        network = _pretrained(transformers, model, source, folder is not None, dtype)
        tokenizer = _tokenizer(transformers, source)
    return LoadedModel(model, _title(model, folder), network.to(place).eval(), tokenizer)


def encode(loaded: LoadedModel, text: str) -> Encoded:
    """Turn a text into the model's tokens, and say of each what it shows of the text.

    A character that takes several tokens, as Chinese characters and emoji do where tokens are bytes, stands
    whole on the first of them.

    Raises:
        InputError: the text is empty, or longer than the model takes.
        ModelError: the model came without a tokenizer.
    """
    if loaded.tokenizer is None:
        raise ModelError(f"{loaded.name} came without a tokenizer.", "Give a model that reads text.")
    if not text.strip():
        raise InputError("The text is empty.", "Give at least one word.")
    fast = bool(getattr(loaded.tokenizer, "is_fast", False))
    with quiet():
        found = loaded.tokenizer(text, return_offsets_mapping=fast, return_special_tokens_mask=True, truncation=False)
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
        tokens = _tokens_by_place(loaded.tokenizer, ids, offsets, special, text)
    else:
        offsets = [(0, 0)] * len(ids)
        tokens = _tokens_by_decoding(loaded.tokenizer, ids, special)
    rows = torch.tensor([ids])
    return Encoded(rows, torch.ones_like(rows), tokens, special, unknown, offsets)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' reports, progress bars and warnings from the terminal while the context lasts."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "Loading a model needs transformers, and it is not installed.", 'Run pip install "multihead[hf]".'
        ) from error
    return transformers


def _device(device: str) -> torch.device:
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ArgumentError(f"device is {device!r}, and this machine has no such device.", 'Give "cpu".') from error
    return place


def _folder(model: str) -> Path | None:
    """Find the folder of a model on this machine: the one named, or the one inside an installed package."""
    path = Path(model).expanduser()
    if model.strip() and path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f'The folder "{model}" holds no config.json.', "Give the folder a model was saved to.")
        return path
    package = model.replace("-", "_")
    if not package.isidentifier():
        return None
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    found = [config for place in places for config in place.rglob("config.json") if _describes_model(config)]
    # The one nearest to the package's root; of several at one depth the first by name, so that it is always the same.
    return min(found, key=lambda config: (len(config.parts), str(config))).parent if found else None


def _describes_model(config: Path) -> bool:
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(said, dict) and "model_type" in said


def _title(model: str, folder: Path | None) -> str:
    if folder is None:
        return model.rsplit("/", 1)[-1]
    return Path(model).expanduser().resolve().name if Path(model).expanduser() == folder else model


def _pretrained(transformers: Any, model: str, source: str, is_here: bool, dtype: str) -> Any:  # noqa: FBT001
    choice = dtype if dtype == "auto" else getattr(torch, dtype)
    for head in _HEADS:
        try:
            return getattr(transformers, head).from_pretrained(source, dtype=choice, trust_remote_code=False)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise _unreadable(model, error) from error
        except (OSError, RuntimeError, KeyError, TypeError, AttributeError, ImportError) as error:
            if is_here:
                raise _unreadable(model, error) from error
            raise ModelError(
                f'"{model}" is no folder, no installed package that carries a model, and no model of the Hugging Face '
                "hub that is on this machine or can be fetched now.",
                "Check the name, or go online and download it first.",
            ) from error
    raise ModelError(f"{model} is no model of text with attention.", "Give an encoder or a language model.")


def _unreadable(model: str, error: Exception) -> ModelError:
    said = str(error).strip().splitlines()
    return ModelError(
        f"{model} cannot be read: {said[0].rstrip('.') if said else type(error).__name__}.",
        "Save it anew with model.save_pretrained(folder).",
    )


def _tokenizer(transformers: Any, source: str) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None  # a model of images has none; encode() says so where one is needed
    # Where its files are missing the library makes one up that knows its marks alone, and no word.
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else None


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


def _tokens_by_decoding(tokenizer: Any, ids: Sequence[int], special: Sequence[bool]) -> list[str]:
    """Decode token by token; tokens that are parts of a character are decoded together."""
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
