"""Write masks and biases down as JSON with tensors beside, and read them back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from multihead.errors import InputError, MaskError, MultiheadError
from multihead.masks import Mask
from multihead.masks.base import UnknownMask, registered
from multihead.scores.bias import Bias
from multihead.scores.relative import Relative

DEPTH = 32  # masks within masks
MOST = 1 << 40  # tokens
_RENAMED = {"Behind": "LeadingKeys"}  # in records of earlier versions


@dataclass(eq=False)
class Tensors:
    """The tensors of a file, each written once, whoever shares it.

    Fields:
        named: name -> tensor.
    """

    named: dict[str, Tensor] = field(default_factory=dict)
    _known: dict[tuple[object, ...], str] = field(default_factory=dict)
    _alive: list[Tensor] = field(default_factory=list)  # an address means something while its tensor lives

    def put(self, name: str, tensor: Tensor) -> str:
        """Take in a tensor, and return the name that it is known by."""
        where = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*where, tensor.dtype, tensor.device)
        if tensor.numel() and key in self._known:
            return self._known[key]
        self._known[key] = name
        self._alive.append(tensor)
        self.named[name] = tensor
        return name


def written_mask(mask: Mask, tensors: Tensors, name: str) -> dict[str, Any]:
    """Convert a mask to JSON: the name of its class and its fields; its tensors are stored under `name`.

    Raises:
        InputError: a field holds something that JSON cannot store.

    >>> from multihead.masks import Causal, Window
    >>> written_mask(Causal() & Window(3), Tensors(), "mask")
    {'kind': 'And', 'parts': [{'kind': 'Causal'}, {'kind': 'Window', 'size': 3, 'after': 0}]}
    """
    written = {key: _written(value, tensors, f"{name}.{key}", mask) for key, value in mask.values().items()}
    return {"kind": type(mask).__name__, **written}


def _written(value: object, tensors: Tensors, name: str, mask: Mask) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": tensors.put(name, value)}
    if isinstance(value, Mask):
        return written_mask(value, tensors, name)
    if isinstance(value, (tuple, list)):
        return [_written(each, tensors, f"{name}.{index}", mask) for index, each in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise InputError(
        f"{mask!r} cannot be saved: it holds a {type(value).__name__}.",
        "Keep numbers, texts, tensors, masks, or tuples of them in the fields of a mask.",
    )


def written_bias(bias: Bias | None, tensors: Tensors, name: str) -> dict[str, Any] | None:
    """Write a bias down; its tensor is called `name`."""
    if bias is None:
        return None
    if isinstance(bias, Relative):
        return {"kind": "Relative", "tensor": tensors.put(name, bias.values)}
    return {"kind": "Tensor", "tensor": tensors.put(name, bias)}


def read_mask(said: object, tensors: dict[str, Tensor], *, depth: int = 0) -> Mask:
    """Read a mask as `written_mask` wrote it.

    Raises:
        InputError: it is none.
    """
    try:
        return _read_mask(said, tensors, depth)
    except (KeyError, TypeError, MaskError, MultiheadError) as error:
        raise InputError(f"A mask of the file cannot be read: {error}", "Save the record anew.") from error


def _read_mask(said: Any, tensors: dict[str, Tensor], depth: int) -> Mask:
    if depth > DEPTH:
        raise TypeError("it is nested too deep.")
    kind = _RENAMED.get(said["kind"], said["kind"])
    read = {key: _read(value, tensors, depth + 1) for key, value in said.items() if key != "kind"}
    if kind in ("Keep", "Drop") and isinstance(read["tensor"], str):  # as version 1 of the format stored it
        read["tensor"] = tensors[read["tensor"]]
    found = registered(kind)
    if found is None:
        return UnknownMask(kind)
    if kind in ("And", "Or") and not (len(read["parts"]) > 1 and all(isinstance(each, Mask) for each in read["parts"])):
        raise TypeError("it combines no masks.")
    return found(**read)


def _read(value: Any, tensors: dict[str, Tensor], depth: int) -> Any:
    if isinstance(value, dict):
        return _read_mask(value, tensors, depth) if "kind" in value else tensors[value["tensor"]]
    if isinstance(value, list):
        return tuple(_read(each, tensors, depth) for each in value)
    if isinstance(value, int) and abs(value) > MOST:
        raise TypeError(f"{value!r} is no number of tokens.")
    return value


def read_bias(said: Any, tensors: dict[str, Tensor]) -> Bias | None:
    """Read a bias as `written_bias` wrote it.

    Raises:
        InputError: it is none.
    """
    if said is None:
        return None
    try:
        values = tensors[said["tensor"]]
        if said["kind"] == "Relative":
            return Relative(values)
        if said["kind"] == "Tensor" and values.is_floating_point():
            return values
    except (KeyError, TypeError, MultiheadError) as error:
        raise InputError(f"A bias of the file cannot be read: {error}", "Save the record anew.") from error
    raise InputError("A bias of the file cannot be read.", "Save the record anew.")
