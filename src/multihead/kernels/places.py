"""Find the tokens of a padded batch, as an operator for graphs: `torch.ops.multihead.places`.

It is registered as soon as torch is imported, see `multihead/__init__.py`, and its schema is a file format: exported
programs contain it.
"""

import torch
from torch import Tensor


def places_of_tokens(lengths: Tensor, length: int, left: bool) -> Tensor:  # noqa: FBT001 - an operator's arguments
    """Return the indices of the tokens of a padded batch when it is flattened: (tokens,) int64.

    Args:
        lengths: (batch,), tokens per sample.
        length: of the padded batch.
        left: whether the padding is on the left.
    """
    column = torch.arange(length, device=lengths.device)
    inside = column >= (length - lengths)[:, None] if left else column < lengths[:, None]  # (batch, length)
    return inside.flatten().nonzero().flatten()


# The number of tokens is known only when the lengths are read: a graph contains the search as one operator.
_operator = torch.library.custom_op("multihead::places", places_of_tokens, mutates_args=())


@_operator.register_fake
def _(lengths: Tensor, length: int, left: bool) -> Tensor:  # noqa: FBT001 - an operator's arguments
    return lengths.new_empty(torch.library.get_ctx().new_dynamic_size())
