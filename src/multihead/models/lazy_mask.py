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
    r"index(_select)?|gather|_unsafe_view|clone|repeat|cat|stack|constant_pad_nd|flip|roll|_to_copy"
    r"|(bitwise|logical)_(not|and|or)|maximum|minimum"
)
# names of tensor operations that select numbers by a mask, or read only its shape
_SELECTION_OPS = re.compile(
    r"where|masked_(fill_?|select)|index|_?index_put(_|_impl_)?|nonzero|\w*scaled_dot_product\w*"
    r"|((zeros|ones|empty|full)_like|new_(zeros|ones|empty|full))"
)
# Sums are rejected between two masks too: a sum of Boolean masks would show the keys that either mask shows.
_SUM_OPS = frozenset(["add", "add_", "sub", "sub_", "rsub"])
# names of tensor operations that compare two values
_COMPARISON_OPS = re.compile("(eq|ne|lt|le|gt|ge)_?")
# names of tensor operations whose Boolean result on numbers means something else than on a Boolean mask
_NUMBER_OPS = re.compile(
    r"isinf|isnan|isneginf|isposinf|sign(bit)?|sgn|a?(max|min)|aminmax|allclose|_local_scalar_dense"
)


class MaskReads(threading.local):
    """Number of operations, per thread, that have read the values of a mask outside this library's attention."""

    count = 0


mask_reads = MaskReads()


class BooleanMask(Tensor):
    """A tensor subclass for a Boolean mask, True = visible, that raises if a model computes numbers from it.

    The masks of transformers' eager attention are added to the scores. Masks of this library are Boolean, and would
    hide nothing if a model added them to scores. A comparison with a number, such as `mask < -1`, would be answered,
    but with another meaning, so it is rejected too. A copy for later, such as `copy.deepcopy` and `torch.export` make,
    is a plain Boolean tensor.
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
            ModelError: the operation computes numbers from the mask.
        """
        mask_reads.count += 1
        name = getattr(function, "__name__", "").split(".")[0]
        is_rejected = name in _SUM_OPS or _reads_numbers(name, args, kwargs or {})
        args, kwargs = pytree.tree_map_only(BooleanMask, lambda mask: mask.as_bool_tensor(), (args, kwargs or {}))
        found: Any = None if is_rejected else function(*args, **kwargs)
        if not is_rejected and _SELECTION_OPS.fullmatch(name):
            return found if name != "index" or found.dtype != torch.bool else BooleanMask.wrap(found)
        results = [each for each in pytree.tree_leaves(found) if isinstance(each, Tensor)]
        if is_rejected or any(each.dtype != torch.bool for each in results):
            raise ModelError(
                f"The model computes {name} of its attention mask, which is Boolean with this library's attention: "
                "True = visible, not a number added to the scores.",
                "Use mask.where(0.0, -inf), scores.masked_fill(~mask, -inf), or attn_implementation='eager'.",
            )
        is_mask = function.is_view or _MASK_OPS.fullmatch(name)
        return pytree.tree_map_only(Tensor, BooleanMask.wrap, found) if is_mask else found


def _reads_numbers(name: str, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> bool:
    """Whether an operation has a Boolean result that is right only for a mask of numbers, such as `mask < -1`."""
    if name in ("ones_like", "zeros_like"):  # isfinite and isreal of a Boolean tensor, whose values torch does not read
        return kwargs.get("dtype") == torch.bool and "pin_memory" not in kwargs
    if _COMPARISON_OPS.fullmatch(name):
        left, right = args[:2]
        is_bool = isinstance(right, bool) or (isinstance(right, Tensor) and right.dtype == left.dtype == torch.bool)
        return left is right or not is_bool  # a mask that is compared with itself: isnan
    return bool(_NUMBER_OPS.fullmatch(name))


class LazyMask(BooleanMask):
    """A mask tensor (batch, 1, queries, keys) for a Hugging Face model that stores a Mask and no values.

    Models pass their mask to the attention layers mostly unchanged; some slice keys off its end. A copy or such a slice
    of a LazyMask is a LazyMask. Any other operation runs on the dense tensor, so that every change that a model makes
    to its mask takes effect.

    Attributes:
        mask: which keys each query may see.
        extent: numbers of queries and keys, and their positions in the sequence.
        padding: (batch, keys) bool, True = no padding; None if there is no padding mask.
        packing: index of each token in the padded batch, if the batch is one row of packed samples; else None.
    """

    mask: Mask
    extent: MaskExtent
    padding: Tensor | None
    packing: Packing | None

    def __new__(
        cls, mask: Mask, extent: MaskExtent, padding: Tensor | None = None, packing: Packing | None = None
    ) -> LazyMask:
        """Create a mask tensor, (batch, 1, queries, keys), without storage."""
        size = (extent.batch, 1, extent.queries, extent.keys)
        made: LazyMask = torch.Tensor._make_wrapper_subclass(cls, size, dtype=torch.bool, device=extent.device)  # noqa: SLF001 - torch's documented way
        made.mask, made.extent, made.padding, made.packing = mask, extent, padding, packing
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)}, {self.mask!r}, query_start={self.extent.query_start})"

    def as_bool_tensor(self) -> Tensor:
        """Return the mask as a plain tensor: bool (batch, 1, queries, keys), True = visible."""
        return self.mask.tile(self.extent.positions_of_rows(slice(None))).expand(self.shape)

    def select_first_keys(self, keys: int) -> LazyMask:
        """Return the mask sliced to its first `keys` keys."""
        whole = keys == self.extent.keys
        mask = self.mask if whole else self.mask.restrict_to_first_keys(keys)
        if mask is None:
            mask = Keep(self.as_bool_tensor()[..., :keys])
        padding = None if self.padding is None else self.padding[:, :keys]
        return LazyMask(mask, replace(self.extent, keys=keys), padding, self.packing if whole else None)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[Any, Any] | None = None
    ) -> Any:
        """Run an operation on the dense mask; copies, and slices that cut keys off the end, return a LazyMask."""
        name = getattr(function, "__name__", "")
        source = args[0] if args else None
        if isinstance(source, LazyMask):
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
