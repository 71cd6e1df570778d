"""PyTorch's flex_attention, compiled for a CUDA device: the plan's intervals become its blocks. Not run on a GPU yet.

What is tested is its arithmetic, in flex_attention's plain form on the CPU, and its blocks, in the compiled form that
the CPU has, which gives no logsumexp and no gradient. The Triton kernels that it is for were read, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from multihead.call import Attended, AttentionRequest, Work
from multihead.kernels import reference
from multihead.kernels.dense_tile import dense, without_tensors, working_dtype
from multihead.kernels.double_backward import differentiable_gradients
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.masks.base import KeyBounds
from multihead.scores.bias import values_of
from multihead.scores.relative import RelativeBias
from multihead.scores.sinks import with_sinks
from multihead.tracing import constant_in_graphs, traced, transformed

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

HANDLES_NONFINITE = False
BLOCK = 128  # queries and keys a block, what flex_attention's own kernels are cut for
DIMS = (16, 256)  # Triton multiplies no matrices narrower than 16; beyond 256 they leave a GPU's shared memory

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Say in one sentence why this kernel will not take a request, or None."""
    shape = request.shape
    if shape.device.type != "cuda":
        return f"it pays on CUDA, and the tensors are on {shape.device}"
    missing = _missing(shape.device)
    if missing is not None:
        return missing
    if not torch.compiler.is_compiling() and traced() and not transformed():
        return "it compiles itself, which torch.jit.trace, make_fx and FakeTensorMode cannot record"
    if _transformed():
        return "flex_attention has no rules for the transforms of torch.func"
    if _exporting():
        return "an exported flex_attention would write queries x keys wherever it is not compiled"
    if shape.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes float32, float16 and bfloat16, and the tensors are {str(shape.dtype).split('.')[-1]}"
    if request.dropout:
        return "flex_attention has no dropout"
    if 0 in (shape.batch, shape.query_length, shape.key_length):
        return "flex_attention takes no call without samples, queries or keys"
    for name, dim in (("head_dim", shape.head_dim), ("value_dim", shape.value_dim)):
        if not DIMS[0] <= dim <= DIMS[1]:
            return f"flex_attention's kernels are for heads of {DIMS[0]} to {DIMS[1]} columns, and {name} is {dim}"
    if request.bias is not None and values_of(request.bias).requires_grad and torch.is_grad_enabled():
        return "flex_attention adds the gradients of a bias up one cell at a time"
    return None


def attend(request: AttentionRequest, bounds: KeyBounds) -> Attended:
    """Compute a request by flex_attention, compiled once for each kind of call.

    The output is laid out as q is: where q was split from a projection, merging heads needs no copy.
    """
    # The kernels read features one after the other.
    q, k, v = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (request.q, request.k, request.v)
    )
    given = replace(request, q=q, k=k, v=v)
    if torch.compiler.is_compiling():
        output, logsumexp = _computed(given, bounds, _flex)
    else:
        try:
            output, logsumexp = _guarded(given, bounds)
        except _failures_to_compile() as failure:
            warn_of_slow_path(
                f"PyTorch could not compile flex_attention for this call ({type(failure).__name__}): the reference "
                "kernel computes it, and holds queries x keys.",
                "Give calls of fewer kinds, or raise torch.compiler.config.recompile_limit, if the limit was hit.",
            )
            return reference.attend(request, bounds)
    if request.sinks is not None:
        output, logsumexp = with_sinks(output, logsumexp, request.sinks)
    return Attended(output, logsumexp)


