"""Convert masks and biases to JSON that refers to tensors by name, and read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from multihead.errors import InputError, MaskError, MultiheadError
from multihead.masks import Mask
from multihead.masks.base import UnknownMask, find_mask_class
from multihead.scores.bias import Bias, RelativeBias

MAX_DEPTH = 32  # largest depth of masks within masks
MAX_INTEGER = (1 << 63) - 1  # largest integer in a mask: sys.maxsize, the size of an unlimited window
_RENAMED_CLASSES = {"Behind": "LeadingKeys"}  # old name of a mask class -> new name

MAX_MASKS = 1000
"""Largest number of masks that one mask combines, including nested masks; typical masks combine two to five."""

_MAX_SHOWN_LENGTH = 200  # largest number of characters of a mask or a value in an error message


@dataclass(frozen=True, eq=False)
class JoinedParts:
    """A tensor of a file whose parts, (heads, rows, ...), are concatenated when they are written, row after row."""

    parts: Sequence[Tensor]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        return self.parts[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        heads, _, *others = self.parts[0].shape
        return heads, sum(part.shape[1] for part in self.parts), *others

    def read(self) -> Tensor:
        """Return the tensor."""
        return self.parts[0] if len(self.parts) == 1 else torch.cat([part.cpu() for part in self.parts], 1)


@dataclass(eq=False)
class TensorStore:
    """Collects tensors by name for a file; a tensor that is added twice is stored once.

    Attributes:
        by_name: name -> tensor.
        joined: name -> tensor in parts.
    """

    by_name: dict[str, Tensor] = field(default_factory=dict)
    joined: dict[str, JoinedParts] = field(default_factory=dict)
    _name_of_tensor: dict[tuple[object, ...], str] = field(default_factory=dict)
    _referenced_tensors: list[Tensor] = field(
        default_factory=list
    )  # keeps tensors alive, so that their addresses stay unique

    def add_tensor(self, name: str, tensor: Tensor) -> str:
        """Add a tensor, and return the name under which it is stored."""
        where = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*where, tensor.dtype, tensor.device)
        if tensor.numel() and key in self._name_of_tensor:
            return self._name_of_tensor[key]
        self._name_of_tensor[key] = name
        self._referenced_tensors.append(tensor)
        self.by_name[name] = tensor
        return name

    def add_rows(self, name: str, parts: Sequence[Tensor]) -> str:
        """Add a tensor with the rows of several texts, (heads, rows, ...) each, and return its name."""
        self.joined[name] = JoinedParts(parts)
        return name


def mask_as_json(mask: Mask, tensors: TensorStore, name: str) -> dict[str, Any]:
    """Convert a mask to JSON, the name of its class and its fields; its tensors are added under `name`.

    Raises:
        MaskError: the mask could not be read again, because a field has a type that cannot be stored, the class is not
            registered under its name, or the mask combines too many masks.

    >>> from multihead.masks import Causal, Window
    >>> mask_as_json(Causal() & Window(3), TensorStore(), "mask")
    {'kind': 'And', 'parts': [{'kind': 'Causal'}, {'kind': 'Window', 'size': 3, 'after': 0}]}
    """
    _check_mask_count(mask)
    written = _mask_as_json(mask, tensors, name)
    try:
        read_mask(written, tensors.by_name)
    except InputError as error:
        raise MaskError(
            f"A record whose mask is {_shorten_repr(mask)} cannot be saved: {error.__cause__}",
            "Pass the visible cells as one masks.Keep(t).",
        ) from error
    return written


def _mask_as_json(mask: Mask, tensors: TensorStore, name: str) -> dict[str, Any]:
    kind, values = mask.name_and_fields()
    known = find_mask_class(kind)
    if kind == type(mask).__name__ and known is not type(mask):  # another mask class is registered under the same name
        raise MaskError(
            f"A record whose mask is {_shorten_repr(mask)} cannot be saved: another class is named {kind}.",
            "Give one of the classes another name.",
        )
    # only one field has tensors, so their names need no suffix
    alone = sum(isinstance(value, (Tensor, Mask, tuple)) for value in values.values()) < 2
    fields = {
        key: _field_as_json(mask, value, tensors, name if alone else f"{name}.{key}") for key, value in values.items()
    }
    return {"kind": kind, **fields}


def _field_as_json(mask: Mask, value: object, tensors: TensorStore, name: str) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": tensors.add_tensor(name, value)}
    if isinstance(value, Mask):
        return _mask_as_json(value, tensors, name)
    if isinstance(value, (tuple, list)):
        return [_field_as_json(mask, each, tensors, f"{name}.{index}") for index, each in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise MaskError(
        f"A record whose mask is {_shorten_repr(mask)} cannot be saved: a field of it is a {type(value).__name__}.",
        "Keep numbers, strings, tensors, masks, or tuples of them in the fields of a mask.",
    )


def _check_mask_count(mask: Mask) -> None:
    """Raise MaskError if a mask combines or nests too many masks; not recursive, because nesting may be deep."""
    left: list[tuple[Mask, int]] = [(mask, 0)]
    for count, (each, depth) in enumerate(left):  # the body appends to `left`
        if count >= MAX_MASKS or depth > MAX_DEPTH:
            raise MaskError(
                f"A record whose mask combines more than {MAX_MASKS:,} masks, or nests more than {MAX_DEPTH}, "
                "cannot be saved.",
                "Pass the visible cells as one masks.Keep(t).",
            )
        for value in each.values().values():
            parts = value if isinstance(value, tuple) else (value,)
            left += [(part, depth + 1) for part in parts[: MAX_MASKS + 1] if isinstance(part, Mask)]


def _shorten_repr(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_LENGTH else f"{shown[: _MAX_SHOWN_LENGTH - 1]}…"


def bias_as_json(bias: Bias | None, tensors: TensorStore, name: str) -> dict[str, Any] | None:
    """Convert a bias to JSON; its tensor is added to `tensors` under `name`."""
    if bias is None:
        return None
    if isinstance(bias, RelativeBias):
        return {"kind": "RelativeBias", "tensor": tensors.add_tensor(name, bias.values)}
    return {"kind": "Tensor", "tensor": tensors.add_tensor(name, bias)}


def read_mask(data: object, tensors: Mapping[str, Tensor]) -> Mask:
    """Read a mask from JSON of `mask_as_json`; a mask whose class is not defined here becomes an `UnknownMask`.

    Raises:
        InputError: `data` is not a valid mask.
    """
    try:
        return _MaskReader(tensors).read(data, 0)
    except (KeyError, TypeError, ValueError, MultiheadError) as error:
        raise InputError(f"A mask of the file cannot be read: {error}", "Save the record again.") from error


class _MaskReader:
    """Reads one mask from JSON, and limits the number of masks that it combines."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.count = 0

    def read(self, data: Any, depth: int) -> Mask:
        kind = _RENAMED_CLASSES.get(data["kind"], data["kind"])
        if not isinstance(kind, str):
            raise TypeError(f"{_shorten_repr(kind)} is not the name of a mask.")
        self.count += 1
        if depth > MAX_DEPTH:
            raise TypeError("it is nested too deep.")
        if self.count > MAX_MASKS:
            raise TypeError(f"it combines more than {MAX_MASKS:,} masks.")
        found = find_mask_class(kind)
        fields = {key: self.read_field(value, depth + 1) for key, value in data.items() if key != "kind"}
        # files of earlier versions store the name of a tensor here
        if kind in ("Keep", "Drop") and isinstance(fields["tensor"], str):
            fields["tensor"] = self.tensors[fields["tensor"]]
        if kind in ("And", "Or"):
            parts = fields["parts"]
            if len(parts) < 2 or not all(isinstance(part, Mask) for part in parts):
                raise TypeError("it combines no masks.")
        if found is None:
            return UnknownMask(kind[:_MAX_SHOWN_LENGTH], fields)
        try:
            return found(**fields)
        except TypeError:
            if found.__module__.startswith("multihead."):
                raise
            return UnknownMask(kind[:_MAX_SHOWN_LENGTH], fields)  # a user-defined mask class whose fields have changed

    def read_field(self, data: Any, depth: int) -> Any:
        if isinstance(data, dict):
            return self.read(data, depth) if "kind" in data else self.tensors[data["tensor"]]
        if isinstance(data, (list, tuple)):
            return tuple(self.read_field(each, depth) for each in data)
        if isinstance(data, int) and abs(data) > MAX_INTEGER:
            raise TypeError(f"{_shorten_repr(data)} is not a number of tokens.")
        return data


def read_bias(data: Any, tensors: Mapping[str, Tensor]) -> Bias | None:
    """Read a bias from JSON of `bias_as_json`.

    Raises:
        InputError: `data` is not a valid bias.
    """
    if data is None:
        return None
    try:
        values = tensors[data["tensor"]]
        if data["kind"] in ("RelativeBias", "Relative"):  # earlier versions wrote "Relative"
            return RelativeBias(values)
        if data["kind"] == "Tensor" and values.is_floating_point():
            return values
    except (KeyError, TypeError, MultiheadError) as error:
        raise InputError(f"A bias of the file cannot be read: {error}", "Save the record again.") from error
    raise InputError("A bias of the file cannot be read.", "Save the record again.")
