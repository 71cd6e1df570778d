"""Communication between ranks, with gradients: gather a sequence, exchange heads for tokens, send ranges of keys.

Every function raises a RankError within the timeout of the process group if another rank stops or makes another call.

Before any other message of a call, the ranks compare the call by a digest of 8 bytes. The digest and the seed of
dropout are one message of a fixed size, because gloo ends the process if the ranks send messages of different sizes.
The compared values themselves are sent only if the digests differ, for the error message. Tensors are compared bit for
bit. `check="first call"` compares only the first call, for dense biases and for groups without a CPU backend, where
comparing each call would make the host wait for the device.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from multihead.errors import ArgumentError, RankError
from multihead.masks import Mask
from multihead.parallel.layout import Layout, TokenRange
from multihead.scores.bias import RelativeBias

V = TypeVar("V")


class Ranks(NamedTuple):
    """The ranks over which a sequence or heads are split.

    Attributes:
        group: process group of the ranks.
        size: number of ranks in the group.
        rank: index of this rank in the group.
    """

    group: Any
    size: int
    rank: int

    @staticmethod
    def of_mesh(mesh: Any) -> Ranks:
        """Return the ranks of a DeviceMesh of one dimension, or of a process group."""
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "torch.distributed is not initialised, so there are no ranks.",
                'Start the script with torchrun, and call torch.distributed.init_process_group("gloo") first.',
            )
        dimensions = getattr(mesh, "ndim", None)
        if dimensions is not None:
            if dimensions != 1:
                raise ArgumentError(
                    f"The mesh has the dimensions {mesh.mesh_dim_names}, and a sequence is split over one.",
                    'Choose it by its name, for example mesh["cp"].',
                )
            mesh = mesh.get_group()
        if not isinstance(mesh, dist.ProcessGroup):
            raise ArgumentError(f"The ranks are {mesh!r}.", "Give a process group, or a DeviceMesh of one dimension.")
        return Ranks(mesh, dist.get_world_size(mesh), dist.get_rank(mesh))

    @property
    def device_type(self) -> str:
        """Device type for small messages: "cpu" if the backend supports it, to avoid waiting for an accelerator."""
        backends = dist.get_backend_config(self.group)  # such as "cpu:gloo,cuda:nccl"
        return "cpu" if "cpu:" in backends else backends.partition(":")[0]


@contextmanager
def raise_as_rank_error(doing: str) -> Iterator[None]:
    """Convert a RuntimeError of torch.distributed in this context to a RankError, "{doing} failed: ..."."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, RankError):
            raise
        reason = str(error).strip().splitlines()
        raise RankError(
            f"{doing} failed: another rank stopped, is not in the same call, or took longer than the group's timeout "
            f"({reason[0] if reason else type(error).__name__}).",
            "Read the first error of the other ranks: all of them must make the same calls, with the same sizes.",
        ) from error


def compare_calls(ranks: Ranks, call: Mapping[str, object], number: int = 0) -> int:
    """Check with one small message that all ranks make the same call, and return the `number` of rank 0.

    Use this before any message whose size depends on the call, because gloo kills a process on unequal sizes. `call`
    contains name -> value, for all values that must be equal on all ranks.

    Raises:
        RankError: on every rank, if a value differs between ranks, or a rank does not make a call.
    """
    if ranks.size == 1:
        return number
    given = {name: comparable_value(value) for name, value in call.items()}
    digest = hashlib.blake2b(repr(given).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True), number], device=ranks.device_type)
    found = own.new_empty(ranks.size, 2)
    with raise_as_rank_error(f"Comparing the call of rank {ranks.rank} with those of the {ranks.size - 1} others"):
        dist.all_gather(list(found.unbind()), own, group=ranks.group)
    digests, numbers = found.T.tolist()
    if len(set(digests)) > 1:  # all ranks have the same digests, so all of them gather the values
        raise _difference_error(gather_objects(given, ranks, to=None) or [])
    return int(numbers[0])


def _difference_error(calls: list[dict[str, object]]) -> RankError:
    """Return an error with the first value that differs between the calls of the ranks."""
    names = [name for each in calls for name in each]
    name = next(name for name in names if len({repr(each.get(name)) for each in calls}) > 1)
    listed = ", ".join(f"{each.get(name)} on rank {rank}" for rank, each in enumerate(calls))
    return RankError(f"{name} differs between ranks: {listed}.", "Give all ranks equal sizes and options.")


