"""The base class of masks, combinations of masks, and their conversion to key intervals.

To define a mask, subclass `Mask` and define `visible`. All other members have a default:

| method or attribute | default | define it |
|---|---|---|
| `visible(queries, keys)` | none | always: which keys each query may see |
| `interval(queries, keys)` | None | where each query sees one interval of keys: keys outside it are skipped |
| `band` | None | where each query sees a fixed number of keys on each side of it: small calls take half the time |
| `select_sample(index)` | the mask itself | where the mask holds a tensor with a row per sample |
| `select_heads(select)` | slices `visible` | where the mask holds a tensor, and heads are split over ranks |
| `uses_positions` | True | False where the keys that a query sees do not depend on its position |
| `translation_invariant` | False | True where only the distance from query to key matters: packed rows stay packed |
| `sees_no_later_key` | False | True where no query sees a key after its own position |
| `lookback` | None | a number of keys, where no query sees further back: a cache may drop older keys |

Classes are registered by name when they are defined; names of this package are reserved. If a name is not defined, the
record still opens: its statistics can be read, and its maps raise an error with the name.

A mask is a pytree whose leaves are its tensors, so that `torch.export` takes it as an argument, and its lengths as
inputs. A constant class of PyTorch would be simpler, but torch.compile guards such a value by equality, and would
compile again for each tensor.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property, partial, reduce
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, KeyEntry, register_pytree_node

from multihead.errors import MaskError
from multihead.masks.positions import CallPositions, CallSize, SampleSpan, TilePositions
from multihead.masks.texts import RowTexts
from multihead.tensors.shapes import describe_type
from multihead.tensors.tracing import constant_in_graphs

_MASK_CLASSES: dict[str, type[Mask]] = {}
_HASHABLE_TYPES = frozenset({int, float, bool, str, type(None)})  # field types that are always hashable


@dataclass(frozen=True, eq=False)
class KeyBounds:
    """The keys that each query may see: the interval [start, stop), intersected with the mask `remainder` if any.

    Attributes:
        start: (batch or 1, queries), int64, the first key that a query may see.
        stop: (batch or 1, queries), int64, one past the last key that a query may see; equal to start if it sees none.
        remainder: the mask, or the part of it, that is not one interval per query; None if the intervals are the whole
            mask.
    """

    start: Tensor
    stop: Tensor
    remainder: Mask | None = None

    @property
    def is_shared_by_samples(self) -> bool:
        """Whether all samples have the same bounds."""
        return self.start.shape[0] == 1

    @property
    def sees_nothing(self) -> Tensor:
        """(batch or 1, queries), bool: the queries whose interval is empty."""
        return self.start >= self.stop


class Band(NamedTuple):
    """A mask as three values: how many keys before and after its position a query sees, and the length of each sample.

    Attributes:
        lengths: (batch or 1,) int64 on the CPU, the number of first keys that are visible per sample; None = all.
        keys_before: how many keys before its own position a query sees; -1 = all.
        keys_after: how many keys after its own position a query sees; -1 = all.
    """

    lengths: Tensor | None = None
    keys_before: int = -1
    keys_after: int = -1

    def interval_of_query(self, position: int, keys: int) -> tuple[int, int]:
        """Return the interval [start, stop) of the keys that the query at a position sees, if `lengths` is None."""
        _, before, after = self
        start = max(position - before, 0) if before >= 0 else 0
        stop = min(position + after + 1, keys) if after >= 0 else keys
        return (start, stop) if start < stop else (0, 0)

    def interval_of_queries(self, first: int, queries: int, keys: int) -> tuple[int, int, bool] | None:
        """Return the one interval [start, stop) of keys that queries at the positions from `first` on see.

        The third value is whether query i sees the first i + 1 keys of it, and not all. None if the queries see other
        intervals, if they see no key, or if `lengths` is not None.

        >>> Band(keys_after=0).interval_of_queries(0, queries=3, keys=5), Band().interval_of_queries(0, 3, keys=5)
        ((0, 3, True), (0, 5, False))
        """
        lengths, before, after = self
        if lengths is not None:
            return None
        if queries == 1:
            start, stop = self.interval_of_query(first, keys)
            return (start, stop, False) if start < stop else None
        if before >= 0 and before < first + queries - 1:
            return None
        if after < 0 or first + after + 1 >= keys:
            return 0, keys, False
        return (0, queries, True) if after == first == 0 and queries <= keys else None


class Sequences(NamedTuple):
    """A mask as sequences of consecutive keys, and a band in each: what a kernel for sequences needs to know.

    At most one of the first three is not None; each is ints or an integer tensor on any device.

    Attributes:
        lengths: (batch,), how many first keys all queries see.
        skipped: (batch,), how many first keys no query sees.
        documents: (documents,) or (batch, documents), tokens of consecutive documents; a query sees the keys of its
            own, and none after the last.
        keys_before: how many keys before its own position a query sees at most; -1 = all.
        keys_after: how many keys after its own position a query sees at most; -1 = all.
    """

    lengths: Any = None
    skipped: Any = None
    documents: Any = None
    keys_before: int = -1
    keys_after: int = -1


_PytreeContext: TypeAlias = "tuple[tuple[str, ...], tuple[tuple[str, object], ...]]"


def _flatten_mask(mask: Mask) -> tuple[list[object], _PytreeContext]:
    """Flatten a mask for torch's pytree: the fields with tensors or masks, and a context with the rest."""
    values = Mask.values(mask)
    inner = tuple(
        name
        for name, value in values.items()
        if any(isinstance(each, Tensor | Mask) for each in (value if isinstance(value, tuple) else (value,)))
    )
    return [values[name] for name in inner], (inner, tuple(pair for pair in values.items() if pair[0] not in inner))


