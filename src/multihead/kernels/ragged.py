"""Kernel that calls FlashAttention on sequences of different lengths: lengths, documents, packed rows and windows.

`aten._flash_attention_forward` takes q, k and v as tokens (tokens, heads, head_dim) and the edges of the sequences,
on the device. So a padded batch or a row of documents is one launch, nothing is gathered, and no value is read: a key
outside of a sequence is not read either, whatever it holds. The table of the sequences is made once per mask, sizes and
values of the mask's tensors.

- Causal masks and windows are aligned at the end of each sequence, so the last query must be at the last key.
- Every token is in a sequence, because the operator writes no other: padding is a sequence without queries or without
  keys, whose outputs and gradients are 0.
- Queries after the end of their text, of right padding with a causal mask, see all keys of the text. They are a second
  call, and a third launch selects.
- The logsumexp of a query without keys, or that is or sees a NaN, is inf; it becomes -inf and NaN.

A NaN inside of a sequence that only the band of the mask hides may reach queries near it, as in a causal call.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from multihead.errors import MaskError
from multihead.kernels import fused_on_cuda
from multihead.kernels.call import AttentionRequest, AttentionResult, WorkEstimate
from multihead.kernels.fused import has_supported_layout
from multihead.kernels.plan.bounds import bounds_of
from multihead.kernels.proven import GpuPath
from multihead.kernels.reference import differentiable_gradients
from multihead.masks.base import KeyBounds, Mask, Sequences
from multihead.masks.counts import counts_as_tensor
from multihead.masks.positions import CallSize
from multihead.tensors.shapes import AttentionShape
from multihead.tensors.tracing import is_captured

HANDLES_NONFINITE = True  # a key outside of a sequence is not read
GPU_PATH = GpuPath("ragged", ("kernels/ragged.py",))

# The operators are private: with other arguments than these they are not called.
SCHEMAS = {
    "_flash_attention_forward": (
        "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask scale window_size_left "
        "window_size_right seqused_k alibi_slopes"
    ),
    "_flash_attention_backward": (
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused "
        "scale window_size_left window_size_right"
    ),
}

_forward = torch.ops.aten._flash_attention_forward  # noqa: SLF001 - PyTorch has no public name with all arguments
_backward = torch.ops.aten._flash_attention_backward  # noqa: SLF001


@dataclass(frozen=True, eq=False)
class Edges:
    """The sequences of one call of the operator.

    Attributes:
        queries: (sequences + 1,) int32, the first query token of each sequence, and one past the last.
        keys: (sequences + 1,) int32, the same of keys.
        causal: whether the last query sees the last key last, and each query before it one key less.
    """

    queries: Tensor
    keys: Tensor
    causal: bool


@dataclass(frozen=True, eq=False)
class Table:
    """The sequences of a mask and sizes.

    Attributes:
        first: the sequences of the call.
        second: those of a second call, or None.
        in_second: (batch, queries, 1, 1) bool, the queries of the second call, or None.
        empty: (batch or 1, 1, queries) bool, the queries that see no key; None if all see one.
        window: how many keys before and after its own a query sees; None: all.
        longest: the largest number of queries and of keys in a sequence, at least.
    """

    first: Edges
    second: Edges | None
    in_second: Tensor | None
    empty: Tensor | None
    window: tuple[int | None, int | None]
    longest: tuple[int, int]


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Return why this kernel refuses a request, in one sentence, or None where it accepts it."""
    shape = request.shape
    if shape.device.type != "cuda":
        return f"it needs CUDA, and the tensors are on {shape.device}"
    if request.surroundings.traced:
        return "it is called without graphs and transforms of torch.func"
    if request.bias is not None or request.softcap is not None or request.sinks is not None or not request.scale > 0:
        return "FlashAttention has no bias, softcap and sinks, and needs a scale above 0"
    if request.dropout_slice is not None or isinstance(request.query_start, Tensor):
        return "it repeats no dropout, and needs one position of the first query for all samples"
    reason = reason_against_tensors(request.q, request.k, request.v)
    if reason is not None:
        return reason
    band = request.mask.band
    if band is not None and band.interval_of_queries(request.query_start, shape.query_length, shape.key_length):
        return "the call is full or causal, and PyTorch has a kernel for it without a table of sequences"
    sizes = (shape.batch, shape.query_length, shape.key_length, request.query_start)
    if table_of(request.mask, *sizes, shape.device) is None:
        return "the mask is not made of sequences, or a band in them that ends with the last key"
    return None


