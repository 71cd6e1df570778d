"""Read the pictures that a user gives, load the processor of a model that reads pictures, and prepare its call."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from multihead.errors import InputError, ModelError, MultiheadError
from multihead.errors.given import PIXELS, is_array, reject_given
from multihead.errors.optional import require
from multihead.models.loading import LoadedModel, ModelDescription, check_text, silence_transformers
from multihead.models.source import hub_access
from multihead.tensors.undo import Undo

_EXPECTED = "the name of a picture's file, a picture of Pillow or an array of (height, width, channels)"


class ReadPictures(NamedTuple):
    """Pictures that were read.

    Attributes:
        images: the pictures, of Pillow, in RGB.
        notes: one sentence for each change, such as that a picture was turned as its file says.
    """

    images: list[Any]
    notes: list[str]


def read_pictures(given: object) -> ReadPictures:
    """Read pictures: names of files, pictures of Pillow, arrays of (height, width, channels), or a list of these.

    An array holds bytes, 16 bits per colour, or numbers from 0 to 1 or to 255; its channels may come first.

    Raises:
        ArgumentError: there is no picture, or something else.
        InputError: a file does not exist, is no picture, or is animated.
        MissingPackageError: Pillow is not installed.
    """
    require("PIL", purpose="Reading a picture", extra="image")
    items: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if not items:
        reject_given("image", given, _EXPECTED, "Give at least one picture.")
    found: list[Any] = []
    notes: list[str] = []
    for number, item in enumerate(items, 1):
        name = f"Picture {number}"
        if isinstance(item, (str, os.PathLike)):
            found.append(_read_file(os.fspath(item), notes))
        elif hasattr(item, "convert") and hasattr(item, "getexif"):
            found.append(_read_image(item, name, notes))
        elif is_array(item):
            found.append(_as_rgb(_image_of_array(item, name, notes), name, notes))
        else:
            reject_given("image", item, _EXPECTED, "Give one, or a list of them.")
    return ReadPictures(found, notes)


def _read_file(file: str, notes: list[str]) -> Any:
    from PIL import Image

    name = repr(file)
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:(//|[a-z]+/[a-z]+[;,])", file):
        raise InputError("A web address was given as a picture.", "Save the picture, and give the name of its file.")
    with _one_sentence(name):
        if file and Path(file).is_dir():
            raise InputError(f"{name} is a folder.", "Give the names of the pictures in it.")
        with Image.open(file) as image:
            return _read_image(image, name, notes)


def _read_image(image: Any, name: str, notes: list[str]) -> Any:
    """Load a picture of Pillow, and return it as RGB."""
    with _one_sentence(name):
        image.load()
        return _as_rgb(image, name, notes)


@contextmanager
def _one_sentence(name: str) -> Iterator[None]:
    """Raise an InputError in place of Pillow's errors about a picture."""
    from PIL import Image

    try:
        yield
    except MultiheadError:
        raise
    except FileNotFoundError:
        raise InputError(f"There is no file {name}.", "Check its name.") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        reason = "its format is unknown, or it is no picture" if "cannot identify" in reason else reason.rstrip(".")
        raise InputError(
            f"{name} cannot be read as a picture: {reason}.", "Give a picture as PNG, JPEG or WebP."
        ) from None


def _image_of_array(array: Any, name: str, notes: list[str]) -> Any:
    """Return the picture in an array; append a sentence to `notes` if it has 16 bits per colour."""
    from PIL import Image

    if isinstance(array, torch.Tensor):
        array = (array.float() if array.is_floating_point() else array).detach().cpu()
    values = np.asarray(array)
    if values.ndim == 3 and values.shape[2] > 4 and values.shape[0] <= 4:
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[2] == 1:
        values = values[:, :, 0]
    if values.ndim not in (2, 3) or values.shape[2:] > (4,) or not values.size:
        reject_given("image", array, _EXPECTED, "Give one, or a list of them; an array has 1 to 4 channels.")
    if values.dtype.kind not in "fiub":
        reject_given("image", array, _EXPECTED, f"Its values are {values.dtype}: give numbers from 0 to 255.")
    low, high = values.min(), values.max()
    deep = values.dtype == np.uint16
    most = 65535 if deep else 1 if values.dtype.kind == "b" or (values.dtype.kind == "f" and high <= 1) else 255
    if not (low >= 0 and (high <= 1 or 2 < high <= most or values.dtype.kind != "f") and high <= most):
        raise InputError(
            f"{name} has values from {low:.3g} to {high:.3g}.", "Give numbers from 0 to 1, or bytes from 0 to 255."
        )
    if deep:
        notes.append(_reduced(name))
    return Image.fromarray((values / most * 255).round().astype(np.uint8))


