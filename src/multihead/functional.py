"""Attention as functions: check the arguments, plan the mask, choose and run a kernel, inform listeners."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Never

import torch
from torch import Tensor

from multihead.errors import ArgumentError, DtypeError, ShapeError
from multihead.errors.arguments import (
    FUNCTION_REPLACEMENTS,
    check_fraction,
    check_scale,
    check_slice,
    raise_unknown_keywords,
)
from multihead.kernels import head_changes, sequence_split
from multihead.kernels.batch_dims import BatchDims
from multihead.kernels.call import (
    AttentionArguments,
    AttentionCall,
    AttentionRequest,
    AttentionResult,
    CallOrigin,
    Surroundings,
    find_surroundings,
    publish,
)
from multihead.kernels.choose import KERNELS, plan_call
from multihead.kernels.dense_tile import without_autocast, working_dtype
from multihead.kernels.explanation import Explanation, explain_request
from multihead.kernels.native import short_call
from multihead.kernels.nonfinite import make_rows_nan, may_overflow, replace_nonfinite
from multihead.kernels.quantised import Int8Scales
from multihead.kernels.sequence_split import reject_split_sequence
from multihead.kernels.slow_paths import warn_of_slow_path
from multihead.kernels.triton.statistics import add_statistics
from multihead.masks import Full, Mask
from multihead.masks.base import check_is_mask
from multihead.masks.positions import CallSize
from multihead.probes import Probe, ProbeContext
from multihead.probes import statistics as measuring
from multihead.probes import tile as tiles
from multihead.probes.statistics import NO_CONTEXT
from multihead.scores.bias import Bias, check_bias_fits
from multihead.scores.terms import check_sinks_fit, check_softcap
from multihead.tensors.shapes import MAX_POSITION, AttentionShape, resolve_query_start

_FULL = Full()
_OVERFLOWS = (
    "Entries of q, k or v are so large that scores may overflow; the reference kernel runs and holds queries x keys.",
    "Scale them down, or hide padding by lengths= instead of large numbers.",
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Multi-head attention: output_i = sum_j softmax_j(scale * q_i . k_j) v_j over the keys that query i may see.

    The output of a query that sees no key is 0. A hidden key does not affect a query's output, even if it contains NaN.

    Args:
        q: (batch, heads, queries, head_dim); batch may be any number of leading dimensions, or none.
        k: (batch, kv_heads, keys, head_dim); heads is a multiple of kv_heads.
        v: (batch, kv_heads, keys, value_dim).
        mask: which keys each query may see; for a mask, several leading dimensions are flattened into one batch.
        bias: added to the scores, a tensor broadcasting to (batch, heads, queries, keys), or `scores.RelativeBias` if
            it depends on the distance only; -inf hides a key.
        softcap: c of c * tanh(scores / c), before the bias.
        sinks: (heads,), a logit per head that takes part in the softmax and has no value.
        scale: factor of q . k, 1 / sqrt(head_dim) if None.
        dropout: fraction of the attention weights dropped, 0 to 1.
        query_start: position of the first query among the keys: an int, a tensor with one per sample, or "end".
        kernel: the name of the kernel to run; None chooses the fastest kernel that supports the call.
        unknown: must be empty; an argument name of another library, such as is_causal, raises an error with its
            replacement.

    Returns:
        (batch, heads, queries, value_dim), in the dtype of q.

    Raises:
        ShapeError, DtypeError, MaskError, ArgumentError: an argument does not fit; raised before anything is computed.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762, equation 1.

    >>> from multihead import masks
    >>> q, k, v = torch.randn(3, 2, 8, 5, 16).unbind()
    >>> attention(q, k, v, mask=masks.Causal()).shape
    torch.Size([2, 8, 5, 16])
    """
    if unknown:
        raise_unknown_keywords(attention, unknown, FUNCTION_REPLACEMENTS)
    options, around = (mask, bias, softcap, sinks, scale, dropout, query_start), find_surroundings()
    if kernel is not None:
        return _output_by_plan(q, k, v, options, around, kernel)[0]
    return short_call.attend(q, k, v, options, around, _output_by_plan, None)[0]


