"""Make models buildable that need packages besides transformers; `make families` installs those that can be."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import Any

import torch

_KEPT: list[Any] = []  # declarations of operators last as long as these objects


def declare_operators() -> None:
    """Declare two operators of torchvision, so that it can be imported; before transformers, which imports it.

    The wheel of torchvision on PyPI is built for CUDA. Next to a torch without CUDA its operators do not load, and
    importing it fails at the first statements about them. timm imports it, and calls none of them.
    """
    if torch.version.cuda is None and find_spec("torchvision") is not None:
        operators = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            with suppress(RuntimeError):  # they are declared already
                operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(operators)


def skip_checks() -> None:
    """Let transformers build models with natten's layers, whose rejection is found without running them."""
    from transformers.utils import import_utils

    import_utils.BACKENDS_MAPPING["natten"] = (lambda: True, "")
