"""Pack the tokens of a padded batch, so that no padding is computed, and restore the padding of the results.

Self-attention over a padded batch stays packed in one row of tokens, as `Documents`, if the mask depends on differences
of positions only (`Causal`, `Window`): 4.0 times the speed of PyTorch's layer at 8 x 512, against 3.1 when q, k and v
were unpacked first. The origin of the request carries `packed_lengths`, so that a record can be split into samples
again.

The padding of a self-attention is computed once for all layers (`Padding.of_call`), where its lengths are ints or a
tensor in main memory, which is read: the last eight are kept, with the mask of their packed row, so that its plan is
looked up too.

Padding on the left is an order of tokens: samples are taken out and restored by their index, and in between they start
at index 0, with or without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.kernels.native.operator import indices_of_tokens
from multihead.kernels.sequence_split import SequenceSplit, reject_split_sequence
from multihead.masks import Documents, Lengths, Mask
from multihead.tensors.shapes import numbers_per_sample
from multihead.tensors.tracing import can_read_values, is_intercepted, is_jit_traced, is_traced

Side = Literal["right", "left"]


@dataclass(frozen=True, eq=False)
class Packing:
    """The tokens of a padded batch; made by `pack`.

    Attributes:
        lengths: (batch,), int64, tokens of each sample.
        index: (tokens,), int64, index of each token in the flattened batch.
        batch: number of samples.
        length: padded length.
        side: on which side of the tokens the padding is.

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

        On an accelerator the host waits for a tensor of lengths, since the number of tokens depends on it; ints do not
        make it wait. Raises an ArgumentError or ShapeError, with `name`, where the lengths do not fit.
        """
        if side not in ("right", "left"):
            raise ArgumentError(f"padding_side is {side!r}.", 'Give "right" or "left".')
        counts = numbers_per_sample(name, lengths, batch)
        if batch and can_read_values(counts.device) and not 0 <= int(counts.min()) <= int(counts.max()) <= length:
            wrong = int(counts.min()) if int(counts.min()) < 0 else int(counts.max())
            raise ArgumentError(
                f"{name} holds {wrong}, and the batch is padded to {length} tokens.",
                f"Give lengths from 0 to {length}.",
            )
        as_operator = is_traced() and not is_jit_traced()  # torch.jit.trace would record the length as a constant
        places = torch.ops.multihead.places if as_operator else indices_of_tokens
        index = places(counts, length, side == "left")
        return Packing(counts.to(device), index.to(device, non_blocking=True), batch, length, side)

    @property
    def mask(self) -> Documents:
        """The mask of the packed tokens: each sample is a document."""
        return Documents(self.lengths)

    @property
    def positions(self) -> Tensor:
        """(1, tokens), int64: the position of each token in its sample, counted from 0."""
        place = self.index % self.length if self.length else self.index
        if self.side == "left":
            place = place - (self.length - self.lengths[self.index // self.length])
        return place[None]

    def pack(self, x: Tensor) -> Tensor:
        """Pack the tokens of a padded batch: (batch, length, dim) -> (1, tokens, dim)."""
        if tuple(x.shape[:2]) != (self.batch, self.length):
            raise ShapeError(
                f"x has shape {tuple(x.shape)}, and was packed from {self.batch} samples of {self.length} tokens.",
                f"Give (batch, length, features) = ({self.batch}, {self.length}, features).",
            )
        return x.flatten(0, 1).index_select(0, self.index)[None]

    def unpack(self, x: Tensor) -> Tensor:
        """Unpack tokens into their padded batch, padding 0: (1, tokens, dim) -> (batch, length, dim)."""
        padded = x.new_zeros(self.batch * self.length, x.shape[-1])
        return padded.index_copy_(0, self.index, x[0]).view(self.batch, self.length, x.shape[-1])

    def align_right(self) -> Packing:
        """Return the same tokens with their padding on the right."""
        if self.side == "right":
            return self
        index = self.index // self.length * self.length + self.positions[0]
        return replace(self, index=index, side="right")


def pack(x: Tensor, lengths: Sequence[int] | Tensor, *, padding_side: Side = "right") -> tuple[Tensor, Packing]:
    """Pack the tokens of a padded batch into one row, once for all layers.

    `MultiHeadAttention` takes the row with `packing=`: samples do not see each other, and no padding is computed.
    Layers that compute each token alone (norms, feed-forward) take it as it is.

    Args:
        x: (batch, length, features), padded.
        lengths: (batch,) tokens of each sample, ints or an integer tensor.
        padding_side: on which side of a sample's tokens its padding is.

    Returns:
        the tokens (1, tokens, features), sample after sample, and their places in the batch.

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
    """Unpack tokens into their padded batch, padding 0.

    Args:
        tokens: (1, tokens, features).
        packing: their places in the batch, as `pack` returns them.

    Returns:
        (batch, length, features).

    Raises:
        ShapeError: there are more or fewer tokens than were packed.

    >>> tokens, packing = pack(torch.ones(2, 3, 1), (2, 1))
    >>> unpack(2 * tokens, packing)[..., 0]
    tensor([[2., 2., 0.],
            [2., 0., 0.]])
    """
    check_packed("tokens", tokens, packing)
    return packing.unpack(tokens)


