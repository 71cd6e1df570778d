"""Drop-ins for the attention of most tutorials, MultiHeadAttention(d_model, h), and of the Annotated Transformer.

Parameters, outputs, weights and gradients equal those of the originals, with one difference: a query that sees no key
has weights of 0. The originals set hidden scores to -1e9, so such a query weights every key equally.
"""

# ruff: noqa: N803 - the tutorials write Q, K and V

from __future__ import annotations

import copy

from torch import Tensor, nn

from multihead.compat.weights import LastWeights, attend_with_weights
from multihead.errors import MaskError, ShapeError
from multihead.errors.arguments import reject_scripting
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionRequest, CallOrigin
from multihead.layer.heads import head_dim_of, merge_heads, split_heads
from multihead.masks import Full, Keep, Mask

__all__ = ["MultiHeadAttention", "MultiHeadedAttention"]


class MultiHeadAttention(nn.Module):
    """Multi-head attention of the tutorials: four projections with bias, returning the output and the weights.

    Args:
        d_model: number of features of each input and of the output.
        h: number of heads, a divisor of d_model.
        dropout: fraction of the attention weights dropped in training, 0 to 1.

    Raises:
        ArgumentError: h does not divide d_model; the message lists the divisors.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2.

    >>> import torch
    >>> layer = MultiHeadAttention(d_model=512, h=8).eval()
    >>> x = torch.randn(2, 10, 512)
    >>> output, weights = layer(x, x, x, mask=torch.ones(10, 10).tril())
    >>> output.shape, weights.shape
    (torch.Size([2, 10, 512]), torch.Size([2, 8, 10, 10]))
    """

    __prepare_scriptable__ = reject_scripting

    def __init__(self, d_model: int, h: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k = head_dim_of(d_model, h, name="d_model")
        self.d_model, self.h = d_model, h
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the columns into heads: (batch, length, d_model) -> (batch, h, length, d_k)."""
        return split_heads(x, self.h)

    def scaled_dot_product_attention(
        self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute attention on tensors that are split into heads.

        Args:
            Q: (batch, h, queries, d_k).
            K: (batch, h, keys, d_k).
            V: (batch, h, keys, d_k).
            mask: broadcasts to (batch, h, queries, keys); 0 or False hides a key.

        Returns:
            the output (batch, h, queries, d_k), and the weights (batch, h, queries, keys), after dropout in training.
        """
        dropout = self.dropout.p if self.training else 0.0
        request: AttentionRequest = request_of(Q, K, V, _mask_of_tensor(mask), dropout=dropout, origin=CallOrigin(self))
        return attend_with_weights(request)

    def forward(self, Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute attention from the queries of Q to the keys of K and the values of V.

        Args:
            Q: (batch, queries, d_model).
            K: (batch, keys, d_model).
            V: (batch, keys, d_model).
            mask: broadcasts to (batch, h, queries, keys), where 0 or False hides a key. A mask of 3 dimensions is
                rejected: (batch, queries, keys) would be read as (h, queries, keys). None hides nothing.

        Returns:
            the output (batch, queries, d_model), and the weights (batch, h, queries, keys), after dropout in training.
            A query that sees no key has weights of 0 and the output W_o(0).

        Raises:
            MaskError: the mask has 3 dimensions or does not broadcast.
            ShapeError, DtypeError: Q, K and V do not fit each other or the layer.
        """
        _check_width(self.d_model, Q=Q, K=K, V=V)
        q, k, v = (self.split_heads(x) for x in (self.W_q(Q), self.W_k(K), self.W_v(V)))
        output, weights = self.scaled_dot_product_attention(q, k, v, mask)  # (batch, h, queries, d_k)
        return self.W_o(merge_heads(output)), weights


class MultiHeadedAttention(nn.Module):
    """Multi-head attention of Harvard's Annotated Transformer: `linears` projects, `attn` holds the weights.

    As in the original, the four projections start with equal weights.

    Args:
        h: number of heads, a divisor of d_model.
        d_model: number of features of each input and of the output.
        dropout: fraction of the attention weights dropped in training, 0 to 1.

    Raises:
        ArgumentError: h does not divide d_model; the message lists the divisors.

    Source: Rush et al., The Annotated Transformer, section "Attention".

    >>> import torch
    >>> layer = MultiHeadedAttention(h=8, d_model=512).eval()
    >>> x = torch.randn(2, 10, 512)
    >>> layer(x, x, x, mask=torch.ones(1, 10, 10).tril()).shape
    torch.Size([2, 10, 512])
    >>> layer.attn.shape
    torch.Size([2, 8, 10, 10])
    """

    __prepare_scriptable__ = reject_scripting

    def __init__(self, h: int, d_model: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.d_k = head_dim_of(d_model, h, name="d_model")
        self.h = h
        first = nn.Linear(d_model, d_model)
        self.linears = nn.ModuleList(copy.deepcopy(first) for _ in range(4))
        self.dropout = nn.Dropout(p=dropout)
        self._last = LastWeights()

    @property
    def attn(self) -> Tensor | None:
        """Weights (batch, h, queries, keys) of the last call, after dropout in training; None before the first call.

        Without dropout, the weights are computed when this property is read. They are differentiable.
        """
        return self._last.weights()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute attention from query to key and value.

        Args:
            query: (batch, queries, d_model).
            key: (batch, keys, d_model).
            value: (batch, keys, d_model).
            mask: (batch or 1, queries or 1, keys), the same for all heads, where 0 or False hides a key; None hides
                nothing.

        Returns:
            (batch, queries, d_model). A query that sees no key has the output `linears[-1](0)`.

        Raises:
            MaskError: the mask does not have 3 dimensions, or does not broadcast.
            ShapeError, DtypeError: query, key and value do not fit each other or the layer.
        """
        _check_width(self.h * self.d_k, query=query, key=key, value=value)
        if mask is not None and mask.dim() != 3:
            raise MaskError(
                f"mask has shape {tuple(mask.shape)}, and this class inserts the head dimension itself.",
                "Give (batch, queries, keys), with 1 for the batch or the queries where they share the mask.",
            )
        shown = Full() if mask is None else Keep(mask[:, None] != 0)
        q, k, v = (
            split_heads(linear(x), self.h)  # (batch, h, length, d_k)
            for linear, x in zip(self.linears, (query, key, value), strict=False)
        )
        dropout = self.dropout.p if self.training else 0.0
        request: AttentionRequest = request_of(q, k, v, shown, dropout=dropout, origin=CallOrigin(self))
        if dropout:
            output, weights = attend_with_weights(request)
            self._last.store(weights)
        else:
            output = attend(request).output
            self._last.store(request)
        return self.linears[3](merge_heads(output))  # type: ignore[no-any-return]


def _mask_of_tensor(mask: Tensor | None) -> Mask:
    """Convert a tensor where 0 hides a key, broadcasting to (batch, heads, queries, keys), to a `Mask`."""
    if mask is None:
        return Full()
    if mask.dim() == 3:
        raise MaskError(
            f"mask has shape {tuple(mask.shape)}, and its first dimension would broadcast to the heads of "
            "(batch, h, queries, keys).",
            "Give mask[:, None] if it is (batch, queries, keys), mask[None] if it is (h, queries, keys).",
        )
    if mask.dim() not in (1, 2, 4):
        raise MaskError(
            f"mask has shape {tuple(mask.shape)}, and must broadcast to (batch, h, queries, keys).",
            "Give (queries, keys), or 4 dimensions, each of that size or 1.",
        )
    return Keep(mask != 0, {1: "keys", 2: "queries keys", 4: None}[mask.dim()])


def _check_width(width: int, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 3 or tensor.shape[2] != width:
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}.", f"Give (batch, length, d_model) with {width} features."
            )
