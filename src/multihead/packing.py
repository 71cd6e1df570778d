"""Leave the padding of a batch out of what is computed: pack its tokens, and put results back in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from multihead.errors import ArgumentError, ShapeError
from multihead.masks import Causal, Documents, Full, Lengths, Mask, Window
from multihead.masks.values import And, Or
from multihead.reading import readable


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the tokens of a padded batch stand.

    Fields:
        lengths: (batch,), int64, tokens a sample.
        index: (tokens,), int64, the place of each token in the flattened batch.
        batch: number of samples.
        length: padded length.

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

    @staticmethod
    def of(
        lengths: Sequence[int] | Tensor,
        *,
        batch: int,
        length: int,
        device: torch.device | str = "cpu",
        name: str = "lengths",
    ) -> Packing:
        """Find the tokens of a padded batch.

        Args:
            lengths: tokens a sample, (batch,) ints or an integer tensor.
            batch: number of samples.
            length: padded length.
            device: where the batch is.
            name: what the caller calls the lengths, for the errors.

        Raises:
            ArgumentError: a length is no integer, negative, or beyond the padded length.
            ShapeError: there is not one length a sample.
        """
        if isinstance(lengths, Tensor):
            whole = not lengths.is_floating_point() and lengths.dtype != torch.bool
        else:
            lengths = tuple(lengths)
            whole = all(isinstance(number, int) and not isinstance(number, bool) for number in lengths)
        if not whole:
            raise ArgumentError(f"{name} is {lengths!r}.", "Give integers, one a sample.")
        counts = torch.as_tensor(lengths, dtype=torch.int64, device=device)
        if tuple(counts.shape) != (batch,):
            raise ShapeError(
                f"{name} has shape {tuple(counts.shape)}, and the batch has {batch} samples.",
                f"Give one length a sample: shape ({batch},).",
            )
        checked = readable(counts.device)
        if checked and batch and not 0 <= int(counts.min()) <= int(counts.max()) <= length:
            wrong = int(counts.min()) if int(counts.min()) < 0 else int(counts.max())
            raise ArgumentError(
                f"{name} holds {wrong}, and the batch is padded to {length} tokens.",
                f"Give lengths from 0 to {length}.",
            )
        inside = torch.arange(length, device=device) < counts[:, None]  # (batch, length)
        return Packing(counts, inside.flatten().nonzero().flatten(), batch, length)

    def pack(self, x: Tensor) -> Tensor:
        """Take the tokens out of a padded batch: (batch, length, dim) -> (1, tokens, dim)."""
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Put tokens back in place, padding 0: (1, tokens, dim) -> (batch, length, dim)."""
        padded = x.new_zeros(self.batch * self.length, x.shape[-1])
        return padded.index_copy(0, self.index, x[0]).view(self.batch, self.length, x.shape[-1])


def can_stay_packed(mask: Mask) -> bool:
    """Whether a mask speaks of differences of positions only, so that packing changes nothing but the offsets.

    >>> from multihead import masks
    >>> can_stay_packed(masks.Causal() & masks.Window(8)), can_stay_packed(masks.Prefix(3))
    (True, False)
    """
    if isinstance(mask, (And, Or)):
        return all(can_stay_packed(part) for part in mask.parts)
    return isinstance(mask, (Full, Causal, Window))


@dataclass(frozen=True, eq=False)
class Padding:
    """How the padding of one layer call is left out, of projections and attention both.

    Fields:
        rows: where the queries' tokens stand, or None if none is padding.
        columns: where the keys' tokens stand, or None if none is padding.
        queries: padded number of queries.
        keys: padded number of keys.
        together: whether the samples' tokens stay in one row through the attention, as documents.
    """

    rows: Packing | None
    columns: Packing | None
    queries: int
    keys: int
    together: bool

    @staticmethod
    def of(
        x: Tensor,
        memory: Tensor,
        lengths: Sequence[int] | Tensor | None,
        memory_lengths: Sequence[int] | Tensor | None,
        *,
        together: bool,
    ) -> Padding:
        """Find the padding of x and memory, which may be the same tensor.

        Args:
            x: (batch, queries, features).
            memory: (batch, keys, features).
            lengths: (batch,) tokens a sample of x, or None.
            memory_lengths: (batch,) tokens a sample of memory, or None.
            together: whether the attention could take all samples in one row.
        """
        lengths = memory_lengths if memory is x and lengths is None else lengths
        rows = _packing("lengths", lengths, x)
        columns = rows if memory is x else _packing("memory_lengths", memory_lengths, memory)
        return Padding(rows, columns, x.shape[1], memory.shape[1], together and rows is not None)

    @property
    def packed_lengths(self) -> Tensor | None:
        """(samples,), where the attention sees all samples in one row; else None."""
        return self.rows.lengths if self.together and self.rows is not None else None

    def without(self, x: Tensor, memory: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take padding out before the projections: what is NaN there must not reach a parameter's gradient."""
        x_tokens = x if self.rows is None else self.rows.pack(x)
        memory_tokens = x_tokens if memory is x else _packed(memory, self.columns)
        return x_tokens, memory_tokens, memory_tokens if values is memory else _packed(values, self.columns)

    def placed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Put projected tokens where the attention expects them."""
        if self.together:
            return q, k, v
        return _unpacked(q, self.rows), _unpacked(k, self.columns), _unpacked(v, self.columns)

    def hiding(self, mask: Mask) -> Mask:
        """Join a mask with the padding: padded keys are hidden, padded queries see nothing."""
        if self.rows is None:
            return mask if self.columns is None else mask & Lengths(self.columns.lengths)
        if self.together:
            return mask & Documents(self.rows.lengths)
        lengths = self.rows.lengths
        seen = torch.full_like(lengths, self.keys) if self.columns is None else self.columns.lengths
        real = torch.arange(self.queries, device=lengths.device) < lengths[:, None]  # (batch, queries)
        return mask & Lengths(torch.where(real, seen[:, None], 0))

    def taken(self, merged: Tensor) -> Tensor:
        """Take the tokens out of the merged heads, before the output projection."""
        return merged if self.together else _packed(merged, self.rows)

    def restored(self, output: Tensor) -> Tensor:
        """Put the output back in place: (batch, queries, features), 0 in padding."""
        return _unpacked(output, self.rows)


def _packing(name: str, lengths: Sequence[int] | Tensor | None, x: Tensor) -> Packing | None:
    if lengths is None:
        return None
    return Packing.of(lengths, batch=x.shape[0], length=x.shape[1], device=x.device, name=name)


def _packed(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else packing.pack(x)


def _unpacked(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else packing.unpack(x)