def reason_against_tensors(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the operator does not compute tensors (batch, heads, length, head_dim), in one sentence, or None."""
    if _OTHER_SCHEMA is not None:
        return _OTHER_SCHEMA
    if fused_on_cuda.activated_flash_attention() is not None:
        return "another FlashAttention than PyTorch's own is activated, and the sequences were read in PyTorch's source"
    dim = q.shape[3]
    if q.dtype not in (torch.float16, torch.bfloat16) or v.shape[3] != dim or dim % 8 or dim > 256:
        return "FlashAttention needs half precision and heads of equal widths, a multiple of 8 and at most 256"
    if 0 in q.shape or 0 in k.shape:
        return "it needs at least one sample, query and key"
    # Only the card, the dtype and what the user allows are asked: these tensors have the layout of no call.
    few, one = q[:1, :, :1], k[:1, :, :1]
    call = fused_on_cuda.choose(few, one, one, causal=False, dropout=0.0, scale=1.0)
    if call is None or call.kernel != fused_on_cuda.FLASH:
        return "PyTorch would not choose FlashAttention, which is switched off or not made for this GPU"
    return None


def reads_int8(request: AttentionRequest) -> bool:
    """Return False: int8 keys and values are dequantised before this kernel runs."""
    return False


def attend(request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
    """Compute a request by one call of the operator, or two."""
    shape, start = request.shape, request.query_start
    assert isinstance(start, int)  # others are refused
    table = table_of(request.mask, shape.batch, shape.query_length, shape.key_length, start, shape.device)
    assert table is not None
    given = (request.q, request.k, request.v, table, request.mask, start, request.scale, request.dropout)
    output, logsumexp = compute(*given, logsumexp=True, as_written=True)
    return AttentionResult(output, logsumexp, finish=partial(_finish, table=table))


def estimate_work(request: AttentionRequest, bounds: KeyBounds) -> WorkEstimate:
    """Estimate the scores in the intervals, and the bytes of output, logsumexp and copies of k and v."""
    shape = request.shape
    samples = shape.batch if bounds.is_shared_by_samples else 1
    cells = int((bounds.stop - bounds.start).sum()) * samples * shape.num_heads
    numbers = (
        shape.num_rows * shape.value_dim + 2 * shape.batch * shape.num_kv_heads * shape.key_length * shape.head_dim
    )
    return WorkEstimate(cells, numbers * shape.dtype.itemsize + 4 * shape.num_rows)


# ---- the table of the sequences


class _Sizes(NamedTuple):
    """The sizes of a call for which a table is made, and its device."""

    batch: int
    queries: int
    keys: int
    start: int
    device: torch.device


# id of a mask -> the mask, the sizes and versions of its tensors for which its table was made, these tensors, the table
_Known = tuple[ref[Mask], tuple[object, ...], tuple[Tensor, ...], "Table | None"]
_TABLES: dict[int, _Known] = {}
_TABLES_OF_EQUAL_MASKS: dict[object, Table | None] = {}
MOST_TABLES = 64


def table_of(mask: Mask, batch: int, queries: int, keys: int, start: int, device: torch.device) -> Table | None:
    """Return the table of a mask and sizes, made once while the tensors of the mask do not change; None if it has none.

    Args:
        mask: which keys each query may see.
        batch: number of samples.
        queries: number of queries per sample.
        keys: number of keys per sample.
        start: position of the first query among the keys.
        device: device of the table.
    """
    sizes = _Sizes(batch, queries, keys, start, device)
    known = _TABLES.get(id(mask))
    if known is not None and known[0]() is mask and known[1][:5] == sizes:
        for tensor, version in zip(known[2], known[1][5:], strict=True):
            if tensor._version != version:  # noqa: SLF001 - the counter of changes in place
                break
        else:
            return known[3]
    return _new_table(mask, sizes)


def _new_table(mask: Mask, sizes: _Sizes) -> Table | None:
    """Make the table of a mask, or find that of an equal one, and keep it."""
    sequences = mask.sequences
    if sequences is None:
        return None
    try:
        mask.check_fits(CallSize(sizes.batch, 1, sizes.queries, sizes.keys, more_keys_later=False))
    except MaskError:
        return None
    tensors = tuple(mask.tensors())
    if is_captured(sizes.device) or any(each.is_inference() for each in tensors):
        return _make_table(sequences, sizes)
    versions = tuple(each._version for each in tensors)  # noqa: SLF001 - the counter of changes in place
    key = (mask.cache_key() or mask, versions, sizes)  # masks are equal if they hold the same tensors
    if key not in _TABLES_OF_EQUAL_MASKS:
        _keep(_TABLES_OF_EQUAL_MASKS, key, _make_table(sequences, sizes))
    table = _TABLES_OF_EQUAL_MASKS[key]
    _keep(_TABLES, id(mask), (ref(mask), (*sizes, *versions), tensors, table))
    return table


def _keep(tables: dict[Any, Any], key: object, value: object) -> None:
    """Store a value, and remove the oldest ones."""
    tables.pop(key, None)
    tables[key] = value
    while len(tables) > MOST_TABLES:
        del tables[next(iter(tables))]


def _make_table(sequences: Sequences, sizes: _Sizes) -> Table | None:
    """Make the table of a mask; None if the operator cannot compute it."""
    lengths, skipped, documents, before, after = sequences
    _, queries, keys, start, _ = sizes
    if (before >= 0 or after >= 0) and start + queries != keys:
        return None  # a band is aligned at the end
    if lengths is not None:
        return _table_of_lengths(sequences, sizes)
    if skipped is not None:
        return _table_of_skipped(sequences, sizes)
    if documents is not None:
        return _table_of_documents(sequences, sizes) if start == 0 and queries == keys else None
    return _table(sequences, sizes, [queries], [keys])


def _table(
    sequences: Sequences,
    sizes: _Sizes,
    of_queries: list[Tensor | int],
    of_keys: list[Tensor | int],
    *,
    empty: Tensor | None = None,
    second: tuple[list[Tensor | int], list[Tensor | int], Tensor] | None = None,
) -> Table:
    """Return a table from the tokens of each sequence, (batch,) or an int for all samples, in the order of the tokens.

    `second` holds the same of the second call, and which queries, (batch, queries) bool, are its.
    """
    before, after = sequences.keys_before, sequences.keys_after
    more = None if second is None else Edges(_edges(second[0], sizes), _edges(second[1], sizes), causal=False)
    return Table(
        first=Edges(_edges(of_queries, sizes), _edges(of_keys, sizes), causal=after == 0),
        second=more,
        in_second=None if second is None else second[2][..., None, None],
        empty=empty,
        window=(before if before >= 0 else None, after if after > 0 else None),
        longest=(sizes.queries, sizes.keys),
    )


def _table_of_lengths(sequences: Sequences, sizes: _Sizes) -> Table | None:
    """Make the table of a mask that shows the first keys of each sample; the others are a sequence without queries."""
    batch, queries, keys, start, device = sizes
    count = counts_as_tensor(sequences.lengths, device).clamp(0, keys).expand(batch)
    rest = keys - count
    empty = None
    if not (isinstance(sequences.lengths, tuple) and min(sequences.lengths) > 0):
        empty = (count == 0)[:, None, None].expand(-1, 1, queries)
    if sequences.keys_before < 0 and sequences.keys_after < 0:
        return _table(sequences, sizes, [queries, 0], [count, rest], empty=empty)
    if sequences.keys_before >= 0:
        return None  # each query after the end of its text sees another window
    real = (count - start).clamp(0, queries)
    padding = queries - real
    in_padding = torch.arange(queries, device=device) >= real[:, None]
    of_queries: list[Tensor | int] = [real, padding, 0]
    second: tuple[list[Tensor | int], list[Tensor | int], Tensor] = (of_queries, [0, count, rest], in_padding)
    return _table(sequences, sizes, of_queries, [count, 0, rest], empty=empty, second=second)


def _table_of_skipped(sequences: Sequences, sizes: _Sizes) -> Table | None:
    """Make the table of a mask that hides the first keys of each sample, as padding on the left."""
    batch, queries, keys, start, device = sizes
    count = counts_as_tensor(sequences.skipped, device).clamp(0, keys).expand(batch)
    rest = keys - count
    if sequences.keys_before < 0 and sequences.keys_after < 0:
        empty = (rest == 0)[:, None, None].expand(-1, 1, queries)
        return _table(sequences, sizes, [0, queries], [count, rest], empty=empty)
    if sequences.keys_after != 0:
        return None  # queries before the beginning of their text see some of its keys
    padding = (count - start).clamp(0, queries)
    empty = (torch.arange(queries, device=device) < padding[:, None])[:, None]
    return _table(sequences, sizes, [padding, 0, queries - padding], [0, count, rest], empty=empty)


def _table_of_documents(sequences: Sequences, sizes: _Sizes) -> Table:
    """Make the table of a mask of documents; the tokens after the last are a sequence without keys, and one without."""
    batch, queries, keys, _, device = sizes
    ends = counts_as_tensor(sequences.documents, device).cumsum(-1).clamp(max=keys)
    ends = (ends[None] if ends.dim() == 1 else ends).expand(batch, -1)
    before_each = torch.nn.functional.pad(ends, (1, 0))
    counts: list[Tensor | int] = list(before_each.diff(dim=-1).unbind(-1))
    tail = keys - before_each[:, -1]
    empty = (torch.arange(queries, device=device) >= before_each[:, -1:])[:, None]
    return _table(sequences, sizes, [*counts, tail, 0], [*counts, 0, tail], empty=empty)


def _edges(counts: list[Tensor | int], sizes: _Sizes) -> Tensor:
    """Return the edges of consecutive sequences, from the tokens of each, (batch,) or an int for all samples."""
    batch, _, _, _, device = sizes
    columns = [
        each if isinstance(each, Tensor) else torch.full((batch,), each, dtype=torch.int64, device=device)
        for each in counts
    ]
    ends = torch.stack(columns, 1).flatten().cumsum(0)
    return torch.nn.functional.pad(ends, (1, 0)).to(torch.int32)


# ---- the calls


def attend_unplanned(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, start: int, scale: float, dropout: float, *, logsumexp: bool
) -> tuple[Tensor, ...] | None:
    """Return what `compute` returns, for tensors of equal dtypes and fitting sizes; None if the kernel refuses them."""
    table = table_of(mask, q.shape[0], q.shape[2], k.shape[2], start, q.device)
    if table is None or reason_against_tensors(q, k, v) is not None:
        return None
    return compute(q, k, v, table, mask, start, scale, dropout, logsumexp=logsumexp)


def compute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Table,
    mask: Mask,
    start: int,
    scale: float,
    dropout: float,
    *,
    logsumexp: bool,
    as_written: bool = False,
) -> tuple[Tensor, ...]:
    """Compute a call by its table.

    Returns:
        the output (batch, heads, queries, head_dim); and if `logsumexp` is True, the logsumexp (batch, heads, queries);
        if `as_written`, as the operator writes it.
    """
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        found = _DifferentiableCall.apply(q, k, v, table, mask, start, scale, dropout)  # type: ignore[no-untyped-call]
    else:
        found = _join(q, table, _call_all(q, k, v, table, scale, dropout), logsumexp=logsumexp)
    if not logsumexp:
        return found[:1]  # type: ignore[no-any-return]
    return found[0], found[1] if as_written else _finish(found[1], table)


def _finish(of_rows: Tensor, table: Table) -> Tensor:
    """Return a logsumexp with NaN and -inf for the inf of rows with a NaN, and of rows without keys."""
    of_rows = fused_on_cuda.with_nan_for_inf(of_rows)
    return of_rows if table.empty is None else of_rows.masked_fill(table.empty, -torch.inf)


def _tokens(tensor: Tensor) -> Tensor:
    """Return (batch, heads, length, head_dim) as (batch * length, heads, head_dim), copied if strides require it."""
    rows = tensor.transpose(1, 2).reshape(-1, tensor.shape[1], tensor.shape[3])
    return rows if has_supported_layout(rows[None]) else rows.contiguous()


def _call(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> list[Tensor]:
    """Call the operator with tokens: output (tokens, heads, head_dim), logsumexp (heads, tokens), two of dropout."""
    edges, table, scale, dropout = call
    left, right = table.window if edges is table.first else (None, None)
    results = _forward(
        query=q, key=k, value=v, cum_seq_q=edges.queries, cum_seq_k=edges.keys, max_q=table.longest[0],
        max_k=table.longest[1], dropout_p=dropout, is_causal=edges.causal, return_debug_mask=False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return list(results[:4])


def _call_all(q: Tensor, k: Tensor, v: Tensor, table: Table, scale: float, dropout: float) -> list[list[Tensor]]:
    """Call the operator for each edges of a table, and return the results of `_call`."""
    q, k, v = _tokens(q), _tokens(k), _tokens(v)
    found = [_call(q, k, v, _Call(table.first, table, scale, dropout))]
    if table.second is not None:
        found.append(_call(q, k, v, _Call(table.second, table, scale, dropout)))
    return found


def _join(q: Tensor, table: Table, results: list[list[Tensor]], *, logsumexp: bool = True) -> tuple[Tensor, Tensor]:
    """Return output (batch, heads, queries, dim) and logsumexp (batch, heads, queries) of the calls for q.

    If `logsumexp` is False, the second result is that of the first call alone.
    """
    batch, heads, queries, _ = q.shape
    output = results[0][0].view(batch, queries, heads, -1)
    of_rows = results[0][1].view(heads, batch, queries)
    if table.in_second is not None:
        output = torch.where(table.in_second, results[1][0].view(output.shape), output)
        if logsumexp:
            of_rows = torch.where(table.in_second[..., 0, 0], results[1][1].view(of_rows.shape), of_rows)
    return output.transpose(1, 2), of_rows.transpose(0, 1)


class _DifferentiableCall(torch.autograd.Function):
    """Autograd function of a ragged call; output and logsumexp are differentiable, the second time by `reference`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, table: Table, mask: Mask, start: int, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor]:
        results = _call_all(q, k, v, table, scale, dropout)
        ctx.save_for_backward(q, k, v, *(each for result in results for each in result), *mask.tensors())
        ctx.given = table, mask, start, scale, dropout
        ctx.set_materialize_grads(False)
        return _join(q, table, results)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, *saved = ctx.saved_tensors  # autograd raises if an input or a tensor of the mask was modified
        table, mask, start, scale, dropout = ctx.given
        nothing = (None,) * 5
        if torch.is_grad_enabled():
            # The code below is not differentiable: a gradient penalty would silently be a constant.
            shape = AttentionShape.from_tensors(q, k, v)
            request = AttentionRequest(q, k, v, shape, mask, scale, start, dropout=dropout)
            bounds = bounds_of(request)
            return *differentiable_gradients("ragged", request, bounds, grad_output, grad_logsumexp)[:3], *nothing
        rows, sums = (_tokens(q), _tokens(k), _tokens(v)), None
        calls = [edges for edges in (table.first, table.second) if edges is not None]
        for number, edges in enumerate(calls):
            result = saved[4 * number : 4 * number + 4]
            call = _Call(edges, table, scale, dropout)
            parts = []
            if grad_output is not None:
                parts.append(_gradients(_tokens(grad_output), rows, result, call))
            if grad_logsumexp is not None:
                of_rows = grad_logsumexp.transpose(1, 2).reshape(-1, q.shape[1], 1) * scale  # (tokens, heads, 1)
                parts.append(_gradients_of_logsumexp(of_rows, rows, call))
            for part in parts:
                sums = part if sums is None else tuple(map(torch.add, sums, part))
        assert sums is not None
        found = (each.view(q.shape[0], -1, *each.shape[1:]).transpose(1, 2) for each in sums)
        return *(each.to(q.dtype) for each in found), *nothing


