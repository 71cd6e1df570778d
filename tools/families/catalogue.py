"""List the model classes of the installed transformers, by family."""

from __future__ import annotations

import importlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel, models

from multihead.models.coverage import uses_attention_interface

_ROOT = Path(models.__file__).parent


@cache
def families() -> dict[str, tuple[str, ...]]:
    """Return the modules with model classes of each family, by the family's folder in `transformers.models`."""
    found: dict[str, list[str]] = {}
    for path in sorted(_ROOT.glob("*/modeling_*.py")):
        found.setdefault(path.parent.name, []).append(f"{models.__name__}.{path.parent.name}.{path.stem}")
    return {name: tuple(modules) for name, modules in found.items()}


def model_classes(family: str) -> list[Any]:
    """Return the model classes of a family: every subclass of `PreTrainedModel` that its modules define.

    Parts that are models themselves, such as a vision encoder, are included even if transformers does not export them.
    Abstract bases, without a forward or with a name that ends in `PreTrainedModel`, are left out.

    Raises:
        ImportError: a module needs a package that is not installed.
    """
    classes: list[Any] = []
    for name in families()[family]:
        module = importlib.import_module(name)
        classes += [
            each
            for each in vars(module).values()
            if inspect.isclass(each)
            and issubclass(each, PreTrainedModel)
            and each.__module__ == name
            and not each.__name__.endswith("PreTrainedModel")
            and getattr(each, "forward", None) is not nn.Module.forward
        ]
    return classes


def attention_layers() -> set[tuple[str, str]]:
    """Return the classes of layers that look their attention up in transformers' interface, with their families."""
    found: set[tuple[str, str]] = set()
    for family, names in families().items():
        for name in names:
            try:
                module = importlib.import_module(name)
            except ImportError:
                continue
            found |= {
                (family, each.__name__)
                for each in vars(module).values()
                if inspect.isclass(each)
                and issubclass(each, nn.Module)
                and each.__module__ == name
                and uses_attention_interface(each)
            }
    return found


def is_part(kind: Any) -> bool:
    """Whether transformers does not export a class: it is a part of models that it exports."""
    return kind.__name__ not in getattr(importlib.import_module(kind.__module__), "__all__", ())
