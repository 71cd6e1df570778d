"""Say which keys each query may see, as small frozen values joined with & and |."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from multihead.errors import MaskError, refuse_unless_integer
from multihead.reading import readable

AXES = ("batch", "heads", "queries", "keys")
Ints: TypeAlias = "tuple[int, ...] | tuple[tuple[int, ...], ...]"


class Mask:
    """Which keys each query may see; `a & b` is what both allow, `a | b` what either allows.

    A mask is a meaning and not a tensor: it is written down without the shape of the call, and costs no
    queries x keys memory. Two masks are equal where they are written alike; tensors inside them are
    compared by identity.

    >>> Causal() & Lengths((5, 3))
    Causal() & Lengths((5, 3))
    >>> Causal() & Lengths((5, 3)) == Causal() & Lengths([5, 3])
    True
    """

    speaks_of_positions: ClassVar[bool] = False  # whether a query's place among the keys changes what it sees

    def __and__(self, other: Mask) -> Mask:
        """Return the mask that shows a key only where both masks show it."""
        return _joined(And, self, other)

    def __or__(self, other: Mask) -> Mask:
        """Return the mask that shows a key wherever one of the masks shows it."""
        return _joined(Or, self, other)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Mask) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> tuple[object, ...]:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return tuple(("tensor", id(value)) if isinstance(value, Tensor) else value for value in values)

    @property
    def holds_tensors(self) -> bool:
        """Whether what this mask means can change without the mask being another one."""
        return any(isinstance(getattr(self, field.name), Tensor) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Full(Mask):
    """Every query sees every key.

    >>> from multihead import masks
    >>> print(masks.picture(Full(), queries=3, keys=5))
    ■ ■ ■ ■ ■
    ■ ■ ■ ■ ■
    ■ ■ ■ ■ ■
    """


@dataclass(frozen=True, eq=False)
class Causal(Mask):
    """A query sees the key at its own position and those before it.

    The position of query i among the keys is `query_start + i`.

    >>> from multihead import masks
    >>> print(masks.picture(Causal()))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """

    speaks_of_positions: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Window(Mask):
    """A query sees `size` keys: its own and the `size - 1` before it; and `after` keys after it.

    Libraries count windows differently; this is Hugging Face's count (ONNX leaves out the query's own key).

    >>> from multihead import masks
    >>> print(masks.picture(Window(3)))
    ■ · · · ·
    ■ ■ · · ·
    ■ ■ ■ · ·
    · ■ ■ ■ ·
    · · ■ ■ ■
    >>> print(masks.picture(Window(2, after=1)))
    ■ ■ · · ·
    ■ ■ ■ · ·
    · ■ ■ ■ ·
    · · ■ ■ ■
    · · · ■ ■
    """

    size: int
    after: int = 0
    speaks_of_positions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        refuse_unless_integer("Window size", self.size, least=1)
        refuse_unless_integer("Window after", self.after, least=0)

    def __repr__(self) -> str:
        return f"Window({self.size}, after={self.after})" if self.after else f"Window({self.size})"


@dataclass(frozen=True, eq=False)
class Lengths(Mask):
    """A query sees the first `lengths` keys: one length a sample, or one a sample and query.

    Args:
        lengths: ints or an integer tensor, (batch,) or (batch, queries), tokens.

    Raises:
        MaskError: a length is negative or no integer, or the lengths have another number of dimensions.

    >>> from multihead import masks
    >>> print(masks.picture(Lengths((3, 2)), queries=2, keys=4))
    ■ ■ ■ ·   ■ ■ · ·
    ■ ■ ■ ·   ■ ■ · ·
    >>> print(masks.picture(Lengths(((1, 3), (4, 0))), queries=2, keys=4))
    ■ · · ·   ■ ■ ■ ■
    ■ ■ ■ ·   · · · ·
    """

    lengths: Ints | Tensor

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        object.__setattr__(self, "lengths", _counts(lengths, "Lengths", "(batch,) or (batch, queries)"))

    def __repr__(self) -> str:
        return f"Lengths({_shown(self.lengths)})"


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Documents stand one after the other in a row; a query sees the keys of its own document.

    Args:
        lengths: ints or an integer tensor, (documents,) for all samples or (batch, documents), tokens.
            A document of length 0 is none. A position behind the last document sees nothing and is not seen.

    Raises:
        MaskError: a length is negative or no integer, or the lengths have another number of dimensions.

    >>> from multihead import masks
    >>> print(masks.picture(Documents((2, 1, 1)), queries=5, keys=5))
    ■ ■ · · ·
    ■ ■ · · ·
    · · ■ · ·
    · · · ■ ·
    · · · · ·
    """

    lengths: Ints | Tensor
    speaks_of_positions: ClassVar[bool] = True

    def __init__(self, lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> None:
        counts = _counts(lengths, "Documents", "(documents,) or (batch, documents)", ragged=True)
        object.__setattr__(self, "lengths", counts)

    def __repr__(self) -> str:
        return f"Documents({_shown(self.lengths)})"


@dataclass(frozen=True, eq=False)
class Prefix(Mask):
    """Every query sees the first `length` keys: with `Causal() | Prefix(n)` a prompt that is read both ways.

    Args:
        length: an int for all samples, or ints or an integer tensor (batch,), tokens.

    Raises:
        MaskError: a length is negative or no integer, or the lengths have another number of dimensions.

    >>> from multihead import masks
    >>> print(masks.picture(Causal() | Prefix(3)))
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ ■ ■ ■
    """

    length: int | tuple[int, ...] | Tensor

    def __init__(self, length: int | Sequence[int] | Tensor) -> None:
        if isinstance(length, int):
            refuse_unless_integer("Prefix length", length, least=0)
            object.__setattr__(self, "length", length)
        else:
            object.__setattr__(self, "length", _counts(length, "Prefix", "(batch,), or one int", dims=(1,)))

    def __repr__(self) -> str:
        return f"Prefix({_shown(self.length)})"


class _Given(Mask):
    """What `Keep` and `Drop` share: a boolean tensor and the names of its axes."""

    tensor: Tensor
    axes: str

    def __init__(self, tensor: Tensor, axes: str | None = None) -> None:
        name = type(self).__name__
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
            given = f"a {tensor.dtype} tensor" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise MaskError(
                f"{name} takes a boolean tensor, and this is {given}.",
                "Say which values hide, for example masks.Keep(t != 0); an additive mask is a bias: attention(bias=t).",
            )
        if not isinstance(axes, str | None):
            raise MaskError(f"{name} was given the axes {axes!r}.", f'Name them in a string: {name}(t, "batch keys").')
        if axes is None and tensor.dim() == len(AXES):
            axes = " ".join(AXES)
        named = (axes or "").split()
        if len(named) != tensor.dim() or named != [axis for axis in AXES if axis in named]:
            said = "without axes" if axes is None else f"with axes {axes!r}"
            raise MaskError(
                f"{name} was given a tensor of {tensor.dim()} dimensions {said}.",
                f'Name each one, in the order of "batch heads queries keys", for example {name}(t, "batch keys").',
            )
        object.__setattr__(self, "tensor", tensor)
        object.__setattr__(self, "axes", " ".join(named))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_shown(self.tensor)}, {self.axes!r})"

    def four_dimensional(self) -> Tensor:
        """Return the tensor with size 1 for every axis that it does not name: (batch, heads, queries, keys)."""
        sizes = dict(zip(self.axes.split(), self.tensor.shape, strict=True))
        return self.tensor.reshape([sizes.get(axis, 1) for axis in AXES])


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Keep(_Given):
    """A boolean tensor: True = the query may see the key.

    Args:
        tensor: bool, broadcasting to (batch, heads, queries, keys).
        axes: the names of its axes where it has fewer than four, for example "batch keys".

    Raises:
        MaskError: the tensor is not boolean, or its axes are not named.

    >>> from multihead import masks
    >>> print(masks.picture(Keep(torch.tensor([[True, False, True]]), "batch keys"), queries=2, keys=3))
    ■ · ■
    ■ · ■
    """

    tensor: Tensor
    axes: str


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Drop(_Given):
    """A boolean tensor: True = the key is hidden from the query.

    Args:
        tensor: bool, broadcasting to (batch, heads, queries, keys).
        axes: the names of its axes where it has fewer than four, for example "batch keys".

    Raises:
        MaskError: the tensor is not boolean, or its axes are not named.

    >>> from multihead import masks
    >>> print(masks.picture(Drop(torch.tensor([[True, False, True]]), "batch keys"), queries=2, keys=3))
    · ■ ·
    · ■ ·
    """

    tensor: Tensor
    axes: str