def _flatten_mask_with_keys(mask: Mask) -> tuple[list[tuple[KeyEntry, object]], _PytreeContext]:
    children, context = _flatten_mask(mask)
    return [(GetAttrKey(name), child) for name, child in zip(context[0], children, strict=True)], context


def _unflatten_mask(kind: type[Mask], children: Iterable[object], context: _PytreeContext) -> Mask:
    """Rebuild a mask from the result of `_flatten_mask`, without checking its arguments again."""
    mask = kind.__new__(kind)
    for name, value in (*zip(context[0], children, strict=True), *context[1]):
        object.__setattr__(mask, name, value)
    return mask


class Mask:
    """Which keys each query may see; in `a & b` a key is visible if both masks show it, in `a | b` if one does.

    A mask is a value, not a tensor: it does not depend on the shape of the call, and takes no queries x keys memory.
    Two masks are equal if they have the same type and fields; tensors in them are compared by identity.

    To define a mask, subclass it; only `visible` is required.

    >>> from dataclasses import dataclass
    >>> from multihead import masks
    >>> @dataclass(frozen=True)
    ... class Strided(masks.Mask):
    ...     n: int
    ...
    ...     def visible(self, queries, keys):
    ...         return (queries - keys) % self.n == 0
    >>> print(masks.picture(Strided(2) & masks.Causal()))
    ■ · · · ·
    · ■ · · ·
    ■ · ■ · ·
    · ■ · ■ ·
    ■ · ■ · ■
    >>> masks.Causal() & masks.Lengths((5, 3)) == masks.Causal() & masks.Lengths([5, 3])
    True
    """

    uses_positions: ClassVar[bool] = True  # whether a query's position among the keys changes what it sees
    translation_invariant: ClassVar[bool] = False  # whether adding one number to all positions hides and shows no key
    hides_nothing: ClassVar[bool] = False  # whether every query sees every key
    sees_no_later_key: ClassVar[bool] = False  # whether no query sees a key after its own position
    starts_at_first_key: ClassVar[bool] = False  # whether every query's interval starts at the first key
    has_key_axis: ClassVar[bool] = False  # whether the mask holds a tensor with a column per key
    band: ClassVar[Band | None] = None  # the mask as a band of keys around each query, if it is one
    sequences: ClassVar[Sequences | None] = None  # the mask as sequences of keys and a band in them, if it is that
    row_texts: ClassVar[RowTexts | None] = None  # the texts of each row; None if each row is one text
    lookback: ClassVar[int | None] = None  # maximum number of keys back that a query sees, its own included

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        known = _MASK_CLASSES.get(cls.__name__)
        if known is not None and known.__module__ != cls.__module__ and _is_of_this_package(known):
            raise MaskError(
                f"multihead.masks already defines a mask named {cls.__name__}.",
                "Give the class another name: a saved record finds a mask by the name of its class.",
            )
        _MASK_CLASSES[cls.__name__] = cls
        # torch.export takes a mask as an argument. If masks were pytree constants, each new tensor in a mask would
        # recompile the graph.
        register_pytree_node(
            cls, _flatten_mask, partial(_unflatten_mask, cls), flatten_with_keys_fn=_flatten_mask_with_keys
        )
        if "band" not in cls.__dict__ and not cls.__dict__.keys().isdisjoint(("visible", "interval", "tile", "bounds")):
            cls.band = None  # a class that defines its own visibility does not inherit a band
            if "sequences" not in cls.__dict__:
                cls.sequences = None

    # ---- methods that subclasses define

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Return which keys each query may see.

        Args:
            queries: (batch or 1, heads or 1, queries, 1), int64, the position of each query among the keys.
            keys: (batch or 1, heads or 1, 1, keys), int64, the position of each key.

        Returns:
            bool, broadcasting to (batch, heads, queries, keys); True = may be seen.
        """
        raise MaskError(
            f"{type(self).__name__} does not define visible(queries, keys).",
            "Define it: from integer positions (.., queries, 1) and (.., 1, keys), return which keys a query may see.",
        )

    def interval(self, queries: Tensor, keys: int | Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the interval of keys [start, stop) that each query sees; None if the mask is not intervals.

        Args:
            queries: (batch or 1, queries), int64, the position of each query among the keys.
            keys: number of keys.

        Returns:
            start and stop, int64, broadcasting to (batch, queries); values outside [0, keys] are allowed.
        """
        return None

    def select_sample(self, index: int) -> Mask:
        """Return the mask of sample `index`, for a batch of one.

        Args:
            index: which sample.

        Raises:
            MaskError: the mask holds a tensor, and does not define this method.
        """
        if not self.holds_tensors:
            return self
        raise MaskError(
            f"{self!r} holds a tensor, and {type(self).__name__} does not define select_sample(index).",
            "Define it to return the mask of one sample: with its row of the tensor, or self where samples share it.",
        )

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Mask:
        """Return the mask of selected heads, for a layer whose heads are split over processes.

        Args:
            select: a function that slices a tensor (batch or 1, heads, queries or 1, keys or 1) to the selected heads.

        Raises:
            MaskError: the mask holds a tensor, and does not define this method.
        """
        if self.holds_tensors:
            raise MaskError(
                f"{self!r} holds a tensor, and {type(self).__name__} does not define select_heads(select).",
                "Define it to return the mask of some heads: with select(tensor) for a tensor with a head axis, else "
                "self.",
            )
        heads = 1 if self.defines_interval else self.tile(TilePositions.from_sizes(1, 1)).shape[1]
        if heads == 1:
            return self
        return OfHeads(self, tuple(select(torch.arange(heads).view(1, -1, 1, 1)).flatten().tolist()))

    # ---- methods derived from those of subclasses

    def tile(self, tile: TilePositions) -> Tensor:
        """Return which keys each query may see, for a tile of the attention map.

        Returns:
            bool, broadcasting to (batch, heads, rows, columns).

        >>> from multihead import masks
        >>> masks.Causal().tile(TilePositions.from_sizes(queries=2, keys=2))[0, 0].int()
        tensor([[1, 0],
                [1, 1]], dtype=torch.int32)
        """
        cells = self.visible(tile.positions, tile.columns)
        if not isinstance(cells, Tensor) or cells.dtype != torch.bool:
            raise MaskError(
                f"{type(self).__name__}.visible returned {describe_type(cells)}.",
                "Return a bool tensor that broadcasts to (batch, heads, queries, keys), True = may be seen.",
            )
        everywhere = tile.all_visible()
        try:
            return cells & everywhere
        except RuntimeError as error:
            raise MaskError(
                f"{type(self).__name__}.visible returned a tensor of shape {tuple(cells.shape)}, which does not "
                f"broadcast to (batch, heads, {everywhere.shape[-2]} queries, {everywhere.shape[-1]} keys).",
                "Compute it from the positions given: (.., queries, 1) and (.., 1, keys).",
            ) from error

    def bounds(self, call: CallPositions) -> KeyBounds:
        """Return the key interval of each query, and the remainder of the mask.

        If a query sees no key, its start may be greater than its stop.
        """
        interval = self.interval(call.positions, call.keys)
        row = call.positions[:1]
        if interval is None:
            whole = torch.zeros_like(row)
            return KeyBounds(whole, whole + call.keys, self)
        if not isinstance(interval, tuple) or len(interval) != 2:
            raise MaskError(
                f"{type(self).__name__}.interval returned a {type(interval).__name__}.",
                "Return two tensors, (start, stop), or None where rows are no intervals.",
            )
        start, stop = (_clamp_to_keys(edge, call.keys) for edge in interval)
        start, stop, _ = torch.broadcast_tensors(start, stop, row)  # torch.broadcast_shapes would import sympy
        return KeyBounds(start, stop)

    @property
    def defines_interval(self) -> bool:
        """Whether the mask is one interval of keys per query."""
        return type(self).interval is not Mask.interval

    def name_and_fields(self) -> tuple[str, dict[str, object]]:
        """Return the class name and the fields of the mask, to be saved in a record."""
        return type(self).__name__, self.values()

    def check_fits(self, size: CallSize) -> None:
        """Raise a MaskError if the mask does not fit the sizes of a call.

        Raises:
            MaskError: a tensor of the mask does not broadcast, or token counts are for another batch or exceed the
                keys.
        """

    def after_dropping_keys(self, count: int | Tensor) -> Mask:
        """Return this mask for a sequence whose first `count` keys were dropped.

        Args:
            count: number of dropped keys, an int or (batch,). If negative, -count keys are inserted before the first
                key, and a mask with a `lookback` hides them.

        >>> from multihead import masks
        >>> (masks.Window(4) & masks.Prefix(10)).after_dropping_keys(7)
        Window(4) & Prefix(3)
        """
        if self.translation_invariant or (not isinstance(count, Tensor) and not count):
            return self
        return self._drop_keys(count)

    def _drop_keys(self, count: int | Tensor) -> Mask:
        """Return this mask for a sequence whose first `count` keys were dropped; `count` is not the int 0."""
        return Shifted(self, count)

    def select_span(self, span: SampleSpan) -> Mask:
        """Return this mask for the queries and keys of a span, with positions counted from its first key."""
        return self.select_sample(span.sample).after_dropping_keys(span.keys[0])

    def restrict_to_first_keys(self, count: int) -> Mask | None:
        """Return this mask for the first `count` keys; None if it depends on other keys."""
        return self

    def without_documents(self) -> Mask:
        """Return this mask without the `Documents` that are its `row_texts`, to be applied to each text separately."""
        return self

    @property
    def holds_tensors(self) -> bool:
        """Whether the mask contains tensors, whose values can change in place."""
        return self.cache_key() is None

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors in the fields of this mask and of masks nested in it."""
        values = list(self.values().values())
        for value in values:
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Mask):
                yield from value.tensors()
            elif isinstance(value, (tuple, list)):
                values.extend(value)

    def cache_key(self) -> tuple[object, ...] | None:
        """Return a hashable key for caching results that depend on this mask; None if it contains a tensor.

        Equal masks have equal keys. Each attention call computes the key, which is faster than hashing the mask.
        """
        key: list[object] = [type(self)]
        names = _field_names(type(self))
        for name in vars(self) if names is None else names:
            value = getattr(self, name)
            if isinstance(value, Mask):
                value = value.cache_key()
                if value is None:
                    return None
            elif isinstance(value, Tensor):
                return None
            elif type(value) not in _HASHABLE_TYPES:
                try:
                    hash(value)
                except TypeError as error:
                    raise MaskError(
                        f"The field {name} of {type(self).__name__} is {value!r}, which is mutable, so that a plan "
                        "made for it could not be cached.",
                        "Store a tuple, or a tensor.",
                    ) from error
            key.append(value)
        return tuple(key)

    def values(self) -> dict[str, object]:
        """Return name -> value of the mask's fields, used for equality and in saved records."""
        names = _field_names(type(self))
        return dict(vars(self)) if names is None else {name: getattr(self, name) for name in names}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(_repr_of_field, self.values().values()))})"

    # ---- combinations

    def __and__(self, other: Mask) -> Mask:
        """Return the mask in which a key is visible if both masks show it."""
        return _combine_masks(And, self, other)

    def __or__(self, other: Mask) -> Mask:
        """Return the mask in which a key is visible if at least one of the masks shows it."""
        return _combine_masks(Or, self, other)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and isinstance(other, Mask) and self._equality_key() == other._equality_key()

    def __hash__(self) -> int:
        return hash((type(self), self._equality_key()))

    def _equality_key(self) -> tuple[object, ...]:
        return tuple(("tensor", id(value)) if isinstance(value, Tensor) else value for value in self.values().values())