def _reduced(name: str) -> str:
    return f"{name} has more than 8 bits per pixel, and was reduced to 8."


def _as_rgb(image: Any, name: str, notes: list[str]) -> Any:
    """Return a picture as RGB, turned as its file says; append a sentence to `notes` for what changes its looks."""
    from PIL import Image, ImageOps

    frames = int(getattr(image, "n_frames", 1))
    if frames > 1 and image.format != "MPO":  # a photo of a phone, with further pictures for depth or brightness
        raise InputError(
            f"{name} is animated or has several pages: it holds {frames} pictures.",
            "Give one of them as a file of its own.",
        )
    turned = ImageOps.exif_transpose(image)
    if 0 in turned.size:
        raise InputError(f"{name} has no pixels.", "Give a picture with a width and a height.")
    if image.getexif().get(0x0112, 1) not in (0, 1):
        notes.append(f"{name} was turned as its file says, to {turned.width} x {turned.height} pixels.")
    if turned.mode in ("I", "F") or turned.mode.startswith("I;16"):
        levels = np.nan_to_num(np.asarray(turned, dtype=np.float64))
        high = float(levels.max(initial=0))
        most = max(65535.0, high) if turned.mode != "F" and high > 255 else max(high, 1.0)
        turned = Image.fromarray((levels / most * 255).clip(0, 255).round().astype(np.uint8))
        notes.append(_reduced(name))
    elif turned.mode == "CMYK":
        notes.append(f"{name} has the colours of print (CMYK), and was converted to RGB.")
    elif turned.has_transparency_data and turned.convert("RGBA").getchannel("A").getextrema() != (255, 255):
        notes.append(f"{name} is partly transparent, and was read without its transparency.")
    return turned.convert("RGB")


class _PartsWithoutVideo:
    """The mapping of transformers from a part of a processor to its auto class, with a video processor that is None."""

    def __init__(self, mapping: Any) -> None:
        self._mapping = mapping

    def __getitem__(self, key: str) -> Any:
        return self if key == "video_processor" else self._mapping[key]

    def __contains__(self, key: str) -> bool:
        return key in self._mapping

    def keys(self) -> Any:
        return self._mapping.keys()

    def from_pretrained(self, *_: object, **__: object) -> None:
        """Load no video processor."""


def load_processor(described: ModelDescription) -> Any:
    """Load the processor of a model that reads pictures, without its video processor where torchvision is missing.

    Raises:
        ModelError: the model has no processor, reads no pictures, or its processor needs torchvision.
    """
    import transformers
    from transformers import processing_utils
    from transformers.utils import is_torchvision_available

    source, errors = described.pretrained_arguments, []
    with silence_transformers(), hub_access(online=described.found_model.online), Undo() as undo:
        if not is_torchvision_available():
            check = processing_utils.ProcessorMixin.check_argument_for_proper_class
            parts = _PartsWithoutVideo(processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING)
            undo.set_attribute(processing_utils, "MODALITY_TO_AUTOPROCESSOR_MAPPING", parts)
            undo.set_attribute(
                processing_utils.ProcessorMixin,
                "check_argument_for_proper_class",
                lambda self, name, value: None if value is None else check(self, name, value),
            )
        for auto_class in ("AutoProcessor", "AutoImageProcessor"):
            try:
                found = getattr(transformers, auto_class).from_pretrained(**source, trust_remote_code=False)
            except Exception as error:  # noqa: BLE001 - a broken file can raise any error
                errors.append(str(error))
                continue
            if hasattr(getattr(found, "image_processor", found), "preprocess"):
                return found
    if any("torchvision" in error.lower() for error in errors):
        raise ModelError(
            f"The processor of {described.name} needs torchvision, which must fit the installed torch "
            f"{torch.__version__}.",
            "Install it from the same place as torch: pip install torchvision.",
        )
    raise ModelError(
        f"{described.name} does not read pictures: it has no image processor.",
        "Give a model that does, or the text alone; the option of look is --prompt.",
    )


