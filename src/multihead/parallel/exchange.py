"""Communication between ranks, with gradients: gather a sequence, exchange heads for tokens, send ranges of keys.

If another rank stops, or makes a different call, every function raises a RankError within the group's timeout.

The ranks compare every call before they send anything else of it, by a digest of 8 bytes and the seed of dropout in one
message of a fixed size: with messages of other sizes gloo ends the process. Readable values travel only after a
difference. Tensors count bit for bit; `check="first call"` is for dense biases and for groups without a CPU backend,
where the host waits for the device.
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
        """The device type of small messages: "cpu" if the backend supports it, so that no accelerator is waited for."""
        backends = dist.get_backend_config(self.group)  # such as "cpu:gloo,cuda:nccl"
        return "cpu" if "cpu:" in backends else backends.partition(":")[0]

    def global_rank(self, rank: int) -> int:
        """Return the global number of a rank of the group."""
        return dist.get_global_rank(self.group, rank)


@contextmanager
def raise_as_rank_error(doing: str) -> Iterator[None]:
    """Raise a RuntimeError of torch.distributed in this context as a RankError: "{doing} failed: ..."."""
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
    """Check that all ranks make the same call, in one message of a fixed size, and return the int64 number of rank 0.

    Call it before any message whose size depends on the call: with unequal sizes, gloo ends a process without an error.
    `call` has the values that must be equal on all ranks, by name; `comparable_value` converts them.

    Raises:
        RankError: on every rank, if a value differs between ranks or a rank takes no part.
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
    if len(set(digests)) > 1:  # true on all ranks or on none, so that all take part in gathering the values
        raise _error_of_difference(gather_objects(given, ranks, to=None) or [])
    return int(numbers[0])


def _error_of_difference(calls: list[dict[str, object]]) -> RankError:
    """Return the error that names the first difference between the calls of the ranks."""
    names = [name for each in calls for name in each]
    name = next(name for name in names if len({repr(each.get(name)) for each in calls}) > 1)
    listed = ", ".join(f"{each.get(name)} on rank {rank}" for rank, each in enumerate(calls))
    return RankError(f"{name} differs between ranks: {listed}.", "Give all ranks equal sizes and options.")


def comparable_value(value: object) -> object:
    """Convert a value for a comparison of ranks: results are equal on two ranks where the values are equal.

    Tensors are compared bit for bit, masks by their fields. Objects of other types, such as functions, may not be
    printed alike in two processes, so that only the names of their types are compared.
    """
    if isinstance(value, Tensor):
        shown = value.detach()
        for dim, stride in enumerate(shown.stride()):
            if not stride and shown.shape[dim]:  # of an expanded dimension one row is enough
                shown = shown.narrow(dim, 0, 1)
        content = shown.cpu().resolve_neg().contiguous()
        # Read by its address: a numpy view would keep torch from resizing the storage, as FSDP does.
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
            dist.gather_object(value, found if ranks.rank == to else None, ranks.global_rank(to), group=ranks.group)
    return found if to in (None, ranks.rank) else None


