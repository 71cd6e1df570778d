"""One tile of the attention map, exact, from q, k and the logsumexp alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from multihead.call import AttentionRequest
from multihead.errors import ArgumentError
from multihead.kernels.tile import of_heads, scores, seen, without_autocast
from multihead.scores.bias import bias_tile


def tile(
    request: AttentionRequest,
    logsumexp: Tensor,
    *,
    heads: int | Sequence[int] | slice = slice(None),
    queries: slice = slice(None),
    keys: slice = slice(None),
) -> Tensor:
    """Compute p_ij = exp(s_ij - L_i) for some heads, queries and keys.

    Args:
        request: the attention call.
        logsumexp: (batch, heads, queries) of the whole call, nats.
        heads: an index, several, or a slice.
        queries: which queries.
        keys: which keys.

    Returns: (batch, heads, queries, keys) of the tile, in the dtype of the logsumexp; 0 where a key is hidden,
        NaN in the cells that a row of NaN does see.

    Raises:
        ArgumentError: a head does not exist.
    """
    chosen = head_indices(heads, request.shape.num_heads).to(request.q.device)
    # Cut before heads are chosen: choosing copies, and a tile is far smaller than the keys of a long text.
    q, k = request.q[:, :, queries], request.k[:, :, keys]
    narrow = of_heads(replace(request, q=q, k=k, v=k, bias=None), chosen)
    shown = seen(request, queries, keys)
    shown = shown[:, chosen] if shown.shape[1] > 1 else shown
    row = logsumexp[:, chosen][:, :, queries, None]  # (batch, heads, queries, 1)
    with without_autocast(request.q.device):
        cells = scores(narrow).detach()
        if request.bias is not None:
            added = bias_tile(request.bias, request.shape, queries, keys).detach().to(cells.dtype)
            cells = cells + (added[:, chosen] if added.shape[1] > 1 else added)
        cells = cells.to(logsumexp.dtype)
    # A hidden cell is 0 whatever its score is, NaN and inf included.
    return (cells - row).exp_().masked_fill_(~(shown & (row != -torch.inf)), 0)


def head_indices(heads: int | Sequence[int] | slice, num_heads: int) -> Tensor:
    """Turn a choice of heads into their indices: (chosen,), int64.

    >>> head_indices(slice(0, 8, 2), 8)
    tensor([0, 2, 4, 6])
    """
    if isinstance(heads, slice):
        wanted = list(range(num_heads)[heads])
    else:
        wanted = [heads] if isinstance(heads, int) else list(heads)
    if not wanted:
        raise ArgumentError("No head was chosen.", f"Give heads from 0 to {num_heads - 1}.")
    for head in wanted:
        if not -num_heads <= head < num_heads:
            raise ArgumentError(f"There is no head {head}.", f"Give heads from 0 to {num_heads - 1}.")
    return torch.tensor([head % num_heads for head in wanted])