def comparable_value(value: object) -> object:
    """Convert a value to one that can be compared between processes by its repr.

    Tensors are compared bit for bit, masks by their fields. Of other objects, such as functions, only the type is
    compared, because their repr may differ between processes.
    """
    if isinstance(value, Tensor):
        shown = value.detach()
        for dim, stride in enumerate(shown.stride()):
            if not stride and shown.shape[dim]:  # an expanded dimension repeats one row
                shown = shown.narrow(dim, 0, 1)
        content = shown.cpu().resolve_neg().contiguous()
        # The tensor is read at its address, because a numpy view would keep FSDP from resizing the storage.
        checksum = zlib.crc32((c_char * content.nbytes).from_address(content.data_ptr()))
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)} with checksum {checksum:08x}"
    if isinstance(value, Mask):
        return [type(value).__name__, comparable_value(value.values())]
    if isinstance(value, RelativeBias):
        return f"RelativeBias of {comparable_value(value.values)}"
    if isinstance(value, Mapping):
        return {name: comparable_value(each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return [comparable_value(each) for each in value]
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return value
    return type(value).__name__


def gather_objects(value: V, ranks: Ranks, *, to: int | None) -> list[V] | None:
    """Return the objects of all ranks on rank `to`, or on every rank if `to` is None; None on other ranks."""
    found: list[Any] = [None] * ranks.size
    with raise_as_rank_error(f"Gathering records on rank {ranks.rank}"):
        if to is None:
            dist.all_gather_object(found, value, group=ranks.group)
        else:
            dist.gather_object(value, found if ranks.rank == to else None, group=ranks.group, group_dst=to)
    return found if to in (None, ranks.rank) else None


def gather_sequence(x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
    """All-gather dimension `dim` of the tokens of all ranks; the gradient of a token is summed over the ranks."""
    return _GatherSequence.apply(x, ranks, layout, dim)  # type: ignore[no-any-return, no-untyped-call]


def reshard_tokens_to_heads(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Convert (batch, heads, tokens of this rank, dim) to (batch, heads of this rank, tokens, dim) by an all-to-all.

    The number of heads must be a multiple of the number of ranks. Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    return layout.join_tokens_of_ranks(_all_to_all(torch.stack(x.chunk(ranks.size, 1)), ranks).unbind(), 2)


def reshard_heads_to_tokens(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Convert (batch, heads of this rank, tokens, dim) to (batch, heads, tokens of this rank, dim) by an all-to-all."""
    return torch.cat(_all_to_all(layout.stack_tokens_of_ranks(x, 2), ranks).unbind(), 1)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
        ctx.call = ranks, layout, dim
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        with raise_as_rank_error(f"Gathering the sequence on rank {ranks.rank}"):
            dist.all_gather(parts, x, group=ranks.group)
        return layout.join_tokens_of_ranks(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ranks, layout, dim = ctx.call
        return _all_to_all(layout.stack_tokens_of_ranks(gradient, dim), ranks).sum(0), None, None, None


def _all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """Send parts[i] to rank i, and return what rank i sent to this rank as result[i]."""
    return _AllToAll.apply(parts, ranks)  # type: ignore[no-any-return, no-untyped-call]


class _AllToAll(torch.autograd.Function):
    """An all-to-all, whose gradient is the same exchange of the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        with raise_as_rank_error(f"Exchanging parts of the sequence on rank {ranks.rank}"):
            dist.all_to_all_single(received, parts.contiguous(), group=ranks.group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(gradient, ctx.ranks), None


class Transfer:
    """An asynchronous transfer of tensors to one rank and from another rank, which overlaps with computing.

    Args:
        ranks: the ranks; this rank has the index r.
        sent: the tensors to send to rank r + distance, as `slice_token_major` returns them.
        like: tensors (batch, heads, any number of tokens, dim) with the sizes and dtypes of the received tensors.
        ranges: the ranges of tokens that are received from rank r - distance, one message per range and tensor.
        distance: number of ranks from the sender to the receiver of a message, counted in a circle.

    Attributes:
        ranges: the ranges of tokens that are received.
    """

    def __init__(
        self,
        ranks: Ranks,
        sent: tuple[Tensor, ...],
        like: tuple[Tensor, ...],
        ranges: tuple[TokenRange, ...],
        distance: int,
    ) -> None:
        self.ranges, self._ranks, self._sent = ranges, ranks, sent  # the sent tensors must live until they are sent
        lengths = [stop - first for first, stop in ranges]
        buffers = [x.new_empty(sum(lengths), *x.shape[:2], x.shape[3]) for x in like]
        self._received = tuple(each.permute(1, 2, 0, 3) for each in buffers)
        to, from_ = (ranks.rank + distance) % ranks.size, (ranks.rank - distance) % ranks.size
        operations = [dist.P2POp(dist.isend, each, group=ranks.group, group_peer=to) for each in sent]
        for buffer in buffers:
            parts = buffer.split(lengths)  # tokens are the first axis, so each range is contiguous
            operations += [dist.P2POp(dist.irecv, each, group=ranks.group, group_peer=from_) for each in parts]
        with raise_as_rank_error(f"Starting a transfer on rank {ranks.rank}"):
            self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the transfer, and return the received tensors, (batch, heads, tokens of all ranges, dim) each."""
        with raise_as_rank_error(f"A transfer of keys and values on rank {self._ranks.rank}"):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], ()
        return self._received


def slice_token_major(tensors: tuple[Tensor, ...], ranges: tuple[TokenRange, ...]) -> tuple[Tensor, ...]:
    """Slice ranges of tokens from (batch, heads, tokens, dim) tensors: one (tokens, batch, heads, dim) per range.

    The results are contiguous. A projection of one sample is not copied, because its memory already has this order.
    """
    return tuple(x.permute(2, 0, 1, 3)[slice(*each)].contiguous() for x in tensors for each in ranges)


def slice_ranges(x: Tensor, ranges: tuple[TokenRange, ...]) -> Tensor:
    """Slice ranges of tokens from (batch, heads, tokens, dim) and concatenate them; a view if they are adjacent."""
    if not ranges:
        return x[:, :, :0]
    if all(stop == first for (_, stop), (first, _) in pairwise(ranges)):
        return x[:, :, ranges[0][0] : ranges[-1][1]]
    return torch.cat([x[:, :, slice(*each)] for each in ranges], 2)
