"""Write masks and biases down as JSON with tensors beside, and read them back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from multihead.errors import InputError, MaskError, MultiheadError
from multihead.masks import Causal, Documents, Drop, Full, Keep, Lengths, Mask, Prefix, Window
from multihead.masks.behind import Behind
from multihead.masks.values import And, Or
from multihead.scores.bias import Bias
from multihead.scores.relative import Relative

DEPTH = 32  # masks within masks
MOST = 1 << 40  # tokens


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
    """Write a mask down; its tensors are named after `name`.

    >>> written_mask(Causal() & Window(3), Tensors(), "mask")
    {'kind': 'And', 'parts': [{'kind': 'Causal'}, {'kind': 'Window', 'size': 3, 'after': 0}]}
    """
    kind = {"kind": type(mask).__name__}
    if isinstance(mask, (And, Or)):
        return {
            **kind,
            "parts": [written_mask(part, tensors, f"{name}.{index}") for index, part in enumerate(mask.parts)],
        }
    if isinstance(mask, Behind):
        return {**kind, "count": mask.count, "mask": written_mask(mask.mask, tensors, f"{name}.0")}
    if isinstance(mask, Window):
        return {**kind, "size": mask.size, "after": mask.after}
    if isinstance(mask, (Keep, Drop)):
        return {**kind, "axes": mask.axes, "tensor": tensors.put(name, mask.tensor)}
    if isinstance(mask, (Lengths, Documents)):
        return {**kind, "lengths": _written_counts(mask.lengths, tensors, name)}
    if isinstance(mask, Prefix):
        return {**kind, "length": _written_counts(mask.length, tensors, name)}
    return kind


def _written_counts(counts: Any, tensors: Tensors, name: str) -> Any:
    return {"tensor": tensors.put(name, counts)} if isinstance(counts, Tensor) else counts


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
    kind = said["kind"]
    if depth > DEPTH:
        raise TypeError("it is nested too deep.")
    if kind in ("And", "Or"):
        parts = tuple(_read_mask(part, tensors, depth + 1) for part in said["parts"])
        if len(parts) < 2:
            raise TypeError("it joins no masks.")
        return And(parts) if kind == "And" else Or(parts)
    if kind == "Behind":
        return Behind(_count(said["count"]), _read_mask(said["mask"], tensors, depth + 1))
    if kind == "Window":
        return Window(_count(said["size"]), _count(said["after"]))
    if kind in ("Keep", "Drop"):
        return (Keep if kind == "Keep" else Drop)(tensors[said["tensor"]], said["axes"])
    if kind in ("Lengths", "Documents"):
        return (Lengths if kind == "Lengths" else Documents)(_read_counts(said["lengths"], tensors))
    if kind == "Prefix":
        return Prefix(_read_counts(said["length"], tensors))
    if kind in ("Full", "Causal"):
        return Full() if kind == "Full" else Causal()
    raise TypeError(f"there is no mask {kind!r}.")


def _read_counts(said: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(said, dict):
        return tensors[said["tensor"]]
    return [_read_counts(each, tensors) for each in said] if isinstance(said, list) else _count(said)


def _count(said: Any) -> int:
    """Refuse a number that tensors could not hold."""
    if isinstance(said, bool) or not isinstance(said, int) or abs(said) > MOST:
        raise TypeError(f"{said!r} is no number of tokens.")
    return said


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
