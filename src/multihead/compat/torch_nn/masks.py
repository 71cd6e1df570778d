"""Translate the masks of nn.MultiheadAttention into values of multihead.masks and a bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from multihead.errors import DtypeError, MaskError
from multihead.masks import Causal, Drop, Full, Lengths, Mask
from multihead.tracing import readable


@dataclass(frozen=True, eq=False)
class Seeing:
    """What an attention call of ours is told instead of the original's masks.

    Fields:
        mask: which keys each query may see.
        bias: added to the scores, broadcasting to (batch, heads, queries, keys), or None.
        query_start: where the first query stands among the keys.
    """

    mask: Mask
    bias: Tensor | None
    query_start: int


@dataclass(frozen=True)
class Sizes:
    """The sizes of one call; `extra` keys that no token has stand before all others, and are seen by every query."""

    batch: int
    heads: int
    queries: int
    keys: int
    extra: int


def seeing(attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: Sizes, *, is_causal: bool) -> Seeing:
    """Translate the original's masks; True hides there, and a float mask is added to the scores.

    A float mask of nothing but 0 and -inf hides as a boolean one does. Where reading values would make the host
    wait (an accelerator, a compiled graph), float masks stay biases, and `is_causal` is believed as the original does.

    Args:
        attn_mask: (queries, keys) or (batch * heads, queries, keys).
        key_padding_mask: (batch, keys).
        sizes: of the call; what the masks say of no extra key.
        is_causal: whether attn_mask is known to be the causal mask; without attn_mask it is one itself.

    >>> hidden = torch.ones(3, 3, dtype=torch.bool).triu(1)
    >>> padding = torch.tensor([[False, False, True], [False, False, False]])
    >>> seeing(hidden, padding, Sizes(batch=2, heads=1, queries=3, keys=3, extra=0), is_causal=False).mask
    Causal() & Lengths(<int64 tensor (2,)>)
    """
    _refuse_unless_fitting(attn_mask, key_padding_mask, sizes)
    by_query, bias = _of_attn_mask(attn_mask, sizes, is_causal=is_causal)
    by_key, key_bias = _of_padding(key_padding_mask, sizes)
    if bias is not None and key_bias is not None:
        bias = bias + key_bias  # (batch, heads or 1, queries, keys)
    elif bias is None:
        bias = key_bias
    if bias is not None and sizes.extra:
        bias = pad(bias, (sizes.extra, 0))
    return Seeing(by_query & by_key, bias, sizes.extra)


def _of_attn_mask(given: Tensor | None, sizes: Sizes, *, is_causal: bool) -> tuple[Mask, Tensor | None]:
    """Translate attn_mask: what it hides, or what it adds, (batch or 1, heads or 1, queries, keys)."""
    if given is None:
        return Causal() if is_causal else Full(), None
    if is_causal and not _readable(given):
        return Causal(), None
    hidden = _hidden(given)
    if hidden is None:
        return Full(), given.view(-1, sizes.heads if given.dim() == 3 else 1, sizes.queries, sizes.keys)
    if hidden.dim() == 2:
        if _readable(hidden) and _causal(hidden):
            return Causal(), None
        return Drop(pad(hidden, (sizes.extra, 0)), "queries keys"), None
    by_head = hidden.view(sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    return Drop(pad(by_head, (sizes.extra, 0))), None


def _of_padding(given: Tensor | None, sizes: Sizes) -> tuple[Mask, Tensor | None]:
    """Translate key_padding_mask: what it hides, or what it adds, (batch, 1, 1, keys)."""
    if given is None:
        return Full(), None
    hidden = _hidden(given)
    if hidden is None:
        return Full(), given[:, None, None]
    if _readable(hidden):
        lengths = sizes.keys - hidden.sum(-1)  # (batch,)
        if bool((lengths == sizes.keys).all()):
            return Full(), None
        behind = torch.arange(sizes.keys) >= lengths[:, None]  # (batch, keys)
        if torch.equal(behind, hidden):
            return Lengths(lengths + sizes.extra), None
    return Drop(pad(hidden, (sizes.extra, 0)), "batch keys"), None


def _hidden(given: Tensor) -> Tensor | None:
    """Return what a mask hides, bool of its shape, or None where it adds to the scores."""
    if given.dtype == torch.bool:
        return given
    if given.requires_grad or not _readable(given):
        return None
    hidden = given == -torch.inf
    return hidden if int(hidden.sum()) == int(given.count_nonzero()) else None  # all that is not hidden is 0


def _causal(hidden: Tensor) -> bool:
    """Whether (queries, keys) hides the keys behind each query's own position and no other."""
    queries, keys = hidden.shape
    if not keys or bool(hidden[-1, 0]) or (keys > 1 and not bool(hidden[0, -1])):
        return False
    return torch.equal(hidden, torch.ones(queries, keys, dtype=torch.bool).triu_(1))


def _readable(given: Tensor) -> bool:
    return readable(given.device)


def _refuse_unless_fitting(attn_mask: Tensor | None, key_padding_mask: Tensor | None, sizes: Sizes) -> None:
    flat = (sizes.queries, sizes.keys)
    of_heads = (sizes.batch * sizes.heads, *flat)
    for name, given, shapes, words in (
        ("attn_mask", attn_mask, (flat, of_heads), f"(queries, keys) = {flat} or (batch * heads, ...) = {of_heads}"),
        (
            "key_padding_mask",
            key_padding_mask,
            ((sizes.batch, sizes.keys),),
            f"(batch, keys) = {(sizes.batch, sizes.keys)}",
        ),
    ):
        if given is None:
            continue
        if given.dtype != torch.bool and not given.is_floating_point():
            raise DtypeError(
                f"{name} has dtype {given.dtype}.",
                f"Give a boolean tensor, True = hidden ({name}.bool() if 1 hides), or floats to add to the scores.",
            )
        if tuple(given.shape) not in shapes:
            raise MaskError(f"{name} has shape {tuple(given.shape)}.", f"Give {words}.")