def gather_sequence(x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
    """Return the whole sequence from every rank's tokens; the gradient of a token is summed over the ranks."""
    return _Gather.apply(x, ranks, layout, dim)  # type: ignore[no-any-return, no-untyped-call]


def heads_for_tokens(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Exchange all heads of a rank's tokens, (batch, heads, tokens of this rank, dim), for all tokens of its heads.

    The heads are a multiple of the number of ranks. Source: DeepSpeed-Ulysses, arXiv:2309.14509.
    """
    return _HeadTokenExchange.apply(x, ranks, layout, _split_heads_gather_tokens, _split_tokens_gather_heads)  # type: ignore[no-any-return, no-untyped-call]


def tokens_for_heads(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    """Undo `heads_for_tokens`."""
    return _HeadTokenExchange.apply(x, ranks, layout, _split_tokens_gather_heads, _split_heads_gather_tokens)  # type: ignore[no-any-return, no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, dim: int) -> Tensor:
        ctx.call = ranks, layout, dim
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(ranks.size)]
        with raise_as_rank_error(f"Gathering the sequence on rank {ranks.rank}"):
            dist.all_gather(parts, x, group=ranks.group)
        return layout.join(parts, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ranks, layout, dim = ctx.call
        parts = torch.stack([layout.take(gradient, rank, dim) for rank in range(ranks.size)])
        return _all_to_all(parts, ranks).sum(0), None, None, None


class _HeadTokenExchange(torch.autograd.Function):
    """Apply `exchange`, whose gradient is `undo`: the two functions that exchange heads for tokens and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: Layout, exchange: _Change, undo: _Change) -> Tensor:
        ctx.call = undo, ranks, layout
        return exchange(x, ranks, layout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        undo, ranks, layout = ctx.call
        return undo(gradient, ranks, layout), None, None, None, None


def _split_heads_gather_tokens(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    return layout.join(list(_all_to_all(torch.stack(x.chunk(ranks.size, 1)), ranks)), 2)


def _split_tokens_gather_heads(x: Tensor, ranks: Ranks, layout: Layout) -> Tensor:
    parts = torch.stack([layout.take(x, rank, 2) for rank in range(ranks.size)])
    return torch.cat(list(_all_to_all(parts, ranks)), 1)


def _all_to_all(parts: Tensor, ranks: Ranks) -> Tensor:
    """Send part i to rank i; part i of the result comes from rank i."""
    received = torch.empty_like(parts, memory_format=torch.contiguous_format)
    with raise_as_rank_error(f"Exchanging parts of the sequence on rank {ranks.rank}"):
        dist.all_to_all_single(received, parts.contiguous(), group=ranks.group)
    return received


class Transfer:
    """Tensors on their way to one rank and from another, while this rank computes.

    Attributes:
        received: the tensors that arrive, (batch, heads, tokens, dim) each, valid after `wait`; empty if none arrives.
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
            sent: the tensors for rank `to`, as `slice_token_major` returns them.
            to: the rank that receives.
            like: tensors (batch, heads, tokens, dim), one for each that comes from rank `from_`, of any length.
            lengths: number of tokens of each range that `from_` sends; empty = no message.
            from_: the rank that sends.
        """
        self._ranks, self._sent = ranks, sent  # keeps the tensors alive until they are sent
        tokens = sum(lengths)
        buffers = [x.new_empty(tokens, *x.shape[:2], x.shape[3]) for x in like] if tokens else []
        self.received = tuple(each.permute(1, 2, 0, 3) for each in buffers)
        operations = [dist.P2POp(dist.isend, each, ranks.global_rank(to), ranks.group) for each in sent]
        for buffer in buffers:
            parts = buffer.split(list(lengths))  # the first axis is that of tokens, so that each part is contiguous
            operations += [dist.P2POp(dist.irecv, each, ranks.global_rank(from_), ranks.group) for each in parts]
        with raise_as_rank_error(f"Starting a transfer on rank {ranks.rank}"):
            self._works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> tuple[Tensor, ...]:
        """Wait until all tensors are sent and received, and return those received."""
        with raise_as_rank_error(f"A transfer of keys and values on rank {self._ranks.rank}"):
            for work in self._works:
                work.wait()
        self._works, self._sent = [], ()
        return self.received


def slice_token_major(tensors: tuple[Tensor, ...], ranges: tuple[Range, ...]) -> tuple[Tensor, ...]:
    """Return ranges of the tokens of tensors (batch, heads, tokens, dim): (tokens, batch, heads, dim), contiguous each.

    Nothing is copied for a projection of one sample, whose memory has this order already.
    """
    return tuple(x.permute(2, 0, 1, 3)[slice(*each)].contiguous() for x in tensors for each in ranges)


def slice_ranges(x: Tensor, ranges: tuple[Range, ...]) -> Tensor:
    """Return ranges of the tokens of a tensor (batch, heads, tokens, dim): a view if the ranges are adjacent."""
    if all(stop == first for (_, stop), (first, _) in pairwise(ranges)):
        return x[:, :, ranges[0][0] : ranges[-1][1]]
    return torch.cat([x[:, :, slice(*each)] for each in ranges], 2)
