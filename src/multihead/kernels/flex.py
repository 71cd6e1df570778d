"""Kernel that calls PyTorch's flex_attention, compiled for CUDA, on blocks of keys.

Without a GPU the tests cover its arithmetic, with the eager flex_attention on the CPU, and its blocks, with the
compiled one on the CPU, which computes no logsumexp and no gradient; tests/kernels/test_cuda.py runs it on a GPU.

The key intervals of each 128 queries are rounded out to blocks of 128 keys. Full blocks need no mask, partial ones
compare a key with the `[start, stop)` of its query and look up `bounds.remainder`, and hidden ones are skipped; the
lists of blocks are computed in closed form on the device, without waiting for a value, and kept for equal masks and
sizes, and for a mask that holds tensors until these change. Softcap, tensor biases and `RelativeBias` modify the
scores, scale and grouped heads are those of flex_attention, and sinks are a factor of the output. flex_attention is
compiled once per kind of call. What PyTorch cannot compile is computed by the reference kernel, with a warning. Second
derivatives are computed by the reference kernel too. This kernel refuses float64, dropout, the gradient of a bias,
heads of fewer than 16 or more than 256 columns, empty calls, transforms, export, `torch.jit.trace`, `make_fx` and
`FakeTensorMode`, and machines without Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from multihead.kernels import reference
from multihead.kernels.call import AttentionRequest, AttentionResult, WorkEstimate
from multihead.kernels.dense_tile import visible_in_mask, without_autocast, without_qkv, working_dtype
from multihead.kernels.nonfinite import hides_padding, make_rows_nan, replace_nonfinite
from multihead.kernels.plan.bounds import CACHE_BYTES, MOST_MASKS_WITH_TENSORS, PlanCache
from multihead.kernels.proven import GpuPath
from multihead.kernels.reference import differentiable_gradients
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.masks.base import KeyBounds
from multihead.scores.bias import RelativeBias
from multihead.scores.terms import add_sinks
from multihead.tensors.tracing import constant_in_graphs, is_captured, is_exporting, is_intercepted

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

HANDLES_NONFINITE = True  # inside the compiled call, which takes two launches more, or three with gradients
GPU_PATH = GpuPath("flex", ("kernels/flex.py",), in_use_before_rows=True)
BLOCK_SIZE = 128  # queries and keys per block, the block size of flex_attention's own kernels
MAX_COMPILED_CALL_KINDS = 1 << 16  # limit on the kinds of calls that are compiled; PyTorch's default limit is 8
HEAD_DIM_RANGE = (16, 256)  # Triton multiplies no narrower matrices; wider ones exceed the shared memory of a GPU

# Scores are clamped to this limit, because the kernel multiplies them by log2(e).
SCORE_CLAMP_LIMIT = torch.finfo(torch.float32).max / 1.5

# A score that is not finite has the value of a mark, which the kernel can multiply by log2(e) too; larger scores than
# the limit between both count as infinite.
LARGEST_UNMARKED_SCORE = torch.finfo(torch.float32).max / 1.475
MARK = torch.finfo(torch.float32).max / 1.45

Nonfinite: TypeAlias = Literal["as given", "spread", "marked"]
"""What a call does with NaN and inf, so that those of hidden keys stay out: nothing; makes NaN of whole rows and keys,
for a call without gradients; or replaces them by 0 and marks the scores, for one with gradients."""

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def refusal(request: AttentionRequest, bounds: KeyBounds) -> str | None:
    """Return why this kernel refuses a request, in one sentence, or None where it accepts it."""
    shape = request.shape
    if shape.device.type != "cuda":
        return f"it needs CUDA, and the tensors are on {shape.device}"
    missing = _missing_flex_requirement(shape.device)
    if missing is not None:
        return missing
    around = request.surroundings
    if not torch.compiler.is_compiling() and around.traced and not around.transformed:
        return "it calls torch.compile, which torch.jit.trace, make_fx and FakeTensorMode cannot record"
    if _is_transformed():
        return "flex_attention does not support the transforms of torch.func"
    if is_exporting():
        return "an exported flex_attention would hold queries x keys wherever it is not compiled"
    if shape.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it computes float32, float16 and bfloat16, and the tensors are {str(shape.dtype).split('.')[-1]}"
    if request.dropout:
        return "flex_attention has no dropout"
    if 0 in (shape.batch, shape.query_length, shape.key_length):
        return "flex_attention needs at least one sample, query and key"
    for name, dim in (("head_dim", shape.head_dim), ("value_dim", shape.value_dim)):
        least, most = HEAD_DIM_RANGE
        if not least <= dim <= most:
            return f"flex_attention's kernels support heads of {least} to {most} columns, and {name} is {dim}"
    if request.bias_values is not None and request.bias_values.requires_grad and torch.is_grad_enabled():
        return "flex_attention accumulates the gradient of a bias one cell at a time, which is slow"
    return None


def reads_int8(request: AttentionRequest) -> bool:
    """Return False: int8 keys and values are dequantised before this kernel runs."""
    return False


def attend(request: AttentionRequest, bounds: KeyBounds) -> AttentionResult:
    """Compute a request with flex_attention, compiled once for each kind of call.

    The output has the memory layout of q, or that of a q split from a projection, so merging heads needs no copy then.
    """
    with without_autocast(request.shape.device):
        if not hides_padding(request):
            return _attend(request, bounds)
        # Sinks are added after the compiled call, and a row that is NaN would make their gradient NaN.
        outside = torch.compiler.is_compiling() or (request.sinks is not None and request.needs_gradient)
        if request.shape.device.type == "cuda" and not outside:
            return _attend(request, bounds, nonfinite="marked" if request.qkv_need_gradient else "spread")
        cleaned, bad_rows = replace_nonfinite(request, bounds)
        attended = _attend(cleaned, bounds)
        return attended if bad_rows is None else make_rows_nan(attended, bad_rows)


def _attend(request: AttentionRequest, bounds: KeyBounds, *, nonfinite: Nonfinite = "as given") -> AttentionResult:
    # The kernels of flex_attention need tensors whose last stride is 1.
    q, k, v = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (request.q, request.k, request.v)
    )
    contiguous = replace(request, q=q, k=k, v=v)
    if torch.compiler.is_compiling():
        output, logsumexp = _compute_output_and_logsumexp(contiguous, bounds, _call_flex_attention)
    else:
        try:
            output, logsumexp = _compute_with_double_backward(contiguous, bounds, nonfinite=nonfinite)
        except _compiler_errors() as failure:
            warn_of_slow_path(
                f"PyTorch could not compile flex_attention for this call ({type(failure).__name__}): the reference "
                "kernel computes it, and holds queries x keys.",
                'Report it with the call; kernel="reference" computes it without this warning.',
            )
            cleaned, bad_rows = replace_nonfinite(request, bounds)
            attended = reference.attend(cleaned, bounds)
            return attended if bad_rows is None else make_rows_nan(attended, bad_rows)
    if request.sinks is not None:
        output, logsumexp = add_sinks(output, logsumexp, request.sinks)
    return AttentionResult(output, logsumexp)


def estimate_work(request: AttentionRequest, bounds: KeyBounds) -> WorkEstimate:
    """Estimate the scores computed, and the bytes of output, logsumexp, block lists and dense remainder."""
    shape = request.shape
    blocks = round_to_key_blocks(bounds, keys=shape.key_length)
    rows = torch.full((blocks.first_block.shape[1],), BLOCK_SIZE)
    rows[-1:] = shape.query_length - BLOCK_SIZE * (len(rows) - 1)
    columns = (blocks.end_of_blocks * BLOCK_SIZE).clamp(max=shape.key_length) - blocks.first_block * BLOCK_SIZE
    samples = shape.batch if bounds.is_shared_by_samples else 1
    cells = int((columns.clamp(min=0).cpu() * rows).sum()) * samples * shape.num_heads
    size, wide = shape.dtype.itemsize, working_dtype(shape.dtype).itemsize
    lists = 2 * 4 * blocks.first_block.numel() * -(-shape.key_length // BLOCK_SIZE)
    remainder = 0 if bounds.remainder is None else shape.num_cells  # at most: heads or samples may share a remainder
    return WorkEstimate(cells, shape.num_rows * (shape.value_dim * size + wide) + lists + remainder)


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """The blocks of keys that each block of queries sees; all fields are int64 (batch or 1, blocks of queries).

    Attributes:
        first_block: the first block of keys.
        first_full_block: the first block of keys that needs no mask.
        end_of_full_blocks: one past the last block of keys that needs no mask.
        end_of_blocks: one past the last block of keys.
    """

    first_block: Tensor
    first_full_block: Tensor
    end_of_full_blocks: Tensor
    end_of_blocks: Tensor


def round_to_key_blocks(bounds: KeyBounds, *, keys: int, block: int = BLOCK_SIZE) -> KeyBlocks:
    """Convert key intervals to blocks of keys per block of queries, in O(queries) and without synchronisation.

    A block is full if each of its queries sees each of its keys. Blocks that extend past the last query or key are
    never full, and no block is full if the bounds have a remainder. If the intervals of two queries in a block are far
    apart, the keys between them are computed and masked.

    >>> from multihead import masks
    >>> from multihead.kernels.plan.bounds import key_bounds
    >>> blocks = round_to_key_blocks(key_bounds(masks.Causal(), queries=6, keys=6), keys=6, block=2)
    >>> blocks.end_of_full_blocks.tolist(), blocks.end_of_blocks.tolist()
    ([[0, 1, 2]], [[1, 2, 3]])
    """
    queries = bounds.start.shape[1]
    missing = -queries % block
    row = torch.arange(queries + missing, device=bounds.start.device).clamp(max=queries - 1)
    start, stop = (edge[:, row].unflatten(1, (-1, block)) for edge in (bounds.start, bounds.stop))
    empty = start >= stop
    end = -(-stop.masked_fill(empty, 0).amax(2) // block)
    first = torch.minimum(start.masked_fill(empty, keys).amin(2) // block, end)
    first_full = -(-start.amax(2) // block)
    end_full = torch.where(empty.any(2), 0, stop.amin(2)) // block
    whole = torch.arange(end.shape[1], device=row.device) < queries // block
    some = (first_full < end_full) & whole if bounds.remainder is None else torch.zeros_like(whole)
    return KeyBlocks(first, torch.where(some, first_full, first), torch.where(some, end_full, first), end)


def block_mask(
    request: AttentionRequest,
    bounds: KeyBounds,
    *,
    backward: bool,
    block: int = BLOCK_SIZE,
    remainder: Tensor | None = None,
) -> BlockMask:
    """Convert key bounds to flex_attention's BlockMask: lists of blocks, and the mask function of partial blocks.

    `remainder` is what `visible_in_remainder` returns, computed if it is None.
    """
    from torch.nn.attention.flex_attention import BlockMask

    queries, keys = request.shape.query_length, request.shape.key_length
    blocks = round_to_key_blocks(bounds, keys=keys, block=block)
    # (batch or 1, blocks of queries, 1), the number of partial blocks before the full ones
    before = (blocks.first_full_block - blocks.first_block)[..., None]
    count = -(-keys // block)
    each = torch.arange(count, device=bounds.start.device)
    # List entries past the number of blocks are not computed, but must be valid block indices.
    first, after = blocks.first_block[..., None], blocks.end_of_full_blocks[..., None]
    partial = torch.where(each < before, first + each, after + each - before)
    full = (blocks.first_full_block[..., None] + each).clamp(max=count - 1)
    # Without a list of full blocks, as in decoding, the kernel distributes the partial ones evenly.
    some = bounds.remainder is None and queries >= block and keys >= block
    return BlockMask.from_kv_blocks(
        _add_head_axis(blocks.end_of_blocks - blocks.end_of_full_blocks + before[..., 0]),
        _add_head_axis(partial.clamp(max=count - 1)),
        _add_head_axis(blocks.end_of_full_blocks - blocks.first_full_block) if some else None,
        _add_head_axis(full) if some else None,
        BLOCK_SIZE=(block, block),
        mask_mod=mask_mod(bounds, visible_in_remainder(request, bounds) if remainder is None else remainder),
        seq_lengths=(queries, keys),
        compute_q_blocks=backward,  # the lists of query blocks per key block, which only the backward pass reads
    )


def _add_head_axis(numbers: Tensor) -> Tensor:
    return numbers[:, None].to(torch.int32).contiguous()


def visible_in_remainder(request: AttentionRequest, bounds: KeyBounds) -> Tensor | None:
    """Return where the remainder of bounds shows a key, bool broadcasting to (batch, heads, queries, keys), or None."""
    return None if bounds.remainder is None else visible_in_mask(bounds.remainder, request)


def mask_mod(bounds: KeyBounds, remainder: Tensor | None) -> MaskMod:
    """Return the mask function of partial blocks: start <= key < stop, and the remainder is True."""
    start, stop = bounds.start.to(torch.int32), bounds.stop.to(torch.int32)

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        within = (j >= _value_at(start, b, i)) & (j < _value_at(stop, b, i))
        return within if remainder is None else within & _value_at(remainder, b, h, i, j)

    return is_visible


def score_mod(request: AttentionRequest) -> ScoreMod | None:
    """Return the function that flex_attention applies to scaled scores: softcap, then bias; None without both."""
    if request.softcap is None and request.bias is None:
        return None
    softcap = None if request.softcap is None else _float_as_text(request.softcap)
    values = None if request.bias_values is None else request.bias_values.detach()
    if values is not None and values.dtype == torch.float64:
        values = values.to(working_dtype(request.shape.dtype))
    diagonal = request.shape.query_length - 1 if isinstance(request.bias, RelativeBias) else None

    def modified_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            score = float(softcap) * torch.tanh(score / float(softcap))
        if values is None:
            return score
        bias = _value_at(values, b, h, i, j) if diagonal is None else _value_at(values, b, h, j - i + diagonal)
        # The kernel multiplies scores by log2(e): a bias of the lowest float would become -inf, which hides.
        added = (score + bias).clamp(-SCORE_CLAMP_LIMIT, SCORE_CLAMP_LIMIT)
        return torch.where(bias.abs() == torch.inf, torch.where(bias < 0, bias, torch.nan), added)

    return modified_score


def _value_at(tensor: Tensor, *index: Tensor) -> Tensor:
    """Return the value of a tensor at an index, with axes of size 1 broadcast."""
    return tensor[tuple(each if size > 1 else each * 0 for each, size in zip(index, tensor.shape, strict=True))]


def _float_as_text(number: float) -> str:
    """Return a float as a string, which torch.compile treats as a constant: it may make floats graph inputs."""
    return repr(float(number))


def _call_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    scale: str,
    grouped: bool,
    by_rows: bool,
    nonfinite: Nonfinite = "as given",
) -> tuple[Tensor, Tensor]:
    """Call flex_attention for the output (batch, heads, queries, value_dim) and logsumexp (batch, heads, queries).

    `by_rows` avoids PyTorch's kernel for few queries, which supports at most one block of grouped queries.

    If non-finite numbers are "spread", every row of q that is not finite is NaN, and every key of which k or v is not
    finite is NaN and has a value of 0: its score is NaN where it is visible, and where it is hidden its weight of 0
    meets no NaN. Such a call has no gradients, since in them a weight of 0 meets the NaN of the key. If they are
    "marked", those rows and keys are 0, and each visible score of such a key is MARK. So the weights of a row that sees
    one are finite, its logsumexp shows it, and the row becomes NaN after the call, with a gradient of 0.
    """
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    if nonfinite != "as given":
        # The compiled q has the order of axes in which it is computed, and the output that of q: tokens before heads.
        tokens_first = q.transpose(1, 2)
        largest = _largest(tokens_first), _largest(k), _largest(v)
        rows, of_keys, of_values = ((each < torch.inf)[..., None] for each in largest)
        keys, in_place = of_keys & of_values, torch.nan if nonfinite == "spread" else 0.0
        q, k, v = tokens_first.where(rows, in_place).transpose(1, 2), k.where(keys, in_place), v.where(keys, 0.0)
        if nonfinite == "marked":
            score_mod = _mark_scores(score_mod, *largest[1:], heads_per_kv_head=q.shape[1] // k.shape[1])
    output, aux = flex_attention(
        q,
        k,
        v,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=float(scale),
        enable_gqa=grouped,
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} if by_rows else None,
        return_aux=AuxRequest(lse=True),
    )
    logsumexp = cast(Tensor, aux.lse)
    if nonfinite == "marked":
        is_row_bad = ~rows[..., 0].mT & (logsumexp > -torch.inf)
        is_bad = is_row_bad | ~(logsumexp <= LARGEST_UNMARKED_SCORE)
        tokens_first = output.transpose(1, 2).masked_fill(is_bad.mT[..., None], torch.nan)
        return tokens_first.transpose(1, 2), logsumexp.masked_fill(is_bad, torch.nan)
    return output, logsumexp


def _mark_scores(score_mod: ScoreMod | None, keys: Tensor, values: Tensor, *, heads_per_kv_head: int) -> ScoreMod:
    """Return a function that sets the scores of keys that are not finite to MARK, and those that `score_mod` makes so.

    The compiler of PyTorch reads the results of a reduction in such a function, but not what is computed from them.

    Args:
        score_mod: the function that is applied to the scores before, or None.
        keys: (batch, kv_heads, keys), what `_largest` returns for each row of k.
        values: (batch, kv_heads, keys), the same for v.
        heads_per_kv_head: number of query heads per head of k.
    """

    def marked_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        of_key = h // heads_per_kv_head
        finite = (keys[b, of_key, j] < torch.inf) & (values[b, of_key, j] < torch.inf)
        if score_mod is not None:
            score = score_mod(score, b, h, i, j)
            finite = (finite & (score <= LARGEST_UNMARKED_SCORE)) | (score == -torch.inf)  # a bias hides any key
        return torch.where(finite, score, MARK)

    return marked_score


def _largest(tensor: Tensor) -> Tensor:
    """Return the largest absolute value of each row of a tensor (..., dim): (...), less than inf if all are finite."""
    return tensor.detach().abs().amax(-1)


@cache
def _compiled_flex_attention() -> Callable[..., tuple[Tensor, Tensor]]:
    # With fullgraph, torch.compile raises an error instead of silently running eager code that holds queries x keys.
    return torch.compile(_call_flex_attention, fullgraph=True)


def _run_compiled_flex_attention(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Run the compiled flex_attention, and compile it for a new kind of call; see `MAX_COMPILED_CALL_KINDS`."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit

    try:
        return _compiled_flex_attention()(*tensors, **options)
    except FailOnRecompileLimitHit:
        with config.patch(recompile_limit=MAX_COMPILED_CALL_KINDS, accumulated_recompile_limit=MAX_COMPILED_CALL_KINDS):
            return _compiled_flex_attention()(*tensors, **options)


def _compiler_errors() -> tuple[type[Exception], ...]:
    """Return the error classes that PyTorch raises if its compiler fails or reaches its recompile limit."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def _compute_output_and_logsumexp(
    request: AttentionRequest,
    bounds: KeyBounds,
    flex: Callable[..., tuple[Tensor, Tensor]],
    *,
    nonfinite: Nonfinite = "as given",
) -> tuple[Tensor, Tensor]:
    return flex(
        request.q,
        request.k,
        request.v,
        score_mod=score_mod(request),
        block_mask=_cached_block_mask(request, bounds, backward=request.qkv_need_gradient),
        scale=_float_as_text(request.scale),
        grouped=request.shape.heads_per_kv_head > 1,
        by_rows=request.shape.query_length * request.shape.heads_per_kv_head > BLOCK_SIZE // 2,
        nonfinite=nonfinite,
    )


