"""Drop-ins for the multi-head attention of "Dive into Deep Learning": same names, same state_dict.

Replace `from d2l import torch as d2l` and `d2l.MultiHeadAttention` by
`from multihead.compat.d2l import MultiHeadAttention`; parameters, outputs and gradients stay the same.
One difference: a query that sees no key (a valid length of 0) has weights of 0, where the book's class weights every
key equally, padding included.
"""

# ruff: noqa: N803 - the book writes its tensors X

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from multihead.compat.weights import LastWeights
from multihead.errors import ArgumentError, MaskError, ShapeError
from multihead.errors.arguments import reject_scripting
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionRequest, CallOrigin
from multihead.kernels.dense_tile import working_dtype
from multihead.kernels.reference import softmax
from multihead.layer.heads import head_dim_of, merge_heads, split_heads
from multihead.layer.packing import Packing
from multihead.masks import Full, Lengths, Mask
from multihead.masks.positions import CallSize, TilePositions
from multihead.tensors.tracing import can_read_values

__all__ = ["DotProductAttention", "MultiHeadAttention", "masked_softmax", "transpose_output", "transpose_qkv"]

ValidLens: TypeAlias = "Tensor | Sequence[float] | Sequence[Sequence[float]] | None"


class DotProductAttention(nn.Module):
    """Scaled dot product attention, with the weights of its last call in `attention_weights`.

    Args:
        dropout: fraction of the attention weights dropped in training, 0 to 1.

    Source: Zhang et al., Dive into Deep Learning, section "Attention Scoring Functions".

    >>> attention = DotProductAttention(dropout=0.5).eval()
    >>> output = attention(torch.ones(2, 1, 2), torch.ones(2, 10, 2), torch.ones(2, 10, 4), torch.tensor([2, 6]))
    >>> attention.attention_weights[:, :, :3]
    tensor([[[0.5000, 0.5000, 0.0000]],
    <BLANKLINE>
            [[0.1667, 0.1667, 0.1667]]])
    """

    __prepare_scriptable__ = reject_scripting

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self._last = LastWeights()

    @property
    def attention_weights(self) -> Tensor | None:
        """The weights of the last call before dropout: (batch, queries, keys); None before the first call.

        Inside `MultiHeadAttention` the heads are flattened into the batch: (batch * heads, queries, keys). The weights
        are computed when they are read, from the queries and keys of that call, and are differentiable.
        """
        weights = self._last.weights()
        return None if weights is None else weights.flatten(0, 1)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """Compute attention from the queries to the keys before each valid length.

        Args:
            queries: (batch, queries, head_dim).
            keys: (batch, keys, head_dim).
            values: (batch, keys, value_dim).
            valid_lens: number of visible keys, (batch,) or (batch, queries); all if None. Key j is visible where
                j < length: a length above the number of keys shows all, 3.5 shows 4, and a negative length none.

        Returns:
            (batch, queries, value_dim), 0 where the length is 0.
        """
        _check_3d(queries=queries, keys=keys, values=values)
        q, k, v = queries[:, None], keys[:, None], values[:, None]  # (batch, 1, length, features)
        return self._attend(q, k, v, _mask_of_valid_lens(valid_lens, keys.shape[1]), owner=self)[:, 0]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, owner: nn.Module) -> Tensor:
        """Compute attention on tensors that are split into heads: (batch, heads, queries, value_dim)."""
        dropout = self.dropout.p if self.training else 0.0
        request: AttentionRequest = request_of(q, k, v, mask, dropout=dropout, origin=CallOrigin(owner))
        output = attend(request).output
        self._last.store(request)
        return output