def _attribute_of_parts(name: str, join: Callable[[Iterable[bool]], bool]) -> Any:
    """Return a property of a combined mask: `any` or `all` (`join`) of the attribute `name` of its parts."""
    return property(lambda mask: join(getattr(part, name) for part in mask.parts))


def attribute_of_inner_mask(name: str) -> Any:
    """Return a property of a mask that changes another mask: the attribute `name` of that mask."""
    return property(lambda mask: getattr(mask.mask, name))


class _CombinedMask(Mask):
    """A combination of masks, `And` or `Or`; `parts` are the masks, and `operator_symbol` is "&" or "|" in the repr."""

    parts: tuple[Mask, ...]
    operator_symbol: ClassVar[str]
    uses_positions = _attribute_of_parts("uses_positions", any)
    translation_invariant = _attribute_of_parts("translation_invariant", all)
    defines_interval = _attribute_of_parts("defines_interval", all)
    has_key_axis = _attribute_of_parts("has_key_axis", any)
    starts_at_first_key = _attribute_of_parts("starts_at_first_key", all)

    def __repr__(self) -> str:
        written = (f"({part!r})" if isinstance(part, _CombinedMask) else repr(part) for part in self.parts)
        return f" {self.operator_symbol} ".join(written)

    def cache_key(self) -> tuple[object, ...] | None:
        key: list[object] = [type(self)]
        for part in self.parts:
            if (of_part := part.cache_key()) is None:
                return None
            key.append(of_part)
        return tuple(key)

    def check_fits(self, size: CallSize) -> None:
        for part in self.parts:
            part.check_fits(size)

    def select_sample(self, index: int) -> Mask:
        return self._combine_parts(part.select_sample(index) for part in self.parts)

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Mask:
        return self._combine_parts(part.select_heads(select) for part in self.parts)

    def after_dropping_keys(self, count: int | Tensor) -> Mask:
        return self._combine_parts(part.after_dropping_keys(count) for part in self.parts)

    def select_span(self, span: SampleSpan) -> Mask:
        return self._combine_parts(part.select_span(span) for part in self.parts)

    def restrict_to_first_keys(self, count: int) -> Mask | None:
        parts = [part.restrict_to_first_keys(count) for part in self.parts]
        known = [part for part in parts if part is not None]
        return self._combine_parts(known) if len(known) == len(parts) else None

    def _combine_parts(self, parts: Iterable[Mask]) -> Mask:
        """Combine masks by & or |; return this mask if `parts` are its own parts, because its band is cached."""
        parts, kind = tuple(parts), type(self)
        if all(new is old for new, old in zip(parts, self.parts, strict=True)):
            return self
        return reduce(lambda left, right: _combine_masks(kind, left, right), parts)