def attention_with_logsumexp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Compute attention and the logsumexp of each query's scores, both differentiable.

    The arguments are those of `attention`.

    Returns:
        the output (batch, heads, queries, value_dim), and the logsumexp (batch, heads, queries) in nats,
        float32 (float64 for float64), -inf where a query sees no key.

    >>> q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    >>> output, logsumexp = attention_with_logsumexp(q, k, v)
    >>> scores = q @ k.mT / 8**0.5
    >>> torch.allclose((scores - logsumexp[..., None]).exp() @ v, output, atol=1e-5)
    True
    """
    if unknown:
        raise_unknown_keywords(attention_with_logsumexp, unknown, FUNCTION_REPLACEMENTS)
    options, around = (mask, bias, softcap, sinks, scale, dropout, query_start), find_surroundings()
    if kernel is not None:
        return _attend_by_plan(q, k, v, options, around, kernel)
    return short_call.attend(q, k, v, options, around, _attend_by_plan, None, logsumexp=True)[:2]  # type: ignore[return-value]


def _output_by_plan(
    q: Tensor, k: Tensor, v: Tensor | None, options: AttentionArguments, around: Surroundings, kernel: str | None
) -> tuple[Tensor]:
    """Check and plan a call of `attention`, and run the kernel that is named or chosen: the output."""
    request, dims = _request_of_arguments(q, k, v, options, around)
    output = attend(request, kernel=kernel).output
    return (output if dims is None else dims.restore(output),)


def _attend_by_plan(
    q: Tensor, k: Tensor, v: Tensor | None, options: AttentionArguments, around: Surroundings, kernel: str | None
) -> tuple[Tensor, Tensor]:
    """Check and plan a call of `attention_with_logsumexp`, and run its kernel: output and logsumexp."""
    request, dims = _request_of_arguments(q, k, v, options, around)
    result = attend(request, kernel=kernel)
    if dims is None:
        return result.output, result.logsumexp
    return dims.restore(result.output), dims.restore(result.logsumexp)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    query_start: int | Tensor | str | None = None,
    logsumexp: Tensor | None = None,
    heads: int | Sequence[int] | slice = slice(None),
    queries: slice = slice(None),
    keys: slice = slice(None),
    **unknown: Never,
) -> Tensor:
    """Compute one tile of the attention map exactly, in memory proportional to the tile.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        mask: see `attention`.
        bias: see `attention`.
        softcap: see `attention`.
        sinks: see `attention`.
        scale: see `attention`.
        query_start: see `attention`.
        logsumexp: (batch, heads, queries) of the whole call, computed first if None. It may cover more keys than k has.
        heads: the heads of the tile.
        queries: the rows of the tile.
        keys: the columns of the tile.
        unknown: must be empty; an argument name of another library, such as is_causal, raises an error with its
            replacement.

    Returns:
        (batch, heads, queries, keys) of the tile, float32 (float64 for float64); 0 where hidden.

    Source: p_ij = exp(s_ij - L_i), with L the logsumexp over all keys; s and L in float64.

    >>> q, k = torch.randn(2, 1, 8, 100, 16).unbind()
    >>> tile = attention_weights(q, k, heads=3, queries=slice(0, 10), keys=slice(50, 100))
    >>> tile.shape
    torch.Size([1, 1, 10, 50])
    """
    reject_split_sequence("attention_weights", "Compute them from all tokens, outside of context_parallel.")
    check_slice("queries", queries)
    check_slice("keys", keys)
    if unknown:
        raise_unknown_keywords(attention_weights, unknown, FUNCTION_REPLACEMENTS)
    options = (mask, bias, softcap, sinks, scale, 0.0, query_start)
    request, dims = _request_of_arguments(q, k, None, options, find_surroundings())
    first = measuring.run_first_pass(request) if logsumexp is None else None
    known = _check_or_compute_logsumexp(request, logsumexp, dims) if first is None else first.logsumexp
    tile = tiles.tile(request, known, heads=heads, queries=queries, keys=keys)
    return tile if dims is None else dims.restore(tile)


def statistics(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    query_start: int | Tensor | str | None = None,
    logsumexp: Tensor | None = None,
    v: Tensor | None = None,
    probes: str | Probe | Iterable[str | Probe] | None = None,
    context: ProbeContext = NO_CONTEXT,
    **unknown: Never,
) -> dict[str, Tensor]:
    """Measure every head exactly, in memory linear in the length.

    Args:
        q: (batch, heads, queries, head_dim).
        k: (batch, kv_heads, keys, head_dim).
        mask: see `attention`.
        bias: see `attention`.
        softcap: see `attention`.
        sinks: see `attention`.
        scale: see `attention`.
        query_start: see `attention`.
        logsumexp: (batch, heads, queries) of the whole call, computed first if None.
        v: (batch, kv_heads, keys, value_dim), for `contribution` and `output_norm`.
        probes: one or several names of statistics or probes made by functions of `multihead.probes`; None = each
            statistic of `multihead.probes.DEFAULT` whose inputs are given.
        context: inputs of some statistics besides q and k, such as which keys are special.
        unknown: must be empty; an argument name of another library, such as is_causal, raises an error with its
            replacement.

    Returns:
        a dict from name to tensor, (batch, heads, queries) each; `received` and `coverage` are
        (batch, heads, keys), `pooled_map` (batch, heads, rows, columns). float32 (float64 for float64), `largest_key`
        int64.

    Raises:
        ProbeError: a name is unknown, or an input of a statistic is missing, such as the keys of `special_mass`.
        ArgumentError: torch.jit.trace, make_fx or FakeTensorMode runs this code.

    >>> q, k = torch.zeros(2, 1, 2, 4, 8).unbind()
    >>> statistics(q, k, probes=("effective_keys",))["effective_keys"][0, 0]
    tensor([4., 4., 4., 4.])
    """
    if unknown:
        raise_unknown_keywords(statistics, unknown, FUNCTION_REPLACEMENTS)
    options, around = (mask, bias, softcap, sinks, scale, 0.0, query_start), find_surroundings()
    if probes is None and logsumexp is None and v is None and context is NO_CONTEXT:
        finish = measuring.default_statistics
        return short_call.measure(q, k, options, around, finish, _measure_by_plan, (None, None, context))
    return _measure_by_plan(q, k, v, options, around, (probes, logsumexp, context))


def _measure_by_plan(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    options: AttentionArguments,
    around: Surroundings,
    wanted: tuple[str | Probe | Iterable[str | Probe] | None, Tensor | None, ProbeContext],
) -> dict[str, Tensor]:
    """Check and plan a call of `statistics`, whose arguments probes, logsumexp and context are `wanted`; measure it."""
    probes, logsumexp, context = wanted
    reject_split_sequence("statistics", "Compute them from all tokens, outside of context_parallel.")
    if around.traced and not around.transformed and not torch.compiler.is_compiling():
        raise ArgumentError(
            "mh.statistics reads values, and torch.jit.trace, make_fx or FakeTensorMode runs this code, where they "
            "cannot be read.",
            "Call it outside of them, on the tensors themselves.",
        )
    request, dims = _request_of_arguments(q, k, v, options, around)
    has_values = v is not None
    chosen = measuring.choose_probes(probes, request, context, has_values=has_values)
    known = None if logsumexp is None else _check_or_compute_logsumexp(request, logsumexp, dims)
    found = measure_request(request, chosen, context, logsumexp=known, has_values=has_values)
    return found if dims is None else {name: dims.restore(value) for name, value in found.items()}


def measure_request(
    request: AttentionRequest,
    probes: Sequence[Probe],
    context: ProbeContext,
    *,
    logsumexp: Tensor | None = None,
    has_values: bool = False,
) -> dict[str, Tensor]:
    """Compute probes, whose inputs are all given, of a checked request: name -> (batch, heads, queries)."""
    first = None if logsumexp is not None else measuring.run_first_pass(request, probes, context, has_values=has_values)
    if first is None:
        known = _check_or_compute_logsumexp(request, None, None) if logsumexp is None else logsumexp
        first = measuring.FirstPassResult(known, {}, all_rows_regular=False)
    known, parts, all_rows_regular, statistics = first
    return measuring.complete_statistics(
        request, known, probes, context, parts=parts, all_rows_regular=all_rows_regular, statistics=statistics
    )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    kernel: str | None = None,
    **unknown: Never,
) -> Explanation:
    """Explain a call without computing it: its kernel, why other kernels refuse, the fraction skipped and the memory.

    The arguments are those of `attention`.

    >>> from multihead import masks
    >>> q = k = v = torch.zeros(1, 8, 1000, 64)
    >>> print(explain(q, k, v, mask=masks.Lengths((256,)), kernel="sdpa"))
    kernel   sdpa
    skipped  74.4% of the score matrix; its intervals hide 74.4%
    memory   about 2.0 MiB besides q, k and v
    """
    if unknown:
        raise_unknown_keywords(explain, unknown, FUNCTION_REPLACEMENTS)
    options = (mask, bias, softcap, sinks, scale, dropout, query_start)
    request, _ = _request_of_arguments(q, k, v, options, find_surroundings())
    return explain_request(request, kernel=kernel)


def _request_of_arguments(
    q: Tensor, k: Tensor, v: Tensor | None, options: AttentionArguments, around: Surroundings
) -> tuple[AttentionRequest, BatchDims | None]:
    """Build the request of a public function's call, with leading dimensions flattened to one batch.

    Args:
        q: see `attention`.
        k: see `attention`.
        v: see `attention`; None if the function takes no values.
        options: mask, bias, softcap, sinks, scale, dropout and query_start.
        around: what runs around the call.

    Returns:
        the request, and the leading dimensions to restore, None if q has exactly one batch dimension.
    """
    dims = None if isinstance(q, Tensor) and q.dim() == 4 else BatchDims.from_query(q)
    if dims is not None:
        q, k, v = dims.flatten("q", q), dims.flatten("k", k), None if v is None else dims.flatten("v", v)
        mask, bias, softcap, sinks, scale, dropout, start = options
        options = (mask, dims.flatten_bias(bias), softcap, sinks, scale, dropout, dims.flatten_query_start(start))
    return request_of(q, k, k if v is None else v, *options, around), dims


def request_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask = _FULL,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    query_start: int | Tensor | str | None = None,
    around: Surroundings | None = None,
    *,
    more_keys_later: bool = False,
    mask_fits: bool = False,
    origin: CallOrigin | None = None,
    scales: Int8Scales | None = None,
) -> AttentionRequest:
    """Build a request: check the arguments of `attention` and fill in missing ones.

    Args:
        q: see `attention`.
        k: see `attention`.
        v: see `attention`.
        mask: see `attention`.
        bias: see `attention`.
        softcap: see `attention`.
        sinks: see `attention`.
        scale: see `attention`.
        dropout: see `attention`.
        query_start: see `attention`.
        around: what runs around the call, if the caller has found it already.
        more_keys_later: whether later calls add keys, as with a cache, so that the mask may be larger than the call.
        mask_fits: whether the mask is known to fit the call.
        origin: see `AttentionRequest`.
        scales: see `AttentionRequest`.
    """
    shape = AttentionShape.from_tensors(q, k, v) if scales is None else _shape_of_int8_call(q, k, v)
    if not isinstance(mask, Mask):
        check_is_mask(mask)
    if dropout != 0.0 or type(dropout) is not float:
        check_fraction("dropout", dropout)
    if scale is None:
        scale = shape.head_dim**-0.5
    else:
        check_scale(scale)
    sequence = sequence_split.active_split
    whole = shape if sequence is None else sequence.whole_shape(shape)
    if bias is not None:
        check_bias_fits(bias, whole)
    if softcap is not None:
        check_softcap(softcap)
    if sinks is not None:
        check_sinks_fit(sinks, shape)
    queries, keys = whole.query_length, whole.key_length
    if not (mask_fits or mask.hides_nothing):
        mask.check_fits(CallSize(whole.batch, shape.num_heads, queries, keys, more_keys_later))
    if query_start is None and (not mask.uses_positions or queries == keys):
        start: int | Tensor = 0
    elif type(query_start) is int and 0 <= query_start <= MAX_POSITION:
        start = query_start
    else:
        start = resolve_query_start(query_start, q, queries, keys, uses_positions=mask.uses_positions)
    wanted: frozenset[str] = frozenset()  # filled in by `attend` if there are listeners
    if around is None:
        around = find_surroundings()
    terms = (bias, softcap, sinks, dropout, wanted, origin, scales)
    return AttentionRequest(q, k, v, shape, mask, scale, start, *terms, None, around)


def _shape_of_int8_call(q: Tensor, k: Tensor, v: Tensor) -> AttentionShape:
    """Return the shape of a call whose k and v are int8, with the dtype of q."""
    return AttentionShape.from_tensors(q, q.new_empty(()).expand(k.shape), q.new_empty(()).expand(v.shape))


def attend(request: AttentionRequest, *, kernel: str | None = None, published: bool = True) -> AttentionResult:
    """Compute a checked request.

    Args:
        request: the checked request of the call.
        kernel: the name of the kernel to run; None chooses one.
        published: whether active changes of heads apply to the call, and listeners receive it.
    """
    sequence = sequence_split.active_split
    if sequence is not None:
        if head_changes.active_changes:
            head_changes.reject_split_call(request)
        return sequence.attend(request, kernel=kernel)
    receivers = request.surroundings.listeners if published else ()
    if receivers:
        request = request.as_listeners_receive_it()
    elif published and head_changes.active_changes and (output := head_changes.replace_attention(request)) is not None:
        return AttentionResult(output, output.new_zeros(output.shape[:3], dtype=torch.float32))
    bounds, chosen = plan_call(request, kernel=kernel)
    if request.scales is not None and not chosen.reads_int8(request):
        request = request.with_dequantised_keys()
    if chosen.HANDLES_NONFINITE:
        attended = chosen.attend(request, bounds)
    else:
        with without_autocast(request.shape.device):
            cleaned, bad_rows = replace_nonfinite(request, bounds)
            if cleaned is not request and chosen is not KERNELS["reference"] and may_overflow(cleaned):
                warn_of_slow_path(*_OVERFLOWS)
                chosen = KERNELS["reference"]
            attended = chosen.attend(cleaned, bounds)
            if bad_rows is not None:
                attended = make_rows_nan(attended, bad_rows)
    if published and head_changes.active_changes:
        output, factors = head_changes.change_output(request, attended.output)
        attended = replace(attended, output=output, head_factors=factors)
    if receivers:
        request = request.with_dequantised_keys()
        if request.shape.device.type == "cuda":
            attended = add_statistics(request, bounds, attended)
        publish(AttentionCall(request, attended), receivers)
    return attended


def _check_or_compute_logsumexp(request: AttentionRequest, known: Tensor | None, dims: BatchDims | None) -> Tensor:
    """Check the caller's logsumexp (batch, heads, queries); if it is None, compute it without informing listeners."""
    shape = request.shape
    if known is None:
        with torch.no_grad():
            return attend(request, published=False).logsumexp
    if not isinstance(known, Tensor):
        raise DtypeError(f"logsumexp is a {type(known).__name__}.", "Give a tensor (batch, heads, queries).")
    if dims is not None:
        known = dims.flatten("logsumexp", known)
    if tuple(known.shape) != (shape.batch, shape.num_heads, shape.query_length):
        raise ShapeError(
            f"logsumexp has shape {tuple(known.shape)}.",
            f"Give (batch, heads, queries) = {(shape.batch, shape.num_heads, shape.query_length)}.",
        )
    return known.detach().to(working_dtype(shape.dtype)).resolve_neg()