# Key bounds (compared by identity) -> (`backward`, number of keys, which bounds leave open) -> block mask.
_BLOCK_MASKS: WeakKeyDictionary[KeyBounds, dict[tuple[bool, int], BlockMask]] = WeakKeyDictionary()
# The same of bounds with a dense remainder, which a block mask holds; the layers of a model share few of them.
_DENSE_BLOCK_MASKS: PlanCache[BlockMask] = PlanCache(CACHE_BYTES, MOST_MASKS_WITH_TENSORS)


def _cached_block_mask(request: AttentionRequest, bounds: KeyBounds, *, backward: bool) -> BlockMask:
    """Return the block mask of a request, computed once per key bounds, which equal calls share."""
    if is_intercepted():
        return block_mask(request, bounds, backward=backward)
    if bounds.remainder is not None:
        return _cached_dense_block_mask(request, bounds, backward=backward)
    known, key = _BLOCK_MASKS.setdefault(bounds, {}), (backward, request.shape.key_length)
    found = known.get(key)
    if found is None:
        found = block_mask(request, bounds, backward=backward)
        if not is_captured(bounds.start.device):
            known[key] = found
    return found


def _cached_dense_block_mask(request: AttentionRequest, bounds: KeyBounds, *, backward: bool) -> BlockMask:
    """Return the block mask of bounds with a dense remainder."""
    key = (bounds, backward, request.shape.key_length)
    found = _DENSE_BLOCK_MASKS.entries.get(key)
    if found is None:
        remainder = visible_in_remainder(request, bounds)
        assert remainder is not None
        found = block_mask(request, bounds, backward=backward, remainder=remainder)
        _DENSE_BLOCK_MASKS.add(key, found, bounds, (remainder,))
    return found


