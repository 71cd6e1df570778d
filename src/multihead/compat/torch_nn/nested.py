"""Nested tensors: which places their padded form has in excess, and new ones of the same lengths."""

from __future__ import annotations

import torch
from torch import Tensor


def beyond(nested: Tensor) -> Tensor:
    """Mark the padding that the padded form of a nested tensor has: (batch, length), bool.

    >>> beyond(torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged))
    tensor([[False,  True,  True],
            [False, False, False]])
    """
    lengths = torch.tensor([sample.shape[0] for sample in nested.unbind()], device=nested.device)
    return torch.arange(int(lengths.max()), device=nested.device) >= lengths[:, None]


def nested_like(nested: Tensor, samples: list[Tensor]) -> Tensor:
    """Make a nested tensor of samples that are as long as those of another, so that the two can be added.

    Args:
        nested: the other one, of layout strided or jagged.
        samples: (length, features) each.

    >>> x = torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged)
    >>> (x + nested_like(x, [torch.ones(1, 4), torch.ones(3, 4)])).is_nested
    True
    """
    if nested.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(samples, layout=nested.layout)
    # PyTorch takes two jagged tensors for equally long where they share the tensor of offsets, and of lengths.
    offsets, lengths = nested.offsets(), nested.lengths()  # type: ignore[attr-defined]
    tokens = torch.cat(samples)
    if lengths is not None:  # the samples lie apart
        starts = zip(offsets[:-1].tolist(), samples, strict=True)
        places = [torch.arange(start, start + len(sample), device=offsets.device) for start, sample in starts]
        room = tokens.new_zeros(nested.values().shape[0], tokens.shape[1])
        tokens = room.index_copy(0, torch.cat(places), tokens)
    return torch.nested.nested_tensor_from_jagged(tokens, offsets, lengths)
