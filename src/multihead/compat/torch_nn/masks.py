"""Convert the masks of nn.MultiheadAttention to a mask of multihead.masks and a bias, and nested tensors to padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.errors import DtypeError, MaskError
from multihead.masks import Causal, Drop, Full, Lengths, Mask
from multihead.masks.positions import CallSize
from multihead.tensors.tracing import can_read_values


def convert_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, size: CallSize, *, added_keys: int, is_causal: bool
) -> tuple[Mask, Tensor | None]:
    """Convert masks of nn.MultiheadAttention: True hides a key, floats are added to the scores.

    A float mask of 0 and -inf becomes a boolean one. On an accelerator or in a compiled graph, where values cannot be
    read without synchronisation, float masks stay biases, and `is_causal` is trusted, as in nn.MultiheadAttention.

    Args:
        attn_mask: (queries, keys) or (batch * heads, queries, keys).
        key_padding_mask: (batch, keys).
        size: sizes of the call, without the added keys.
        added_keys: number of keys of add_bias_kv and add_zero_attn, which come first and which every query sees.
        is_causal: whether attn_mask is known to be the causal mask; without attn_mask the causal mask is applied.

    Returns:
        the mask, in which the first query has the position `added_keys`, and a bias that is added to the scores,
        broadcasting to (batch, heads, queries, keys), or None.

    >>> hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    >>> padding = torch.tensor([[False, False, True], [False, False, False]])
    >>> convert_masks(hidden, padding, CallSize(batch=2, heads=1, queries=3, keys=3), added_keys=0, is_causal=False)
    (Causal() & Lengths(<int64 tensor (2,)>), None)
    """
    _check_mask_shapes(attn_mask, key_padding_mask, size)
    by_query, bias = _convert_attn_mask(attn_mask, size, added_keys, is_causal=is_causal)
    by_key, key_bias = _convert_key_padding_mask(key_padding_mask, size, added_keys)
    # (batch, heads or 1, queries or 1, keys).
    bias = key_bias if bias is None else bias if key_bias is None else bias + key_bias
    if bias is not None and added_keys:
        bias = pad(bias, (added_keys, 0))
    return by_query & by_key, bias


def _convert_attn_mask(
    attn_mask: Tensor | None, size: CallSize, added_keys: int, *, is_causal: bool
) -> tuple[Mask, Tensor | None]:
    """Convert attn_mask to a mask, or to a bias (batch or 1, heads or 1, queries, keys)."""
    if attn_mask is None:
        return Causal() if is_causal else Full(), None
    if is_causal and not can_read_values(attn_mask.device):
        return Causal(), None
    hidden = _hidden_cells(attn_mask)
    if hidden is None:
        return Full(), attn_mask.view(-1, size.heads if attn_mask.dim() == 3 else 1, size.queries, size.keys)
    if hidden.dim() == 2:
        if can_read_values(hidden.device) and _is_causal(hidden):
            return Causal(), None
        return Drop(pad(hidden, (added_keys, 0)), "queries keys"), None
    by_head = hidden.view(size.batch, size.heads, size.queries, size.keys)
    return Drop(pad(by_head, (added_keys, 0))), None


def unpadded_queries(key_padding_mask: Tensor | None) -> Tensor | None:
    """Return which queries of a self-attention are not padding, (batch, queries) bool; None if unknown."""
    hidden = None if key_padding_mask is None else _hidden_cells(key_padding_mask)
    return None if hidden is None else ~hidden


def _convert_key_padding_mask(
    key_padding_mask: Tensor | None, size: CallSize, added_keys: int
) -> tuple[Mask, Tensor | None]:
    """Convert key_padding_mask to a mask, or to a bias (batch, 1, 1, keys)."""
    if key_padding_mask is None:
        return Full(), None
    hidden = _hidden_cells(key_padding_mask)
    if hidden is None:
        return Full(), key_padding_mask[:, None, None]
    if can_read_values(hidden.device):
        lengths = size.keys - hidden.sum(-1)  # (batch,)
        if bool((lengths == size.keys).all()):
            return Full(), None
        past_end = torch.arange(size.keys) >= lengths[:, None]  # (batch, keys)
        if torch.equal(past_end, hidden):
            return Lengths(lengths + added_keys), None
    return Drop(pad(hidden, (added_keys, 0)), "batch keys"), None


def _hidden_cells(mask: Tensor) -> Tensor | None:
    """Return where a mask hides a key, bool of its shape; None if it is a bias."""
    if mask.dtype == torch.bool:
        return mask
    if mask.requires_grad or not can_read_values(mask.device):
        return None
    hidden = mask == -torch.inf
    return hidden if int(hidden.sum()) == int(mask.count_nonzero()) else None  # all others are 0


def _is_causal(hidden: Tensor) -> bool:
    """Whether a mask (queries, keys), True = hidden, hides exactly the keys after each query's position."""
    queries, keys = hidden.shape
    if not keys or bool(hidden[-1, 0]) or (keys > 1 and not bool(hidden[0, -1])):
        return False
    return torch.equal(hidden, torch.ones(queries, keys, dtype=torch.bool).triu_(1))


def _check_mask_shapes(attn_mask: Tensor | None, key_padding_mask: Tensor | None, size: CallSize) -> None:
    flat, of_keys = (size.queries, size.keys), (size.batch, size.keys)
    of_heads = (size.batch * size.heads, *flat)
    for name, mask, shapes, expected in (
        ("attn_mask", attn_mask, (flat, of_heads), f"(queries, keys) = {flat} or (batch * heads, ...) = {of_heads}"),
        ("key_padding_mask", key_padding_mask, (of_keys,), f"(batch, keys) = {of_keys}"),
    ):
        if mask is None:
            continue
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise DtypeError(
                f"{name} has dtype {mask.dtype}.",
                f"Give a boolean tensor, True = hidden ({name}.bool() if 1 hides), or floats to add to the scores.",
            )
        if tuple(mask.shape) not in shapes:
            raise MaskError(f"{name} has shape {tuple(mask.shape)}.", f"Give {expected}.")


def padding_of_nested(nested: Tensor) -> Tensor:
    """Return which tokens are padding once a nested tensor is padded: (batch, length), bool.

    >>> padding_of_nested(torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged))
    tensor([[False,  True,  True],
            [False, False, False]])
    """
    lengths = torch.tensor([sample.shape[0] for sample in nested.unbind()], device=nested.device)
    return torch.arange(int(lengths.max()), device=nested.device) >= lengths[:, None]


def nested_like(nested: Tensor, samples: list[Tensor]) -> Tensor:
    """Build a nested tensor from samples (length, features) that can be added to `nested`.

    >>> x = torch.nested.nested_tensor([torch.zeros(1, 4), torch.zeros(3, 4)], layout=torch.jagged)
    >>> (x + nested_like(x, [torch.ones(1, 4), torch.ones(3, 4)])).is_nested
    True
    """
    if nested.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(samples, layout=nested.layout)
    # PyTorch adds two jagged tensors only if they share one tensor of offsets, and one of lengths.
    offsets, lengths = nested.offsets(), nested.lengths()  # type: ignore[attr-defined]
    tokens = torch.cat(samples)
    if lengths is not None:  # the samples of `nested` have gaps between them
        starts = zip(offsets[:-1].tolist(), samples, strict=True)
        places = [torch.arange(start, start + len(sample), device=offsets.device) for start, sample in starts]
        whole = tokens.new_zeros(nested.values().shape[0], tokens.shape[1])
        tokens = whole.index_copy(0, torch.cat(places), tokens)
    return torch.nested.nested_tensor_from_jagged(tokens, offsets, lengths)
