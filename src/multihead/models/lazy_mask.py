"""Tensor subclasses for masks of Hugging Face models; `LazyMask` stores a Mask instead of queries x keys values.

A Hugging Face model passes its mask from layer to layer as a tensor. A `LazyMask` is computed as a dense tensor only if
the model computes with it. `models/mask_functions.py` infers the Mask from a mask function of transformers and compares
both on some rows; an unknown mask function becomes a dense mask.
"""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from multihead.errors import ModelError
from multihead.layer.packing import Packing
from multihead.masks import Full, Keep, Mask
from multihead.models.mask_functions import MaskExtent

_KEYS_AXIS = 3
# names of tensor operations besides views whose result on masks is a mask
_MASK_OPS = re.compile(
    r"index(_select)?|gather|_unsafe_view|clone|repeat|cat|stack|constant_pad_nd|flip|roll|_to_copy|tri[lu]"
    r"|(masked|index)_fill|scatter|maximum|minimum|(bitwise|logical)_(not|and|or|xor)"
)
# names of tensor operations that select numbers by a mask, or read only its shape
_SELECTION_OPS = re.compile(
    r"where|masked_(fill_?|select)|index|_?index_put(_|_impl_)?|nonzero|\w*scaled_dot_product\w*"
    r"|((zeros|ones|empty|full)_like|new_(zeros|ones|empty|full))"
)
# names of the other tensor operations whose Boolean result is right for a Boolean mask
_BOOLEAN_OPS = re.compile(r"any|all|equal|mul|(eq|ne|l[te]|g[te]|(bitwise|logical)_(not|and|or|xor)|fill|copy|mul)_?")
_COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge"])
# Name of an operation -> the arguments that are compared with a mask or written into one. A number among them is meant
# for a mask that is added to scores: 0 = visible.
_VALUES_OF_OPS = (
    dict.fromkeys([*_COMPARISONS, "equal", "mul", "maximum", "minimum"], slice(0, 2))
    | dict.fromkeys([f"{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "or", "xor")], slice(0, 2))
    | {"fill": slice(1, 2), "copy": slice(1, 2), "masked_fill": slice(2, 3), "index_fill": slice(3, 4)}
    | {"scatter": slice(3, 4), "constant_pad_nd": slice(2, 3), "full_like": slice(1, 2), "new_full": slice(2, 3)}
)

# names of operations that arrive under another one
_PUBLIC_NAMES = {"_local_scalar_dense": "item", "ones_like": "isfinite"}


class MaskReads(threading.local):
    """Number of operations, per thread, that have read the values of a mask outside this library's attention."""

    count = 0


mask_reads = MaskReads()


class BooleanMask(Tensor):
    """A tensor subclass for a Boolean mask, True = visible, that raises if a model computes numbers from it.

    The masks of transformers' eager attention are added to the scores. Masks of this library are Boolean, and would
    hide nothing if a model added them to scores. A comparison with a number, such as `mask < -1`, or a number written
    into the mask would mean something else without an error, so both are rejected too. A copy for later, such as
    `copy.deepcopy` and `torch.export` make, is a plain Boolean tensor.
    """

    _dense: Tensor
    # `__torch_dispatch__` handles every operation; `__torch_function__` would only make attribute access slow.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    @staticmethod
    def wrap(dense: Tensor) -> BooleanMask:
        """Wrap a plain Boolean tensor as a mask."""
        made: BooleanMask = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's documented way
            BooleanMask, dense.size(), strides=dense.stride(), dtype=torch.bool, device=dense.device
        )
        made._dense = dense
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BooleanMask({tuple(self.shape)})"

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set cells to a Boolean; torch would convert a number, such as -inf, to True without an error."""
        if _is_number(value):
            raise _numbers_error("setitem")
        super().__setitem__(index, value)

    def as_bool_tensor(self) -> Tensor:
        """Return the mask as a plain tensor."""
        return self._dense

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_bool_tensor().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_bool_tensor().clone().__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Run a tensor operation on the dense mask.

        Raises:
            ModelError: the operation computes numbers from the mask, or reads or changes it as if it held numbers.
        """
        mask_reads.count += 1
        name = getattr(function, "__name__", "").split(".")[0]
        kwargs = kwargs or {}
        is_mask = function.is_view or _MASK_OPS.fullmatch(name)
        selects = _SELECTION_OPS.fullmatch(name)
        if not (is_mask or selects or _BOOLEAN_OPS.fullmatch(name)) or _takes_numbers(name, args, kwargs):
            raise _numbers_error(name)
        args, kwargs = pytree.tree_map_only(BooleanMask, lambda mask: mask.as_bool_tensor(), (args, kwargs))
        found: Any = function(*args, **kwargs)
        if selects:
            return BooleanMask.wrap(found) if is_mask and found.dtype == torch.bool else found
        results = [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]
        if any(each.dtype != torch.bool for each in results):
            raise _numbers_error(name)
        return pytree.tree_map_only(Tensor, BooleanMask.wrap, found) if is_mask else found


def _is_number(value: object) -> bool:
    """Whether a value is a number or a tensor of numbers, and not Boolean."""
    return value.dtype != torch.bool if isinstance(value, Tensor) else not isinstance(value, bool)


def _takes_numbers(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation reads a mask as numbers or writes numbers into it, so that its Boolean result is wrong."""
    plain = name.removesuffix("_")
    if plain == "constant_pad_nd":
        return args[2:3] != (1.0,)  # False arrives as 0.0, which would show a key if the mask were added to scores
    if plain in ("zeros_like", "new_zeros"):
        return kwargs.get("dtype") is None
    if plain == "ones_like":
        return "pin_memory" not in kwargs  # isfinite and isreal of a Boolean tensor, which are always true
    if plain in ("masked_fill", "index_fill", "scatter") and not isinstance(args[0], BooleanMask):
        return False  # the mask selects the cells of scores
    if plain in ("full_like", "new_full") and kwargs.get("dtype") not in (None, torch.bool):
        return False
    if plain in _COMPARISONS and args[0] is args[1]:
        return True  # as in isnan
    return plain in _VALUES_OF_OPS and any(map(_is_number, args[_VALUES_OF_OPS[plain]]))


def _numbers_error(operation: str) -> ModelError:
    """Return the error for an operation that treats a mask as numbers that are added to scores."""
    name = _PUBLIC_NAMES.get(operation, operation)
    return ModelError(
        f"The model computes {name} of its attention mask, which is Boolean with this library's attention: True = "
        "visible, not a number added to the scores.",
        "Use mask.where(0.0, -inf), scores.masked_fill(~mask, -inf), or attn_implementation='eager'.",
    )


class LazyMask(BooleanMask):
    """A mask tensor (batch, 1, queries, keys) for a Hugging Face model that stores a Mask and no values.

    Models pass their mask to the attention layers mostly unchanged; some slice keys off its end. A copy or such a slice
    of a LazyMask is a LazyMask. Any other operation runs on the dense tensor, so that every change that a model makes
    to its mask takes effect.

    Attributes:
        mask: which keys each query may see.
        extent: numbers of queries and keys, and their positions in the sequence.
        padding: (batch, keys) bool, True = no padding; None if there is no padding mask.
        is_token: (batch, tokens) bool, like `padding`, for all tokens so far, not only those of the keys.
        packing: index of each token in the padded batch, if the batch is one row of packed samples; else None.
        decoded: the mask as a plain tensor, which a compiled forward reads, so that one graph serves all steps of
            decoding: the mask and its positions are constants of a graph. None where few graphs would read it.
    """

    mask: Mask
    extent: MaskExtent
    padding: Tensor | None
    is_token: Tensor | None
    packing: Packing | None
    decoded: Tensor | None

    def __new__(
        cls, mask: Mask, extent: MaskExtent, padding: Tensor | None = None, packing: Packing | None = None
    ) -> LazyMask:
        """Create a mask tensor, (batch, 1, queries, keys), without storage."""
        size = (extent.batch, 1, extent.queries, extent.keys)
        made: LazyMask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=extent.device)  # noqa: SLF001 - torch's documented way
        made.mask, made.extent, made.padding, made.packing, made.decoded = mask, extent, padding, packing, None
        made.is_token = None
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.mask!r}, query_start={self.extent.query_start})"

    def as_bool_tensor(self) -> Tensor:
        """Return the mask as a plain tensor: bool (batch, 1, queries, keys), True = visible."""
        return self.mask.tile(self.extent.positions_of_rows(slice(None))).expand(self.shape)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Set cells to a Boolean, for all layers that read this mask."""
        changed = self.clone()
        changed[index] = value
        self.set_cells(changed.as_bool_tensor())  # type: ignore[attr-defined]

    def set_cells(self, dense: Tensor) -> None:
        """Replace the mask by a tensor of the same shape."""
        self.mask, self.packing = Keep(dense), None
        self.decoded = None if self.decoded is None else dense

    def select_first_keys(self, keys: int) -> LazyMask:
        """Return the mask sliced to its first `keys` keys."""
        whole = keys == self.extent.keys
        mask = self.mask if whole else self.mask.restrict_to_first_keys(keys)
        if mask is None:
            mask = Keep(self.as_bool_tensor()[..., :keys])
        padding = None if self.padding is None else self.padding[:, :keys]
        made = LazyMask(mask, replace(self.extent, keys=keys), padding, self.packing if whole else None)
        made.decoded = None if self.decoded is None else self.decoded[..., :keys]
        made.is_token = self.is_token
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Run an operation on the dense mask; copies, and slices that cut keys off the end, return a LazyMask."""
        name = getattr(function, "__name__", "")
        source = args[0] if args else None
        if isinstance(source, LazyMask):
            if name.split(".")[0].endswith("_"):  # an operation in place changes the mask for all layers that read it
                changed = BooleanMask.wrap(source.as_bool_tensor().clone())
                function(changed, *args[1:], **(kwargs or {}))
                source.set_cells(changed.as_bool_tensor())
                return source
            if name in ("detach.default", "alias.default"):
                return source.select_first_keys(source.extent.keys)
            if name == "slice.Tensor":
                # arguments of aten.slice: axis, start, end and step, of which the last may be missing
                options = list(args[1:])
                axis, start, end, step = options + [0, None, None, 1][len(options) :]
                size = source.shape[axis]
                stop = size if end is None else min(end if end >= 0 else end + size, size)
                if not start and step == 1 and (axis in (_KEYS_AXIS, -1) or stop == size):
                    return source.select_first_keys(stop if axis in (_KEYS_AXIS, -1) else source.extent.keys)
        if name == "add.Tensor" and _adds_only_full_masks(args):
            args = pytree.tree_map_only(
                LazyMask, lambda mask: torch.zeros((), device=mask.device).expand(mask.shape), args
            )
            return function(*args, **(kwargs or {}))
        return super().__torch_dispatch__(function, types, args, kwargs)


def _adds_only_full_masks(terms: tuple[Any, ...]) -> bool:
    """Whether every mask among the terms of a sum hides nothing, so that it can be added to scores as 0."""
    scores = [each for each in terms if not isinstance(each, LazyMask)]
    shown = all(each.mask == Full() for each in terms if isinstance(each, LazyMask))
    return shown and all(isinstance(each, Tensor) and each.is_floating_point() for each in scores) and bool(scores)
