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
MOST_SIZE = (1 << 63) - 1  # of a window: sys.maxsize is a way to write one without end

MOST_MASKS = 1000
"""Masks that one mask may join, over all its parts; masks written by people join two to five."""

_LENGTH = 200  # characters of a mask, or of a value, in an error


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

    Raises:
        MaskError: it is, or joins, a mask that a file does not hold, or more of them than one holds.

    >>> written_mask(Causal() & Window(3), Tensors(), "mask")
    {'kind': 'And', 'parts': [{'kind': 'Causal'}, {'kind': 'Window', 'size': 3, 'after': 0}]}
    """
    _refuse_unless_few(mask)
    written = _written_mask(mask, tensors, name)
    try:
        read_mask(written, tensors.named)
    except InputError as error:
        raise MaskError(
            f"A record whose mask is {_short(mask)} cannot be saved: {error.__cause__}",
            "Give what may be seen as one masks.Keep(t).",
        ) from error
    return written


def _written_mask(mask: Mask, tensors: Tensors, name: str) -> dict[str, Any]:
    # By its very type: what a subclass means is not what its base class means.
    kind = type(mask)
    written: dict[str, Any] = {"kind": kind.__name__}
    if kind in (Full, Causal):
        return written
    if kind in (And, Or):
        assert isinstance(mask, (And, Or))
        return {
            **written,
            "parts": [_written_mask(part, tensors, f"{name}.{index}") for index, part in enumerate(mask.parts)],
        }
    if isinstance(mask, Behind) and kind is Behind:
        return {**written, "count": mask.count, "mask": _written_mask(mask.mask, tensors, f"{name}.0")}
    if isinstance(mask, Window) and kind is Window:
        return {**written, "size": mask.size, "after": mask.after}
    if isinstance(mask, (Keep, Drop)) and kind in (Keep, Drop):
        return {**written, "axes": mask.axes, "tensor": tensors.put(name, mask.tensor)}
    if isinstance(mask, (Lengths, Documents)) and kind in (Lengths, Documents):
        return {**written, "lengths": _written_counts(mask.lengths, tensors, name)}
    if isinstance(mask, Prefix) and kind is Prefix:
        return {**written, "length": _written_counts(mask.length, tensors, name)}
    raise MaskError(
        f"A record whose mask is {_short(mask)} cannot be saved: a file holds no {kind.__name__}.",
        "Give what may be seen as masks.Keep(t).",
    )


def _refuse_unless_few(mask: Mask) -> None:
    """Reject more masks in one than a file holds; without recursion, which 1,000 masks within masks would overflow."""
    left: list[tuple[Mask, int]] = [(mask, 0)]
    for count, (each, depth) in enumerate(left):  # it grows meanwhile
        if count >= MOST_MASKS or depth > DEPTH:
            raise MaskError(
                f"A record whose mask joins more than {MOST_MASKS:,} masks, or more than {DEPTH} within each other, "
                "cannot be saved.",
                "Give what may be seen as one masks.Keep(t).",
            )
        parts = each.parts if isinstance(each, (And, Or)) else (each.mask,) if isinstance(each, Behind) else ()
        left += [(part, depth + 1) for part in parts[: MOST_MASKS + 1]]


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LENGTH else f"{shown[: _LENGTH - 1]}…"


def _written_counts(counts: Any, tensors: Tensors, name: str) -> Any:
    return {"tensor": tensors.put(name, counts)} if isinstance(counts, Tensor) else counts


def written_bias(bias: Bias | None, tensors: Tensors, name: str) -> dict[str, Any] | None:
    """Write a bias down; its tensor is called `name`."""
    if bias is None:
        return None
    if isinstance(bias, Relative):
        return {"kind": "Relative", "tensor": tensors.put(name, bias.values)}
    return {"kind": "Tensor", "tensor": tensors.put(name, bias)}


def read_mask(said: object, tensors: dict[str, Tensor]) -> Mask:
    """Read a mask as `written_mask` wrote it.

    Raises:
        InputError: it is none.
    """
    try:
        return _MaskReader(tensors).read(said, 0)
    except (KeyError, TypeError, MaskError, MultiheadError) as error:
        raise InputError(f"A mask of the file cannot be read: {error}", "Save the record anew.") from error


class _MaskReader:
    """Reads one mask, and counts the masks in it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.count = 0

    def read(self, said: Any, depth: int) -> Mask:
        kind = said["kind"]
        self.count += 1
        if depth > DEPTH:
            raise TypeError("it is nested too deep.")
        if self.count > MOST_MASKS:
            raise TypeError(f"it joins more than {MOST_MASKS:,} masks.")
        if kind in ("And", "Or"):
            parts = tuple(self.read(part, depth + 1) for part in said["parts"])
            if len(parts) < 2:
                raise TypeError("it joins no masks.")
            return And(parts) if kind == "And" else Or(parts)
        if kind == "Behind":
            return Behind(_count(said["count"]), self.read(said["mask"], depth + 1))
        if kind == "Window":
            return Window(_count(said["size"], most=MOST_SIZE), _count(said["after"], most=MOST_SIZE))
        if kind in ("Keep", "Drop"):
            return (Keep if kind == "Keep" else Drop)(self.tensors[said["tensor"]], said["axes"])
        if kind in ("Lengths", "Documents"):
            return (Lengths if kind == "Lengths" else Documents)(self.counts(said["lengths"]))
        if kind == "Prefix":
            return Prefix(self.counts(said["length"]))
        if kind in ("Full", "Causal"):
            return Full() if kind == "Full" else Causal()
        raise TypeError(f"there is no mask {_short(kind)}.")

    def counts(self, said: Any) -> Any:
        if isinstance(said, dict):
            return self.tensors[said["tensor"]]
        return [self.counts(each) for each in said] if isinstance(said, (list, tuple)) else _count(said)


def _count(said: Any, *, most: int = MOST) -> int:
    """Reject a number that tensors could not hold."""
    if isinstance(said, bool) or not isinstance(said, int) or abs(said) > most:
        raise TypeError(f"{_short(said)} is no number of tokens.")
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
