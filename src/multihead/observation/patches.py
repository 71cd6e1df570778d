"""Name the tokens of image models: the model's own, such as [CLS], then the patches of the image by row and column."""

from __future__ import annotations

from typing import Any

from torch import nn

from multihead.record.texts import Text

# Parameters of transformers' models that are tokens before the patches, in the order in which these are concatenated.
_TOKENS_BEFORE_PATCHES = {
    "cls_token": "CLS",
    "class_embedding": "CLS",
    "distillation_token": "DIST",
    "register_tokens": "REG",
}
_MODEL_WITH_CLASS_TOKEN_LAST = "llama4_vision_model"


def text_of_patches(model: nn.Module, layer: str) -> Text | None:
    """Return the tokens of an image, as the configuration around a layer describes them; None if it describes none.

    >>> from transformers import ViTConfig, ViTModel
    >>> sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    >>> text = text_of_patches(ViTModel(ViTConfig(**sizes, image_size=8, patch_size=4)), "encoder.layer.0")
    >>> text.tokens, text.patches
    (['[CLS]', 'r1 c1', 'r1 c2', 'r2 c1', 'r2 c2'], (2, 2))
    """
    around = _modules_around(model, layer)
    config = next((each.config for each in around if hasattr(each, "config")), None)
    image, patch = _height_and_width(config, "image_size"), _height_and_width(config, "patch_size")
    if image is None or patch is None or getattr(config, "model_type", None) == _MODEL_WITH_CLASS_TOKEN_LAST:
        return None
    rows, columns = (size // of_patch for size, of_patch in zip(image, patch, strict=True))
    first = next(filter(None, map(_tokens_before_patches, around)), [])
    places = [(row, column) for row in range(1, rows + 1) for column in range(1, columns + 1)]
    return Text(
        tokens=[*first, *(f"r{row} c{column}" for row, column in places)],
        special=[True] * len(first) + [False] * len(places),
        gaps=[None] * len(first) + ["\n" if column == 1 else " " for _, column in places],  # a line per row
        patches=(rows, columns),
    )


def _modules_around(model: nn.Module, name: str) -> list[nn.Module]:
    """Return a module of a model by its name, if there is one, and the modules around it, the innermost first."""
    parts, known = name.split("."), dict(model.named_modules())
    names = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return [known[each] for each in names if each in known]


def _height_and_width(config: Any, name: str) -> tuple[int, int] | None:
    """Return a size in pixels from a configuration, which has one number for both or two."""
    size = getattr(config, name, None)
    match [size, size] if isinstance(size, int) else size:
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
    return None


def _tokens_before_patches(module: nn.Module) -> list[str]:
    """Return the names of a model's own tokens before the patches, such as ["[CLS]", "[REG 1]", "[REG 2]"]."""
    counts: dict[str, int] = {}
    for name, parameter in module.named_parameters():
        kind = _TOKENS_BEFORE_PATCHES.get(name.rpartition(".")[2])
        if kind is not None:
            counts[kind] = parameter.shape[-2] if parameter.dim() > 1 else 1
    return [
        f"[{kind}]" if counts[kind] == 1 else f"[{kind} {number}]"
        for kind in dict.fromkeys(_TOKENS_BEFORE_PATCHES.values())
        if kind in counts
        for number in range(1, counts[kind] + 1)
    ]