@dataclass(frozen=True, eq=False, repr=False)
class And(_CombinedMask):
    """A key is visible if all combined masks show it. Created by `&`."""

    parts: tuple[Mask, ...]
    operator_symbol: ClassVar[str] = "&"
    sees_no_later_key = _attribute_of_parts("sees_no_later_key", any)

    @property
    def lookback(self) -> int | None:  # type: ignore[override]
        return min((part.lookback for part in self.parts if part.lookback is not None), default=None)

    def tile(self, tile: TilePositions) -> Tensor:
        return reduce(torch.logical_and, (part.tile(tile) for part in self.parts))

    def bounds(self, call: CallPositions) -> KeyBounds:
        return reduce(_intersect_bounds, (part.bounds(call) for part in self.parts))

    @cached_property
    def band(self) -> Band | None:  # type: ignore[override]
        known: list[Band] = []
        for part in self.parts:
            if part.band is None:
                return None
            known.append(part.band)
        lengths = [band.lengths for band in known if band.lengths is not None]
        if len(lengths) > 1:
            return None
        before, after = (min((n for n in side if n >= 0), default=-1) for side in list(zip(*known, strict=True))[1:])
        return Band(lengths[0] if lengths else None, before, after)

    @cached_property
    def sequences(self) -> Sequences | None:  # type: ignore[override]
        found = Sequences()
        for part in self.parts:
            other = part.sequences
            if other is None or (found[:3] != (None,) * 3 and other[:3] != (None,) * 3):
                return None
            kinds = found[:3] if other[:3] == (None,) * 3 else other[:3]
            limits = zip(found[3:], other[3:], strict=True)
            found = Sequences(*kinds, *(max(pair) if min(pair) < 0 else min(pair) for pair in limits))
        return found

    @property
    def row_texts(self) -> RowTexts | None:  # type: ignore[override]
        found = [texts for part in self.parts if (texts := part.row_texts) is not None]
        return RowTexts.intersect(found) if len(found) > 1 else found[0] if found else None

    def without_documents(self) -> Mask:
        return self._combine_parts(part.without_documents() for part in self.parts)


