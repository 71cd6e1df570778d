"""Read the sizes of an attention call from q, k and v, and check that they fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import SymInt, Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.tensors.tracing import can_read_values, hide_from_jit_trace

MAX_POSITION = 1 << 40  # largest length or position of a mask, tokens, so that sums cannot overflow int64

Q_AXES = "(batch, heads, queries, head_dim)"
K_AXES = "(batch, kv_heads, keys, head_dim)"
V_AXES = "(batch, kv_heads, keys, value_dim)"


class AttentionShape(NamedTuple):
    """The sizes of one attention call.

    >>> q, k, v = torch.zeros(2, 8, 5, 64), torch.zeros(2, 2, 7, 64), torch.zeros(2, 2, 7, 32)
    >>> shape = AttentionShape.from_tensors(q, k, v)
    >>> shape.num_heads, shape.num_kv_heads, shape.key_length, shape.value_dim
    (8, 2, 7, 32)
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def heads_per_kv_head(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_cells(self) -> int:
        """Batch * heads * queries * keys, the number of scores."""
        return self.num_rows * self.key_length

    @property
    def num_rows(self) -> int:
        """Batch * heads * queries, the number of rows of the attention map."""
        return self.batch * self.num_heads * self.query_length

    @staticmethod
    def from_tensors(q: Tensor, k: Tensor, v: Tensor) -> AttentionShape:
        """Read the sizes of q (batch, heads, queries, head_dim), k and v (batch, kv_heads, keys, dim).

        Raises:
            DtypeError: q, k and v are not floating point tensors, or have different dtypes or devices.
            ShapeError: the sizes do not fit each other.
        """
        if not (
            type(q) is type(k) is type(v) is Tensor
            and q.dtype is k.dtype is v.dtype
            and q.is_floating_point()
            and q.device == k.device == v.device
        ):
            _check_dtypes_and_devices(q, k, v)
        if not q.dim() == k.dim() == v.dim() == 4:
            for name, tensor, axes in (("q", q, Q_AXES), ("k", k, K_AXES), ("v", v, V_AXES)):
                if tensor.dim() != 4:
                    raise ShapeError(
                        f"{name} has shape {tuple(tensor.shape)}, and attention takes {axes}.",
                        "Split the heads first: mh.split_heads(x, num_heads).",
                    )
        (batch, heads, queries, head_dim), (k_batch, kv_heads, keys, k_dim) = q.shape, k.shape
        v_batch, v_heads, v_keys, value_dim = v.shape
        if isinstance(batch, Tensor):  # a size that torch.jit.trace records
            with hide_from_jit_trace():
                shape = AttentionShape.from_tensors(q, k, v)
            return shape._replace(batch=batch, query_length=queries, key_length=keys)
        if not batch == k_batch == v_batch:
            raise ShapeError(
                f"q, k and v have batches of {batch}, {k_batch} and {v_batch} samples.",
                "Give all three the same batch.",
            )
        if head_dim != k_dim:
            raise ShapeError(
                f"q has head_dim {head_dim} and k has head_dim {k_dim}.", "Project both to the same head_dim."
            )
        if 0 in (heads, head_dim, kv_heads, value_dim):
            raise ShapeError(
                f"q has shape {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}.",
                "Give at least one head, and at least one feature per head.",
            )
        if kv_heads != v_heads:
            raise ShapeError(f"k has {kv_heads} heads and v has {v_heads}.", "Give k and v the same number of heads.")
        if keys != v_keys:
            raise ShapeError(f"k has {keys} keys and v has {v_keys}.", "Give one value per key.")
        if heads % kv_heads:
            fitting = [n for n in range(1, heads + 1) if heads % n == 0]
            raise ShapeError(
                f"k has {kv_heads} heads and q has {heads}, and {heads} is not a multiple of {kv_heads}.",
                f"Give k and v {format_head_counts(fitting)} (grouped-query attention, arXiv:2305.13245).",
            )
        return AttentionShape(batch, heads, kv_heads, queries, keys, head_dim, value_dim, q.dtype, q.device)


def resolve_query_start(
    query_start: int | Tensor | str | None, q: Tensor, queries: int, keys: int, *, uses_positions: bool
) -> int | Tensor:
    """Resolve the position of the first query of q (batch, ...) to an int or a tensor (batch,).

    None is an error if the mask depends on positions (`uses_positions`) and queries and keys differ in number. A
    position out of range, or a tensor without values, is an error too.
    """
    if query_start is None:
        if uses_positions and queries != keys:
            raise ArgumentError(
                f"There are {queries} queries and {keys} keys, and the mask depends on positions.",
                "Give the position of the first query: query_start=0 (as torch's is_causal) or "
                'query_start="end" (decoding).',
            )
        return 0
    if isinstance(query_start, str):
        if query_start != "end":
            raise ArgumentError(
                f"query_start is {query_start!r}.", 'Give an int, a tensor with one int per sample, or "end".'
            )
        start = keys - queries
        return start.expand(q.shape[0]) if isinstance(start, Tensor) else start  # a tensor in torch.jit.trace
    if isinstance(query_start, Tensor):
        if query_start.is_floating_point() or query_start.dtype == torch.bool or query_start.shape != (q.shape[0],):
            raise ArgumentError(
                f"query_start is a {query_start.dtype} tensor of shape {tuple(query_start.shape)}.",
                f"Give one int per sample: shape ({q.shape[0]},).",
            )
        if query_start.is_meta and not q.is_meta:
            raise ArgumentError(
                f"query_start is on the meta device, where it has no values, and q is on {q.device}.",
                "Give one int per sample, on any other device.",
            )
        if type(query_start) is Tensor and can_read_values(query_start.device) and query_start.numel():
            check_query_start(int(query_start.max()))
        return query_start
    if not isinstance(query_start, (int, SymInt)) or isinstance(query_start, bool) or query_start < 0:
        raise ArgumentError(
            f"query_start is {query_start!r}.", 'Give an int of 0 or more, a tensor with one per sample, or "end".'
        )
    if isinstance(query_start, int):
        check_query_start(query_start)
    return query_start


def check_query_start(query_start: int) -> None:
    """Raise an ArgumentError for a query position beyond MAX_POSITION, for which intervals could overflow."""
    if query_start > MAX_POSITION:
        raise ArgumentError(f"query_start is {query_start}.", f"Give at most {MAX_POSITION}.")


def _check_dtypes_and_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise a DtypeError unless q, k and v are floating point tensors of one dtype on one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(f"{name} is a {type(tensor).__name__}, and must be a tensor.", "Give torch tensors.")
        if not tensor.is_floating_point():
            raise DtypeError(
                f"{name} has dtype {tensor.dtype}, and attention needs floating point.",
                f"Convert it, for example {name}.float().",
            )
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(
            f"q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}.",
            "Convert them to one dtype, for example k.to(q.dtype).",
        )
    if not q.device == k.device == v.device:
        raise DtypeError(
            f"q, k and v are on {q.device}, {k.device} and {v.device}.",
            "Move them to one device, for example k.to(q.device).",
        )


def numbers_per_sample(name: str, numbers: object, batch: int) -> Tensor:
    """Check the lengths of samples, and return them as int64 (batch,) on their device; ints are on the CPU."""
    if isinstance(numbers, Tensor):
        whole, device = not numbers.is_floating_point() and numbers.dtype != torch.bool, numbers.device
    else:
        if not isinstance(numbers, Iterable):
            raise ArgumentError(f"{name} is {numbers!r}.", f"Give one length per sample: {batch} integers.")
        numbers, device = tuple(numbers), torch.device("cpu")
        whole = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
    if not whole:
        raise ArgumentError(f"{name} is {numbers!r}.", "Give integers, one per sample.")
    found = torch.as_tensor(numbers, dtype=torch.int64, device=device)
    if tuple(found.shape) != (batch,):
        raise ShapeError(
            f"{name} has shape {tuple(found.shape)}, and the batch has {batch} samples.",
            f"Give one length per sample: shape ({batch},).",
        )
    return found


def index_axes(tensor: Tensor, indices: Mapping[int, slice | Tensor]) -> Tensor:
    """Index the axes of a tensor, axis -> index; an axis of size 1, which is broadcast, is kept.

    >>> index_axes(torch.zeros(1, 8, 1, 6), {2: slice(0, 3), 3: slice(0, 3)}).shape
    torch.Size([1, 8, 1, 3])
    """
    for axis, index in indices.items():
        if tensor.shape[axis] > 1:
            tensor = tensor[(slice(None),) * axis + (index,)]
    return tensor


def consecutive_slices(length: int, step: int) -> Iterator[slice]:
    """Yield slices of `step` consecutive indices, the last one may be shorter, that cover an axis of a given length.

    >>> list(consecutive_slices(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def describe_type(value: object) -> str:
    """Describe a value in an error message: a tensor by its dtype, another value by its type.

    >>> describe_type(torch.zeros(2)), describe_type([0.0])
    ('a torch.float32 tensor', 'a list')
    """
    return f"a {value.dtype} tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def format_head_counts(counts: Sequence[int]) -> str:
    """Format head counts for an error message.

    >>> format_head_counts((1, 2, 4))
    '1, 2 or 4 heads'
    """
    words = [str(count) for count in counts]
    return f"{words[0]} head" if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]} heads"