class MultiHeadAttention(nn.Module):
    """Multi-head attention with the book's arguments, submodules and parameter names.

    `print(layer)` shows attention, W_q, W_k, W_v and W_o; the same seed draws the same parameters as the book's.

    Args:
        key_size: features of the keys.
        query_size: features of the queries.
        value_size: features of the values.
        num_hiddens: number of features of the output and of each projection, over all heads.
        num_heads: number of heads, a divisor of num_hiddens.
        dropout: fraction of the attention weights dropped in training, 0 to 1.
        bias: whether the projections add a bias.
        kwargs: must be empty, because `nn.Module` accepts no keyword arguments.

    The book's newer edition omits the three sizes and infers them from the first batch. To do the same, omit them and
    pass keywords: `MultiHeadAttention(num_hiddens=100, num_heads=5, dropout=0.5)`.

    Raises:
        ArgumentError: num_heads does not divide num_hiddens, an argument is missing, or a keyword is unknown.

    Source: Zhang et al., Dive into Deep Learning, section "Multi-Head Attention".

    >>> layer = MultiHeadAttention(100, 100, 100, num_hiddens=100, num_heads=5, dropout=0.5).eval()
    >>> layer(torch.ones(2, 4, 100), torch.ones(2, 6, 100), torch.ones(2, 6, 100), torch.tensor([3, 2])).shape
    torch.Size([2, 4, 100])
    >>> layer.attention.attention_weights[[0, 5], 0].detach()  # head 0 of each sample
    tensor([[0.3333, 0.3333, 0.3333, 0.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000]])
    """

    __prepare_scriptable__ = reject_scripting

    def __init__(
        self,
        key_size: int | None = None,
        query_size: int | None = None,
        value_size: int | None = None,
        num_hiddens: int | None = None,
        num_heads: int | None = None,
        dropout: float | None = None,
        bias: bool = False,  # noqa: FBT001, FBT002 - the book's signature
        **kwargs: Any,
    ) -> None:
        if num_hiddens is None or num_heads is None or dropout is None:
            raise ArgumentError(
                "num_hiddens, num_heads or dropout is missing.",
                "Give (key_size, query_size, value_size, num_hiddens, num_heads, dropout), or, as in the newer edition "
                "of the book, the last three by keyword: num_hiddens=100, num_heads=5, dropout=0.5.",
            )
        if kwargs:
            raise ArgumentError(
                f"There is no argument {' or '.join(map(repr, kwargs))}.",
                "Remove it; for another dtype or device use layer.to(...).",
            )
        head_dim_of(num_hiddens, num_heads, name="num_hiddens")
        super().__init__()
        self.num_heads = num_heads
        self.attention = DotProductAttention(dropout)
        # Created in the book's order, so that the same seed draws the same parameters.
        self.W_q = _build_linear(query_size, num_hiddens, bias=bias)
        self.W_k = _build_linear(key_size, num_hiddens, bias=bias)
        self.W_v = _build_linear(value_size, num_hiddens, bias=bias)
        self.W_o = nn.Linear(num_hiddens, num_hiddens, bias=bias)

    @property
    def attention_weights(self) -> Tensor | None:
        """The weights of the last call before dropout: (batch * heads, queries, keys); None before the first call."""
        return self.attention.attention_weights

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, valid_lens: ValidLens = None) -> Tensor:
        """Compute attention from the queries to the keys before each valid length.

        Keys at or after a (batch,) length are padding: they are not projected, and NaN there has no effect.

        Args:
            queries: (batch, queries, query_size).
            keys: (batch, keys, key_size).
            values: (batch, keys, value_size).
            valid_lens: number of visible keys, (batch,) or (batch, queries); all if None. Key j is visible where
                j < length: a length above the number of keys shows all, 3.5 shows 4, and a negative length none.

        Returns:
            (batch, queries, num_hiddens). Where the length is 0, no key is visible and the output is W_o(0).

        Raises:
            ShapeError, MaskError, DtypeError: the tensors or lengths do not fit each other or the layer.
        """
        _check_3d(queries=queries, keys=keys, values=values)
        mask = _mask_of_valid_lens(valid_lens, keys.shape[1])
        padding = _packing_of_keys(mask, keys, values)
        if padding is None:
            k, v = self.W_k(keys), self.W_v(values)  # (batch, keys, num_hiddens) each
        else:
            packed = padding.pack(keys)  # (1, tokens, key_size)
            k = padding.unpack(self.W_k(packed))
            v = padding.unpack(self.W_v(packed if values is keys else padding.pack(values)))
        q, k, v = (split_heads(x, self.num_heads) for x in (self.W_q(queries), k, v))
        output = self.attention._attend(q, k, v, mask, owner=self)  # noqa: SLF001 - (batch, heads, queries, head_dim)
        return self.W_o(merge_heads(output))  # type: ignore[no-any-return]