class _Joined(Mask):
    """What `And` and `Or` share: their parts, in the order they were written."""

    parts: tuple[Mask, ...]
    sign: ClassVar[str]

    def __repr__(self) -> str:
        shown = (f"({part!r})" if isinstance(part, _Joined) else repr(part) for part in self.parts)
        return f" {self.sign} ".join(shown)

    @property
    def holds_tensors(self) -> bool:
        return any(part.holds_tensors for part in self.parts)

    @property
    def speaks_of_positions(self) -> bool:  # type: ignore[override]
        return any(part.speaks_of_positions for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class And(_Joined):
    """A key is seen where every part shows it. Made by `&`."""

    parts: tuple[Mask, ...]
    sign: ClassVar[str] = "&"


@dataclass(frozen=True, eq=False, repr=False)
class Or(_Joined):
    """A key is seen where one of the parts shows it. Made by `|`."""

    parts: tuple[Mask, ...]
    sign: ClassVar[str] = "|"


def refuse_unless_mask(mask: object) -> None:
    """Refuse what is no mask, a bare tensor above all: nothing tells what its True means."""
    if isinstance(mask, Tensor):
        raise MaskError(
            f"mask is a bare {mask.dtype} tensor of shape {tuple(mask.shape)}, and nothing says what its values mean.",
            "Say masks.Keep(t) if True may be seen, masks.Drop(t) if True is hidden, bias=t if it is added to scores.",
        )
    if not isinstance(mask, Mask):
        raise MaskError(
            f"mask is a {type(mask).__name__}, and no mask of multihead.masks.",
            "Give for example masks.Causal() & masks.Lengths((5, 3)).",
        )


def _joined(kind: type[And] | type[Or], left: Mask, right: Mask) -> Mask:
    refuse_unless_mask(right)
    neutral, absorbing = (Full(), None) if kind is And else (None, Full())
    if absorbing in (left, right):
        return Full()
    if left == neutral:
        return right
    if right == neutral:
        return left
    parts = [part for side in (left, right) for part in (side.parts if isinstance(side, kind) else (side,))]
    return kind(tuple(parts))


def _counts(
    given: object, name: str, form: str, *, dims: tuple[int, ...] = (1, 2), ragged: bool = False
) -> Ints | Tensor:
    """Check lengths as they are made: whole numbers, none negative, as many dimensions as they may have."""
    if isinstance(given, Tensor):
        if given.is_floating_point() or given.dtype == torch.bool or given.dim() not in dims:
            raise MaskError(
                f"{name} was given a {given.dtype} tensor of shape {tuple(given.shape)}.",
                f"Give integers of shape {form}.",
            )
        # Reading a tensor on an accelerator would make the host wait, and a compiler cannot read one.
        if readable(given.device) and bool((given < 0).any()):
            raise MaskError(f"{name} holds a negative length, {int(given.min())}.", "Give lengths of 0 or more tokens.")
        return given
    rows = _as_rows(given, name, form)
    depth = 2 if rows and isinstance(rows[0], tuple) else 1
    widths = {len(row) if isinstance(row, tuple) else -1 for row in rows}
    if depth not in dims or (len(widths) > 1 and not (ragged and -1 not in widths)):
        raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
    if ragged and depth == 2:
        width = max(widths)
        rows = tuple(row + (0,) * (width - len(row)) for row in rows if isinstance(row, tuple))
    smallest = min((min(row, default=0) if isinstance(row, tuple) else row for row in rows), default=0)
    if smallest < 0:
        raise MaskError(f"{name} holds a negative length, {smallest}.", "Give lengths of 0 or more tokens.")
    return rows  # type: ignore[return-value]


def _as_rows(given: object, name: str, form: str) -> tuple[int | tuple[int, ...], ...]:
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
    rows: list[int | tuple[int, ...]] = []
    for row in given:
        numbers = row if isinstance(row, Sequence) and not isinstance(row, str) else (row,)
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in numbers):
            raise MaskError(f"{name} was given {given!r}.", f"Give integers of shape {form}.")
        rows.append(tuple(numbers) if numbers is row or isinstance(row, Sequence) else row)
    return tuple(rows)


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}>"
    return repr(value)
