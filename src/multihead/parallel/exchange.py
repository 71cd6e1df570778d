"""Communication between ranks, with gradients: gather a sequence, exchange heads for tokens, send ranges of keys.

Every function reports a rank that stopped, or that does something else, as a RankError within the group's timeout.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from multihead.errors import ArgumentError, RankError
from multihead.masks import Mask
from multihead.parallel.layout import Layout, Range
from multihead.scores.bias import RelativeBias

V = TypeVar("V")
_Change = Callable[[Tensor, "Ranks", Layout], Tensor]


class Ranks(NamedTuple):
    """The ranks that share a sequence.

    Attributes:
        group: their process group.
        size: how many they are.
        rank: index of this one among them.
    """

    group: Any
    size: int
    rank: int

    @staticmethod
    def of(mesh: Any) -> Ranks:
        """Read them from a DeviceMesh of one dimension, or from a process group."""
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
    def device(self) -> str:
        """The kind of device whose numbers they exchange: the CPU where they can, so that no device is waited for."""
        backends = dist.get_backend_config(self.group)  # such as "cpu:gloo,cuda:nccl"
        return "cpu" if "cpu:" in backends else backends.partition(":")[0]

    def peer(self, rank: int) -> int:
        """Return the global number of a rank of the group."""
        return dist.get_global_rank(self.group, rank)


@contextmanager
def errors_of_ranks(doing: str) -> Iterator[None]:
    """Raise what a process group raises as a RankError: "Rank 0 of 4 was {doing}"."""
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


def compare(ranks: Ranks, call: Mapping[str, object], number: int = 0) -> int:
    """Check that all ranks make the same call, in one message of a fixed size, and return the int64 number of rank 0.

    It precedes all messages whose sizes depend on the call: with other sizes, gloo ends a process without an error.
    `call` is what must be equal on all ranks, by name, as `comparable_value` takes it.

    Raises:
        RankError: a value differs, on all ranks; or a rank is missing.
    """
    if ranks.size == 1:
        return number
    given = {name: comparable_value(value) for name, value in call.items()}
    digest = hashlib.blake2b(repr(given).encode(), digest_size=8).digest()
    own = torch.tensor([int.from_bytes(digest, "little", signed=True), number], device=ranks.device)
    found = own.new_empty(ranks.size, 2)
    with errors_of_ranks(f"Comparing the call of rank {ranks.rank} with those of the {ranks.size - 1} others"):
        dist.all_gather(list(found.unbind()), own, group=ranks.group)
    digests, numbers = found.T.tolist()
    if len(set(digests)) > 1:  # on every rank, so that all of them take part in what follows
        raise _first_difference(gather_objects(given, ranks, to=None) or [])
    return int(numbers[0])


def _first_difference(calls: list[dict[str, object]]) -> RankError:
    """Return the error that names the first difference between the calls of the ranks."""
    names = [name for each in calls for name in each]
    name = next(name for name in names if len({repr(each.get(name)) for each in calls}) > 1)
    listed = ", ".join(f"{each.get(name)} on rank {rank}" for rank, each in enumerate(calls))
    return RankError(f"{name} differs between ranks: {listed}.", "Give all ranks equal sizes and options.")


def comparable_value(value: object) -> object:
    """Return what stands for a value in a comparison of ranks: equal on two ranks where the values are equal.

    A tensor counts bit for bit, and a mask with its fields. Objects of other types, such as functions, may not be
    printed alike in two processes, and count by the names of their types.
    """
    if isinstance(value, Tensor):
        shown = value.detach()
        for dim, stride in enumerate(shown.stride()):
            if not stride and shown.shape[dim]:  # one row is all that an expanded tensor holds
                shown = shown.narrow(dim, 0, 1)
        content = shown.cpu().resolve_neg().contiguous()
        # Read by its address: once numpy has a view of a storage, torch does not resize it, as FSDP does.
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
    """Return the objects of all ranks on rank `to`, or on every rank for None; None elsewhere."""
    found: list[Any] = [None] * ranks.size
    with errors_of_ranks(f"Gathering records on rank {ranks.rank}"):
        if to is None:
            dist.all_gather_object(found, value, group=ranks.group)
        else:
            dist.gather_object(value, found if ranks.rank == to else None, ranks.peer(to), group=ranks.group)
    return found if to in (None, ranks.rank) else None


def gather(x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
    """Return the whole sequence from every rank's tokens; the gradient of a token is summed over the ranks."""
    return _Gather.apply(x, ranks, layout, dim)  # type: ignore[no-any-return, no-untyped-call]


