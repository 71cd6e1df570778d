"""Find the padding of a nested tensor's padded form, and build nested tensors of the same lengths."""

from __future__ import annotations

import torch
from torch import Tensor


def padding_of(nested: Tensor) -> Tensor:
    """Return where the padded form of a nested tensor is padding: (batch, length), bool.

    >>> padding_of(torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged))
    tensor([[False,  True,  True],
            [False, False, False]])
    """
    lengths = torch.tensor([sample.shape[0] for sample in nested.unbind()], device=nested.device)
    return torch.arange(int(lengths.max()), device=nested.device) >= lengths[:, None]


def nested_like(nested: Tensor, samples: list[Tensor]) -> Tensor:
    """Build a nested tensor of samples with the lengths of another, so that the two can be added.

    Args:
        nested: the other nested tensor, of layout strided or jagged.
        samples: (length, features) each.

    >>> x = torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged)
    >>> (x + nested_like(x, [torch.ones(1, 4), torch.ones(3, 4)])).is_nested
    True
    """
    if nested.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(samples, layout=nested.layout)
    # To PyTorch two jagged tensors have the same lengths only if they share the tensors of offsets and lengths.
    offsets, lengths = nested.offsets(), nested.lengths()  # type: ignore[attr-defined]
    tokens = torch.cat(samples)
    if lengths is not None:  # there are gaps between the samples
        starts = zip(offsets[:-1].tolist(), samples, strict=True)
        places = [torch.arange(start, start + len(sample), device=offsets.device) for start, sample in starts]
        whole = tokens.new_zeros(nested.values().shape[0], tokens.shape[1])
        tokens = whole.index_copy(0, torch.cat(places), tokens)
    return torch.nested.nested_tensor_from_jagged(tokens, offsets, lengths)
