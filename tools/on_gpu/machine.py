"""Print what this machine is as JSON: card, versions, and which packages are missing."""

from __future__ import annotations

import json
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

OPTIONAL = ("pytest",)  # packages that tools/on_gpu/without_* stand in for


def main() -> None:
    """Print one line of JSON; `problem` is a sentence if nothing can run here."""
    found: dict[str, Any] = {"python": platform.python_version(), "executable": sys.executable}
    found["missing"] = [name for name in OPTIONAL if find_spec(name) is None]
    for name in ("triton", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["problem"] = _examine_gpu(found)
    print(json.dumps(found))


def _examine_gpu(found: dict[str, Any]) -> str | None:
    """Add torch and the card to `found`; return why nothing can run here, in one sentence, or None."""
    try:
        import torch
    except ImportError as error:
        return f"{sys.executable} cannot import torch ({error})."
    found["torch"] = torch.__version__
    found["cuda"] = torch.version.cuda
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        return f"torch is {torch.__version__}, and multihead needs 2.11 or newer."
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is a build without CUDA."
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU."
    card = torch.cuda.get_device_properties(0)
    found |= {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "cudnn": torch.backends.cudnn.version(),
    }
    return None


if __name__ == "__main__":
    main()