def _compute_with_double_backward(
    request: AttentionRequest, bounds: KeyBounds, *, nonfinite: Nonfinite
) -> tuple[Tensor, Tensor]:
    """Compute flex_attention with second derivatives by the reference kernel."""
    if not request.qkv_need_gradient:
        return _compute_output_and_logsumexp(request, bounds, _run_compiled_flex_attention, nonfinite=nonfinite)
    inputs = (request.q, request.k, request.v, without_qkv(request), bounds, nonfinite)
    return _CompiledFlex.apply(*inputs)  # type: ignore[no-any-return, no-untyped-call]


class _CompiledFlex(torch.autograd.Function):
    """The compiled flex_attention, whose own backward pass runs only once, and has no second derivative.

    The first backward pass is the compiled one. A second one of the same call, after `retain_graph=True`, compiles
    and computes the forward pass again, and a double backward is computed by the reference kernel.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, request: AttentionRequest, bounds: KeyBounds, nonfinite: Nonfinite
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q, k, v)
        ctx.request, ctx.bounds = replace(request, sinks=None), bounds  # sinks are added after this function
        ctx.nonfinite = nonfinite
        ctx.compiled = _compute_in_graph_of_its_own(ctx.request, bounds, (q, k, v), nonfinite)
        ctx.set_materialize_grads(False)
        output, logsumexp = ctx.compiled[1]
        return output.detach(), logsumexp.detach()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        if torch.is_grad_enabled():
            request = replace(ctx.request, q=q, k=k, v=v)
            found = differentiable_gradients("flex", request, ctx.bounds, grad_output, grad_logsumexp)[:3]
            return *found, None, None, None
        leaves, results = ctx.compiled or _compute_in_graph_of_its_own(
            ctx.request, ctx.bounds, (q, k, v), ctx.nonfinite
        )
        ctx.compiled = None
        pairs = [pair for pair in zip(results, (grad_output, grad_logsumexp), strict=True) if pair[1] is not None]
        inputs = [leaf for leaf, needed in zip(leaves, ctx.needs_input_grad, strict=False) if needed]
        grads = iter(torch.autograd.grad([pair[0] for pair in pairs], inputs, [pair[1] for pair in pairs]))
        return *(next(grads) if needed else None for needed in ctx.needs_input_grad[:3]), None, None, None


def _compute_in_graph_of_its_own(
    request: AttentionRequest, bounds: KeyBounds, tensors: tuple[Tensor, Tensor, Tensor], nonfinite: Nonfinite
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Compute flex_attention in an autograd graph of its own; return its leaves (q, k, v), output and logsumexp."""
    with torch.enable_grad():
        leaves = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors)
        inside = replace(request, q=leaves[0], k=leaves[1], v=leaves[2])
        return leaves, _compute_output_and_logsumexp(inside, bounds, _run_compiled_flex_attention, nonfinite=nonfinite)


@constant_in_graphs
def _missing_flex_requirement(device: torch.device) -> str | None:
    """Return which requirement of the compiled flex_attention is missing, in one sentence, or None."""
    if _is_triton_missing():
        return "PyTorch compiles flex_attention with Triton, which is not installed"
    if torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a device of compute capability 7.0"
    return None


@cache
def _is_triton_missing() -> bool:
    return find_spec("triton") is None


@constant_in_graphs  # while a compiler traces a transform, that transform is active
def _is_transformed() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None  # noqa: SLF001 - torch has no public name for it