@dataclass(frozen=True, eq=False, repr=False)
class Or(_CombinedMask):
    """A key is visible if at least one of the combined masks shows it. Created by `|`."""

    parts: tuple[Mask, ...]
    operator_symbol: ClassVar[str] = "|"
    sees_no_later_key = _attribute_of_parts("sees_no_later_key", all)

    @property
    def lookback(self) -> int | None:  # type: ignore[override]
        known = [part.lookback for part in self.parts if part.lookback is not None]
        return max(known) if len(known) == len(self.parts) else None

    def tile(self, tile: TilePositions) -> Tensor:
        return reduce(torch.logical_or, (part.tile(tile) for part in self.parts))

    def bounds(self, call: CallPositions) -> KeyBounds:
        """Join the intervals of the masks; if there are gaps, return the range they span and this mask as remainder."""
        intervals = [part.bounds(call) for part in self.parts]
        whole = intervals[0]
        for part in intervals[1:]:
            left_empty, right_empty = whole.sees_nothing, part.sees_nothing
            lowest, highest = whole.start.min(part.start), whole.stop.max(part.stop)
            start = torch.where(left_empty, part.start, torch.where(right_empty, whole.start, lowest))
            stop = torch.where(left_empty, part.stop, torch.where(right_empty, whole.stop, highest))
            touching = left_empty | right_empty | (torch.maximum(whole.start, part.start) <= whole.stop.min(part.stop))
            # If values cannot be read, two intervals are known to touch only if both start at the first key.
            joined = bool(touching.all()) if call.has_readable_values else self.starts_at_first_key
            clean = joined and whole.remainder is None and part.remainder is None
            whole = KeyBounds(start, stop, None if clean else self)
        return whole