class _Call(NamedTuple):
    """One call of the operator in a backward pass."""

    edges: Edges
    table: Table
    scale: float
    dropout: float


def _gradients(
    grad: Tensor, rows: tuple[Tensor, Tensor, Tensor], result: list[Tensor], call: _Call
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v, (tokens, heads, head_dim) each, from that of the output."""
    edges, table, scale, dropout = call
    left, right = table.window if edges is table.first else (None, None)
    output, logsumexp, rng_state, unused = result
    return tuple(  # the operator returns these three
        _backward(
            grad_out=grad, query=rows[0], key=rows[1], value=rows[2], out=output, logsumexp=logsumexp,
            cum_seq_q=edges.queries, cum_seq_k=edges.keys, max_q=table.longest[0], max_k=table.longest[1],
            dropout_p=dropout, is_causal=edges.causal, rng_state=rng_state, unused=unused, scale=scale,
            window_size_left=left, window_size_right=right,
        )[:3]
    )  # fmt: skip


def _gradients_of_logsumexp(of_rows: Tensor, rows: tuple[Tensor, Tensor, Tensor], call: _Call) -> tuple[Tensor, ...]:
    """Return the gradients of q, k and v from scale times that of the logsumexp, (tokens, heads, 1).

    dL_i / ds_ij = p_ij, so dq = g_i (P K)_i and dk = P^T (g q): P K is a call with v = k, and P^T (g q) is the gradient
    of its v. Dropout comes after the logsumexp.
    """
    q, k, v = rows
    kept = call._replace(dropout=0.0)
    weighted = _call(q, k, k, kept)
    of_keys = _gradients((of_rows * q).to(q.dtype), (q, k, k), weighted, kept)[2]
    return (of_rows * weighted[0]).to(q.dtype), of_keys, torch.zeros_like(v)


def _reason_of_other_schema() -> str | None:
    """Return which operator has other arguments than those of `SCHEMAS`, in one sentence, or None."""
    for name, arguments in SCHEMAS.items():
        operator = getattr(torch.ops.aten, name, None)
        known = [] if operator is None else [each.name for each in operator.default._schema.arguments]  # noqa: SLF001
        if known[: len(arguments.split())] != arguments.split():
            return f"torch {torch.__version__} has another aten.{name} than the one that this kernel calls"
    return None


_OTHER_SCHEMA = _reason_of_other_schema()