def check_packed(name: str, tokens: Tensor, packing: Packing) -> None:
    """Check that a tensor holds the tokens of a packing."""
    if not isinstance(packing, Packing):
        raise ArgumentError(f"packing is a {type(packing).__name__}.", "Give the Packing that mh.pack returns.")
    if not isinstance(tokens, Tensor):
        raise DtypeError(f"{name} is a {type(tokens).__name__}, and must be a tensor.", "Give what mh.pack returns.")
    given = tuple(tokens.shape)
    if len(given) != 3 or given[0] != 1 or (not is_traced() and given[1] != len(packing.index)):
        raise ShapeError(
            f"{name} has shape {given}, and {len(packing.index)} tokens were packed.",
            f"Give (1, {len(packing.index)}, features), as mh.pack does.",
        )


class Padding(NamedTuple):
    """The padding of one layer call, which neither projections nor attention compute.

    Attributes:
        rows: the tokens of the queries in their padded batch, or None if none is padding.
        columns: the tokens of the keys in their padded batch, or None if none is padding.
        queries: padded number of queries.
        keys: padded number of keys.
        documents: the mask that separates the samples where they stay packed in one row; else None.
        packed: whether the input came as packed tokens, and the output stays packed.
        placed_rows: the tokens of the queries in a right-padded batch, which the attention takes; None where it takes
            packed tokens.
        placed_columns: the tokens of the keys, likewise.
        hidden: where a sequence is split over ranks, which tokens of this rank are padding, (batch, tokens, 1) bool.
            They are set to 0 and not removed, because each rank has equally many tokens.
        shown: the mask that hides the padding of the whole sequence, also that of other ranks.
    """

    rows: Packing | None
    columns: Packing | None
    queries: int
    keys: int
    documents: Documents | None = None
    packed: bool = False
    placed_rows: Packing | None = None
    placed_columns: Packing | None = None
    hidden: Tensor | None = None
    shown: Lengths | None = None

    @staticmethod
    def of_call(
        x: Tensor,
        memory: Tensor,
        lengths: Sequence[int] | Tensor | None,
        memory_lengths: Sequence[int] | Tensor | None,
        *,
        together: bool,
        side: Side = "right",
    ) -> Padding:
        """Find the padding of x and memory, (batch, length, features) each, which may be the same tensor.

        `together`: whether the attention can take all samples in one packed row.
        """
        if memory is x:
            lengths = memory_lengths if lengths is None else lengths
            if not is_intercepted():
                ints = lengths
                if type(lengths) is Tensor and lengths.is_cpu and lengths.dim() == 1:
                    ints = lengths.tolist()
                if isinstance(ints, (tuple, list)) and set(map(type, ints)) == {int}:
                    return _padding_of_lengths(tuple(ints), x.shape[0], x.shape[1], x.device, side, together)
        rows = None if lengths is None else _packing_of_lengths("lengths", lengths, x, side)
        if memory is x:
            columns = rows
        else:
            columns = (
                None if memory_lengths is None else _packing_of_lengths("memory_lengths", memory_lengths, memory, side)
            )
        documents = Documents(rows.lengths) if together and rows is not None else None
        return _add_aligned_places(Padding(rows, columns, x.shape[1], memory.shape[1], documents))

    @staticmethod
    def of_packed(packing: Packing, *, together: bool) -> Padding:
        """Return the padding of a call whose x is packed already."""
        documents = Documents(packing.lengths) if together else None
        return _add_aligned_places(Padding(packing, packing, packing.length, packing.length, documents, packed=True))

    @staticmethod
    def of_split_sequence(sequence: SequenceSplit, x: Tensor, lengths: Sequence[int] | Tensor, side: Side) -> Padding:
        """Find the padding among the tokens of a rank, (batch, tokens, features), where a sequence is split over ranks.

        The lengths, (batch,), count the tokens of each sample on all ranks.
        """
        if side != "right":
            reject_split_sequence(f"padding_side={side!r}", "Put the padding after the tokens of each sample.")
        count = torch.as_tensor(lengths, device=x.device).view(-1, 1)
        whole = torch.arange(x.shape[1] * sequence.rank_and_ranks[1], device=x.device)
        hidden = sequence.positions(x.shape[1], x.device) >= count  # (batch, tokens)
        shown = Lengths(count * (whole < count))  # (batch, whole tokens): queries of padding see no key
        return NO_PADDING._replace(hidden=hidden[..., None], shown=shown)

    @property
    def packed_lengths(self) -> Tensor | None:
        """(samples,), tokens per sample, where the attention takes all samples in one row; else None."""
        return None if self.documents is None or self.rows is None else self.rows.lengths

    @property
    def positions(self) -> Tensor | None:
        """(1, tokens), each token's position in its sample, where the attention takes all samples in one row."""
        return None if self.documents is None or self.rows is None else self.rows.positions

    @property
    def real_queries(self) -> Tensor | None:
        """(batch, queries) bool, False for padding, where the attention takes a padded batch; else None."""
        if self.documents is not None or self.rows is None:
            return None
        lengths = self.rows.lengths
        return torch.arange(self.queries, device=lengths.device) < lengths[:, None]

    def drop(self, x: Tensor, memory: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Drop the padding before the projections: NaN in it must not reach a parameter's gradient.

        Returns (1, tokens, features) each where there is padding, and what was passed where there is none.
        """
        if self.packed:
            return x, memory, values
        if self.hidden is not None:
            x_filled = x.masked_fill(self.hidden, 0)
            return x_filled, x_filled, x_filled if values is memory else values.masked_fill(self.hidden, 0)
        x_tokens = x if self.rows is None else self.rows.pack(x)
        memory_tokens = x_tokens if memory is x else self._pack_keys(memory)
        return x_tokens, memory_tokens, memory_tokens if values is memory else self._pack_keys(values)

    def _pack_keys(self, memory: Tensor) -> Tensor:
        return memory if self.columns is None else self.columns.pack(memory)

    def unpack_projected(
        self, x: Tensor, q: Tensor, memory: Tensor, k: Tensor, v: Tensor, *, fresh: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Unpack q, k and v, (1, tokens, width), into a right-padded batch, unless the attention takes them packed.

        x and memory are the inputs of the projections. If a cache holds k and v (not `fresh`), only q is unpacked.
        Raises a ShapeError if a projection gathers tokens of other processes, whose padding is not known here.
        """
        if self.rows is not None and q.shape[1] != x.shape[1]:
            raise _token_count_error("q_proj", x, q)
        if fresh and self.columns is not None and k.shape[1] != memory.shape[1]:
            raise _token_count_error("k_proj", memory, k)
        q = q if self.placed_rows is None else self.placed_rows.unpack(q)
        if not fresh or self.placed_columns is None:
            return q, k, v
        return q, self.placed_columns.unpack(k), self.placed_columns.unpack(v)

    def hide_in_mask(self, mask: Mask, key_lengths: Tensor | None = None, keys: int | None = None) -> Mask:
        """Join a mask with the padding: padded keys are hidden, padded queries see nothing.

        Where the keys come from a cache, key_lengths is the number of keys of each sample that are no padding,
        (batch,), and `keys` the number of all keys.
        """
        if self.documents is not None:
            return mask & self.documents
        if self.shown is not None:
            return mask & self.shown
        if keys is None:
            keys, key_lengths = self.keys, None if self.columns is None else self.columns.lengths
        if self.rows is None:
            return mask if key_lengths is None else mask & Lengths(key_lengths)
        lengths = self.rows.lengths
        visible = torch.full_like(lengths, keys) if key_lengths is None else key_lengths
        real = self.real_queries
        return mask if real is None else mask & Lengths(torch.where(real, visible[:, None], 0))

    def restore(self, output: Tensor) -> Tensor:
        """Restore the padding of the output as 0: (batch, queries, features); packed tokens stay packed."""
        if self.hidden is not None:
            return output.masked_fill(self.hidden, 0)
        return output if self.packed or self.rows is None else self.rows.unpack(output)


NO_PADDING = Padding(None, None, queries=0, keys=0)  # the counts are read only if there is padding


@lru_cache(maxsize=8)
def _padding_of_lengths(
    lengths: tuple[int, ...],
    batch: int,
    length: int,
    device: torch.device,
    side: Side,
    together: bool,  # noqa: FBT001
) -> Padding:
    """Return the padding of a self-attention; it is cached, because all layers of a model have the same."""
    with torch.inference_mode(mode=False):  # tensors made in inference mode could not be saved for a backward pass
        rows = Packing.of(lengths, batch=batch, length=length, device=device, side=side)
    return _add_aligned_places(Padding(rows, rows, length, length, Documents(lengths) if together else None))


def _packing_of_lengths(name: str, lengths: Sequence[int] | Tensor, x: Tensor, side: Side) -> Packing:
    return Packing.of(lengths, batch=x.shape[0], length=x.shape[1], device=x.device, name=name, side=side)


def _add_aligned_places(padding: Padding) -> Padding:
    """Set placed_rows and placed_columns, the token indices in a right-padded batch, unless tokens stay packed."""
    if padding.documents is not None:
        return padding
    rows = None if padding.rows is None else padding.rows.align_right()
    if padding.columns is padding.rows:
        columns = rows
    else:
        columns = None if padding.columns is None else padding.columns.align_right()
    return padding._replace(placed_rows=rows, placed_columns=columns)


def _token_count_error(name: str, x: Tensor, projected: Tensor) -> ShapeError:
    return ShapeError(
        f"{name} was given {x.shape[1]} tokens and returns {projected.shape[1]}, and the padding is known for "
        f"{x.shape[1]}.",
        "Give every process all tokens where lengths or packing are given, or hide the padding with "
        "mask=masks.Lengths(...).",
    )