@dataclass(frozen=True, eq=False, repr=False)
class Shifted(Mask):
    """A mask of a whole sequence, applied after its first `offset` keys were dropped, an int or (batch,)."""

    mask: Mask
    offset: int | Tensor
    uses_positions = attribute_of_inner_mask("uses_positions")
    sees_no_later_key = attribute_of_inner_mask("sees_no_later_key")
    has_key_axis = attribute_of_inner_mask("has_key_axis")
    lookback = attribute_of_inner_mask("lookback")

    def check_fits(self, size: CallSize) -> None:
        # With a tensor of offsets, the length of the whole sequence is unknown, so longer lengths are allowed.
        more = size.more_keys_later or isinstance(self.offset, Tensor)
        keys = size.keys if isinstance(self.offset, Tensor) else size.keys + self.offset
        self.mask.check_fits(CallSize(size.batch, size.heads, size.queries, keys, more))

    def tile(self, tile: TilePositions) -> Tensor:
        return self.mask.tile(tile.shifted(self.offset))

    def bounds(self, call: CallPositions) -> KeyBounds:
        offset = self.offset
        if isinstance(offset, Tensor):
            offset = offset.to(call.positions.device).view(-1, 1)
        inner = self.mask.bounds(CallPositions(call.positions + offset, call.keys + offset, call.has_readable_values))
        start, stop = (inner.start - offset).clamp(min=0), (inner.stop - offset).clamp(min=0)
        return KeyBounds(start, stop, None if inner.remainder is None else Shifted(inner.remainder, self.offset))

    def select_sample(self, index: int) -> Mask:
        return Shifted(self.mask.select_sample(index), self._offset_of_sample(index))

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> Mask:
        return Shifted(self.mask.select_heads(select), self.offset)

    def _drop_keys(self, count: int | Tensor) -> Mask:
        return Shifted(self.mask, self.offset + count)

    def select_span(self, span: SampleSpan) -> Mask:
        offset = self._offset_of_sample(span.sample)
        return self.mask.select_span(
            SampleSpan(span.sample, span.queries, (span.keys[0] + offset, span.keys[1] + offset))
        )

    def restrict_to_first_keys(self, count: int) -> Mask | None:
        if isinstance(self.offset, Tensor):
            return None
        inner = self.mask.restrict_to_first_keys(count + self.offset)
        return None if inner is None else Shifted(inner, self.offset)

    def _offset_of_sample(self, index: int) -> int:
        return int(row_of_sample(self.offset, index)) if isinstance(self.offset, Tensor) else self.offset


