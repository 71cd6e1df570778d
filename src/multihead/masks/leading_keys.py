"""A mask preceded by leading keys that every query sees, such as the learned key of add_bias_kv.

The option add_zero_attn of nn.MultiheadAttention adds no leading key. A zero key has the score 0 and a zero value,
which equals a sink whose logit is 0. The learned key of add_bias_kv is placed before all other keys, because most masks
are then still intervals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors.arguments import check_integer
from multihead.masks.base import KeyBounds, Mask, attribute_of_inner_mask, check_is_mask
from multihead.masks.distance import Full
from multihead.masks.positions import CallPositions, CallSize, SampleSpan, TilePositions
from multihead.tensors.tracing import is_traced


@dataclass(frozen=True, eq=False)
class LeadingKeys(Mask):
    """Every query sees the first `count` keys; `mask` applies to the keys after them, numbered from 0.

    A query at position p has position p - count in `mask`.

    Args:
        count: number of leading keys.
        mask: which of the other keys are visible.

    >>> from multihead import masks
    >>> print(masks.picture(LeadingKeys(2, masks.Window(2)), queries=3, keys=5, query_start=2))
    ■ ■ ■ · ·
    ■ ■ ■ ■ ·
    ■ ■ · ■ ■
    """

    count: int
    mask: Mask
    uses_positions = attribute_of_inner_mask("uses_positions")

    def __post_init__(self) -> None:
        check_integer("LeadingKeys count", self.count, least=0)
        check_is_mask(self.mask)

    @property
    def starts_at_first_key(self) -> bool:  # type: ignore[override]
        """Whether every query's interval starts at the first key."""
        return self.count > 0 or self.mask.starts_at_first_key

    def check_fits(self, size: CallSize) -> None:
        keys = size.keys - self.count
        self.mask.check_fits(CallSize(size.batch, size.heads, size.queries, keys, size.more_keys_later))

    def tile(self, tile: TilePositions) -> Tensor:
        leading = tile.columns < self.count
        return leading | (self.mask.tile(tile.shifted(-self.count)) & ~leading)

    def bounds(self, call: CallPositions) -> KeyBounds:
        """Extend the intervals of `mask` to the leading keys; if this leaves gaps, the mask becomes the remainder."""
        keys = call.keys - self.count
        # If a span of this mask was selected, its keys may all be leading keys.
        if not is_traced() and not isinstance(keys, Tensor) and keys <= 0:
            nothing = torch.zeros_like(call.positions)
            return KeyBounds(nothing, nothing + call.keys)
        inner = self.mask.bounds(CallPositions(call.positions - self.count, keys, call.has_readable_values))
        if not self.count:
            return inner
        empty = inner.sees_nothing
        stop = inner.stop.masked_fill(empty, 0) + self.count
        all_at_first = call.has_readable_values and bool((empty | (inner.start == 0)).all())
        touching = all_at_first or self.mask.starts_at_first_key
        clean = touching and inner.remainder is None
        return KeyBounds(torch.zeros_like(stop), stop, None if clean else self)

    def select_sample(self, index: int) -> LeadingKeys:
        return LeadingKeys(self.count, self.mask.select_sample(index))

    def select_heads(self, select: Callable[[Tensor], Tensor]) -> LeadingKeys:
        return LeadingKeys(self.count, self.mask.select_heads(select))

    def select_span(self, span: SampleSpan) -> LeadingKeys:
        first_key = span.keys[0]
        keys = (max(first_key - self.count, 0), max(span.keys[1] - self.count, 0))
        return LeadingKeys(
            max(self.count - first_key, 0), self.mask.select_span(SampleSpan(span.sample, span.queries, keys))
        )

    def restrict_to_first_keys(self, count: int) -> Mask | None:
        if count <= self.count:
            return Full()
        inner = self.mask.restrict_to_first_keys(count - self.count)
        return None if inner is None else LeadingKeys(self.count, inner)