def work(request: AttentionRequest, bounds: KeyBounds) -> Work:
    """Estimate what a call computes and holds: its blocks; output, logsumexp, lists of blocks and a dense remainder."""
    shape = request.shape
    blocks = blocks_of(bounds, keys=shape.key_length)
    rows = torch.full((blocks.first.shape[1],), BLOCK)
    rows[-1:] = shape.query_length - BLOCK * (len(rows) - 1)
    columns = (blocks.behind * BLOCK).clamp(max=shape.key_length) - blocks.first * BLOCK
    samples = shape.batch if bounds.shared else 1
    cells = int((columns.clamp(min=0).cpu() * rows).sum()) * samples * shape.num_heads
    tokens = shape.batch * shape.num_heads * shape.query_length
    size, wide = shape.dtype.itemsize, working_dtype(shape.dtype).itemsize
    lists = 2 * 4 * blocks.first.numel() * -(-shape.key_length // BLOCK)
    looked_up = 0 if bounds.remainder is None else shape.cells  # at most: it may be one for all heads or samples
    return Work(cells, tokens * (shape.value_dim * size + wide) + lists + looked_up)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which blocks of keys each block of queries computes: [first, behind), of them [full, behind_full) unmasked.

    Fields:
        first, full, behind_full, behind: (batch or 1, blocks of queries), int64, counted in blocks of keys.
    """

    first: Tensor
    full: Tensor
    behind_full: Tensor
    behind: Tensor


def blocks_of(bounds: KeyBounds, *, keys: int, block: int = BLOCK) -> Blocks:
    """Round the intervals of each block of queries out to blocks of keys, in O(queries) and without reading a value.

    A block is full where each of its queries sees each of its keys; one that reaches beyond the last query or key is
    not, and neither is one under a remainder. Where two queries of a block see intervals far from one another, what
    lies between is computed and masked.

    >>> from multihead import masks
    >>> from multihead.plan.bounds import key_bounds
    >>> blocks = blocks_of(key_bounds(masks.Causal(), queries=6, keys=6), keys=6, block=2)
    >>> blocks.behind_full.tolist(), blocks.behind.tolist()
    ([[0, 1, 2]], [[1, 2, 3]])
    """
    queries = bounds.start.shape[1]
    missing = -queries % block
    row = torch.arange(queries + missing, device=bounds.start.device).clamp(max=queries - 1)
    start, stop = (edge[:, row].unflatten(1, (-1, block)) for edge in (bounds.start, bounds.stop))
    empty = start >= stop
    first = start.masked_fill(empty, keys).amin(2) // block
    behind = -(-stop.masked_fill(empty, 0).amax(2) // block)
    first = torch.minimum(first, behind)
    full = -(-start.amax(2) // block)
    behind_full = torch.where(empty.any(2), 0, stop.amin(2)) // block
    whole = torch.arange(behind.shape[1], device=row.device) < queries // block
    some = (full < behind_full) & whole if bounds.remainder is None else torch.zeros_like(whole)
    return Blocks(first, torch.where(some, full, first), torch.where(some, behind_full, first), behind)


def block_mask(request: AttentionRequest, bounds: KeyBounds, *, backward: bool, block: int = BLOCK) -> BlockMask:
    """Write the plan down as flex_attention takes it: lists of blocks, and what masks a cell of those not full."""
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = request.shape.query_length, request.shape.key_length
    blocks = blocks_of(bounds, keys=keys, block=block)
    ahead = (blocks.full - blocks.first)[..., None]  # (batch or 1, blocks of queries, 1), partial ones before full ones
    count = -(-keys // block)
    each = torch.arange(count, device=bounds.start.device)
    # Entries behind the number of blocks are not computed, and have to be blocks that exist.
    partial = torch.where(each < ahead, blocks.first[..., None] + each, blocks.behind_full[..., None] + each - ahead)
    full = (blocks.full[..., None] + each).clamp(max=count - 1)
    # Where no block can be full, as in decoding, the kernel is told so, and divides the partial ones evenly.
    some = bounds.remainder is None and queries >= block and keys >= block
    return BlockMask.from_kv_blocks(
        _for_all_heads(blocks.behind - blocks.behind_full + ahead[..., 0]),
        _for_all_heads(partial.clamp(max=count - 1)),
        _for_all_heads(blocks.behind_full - blocks.full) if some else None,
        _for_all_heads(full) if some else None,
        BLOCK_SIZE=(block, block),
        mask_mod=mask_mod(request, bounds),
        seq_lengths=(queries, keys),
        compute_q_blocks=backward,  # the same lists by key, which only gradients read
    )


def _for_all_heads(numbers: Tensor) -> Tensor:
    return numbers[:, None].to(torch.int32).contiguous()


def mask_mod(request: AttentionRequest, bounds: KeyBounds) -> MaskMod:
    """Make what tells whether a cell of a partial block is seen: its key within [start, stop), and in the remainder."""
    start, stop = bounds.start.to(torch.int32), bounds.stop.to(torch.int32)
    remainder = None if bounds.remainder is None else dense(bounds.remainder, request)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        within = (j >= _at(start, b, i)) & (j < _at(stop, b, i))
        return within if remainder is None else within & _at(remainder, b, h, i, j)

    return seen


def score_mod(request: AttentionRequest) -> ScoreMod | None:
    """Make what is done to a score after the scale: the softcap, then the bias; None where there is neither."""
    if request.softcap is None and request.bias is None:
        return None
    softcap = None if request.softcap is None else _constant(request.softcap)
    values = None if request.bias is None else values_of(request.bias).detach()
    if values is not None and values.dtype == torch.float64:
        values = values.to(working_dtype(request.shape.dtype))
    diagonal = request.shape.query_length - 1 if isinstance(request.bias, RelativeBias) else None

    def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = float(softcap) * torch.tanh(score / float(softcap))
        if values is None:
            return score
        return score + (_at(values, b, h, i, j) if diagonal is None else _at(values, b, h, j - i + diagonal))

    return changed


def _at(tensor: Tensor, *index: Tensor) -> Tensor:
    """Look one number up; an axis of size 1 has the same for all."""
    return tensor[tuple(each if size > 1 else each * 0 for each, size in zip(index, tensor.shape, strict=True))]


def _constant(number: float) -> str:
    """Write a number so that a compiler takes it as it is: a second float would become an input of the kernel."""
    return repr(float(number))


def _flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    scale: str,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    """Call flex_attention for the output (batch, heads, queries, value_dim) and logsumexp (batch, heads, queries)."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    output, told = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=float(scale),
        enable_gqa=grouped,
        return_aux=AuxRequest(lse=True),
    )
    return output, cast(Tensor, told.lse)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    # As a full graph it refuses where it would otherwise fall back to writing queries x keys in silence.
    return torch.compile(_flex, fullgraph=True)