@dataclass(frozen=True, eq=False)
class OfHeads(Mask):
    """A mask restricted to some heads, by slicing its tiles; for masks that contain no tensor to slice."""

    mask: Mask
    heads: tuple[int, ...]
    uses_positions = attribute_of_inner_mask("uses_positions")

    def tile(self, tile: TilePositions) -> Tensor:
        return self.mask.tile(tile)[:, list(self.heads)]


@dataclass(frozen=True, eq=False)
class UnknownMask(Mask):
    """Placeholder in a loaded record for a mask of an undefined class: statistics can be read, maps cannot be computed.

    `stored_fields` holds the fields of the mask, so that the record can be saved again.
    """

    name: str
    stored_fields: Mapping[str, object] = field(default_factory=dict, repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnknownMask) and other.name == self.name

    def __hash__(self) -> int:
        return hash((UnknownMask, self.name))

    def values(self) -> dict[str, object]:
        return dict(self.stored_fields)

    def name_and_fields(self) -> tuple[str, dict[str, object]]:
        return self.name, self.values()

    def cache_key(self) -> None:
        """Return None: no plan for this mask can be cached."""

    def tile(self, tile: TilePositions) -> Tensor:
        raise self._not_defined_error()

    def bounds(self, call: CallPositions) -> KeyBounds:
        raise self._not_defined_error()

    def _not_defined_error(self) -> MaskError:
        return MaskError(
            f"The record uses the mask {self.name}, which is not defined here.",
            f"Import the module that defines the class {self.name} before loading the record; "
            "with multihead view, by --import MODULE.",
        )