def picture_call(loaded: LoadedModel, processor: Any, images: Sequence[Any], text: str | None) -> dict[str, Any]:
    """Prepare the call of a model on pictures, and on a text, if it reads text too.

    Args:
        loaded: the model.
        processor: its processor.
        images: the pictures of the call.
        text: the text after the pictures; the chat template writes both where there is one.

    Raises:
        InputError: the processor does not read the pictures.
        ModelError: the model reads no text and got one, or needs one and got none.
    """
    has_tokenizer = getattr(processor, "tokenizer", None) is not None
    needs_text = has_tokenizer and "input_ids" in inspect.signature(loaded.model.forward).parameters
    if text is not None:
        check_text(text)
        if not needs_text:
            raise ModelError(f"{loaded.title} reads pictures and no text.", "Leave out the text.")
    if needs_text and text is None:
        raise ModelError(
            f"{loaded.title} reads a text with its pictures.",
            'Give one; the option of look is --prompt "What is this?".',
        )
    try:
        with silence_transformers():
            if needs_text:
                prompt = _prompt(processor, len(images), str(text))
                made = processor(text=[prompt], images=list(images), return_tensors="pt")
            else:
                made = getattr(processor, "image_processor", processor)(images=list(images), return_tensors="pt")
    except ValueError as error:
        raise InputError(
            f"The processor of {loaded.title} does not read the pictures: {str(error).rstrip('.')}.",
            "Give pictures of another size.",
        ) from error
    parameter = next(loaded.model.parameters())
    return {
        name: value.to(parameter) if value.is_floating_point() else value.to(parameter.device)
        for name, value in made.items()
        if isinstance(value, torch.Tensor)
    }


def _prompt(processor: Any, pictures: int, text: str) -> str:
    """Write a prompt with pictures: by the chat template, else with the mark of a picture before the text."""
    if getattr(processor, "chat_template", None):
        content = [*({"type": "image"} for _ in range(pictures)), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        return str(processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    mark = getattr(processor, "image_token", None)
    return f"{mark}\n" * pictures + text if isinstance(mark, str) else text


def number_of_picture_tokens(loaded: LoadedModel, processor: Any, call: Mapping[str, Any]) -> int:
    """Return how many tokens the pictures of a call become: of a language model, those that mark pictures."""
    names = ("image_token_id", "image_token_index")
    known = (getattr(owner, name, None) for owner in (processor, loaded.config) for name in names)
    mark = next((each for each in known if isinstance(each, int)), None)
    if mark is not None and "input_ids" in call and (count := int((call["input_ids"] == mark).sum())):
        return count
    pixels = call[PIXELS]
    if pixels.dim() < 4:
        return int(pixels.shape[:-1].numel())
    size = getattr(getattr(loaded.config, "vision_config", loaded.config), "patch_size", None)
    height, width = (size, size) if isinstance(size, int) else size if size is not None else (16, 16)
    frames = pixels.shape[:-3].numel()
    return int(frames * -(-pixels.shape[-2] // height) * -(-pixels.shape[-1] // width))


def check_number_of_tokens(count: int, max_tokens: int) -> None:
    """Reject pictures that become too many tokens, since the time and memory of the model grow with their square.

    Raises:
        InputError: they become more than `max_tokens`.
    """
    if count > max_tokens:
        raise InputError(
            f"The pictures become {count:,} tokens, and at most {max_tokens:,} are read.",
            f"Give smaller or fewer pictures, or max_tokens={count}; the option of look is --max-tokens {count}.",
        )
