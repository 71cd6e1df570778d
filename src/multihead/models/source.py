"""Find what a MODEL argument names: a file of this machine, or a model of the Hugging Face hub.

Nothing here imports PyTorch or transformers, so a wrong name is rejected before they are loaded.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multihead.errors import ModelError
from multihead.errors.optional import require
from multihead.files import is_folder

_PATIENCE = 10  # seconds that the Hugging Face hub has for its answer


def find_model(model: str) -> Path | None:
    """Return the file that describes a model of this machine, or None for a model of the Hugging Face hub.

    Args:
        model: a folder, a GGUF file, the name of an installed package that contains a model, or a name on the hub.

    Raises:
        ModelError: there is no such model, neither here nor on the hub, or the hub cannot be reached.
        MissingPackageError: it is no file of this machine, and transformers is not installed.
    """
    file = _find_describing_file(model)
    if file is not None:
        return file
    require("transformers", purpose="Loading a model", extra="hf")
    from huggingface_hub import constants, file_exists, get_session, try_to_load_from_cache

    try:
        # Either rejects a name that no model of the hub can have.
        if isinstance(try_to_load_from_cache(model, "config.json"), str):
            return None
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
        found = file_exists(model, "config.json")
    except Exception as error:  # each version of the library has errors of its own
        raise unknown_model(model) from error
    if not found:
        raise unknown_model(model)
    return None


def unknown_model(model: str) -> ModelError:
    """Return the error of a name that no model has."""
    return ModelError(
        f'"{model}" is neither a folder nor an installed package that contains a model nor a model of the '
        "Hugging Face hub that is on this machine or can be downloaded now.",
        "Check the name, or go online and download it first.",
    )


def _find_describing_file(model: str) -> Path | None:
    """Return the file that describes a local model: its config.json, or a GGUF file, which describes itself.

    The argument is this file, its folder, or an installed package that contains it.
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
    # The one nearest to the package's root; of several at one depth the first by name, so that it is always the same.
    return min(files, key=lambda file: (len(file.parts), str(file))) if files else None


def local_path(model: str) -> Path:
    """Return the path that a MODEL argument is, whether it exists or not."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # ~name without such a user
        return Path(model)


def _find_file_in_folder(folder: Path, model: str) -> Path:
    """Return the file that describes the model in a folder."""
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
def offline_if_unreachable() -> Iterator[None]:
    """Look up models on this machine only while the Hugging Face hub cannot be reached.

    Without this, its library requests each file of a model six times, which takes over a minute without a network.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        get_session().head(constants.ENDPOINT, timeout=_PATIENCE)
    except Exception:  # noqa: BLE001 - each version of the library has errors of its own
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