_FIELD_NAMES: dict[type[Mask], tuple[str, ...] | None] = {}


@constant_in_graphs  # a compiler can trace neither the fields of a dataclass nor a cache of functools
def _field_names(kind: type[Mask]) -> tuple[str, ...] | None:
    """Return the field names of a mask class; None if it is not a dataclass."""
    if kind not in _FIELD_NAMES:
        _FIELD_NAMES[kind] = tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
    return _FIELD_NAMES[kind]


def _is_of_this_package(kind: type[Mask]) -> bool:
    """Whether a mask class is defined in a module of this package."""
    inside = kind.__module__.startswith("multihead.")
    return inside and getattr(sys.modules[kind.__module__], kind.__name__, None) is kind


def find_mask_class(name: str) -> type[Mask] | None:
    """Return the mask class with a name stored in a record; None if there is no such class."""
    return _MASK_CLASSES.get(name)


def check_is_mask(mask: object) -> None:
    """Raise a MaskError if an argument is not a mask; in a bare tensor the meaning of True would be unknown."""
    if isinstance(mask, Tensor):
        raise MaskError(
            f"mask is a {mask.dtype} tensor of shape {tuple(mask.shape)}, and the meaning of its values is ambiguous.",
            "Give masks.Keep(t) if True = visible, masks.Drop(t) if True = hidden, or bias=t if it is added to scores.",
        )
    if not isinstance(mask, Mask):
        raise MaskError(
            f"mask is a {type(mask).__name__}, and must be a Mask.",
            "Give one of multihead.masks, for example masks.Causal() & masks.Lengths((5, 3)).",
        )


def _combine_masks(kind: type[_CombinedMask], left: Mask, right: Mask) -> Mask:
    if not isinstance(right, Mask):
        check_is_mask(right)
    if left.hides_nothing or right.hides_nothing:
        full, other = (left, right) if left.hides_nothing else (right, left)
        return other if kind is And else full
    first = left.parts if isinstance(left, kind) else (left,)
    second = right.parts if isinstance(right, kind) else (right,)
    return kind((*first, *second))  # type: ignore[call-arg]


def _repr_of_field(value: object) -> str:
    """Return the repr of a value; a tensor is shortened to its dtype and shape."""
    if isinstance(value, Tensor):
        return f"<{str(value.dtype).removeprefix('torch.')} tensor {tuple(value.shape)}>"
    return repr(value)


def row_of_sample(tensor: Tensor, index: int) -> Tensor:
    """Return the row of a sample in a tensor (batch or 1, ...), of which one row is for all samples."""
    return tensor[index if len(tensor) > 1 else 0]


def _intersect_bounds(left: KeyBounds, right: KeyBounds) -> KeyBounds:
    if left.remainder is None or right.remainder is None:
        remainder = left.remainder or right.remainder
    else:
        remainder = left.remainder & right.remainder
    return KeyBounds(torch.maximum(left.start, right.start), torch.minimum(left.stop, right.stop), remainder)


def _clamp_to_keys(edge: Tensor, keys: int | Tensor) -> Tensor:
    if isinstance(keys, Tensor):
        return torch.minimum(edge.clamp(min=0), keys)
    return edge.clamp(0, keys)