def heads_for_tokens(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Exchange all heads of a rank's tokens, (batch, heads, tokens of this rank, dim), for all tokens of its heads.

    The heads are a multiple of the number of ranks. Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    return _Exchange.apply(x, ranks, layout, _to_tokens, _to_heads)  # type: ignore[no-any-return, no-untyped-call]


def tokens_for_heads(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Undo `heads_for_tokens`."""
    return _Exchange.apply(x, ranks, layout, _to_heads, _to_tokens)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
        ctx.call = ranks, layout, dim
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        with errors_of_ranks(f"Gathering the sequence on rank {ranks.rank}"):
            dist.all_gather(parts, x, group=ranks.group)
        return layout.join(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ranks, layout, dim = ctx.call
        parts = torch.stack([layout.take(gradient, rank, dim) for rank in range(ranks.size)])
        return _all_to_all(parts, ranks).sum(0), None, None, None


class _Exchange(torch.autograd.Function):
    """One of `_to_tokens` and `_to_heads`, whose gradient is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, exchange: _Change, undo: _Change) -> Tensor:
        ctx.call = undo, ranks, layout
        return exchange(x, ranks, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        undo, ranks, layout = ctx.call
        return undo(gradient, ranks, layout), None, None, None, None


def _to_tokens(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    return layout.join(list(_all_to_all(torch.stack(x.chunk(ranks.size, 1)), ranks)), 2)


def _to_heads(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    parts = torch.stack([layout.take(x, rank, 2) for rank in range(ranks.size)])
    return torch.cat(list(_all_to_all(parts, ranks)), 1)


def _all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """Send part i to rank i; part i of the result comes from rank i."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    with errors_of_ranks(f"Exchanging parts of the sequence on rank {ranks.rank}"):
        dist.all_to_all_single(received, parts.contiguous(), group=ranks.group)
    return received


class Transfer:
    """Tensors on their way to one rank and from another, while this rank computes.

    Attributes:
        received: what arrives, valid after `wait`: (batch, heads, tokens, dim) each; empty where nothing does.
    """

    def __init__(
        self,
        ranks: Ranks,
        sent: tuple[Tensor, ...],
        to: int,
        like: tuple[Tensor, ...],
        lengths: tuple[int, ...],
        from_: int,
    ) -> None:
        """Start the transfer.

        Args:
            ranks: the ranks.
            sent: the tensors for rank `to`, as `by_token` returns them.
            to: the rank that receives.
            like: tensors (batch, heads, tokens, dim), one for each that comes from rank `from_`, of any length.
            lengths: how many tokens come, as the ranges that `from_` sends; none = no message.
            from_: the rank that sends.
        """
        self._ranks, self._sent = ranks, sent  # kept until they have left
        tokens = sum(lengths)
        buffers = [x.new_empty(tokens, *x.shape[:2], x.shape[3]) for x in like] if tokens else []
        self.received = tuple(each.permute(1, 2, 0, 3) for each in buffers)
        operations = [dist.P2POp(dist.isend, each, ranks.peer(to), ranks.group) for each in sent]
        for buffer in buffers:
            parts = buffer.split(list(lengths))  # tokens come first in memory, so that each is contiguous
            operations += [dist.P2POp(dist.irecv, each, ranks.peer(from_), ranks.group) for each in parts]
        with errors_of_ranks(f"Starting a transfer on rank {ranks.rank}"):
            self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until everything has left and arrived; return what arrived."""
        with errors_of_ranks(f"A transfer of keys and values on rank {self._ranks.rank}"):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], ()
        return self.received


def by_token(tensors: tuple[Tensor, ...], ranges: tuple[Range, ...]) -> tuple[Tensor, ...]:
    """Return ranges of the tokens of tensors (batch, heads, tokens, dim): (tokens, batch, heads, dim), contiguous each.

    Projections of one sample have this order in memory, so that nothing is copied.
    """
    return tuple(x.permute(2, 0, 1, 3)[slice(*each)].contiguous() for x in tensors for each in ranges)


def of_ranges(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """Return ranges of the tokens of a tensor (batch, heads, tokens, dim): a view where one follows the other."""
    if all(stop == first for (_, stop), (first, _) in pairwise(ranges)):
        return x[:, :, ranges[0][0] : ranges[-1][1]]
    return torch.cat([x[:, :, slice(*each)] for each in ranges], 2)