def _failures_to_compile() -> tuple[type[Exception], ...]:
    """What PyTorch raises where its compiler fails or has compiled too many kinds of calls."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _computed(
    request: AttentionRequest, bounds: KeyBounds, flex: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    tensors = request.q, request.k, request.v
    backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    return flex(
        *tensors,
        score_mod=score_mod(request),
        block_mask=block_mask(request, bounds, backward=backward),
        scale=_constant(request.scale),
        grouped=request.shape.group > 1,
    )


def _guarded(request: AttentionRequest, bounds: KeyBounds) -> tuple[Tensor, Tensor]:
    """Compute between two gates that lead a second derivative around flex_attention, whose gradient has none."""
    q, k, v = request.q, request.k, request.v
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return _computed(request, bounds, _compiled())
    entered: tuple[Tensor, Tensor, Tensor] = _Entry.apply(q, k, v)  # type: ignore[no-untyped-call]
    inside = replace(request, q=entered[0], k=entered[1], v=entered[2])
    output, logsumexp = _computed(inside, bounds, _compiled())
    left: tuple[Tensor, Tensor] = _Exit.apply(  # type: ignore[no-untyped-call]
        output, logsumexp, q, k, v, without_tensors(request), bounds
    )
    return left


class _Entry(torch.autograd.Function):
    """Hands q, k and v on, and lets a gradient back unless it shall have a derivative itself."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None for _ in gradients) if torch.is_grad_enabled() else gradients


class _Exit(torch.autograd.Function):
    """Hands output and logsumexp on; a gradient that shall have a derivative itself takes the reference kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        logsumexp: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        request: AttentionRequest,
        bounds: KeyBounds,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.request, ctx.bounds = replace(request, sinks=None), bounds  # sinks take their share outside
        ctx.set_materialize_grads(False)
        return output.detach(), logsumexp.detach()  # no views: those of a function may not be written in place

    @staticmethod
    def backward(ctx: Any, of_output: Tensor | None, of_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():
            return of_output, of_logsumexp, *(None,) * 5
        q, k, v = ctx.saved_tensors
        request = replace(ctx.request, q=q, k=k, v=v)
        gradients = differentiable_gradients("flex", request, ctx.bounds, of_output, of_logsumexp)[:3]
        nothing = (None if of is None else torch.zeros_like(of) for of in (of_output, of_logsumexp))
        return *nothing, *gradients, None, None


@constant_in_graphs
def _missing(device: torch.device) -> str | None:
    """Say what a device lacks of what flex_attention is compiled by, or None."""
    if _triton_is_missing():
        return "PyTorch compiles flex_attention by Triton, which is not installed"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a device of compute capability 7.0"
    return None


@cache
def _triton_is_missing() -> bool:
    return find_spec("triton") is None


@constant_in_graphs  # torch 2.11 takes the question itself for True in every graph
def _exporting() -> bool:
    return torch.compiler.is_exporting()


@constant_in_graphs  # a compiler that traces a transform has really entered it
def _transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - torch has no public word for it
