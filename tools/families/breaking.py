"""Drop one part of an attention call, to see whether the comparison finds it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multihead.masks import Causal, Full, Keep, Window
from multihead.masks.base import And, Mask, Or
from multihead.models.huggingface import mask_of_tensor
from multihead.models.lazy_mask import LazyMask

MUTATIONS = ("mask", "scale", "softcap", "sinks", "bias", "window")


def parts_of_call(query: Tensor, mask: Any, options: dict[str, Any]) -> set[str]:
    """Return which parts of MUTATIONS a call has."""
    default = query.shape[-1] ** -0.5
    scaling = options.get("scaling")
    hides, adds = False, options.get("position_bias") is not None
    if isinstance(mask, LazyMask):
        hides = not bool(mask.as_bool_tensor().all())
    elif mask is not None:
        kept, bias = mask_of_tensor(mask, mask.shape[-1])
        hides = isinstance(kept, Keep) and not bool(kept.tensor.all())
        adds = adds or (bias is not None and _varies(bias, kept))
    found = {
        "mask": hides,
        "scale": scaling is not None and abs(scaling - default) > 1e-3 * default,
        "softcap": options.get("softcap") is not None,
        "sinks": options.get("s_aux") is not None,
        "bias": adds,
        "window": isinstance(mask, LazyMask) and _hides_more(mask),
    }
    return {name for name, has in found.items() if has}


def without(part: str, mask: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the mask and the options of a call without one of its parts."""
    names = {"scale": "scaling", "softcap": "softcap", "sinks": "s_aux", "bias": "position_bias"}
    options = {name: value for name, value in options.items() if name != names.get(part)}
    if part == "mask":
        return None, options | {"is_causal": False}
    if part == "bias" and isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask > torch.finfo(mask.dtype).min / 2
    if part == "window" and isinstance(mask, LazyMask):
        mask = _replace_mask(mask, _without_window(mask.mask))
    return mask, options


def _varies(bias: Tensor, kept: Mask) -> bool:
    """Whether a bias differs between the keys that a query sees: the same number for all of them changes nothing."""
    if not isinstance(kept, Keep):
        return True
    hidden = ~kept.tensor
    return bool((bias.masked_fill(hidden, -torch.inf).amax(-1) > bias.masked_fill(hidden, torch.inf).amin(-1)).any())


def _hides_more(mask: LazyMask) -> bool:
    """Whether a mask has a window that hides keys in this call."""
    wide = _replace_mask(mask, _without_window(mask.mask))
    return wide.mask != mask.mask and not torch.equal(wide.as_bool_tensor(), mask.as_bool_tensor())


def _replace_mask(mask: LazyMask, value: Mask) -> LazyMask:
    return LazyMask(value, mask.extent, mask.padding)


def _without_window(mask: Mask) -> Mask:
    if isinstance(mask, Window):
        return Full() if mask.after else Causal()
    if isinstance(mask, (And, Or)):
        first, *others = (_without_window(part) for part in mask.parts)
        for each in others:
            first = first & each if isinstance(mask, And) else first | each
        return first
    return mask
