"""Multi-head attention as in textbooks: each head has its own matrices, and the results are concatenated."""

# ruff: noqa: N803, N806 - the textbook's letters

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from multihead.compat.projections import copy_to_projections
from multihead.errors import ArgumentError, ShapeError
from multihead.errors.arguments import check_integer, reject_scripting
from multihead.functional import attend, request_of
from multihead.kernels.call import AttentionRequest, CallOrigin
from multihead.layer import MultiHeadAttention
from multihead.layer.heads import head_dim_of, split_heads
from multihead.masks import Full, Mask

__all__ = ["PerHeadAttention", "concat", "split"]

_FULL = Full()
_MATRIX_NAMES = ("Q", "K", "V")


class PerHeadAttention(nn.Module):
    """Attention with h independent sets of matrices: Z_i = softmax(X W_Q[i] (X W_K[i])^T / sqrt(head_dim)) X W_V[i].

    All heads are computed in one call with their matrices concatenated; the results are the same, because each head
    reads only its own columns. `stack()` converts the module to a `MultiHeadAttention`, and `split(layer)` is the
    inverse.

    The output of a query that sees no key is 0.

    Args:
        embed_dim: number of features of the input.
        num_heads: the number h of heads.
        head_dim: columns of each W_Q[i], W_K[i] and W_V[i]; embed_dim / num_heads if None.
        bias: whether each projection adds a bias, b_Q[i], b_K[i], b_V[i] and b_O.
        output_projection: whether the concatenated heads are multiplied by W_O; otherwise they are the output.

    The matrices are in the lists `W_Q`, `W_K`, `W_V`, (features, head_dim) each, and `W_O`, (heads * head_dim,
    output_dim): tokens are rows, and are multiplied from the right, X @ W. `PerHeadAttention.of` builds the module from
    existing matrices.

    Raises:
        ArgumentError: a size is invalid.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2; Alammar, The Illustrated Transformer.

    >>> sequence = torch.randn(100, 16)
    >>> heads = PerHeadAttention(embed_dim=16, num_heads=8, head_dim=3, output_projection=False)
    >>> heads(sequence).shape
    torch.Size([100, 24])
    >>> Z = heads.heads(sequence[:2])
    >>> len(Z), Z[0].shape, concat(Z).shape
    (8, torch.Size([2, 3]), torch.Size([2, 24]))
    """

    __prepare_scriptable__ = reject_scripting

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        output_projection: bool = True,
    ) -> None:
        super().__init__()
        head_dim = head_dim_of(embed_dim, num_heads) if head_dim is None else head_dim
        for name, size in (("embed_dim", embed_dim), ("num_heads", num_heads), ("head_dim", head_dim)):
            check_integer(name, size)

        def random_matrix(rows: int, columns: int) -> Tensor:
            return nn.init.xavier_uniform_(torch.empty(rows, columns))

        matrices = [[random_matrix(embed_dim, head_dim) for _ in range(num_heads)] for _ in _MATRIX_NAMES]
        W_O = random_matrix(num_heads * head_dim, embed_dim) if output_projection else None
        biases = [[torch.zeros(head_dim)] * num_heads if bias else None] * len(_MATRIX_NAMES)
        b_O = torch.zeros(embed_dim) if output_projection and bias else None
        self._set_parameters(matrices, W_O, biases, b_O)

    @classmethod
    def of(
        cls,
        W_Q: Sequence[Tensor],
        W_K: Sequence[Tensor],
        W_V: Sequence[Tensor],
        W_O: Tensor | None = None,
        *,
        b_Q: Sequence[Tensor] | None = None,
        b_K: Sequence[Tensor] | None = None,
        b_V: Sequence[Tensor] | None = None,
        b_O: Tensor | None = None,
    ) -> PerHeadAttention:
        """Build the module from lists of matrices, one per head; they are copied.

        Args:
            W_Q: (embed_dim, head_dim) each.
            W_K: (memory features, head_dim) each.
            W_V: (memory features, value_head_dim) each.
            W_O: (heads * value_head_dim, output_dim); if None, the concatenated heads are the output.
            b_Q: (head_dim,) each, or None; b_K likewise, and b_V with (value_head_dim,).
            b_K: see b_Q.
            b_V: see b_Q.
            b_O: (output_dim,), or None.

        Raises:
            ShapeError: the lists have different lengths, or matrices that do not fit each other.

        >>> eye = torch.eye(2)
        >>> PerHeadAttention.of([eye, eye], [eye, eye], [eye, 10 * eye])(torch.ones(3, 2))[0].tolist()
        [1.0, 1.0, 10.0, 10.0]
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made._set_parameters([list(W_Q), list(W_K), list(W_V)], W_O, [b_Q, b_K, b_V], b_O)  # noqa: SLF001
        return made

    def _set_parameters(
        self,
        matrices: list[list[Tensor]],
        W_O: Tensor | None,
        biases: Sequence[Sequence[Tensor] | None],
        b_O: Tensor | None,
    ) -> None:
        """Copy the matrices and biases to parameters; reject lists of matrices that do not fit each other."""
        if len({len(each) for each in matrices}) > 1 or not matrices[0]:
            counts = ", ".join(f"{len(each)} W_{part}" for part, each in zip(_MATRIX_NAMES, matrices, strict=True))
            raise ShapeError(f"There are {counts}.", "Give one W_Q, W_K and W_V per head.")
        for part, each, bias in zip(_MATRIX_NAMES, matrices, biases, strict=True):
            shapes = [tuple(matrix.shape) for matrix in each]
            if len(set(shapes)) > 1 or len(shapes[0]) != 2 or 0 in shapes[0]:
                raise ShapeError(f"W_{part} has the shapes {shapes}.", "Give one (features, head_dim) for all heads.")
            if bias is not None and [tuple(vector.shape) for vector in bias] != [shapes[0][1:]] * len(each):
                raise ShapeError(
                    f"b_{part} has the shapes {[tuple(vector.shape) for vector in bias]}.",
                    f"Give {len(each)} of shape {shapes[0][1:]}, the width of the heads.",
                )
        q, k, v = (each[0] for each in matrices)
        if q.shape[1] != k.shape[1] or len(k) != len(v):
            raise ShapeError(
                f"W_Q is {tuple(q.shape)}, W_K {tuple(k.shape)} and W_V {tuple(v.shape)} per head.",
                "Give W_Q and W_K the same columns, W_K and W_V the same rows.",
            )
        merged = len(matrices[2]) * v.shape[1]
        if W_O is not None and (W_O.dim() != 2 or len(W_O) != merged):
            raise ShapeError(
                f"W_O has shape {tuple(W_O.shape)}.", f"Give ({merged}, output_dim): one row per column of Z."
            )
        if b_O is not None and (W_O is None or tuple(b_O.shape) != (W_O.shape[1],)):
            raise ShapeError(
                f"b_O has shape {tuple(b_O.shape)}, and "
                + ("there is no W_O." if W_O is None else f"W_O has {W_O.shape[1]} columns."),
                "Give one number per column of W_O, or neither.",
            )
        self.W_Q, self.W_K, self.W_V = (_as_parameter_list(each) for each in matrices)
        self.b_Q, self.b_K, self.b_V = (None if each is None else _as_parameter_list(each) for each in biases)
        self.W_O = None if W_O is None else nn.Parameter(W_O.detach().clone())
        self.b_O = None if b_O is None else nn.Parameter(b_O.detach().clone())

    @property
    def num_heads(self) -> int:
        """The number of heads."""
        return len(self.W_Q)

    def heads(
        self, x: Tensor, memory: Tensor | None = None, *, mask: Mask = _FULL, query_start: int | str | None = None
    ) -> list[Tensor]:
        """Compute the output of each head.

        Args:
            x: (queries, features) or (batch, queries, features).
            memory: input of keys and values, (keys, features) or (batch, keys, features); x if None.
            mask: which keys each query may see.
            query_start: position of the first query among the keys, see `attention`.

        Returns:
            Z_1 ... Z_h, (queries, value_head_dim) or (batch, queries, value_head_dim) each.

        Raises:
            ShapeError, DtypeError, MaskError, ArgumentError: an argument does not fit the matrices or another argument.
        """
        memory = x if memory is None else memory
        for name, tensor, width in (("x", x, len(self.W_Q[0])), ("memory", memory, len(self.W_K[0]))):
            if tensor.dim() not in (2, 3) or tensor.shape[-1] != width or tensor.dim() != x.dim():
                raise ShapeError(
                    f"{name} has shape {tuple(tensor.shape)}.",
                    f"Give (length, features) or (batch, length, features), with {width} features.",
                )
        rows, columns = (x[None], memory[None]) if x.dim() == 2 else (x, memory)
        q = self._project(rows, self.W_Q, self.b_Q)  # (batch, heads, queries, head_dim)
        k = self._project(columns, self.W_K, self.b_K)  # (batch, heads, keys, head_dim)
        v = self._project(columns, self.W_V, self.b_V)  # (batch, heads, keys, value_head_dim)
        request: AttentionRequest = request_of(q, k, v, mask, query_start=query_start, origin=CallOrigin(self))
        output = attend(request).output
        return [head[0] if x.dim() == 2 else head for head in output.unbind(1)]

    def forward(
        self, x: Tensor, memory: Tensor | None = None, *, mask: Mask = _FULL, query_start: int | str | None = None
    ) -> Tensor:
        """Compute concat(Z_1 ... Z_h) W_O; the arguments are those of `heads`.

        Returns:
            (queries, output_dim) or (batch, queries, output_dim); without W_O output_dim is
            heads * value_head_dim.
        """
        joined = concat(self.heads(x, memory, mask=mask, query_start=query_start))
        return joined if self.W_O is None else linear(joined, self.W_O.mT, self.b_O)

    def stack(self) -> MultiHeadAttention:
        """Build a `MultiHeadAttention` whose projections are copies of these matrices, concatenated.

        >>> x, heads = torch.randn(1, 5, 12), PerHeadAttention(embed_dim=12, num_heads=4)
        >>> torch.allclose(heads.stack()(x), heads(x), atol=1e-6)
        True
        """
        W_O, sample = self.W_O, self.W_Q[0]
        biased = any(each is not None for each in (self.b_Q, self.b_K, self.b_V, self.b_O))
        layer = MultiHeadAttention(
            embed_dim=len(sample),
            num_heads=self.num_heads,
            head_dim=sample.shape[1],
            value_head_dim=self.W_V[0].shape[1],
            key_dim=len(self.W_K[0]),
            output_dim=None if W_O is None else W_O.shape[1],
            bias=biased,
            output_projection=W_O is not None,
            device=sample.device,
            dtype=sample.dtype,
        )
        of_heads = ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        of_output = [] if W_O is None else [(W_O.mT, self.b_O)]
        copy_to_projections(layer, [*(_join_heads(*each) for each in of_heads), *of_output])
        return layer

    def extra_repr(self) -> str:
        """Return the sizes that `print` shows."""
        return f"num_heads={self.num_heads}, head_dim={self.W_Q[0].shape[1]}"

    def _project(self, x: Tensor, matrices: nn.ParameterList, biases: nn.ParameterList | None) -> Tensor:
        return split_heads(linear(x, *_join_heads(matrices, biases)), self.num_heads)


def concat(Z: Sequence[Tensor]) -> Tensor:
    """Concatenate the results of the heads: h tensors (..., length, head_dim) -> (..., length, h * head_dim).

    >>> concat([torch.zeros(2, 3)] * 8).shape
    torch.Size([2, 24])
    """
    if not Z or len({tuple(each.shape[:-1]) for each in Z}) > 1:
        raise ShapeError(
            f"Z has the shapes {[tuple(each.shape) for each in Z]}.", "Give one result per head, of the same length."
        )
    return torch.cat(list(Z), -1)


def split(layer: MultiHeadAttention) -> PerHeadAttention:
    """Split a layer into the matrices of its heads, which are copied.

    Query heads that share a key/value head each get a copy of it. The layer's dropout is not kept.

    Raises:
        ArgumentError: the layer averages its heads, has a scale other than 1 / sqrt(head_dim), or has value inputs of
            another width than its key inputs.

    >>> layer = MultiHeadAttention(embed_dim=12, num_heads=4)
    >>> heads = split(layer)
    >>> len(heads.W_Q), heads.W_Q[0].shape, heads.W_O.shape
    (4, torch.Size([12, 3]), torch.Size([12, 12]))
    """
    own_scale = layer.scale is not None and layer.scale != layer.head_dim**-0.5
    apart = layer.value_dim != layer.key_dim
    if layer.merge != "concat" or own_scale or apart:
        raise ArgumentError(
            f"The layer has merge={layer.merge!r}, scale={layer.scale}, key_dim={layer.key_dim} and "
            f"value_dim={layer.value_dim}.",
            'Give one with merge="concat", scale=None and key_dim equal to value_dim.',
        )

    def heads_of(columns: Tensor, count: int) -> list[Tensor]:  # each is repeated for the query heads that share it
        return [part for part in columns.chunk(count, -1) for _ in range(layer.num_heads // count)]

    parts = ((layer.q_proj, layer.num_heads), (layer.k_proj, layer.num_kv_heads), (layer.v_proj, layer.num_kv_heads))
    W_Q, W_K, W_V = (heads_of(projection.weight.mT, count) for projection, count in parts)
    b_Q, b_K, b_V = (
        None if projection.bias is None else heads_of(projection.bias, count) for projection, count in parts
    )
    W_O, b_O = (None, None) if layer.out_proj is None else (layer.out_proj.weight.mT, layer.out_proj.bias)
    return PerHeadAttention.of(W_Q, W_K, W_V, W_O, b_Q=b_Q, b_K=b_K, b_V=b_V, b_O=b_O)


def _join_heads(matrices: nn.ParameterList, biases: nn.ParameterList | None) -> tuple[Tensor, Tensor | None]:
    """Join the matrices and biases of all heads to a weight (heads * head_dim, features) and a bias."""
    return torch.cat(list(matrices), 1).mT, None if biases is None else torch.cat(list(biases))


def _as_parameter_list(tensors: Sequence[Tensor]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(tensor.detach().clone()) for tensor in tensors])