def transpose_qkv(X: Tensor, num_heads: int) -> Tensor:
    """Split into heads and flatten them into the batch: (batch, length, width) -> (batch * heads, length, head_dim).

    >>> transpose_qkv(torch.zeros(2, 4, 100), 5).shape
    torch.Size([10, 4, 20])
    """
    return split_heads(X, num_heads).flatten(0, 1)


def transpose_output(X: Tensor, num_heads: int) -> Tensor:
    """Undo `transpose_qkv`: (batch * heads, length, head_dim) -> (batch, length, heads * head_dim).

    >>> X = torch.randn(2, 4, 100)
    >>> torch.equal(transpose_output(transpose_qkv(X, 5), 5), X)
    True
    """
    _check_3d(X=X)
    if num_heads < 1 or X.shape[0] % num_heads:
        raise ShapeError(
            f"X has {X.shape[0]} rows, which is not a multiple of {num_heads} heads.",
            "Give (batch * heads, length, head_dim), as returned by transpose_qkv.",
        )
    return merge_heads(X.unflatten(0, (-1, num_heads)))


def masked_softmax(X: Tensor, valid_lens: ValidLens) -> Tensor:
    """Compute the softmax over the last dimension, in which only keys before the valid length take part.

    Args:
        X: (batch, queries, keys), scores.
        valid_lens: (batch,) or (batch, queries), as for the layer; all keys if None.

    Returns:
        (batch, queries, keys), in the dtype of X; keys at or after the valid length have 0.

    >>> masked_softmax(torch.zeros(2, 1, 4), torch.tensor([2, 0]))
    tensor([[[0.5000, 0.5000, 0.0000, 0.0000]],
    <BLANKLINE>
            [[0.0000, 0.0000, 0.0000, 0.0000]]])
    """
    _check_3d(X=X)
    batch, queries, keys = X.shape
    mask = _mask_of_valid_lens(valid_lens, keys)
    mask.check_fits(CallSize(batch, 1, queries, keys))
    hidden = ~mask.tile(TilePositions.from_sizes(queries, keys, device=X.device))
    cells = X[:, None].to(working_dtype(X.dtype)).masked_fill(hidden, -torch.inf)  # (batch, 1, queries, keys)
    return softmax(cells, None)[0][:, 0].to(X.dtype)


def _mask_of_valid_lens(valid_lens: ValidLens, keys: int) -> Mask:
    """Return the mask of valid lengths. Key j is visible where j < length, so a fractional length is rounded up."""
    if valid_lens is None:
        return Full()
    try:
        lengths = torch.as_tensor(valid_lens)
    except (TypeError, ValueError):  # lists of different lengths, or elements that are no numbers
        Lengths(valid_lens)  # type: ignore[arg-type]  # raises the error
        raise
    if lengths.is_floating_point():
        if can_read_values(lengths.device) and bool(lengths.isnan().any()):
            raise MaskError("valid_lens contains NaN.", "Give numbers of keys, (batch,) or (batch, queries).")
        lengths = lengths.nan_to_num(0.0).clamp(0, keys).ceil().long()  # 3.5 shows the keys 0, 1, 2 and 3
    elif lengths.dtype != torch.bool and not lengths.is_complex():
        lengths = lengths.long().clamp(0, keys)
    return Lengths(lengths)


def _packing_of_keys(mask: Mask, keys: Tensor, values: Tensor) -> Packing | None:
    """Return the packing that drops keys past each sample's length; None if the mask is not of lengths (batch,)."""
    lengths = mask.lengths if isinstance(mask, Lengths) else None
    if not isinstance(lengths, Tensor) or lengths.dim() != 1:
        return None
    if values.shape[:2] != keys.shape[:2]:
        raise ShapeError(
            f"keys has shape {tuple(keys.shape)} and values has {tuple(values.shape)}.", "Give one value per key."
        )
    return Packing.of(lengths, batch=keys.shape[0], length=keys.shape[1], device=keys.device, name="valid_lens")


def _build_linear(width_in: int | None, width_out: int, *, bias: bool) -> nn.Linear:
    return nn.LazyLinear(width_out, bias=bias) if width_in is None else nn.Linear(width_in, width_out, bias=bias)


def _check_3d(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}.", "Give three dimensions: (batch, length, features)."
            )
