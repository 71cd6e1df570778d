"""Leave the padding of a batch out of what is computed: pack its tokens, and put results back in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.masks import Documents, Lengths, Mask
from multihead.tracing import jit_traced, readable, traced

Side = Literal["right", "left"]


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the tokens of a padded batch stand; made by `pack`.

    Fields:
        lengths: (batch,), int64, tokens a sample.
        index: (tokens,), int64, the place of each token in the flattened batch.
        batch: number of samples.
        length: padded length.
        side: on which side of the tokens the padding stands.

    >>> packing = Packing.of((2, 1), batch=2, length=3)
    >>> packed = packing.pack(torch.arange(6.0).view(2, 3, 1))
    >>> packed[..., 0]
    tensor([[0., 1., 3.]])
    >>> packing.unpack(packed)[..., 0]
    tensor([[0., 1., 0.],
            [3., 0., 0.]])
    """

    lengths: Tensor
    index: Tensor
    batch: int
    length: int
    side: Side = "right"

    @staticmethod
    def of(
        lengths: Sequence[int] | Tensor,
        *,
        batch: int,
        length: int,
        device: torch.device | str = "cpu",
        name: str = "lengths",
        side: Side = "right",
    ) -> Packing:
        """Find the tokens of a padded batch.

        Args:
            lengths: tokens a sample, (batch,) ints or an integer tensor. On an accelerator a tensor makes the host
                wait for it, since it says how many tokens there are; ints do not.
            batch: number of samples.
            length: padded length.
            device: where the batch is.
            name: what the caller calls the lengths, for the errors.
            side: on which side of the tokens the padding stands.

        Raises:
            ArgumentError: a length is no integer, negative, or beyond the padded length, or there is no such side.
            ShapeError: there is not one length a sample.
        """
        if side not in ("right", "left"):
            raise ArgumentError(f"padding_side is {side!r}.", 'Give "right" or "left".')
        if isinstance(lengths, Tensor):
            whole, where = not lengths.is_floating_point() and lengths.dtype != torch.bool, lengths.device
        else:
            if not isinstance(lengths, Iterable):
                raise ArgumentError(f"{name} is {lengths!r}.", f"Give one length per sample: {batch} integers.")
            lengths, where = tuple(lengths), torch.device("cpu")
            whole = all(isinstance(number, int) and not isinstance(number, bool) for number in lengths)
        if not whole:
            raise ArgumentError(f"{name} is {lengths!r}.", "Give integers, one a sample.")
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=where)
        if tuple(counts.shape) != (batch,):
            raise ShapeError(
                f"{name} has shape {tuple(counts.shape)}, and the batch has {batch} samples.",
                f"Give one length a sample: shape ({batch},).",
            )
        if batch and readable(counts.device) and not 0 <= int(counts.min()) <= int(counts.max()) <= length:
            wrong = int(counts.min()) if int(counts.min()) < 0 else int(counts.max())
            raise ArgumentError(
                f"{name} holds {wrong}, and the batch is padded to {length} tokens.",
                f"Give lengths from 0 to {length}.",
            )
        as_operator = traced() and not jit_traced()  # which would make a constant of the length
        places = torch.ops.multihead.places if as_operator else _places
        index = places(counts, length, side == "left")
        return Packing(counts.to(device), index.to(device, non_blocking=True), batch, length, side)

    @property
    def mask(self) -> Documents:
        """The mask of the packed tokens: each sample is a document."""
        return Documents(self.lengths)

    @property
    def positions(self) -> Tensor:
        """(1, tokens), int64: the place of each token in its sample, the first one's 0."""
        place = self.index % self.length if self.length else self.index
        if self.side == "left":
            place = place - (self.length - self.lengths[self.index // self.length])
        return place[None]

    def pack(self, x: Tensor) -> Tensor:
        """Take the tokens out of a padded batch: (batch, length, dim) -> (1, tokens, dim)."""
        if tuple(x.shape[:2]) != (self.batch, self.length):
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, and was packed from {self.batch} samples of {self.length} tokens.",
                f"Give (batch, length, features) = ({self.batch}, {self.length}, features).",
            )
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Put tokens back in place, padding 0: (1, tokens, dim) -> (batch, length, dim)."""
        padded = x.new_zeros(self.batch * self.length, x.shape[-1])
        return padded.index_copy_(0, self.index, x[0]).view(self.batch, self.length, x.shape[-1])

    def aligned(self) -> Packing:
        """Let every sample begin at its first place, whatever side its padding stands on."""
        if self.side == "right":
            return self
        index = self.index // self.length * self.length + self.positions[0]
        return replace(self, index=index, side="right")


def pack(x: Tensor, lengths: Sequence[int] | Tensor, *, padding_side: Side = "right") -> tuple[Tensor, Packing]:
    """Take the tokens out of a padded batch, once for all layers that only look at one token at a time or know packing.

    Hand the tokens to `MultiHeadAttention` with `packing=`: its samples do not see each other, and no padding is
    computed anywhere. Layers that take each token alone (norms, feed-forward) need nothing.

    Args:
        x: (batch, length, features), padded.
        lengths: (batch,) tokens a sample, ints or an integer tensor.
        padding_side: on which side of a sample's tokens its padding stands.

    Returns: the tokens (1, tokens, features), sample after sample, and where they stood.

    Raises:
        ShapeError, ArgumentError: the lengths do not fit x.

    >>> x = torch.arange(6.0).view(2, 3, 1)
    >>> tokens, packing = pack(x, (2, 1))
    >>> tokens[..., 0], packing.mask
    (tensor([[0., 1., 3.]]), Documents(<int64 tensor (2,)>))
    """
    if not isinstance(x, Tensor):
        raise DtypeError(f"x is a {type(x).__name__}, and must be a tensor.", "Give (batch, length, features).")
    if x.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x.shape)}.", "Give (batch, length, features).")
    packing = Packing.of(lengths, batch=x.shape[0], length=x.shape[1], device=x.device, side=padding_side)
    return packing.pack(x), packing


def unpack(tokens: Tensor, packing: Packing) -> Tensor:
    """Put packed tokens back in place, padding 0.

    Args:
        tokens: (1, tokens, features).
        packing: where they stood.

    Returns: (batch, length, features).

    Raises:
        ShapeError: there are more or fewer tokens than were packed.

    >>> tokens, packing = pack(torch.ones(2, 3, 1), (2, 1))
    >>> unpack(2 * tokens, packing)[..., 0]
    tensor([[2., 2., 0.],
            [2., 0., 0.]])
    """
    refuse_unless_packed("tokens", tokens, packing)
    return packing.unpack(tokens)


def refuse_unless_packed(name: str, tokens: Tensor, packing: Packing) -> None:
    """Refuse what are not the tokens of a packing."""
    if not isinstance(packing, Packing):
        raise ArgumentError(f"packing is a {type(packing).__name__}.", "Give the Packing that mh.pack returns.")
    if not isinstance(tokens, Tensor):
        raise DtypeError(f"{name} is a {type(tokens).__name__}, and must be a tensor.", "Give what mh.pack returns.")
    given = tuple(tokens.shape)
    if len(given) != 3 or given[0] != 1 or (not traced() and given[1] != len(packing.index)):
        raise ShapeError(
            f"{name} has shape {given}, and {len(packing.index)} tokens were packed.",
            f"Give (1, {len(packing.index)}, features), as mh.pack does.",
        )


def _places(lengths: Tensor, length: int, left: bool) -> Tensor:  # noqa: FBT001 - an operator's arguments
    """Return where the tokens of a padded batch stand when it is flattened: (tokens,) int64."""
    column = torch.arange(length, device=lengths.device)
    inside = column >= (length - lengths)[:, None] if left else column < lengths[:, None]  # (batch, length)
    return inside.flatten().nonzero().flatten()


# How many places there are is known only when the lengths are read: a graph takes the search as one operator.
_operator = torch.library.custom_op("multihead::places", _places, mutates_args=())


@_operator.register_fake
def _(lengths: Tensor, length: int, left: bool) -> Tensor:  # noqa: FBT001 - an operator's arguments
    return lengths.new_empty(torch.library.get_ctx().new_dynamic_size())


class Padding(NamedTuple):
    """How the padding of one layer call is left out, of projections and attention both.

    Fields:
        rows: where the queries' tokens stand, or None if none is padding.
        columns: where the keys' tokens stand, or None if none is padding.
        queries: padded number of queries.
        keys: padded number of keys.
        together: whether the samples' tokens stay in one row through the attention, as documents.
        packed: whether the input came as packed tokens, and the output is to stay so.
        placed_rows: where the attention expects the queries' tokens: as rows, but from a sample's first place on.
        placed_columns: where it expects the keys' tokens.
    """

    rows: Packing | None
    columns: Packing | None
    queries: int
    keys: int
    together: bool
    packed: bool = False
    placed_rows: Packing | None = None
    placed_columns: Packing | None = None

    @staticmethod
    def of(
        x: Tensor,
        memory: Tensor,
        lengths: Sequence[int] | Tensor | None,
        memory_lengths: Sequence[int] | Tensor | None,
        *,
        together: bool,
        side: Side = "right",
    ) -> Padding:
        """Find the padding of x and memory, which may be the same tensor.

        Args:
            x: (batch, queries, features).
            memory: (batch, keys, features).
            lengths: (batch,) tokens a sample of x, or None.
            memory_lengths: (batch,) tokens a sample of memory, or None.
            together: whether the attention could take all samples in one row.
            side: on which side of the tokens the padding stands.
        """
        if lengths is None and memory_lengths is None:
            return _NO_PADDING
        lengths = memory_lengths if memory is x and lengths is None else lengths
        rows = _packing("lengths", lengths, x, side)
        columns = rows if memory is x else _packing("memory_lengths", memory_lengths, memory, side)
        return _placed(Padding(rows, columns, x.shape[1], memory.shape[1], together and rows is not None))

    @staticmethod
    def of_packed(packing: Packing, *, together: bool) -> Padding:
        """Take a batch that comes packed."""
        return _placed(Padding(packing, packing, packing.length, packing.length, together, packed=True))

    @property
    def packed_lengths(self) -> Tensor | None:
        """(samples,), where the attention sees all samples in one row; else None."""
        return self.rows.lengths if self.together and self.rows is not None else None

    @property
    def positions(self) -> Tensor | None:
        """(1, tokens), each token's place in its sample, where the attention sees all samples in one row; else None."""
        return self.rows.positions if self.together and self.rows is not None else None

    def without(self, x: Tensor, memory: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take padding out before the projections: what is NaN there must not reach a parameter's gradient."""
        if self.packed:
            return x, memory, values
        x_tokens = x if self.rows is None else self.rows.pack(x)
        memory_tokens = x_tokens if memory is x else _packed(memory, self.columns)
        return x_tokens, memory_tokens, memory_tokens if values is memory else _packed(values, self.columns)

    def placed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put projected tokens where the attention expects them: every sample from its first place on."""
        if self.placed_rows is None and self.placed_columns is None:
            return q, k, v
        return self.placed_queries(q), self.placed_keys(k), self.placed_keys(v)

    def placed_queries(self, q: Tensor) -> Tensor:
        """Put projected queries where the attention expects them."""
        return _unpacked(q, self.placed_rows)

    def placed_keys(self, k: Tensor) -> Tensor:
        """Put projected keys or values where the attention expects them."""
        return _unpacked(k, self.placed_columns)

    def hiding(self, mask: Mask, key_lengths: Tensor | None = None, keys: int | None = None) -> Mask:
        """Join a mask with the padding: padded keys are hidden, padded queries see nothing.

        Args:
            mask: the caller's.
            key_lengths: (batch,) how many keys of each sample are real, where they come from a cache.
            keys: how many keys there are, where they come from a cache.
        """
        if keys is None:
            keys, key_lengths = self.keys, None if self.columns is None else self.columns.lengths
        if self.rows is None:
            return mask if key_lengths is None else mask & Lengths(key_lengths)
        if self.together:
            return mask & Documents(self.rows.lengths)
        lengths = self.rows.lengths
        seen = torch.full_like(lengths, keys) if key_lengths is None else key_lengths
        real = torch.arange(self.queries, device=lengths.device) < lengths[:, None]  # (batch, queries)
        return mask & Lengths(torch.where(real, seen[:, None], 0))

    def taken(self, merged: Tensor) -> Tensor:
        """Take the tokens out of the merged heads, before the output projection."""
        return _packed(merged, self.placed_rows)

    def restored(self, output: Tensor) -> Tensor:
        """Put the output back in place: (batch, queries, features), 0 in padding; packed tokens stay packed."""
        return output if self.packed else _unpacked(output, self.rows)


_NO_PADDING = Padding(None, None, queries=0, keys=0, together=False)  # how many does not matter without padding


def _packing(name: str, lengths: Sequence[int] | Tensor | None, x: Tensor, side: Side) -> Packing | None:
    if lengths is None:
        return None
    return Packing.of(lengths, batch=x.shape[0], length=x.shape[1], device=x.device, name=name, side=side)


def _placed(padding: Padding) -> Padding:
    """Say where the attention expects the tokens too, once for queries, keys, values and the output."""
    if padding.together:
        return padding
    rows = _aligned(padding.rows)
    columns = rows if padding.columns is padding.rows else _aligned(padding.columns)
    return padding._replace(placed_rows=rows, placed_columns=columns)


def _aligned(packing: Packing | None) -> Packing | None:
    return None if packing is None else packing.aligned()


def _packed(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else packing.pack(x)


def _unpacked(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else packing.unpack(x)
